"""Forecasts the KV demand of running requests, and decides which requests may be admitted.

The forecaster asks the preset's remaining-tokens policy about each request, samples the demand of all running
requests every few steps, and learns from every finished output. Between two samples it subtracts the demand
of leaving requests and adds that of new ones. Times are seconds on the engine's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from sojourn.ids import ProgramId

from ..policies.costs.reload_estimate import restore_s
from ..policies.forecasting import (
    STEP_POINTS,
    KvDemandView,
    OutputLengthView,
    RemainingTokens,
    RequestGrowth,
    needed_blocks,
)
from ..policies.policy_views import (
    AdmissionView,
    BlockShortage,
    GrowthStatistics,
    ProgramGrowthView,
    RunningRequestView,
)
from ..policies.preemption_policies import PreemptedRequestView, RecoveryMethod
from ..programs.program_status import ProgramSignal
from ..programs.windowed_history import SlidingWindow
from .events_and_actions import (
    AdmissionRequested,
    DemandSampled,
    OutputLengthPredicted,
    RequestChosen,
    TurnFinished,
    TurnFinishReason,
    VictimNeeded,
)
from .request_table import RequestState
from .scheduler_state import SchedulerState

REPREDICT_AFTER_TOKENS = 32
"""Number of generated tokens after which a prediction is renewed. Until then, each reduces it by one."""
MIN_OUTPUT_SAMPLES = 16
"""Minimum number of past outputs of an agent type and tool from which a length is predicted. With fewer, a
wider group of outputs is used."""
MIN_JUDGED_HINTS = 8
"""Minimum number of checked hints of an agent type before the type's hint error counts."""
MIN_JUDGED_OUTPUTS = 16
"""Minimum number of checked outputs, of all types, before a neural network's predictions are used."""
PREDICTION_ERROR_WINDOW = 128
"""Number of newest outputs from which the neural network's error is computed. Each output counts once,
because errors within one output are alike."""
MAX_JUDGED_PREDICTIONS_PER_OUTPUT = 16
"""Maximum number of the neural network's predictions for one output that are checked."""
JUDGED_PREDICTION_SPACING = 1.25
"""Factor by which an output must grow before the next of these predictions is checked."""
PREDICTION_VALID_TOKENS = 4 * REPREDICT_AFTER_TOKENS
PREDICTION_VALID_DIVISOR = 4
"""A neural network's prediction stays valid for max(``PREDICTION_VALID_TOKENS``, tokens generated so far ÷
``PREDICTION_VALID_DIVISOR``) further generated tokens."""
STEP_SMOOTHING = 0.05
"""Weight of the newest step in the mean step time."""


