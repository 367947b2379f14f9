"""The ledger adds up, whatever happens, and names the true cause where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.ids import ProgramId
from sojourn.wire_events import Heartbeat, ProgramEnd
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.core.scheduler_state import SchedulerLimits
from sojourn_server.metrics import metric_catalog
from sojourn_server.metrics.decision_log import DecisionLog
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
from virtual_engine import BLOCK_TOKENS, VirtualEngine, chain, prompt

# -- tokens -----------------------------------------------------------------------------


@given(
    prompt=st.integers(1, 200),
    hit=st.floats(0, 1),
    block_size=st.sampled_from([1, 4, 16]),
    before=st.integers(0, 250),
    share=st.floats(0, 1) | st.none(),
    cause=st.sampled_from(LossCause),
)
def test_the_parts_add_up_and_none_is_negative(
    prompt: int, hit: float, block_size: int, before: int, share: float | None, cause: LossCause
) -> None:
    full = before // block_size
    device = int((prompt - 1) * hit) // block_size * block_size
    shared = None if share is None else int(min(full, prompt // block_size) * share)
    split = split_tokens(
        prompt=prompt,
        device=device,
        block_size=block_size,
        before_tokens=before,
        before_full_blocks=full,
        shared_blocks=shared,
        cause=cause,
    )
    assert split.prompt == prompt
    assert split.device + split.new + split.tail + sum(split.lost.values()) == prompt
    assert min(split.device, split.new, split.tail) >= 0
    assert all(tokens > 0 for tokens in split.lost.values())
    assert set(split.lost) <= {cause, LossCause.CHANGED}
    assert split.new >= prompt - max(device, before)
    if before <= device:
        assert split.tail + sum(split.lost.values()) == 0, "what was found was not computed again"


@pytest.mark.parametrize(
    ("case", "expected"),
    # prompt, device, before, shared full blocks of four → new, tail, lost
    [
        ((10, 0, 0, 0), (10, 0, {})),
        ((20, 8, 10, 2), (10, 2, {})),
        ((20, 0, 10, 2), (10, 2, {LossCause.EVICTED: 8})),
        ((20, 4, 10, 2), (10, 2, {LossCause.EVICTED: 4})),
        ((20, 4, 10, 1), (10, 0, {LossCause.CHANGED: 6})),
        ((20, 0, 10, 1), (10, 0, {LossCause.EVICTED: 4, LossCause.CHANGED: 6})),
        ((20, 0, 10, 0), (10, 0, {LossCause.CHANGED: 10})),
        ((8, 4, 10, 2), (0, 4, {})),  # the last token is always computed: one block short of a full hit
        ((4, 0, 40, 1), (0, 4, {})),
        ((20, 16, 10, 2), (4, 0, {})),  # another program had computed it
        ((20, 0, 10, None), (10, 0, {LossCause.EVICTED: 10})),
    ],
)
def test_the_split_by_example(
    case: tuple[int, int, int, int | None], expected: tuple[int, int, dict[LossCause, int]]
) -> None:
    total, device, before, shared = case
    split = split_tokens(
        prompt=total,
        device=device,
        block_size=4,
        before_tokens=before,
        before_full_blocks=before // 4,
        shared_blocks=shared,
        cause=LossCause.EVICTED,
    )
    assert (split.new, split.tail, split.lost) == expected


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_the_common_prefix_of_chained_hashes(a: list[int], b: list[int]) -> None:
    first, second = chain([t for x in a for t in [x] * 4]), chain([t for x in b for t in [x] * 4])
    slow = 0
    while slow < min(len(a), len(b)) and a[slow] == b[slow]:
        slow += 1
    assert common_prefix_length(first, second) == slow


# -- seconds ----------------------------------------------------------------------------


def test_an_aborted_turn_in_the_queue_only_queued() -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(8))
    engine.now += 3.0
    engine.finish(request, outcome=TurnFinishReason.ABORTED)
    [record] = engine.program_scheduler.state.ledger.of_program("p")
    assert record.seconds() == {"wall": 3.0, "queued": 3.0, "prefilling": 0.0, "decoding": 0.0}
    assert record.tokens is None
    assert record.as_dict()["tokens"] is None


def test_a_turns_seconds_by_what_they_were_spent_on() -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(8))
    engine.now += 1.0
    engine.admit(request)
    engine.now += 2.0
    engine.program_scheduler.first_token(request, engine.now)
    engine.now += 4.0
    engine.finish(request)
    assert engine.ask("program", program_id="p")["ledger"][0]["seconds"] == {
        "wall": 7.0, "queued": 1.0, "prefilling": 2.0, "decoding": 4.0,
    }  # fmt: skip


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


# -- a long random life --------------------------------------------------------------------


def test_a_random_life_drops_no_metric_and_adds_up() -> None:
    """Every step the engine and its clients can take, at random; ``Recorder(strict=True)`` watches."""
    chance = random.Random(7)
    engine = VirtualEngine(
        "continuum", blocks=300, limits=SchedulerLimits(max_programs=14, silent_program_s=30.0)
    )
    inside: dict[str, bool] = {}
    contexts: dict[str, list[int]] = {}
    for _ in range(5000):
        name = f"p{chance.randrange(16)}"
        act = chance.randrange(12)
        if act <= 2 and len(inside) < 4:
            tokens = [*contexts.get(name, prompt(12, seed=int(name[1:]))), *range(chance.randrange(1, 9))]
            if len(tokens) > 150 or chance.random() < 0.1:
                tokens = prompt(20, seed=chance.randrange(10**6))
            contexts[name] = tokens
            hint = {"sojourn": {"v": 1, "heartbeat": True}} if chance.random() < 0.3 else {}
            request = engine.arrive(
                name, tokens, kv_retention_ttl_seconds=chance.choice([-1, 5, 1e9]), **hint
            )
            inside[request] = False
        elif act <= 4 and inside:
            request = chance.choice(list(inside))
            engine.admit(request, resumed=inside[request])
            inside[request] = True
        elif act == 5 and any(inside.values()):
            request = chance.choice([r for r, admitted in inside.items() if admitted])
            engine.program_scheduler.first_token(request, engine.now)
            engine.program_scheduler.preempted(request, engine.now)
        elif act <= 7 and inside:
            request = chance.choice(list(inside))
            outcomes = (
                [TurnFinishReason.STOPPED, *TurnFinishReason]
                if inside.pop(request)
                else [TurnFinishReason.ABORTED]
            )
            outcome = chance.choice(outcomes)
            engine.finish(request, outcome=outcome)
        elif act == 8 and contexts:
            for tokens in chance.sample(list(contexts.values()), min(3, len(contexts))):
                engine.evict(tokens, by=name, keep=chance.randrange(8))
        elif act == 9:
            kind = chance.choice([ProgramEnd, Heartbeat])
            engine.send(kind(program_id=name, seq=-1))
        elif act == 10:
            need = ReclaimRequest(
                program_id=None,
                program_rank=chance.randrange(99),
                blocks=chance.randrange(1, 30),
                running=chance.random() < 0.5,
                anything_running=True,
            )
            engine.program_scheduler.make_room(need, engine.now)
            engine.carry_out()
            if chance.random() < 0.05:
                engine.program_scheduler.cache_reset(engine.now)
                engine.cached.clear()
                engine.carry_out()
        engine.wait(chance.random() * 3)
        assert set(engine.held) == set(engine.program_scheduler.state.leases)
        assert len(engine.program_scheduler.state.programs) <= 14 + len(inside)
        assert set(engine.program_scheduler.state.requests.states) == set(inside)

    records = list(engine.program_scheduler.state.ledger._ring)
    totals = engine.program_scheduler.state.ledger.totals
    assert totals.turns == len(records) > 300
    assert {cause for r in records if r.tokens for cause in r.tokens.lost} >= {
        LossCause.EVICTED, LossCause.EXPIRED, LossCause.SILENT, LossCause.PRESSURE, LossCause.CHANGED,
        LossCause.DROPPED,
    }  # fmt: skip
    for record in records:
        parts = record.seconds()
        assert parts.pop("wall") == pytest.approx(sum(parts.values()))
        assert min(parts.values()) >= 0
        if record.tokens is not None:
            split = record.tokens
            reused = split.device + split.host
            assert reused + split.new + split.tail + sum(split.lost.values()) == split.prompt
            assert split.device % BLOCK_TOKENS == 0
    counted = {
        result: engine.counter("sojourn_prompt_tokens_total", result=result)
        for result in metric_catalog.PROMPT_RESULTS
    }
    assert counted == {
        "device": totals.device_tokens,
        "host": totals.host_tokens,
        "new": totals.new_tokens,
        "tail": totals.tail_tokens,
        "lost": sum(totals.lost_tokens.values()),
        "unread": 0,
    }
    assert sum(counted.values()) == totals.prompt_tokens
    for cause, tokens in totals.lost_tokens.items():
        assert engine.counter("sojourn_lost_tokens_total", cause=cause) == tokens
    assert engine.counter("sojourn_program_turns_total") == totals.turns
    grants = sum(d.numbers.get("ttl_s", 0) > 0 for d in engine.program_scheduler.decisions.since(0, 10**6)[0])
    assert engine.counter("sojourn_lease_ends_total") + len(engine.program_scheduler.state.leases) == grants


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
