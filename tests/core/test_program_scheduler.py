"""The steward on a scripted engine in virtual time: Continuum C1 and C3–C8, and what must never leak."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn.wire_events import Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_server.core.events_and_actions import (
    CacheResetStarted,
    EngineActionKind,
    StepCompleted,
    TurnFinishReason,
)
from sojourn_server.core.scheduler_state import Histories, SchedulerLimits
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.policies.costs.reload_estimate import LinkCosts
from sojourn_server.policies.policy_protocols import DecisionReason
from sojourn_server.policies.policy_views import ReclaimRequest
from sojourn_server.policies.preset import load_preset
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import TOOL, VirtualEngine, chain, prompt

P = ProgramId("p")


def trained(n: int = 101, duration_s: float = 2.0, tool: str = TOOL) -> Histories:
    histories = Histories()
    for _ in range(n):
        histories.tools.observe(tool, duration_s)
    return histories


def start(call: str = "c1", tool: str = "bash", head: str | None = "pytest", **kw: float) -> ToolStart:
    return ToolStart(program_id="p", seq=-1, call_id=call, tool=tool, tool_class=head, **kw)  # type: ignore[arg-type]


def stop(call: str = "c1", duration_s: float = 1.0) -> ToolStop:
    return ToolStop(program_id="p", seq=-1, call_id=call, duration_s=duration_s)


END = ProgramEnd(program_id="p", seq=-1)


def durations(engine: VirtualEngine, tool: str = TOOL) -> list[float]:
    return list(engine.program_scheduler.histories.tools.durations(tool))


def test_a_whole_life() -> None:
    engine = VirtualEngine(limits=SchedulerLimits(return_grace_s=2.0))
    tokens = prompt(40)
    engine.send(ProgramStart(program_id="p", seq=-1, name="fixer", agent_type="swe"))
    assert engine.program("p").status is ProgramStatus.ACTING
    request = engine.arrive("p", tokens)
    assert engine.program("p").status is ProgramStatus.REASONING
    assert engine.admit(request) == 0
    engine.now += 1.0
    assert engine.program_scheduler.awaiting_first_token
    assert engine.program_scheduler.awaiting_first_token.keys() == {request}
    engine.program_scheduler.first_token(request, engine.now)
    engine.now += 1.0
    lease = engine.finish(request)
    assert (lease.ttl_s, lease.blocks, lease.reason) == (10.0, 10, DecisionReason.FIXED)
    assert engine.program("p").status is ProgramStatus.ACTING
    assert engine.pool_state()["leased"] == 10

    engine.wait(0.5)
    engine.send(start())
    engine.wait(3.0)
    engine.send(stop(duration_s=3.0))
    engine.wait(0.25)
    request = engine.arrive("p", [*tokens, 7, 7, *prompt(9, seed=5)])
    assert engine.request_state(request).record.leased  # type: ignore[union-attr]
    assert engine.admit(request) == 40
    assert [a.kind for a in engine.done] == [EngineActionKind.RELEASE]
    assert P not in engine.leases
    assert durations(engine) == [3.0], "the client's own measurement, once"
    assert engine.counter("sojourn_tool_gap_source_total", source="reported") == 1
    engine.finish(request, "Done.")
    assert engine.reasons("keep") == ["fixed", "no_tool_call"]
    for _ in range(2):
        engine.send(END)
    assert engine.program("p").status is ProgramStatus.ENDED
    assert engine.done[-1].kind is EngineActionKind.DROP
    assert engine.program_scheduler.context(P) is None
    assert engine.program_scheduler.state.requests.states == {}
    assert not engine.program_scheduler.awaiting_first_token
    assert engine.counter("sojourn_program_turns_total", outcome="stopped") == 2
    assert engine.counter("sojourn_programs_finished_total", outcome="ok") == 1
    assert engine.program_scheduler.histories.turns.count() == 1


def test_a_turn_of_one_token_has_a_time_to_first_token_too() -> None:
    """As at a prefill engine: the request has left the engine before its first token is reported."""
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(40))
    engine.admit(request)
    engine.now += 1.5
    engine.finish(request, output=(7,))
    assert engine.program("p").ttft_s == 1.5


def test_c1_the_first_arrival_is_the_rank_for_ever() -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(8), kv_retention_ttl_seconds=0)
    rank = engine.program("p").rank
    for i in range(5):
        engine.turn("q", prompt(8, seed=9))
        engine.wait(100.0)
        request = engine.arrive("p", prompt(8 + i))
        assert engine.request_state(request).rank == engine.program("p").rank == rank
        engine.finish(request, outcome=TurnFinishReason.ABORTED)
    engine.send(END)
    request = engine.arrive("p", prompt(8))
    assert engine.request_state(request).rank > rank, "an ended program's id used again is a new program"


def test_growth_is_what_outgrows_the_longest_context_so_far() -> None:
    """A context that shrinks and grows again counted each time: others were kept out of an empty pool."""
    engine = VirtualEngine()
    for tokens in (100, 200, 60, 190, 230):
        engine.turn("p", prompt(tokens), step_id="hinted")
        engine.wait(1.0)
    program = engine.program("p")
    output = program.context_tokens - 230
    assert program.peak_tokens == 230 + output
    assert engine.program_scheduler.histories.growth_tokens.snapshot() == [100.0, 0.0, 0.0, 30.0]


@pytest.mark.parametrize("reports", [False, True])
def test_c3_the_gap_is_from_finish_to_next_arrival_and_overtaken_events_do_not_count_it_twice(
    reports: bool,
) -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(8))
    engine.wait(4.0)
    request = engine.arrive("p", prompt(12))
    engine.now += 0.1
    if reports:
        late = engine.send(start(age_s=3.5), stop(duration_s=3.0))
        assert [o.outcome.value for o in late] == ["deferred", "missing"]
    engine.now += 40.0  # standing in the queue is no part of the tool call
    engine.admit(request)
    engine.finish(request)
    assert durations(engine) == [4.0]
    assert engine.counter("sojourn_tool_gap_source_total", source="inferred") == 1


def test_c3_a_late_start_does_not_hide_the_tool_that_runs() -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(8), "Done.")
    engine.wait(4.0)
    request = engine.arrive("p", prompt(12))
    engine.now += 0.1
    engine.send(start(age_s=3.5))  # its end was lost, or came first
    engine.admit(request)
    engine.finish(request)
    engine.wait(1.0)
    late = engine.send(start("d", "edit"), start("e", age_s=3.5))
    assert [o.outcome.value for o in late] == ["applied", "deferred"]
    assert list(engine.program("p").tools) == ["d"]


def test_c3_a_tool_that_starts_while_its_turn_still_runs_is_recorded_once() -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(8))
    engine.admit(request)
    assert engine.send(start())[0].outcome.value == "deferred"
    engine.finish(request)
    engine.wait(2.0)
    assert engine.send(stop(duration_s=2.5))[0].outcome.value == "applied"
    engine.arrive("p", prompt(12))
    assert durations(engine) == [2.5]


def test_several_calls_are_one_gap_of_the_slowest() -> None:
    histories = trained(5, 9.0, "slow")
    histories.tools.observe("fast", 0.1)
    engine = VirtualEngine(histories=histories)
    functions = [{"name": name, "arguments": "{}"} for name in ("fast", "slow", "new")]
    calls = json.dumps({"tool_calls": [{"type": "function", "function": f} for f in functions]})
    engine.turn("p", prompt(8), calls)
    assert engine.program("p").pending_tool == "slow"
    engine.wait(8.0)
    engine.arrive("p", prompt(12))
    assert durations(engine, "slow") == [8.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert engine.program_scheduler.histories.tools.count() == 7


def test_c4_with_a_tier_below_the_price_of_losing_a_context_is_copying_it() -> None:
    # One second for each token: a context of 42 tokens costs 42 s.
    engine = VirtualEngine("continuum", curve=PrefillCurve(0.0, 1.0, 0.0), histories=trained(101, 2.0))
    engine.program_scheduler.pool.host_s_per_token = 0.001
    assert engine.turn("p", prompt(40)) is None
    assert engine.reasons("keep") == ["not_worth_it"]
    link = LinkCosts(None, 0.1, loads_queued_s=10.0)  # slower than its profile says, and busy
    engine.program_scheduler.handle(StepCompleted(1, 0.01, 1, link), engine.now)
    assert engine.leased_turn("q", prompt(40, 1)).reload_s == pytest.approx(14.2)


def test_c4_the_mean_wait_of_evicted_programs_is_part_of_the_worth() -> None:
    engine = VirtualEngine("continuum", histories=trained(101, 2.0))
    engine.turn("p", prompt(40))
    engine.evict(prompt(40))
    request = engine.arrive("p", prompt(48))
    engine.now += 6.0
    engine.admit(request)
    assert engine.program_scheduler.histories.evicted_waits.mean() == 6.0
    assert engine.finish(request).ttl_s == 2.0


def test_c6_preempted_then_leased_then_program_arrival() -> None:
    engine = VirtualEngine("fixed-ttl")
    engine.turn("early", prompt(8, seed=1), "no tool")
    engine.turn("leased", prompt(8, seed=2))
    running = engine.arrive("late", prompt(8, seed=3))
    engine.admit(running)
    fresh = engine.arrive("fresh", prompt(8, seed=4))
    nobody = engine.arrive(None, prompt(8, seed=5))
    leased = engine.arrive("leased", prompt(12, seed=2))
    early = engine.arrive("early", prompt(12, seed=1))
    engine.program_scheduler.preempted(running, engine.now)
    assert engine.queue() == [running, leased, early, fresh, nobody]
    engine.admit(running, resumed=True)
    engine.finish(running)
    assert engine.queue() == [leased, early, fresh, nobody]


def test_c7_an_expired_pin_is_kept_while_its_program_waits_in_the_queue() -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(40))
    engine.wait(9.0)
    request = engine.arrive("p", prompt(48))
    engine.wait(500.0)
    assert engine.held[P]
    assert engine.queue() == [request]
    assert engine.program_scheduler.waiting_view(request).leased
    assert engine.admit(request) == 40
    assert engine.reasons("release") == []
    assert engine.counter("sojourn_lease_ends_total", reason="return") == 1


def test_c7_the_last_step_is_not_kept_until_the_program_goes_on() -> None:
    engine = VirtualEngine()
    assert engine.turn("q", prompt(40), sojourn={"v": 1, "final": True}) is None
    for number in range(3):
        assert (engine.turn("p", prompt(40), expected_resume=False) is None) is (number == 0)
    assert [reason == "final_turn" for reason in engine.reasons("keep")] == [True, True, False, False]


def test_c8_a_waiting_request_with_a_priority_ends_leases_of_less_important_programs() -> None:
    # There a waiting request ends no lease of an earlier program.
    reclaim = load_preset("continuum").lease_reclaim
    engine = VirtualEngine(replace(load_preset("fixed-ttl"), lease_reclaim=reclaim))
    for i, (name, priority) in enumerate((("less", 10), ("equal", 5), ("more", 0))):
        engine.turn(name, prompt(40, seed=i))
        engine.program(name).priority = priority
    engine.arrive("last", prompt(40, seed=4))
    need = {"program_id": ProgramId("last"), "program_rank": engine.program("last").rank, "blocks": 5}
    without = ReclaimRequest(**need, running=False, anything_running=True)
    waiting = replace(without, priority=5)
    assert engine.program_scheduler.make_room(without, engine.now) == 0
    assert engine.program_scheduler.make_room(waiting, engine.now) == 1
    engine.carry_out()
    assert set(engine.held) == {"equal", "more"}
    assert engine.program_scheduler.make_room(waiting, engine.now) == 0


@pytest.mark.parametrize(
    ("asked_s", "given_s", "outcome"),
    [(-1, 0.0, "clipped"), (1e9, 300.0, "clipped"), (0, 0.0, "applied"), (45.5, 45.5, "applied")],
)
def test_a_hinted_ttl_is_bounded_and_counted_once(asked_s: float, given_s: float, outcome: str) -> None:
    engine = VirtualEngine("continuum")
    lease = engine.turn("p", prompt(40), "no tool call", kv_retention_ttl_seconds=asked_s)
    assert (lease.ttl_s if lease else 0.0) == given_s
    assert engine.reasons("keep") == ["hinted"]
    assert engine.counter("sojourn_hints_total", outcome=outcome) == 1
    assert engine.counter("sojourn_hints_total") == 1


@pytest.mark.parametrize(
    ("preset", "hint", "outcome"),
    [
        ("fixed-ttl", {"kv_retention_ttl_seconds": 9.0}, "unsupported"),
        ("sojourn", {"kv_retention_ttl_seconds": 9.0, "priority": 3, "deadline_seconds": 5.0}, "applied"),
        ("sojourn", {"parent_program_id": "q", "expected_resume": True}, "applied"),
        ("saga", {"kv_retention_ttl_seconds": 9.0}, "applied"),
        ("continuum", {"priority": 0}, "unsupported"),
        ("continuum", {"step_id": "12"}, "unsupported"),
        ("sojourn", {"parent_program_id": "q", "blocks_parent": True}, "unsupported"),
        ("continuum", {"expected_resume": True}, "unsupported"),
        ("continuum", {"expected_resume": False}, "applied"),
        ("saga", {"expected_resume": True}, "applied"),
        ("continuum", {"expected_output_length": 5}, "unsupported"),
        ("tetris", {"expected_output_length": 5}, "applied"),
        ("tetris", {"deadline_seconds": 5.0}, "unsupported"),  # a gateway's fair shares use it
        ("continuum", {"parent_program_id": "q", "request_id": "r"}, "applied"),
        ("continuum", {"step_id": 12, "request_id": 5}, "clipped"),
        ("continuum", {"program_id": 5}, "rejected"),
    ],
)
def test_a_hint_that_no_policy_reads_is_answered_unsupported(
    preset: str, hint: dict[str, Any], outcome: str
) -> None:
    engine = VirtualEngine(preset)
    engine.arrive("p", prompt(40), **hint)
    assert engine.counter("sojourn_hints_total", outcome=outcome) == 1
    assert engine.counter("sojourn_hints_total") == 1


def test_parallel_requests_are_one_turn_for_the_lease() -> None:
    engine = VirtualEngine()
    first, second = (engine.arrive("p", prompt(40 + 20 * n, seed=n), step_id="hinted") for n in (0, 1))
    engine.admit(first)
    engine.admit(second)
    assert engine.finish(first) is None
    assert engine.program_scheduler.context(P) is None
    assert engine.program("p").status is ProgramStatus.REASONING
    assert engine.finish(second) is not None
    assert engine.program("p").turns == 2
    assert len(engine.leases) == 1
    assert engine.program_scheduler.histories.tools.count() == 0


@pytest.mark.parametrize("outcome", [TurnFinishReason.ABORTED, TurnFinishReason.ERROR])
def test_a_failed_turn_gives_no_lease_and_is_no_turn(outcome: TurnFinishReason) -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(40))
    engine.admit(request)
    assert engine.finish(request, outcome=outcome) is None
    assert engine.program_scheduler.context(P) is None
    program = engine.program("p")
    assert (program.turns, program.status, program.live_requests) == (0, ProgramStatus.ACTING, set())
    assert engine.reasons("keep") == []
    assert engine.counter("sojourn_program_turns_total", outcome=outcome.value) == 1
    engine.wait(3.0)
    engine.arrive("p", prompt(40))
    assert engine.program_scheduler.histories.tools.count() == 0


def test_a_program_ended_during_a_request_keeps_nothing_of_it() -> None:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(40))
    engine.admit(request)
    engine.send(END)
    assert engine.finish(request) is None
    assert engine.program("p").status is ProgramStatus.ENDED
    assert engine.done[-1].kind is EngineActionKind.DROP
    assert engine.program_scheduler.state.contexts.get(P) is None


def test_a_killed_client_is_told_apart_from_a_crash_and_from_an_end() -> None:
    engine = VirtualEngine()
    promise = {"v": 1, "heartbeat": True}
    engine.turn("ended", prompt(8, seed=1), sojourn=promise)
    engine.turn("crashed", prompt(8, seed=2), sojourn=promise)
    engine.send(
        ProgramEnd(program_id="ended", seq=-1), ProgramEnd(program_id="crashed", seq=-1, status="error")
    )
    engine.turn("lost", prompt(8, seed=3), sojourn=promise)
    engine.turn("final", prompt(8, seed=4), sojourn={**promise, "final": True})
    engine.turn("idle", prompt(8, seed=5))
    for name in ("disconnected", "alive"):
        engine.turn(name, prompt(8, seed=6), sojourn={**promise, "final": True})  # a false hint
        engine.finish(engine.arrive(name, prompt(8, seed=6)), outcome=TurnFinishReason.ABORTED)
    engine.send(Heartbeat(program_id="alive", seq=-1))
    for _ in range(2):
        engine.wait(61.0)
        assert engine.ask("program", program_id="lost")["outcome"] == "lost", "after a minute"
    engine.wait(1800.0)
    engine.turn("returns", prompt(8, seed=7))
    told = {one.id: (one.status, one.outcome) for one in engine.program_scheduler.state.programs}
    assert told == {
        "ended": ("ended", "ok"),
        "crashed": ("ended", "error"),
        "lost": ("expired", "lost"),
        "final": ("expired", "final"),
        "idle": ("expired", "idle"),
        "disconnected": ("expired", "disconnected"),
        "alive": ("expired", "lost"),
        "returns": ("acting", None),
    }
    for outcome, number in {"ok": 1, "error": 1, "lost": 2, "final": 1, "idle": 1, "disconnected": 1}.items():
        assert engine.counter("sojourn_programs_finished_total", outcome=outcome) == number
    engine.turn("lost", prompt(8, seed=3))
    assert engine.ask("program", program_id="lost")["outcome"] is None, "it came back"


def seconds_until_gone(engine: VirtualEngine) -> float:
    began = engine.now
    while P in engine.leases:
        engine.wait(0.25)
        assert engine.now - began < 400
    return engine.now - began


@pytest.mark.parametrize("last_beat_s", [0, 3, 9, 12, 15, 18, 19])
def test_in_any_case_within_35_s_of_the_last_sign(last_beat_s: int) -> None:
    engine = VirtualEngine("continuum")
    engine.turn("p", prompt(40), kv_retention_ttl_seconds=300, sojourn={"v": 1, "heartbeat": True})
    for _ in range(last_beat_s):
        engine.wait(1.0)
        engine.send(Heartbeat(program_id="p", seq=-1))
    assert 10.0 <= seconds_until_gone(engine) <= 20.0
    assert engine.reasons("release") == ["silent"]


def test_a_client_without_heartbeats_keeps_its_lease_for_all_its_time() -> None:
    engine = VirtualEngine("continuum")
    engine.turn("p", prompt(40), kv_retention_ttl_seconds=200)
    assert seconds_until_gone(engine) == 200.0
    assert engine.reasons("release") == ["ttl"]


def test_the_ttl_runs_from_the_tools_start() -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(40))
    engine.wait(4.0)
    engine.send(start(age_s=1.0))
    assert seconds_until_gone(engine) == 9.0


def test_a_tools_reported_end_leaves_time_to_return() -> None:
    engine = VirtualEngine(limits=SchedulerLimits(return_grace_s=2.0))
    engine.turn("p", prompt(40))
    engine.send(start("c1"), start("c2"))
    engine.wait(9.5)
    engine.send(stop("c1", 9.5))
    lease = engine.leases.get(P)
    assert lease.expires_s == engine.now + 0.5, "the other call still runs"
    engine.send(stop("c2", 9.5))
    assert seconds_until_gone(engine) == 2.0


def test_a_tool_start_after_an_output_without_a_call_gets_a_late_lease() -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(40), "I will look.")
    assert P not in engine.leases
    engine.evict(prompt(40), keep=6)
    engine.send(start())
    lease = engine.leases.get(P)
    assert list(lease.block_ids) == list(engine.held[P]) == chain(prompt(40))[:6]
    assert engine.reasons("late_keep") == ["fixed"]
    engine.wait(3.0)
    engine.arrive("p", prompt(44))
    assert durations(engine) == [3.0], "inferred for the tool that the client named"


def test_a_reset_that_only_starts_ends_leases_and_keeps_contexts() -> None:
    engine = VirtualEngine()
    engine.turn("a", prompt(40, seed=1))
    scheduler = engine.program_scheduler
    scheduler.handle(CacheResetStarted(), engine.now)
    assert not list(scheduler.leases)
    assert scheduler.context(ProgramId("a"))


def test_a_turn_knows_for_how_long_tools_ran_in_the_gap_before_it() -> None:
    engine = VirtualEngine()
    engine.turn("p", prompt(8))
    engine.send(start("c1"))
    engine.wait(5.0)
    engine.send(stop("c1", 5.0))
    engine.wait(3.0)
    engine.turn("p", prompt(12))
    # A call that began during the turn counts from the turn's end on.
    request = engine.arrive("p", prompt(16))
    engine.admit(request)
    engine.wait(0.5)
    engine.send(start("c2"))
    engine.wait(2.0)
    engine.finish(request)
    engine.wait(0.5)
    engine.send(stop("c2", 2.5))
    engine.turn("p", prompt(20))
    # A call whose end the server does not know.
    engine.send(start("c3"), stop("c3", 0.0), start("c4"))
    engine.wait(1.0)
    engine.turn("p", prompt(24))
    engine.wait(1.0)
    engine.turn("p", prompt(28))
    turns = engine.program_scheduler.state.ledger.of_program("p")
    assert [(turn.gap_s, turn.tool_s) for turn in turns] == [
        (None, None), (8.0, 5.0), (0.0, None), (0.5, 0.5), (1.0, None), (1.0, None),
    ]  # fmt: skip


def test_requests_are_overdue_by_arrival_while_one_without_a_program_is() -> None:
    engine = VirtualEngine("continuum")
    patience_s = engine.program_scheduler.limits.queue_patience_s

    def overdue() -> list[str]:
        may_end = engine.program_scheduler.may_end_any_lease
        queue = engine.queue()
        found = [each for each in queue if may_end(each, engine.now)]
        assert found == queue[: len(found)], "they come first"
        return found

    engine.turn("p", prompt(8))
    engine.admit(engine.arrive(None, prompt(8)))
    of_q = engine.arrive("q", prompt(8))
    engine.wait(1.0)
    of_none = engine.arrive(None, prompt(8))
    engine.wait(1.0)
    of_p = engine.arrive("p", prompt(8))
    engine.wait(patience_s - 1.5)
    assert overdue() == [], "a program's request is not, by itself"
    engine.wait(1.0)
    assert overdue() == [of_q, of_none]
    engine.wait(1.0)
    assert overdue() == [of_q, of_none, of_p]
    engine.admit(of_none)
    assert overdue() == []
    assert not engine.program_scheduler.may_end_any_lease("unknown", engine.now)
