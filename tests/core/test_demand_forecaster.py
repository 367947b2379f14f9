"""What requests will yet write, added up: who comes and goes, what is learned, how a victim comes back."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.core.demand_forecaster import (
    JUDGED_PREDICTION_SPACING,
    MAX_JUDGED_PREDICTIONS_PER_OUTPUT,
    MIN_JUDGED_OUTPUTS,
    PREDICTION_ERROR_WINDOW,
    PREDICTION_VALID_TOKENS,
    REPREDICT_AFTER_TOKENS,
)
from sojourn_server.core.events_and_actions import StepCompleted, TurnFinishReason
from sojourn_server.core.program_scheduler import QueueState
from sojourn_server.policies.forecasting.kv_demand import needed_blocks
from sojourn_server.policies.policy_views import RunningRequestView
from sojourn_server.policies.preemption.preemption_recovery import AlwaysRecompute, RecoveryMethod
from sojourn_server.policies.preset import Preset, load_preset, parse_preset
from virtual_engine import BLOCK_TOKENS, VirtualEngine, prompt

TYPED = {"sojourn": {"agent_type": "solver"}}


def engine(*, preset: str | Preset = "tetris", blocks: int = 100, host_blocks: int = 0) -> VirtualEngine:
    made = VirtualEngine(preset, blocks=blocks)
    # As an engine with host memory has it; nothing was copied yet.
    made.program_scheduler._forecaster._pool.host_blocks = host_blocks
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
    foreseen = e.program_scheduler._forecaster.with_predictions(view, e.now)
    return foreseen.remaining


def test_nothing_is_known_before_enough_has_been_seen() -> None:
    e = engine()
    learn(e, *[10] * 15)
    assert left(e, running(start(e))) is None
    learn(e, 10)
    assert left(e, running(start(e, "q"))) == (10.0,) * 8


def test_what_is_left_shrinks_with_each_token_and_is_asked_anew_by_and_by() -> None:
    e = engine()
    learn(e, *[100] * 20, *[400] * 20)
    request = start(e)
    first = left(e, running(request))
    assert first is not None
    assert left(e, running(request, output=20)) == tuple(tokens - 20 for tokens in first)
    assert left(e, running(request, output=150)) == (250.0,) * 8, "the short ones would have ended"


def test_an_aborted_output_teaches_nothing() -> None:
    e = engine()
    learn(e, *[10] * 15)
    request = e.arrive("gone", prompt(8), **TYPED)
    e.admit(request)
    e.finish(request, output=[7] * 3, outcome=TurnFinishReason.ABORTED)
    assert e.program_scheduler.histories.output_lengths.count() == 15


@pytest.mark.parametrize("written", [1, 5])
def test_who_lies_and_aborts_is_soon_not_believed(written: int) -> None:
    e = engine()
    for number in range(8):
        learn(e, 50 + 40 * number, 700)
        request = start(e, f"told-{number}", **TYPED, expected_output_length=200)
        e.finish(request, output=[7] * 200)
    lie = {**TYPED, "expected_output_length": 10**6}
    untold = left(e, running(start(e, "untold")))

    def aborted(outcome: TurnFinishReason) -> None:
        e.finish(start(e, "liar", **lie), output=[7] * written, outcome=outcome)

    aborted(TurnFinishReason.ERROR)
    assert left(e, running(start(e, "before", **lie))) == pytest.approx((10_000.0,) * 8), (
        "whose fault that was nobody knows"
    )
    for _ in range(3):
        aborted(TurnFinishReason.ABORTED)
    assert left(e, running(start(e, "after", **lie))) == untold
    assert e.program_scheduler.histories.output_lengths.count() == 24, "and nothing was learned of lengths"


@pytest.mark.parametrize(
    ("written", "outcome"),
    [(0, TurnFinishReason.ABORTED), (1, TurnFinishReason.ABORTED), (1, TurnFinishReason.LENGTH)],
    ids=["aborted before it began", "aborted as it was hinted", "cut as it was hinted"],
)
def test_a_record_of_true_hints_is_not_to_be_had_for_nothing(written: int, outcome: TurnFinishReason) -> None:
    e = engine()
    learn(e, *[50] * 20, *[700] * 20)
    hint = {**TYPED, "expected_output_length": 1}
    for number in range(10):
        e.finish(start(e, f"told-{number}", **hint), output=[7] * written, outcome=outcome)
    assert e.program_scheduler.histories.hints_off.mean("solver", 1) is None


def test_an_honest_client_that_cancels_in_the_queue_stays_believed() -> None:
    e = engine()
    learn(e, *[50] * 20, *[700] * 20)
    hint = {**TYPED, "expected_output_length": 500}
    for number in range(10):
        e.finish(start(e, f"told-{number}", **hint), output=[7] * 500)
    for number in range(10):
        e.finish(start(e, f"gone-{number}", **hint), output=[], outcome=TurnFinishReason.ABORTED)
    assert e.program_scheduler.histories.hints_off.mean("solver", 1) == 0.0


def test_an_output_that_was_cut_before_its_hint_came_true_says_nothing_and_one_beyond_it_does() -> None:
    e = engine()
    hint = {**TYPED, "expected_output_length": 100}
    e.finish(start(e, "a", **hint), output=[7] * 60, outcome=TurnFinishReason.LENGTH)
    assert e.program_scheduler.histories.hints_off.mean("solver", 1) is None
    e.finish(start(e, "b", **hint), output=[7] * 200, outcome=TurnFinishReason.LENGTH)
    assert e.program_scheduler.histories.hints_off.mean("solver", 1) == pytest.approx(math.log(2))


# -- between two looks --------------------------------------------------------------------


def test_who_leaves_takes_what_it_shared_out_of_the_room_too() -> None:
    e = engine(blocks=100)
    learn(e, *[20] * 20)
    names = [start(e, name) for name in "ab"]
    views = [running(name, context=200)._replace(freed_blocks=20) for name in names]
    demand_forecaster = e.program_scheduler._forecaster
    demand_forecaster.sample_demand(views, 70, e.now)  # 30 that both have, and 20 of each
    assert demand_forecaster.demand.available_blocks == 130
    demand_forecaster.request_left(names[0])
    assert demand_forecaster.demand.available_blocks == 100, "all there are, for the one who is left"
    looked_at = demand_forecaster.demand.needed_blocks
    demand_forecaster.sample_demand(views[1:], 50, e.now)
    assert demand_forecaster.demand.available_blocks == 100
    assert demand_forecaster.demand.needed_blocks == pytest.approx(looked_at)


def test_a_stranger_counts_from_when_it_is_admitted() -> None:
    e = engine(blocks=100)
    learn(e, *[20] * 20)
    demand_forecaster = e.program_scheduler._forecaster
    demand_forecaster.sample_demand([], 0, e.now)
    before = demand_forecaster.demand.needed_blocks[0]
    stranger = e.arrive(None, prompt(40))
    e.admit(stranger)
    assert demand_forecaster.demand.needed_blocks[0] - before == pytest.approx(40 / BLOCK_TOKENS, abs=1)
    e.admit(stranger)
    assert demand_forecaster.demand.needed_blocks[0] - before == pytest.approx(40 / BLOCK_TOKENS, abs=1), (
        "once"
    )
    e.finish(stranger)
    assert demand_forecaster.demand.needed_blocks == pytest.approx(
        [0.0] * len(demand_forecaster.demand.needed_blocks)
    )


def test_requests_of_no_program_teach_nothing() -> None:
    e = engine()
    e.admit(e.arrive(None, prompt(8)))
    e.finish("r1", output=[7] * 9)
    assert e.program_scheduler.histories.output_lengths.count() == 0


def test_an_accurate_hint_counts_after_eight_of_them() -> None:
    e = engine()
    hint = {**TYPED, "expected_output_length": 200}
    for number in range(8):
        learn(e, 50 + 40 * number, 700)
        request = e.arrive(f"told-{number}", prompt(8), **hint)
        assert e.request_state(request).hinted_tokens == 200
        e.admit(request)
        e.finish(request, output=[7] * 200)
    told = left(e, running(start(e, "p", **hint)))
    assert told is not None
    assert max(told) == pytest.approx(200, abs=1)


def test_who_leaves_is_taken_out_of_the_need_and_who_comes_is_put_in() -> None:
    e = engine()
    learn(e, *[64] * 20)
    a, b = start(e, "a"), start(e, "b")
    demand_forecaster = e.program_scheduler._forecaster
    both = [running(a), running(b, position=1)]
    demand_forecaster.sample_demand(both, 20, e.now)
    whole = demand_forecaster.demand.needed_blocks
    assert whole == pytest.approx(
        needed_blocks([demand_forecaster.with_predictions(view, e.now) for view in both], BLOCK_TOKENS)
    )
    e.finish(a, output=[7] * 64)
    alone = demand_forecaster.demand.needed_blocks
    assert alone == pytest.approx([need / 2 for need in whole])
    request_state = e.request_state(e.arrive("c", prompt(40), **TYPED))
    assert e.program_scheduler.may_admit(
        request_state, 10, 80, e.now, anything_running=True, output_tokens=0, most_tokens=10_000
    )
    assert demand_forecaster.demand.needed_blocks == pytest.approx(whole)


def test_who_would_not_fit_is_kept_out_until_somebody_leaves() -> None:
    e = engine(blocks=60)
    learn(e, *[80] * 20)
    a = start(e, "a")
    e.program_scheduler.plan_proactive_offload([running(a)], 10, e.now)
    late = e.request_state(e.arrive("late", prompt(40), **TYPED))

    def asked() -> bool:
        return e.program_scheduler.may_admit(
            late, 10, 50, e.now, anything_running=True, output_tokens=0, most_tokens=10_000
        )

    assert not asked(), "two of 40 + 80 tokens are 60 blocks, and some are kept free"
    e.program_scheduler.preempted(a, e.now, tokens=40)
    assert asked()


def test_who_may_enter_and_is_not_admitted_may_enter_again_and_is_counted_once() -> None:
    """The engine may have no place for it though there are blocks enough: its most sequences run, say."""
    e = engine(blocks=70)
    learn(e, *[80] * 20)
    a = start(e, "a")
    demand_forecaster = e.program_scheduler._forecaster
    e.program_scheduler.plan_proactive_offload([running(a)], 10, e.now)
    alone = demand_forecaster.demand.needed_blocks
    late = e.request_state(e.arrive("late", prompt(40), **TYPED))

    def asked() -> bool:
        return e.program_scheduler.may_admit(
            late, 10, 60, e.now, anything_running=True, output_tokens=0, most_tokens=10_000
        )

    changes = demand_forecaster.changes
    assert [asked() for _ in range(3)] == [True] * 3, "two of 40 + 80 tokens are 60 blocks, three 90"
    assert demand_forecaster.demand.needed_blocks == pytest.approx([2 * need for need in alone])
    assert demand_forecaster.changes == changes, "nobody has left"
    demand_forecaster.add_demand(running(start(e, "b")))
    both = demand_forecaster.demand.needed_blocks
    assert not asked()
    assert not asked()
    assert demand_forecaster.demand.needed_blocks == pytest.approx(
        [need - its for need, its in zip(both, alone, strict=True)]
    ), "whoever is kept out needs nothing"
    assert demand_forecaster.changes == changes


def test_preempted_requests_are_asked_about_too_and_strangers_never() -> None:
    e = engine()
    request = start(e)
    e.program_scheduler.preempted(request, e.now, tokens=40)
    assert e.program_scheduler.queue_place(request).state is QueueState.GATED
    assert e.program_scheduler.queue_place(e.arrive(None, prompt(8))).state is QueueState.OPEN


def test_a_victim_is_copied_ahead_only_where_it_would_be_offloaded() -> None:
    recompute = replace(load_preset("tetris"), recovery=AlwaysRecompute())
    for preset, copied in ((load_preset("tetris"), True), (recompute, False)):
        e = engine(preset=preset, blocks=40, host_blocks=100)
        learn(e, *[100] * 20)
        e.program_scheduler.state.reload.observe_step(1000, 10.0)
        a, b = start(e, "a"), start(e, "b")
        views = [running(a), running(b, position=1)]
        chosen = e.program_scheduler.plan_proactive_offload(
            views, 20, e.now, offload_s_per_token=1e-6, load_back_s_per_token=1e-6
        )
        assert chosen == (b if copied else None)


def test_the_way_back_goes_by_what_either_costs_now() -> None:
    e = engine(host_blocks=100)
    e.program_scheduler.state.reload.observe_step(1000, 1.0)  # a millisecond a token
    demand_forecaster = e.program_scheduler._forecaster
    link = e.program_scheduler.state.host_link
    link.observe_stores(1e-4, 0.0)
    link.observe_loads(1e-4, 0.0)
    assert demand_forecaster.recovery(500, e.now) is RecoveryMethod.OFFLOAD
    link.observe_stores(1e-4, 10.0)
    assert demand_forecaster.recovery(500, e.now) is RecoveryMethod.RECOMPUTE, (
        "the link is busy for ten seconds"
    )
    link.observe_stores(1e-3, 0.0)
    link.observe_loads(1e-3, 0.0)
    assert demand_forecaster.recovery(500, e.now) is RecoveryMethod.RECOMPUTE, (
        "a link at a tenth of its speed"
    )
    assert engine().program_scheduler._forecaster.recovery(500, 0.0) is RecoveryMethod.RECOMPUTE, (
        "there is nowhere to copy to"
    )


def test_every_rule_has_the_same_price_of_getting_kv_back() -> None:
    """What a step measures of the link counts for preemption as for leases, assumptions included."""
    e = engine(host_blocks=100)
    state, demand_forecaster = e.program_scheduler.state, e.program_scheduler._forecaster
    state.reload.observe_step(1000, 1.0)  # a millisecond a token
    assumed_s = state.copy_back_s(500)
    assert assumed_s == pytest.approx(500 * state.pool.block_bytes / state.pool.block_size / 4e9)

    def recovers_s(tokens: int) -> float:
        return demand_forecaster.with_predictions(running(start(e), context=tokens), e.now).recover_s

    assert recovers_s(500) == pytest.approx(2 * assumed_s), "out and back, at the assumed speed"
    e.program_scheduler.handle(StepCompleted(1, 0.01, 1, load_back_s_per_token=2e-4), e.now)
    assert state.copy_back_s(500) == pytest.approx(0.1)
    assert recovers_s(500) == pytest.approx(0.1 + assumed_s)
    e.program_scheduler.handle(StepCompleted(1, 0.01, 1, load_back_s_per_token=2e-4, queued_s=0.3), e.now)
    assert state.copy_back_s(500) == pytest.approx(0.4), "behind the copies that wait"
    assert recovers_s(500) == pytest.approx(0.4), "they go while it is copied out"
    e.program_scheduler.handle(StepCompleted(1, 0.01, 1, queued_s=3.0), e.now)
    assert recovers_s(500) == pytest.approx(0.5), "computing is faster"
    assert engine().program_scheduler.state.copy_back_s(500) is None, "there is no host memory"


def test_the_link_counts_also_where_nobody_ever_looks_ahead() -> None:
    preset = parse_preset('extends = "continuum"\nrecovery = "cheaper"', source="x")
    e = engine(preset=preset, host_blocks=100)
    e.program_scheduler.state.reload.observe_step(1000, 1.0)  # a millisecond a token

    def way(**link: float) -> RecoveryMethod:
        return e.program_scheduler.preempted(start(e), e.now, tokens=500, **link)

    assert way() is RecoveryMethod.OFFLOAD, "as is assumed of a link"
    assert way(offload_s_per_token=1e-3, load_back_s_per_token=1e-3) is RecoveryMethod.RECOMPUTE
    assert way(offload_s_per_token=1e-4, load_back_s_per_token=1e-4) is RecoveryMethod.OFFLOAD
    assert (
        way(offload_s_per_token=1e-4, load_back_s_per_token=1e-4, queued_s=10.0) is RecoveryMethod.RECOMPUTE
    )


def test_what_is_expected_of_an_output_is_noted_when_it_begins_and_not_later() -> None:
    e = engine()
    learn(e, *[100] * 15)
    early, late, never = (start(e, name) for name in ("early", "late", "never"))
    assert left(e, running(late)) is None
    learn(e, 100)
    assert left(e, running(early, output=REPREDICT_AFTER_TOKENS - 1)) is not None
    assert left(e, running(late, output=REPREDICT_AFTER_TOKENS)) is not None
    assert left(e, running(early, output=90)) is not None
    assert e.request_state(early).predicted_output_tokens == 100.0
    assert e.request_state(late).predicted_output_tokens is None
    e.program_scheduler.recorder.drain()
    for request in (early, late, never):
        e.finish(request, output=[7] * 200)
    ((_, ratio),) = e.program_scheduler.recorder.drain()["histograms"]["sojourn_output_length_ratio"]
    assert (ratio["count"], ratio["sum"]) == (1, 2.0)


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
    e.program_scheduler.plan_proactive_offload([], 0, e.now)
    for what, which in happenings:
        if what == "arrive":
            request_state = e.request_state(e.arrive(f"p{len(live)}-{which}", prompt(40), **TYPED))
            assert e.program_scheduler.may_admit(
                request_state, 10, 9_000, e.now, anything_running=True, output_tokens=0, most_tokens=10_000
            )
            e.admit(request_state.request_id)
            live[request_state.request_id] = running(request_state.request_id)
        elif live and what in ("leave", "preempt"):
            request = sorted(live)[which % len(live)]
            del live[request]
            if what == "leave":
                e.finish(request)
            else:
                e.program_scheduler.preempted(request, e.now, tokens=40)
        elif what == "look":
            e.program_scheduler.plan_proactive_offload(list(live.values()), 0, e.now)
    kept = e.program_scheduler._forecaster.demand.needed_blocks
    e.program_scheduler.plan_proactive_offload(list(live.values()), 0, e.now)
    assert kept == pytest.approx(e.program_scheduler._forecaster.demand.needed_blocks, abs=1e-6)


# -- what a network guesses ------------------------------------------------------------------------


def guess(e: VirtualEngine, request: str, at: int, *left: float) -> None:
    e.program_scheduler.guessed(request, at, left, e.now)


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
    before = left(e, running(start(e, "before")))
    judged(e, MIN_JUDGED_OUTPUTS - 1, guessed=200.0)
    assert e.program_scheduler._forecaster.prediction_errors == (None, None)
    request = start(e, "p")
    guess(e, request, 0, *[190.0] * 8)
    assert left(e, running(request)) != (190.0,) * 8
    judged(e, 1, guessed=200.0, name="last")
    off, without = e.program_scheduler._forecaster.prediction_errors
    assert off is not None
    assert without is not None
    assert off == pytest.approx(0.0, abs=1e-9)
    assert without > 0.1
    asked = start(e, "q")
    guess(e, asked, 0, *[190.0] * 8)
    assert left(e, running(asked)) == (190.0,) * 8
    assert left(e, running(start(e, "nobody guessed this one"))) not in (None, (190.0,) * 8)
    assert before is not None


def test_guesses_that_were_further_off_are_not_taken() -> None:
    e = network()
    judged(e, MIN_JUDGED_OUTPUTS, guessed=20_000.0)
    off, without = e.program_scheduler._forecaster.prediction_errors
    assert off == pytest.approx(math.log(100))
    assert without is not None
    assert off > without
    request = start(e, "p")
    guess(e, request, 0, *[190.0] * 8)
    assert left(e, running(request)) == left(e, running(start(e, "q")))


def test_a_network_that_gets_worse_is_given_up_by_and_by() -> None:
    e = network()
    judged(e, PREDICTION_ERROR_WINDOW, guessed=200.0)
    assert e.program_scheduler._forecaster.prediction_errors[0] == pytest.approx(0.0, abs=1e-9)
    judged(e, PREDICTION_ERROR_WINDOW, guessed=20_000.0, name="worse")
    assert e.program_scheduler._forecaster.prediction_errors[0] == pytest.approx(math.log(100)), (
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


def test_lengths_that_have_been_passed_are_left_out_of_a_guess_until_none_is_left() -> None:
    e = network()
    judged(e, MIN_JUDGED_OUTPUTS, guessed=200.0)
    request, other = start(e, "p"), start(e, "q")
    guess(e, request, 10, 20.0, 60.0, 100.0, 100.5)
    assert left(e, running(request, output=10)) == (20.0, 60.0, 100.0, 100.5)
    assert left(e, running(request, output=42)) == (28.0, 68.0, 68.5), "it lives"
    assert left(e, running(request, output=80)) == (30.0, 30.5)
    assert left(e, running(request, output=110)) == (1.0, 1.0)
    spent = left(e, running(request, output=112))
    assert spent == left(e, running(other, output=112)) != (1.0, 1.0), "what is known without it"


@pytest.mark.parametrize(
    ("at", "last"),
    [(10, 10 + PREDICTION_VALID_TOKENS), (3000, 4000)],
    ids=["so many tokens", "a quarter of all"],
)
def test_a_guess_is_forgotten_by_and_by(at: int, last: int) -> None:
    e = network()
    judged(e, MIN_JUDGED_OUTPUTS, guessed=200.0)
    request, other = start(e, "p"), start(e, "q")

    def asked(output: int) -> tuple[float, ...] | None:
        e.request_state(request).predicted_at_tokens = -REPREDICT_AFTER_TOKENS  # that it is asked at all
        return left(e, running(request, output=output))

    guess(e, request, at, 5000.0)
    assert asked(last) == (5000.0 - (last - at),)
    for output in (last + 4, 2 * last):
        assert asked(output) == left(e, running(other, output=output))


@pytest.mark.parametrize(
    "nonsense", [(), (math.nan,), (5.0, math.inf), (0.5, 9.0), (-3.0,)], ids=lambda points: str(points)
)
def test_guesses_that_make_no_sense_are_left_out(nonsense: tuple[float, ...]) -> None:
    e = network()
    request = start(e)
    guess(e, request, 4, 9.0)
    guess(e, request, 5, *nonsense)
    assert (
        e.request_state(request).network_prediction,
        e.request_state(request).network_predicted_at_tokens,
    ) == ((9.0,), 4)
    assert len(e.request_state(request).checked_predictions) == 1


def test_a_guess_from_before_the_newest_and_one_of_somebody_gone_are_left_out() -> None:
    e = network()
    request = start(e)
    guess(e, request, 40, 9.0)
    guess(e, request, 39, 300.0)
    assert e.request_state(request).network_prediction == (9.0,)
    guess(e, request, 40, 11.0)
    assert e.request_state(request).network_prediction == (11.0,), "the last word of the same place"
    guess(e, "gone", 3, 9.0)
    e.finish(request)
    guess(e, request, 50, 9.0)


def test_a_long_output_is_not_the_judge_alone() -> None:
    e = network()
    request = start(e)
    for at in range(0, 4000, 4):
        guess(e, request, at, 4001.0 - at)
    counted = [at for at, _, _ in e.request_state(request).checked_predictions]
    assert len(counted) == MAX_JUDGED_PREDICTIONS_PER_OUTPUT
    assert counted[:4] == [0, 4, 8, 12], "the first come close together"
    assert all(after >= JUDGED_PREDICTION_SPACING * before for before, after in pairwise(counted))
    assert all(
        after - before <= 4 + JUDGED_PREDICTION_SPACING * before for before, after in pairwise(counted)
    )
    assert counted[-1] > 150, "and those later on count as well"
    assert e.request_state(request).network_predicted_at_tokens == 3996, "and yet the newest is heard"
    e.finish(request, output=[7] * 4001)
    assert e.program_scheduler._forecaster._network_errors.snapshot() == [pytest.approx(0.0)]


def test_an_output_counts_once_however_often_it_was_guessed() -> None:
    e = network()
    judged(e, MIN_JUDGED_OUTPUTS - 2, guessed=200.0)
    often, once = start(e, "often"), start(e, "once")
    for at in range(16):
        guess(e, often, at, 10.0 * (200 - at))
    guess(e, once, 0, 200.0)
    e.finish(often, output=[7] * 200)
    assert e.program_scheduler._forecaster.prediction_errors == (None, None), "one output less than it takes"
    e.finish(once, output=[7] * 200)
    off, without = e.program_scheduler._forecaster.prediction_errors
    assert off == pytest.approx(math.log(10) / MIN_JUDGED_OUTPUTS)
    assert without == pytest.approx(e.program_scheduler._forecaster._baseline_errors.mean())
    judged(e, PREDICTION_ERROR_WINDOW, guessed=200.0, name="later")
    assert (
        e.program_scheduler._forecaster._network_errors.count()
        == e.program_scheduler._forecaster._baseline_errors.count()
        == PREDICTION_ERROR_WINDOW
    )


def test_where_only_the_network_says_something_neither_is_judged() -> None:
    e = engine(preset="tetris-learned", blocks=10_000)
    judged(e, 15, guessed=200.0)
    assert e.program_scheduler._forecaster._network_errors.count() == 0, (
        "fewer than sixteen outputs: nothing is known without it"
    )
    judged(e, 5, guessed=200.0, name="more")
    assert (
        e.program_scheduler._forecaster._network_errors.count()
        == e.program_scheduler._forecaster._baseline_errors.count()
        == 4
    )


def test_outputs_that_were_broken_off_or_of_nobody_judge_nobody() -> None:
    e = network()
    request = start(e)
    guess(e, request, 0, 100.0)
    e.finish(request, output=[7] * 3, outcome=TurnFinishReason.ABORTED)
    stranger = e.arrive(None, prompt(8))
    e.admit(stranger)
    guess(e, stranger, 0, 100.0)
    e.finish(stranger, output=[7] * 9)
    late = start(e, "late")
    guess(e, late, 9, 100.0)
    e.finish(late, output=[7] * 9)  # of the step that was under way when it ended
    assert e.program_scheduler._forecaster._network_errors.count() == 0


def test_who_never_predicts_hears_no_guess() -> None:
    e = engine(preset="continuum")
    request = start(e)
    guess(e, request, 0, 100.0)
    assert e.request_state(request).network_prediction is None


def test_stats_say_what_there_is_to_judge_by() -> None:
    e = network()
    assert e.ask("stats")["output_lengths"] == {
        "outputs": 41, "network_off": None, "without_off": None, "network": None,
    }  # fmt: skip
    judged(e, MIN_JUDGED_OUTPUTS, guessed=20_000.0)
    known = e.ask("stats")["output_lengths"]
    assert known["outputs"] == 41 + MIN_JUDGED_OUTPUTS
    assert (
        known["network_off"],
        known["without_off"],
    ) == e.program_scheduler._forecaster.prediction_errors
