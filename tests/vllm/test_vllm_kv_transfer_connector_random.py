"""Random lives of vLLM's scheduler as an engine of a pair: what is read, stored and pushed was once computed
under its key, with steps planned one by one and ahead."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from planned_steps import Step, StepQueue, Work
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
from sojourn_server.kv_transfer.transfer_jobs import TransferResults
from sojourn_server.simulator.simulated_engine import STOP_TOKEN
from sojourn_server.vllm.kv_connector import StepReport
from turns import add_request

BLOCK = 4
PER_FULL = 2
FULL_TOKENS = BLOCK * PER_FULL
MOST_STEPS = 4
"""Steps until a result is known, or a fill or a push has ended, at most."""
STOPS = 0.02
"""Probability that a token is a stop token: an end that nobody can plan."""
Content = tuple[int, ...]
"""What a block has: all tokens up to its end; ``()``: nothing that anybody may read."""


@dataclass
class Later:
    """Something that ends after some more steps."""

    steps: int
    name: Any
    content: Any = None


class Worker(StepQueue):
    """The worker's half: blocks of the device, the store and the peer, as contents."""

    def __init__(self, engine: Any, failing: float) -> None:
        super().__init__(engine, failing)
        self.blocks: dict[int, Content] = {}
        self.store: dict[bytes, Content] = {}
        self.contexts: dict[str, Content] = {}
        """Context → tokens of the prompt whose KV a peer has sent."""
        self.asks: dict[int, list[Content]] = {}
        self.answers: list[Later] = []
        self.fills: list[Later] = []
        self.held: list[Later] = []
        self.host: dict[int, Content] = {}
        """Slot of host memory → content."""
        self.host_loads: list[Later] = []
        engine.tokens = lambda request: (
            STOP_TOKEN if self.draw.random() < STOPS else self.draw.randrange(9, 30_000)
        )

    def _carry_out(self, step: Step) -> None:
        jobs, results = step.jobs, TransferResults()
        host = getattr(step.planned.kv_connector_metadata, "host", None)
        received, not_loaded = self._move_host(host.jobs) if host is not None else (set(), set())
        assert not (jobs.streams and self.engine.options.asynchronous)
        for ask in jobs.ends:
            self.asks.pop(ask, None)
        for fetch in jobs.fetches:
            (self._begin_fetch if fetch.keys else self._begin_expect)(fetch)
        not_filled = set(jobs.not_filled)
        for stream in jobs.streams:
            not_filled |= self._fill(stream.skip, stream.block_ids, self.asks.pop(stream.ask))
        for work in step.work.values():
            self._compute(work, not_filled)
        for push in jobs.pushes:
            self._push(push, not_filled)
        refused = self._save(jobs.saves, not_filled, set(jobs.holds))
        for request, place in refused.items():
            if request not in jobs.holds:
                results.stored[request] = place
        for take in jobs.fills:
            for block in take.block_ids:
                self.blocks[block] = ()  # half written from now on
            self.fills.append(Later(self._soon(), take, self.asks.pop(take.ask, [])))
        self.held += [Later(self._soon(), request) for request in jobs.holds]
        stored = self._store_host(host.jobs) if host is not None else None
        for fill in self._ended(self.fills):
            not_filled |= self._fill(fill.name.skip, fill.name.block_ids, fill.content)
            received.add(fill.name.request)
        for answer in self._ended(self.answers):
            if answer.name in self.asks:
                results.ready[answer.name] = len(self.asks[answer.name])
        self._answer(
            step,
            finished_sending={each.name for each in self._ended(self.held)},
            finished_recving=received,
            invalid_block_ids=not_filled | not_loaded,
            kv_connector_worker_meta=StepReport(results, host=None if stored is None else StepReport(stored)),
        )

    def _move_host(self, jobs: Any) -> tuple[set[str], set[int]]:
        """Carry out the copies before a step's forward pass. Returns (loads that end, blocks not filled)."""
        for copies in (*jobs.awaited.values(), jobs.saves):
            for copy in copies:
                self.host[copy.slot] = self.blocks.get(copy.block_id, ())
        for name, copies in jobs.loads.items():
            content = [(copy.block_id, self.host[copy.slot]) for copy in copies]
            for block, _ in content:
                self.blocks[block] = ()  # half written from now on
            self.host_loads.append(Later(self._soon(), name, content))
        received, not_filled = set(jobs.rejected), {each for ids in jobs.rejected.values() for each in ids}
        if jobs.settles:
            for load in self.host_loads:
                load.steps = 0
        for load in self._ended(self.host_loads):
            received.add(load.name)
            for block, content in load.content:
                if self.draw.random() < self.failing:
                    not_filled.add(block)
                    continue
                self.blocks[block] = content
                self.counts["loaded from host"] += 1
        return received, not_filled

    def _store_host(self, jobs: Any) -> Any:
        for copies in jobs.stores.values():
            for copy in copies:
                self.host[copy.slot] = self.blocks.get(copy.block_id, ())
        return OffloadResults(stored=dict.fromkeys(jobs.stores, CopyResult.MOVED))

    def _soon(self) -> int:
        return self.draw.randint(0, MOST_STEPS)

    def _ended(self, waiting: list[Later]) -> list[Later]:
        ended = [each for each in waiting if not each.steps]
        waiting[:] = [each for each in waiting if each.steps]
        for each in waiting:
            each.steps -= 1
        return ended

    def _begin_fetch(self, fetch: Any) -> None:
        found = []
        for key in fetch.keys:
            if key not in self.store:
                break
            found.append(self.store[key])
        self._begin(fetch.ask, found, "fetch")

    def _begin_expect(self, expect: Any) -> None:
        tokens = self.contexts.get(expect.context, ())
        full = [tokens[: (at + 1) * FULL_TOKENS] for at in range(-(-len(tokens) // FULL_TOKENS))]
        self._begin(expect.ask, full, "prompt")

    def _begin(self, ask: int, found: list[Content], kind: str) -> None:
        self.asks[ask] = found
        self.answers.append(Later(self._soon(), ask, kind))
        self.counts[f"{kind} found"] += len(found)

    def _fill(self, skip: int, block_ids: list[int], full: list[Content]) -> set[int]:
        """Fill blocks from Full Blocks; returns those that were not filled."""
        tokens = full[-1] if full else ()
        first = skip + (max(0, len(full[0]) - FULL_TOKENS) // BLOCK if full else 0)
        for at, block in enumerate(block_ids):
            if len(tokens) <= (first + at) * BLOCK or self.draw.random() < self.failing:
                self.counts["not filled"] += len(block_ids) - at
                return set(block_ids[at:])
            self.blocks[block] = tokens[: (first + at + 1) * BLOCK]
            self.counts["filled"] += 1
        return set()

    def _compute(self, work: Work, bad: set[int]) -> None:
        """Write the blocks; what is attended to has to be there. Tokens are those that are known now: those
        that a step samples are known when the next one is carried out."""
        (block_ids,) = work.block_ids
        tokens = tuple(work.request.all_token_ids)[: work.end]
        if len(tokens) < work.end:  # its last token has been dropped: its request was preempted by a reset
            return
        if not bad.isdisjoint(block_ids):  # vLLM takes this step back
            assert not self.engine.options.asynchronous, "the next step has been planned already"
            for block in block_ids[work.first // BLOCK : -(-work.end // BLOCK)]:
                self.blocks[block] = ()
            return
        for place in range(work.first // BLOCK + (work.first % BLOCK > 0)):
            known = tokens[: work.first]
            assert self._has(block_ids[place], place, known), "computed from a wrong block"
        for place in range(work.first // BLOCK, -(-work.end // BLOCK)):
            # Of requests that share blocks which were not filled, each may compute them: the same again.
            if not self._has(block_ids[place], place, tokens[: work.end]):
                self.blocks[block_ids[place]] = tokens[: min((place + 1) * BLOCK, work.end)]

    def _has(self, block: int, place: int, tokens: Content) -> bool:
        """Whether a block has, of this place in a context, the KV of those of ``tokens`` that lie in it."""
        content, end = self.blocks.get(block, ()), min((place + 1) * BLOCK, len(tokens))
        return len(content) <= (place + 1) * BLOCK and end > place * BLOCK and content[:end] == tokens[:end]

    def _push(self, push: Any, bad: set[int]) -> None:
        if not bad.isdisjoint(push.block_ids):
            return
        prompt = self.blocks[push.block_ids[-1]]
        for at, block in enumerate(push.block_ids):
            assert self._has(block, at, prompt), "pushed a wrong block"
        self.contexts[push.context] = prompt
        self.counts["pushed"] += 1

    def _save(self, saves: list[Any], bad: set[int], holds: set[str]) -> dict[str, int]:
        refused: dict[str, int] = {}
        for save in saves:
            if save.request in refused:
                continue
            at_last = save.request in holds
            if not at_last and (bad or self.draw.random() < 0.1):
                refused[save.request] = save.place
                continue
            content = self.blocks[save.block_ids[-1]]
            assert len(content) == (save.place + 1) * FULL_TOKENS, "stored a block that is not full"
            assert save.key == self.key_of(content), "stored under a wrong key"
            for at, block in enumerate(save.block_ids):
                assert self._has(block, save.place * PER_FULL + at, content), "stored a wrong block"
            self.store[save.key] = content
            self.counts["stored at last" if at_last else "stored"] += 1
        return refused

    def key_of(self, tokens: Content) -> bytes:
        known = SimpleNamespace(block_hashes=[], request_id="", all_token_ids=tokens, num_tokens=len(tokens))
        return bytes(self.engine.hash_blocks(known)[-1])


@pytest.mark.parametrize("failing", [0.0, 0.05])
@pytest.mark.parametrize(
    ("policy", "asynchronous", "host_blocks"),
    [
        (None, True, 0),
        ("observe", False, 0),
        ("observe", True, 0),
        ("sojourn", False, 60),
        ("sojourn", True, 60),
    ],
    ids=["stock, one ahead", "as they come", "one ahead", "with host memory", "with host memory, one ahead"],
)
def test_what_moves_was_computed(
    make_paths_engine: Any,
    clock: Any,
    policy: str | None,
    asynchronous: bool,
    host_blocks: int,
    failing: float,
) -> None:
    with asynchronous_scheduling() if asynchronous else nullcontext():
        engine = make_paths_engine(
            policy, {"block_tokens": FULL_TOKENS}, host_blocks, blocks=60, block_size=BLOCK,
            max_model_len=220, max_num_batched_tokens=48, max_num_seqs=8, asynchronous=asynchronous,
        )  # fmt: skip
    assert engine.scheduler.connector.settings.concurrent_steps == 1 + asynchronous
    engine.scheduler.connector.strict = True
    worker, draw = Worker(engine, failing), random.Random(5)
    contexts = [[draw.randrange(9, 30_000) for _ in range(100)] for _ in range(6)]
    answers: list[tuple[list[int], dict[str, Any]]] = []
    original = engine.scheduler._connector_finished

    def finished(request: Any) -> Any:
        hold, answer = original(request)
        if answer is not None:
            answers.append((list(request.prompt_token_ids), answer))
        return hold, answer

    engine.scheduler._connector_finished = finished
    for number in range(300):
        part, params = draw.choice(["whole", "prefill", "prefill", "decode"]), None
        prompt = [*draw.choice(contexts)[: draw.randint(1, 100)], *[9 + number] * draw.randint(1, 12)]
        if part == "prefill":
            params = {"do_remote_decode": True, "transfer": f"t{number}", "peer": "unix:/d"}
        elif part == "decode" and answers:
            prompt, params = answers.pop(draw.randrange(len(answers)))
        length = draw.choice([1, 1, 60]) if part == "prefill" else 60
        program = draw.choice("abc") if host_blocks else None
        add_request(engine, f"r{number}", prompt, params=params, max_tokens=length, session_id=program)
        for _ in range(draw.randint(0, 8)):
            clock.now += 0.05
            worker.step()
        if draw.random() < 0.1 and engine.scheduler.requests:
            engine.abort(draw.choice(sorted(engine.scheduler.requests)))
        if worker.fills and draw.random() < 0.2:
            engine.abort(draw.choice(worker.fills).name.request)
        if worker.host_loads and draw.random() < 0.2:
            engine.abort(draw.choice(worker.host_loads).name)
    for _ in range(3000):
        if not engine.scheduler.has_requests() and not any(step.jobs for step in worker.under_way):
            break
        clock.now += 0.05
        worker.step()
    assert not engine.scheduler.requests
    for _ in range(2):
        worker.step()
    assert engine.pool.get_num_free_blocks() == 59
    planner = engine.scheduler.connector.planner
    assert len(planner) == 0
    counts = worker.counts
    assert min(counts["pushed"], counts["prompt found"], counts["filled"], counts["preempted"]) > 30
    assert min(counts["stored"], counts["fetch found"]) > 30
    assert counts["stored at last"] > 5
    assert counts["not filled"] > 3 or not failing
    assert counts["loaded from host"] > 30 or not host_blocks
