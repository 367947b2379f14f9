"""The ledger names the true cause of a loss where there is one. After every event of the
schedulers' tests it adds up (``scheduler_driver.check_tables``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.ids import ProgramId
from sojourn.wire_events import ProgramEnd
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.metrics.decision_log import DecisionLog
from sojourn_server.metrics.metric_catalog import PROMPT_RESULTS
from sojourn_server.metrics.turn_ledger import (
    EvictedBlock,
    EvictionLog,
    LossCause,
    TurnLedger,
    TurnRecord,
    common_prefix_length,
    split_tokens,
)
from sojourn_server.policies.policy_views import ReclaimRequest
from virtual_engine import VirtualEngine, chain, prompt

# -- tokens -----------------------------------------------------------------------------


@given(
    prompt=st.integers(1, 200),
    hit=st.just(0.0) | st.floats(0, 1),
    block_size=st.sampled_from([1, 4, 16]),
    before=st.integers(0, 250),
    share=st.none() | st.just(1.0) | st.floats(0, 1),
    cause=st.sampled_from(LossCause),
)
def test_each_token_of_a_prompt_is_told_apart_and_the_parts_add_up(
    prompt: int, hit: float, block_size: int, before: int, share: float | None, cause: LossCause
) -> None:
    """Against a reference that looks at one token after the other."""
    full = min(before, prompt) // block_size
    device = int((prompt - 1) * hit) // block_size * block_size
    shared = None if share is None else int(full * share)
    # The last token is always computed: one block short of a full hit.
    reusable = before if shared is None else min(shared, (prompt - 1) // block_size) * block_size
    counted: Counter[str] = Counter()
    for token in range(device, prompt):
        if token >= before:
            counted["new"] += 1
        elif token < reusable:
            counted[cause] += 1
        else:
            counted["tail" if shared == full else LossCause.CHANGED] += 1
    split = split_tokens(
        prompt=prompt,
        device=device,
        block_size=block_size,
        before_tokens=before,
        before_full_blocks=before // block_size,
        shared_blocks=shared,
        cause=cause,
    )
    assert (split.new, split.tail) == (counted.pop("new", 0), counted.pop("tail", 0))
    assert split.lost == counted
    assert split.device + split.new + split.tail + sum(split.lost.values()) == split.prompt == prompt


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_the_common_prefix_of_chained_hashes(a: list[int], b: list[int]) -> None:
    first, second = chain([t for x in a for t in [x] * 4]), chain([t for x in b for t in [x] * 4])
    slow = 0
    while slow < min(len(a), len(b)) and a[slow] == b[slow]:
        slow += 1
    assert common_prefix_length(first, second) == slow


# -- seconds ----------------------------------------------------------------------------


def test_a_turns_seconds_by_what_they_were_spent_on() -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(8))
    engine.now += 1.0
    engine.admit(request)
    engine.now += 2.0
    engine.program_scheduler.first_token(request, engine.now)
    engine.now += 4.0
    engine.finish(request)
    aborted = engine.arrive("p", prompt(8))
    engine.now += 3.0
    engine.finish(aborted, outcome=TurnFinishReason.ABORTED)
    whole, queued = engine.ask("program", program_id="p")["ledger"]
    assert whole["seconds"] == {"wall": 7.0, "queued": 1.0, "prefilling": 2.0, "decoding": 4.0}
    assert queued["seconds"] == {"wall": 3.0, "queued": 3.0, "prefilling": 0.0, "decoding": 0.0}
    assert queued["tokens"] is None


# -- causes, each brought about on purpose ------------------------------------------------

TOKENS = prompt(40)
LONGER = [*TOKENS, 7, 7, *prompt(10, seed=8)]


def evict(engine: VirtualEngine) -> None:
    engine.evict(TOKENS, by="thief", keep=3)


def reclaim(engine: VirtualEngine) -> None:
    need = ReclaimRequest(program_id=None, program_rank=0, blocks=1, running=True, anything_running=True)
    engine.program_scheduler.make_room(need, engine.now)
    engine.carry_out()
    engine.evict(TOKENS, by="thief")


def reset(engine: VirtualEngine) -> None:
    engine.program_scheduler.cache_reset(engine.now)
    engine.carry_out()
    engine.cached.clear()


def end(engine: VirtualEngine) -> None:
    engine.send(ProgramEnd(program_id="p", seq=-1))


def forget(engine: VirtualEngine) -> None:
    engine.program_scheduler.state.contexts.pop(ProgramId("p"))
    engine.cached.clear()


@pytest.mark.parametrize(
    ("policy", "act", "tokens", "lost", "evictor"),
    [
        ("observe", evict, LONGER, {LossCause.EVICTED: 28}, "thief"),
        ("fixed-ttl", reclaim, LONGER, {LossCause.PRESSURE: 40}, "thief"),
        ("fixed-ttl", lambda _: None, [*TOKENS[:20], *prompt(30, seed=4)], {LossCause.CHANGED: 22}, None),
        ("fixed-ttl", reset, LONGER, {LossCause.DROPPED: 42}, None),
        ("fixed-ttl", end, LONGER, {LossCause.DROPPED: 42}, None),
        ("observe", lambda engine: engine.cached.clear(), LONGER, {LossCause.UNKNOWN: 40}, None),
        ("observe", forget, LONGER, {LossCause.UNKNOWN: 42}, None),  # not new: it had been computed
    ],
)
def test_each_loss_has_its_cause_and_its_evictor(
    policy: str, act: Callable[[VirtualEngine], None], tokens: list[int], lost: dict[LossCause, int],
    evictor: str | None,
) -> None:  # fmt: skip
    engine = VirtualEngine(policy)
    engine.turn("p", TOKENS)
    act(engine)
    engine.turn("p", tokens)
    record = engine.program_scheduler.state.ledger.of_program("p")[-1]
    assert record.tokens is not None
    assert (record.tokens.lost, record.evictor) == (lost, evictor)
    # The metrics count what the ledger does.
    totals = engine.program_scheduler.state.ledger.totals
    counted = {
        result: engine.counter("sojourn_prompt_tokens_total", result=result) for result in PROMPT_RESULTS
    }
    assert counted == {
        "device": totals.device_tokens, "host": 0, "new": totals.new_tokens, "tail": totals.tail_tokens,
        "lost": sum(lost.values()), "unread": 0,
    }  # fmt: skip
    assert totals.lost_tokens == {cause.value: count for cause, count in lost.items()}
    for cause, tokens_lost in totals.lost_tokens.items():
        assert engine.counter("sojourn_lost_tokens_total", cause=cause) == tokens_lost
    assert engine.counter("sojourn_program_turns_total") == totals.turns == 2


def test_preempted_tokens_are_counted_apart() -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", TOKENS)
    engine.admit(request)
    engine.program_scheduler.preempted(request, engine.now)
    engine.cached.clear()
    engine.admit(request, resumed=True)
    engine.finish(request)
    [record] = engine.program_scheduler.state.ledger.of_program("p")
    assert (record.preemptions, record.recomputed_after_preemption_tokens) == (1, 40)
    assert record.tokens is not None
    assert (record.tokens.new, record.tokens.lost) == (40, {})
    assert engine.counter("sojourn_lost_tokens_total", cause="preempted") == 40
    assert engine.counter("sojourn_prompt_tokens_total") == 40
    assert engine.program_scheduler.state.ledger.totals.recomputed_after_preemption_tokens == 40


# -- what is kept -------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=100), st.integers(1, 10))
def test_the_eviction_log_keeps_the_newest(hashes: list[int], capacity: int) -> None:
    log = EvictionLog(capacity)
    order: list[int] = []
    for block in hashes:
        log.add([block], EvictedBlock(LossCause.EVICTED, None))
        order = [h for h in order if h != block] + [block]
    assert len(log) == min(capacity, len(order))
    for block in range(31):
        assert (log.find(block) is not None) == (block in order[-capacity:])


def test_the_ledger_keeps_the_newest_turns_and_all_sums() -> None:
    ledger = TurnLedger(capacity=3)
    for i in range(10):
        ledger.close(TurnRecord(f"p{i % 2}", i, f"r{i}", 0.0, output_tokens=2, finished_s=1.0))
    assert ledger.totals.turns == 10
    assert ledger.totals.output_tokens == 20
    assert [r.turn for r in ledger.of_program("p1")] == [7, 9]
    assert [r.turn for r in ledger.of_program("p1", limit=1)] == [9]
    assert ledger.of_program("unknown") == []


@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 40))
def test_the_decision_log_is_read_page_by_page_without_gap_or_repeat(
    n: int, page: int, capacity: int
) -> None:
    log = DecisionLog(capacity)
    for i in range(n):
        log.add(float(i), "keep", None, "ttl")
    seen, since = [], 0
    while True:
        found, following = log.since(since, page)
        if not found:
            break
        assert len(found) <= page
        seen += [decision.seq for decision in found]
        since = following
    assert seen == list(range(max(0, n - capacity), n))
    assert following == n
    log.add(0.0, "drop", None, "end")
    assert [d.seq for d in log.since(following, page)[0]] == [n]


def test_a_client_finds_its_turn_by_its_own_name_for_the_request() -> None:
    engine = VirtualEngine("fixed-ttl")
    engine.turn("p", prompt(40), request_id="r-first")
    engine.turn("p", prompt(60), "done", request_id="r-last", sojourn={"final": True})
    engine.turn("q", prompt(8, seed=2))
    first, last = engine.ask("program", program_id="p")["ledger"]
    assert (first["request_id"], first["leased"], first["lease_ttl_s"]) == ("r-first", False, 10.0)
    assert (last["request_id"], last["leased"], last["lease_ttl_s"]) == ("r-last", True, None)
    assert engine.ask("program", program_id="q")["ledger"][0]["request_id"] is None