class DemandForecaster:
    """Forecasts output lengths and KV demand of one engine."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pool = state.pool
        self._lengths = state.histories.output_lengths
        self._hints_off = state.histories.hints_off
        self._reload = state.reload
        self._host_link = state.host_link
        self._request_states = state.requests.states
        self._recorder = state.recorder
        self.predictor = state.preset.output_length
        """Policy that predicts remaining tokens. The simulator may set a policy that knows the true
        lengths."""
        self._step_s = 0.0
        self._network_errors = SlidingWindow(PREDICTION_ERROR_WINDOW)
        self._baseline_errors = SlidingWindow(PREDICTION_ERROR_WINDOW)
        """Prediction errors of the newest outputs, of the neural network and of the predictor without it at
        the same positions."""
        self._counted: dict[str, RequestGrowth] = {}
        """Requests that ran at the last sample or were admitted since, with their sizes at that time."""
        self._needed = [0.0] * len(STEP_POINTS)
        """Expected need of all counted requests, in blocks, at each of ``STEP_POINTS``."""
        self._room_blocks = self._pool.blocks
        """Number of blocks available to the counted requests, as ``_available_blocks`` counts them."""
        self.changes = 0
        """Number of samples and departures so far. After each, the admission policy may accept a request that
        it rejected before."""

    @property
    def predicts(self) -> bool:
        """Whether the preset predicts output lengths."""
        return self.predictor.predicts

    def record_step(self, seconds: float) -> None:
        """Record the duration of an engine step."""
        if seconds > 0:
            self._step_s += (STEP_SMOOTHING if self._step_s else 1.0) * (seconds - self._step_s)

    def request_left(self, request_id: str) -> None:
        """Subtract the demand of a request that has left the device."""
        if self.remove_demand(request_id):
            self.changes += 1

    def remove_demand(self, request_id: str) -> bool:
        """Subtract a request's demand from the sum. Returns whether the sum included it."""
        view = self._counted.pop(request_id, None)
        if view is None:
            return False
        # Each shared block counts once per request, in demand and in available blocks.
        self._room_blocks -= view.shared_blocks
        demand = needed_blocks([view], self._pool.tokens_per_block)
        self._needed = [whole - part for whole, part in zip(self._needed, demand, strict=True)]
        return True

    def admitted(self, request_state: RequestState, tokens: int, most_tokens: int, now: float) -> None:
        """Add the demand of an admitted request that has ``tokens`` tokens and may generate ``most_tokens``
        more."""
        if self.predicts and most_tokens and request_state.request_id not in self._counted:
            written = max(0, tokens - request_state.prompt_tokens)
            self.add_demand(self.as_running_view(request_state, tokens, written, most_tokens, now))

    def add_demand(self, view: RunningRequestView) -> None:
        """Add the demand of a request that the admission policy accepted."""
        self.remove_demand(view.request_id)
        self._counted[view.request_id] = RequestGrowth(view.context_tokens, view.remaining)
        demand = needed_blocks([view], self._pool.tokens_per_block)
        self._needed = [whole + part for whole, part in zip(self._needed, demand, strict=True)]

    def ended(self, request_state: RequestState, event: TurnFinished) -> None:
        """Learn from a finished output. The length of an aborted output is not learned, and the error of its
        hint counts only above the mean of its type, so that an abort never makes hints look better."""
        program, output_tokens, reason = request_state.program, event.output_tokens, event.outcome
        if not self.predicts or program is None or output_tokens < 1 or reason is TurnFinishReason.ERROR:
            return
        if reason is TurnFinishReason.ABORTED:
            self._judge_hint(request_state, output_tokens, only_worse=True)
            return
        self._lengths.observe_output(program.agent_type, request_state.tool, output_tokens)
        # An output cut at its maximum length cannot refute a hint of at least that length.
        if reason is not TurnFinishReason.LENGTH or (request_state.hinted_tokens or 0) < output_tokens:
            self._judge_hint(request_state, output_tokens)
        if request_state.predicted_output_tokens is not None:
            self._recorder.observe(
                "sojourn_output_length_ratio", output_tokens / request_state.predicted_output_tokens
            )
        self._judge_predictions(request_state, output_tokens)

    def store_prediction(self, event: OutputLengthPredicted, now: float) -> None:
        """Store a neural network's prediction of a request's remaining tokens. A prediction is ignored if it
        is invalid, if the request is unknown or has a newer one, or if the preset predicts no lengths."""
        request_state, at_tokens = self._request_states.get(event.request_id), event.at_tokens
        remaining, most_tokens = event.remaining, event.most_tokens
        is_valid = most_tokens >= 1 and remaining and all(1.0 <= left < math.inf for left in remaining)
        if request_state is None or not self.predicts or not is_valid:
            return
        if at_tokens < request_state.network_predicted_at_tokens:
            return
        checked = request_state.checked_predictions
        if not checked or (
            len(checked) < MAX_JUDGED_PREDICTIONS_PER_OUTPUT
            and at_tokens >= JUDGED_PREDICTION_SPACING * max(1, checked[-1][0])
        ):
            known = self.predictor.remaining(self._output_view(request_state, at_tokens, most_tokens), now)
            middle = known[len(known) // 2] if known else None
            checked.append((at_tokens, min(remaining[len(remaining) // 2], most_tokens), middle))
        request_state.network_prediction, request_state.network_predicted_at_tokens = remaining, at_tokens
        request_state.remaining = None  # so that the next forecast uses the new prediction

    @property
    def prediction_errors(self) -> tuple[float | None, float | None]:
        """Mean errors |ln(actual ÷ predicted)| of predictions of remaining tokens: (with the neural network,
        without the network). Both are ``None`` if too few outputs have been checked."""
        if self._network_errors.count() < MIN_JUDGED_OUTPUTS:
            return None, None
        return self._network_errors.mean(), self._baseline_errors.mean()

    def victim_needed(self, event: VictimNeeded, now: float) -> RequestChosen | None:
        """Choose the running request to preempt. ``None``: the engine chooses."""
        chosen = self._victim(event.running, event.used_blocks, now)
        return RequestChosen(chosen.request_id) if chosen is not None else None

    def demand_sampled(self, event: DemandSampled, now: float) -> RequestChosen | None:
        """Count the demand of all running requests anew. Choose a request to offload before a forecast
        shortage comes. ``None``: no request is offloaded."""
        if event.link is not None:
            self._host_link.observe(event.link)
        self.changes += 1
        # Only what the sum needs is computed here. The rest follows in ``with_predictions``.
        self._counted = {view.request_id: self._growth(view, now) for view in event.running}
        self._needed = needed_blocks(self._counted.values(), self._pool.tokens_per_block)
        self._room_blocks = self._available_blocks(event.running, event.used_blocks)
        forecast = self._state.preset.forecast
        if not forecast.is_used or forecast.steps_until_shortage(self.demand, now) is None:
            return None
        chosen = self._victim(event.running, event.used_blocks, now)
        if chosen is None or self.recovery(chosen.context_tokens, now) is not RecoveryMethod.OFFLOAD:
            return None
        return RequestChosen(chosen.request_id)

    @property
    def demand(self) -> KvDemandView:
        """Expected demand of all running requests."""
        return KvDemandView(tuple(self._needed), self._room_blocks)

    def with_predictions(self, view: RunningRequestView, now: float) -> RunningRequestView:
        """Fill in a running request's service, predicted remaining output and recovery cost."""
        request_state = self._request_states.get(view.request_id)
        if request_state is None:
            return view
        preempted = self._preempted_view(view.context_tokens, 0)
        recompute_s = preempted.recompute_s if preempted.recompute_s < math.inf else 0.0
        recover_s = restore_s(recompute_s, preempted.offload_s if preempted.offload_s < math.inf else None)
        run_s = now - request_state.since_s if request_state.running else 0.0
        return view._replace(
            attained_s=request_state.attained_s,
            ran_s=request_state.ran_s + run_s,
            remaining=self._remaining(request_state, view.output_tokens, view.most_tokens, now),
            preemptions=request_state.preemptions,
            stayed_tokens=view.output_tokens - request_state.output_tokens_at_admission
            if request_state.running
            else 0,  # its KV is still being loaded
            recover_s=recover_s,
            of_program=request_state.program is not None,
        )

    def as_running_view(
        self, request_state: RequestState, tokens: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningRequestView:
        """Return a request, running or not, as a view. ``tokens``: those whose KV counts as its demand."""
        return RunningRequestView(
            request_id=request_state.request_id,
            program_rank=request_state.rank,
            position=-1,
            blocks=0,
            context_tokens=tokens,
            output_tokens=output_tokens,
            most_tokens=most_tokens,
            remaining=self._remaining(request_state, output_tokens, most_tokens, now),
            preemptions=request_state.preemptions,
            of_program=request_state.program is not None,
        )

    def recovery(self, tokens: int, now: float, *, copied_tokens: int = 0) -> RecoveryMethod:
        """Choose how a preempted request recovers the KV of ``tokens`` tokens. ``copied_tokens``: those of
        them whose KV is in host memory."""
        return self._state.preset.recovery.recovery(self._preempted_view(tokens, copied_tokens), now)

    def _victim(
        self, running: Sequence[RunningRequestView], used_blocks: int, now: float
    ) -> RunningRequestView | None:
        """Return the request that the policy preempts, if any."""
        views = [self.with_predictions(view, now) for view in running]
        room_blocks = self._available_blocks(views, used_blocks)
        need = BlockShortage(room_blocks, self._pool.tokens_per_block, self._step_s)
        chosen = self._state.preset.victim.victim(views, need, now)
        return next((view for view in views if view.request_id == chosen), None)

    def _available_blocks(self, running: Iterable[RunningRequestView], used_blocks: int) -> int:
        """Return the number of free blocks plus blocks that running requests use. A shared block counts once
        for each request."""
        fixed = self._pool.fixed_blocks  # the forecast demand does not include fixed blocks
        return self._pool.blocks - used_blocks + sum(max(0, view.blocks - fixed) for view in running)

    def _judge_hint(
        self, request_state: RequestState, output_tokens: int, *, only_worse: bool = False
    ) -> None:
        if request_state.program is not None and request_state.hinted_tokens:
            agent_type = request_state.program.agent_type or ""
            # The difference of logarithms avoids a division: a hint may exceed the range of floats.
            off = abs(math.log(output_tokens) - math.log(request_state.hinted_tokens))
            if not only_worse or off > (self._hints_off.mean(agent_type, 1) or 0.0):
                self._hints_off.observe(agent_type, off)

    def _judge_predictions(self, request_state: RequestState, output_tokens: int) -> None:
        prediction_error, baseline_error = [], []
        for written, guessed, known in request_state.checked_predictions:
            left = output_tokens - written
            if left >= 1 and known is not None:  # comparable only if both predict
                prediction_error.append(abs(math.log(left / guessed)))
                baseline_error.append(abs(math.log(left / known)))
        if prediction_error:
            self._network_errors.observe(fmean(prediction_error))
            self._baseline_errors.observe(fmean(baseline_error))

    def _preempted_view(self, tokens: int, copied_tokens: int) -> PreemptedRequestView:
        recompute_s = self._reload.seconds(tokens) if self._reload.known else math.inf
        link = self._host_link
        if not self._pool.host_blocks:  # vLLM's own connector stores no KV of preempted requests
            return PreemptedRequestView(tokens, recompute_s, None, None, copied_tokens)
        return PreemptedRequestView(
            tokens,
            recompute_s,
            link.store_s_per_token or 0.0,  # 0: the size of KV is unknown, so copies are tried and measured
            link.load_s_per_token or 0.0,
            copied_tokens,
            link.stores_queued_s,
            link.loads_queued_s,
        )

    def _growth(self, view: RunningRequestView, now: float) -> RequestGrowth:
        request_state = self._request_states.get(view.request_id)
        remaining = None
        if request_state is not None:
            remaining = self._remaining(request_state, view.output_tokens, view.most_tokens, now)
        return RequestGrowth(view.context_tokens, remaining, view.shared_blocks)

    def _remaining(
        self, request_state: RequestState, output_tokens: int, most_tokens: int, now: float
    ) -> RemainingTokens | None:
        if not self.predicts:
            return None
        written = output_tokens - request_state.predicted_at_tokens
        if request_state.remaining is None or not 0 <= written < REPREDICT_AFTER_TOKENS:
            request_state.predicted_at_tokens, written = output_tokens, 0
            request_state.remaining = self._predict_remaining(request_state, output_tokens, most_tokens, now)
            begins = request_state.predicted_output_tokens is None and output_tokens < REPREDICT_AFTER_TOKENS
            if begins and request_state.remaining is not None:
                middle = request_state.remaining[len(request_state.remaining) // 2]
                request_state.predicted_output_tokens = output_tokens + middle
        if request_state.remaining is None or not written:
            return request_state.remaining
        return tuple(max(1.0, left - written) for left in request_state.remaining)

    def _predict_remaining(
        self, request_state: RequestState, output_tokens: int, most_tokens: int, now: float
    ) -> RemainingTokens | None:
        view = self._output_view(request_state, output_tokens, most_tokens)
        prediction = _network_remaining(request_state, output_tokens)
        if prediction is not None:
            prediction_error, baseline_error = self.prediction_errors
            view = view._replace(
                network_prediction=prediction,
                prediction_error=prediction_error,
                baseline_error=baseline_error,
            )
        return self.predictor.remaining(view, now)

    def _output_view(
        self, request_state: RequestState, output_tokens: int, most_tokens: int
    ) -> OutputLengthView:
        program = request_state.program
        agent_type = program.agent_type if program is not None else None
        return OutputLengthView(
            request_state.request_id,
            output_tokens,
            most_tokens,
            self._lengths.sorted_lengths(agent_type, request_state.tool, MIN_OUTPUT_SAMPLES),
            request_state.hinted_tokens,
            self._hints_off.mean(agent_type or "", MIN_JUDGED_HINTS),
        )


def _network_remaining(request_state: RequestState, output_tokens: int) -> RemainingTokens | None:
    """Return the neural network's last prediction, reduced by the tokens generated since then, without values
    that the output has reached. ``None``: no prediction, one that is too old, or no value left."""
    written = output_tokens - request_state.network_predicted_at_tokens
    if request_state.network_prediction is None or written > max(
        PREDICTION_VALID_TOKENS, output_tokens // PREDICTION_VALID_DIVISOR
    ):
        return None
    prediction = request_state.network_prediction
    return tuple(max(1.0, left - written) for left in prediction if left > written) or None


class AdmissionController:
    """Asks the admission policy about the requests to which it applies. All others are admitted."""

    def __init__(self, state: SchedulerState, demand_forecaster: DemandForecaster) -> None:
        self._state = state
        self._leases = state.leases
        self._demand_forecaster = demand_forecaster
        self.holding: dict[str, RequestState] = {}
        """Request id → request that counts as a holder of KV: the engine admitted it, or the policy accepted
        it, and it has not lost its blocks since."""

    def admitted(self, request_state: RequestState) -> None:
        """Record that the engine admitted the request. It also admits requests that the policy has rejected
        for long (``ProgramScheduler.passes_admission``)."""
        self.holding[request_state.request_id] = request_state
        if request_state.admission_blocked_since_s is not None and request_state.program is not None:
            self._state.programs.signal(request_state.program, ProgramSignal.UNGATE)
        request_state.admission_blocked_since_s = None

    def applies_to(self, request_state: RequestState, preempted: bool | None = None) -> bool:
        """Whether the admission policy decides on this request of a program. A policy that does not forecast
        KV demand decides only on requests that are not preempted and whose program holds no KV: neither by a
        lease nor by another request. ``preempted``: whether the engine preempted the request; ``None``: the
        last reported state applies."""
        program = request_state.program
        if program is None or not self._state.preset.admission.is_used:
            return False
        if self._state.preset.admission.forecasts:
            return True
        if preempted is None:
            preempted = request_state.preempted
        if preempted or program.id in self._leases:
            return False
        return not any(
            other != request_state.request_id and other in self.holding for other in program.live_requests
        )

    def try_admit(self, event: AdmissionRequested, now: float) -> RequestChosen | None:
        """Decide whether the request may be admitted. If so, record it as a holder of KV."""
        let_in, request_state = RequestChosen(event.request_id), self._state.requests.states[event.request_id]
        program = request_state.program
        if program is None or not self.applies_to(request_state, event.preempted):
            return let_in
        pool, forecaster = self._state.pool, self._demand_forecaster
        growth, turns = self._state.histories.growth_tokens, self._state.histories.turns
        own = demand = None
        if self._state.preset.admission.forecasts:
            # The policy may have accepted the request before, without the engine admitting it.
            forecaster.remove_demand(request_state.request_id)
            tokens = int(max(0, event.need_blocks - pool.fixed_blocks) * pool.tokens_per_block)
            own = forecaster.as_running_view(
                request_state, tokens, event.output_tokens, event.most_tokens, now
            )
            demand = forecaster.demand
        later = sum(lease.blocks for lease in self._leases if lease.rank > request_state.rank)
        view = AdmissionView(
            need_blocks=event.need_blocks,
            free_blocks=event.free_blocks + later,
            pool_blocks=pool.blocks,
            block_size=pool.tokens_per_block,
            max_context_tokens=pool.max_context_tokens,
            anything_running=event.anything_running,
            # If the policy forecasts, all running requests' demand replaces the earlier programs' growth.
            earlier=() if demand is not None else tuple(self._holding_before(request_state.rank)),
            growth=GrowthStatistics(growth.count(), growth.mean(), turns.count(), turns.mean()),
            idle_s=self._state.requests.idle_s(now, event.anything_running),
            own=own,
            needed_blocks=tuple(demand.needed_blocks) if demand is not None else (),
            available_blocks=demand.available_blocks if demand is not None else 0,
            since_shortage_s=max(0.0, now - self._state.last_shortage_s),
        )
        is_admitted = self._state.preset.admission.may_admit(view, now)
        self._state.programs.signal(program, ProgramSignal.UNGATE if is_admitted else ProgramSignal.GATE)
        if is_admitted:
            # Recorded now, since several requests may be accepted before the engine reports an admission.
            self.holding[request_state.request_id] = request_state
        else:
            self.holding.pop(request_state.request_id, None)
            if request_state.admission_blocked_since_s is None:
                request_state.admission_blocked_since_s = now
        if is_admitted and own is not None:
            forecaster.add_demand(own)
        return let_in if is_admitted else None

    def _holding_before(self, rank: int) -> Iterator[ProgramGrowthView]:
        """Yield the view of each program that arrived before ``rank`` (has a lower rank) and holds KV."""
        seen: set[ProgramId] = set()
        for request_state in self.holding.values():
            program = request_state.program
            if program is not None and request_state.rank < rank and program.id not in seen:
                seen.add(program.id)
                first_tokens = program.first_prompt_tokens or request_state.prompt_tokens
                yield ProgramGrowthView(
                    program.turns, first_tokens, request_state.prompt_tokens, program.peak_tokens
                )
        for lease in self._leases:
            program = self._state.programs.get(lease.program_id)
            if lease.rank < rank and program is not None and program.id not in seen:
                yield ProgramGrowthView(
                    program.turns, program.first_prompt_tokens, program.context_tokens, program.peak_tokens
                )
