"""Running requests that yield to another program's: what the engine does, its bounds, and the tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_vllm_kv_offload_connector_random import Device

SHAPE = {
    "blocks": 33,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
}
"""Room for 128 tokens."""


def token(request: Any) -> int:
    """An output that depends on all tokens before."""
    return 100 + hash(tuple(request.all_token_ids)) % 1000


class Paced:
    """An engine of which every step takes a tenth of a second."""

    def __init__(self, engine: Any, clock: Any) -> None:
        self.engine, self.clock = engine, clock
        engine.tokens = token
        self.device = Device(engine) if engine.options.host_blocks else None
        self.outputs: dict[str, Any] = {}

    def add(self, name: str, tokens: int, output: int) -> Any:
        """A request of the program of the same name."""
        start = 1000 * sum(map(ord, name))
        request = self.engine.add(name, range(start, start + tokens), max_tokens=output, program_id=name)
        self.outputs[name] = request.output_token_ids
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.device is not None:
                self.device.step()
            else:
                self.engine.step()
            self.clock.now += 0.1

    def running(self) -> list[str]:
        return [request.request_id for request in self.engine.scheduler.running]

    def asked(self, to: str, *programs: str) -> list[str]:
        told = self.engine.ask("yield", to=to, programs=list(programs))
        return [one["outcome"] for one in told["outcomes"]]

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.scheduler.has_unfinished_requests():
                return
            self.steps(1)
        raise AssertionError("a request never ends")


@pytest.fixture(params=["recomputed", "host"])
def paced(request: pytest.FixtureRequest, make_engine: Any, clock: Any) -> Paced:
    tiers = {"host_blocks": 128, "own_tiers": True} if request.param == "host" else {}
    return Paced(make_engine("saga", **SHAPE, **tiers), clock)


def test_a_running_request_yields_and_its_tokens_stay_the_same(
    paced: Paced, make_engine: Any, clock: Any
) -> None:
    paced.add("calm", 64, 40)
    paced.steps(12)
    assert paced.asked("urgent", "calm") == ["applied"], "before the urgent request has come"
    paced.add("urgent", 80, 8)
    paced.steps(4)
    assert paced.running() == ["urgent"]
    begun = len(paced.outputs["calm"])
    paced.steps(4)
    assert len(paced.outputs["calm"]) == begun, "it is held"
    paced.finish()
    [turn] = paced.engine.ask("program", program_id="calm")["ledger"]
    # With host memory all full blocks come back from there: only the last, incomplete one is computed again.
    assert paced.device is None or turn["recomputed_after_preemption_tokens"] < 8
    alone = Paced(make_engine(None, **SHAPE | {"blocks": 200}), clock)
    for name, tokens, output in (("calm", 64, 40), ("urgent", 80, 8)):
        alone.add(name, tokens, output)
        alone.finish()
    assert {name: list(tokens) for name, tokens in paced.outputs.items()} == {
        name: list(tokens) for name, tokens in alone.outputs.items()
    }


def test_a_request_that_fits_lets_nobody_yield(paced: Paced) -> None:
    paced.add("calm", 32, 40)
    paced.steps(12)
    assert paced.asked("urgent", "calm") == ["applied"]
    paced.add("urgent", 32, 20)
    paced.steps(8)
    assert sorted(paced.running()) == ["calm", "urgent"]
    assert paced.engine.scheduler.requests["calm"].num_preemptions == 0


def test_the_first_of_the_running_yields_and_the_others_lose_no_step(paced: Paced) -> None:
    calm = paced.add("calm", 24, 60)
    paced.add("other", 40, 60)
    paced.steps(12)
    assert paced.running() == ["calm", "other"]
    paced.add("urgent", 80, 8)
    paced.asked("urgent", "calm")
    while not calm.num_preemptions:
        begun = len(paced.outputs["other"])
        paced.steps(1)
        assert len(paced.outputs["other"]) == begun + 1
    assert paced.running() == ["other"]


def test_nobody_yields_twice_in_a_row_more_than_twice_or_back(paced: Paced) -> None:
    calm = paced.add("calm", 64, 60)
    urgent = []
    for number in range(3):
        paced.steps(12)
        assert paced.running() == ["calm"]
        name = f"u{number}"
        urgent.append(paced.add(name, 80, 30))
        assert paced.asked(name, "calm") == ["applied"]
        paced.steps(5)
        if number == 2:
            assert paced.running() == ["calm"], "not a third time"
            break
        assert paced.running() == [name]
        assert paced.asked("calm", name) == ["applied"]
        paced.steps(12)
        assert paced.running() == [name], "not back"
        while paced.running() != ["calm"]:
            paced.steps(1)
    paced.finish()
    assert calm.num_preemptions == 2
    assert [one.num_preemptions for one in urgent] == [0, 0, 0]


def test_the_hold_ends_if_the_urgent_request_leaves(paced: Paced) -> None:
    calm = paced.add("calm", 64, 40)
    paced.steps(12)
    paced.add("urgent", 80, 8)
    paced.asked("urgent", "calm")
    paced.steps(2)
    assert (calm.num_preemptions, paced.running()) == (1, [])
    paced.engine.abort("urgent")
    paced.steps(10)
    assert paced.running() == ["calm"]
    paced.finish()


def test_a_hold_lasts_half_a_minute_at_most(paced: Paced) -> None:
    calm = paced.add("calm", 24, 40)
    paced.add("other", 40, 60)
    paced.steps(12)
    assert sorted(paced.running()) == ["calm", "other"]
    paced.add("urgent", 80, 8)
    paced.asked("urgent", "calm")
    paced.steps(4)
    assert (calm.num_preemptions, paced.running()) == (1, ["other"]), "urgent has no room beside it"
    paced.clock.now += 28.0
    paced.steps(1)
    assert paced.running() == ["other"]
    paced.clock.now += 2.0
    paced.steps(8)
    assert sorted(paced.running()) == ["calm", "other"]
    paced.finish()


def test_orders_are_bounded_and_false_ones_change_nothing(paced: Paced) -> None:
    paced.add("calm", 64, 40)
    paced.steps(12)
    assert paced.asked("calm", "calm") == ["rejected"]
    assert paced.asked("nobody", "nobody else") == ["missing"]
    told = [paced.asked(f"never comes {number}", "calm") for number in range(300)]
    assert told[0] == ["applied"]
    assert told[-1] == ["rejected"]
    paced.steps(60)
    assert paced.asked("late", "calm") == ["missing" if not paced.running() else "applied"]
    json.loads(paced.engine.scheduler.sojourn_call("yield", '{"to": 3, "programs": [7, null]}'))
    paced.finish()


def test_nobody_yields_to_a_request_that_has_its_blocks_and_waits_for_its_kv(
    make_engine: Any, clock: Any
) -> None:
    paced = Paced(make_engine("saga", **SHAPE, host_blocks=128, own_tiers=True), clock)
    assert paced.device is not None
    paced.add("urgent", 40, 4)
    paced.finish()
    first = list(paced.engine.scheduler.sojourn.program_scheduler.context("urgent"))
    paced.add("other", 112, 8)
    paced.finish()
    assert paced.engine.scheduler.sojourn._groups.cached_prefix(first).hashes < len(first) // 2
    paced.engine.tell({"seq": 1, "type": "program_end", "program_id": "other"})
    paced.add("calm", 32, 60)
    paced.steps(12)
    assert paced.running() == ["calm"]
    paced.device.draw.randint = lambda low, high: 6
    start = 1000 * sum(map(ord, "urgent"))
    request = paced.engine.add("u2", range(start, start + 40), max_tokens=4, program_id="urgent")
    assert paced.asked("urgent", "calm") == ["applied"]
    waited = 0
    while request.num_output_tokens == 0:
        paced.steps(1)
        waited += request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert waited > 3, "else it shows nothing"
    assert paced.engine.scheduler.requests["calm"].num_preemptions == 0
    paced.finish()
