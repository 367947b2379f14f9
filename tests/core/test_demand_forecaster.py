"""What requests will yet write, added up: who comes and goes, what is learned, how a victim comes back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.wire_events import ProgramEnd
from sojourn_server.core.demand_forecaster import MIN_JUDGED_OUTPUTS, PREDICTION_ERROR_WINDOW
from sojourn_server.core.events_and_actions import OutputLengthPredicted, StepCompleted, TurnFinishReason
from sojourn_server.core.request_table import QueueState
from sojourn_server.policies.costs.reload_estimate import LinkCosts
from sojourn_server.policies.policy_views import RunningRequestView
from sojourn_server.policies.preemption_policies import RecoveryMethod
from sojourn_server.policies.preset import Preset, load_preset
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import BLOCK_TOKENS, VirtualEngine, prompt

TYPED = {"sojourn": {"agent_type": "solver"}}


def engine(*, preset: str | Preset = "tetris", blocks: int = 100, host_blocks: int = 0) -> VirtualEngine:
    made = VirtualEngine(preset, blocks=blocks)
    # As an engine with host memory has it; nothing was copied yet.
    made.program_scheduler.forecaster._pool.host_blocks = host_blocks
    made.program_scheduler.state.last_shortage_s = math.inf  # admission forecasts once KV was lost
    return made


def learn(e: VirtualEngine, *lengths: int, agent_type: str = "solver") -> None:
    for number, length in enumerate(lengths):
        request = e.arrive(f"seen-{number}", prompt(8), sojourn={"agent_type": agent_type})
        e.admit(request)
        e.finish(request, output=[7] * length)


def running(request: str, *, context: int = 40, output: int = 0, position: int = 0) -> RunningRequestView:
    return RunningRequestView(
        request, 0, position, -(-context // BLOCK_TOKENS), context_tokens=context, output_tokens=output,
        most_tokens=10_000,
    )  # fmt: skip


def start(e: VirtualEngine, name: str = "p", **hint: object) -> str:
    request = e.arrive(name, prompt(40), **(hint or TYPED))
    e.admit(request)
    return request


def left(e: VirtualEngine, view: RunningRequestView) -> tuple[float, ...] | None:
    foreseen = e.program_scheduler.forecaster.with_predictions(view, e.now)
    return foreseen.remaining


def test_what_is_left_shrinks_with_each_token_and_is_asked_anew_by_and_by() -> None:
    e = engine()
    learn(e, *[100] * 20, *[400] * 20)
    request = start(e)
    first = left(e, running(request))
    assert left(e, running(request, output=20)) == tuple(tokens - 20 for tokens in first)
    assert left(e, running(request, output=150)) == (250.0,) * 8, "the short ones would have ended"


def test_an_output_that_was_cut_before_its_hint_came_true_says_nothing_and_one_beyond_it_does() -> None:
    e = engine()
    hint = {**TYPED, "expected_output_length": 100}
    e.finish(start(e, "a", **hint), output=[7] * 60, outcome=TurnFinishReason.LENGTH)
    assert e.program_scheduler.histories.hints_off.mean("solver", 1) is None
    e.finish(start(e, "b", **hint), output=[7] * 200, outcome=TurnFinishReason.LENGTH)
    assert e.program_scheduler.histories.hints_off.mean("solver", 1) == pytest.approx(math.log(2))
    for outcome in (TurnFinishReason.ERROR, TurnFinishReason.ABORTED):
        e.finish(start(e, outcome.value, **hint), output=[7] * 3, outcome=outcome)
    histories = e.program_scheduler.histories
    assert (histories.hints_off.count("solver"), histories.output_lengths.count()) == (1, 2)


def test_an_accurate_hint_counts_after_eight_of_them() -> None:
    e = engine()
    hint = {**TYPED, "expected_output_length": 200}
    for number in range(8):
        learn(e, 50 + 40 * number, 700)
        request = e.arrive(f"told-{number}", prompt(8), **hint)
        assert e.request_state(request).hint.output_tokens == 200
        e.admit(request)
        e.finish(request, output=[7] * 200)
    assert max(left(e, running(start(e, "p", **hint)))) == pytest.approx(200, abs=1)


def test_who_would_not_fit_is_kept_out_until_somebody_leaves() -> None:
    e = engine(blocks=60)
    learn(e, *[80] * 20)
    a = start(e, "a")
    e.program_scheduler.plan_proactive_offload([running(a)], 10, e.now)
    late = e.request_state(e.arrive("late", prompt(40), **TYPED))
    forecaster = e.program_scheduler.forecaster
    alone, changes = forecaster.demand, forecaster.changes

    def asked() -> bool:
        return e.program_scheduler.may_admit(late, 10, 50, e.now, anything_running=True, most_tokens=10_000)

    assert not asked(), "two of 40 + 80 tokens are 60 blocks, and some are kept free"
    assert e.status("late") is ProgramStatus.GATED
    assert (forecaster.demand, forecaster.changes) == (alone, changes), "one kept out needs nothing"
    e.program_scheduler.preempted(a, e.now, tokens=40)
    assert forecaster.changes > changes
    e.send(ProgramEnd(program_id="late", seq=-1))
    assert e.status("late") is ProgramStatus.ENDED, "although its request still waits"
    assert asked()


def test_preempted_requests_are_asked_about_too_and_strangers_never() -> None:
    e = engine()
    request = start(e)
    e.program_scheduler.preempted(request, e.now, tokens=40)
    assert e.program_scheduler.queue_place(request).state is QueueState.GATED
    assert e.program_scheduler.queue_place(e.arrive(None, prompt(8))).state is QueueState.OPEN


class AlwaysRecompute:
    def recovery(self, victim: object, now: float) -> RecoveryMethod:
        return RecoveryMethod.RECOMPUTE


def test_a_victim_is_copied_ahead_only_where_it_would_be_offloaded() -> None:
    recompute = replace(load_preset("tetris"), recovery=AlwaysRecompute())
    for preset, copied in ((load_preset("tetris"), True), (recompute, False)):
        e = engine(preset=preset, blocks=40, host_blocks=100)
        learn(e, *[100] * 20)
        e.program_scheduler.state.reload.observe_step(1000, 10.0)
        a, b = start(e, "a"), start(e, "b")
        views = [running(a), running(b, position=1)]
        chosen = e.program_scheduler.plan_proactive_offload(views, 20, e.now, link=LinkCosts(1e-6, 1e-6, 0.0))
        assert chosen == (b if copied else None)


def test_every_rule_has_the_same_price_of_getting_kv_back_and_the_cheaper_way_is_taken() -> None:
    """What a step measures of the link counts for preemption as for leases, assumptions included."""
    e = engine(host_blocks=100)
    state, forecaster = e.program_scheduler.state, e.program_scheduler.forecaster
    state.reload.observe_step(1000, 1.0)  # a millisecond a token
    assumed_s = 500 * state.pool.block_bytes / state.pool.block_size / 4e9
    offload, recompute = RecoveryMethod.OFFLOAD, RecoveryMethod.RECOMPUTE
    for link, load_s, recover_s, method in (
        (None, assumed_s, 2 * assumed_s, offload),  # out and back, at the assumed speed
        (LinkCosts(None, 2e-4, loads_queued_s=0.0), 0.1, 0.1 + assumed_s, offload),
        # Behind the loads that wait; they go while it is copied out.
        (LinkCosts(None, 2e-4, loads_queued_s=0.3), 0.4, 0.4, offload),
        (LinkCosts(None, None, loads_queued_s=3.0), 3.0, 0.5, recompute),
        (LinkCosts(1e-4, 1e-4, 0.0, 0.0), 0.05, 0.1, offload),
        (LinkCosts(1e-4, 1e-4, 10.0, 0.0), 0.05, 0.5, recompute),
        (LinkCosts(1e-3, 1e-3, 0.0, 0.0), 0.5, 0.5, recompute),
    ):
        e.program_scheduler.handle(StepCompleted(1, 0.01, 1, link), e.now)
        assert state.host_link.load_s(500) == pytest.approx(load_s)
        view = forecaster.with_predictions(running(start(e), context=500), e.now)
        assert view.recover_s == pytest.approx(recover_s)
        assert forecaster.recovery(500, e.now) is method
    nowhere = engine().program_scheduler
    assert nowhere.state.host_link.load_s(500) is None
    assert nowhere.forecaster.recovery(500, 0.0) is recompute


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["arrive", "leave", "preempt", "look"]), st.integers(0, 9)), max_size=40
    )
)
def test_the_need_is_that_of_those_who_run_whatever_happens(happenings: list[tuple[str, int]]) -> None:
    """Between looks it is kept by adding and taking away; it must come to what a look would say."""
    e = engine(blocks=10_000)
    learn(e, *range(1, 41))
    live: dict[str, RunningRequestView] = {}
    scheduler = e.program_scheduler
    scheduler.plan_proactive_offload([], 0, e.now)
    for what, which in happenings:
        if what == "arrive":
            state = e.request_state(e.arrive(f"p{len(live)}-{which}", prompt(40), **TYPED))
            changes = scheduler.forecaster.changes
            for _ in range(1 + which % 2):  # the engine may have no place for it though there are blocks
                assert scheduler.may_admit(
                    state, 10, 9_000, e.now, anything_running=True, output_tokens=0, most_tokens=10_000
                )
            e.admit(state.request_id)
            assert scheduler.forecaster.changes == changes, "no request has left"
            live[state.request_id] = running(state.request_id)
        elif live and what in ("leave", "preempt"):
            request = sorted(live)[which % len(live)]
            del live[request]
            if what == "leave":
                e.finish(request)
            else:
                scheduler.preempted(request, e.now, tokens=40)
        elif what == "look":
            scheduler.plan_proactive_offload(list(live.values()), 0, e.now)
    kept = scheduler.forecaster.demand.needed_blocks
    scheduler.plan_proactive_offload(list(live.values()), 0, e.now)
    assert kept == pytest.approx(scheduler.forecaster.demand.needed_blocks, abs=1e-6)


def guess(e: VirtualEngine, request: str, at: int, *left: float) -> None:
    e.handle(OutputLengthPredicted(request, at, left), e.now)


def judged(
    e: VirtualEngine, outputs: int, *, guessed: float, length: int = 200, name: str = "judged"
) -> None:
    """So many outputs of ``length``, each guessed once, at its beginning."""
    for number in range(outputs):
        request = start(e, f"{name}-{number}")
        guess(e, request, 0, guessed)
        e.finish(request, output=[7] * length)


def network() -> VirtualEngine:
    """Answers of 50 and of 800 tokens are known: 200 are in the middle of nothing."""
    e = engine(preset="tetris-learned", blocks=10_000)
    learn(e, *[50] * 20, *[800] * 21)
    return e


def test_a_guess_counts_once_enough_of_them_have_been_judged_and_were_closer() -> None:
    e = network()
    judged(e, MIN_JUDGED_OUTPUTS - 1, guessed=200.0)
    assert e.program_scheduler.forecaster.prediction_errors == (None, None)
    request = start(e, "p")
    guess(e, request, 0, *[190.0] * 8)
    assert left(e, running(request)) != (190.0,) * 8
    judged(e, 1, guessed=200.0, name="last")
    off, without = e.program_scheduler.forecaster.prediction_errors
    assert off == pytest.approx(0.0, abs=1e-9)
    assert without > 0.1
    asked = start(e, "q")
    guess(e, asked, 0, *[190.0] * 8)
    assert left(e, running(asked)) == (190.0,) * 8
    assert left(e, running(start(e, "nobody guessed this one"))) not in (None, (190.0,) * 8)


def test_a_network_that_gets_worse_is_given_up_by_and_by() -> None:
    e = network()
    judged(e, PREDICTION_ERROR_WINDOW, guessed=200.0)
    assert e.program_scheduler.forecaster.prediction_errors[0] == pytest.approx(0.0, abs=1e-9)
    judged(e, PREDICTION_ERROR_WINDOW, guessed=20_000.0, name="worse")
    assert e.program_scheduler.forecaster.prediction_errors[0] == pytest.approx(math.log(100)), (
        "only the newest are counted"
    )


def test_a_guess_shrinks_with_each_token_and_a_newer_one_is_heard_at_once() -> None:
    e = network()
    judged(e, MIN_JUDGED_OUTPUTS, guessed=200.0)
    request = start(e, "p")
    guess(e, request, 10, 5.0, 100.0, 200.0)
    assert left(e, running(request, output=10)) == (5.0, 100.0, 200.0)
    assert left(e, running(request, output=30)) == (1.0, 80.0, 180.0)
    guess(e, request, 31, 60.0, 70.0, 80.0)
    assert left(e, running(request, output=31)) == (60.0, 70.0, 80.0), "not only after so many tokens more"
