"""Forecasts the KV demand of running requests, and decides which requests may be admitted.

The forecaster asks the preset's remaining-tokens policy about each request, samples all running requests
every few steps, and learns from every finished output. Between two samples, leaving requests are taken out
and new ones added. Times are seconds on the engine's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from sojourn.ids import ProgramId

from ..policies.costs.reload_estimate import restore_s
from ..policies.forecasting import KvDemandView, OutputLengthView, RemainingTokens, needed_blocks
from ..policies.policy_views import AdmissionView, BlockShortage, ProgramGrowthView, RunningRequestView
from ..policies.preemption_policies import PreemptedRequestView, RecoveryMethod
from ..programs.windowed_history import SlidingWindow
from . import events_and_actions as ev
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
JUDGED_PREDICTION_SPACING = 1.25
"""Factor by which an output must grow before the neural network's next prediction for it is checked."""
STEP_SMOOTHING = 0.05
"""Weight of the newest step in the mean step time."""


class DemandForecaster:
    """Forecasts output lengths and KV demand of one engine, and asks the admission policy about requests."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._pool, self._histories = state, state.pool, state.histories
        self.predictor = state.preset.output_length
        """Policy that predicts remaining tokens. The simulator may set a policy that knows the true
        lengths."""
        self._step_s = 0.0
        self._network_errors = SlidingWindow(PREDICTION_ERROR_WINDOW)
        self._baseline_errors = SlidingWindow(PREDICTION_ERROR_WINDOW)
        """Prediction errors of the newest outputs, of the neural network and of the predictor without it at
        the same positions."""
        self.counted: dict[str, RunningRequestView] = {}
        """Requests that ran at the last sample or were admitted since, as they were then."""
        self._room_blocks = self._pool.blocks
        """Number of blocks available to the counted requests, as ``_available_blocks`` counts them."""
        self.holding: dict[str, RequestState] = {}
        """Request id → request that counts as a holder of KV: the engine admitted it, or the policy accepted
        it, and it has not lost its blocks since."""
        self.changes = 0
        """Number of samples and departures so far. After each, the admission policy may accept a request that
        it rejected before."""

    def record_step(self, seconds: float) -> None:
        """Record the duration of an engine step."""
        if seconds > 0:
            self._step_s += (STEP_SMOOTHING if self._step_s else 1.0) * (seconds - self._step_s)

    def request_left(self, request_id: str) -> None:
        """Take out a request that has left the device."""
        self.holding.pop(request_id, None)
        view = self.counted.pop(request_id, None)
        if view is not None:
            # Each shared block counts once per request, in demand and in available blocks.
            self._room_blocks -= view.shared_blocks
            self.changes += 1

    def admitted(self, request_state: RequestState, tokens: int, most_tokens: int, now: float) -> None:
        """Add the demand of an admitted request that has ``tokens`` tokens and may generate ``most_tokens``
        more. The engine also admits requests that the policy has rejected for long
        (``ProgramScheduler.passes_admission``)."""
        request_id = request_state.request_id
        self.holding[request_id] = request_state
        request_state.admission_blocked_since_s = None
        if self.predictor.predicts and most_tokens and request_id not in self.counted:
            written = max(0, tokens - request_state.prompt_tokens)
            self.counted[request_id] = self.waiting_view(request_state, tokens, written, most_tokens, now)

    def ended(self, request_state: RequestState, event: ev.TurnFinished) -> None:
        """Learn from a finished output."""
        program, output_tokens, reason = request_state.program, event.output_tokens, event.outcome
        if not self.predictor.predicts or program is None or output_tokens < 1:
            return
        self._histories.output_lengths.observe_output(program.agent_type, request_state.tool, output_tokens)
        hinted = request_state.hint.output_tokens
        # An output cut at its maximum length cannot refute a hint of at least that length.
        if hinted and (reason is not ev.TurnFinishReason.LENGTH or hinted < output_tokens):
            # The difference of logarithms avoids a division: a hint may exceed the range of floats.
            off = abs(math.log(output_tokens) - math.log(hinted))
            self._histories.hints_off.observe(program.agent_type or "", off)
        if (predicted := request_state.predicted_output_tokens) is not None:
            self._state.recorder.observe("sojourn_output_length_ratio", output_tokens / predicted)
        errors = [
            (abs(math.log(left / guessed)), abs(math.log(left / known)))
            for written, guessed, known in request_state.checked_predictions
            if known is not None and (left := output_tokens - written) >= 1
        ]
        if errors:
            self._network_errors.observe(fmean(network for network, _ in errors))
            self._baseline_errors.observe(fmean(baseline for _, baseline in errors))

    def store_prediction(self, event: ev.OutputLengthPredicted, now: float) -> None:
        """Store a neural network's prediction of a request's remaining tokens."""
        request_state = self._state.requests.states.get(event.request_id)
        if request_state is None:
            return
        at_tokens, most_tokens, remaining = event.at_tokens, event.most_tokens, event.remaining
        checked = request_state.checked_predictions
        if not checked or at_tokens >= JUDGED_PREDICTION_SPACING * max(1, checked[-1][0]):
            view = self._output_view(request_state, at_tokens, most_tokens)
            known = self.predictor.remaining(view._replace(network_prediction=None), now)
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

    def victim_needed(self, event: ev.VictimNeeded, now: float) -> ev.RequestChosen | None:
        """Choose the running request to preempt. ``None``: the engine chooses."""
        views = [self.with_predictions(view, now) for view in event.running]
        chosen = self._victim(views, event.used_blocks, now)
        return ev.RequestChosen(chosen.request_id) if chosen is not None else None

    def demand_sampled(self, event: ev.DemandSampled, now: float) -> ev.RequestChosen | None:
        """Count the demand of all running requests anew. Choose a request to offload before a forecast
        shortage comes. ``None``: no request is offloaded."""
        self.changes += 1
        views = [self.with_predictions(view, now) for view in event.running]
        self.counted = {view.request_id: view for view in views}
        self._room_blocks = self._available_blocks(views, event.used_blocks)
        forecast = self._state.preset.forecast
        if not forecast.is_used or not forecast.expects_shortage(self.demand, now):
            return None
        chosen = self._victim(views, event.used_blocks, now)
        if chosen is None or self.recovery(chosen.context_tokens, now) is not RecoveryMethod.OFFLOAD:
            return None
        return ev.RequestChosen(chosen.request_id)

    @property
    def demand(self) -> KvDemandView:
        """Expected demand of all counted requests."""
        needed = needed_blocks(self.counted.values(), self._pool.tokens_per_block)
        return KvDemandView(needed, self._room_blocks)

    def with_predictions(self, view: RunningRequestView, now: float) -> RunningRequestView:
        """Fill in a request's service, predicted remaining output and recovery cost."""
        request_state = self._state.requests.states.get(view.request_id)
        if request_state is None:
            return view
        offload_s = self._preempted_view(view.context_tokens, 0).offload_s
        compute_s = self._state.reload.seconds(view.context_tokens)
        ran_s, stayed_tokens = request_state.ran_s, 0  # of a request that runs not yet: its KV is loaded
        if request_state.running:
            ran_s += now - request_state.since_s
            stayed_tokens = view.output_tokens - request_state.output_tokens_at_admission
        return view._replace(
            attained_s=request_state.attained_s,
            ran_s=ran_s,
            remaining=self._remaining(request_state, view.output_tokens, view.most_tokens, now),
            preemptions=request_state.preemptions,
            stayed_tokens=stayed_tokens,
            recover_s=restore_s(compute_s, offload_s if offload_s < math.inf else None),
            of_program=request_state.program is not None,
        )

    def waiting_view(
        self, request_state: RequestState, tokens: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningRequestView:
        """Return a request that has no blocks as a view. ``tokens``: those whose KV counts as its demand."""
        view = RunningRequestView(
            request_state.request_id, request_state.rank, position=-1, blocks=0, context_tokens=tokens,
            output_tokens=output_tokens, most_tokens=most_tokens,
        )  # fmt: skip
        return self.with_predictions(view, now)

    def recovery(self, tokens: int, now: float, *, copied_tokens: int = 0) -> RecoveryMethod:
        """Choose how a preempted request recovers the KV of ``tokens`` tokens. ``copied_tokens``: those of
        them whose KV is in host memory."""
        return self._state.preset.recovery.recovery(self._preempted_view(tokens, copied_tokens), now)

    def decides_admission(self, request_state: RequestState, preempted: bool | None = None) -> bool:
        """Whether the admission policy decides on this request of a program; others are admitted. A policy
        that does not forecast KV demand decides only on requests that are not preempted and whose program
        holds no KV: neither by a lease nor by another request. ``preempted``: whether the engine preempted
        the request; ``None``: the last reported state applies."""
        program, admission = request_state.program, self._state.preset.admission
        if program is None or not admission.is_used:
            return False
        if admission.forecasts:
            return True
        if preempted is None:
            preempted = request_state.preempted
        others = program.live_requests - {request_state.request_id}
        return (
            not preempted and program.id not in self._state.leases and self.holding.keys().isdisjoint(others)
        )

    def try_admit(self, event: ev.AdmissionRequested, now: float) -> ev.RequestChosen | None:
        """Decide whether the request may be admitted. If so, record it as a holder of KV."""
        state, pool, request_id = self._state, self._pool, event.request_id
        request_state = state.requests.states[request_id]
        program, rank = request_state.program, request_state.rank
        if program is None or not self.decides_admission(request_state, event.preempted):
            return ev.RequestChosen(request_id)
        own, demand, earlier = None, KvDemandView((), 0), dict[ProgramId, ProgramGrowthView]()
        if state.preset.admission.forecasts:
            # The policy may have accepted the request before, without the engine admitting it.
            self.counted.pop(request_id, None)
            tokens = int(max(0, event.need_blocks - pool.fixed_blocks) * pool.tokens_per_block)
            own = self.waiting_view(request_state, tokens, event.output_tokens, event.most_tokens, now)
            demand = self.demand
        else:
            # The programs that arrived before this one and hold KV.
            holders = [
                (each.program, each.prompt_tokens) for each in self.holding.values() if each.rank < rank
            ]
            leased = [lease.program for lease in state.leases.values() if lease.program.rank < rank]
            for holder, tokens in (*holders, *((each, each.context_tokens) for each in leased)):
                if holder is not None and holder.id not in earlier:
                    first = holder.first_prompt_tokens or tokens
                    earlier[holder.id] = ProgramGrowthView(holder.turns, first, tokens, holder.peak_tokens)
        view = AdmissionView(
            need_blocks=event.need_blocks,
            free_blocks=event.free_blocks
            + sum(lease.blocks for lease in state.leases.values() if lease.program.rank > rank),
            pool_blocks=pool.blocks,
            block_size=pool.tokens_per_block,
            max_context_tokens=pool.max_context_tokens,
            anything_running=event.anything_running,
            earlier=tuple(earlier.values()),
            growth=state.histories.growth,
            idle_s=state.requests.idle_s(now, event.anything_running),
            own=own,
            needed_blocks=tuple(demand.needed_blocks),
            available_blocks=demand.available_blocks,
            since_shortage_s=max(0.0, now - state.last_shortage_s),
        )
        if not state.preset.admission.may_admit(view, now):
            self.holding.pop(request_id, None)
            if request_state.admission_blocked_since_s is None:
                request_state.admission_blocked_since_s = now
            return None
        # Recorded now, since several requests may be accepted before the engine reports an admission.
        self.holding[request_id] = request_state
        if own is not None:
            self.counted[request_id] = own
        return ev.RequestChosen(request_id)

    def _victim(
        self, views: Sequence[RunningRequestView], used_blocks: int, now: float
    ) -> RunningRequestView | None:
        """Return the request that the policy preempts, if any."""
        room_blocks = self._available_blocks(views, used_blocks)
        need = BlockShortage(room_blocks, self._pool.tokens_per_block, self._step_s)
        chosen = self._state.preset.victim.victim(views, need, now)
        return next((view for view in views if view.request_id == chosen), None)

    def _available_blocks(self, running: Sequence[RunningRequestView], used_blocks: int) -> int:
        """Return the number of free blocks plus blocks that running requests use. A shared block counts once
        for each request."""
        fixed = self._pool.fixed_blocks  # the forecast demand does not include fixed blocks
        return self._pool.blocks - used_blocks + sum(max(0, view.blocks - fixed) for view in running)

    def _preempted_view(self, tokens: int, copied_tokens: int) -> PreemptedRequestView:
        link, reload, store_s, load_s = self._state.host_link, self._state.reload, None, None
        recompute_s = reload.seconds(tokens) if reload.known else math.inf
        if self._pool.host_blocks:  # 0: the size of KV is unknown, so copies are tried and measured
            store_s, load_s = link.store_s_per_token or 0.0, link.load_s_per_token or 0.0
        queued_s = link.stores_queued_s, link.loads_queued_s
        return PreemptedRequestView(tokens, recompute_s, store_s, load_s, copied_tokens, *queued_s)

    def _remaining(
        self, request_state: RequestState, output_tokens: int, most_tokens: int, now: float
    ) -> RemainingTokens | None:
        """Predict how many tokens the request will still generate; ``None``: unknown."""
        if not self.predictor.predicts:
            return None
        written = output_tokens - request_state.predicted_at_tokens
        if request_state.remaining is None or not 0 <= written < REPREDICT_AFTER_TOKENS:
            view = self._output_view(request_state, output_tokens, most_tokens)
            request_state.remaining = remaining = self.predictor.remaining(view, now)
            request_state.predicted_at_tokens, written = output_tokens, 0
            is_first = request_state.predicted_output_tokens is None
            if is_first and remaining is not None and output_tokens < REPREDICT_AFTER_TOKENS:
                request_state.predicted_output_tokens = output_tokens + remaining[len(remaining) // 2]
        if request_state.remaining is None or not written:
            return request_state.remaining
        return tuple(max(1.0, left - written) for left in request_state.remaining)

    def _output_view(
        self, request_state: RequestState, output_tokens: int, most_tokens: int
    ) -> OutputLengthView:
        agent_type = request_state.program.agent_type if request_state.program is not None else None
        # The network's last prediction, without lengths that the output has reached since.
        written = output_tokens - request_state.network_predicted_at_tokens
        predicted = request_state.network_prediction or ()
        return OutputLengthView(
            request_state.request_id,
            output_tokens,
            most_tokens,
            self._histories.output_lengths.sorted_lengths(agent_type, request_state.tool, MIN_OUTPUT_SAMPLES),
            request_state.hint.output_tokens,
            self._histories.hints_off.mean(agent_type or "", MIN_JUDGED_HINTS),
            tuple(max(1.0, left - written) for left in predicted if left > written) or None,
            *self.prediction_errors,
        )
