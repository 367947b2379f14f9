"""SAGA in the lab: what its clients tell, and what the log of a run keeps of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from simulator_small_runs import SmallRun
from simulator_small_workload import SmallLoop, small_workload, turns
from sojourn_server.simulator.client_hints import ClientHints, ClientHistory
from sojourn_server.simulator.run_log import TurnLog

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def played(policy: str, loop: SmallLoop) -> list[TurnLog]:
    """The turns of a run in which contexts are three times as large as the pool."""
    log = SmallRun(policy, loop).log
    assert log.hook_failures == log.refused_hints == 0
    return turns(log)


ABLATIONS = Path(__file__).parents[2] / "benchmarks" / "saga_ablations"


@pytest.fixture(scope="module")
def loop() -> SmallLoop:
    return small_workload(seed=3, programs=60, turns=8)


def test_hints_tell_at_once_patterns_after_thirty_programs_and_the_cold_never(loop: SmallLoop):
    policies = ("saga-paper", f"{ABLATIONS}/saga-inferred.toml", f"{ABLATIONS}/saga-cold.toml")
    foreseen = {policy: [turn.goes_on for turn in played(policy, loop)] for policy in policies}
    hinted, inferred, cold = (sum(p is not None for p in found) for found in foreseen.values())
    assert hinted > inferred > 20
    assert cold == 0
    for found in foreseen.values():
        assert all(p is None or 0.0 <= p <= 1.0 for p in found)


def test_what_was_evicted_is_told_with_its_evictor_and_its_score(loop: SmallLoop):
    found = [turn for turn in played("saga", loop) if turn.evicted_score is not None]
    assert len(found) > 10
    assert all(turn.evictor not in (None, turn.program_id) for turn in found if turn.evictor)
    assert all(len(turn.evicted_score or ()) == 2 for turn in found)
    assert not [
        turn for turn in played(f"{ABLATIONS}/saga-no-eviction.toml", loop) if turn.evicted_score is not None
    ]


def test_clients_know_of_programs_that_have_ended_only():
    history = ClientHistory()
    client = ClientHints("p", agent_type="agent", history=history)
    assert client.context()["sojourn"] == {"agent_type": "agent", "node": "agent"}
    for _ in range(10):
        history.observe_end("agent", 4)
    assert client.context()["sojourn"]["expected_steps_left"] == 2.0, "after its second turn of four"
    assert ClientHints("q").context() == {"step_id": "1"}


# -- lies cost little: hardly more is computed again than under LRU


SEEDS = range(6)
MOST = 1.05
"""Times the tokens that LRU computes again."""

Liar = Callable[[random.Random, ClientHints], dict[str, Any]]
LIARS: dict[str, Liar] = {
    "anything": lambda rng, _: {"expected_steps_left": rng.choice((0.0, 0.1, 3.0, 1e9))},
    "always at its end": lambda rng, _: {"expected_steps_left": 0.0},
    "never at its end": lambda rng, _: {"expected_steps_left": 1e12},
    "another type each turn": lambda rng, _: {
        "agent_type": f"t{rng.randrange(1000)}", "expected_steps_left": rng.choice((0.0, 50.0)),
    },
    "half of them lie": lambda rng, client: {
        "expected_steps_left": 0.0 if sum(map(ord, client._program_id)) % 2 else 20.0
    },
}  # fmt: skip


def again(policy: str) -> int:
    """Tokens computed again, over all seeds."""
    loops = (small_workload(seed=seed, programs=60, turns=8) for seed in SEEDS)
    return sum(turn.regenerated_tokens for loop in loops for turn in played(policy, loop))


@pytest.fixture(scope="module")
def lru() -> int:
    """What LRU computes again that knows as much of the ends of programs."""
    return again("known-ends")


@pytest.mark.parametrize("policy", ["saga", "saga-paper"])
@pytest.mark.parametrize("name", LIARS)
def test_lies_cost_no_more_than_a_twentieth(
    name: str, policy: str, lru: int, monkeypatch: pytest.MonkeyPatch
):
    rng = random.Random(name)
    told = ClientHints.context

    def lies(self: ClientHints) -> dict[str, Any]:
        context = told(self)
        context["sojourn"] = {"agent_type": "agent", **LIARS[name](rng, self)}
        return context

    monkeypatch.setattr(ClientHints, "context", lies)
    assert again(policy) <= MOST * lru
