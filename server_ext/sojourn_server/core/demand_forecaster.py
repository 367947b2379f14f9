"""Forecasts the remaining output of each request, and the KV demand of all running requests.

The forecaster asks the preset's remaining-tokens policy about each request, sums the demand of all running
requests, and learns from every finished output. It samples the running requests every few steps. Between two
samples it subtracts the demand of leaving requests and adds the demand of new requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from ..policies.costs.reload_estimate import restore_s
from ..policies.forecasting import (
    STEP_POINTS,
    KvDemandView,
    OutputLengthView,
    RemainingTokens,
    RequestGrowth,
    needed_blocks,
)
from ..policies.policy_views import BlockShortage, RunningRequestView
from ..policies.preemption_policies import PreemptedRequestView, RecoveryMethod
from ..programs.windowed_history import SlidingWindow
from .request_table import RequestState
from .scheduler_state import SchedulerState

REPREDICT_AFTER_TOKENS = 32
"""Number of generated tokens after which a prediction is renewed. Until then, each generated token reduces
the predicted number of remaining tokens by one."""
MIN_OUTPUT_SAMPLES = 16
"""Minimum number of past outputs from which a length is predicted. If there are fewer outputs of the same
agent type and tool, a wider group of outputs is used."""
MIN_JUDGED_HINTS = 8
"""Minimum number of checked hints of an agent type before the type's hint error counts."""
MIN_JUDGED_OUTPUTS = 16
"""Minimum number of checked outputs, of all types, before a neural network's predictions are used."""
PREDICTION_ERROR_WINDOW = 128
"""Number of newest outputs from which the neural network's error is computed. Each output counts once,
because errors within one output are alike."""
MAX_JUDGED_PREDICTIONS_PER_OUTPUT = 16
"""Maximum number of predictions for one output that are compared with the output's actual length."""
JUDGED_PREDICTION_SPACING = 1.25
"""Factor by which an output must grow before the next prediction of the neural network is checked."""
PREDICTION_VALID_TOKENS = 4 * REPREDICT_AFTER_TOKENS
"""Minimum number of further generated tokens for which a neural network's prediction stays valid. For long
outputs, a prediction stays valid for longer (see ``PREDICTION_VALID_DIVISOR``)."""
PREDICTION_VALID_DIVISOR = 4
"""A neural network's prediction stays valid for max(``PREDICTION_VALID_TOKENS``, tokens generated so far ÷
``PREDICTION_VALID_DIVISOR``) further generated tokens."""
STEP_SMOOTHING = 0.05
"""Weight of the newest step in the mean step time."""


class DemandForecaster:
    """Forecasts output lengths and KV demand of one engine. Times are seconds on the engine's monotonic
    clock."""

    def __init__(self, state: SchedulerState) -> None:
        preset = state.preset
        self._preset = preset
        self._pool = state.pool
        self._lengths = state.histories.output_lengths
        self._hints_off = state.histories.hints_off
        self._reload = state.reload
        self._host_link = state.host_link
        self._request_states = state.requests.states
        self._recorder = state.recorder
        self.predictor = preset.output_length
        """Policy that predicts remaining tokens. The simulator may set a policy that knows the true
        lengths."""
        self._step_s = 0.0
        self._network_errors = SlidingWindow(PREDICTION_ERROR_WINDOW)
        self._baseline_errors = SlidingWindow(PREDICTION_ERROR_WINDOW)
        """Mean prediction errors over the newest outputs. ``_network_errors`` is the error of the neural
        network, ``_baseline_errors`` the error of the predictor without the network, at the same
        positions."""
        self._counted: dict[str, RequestGrowth] = {}
        """Requests whose demand is counted, with their sizes. These requests ran at the last sample, or were
        admitted since. A size stays as it was at the sample or the admission."""
        self._needed = [0.0] * len(STEP_POINTS)
        """Expected need of all counted requests, in blocks: one value for each number of future steps in
        ``STEP_POINTS``."""
        self._room_blocks = self._pool.blocks
        """Number of blocks available to the counted requests, as ``available_blocks`` counts them."""
        self.changes = 0
        """Number of samples and departures so far. After each sample or departure, the admission policy may
        accept a request that it rejected before."""

    @property
    def predicts(self) -> bool:
        """Whether the preset predicts output lengths."""
        return self.predictor.predicts

    # -- what happens -----------------------------------------------------------

    def record_step(self, seconds: float) -> None:
        """Record an engine step that took ``seconds`` seconds."""
        if seconds > 0:
            self._step_s += (STEP_SMOOTHING if self._step_s else 1.0) * (seconds - self._step_s)

    def request_left(self, request_id: str) -> None:
        """Subtract the demand of a request that has left the device."""
        if self.remove_demand(request_id):
            self.changes += 1

    def remove_demand(self, request_id: str) -> bool:
        """Subtract a request's demand from the sum. Returns whether the sum included this demand.

        Also called before the admission policy decides on a request again. If the policy accepted the request
        before, but the engine could not admit it, the sum still includes the request's demand.
        """
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
            view = self.as_running_view(
                request_state, tokens=tokens, output_tokens=written, most_tokens=most_tokens, now=now
            )
            self.add_demand(view)

    def add_demand(self, view: RunningRequestView) -> None:
        """Add the demand of a request that the admission policy accepted."""
        self.remove_demand(view.request_id)
        self._counted[view.request_id] = RequestGrowth(view.context_tokens, view.remaining)
        demand = needed_blocks([view], self._pool.tokens_per_block)
        self._needed = [whole + part for whole, part in zip(self._needed, demand, strict=True)]

    def ended(self, request_state: RequestState, output_tokens: int, *, cut: bool = False) -> None:
        """Learn from a finished output. ``cut``: whether the output ended because it reached its maximum
        length."""
        program = request_state.program
        if not self.predicts or program is None or output_tokens < 1:
            return
        self._lengths.observe_output(program.agent_type, request_state.tool, output_tokens)
        # An output cut at its maximum length cannot refute a hint of at least that length.
        if not cut or (request_state.hinted_tokens or 0) < output_tokens:
            self._judge_hint(request_state, output_tokens)
        if request_state.predicted_output_tokens is not None:
            self._recorder.observe(
                "sojourn_output_length_ratio", output_tokens / request_state.predicted_output_tokens
            )
        self._judge_predictions(request_state, output_tokens)

    def output_aborted(self, request_state: RequestState, output_tokens: int) -> None:
        """Check the output-length hint of a request that its client aborted. The length is not learned.

        The hint is compared with the number of tokens generated before the abort. Its error counts only if it
        is above the mean error of the agent type's hints. So an abort never makes hints look better.
        """
        if self.predicts and output_tokens >= 1:
            self._judge_hint(request_state, output_tokens, only_worse=True)

    def store_prediction(
        self, request_id: str, at_tokens: int, remaining: RemainingTokens, now: float, *, most_tokens: int
    ) -> None:
        """Store a neural network's prediction of a request's remaining tokens.

        ``at_tokens``: tokens generated when the prediction was made. ``most_tokens``: maximum number of
        further tokens at that point. The prediction is ignored if the request is unknown, if a newer
        prediction is stored, or if the preset predicts no output lengths. It is also ignored if
        ``most_tokens`` is below 1, or a predicted value is below 1 or not finite.
        """
        request_state = self._request_states.get(request_id)
        if (
            request_state is None
            or not self.predicts
            or not remaining
            or most_tokens < 1
            or at_tokens < request_state.network_predicted_at_tokens
        ):
            return
        if not all(1.0 <= left < math.inf for left in remaining):
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

    def statistics(self) -> dict[str, float | None]:
        """Return statistics. ``outputs``: number of learned output lengths. ``network_off`` and
        ``without_off``: mean errors of predictions with and without the neural network
        (``prediction_errors``)."""
        prediction_error, baseline_error = self.prediction_errors
        return {
            "outputs": self._lengths.count(),
            "network_off": prediction_error,
            "without_off": baseline_error,
        }

    @property
    def prediction_errors(self) -> tuple[float | None, float | None]:
        """Mean errors |ln(actual ÷ predicted)| of predictions of remaining tokens: (with the neural network,
        without the network). Both are ``None`` if too few outputs have been checked."""
        if self._network_errors.count() < MIN_JUDGED_OUTPUTS:
            return None, None
        return self._network_errors.mean(), self._baseline_errors.mean()

    # -- questions ----------------------------------------------------------------

    def sample_demand(
        self, running: Sequence[RunningRequestView], used_blocks: int, now: float
    ) -> int | None:
        """Sample all running requests. Returns the number of engine steps until blocks run short; ``None``:
        no shortage is predicted, or the preset does not forecast shortages. ``used_blocks``: blocks of the
        whole pool that requests use or leases hold."""
        self.changes += 1
        # Only what the sum needs is computed here. The rest follows in ``with_predictions``.
        self._counted = {view.request_id: self._growth(view, now) for view in running}
        self._needed = needed_blocks(self._counted.values(), self._pool.tokens_per_block)
        self._room_blocks = self.available_blocks(running, used_blocks)
        if not self._preset.forecast.is_used:
            return None
        return self._preset.forecast.steps_until_shortage(KvDemandView(self._needed, self._room_blocks), now)

    @property
    def demand(self) -> KvDemandView:
        """Expected demand of all running requests: the last sample, updated by later admissions and
        departures."""
        return KvDemandView(tuple(self._needed), self._room_blocks)

    def available_blocks(self, running: Iterable[RunningRequestView], used_blocks: int) -> int:
        """Return the number of blocks available to running requests: free blocks plus blocks that the
        requests use. A shared block counts once for each request that uses it."""
        fixed = self._pool.fixed_blocks  # the forecast demand does not include fixed blocks
        return self._pool.blocks - used_blocks + sum(max(0, view.blocks - fixed) for view in running)

    def block_shortage(
        self, running: Iterable[RunningRequestView], short_blocks: int, used_blocks: int
    ) -> BlockShortage:
        """Return the shortage of blocks, as input of the policy that selects a victim in ``running``.

        ``short_blocks``: blocks that are missing now. ``used_blocks``: blocks in use."""
        room = self.available_blocks(running, used_blocks)
        return BlockShortage(short_blocks, room, self._pool.tokens_per_block, self._step_s)

    def with_predictions(self, view: RunningRequestView, now: float) -> RunningRequestView:
        """Return the view of a running request with its predicted remaining output and its recovery cost
        filled in."""
        request_state = self._request_states.get(view.request_id)
        if request_state is None:
            return view
        preempted = self._preempted_view(view.context_tokens, 0)
        recompute_s = preempted.recompute_s if preempted.recompute_s < math.inf else 0.0
        recover_s = restore_s(recompute_s, preempted.offload_s if preempted.offload_s < math.inf else None)
        return view._replace(
            remaining=self._remaining(request_state, view.output_tokens, view.most_tokens, now),
            preemptions=request_state.preemptions,
            stayed_tokens=view.output_tokens - request_state.output_tokens_at_admission
            if request_state.running
            else 0,  # its KV is still being loaded
            recover_s=recover_s,
            of_program=request_state.program is not None,
        )

    def as_running_view(
        self, request_state: RequestState, *, tokens: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningRequestView:
        """Return a request, running or not, as a ``RunningRequestView``. ``tokens``: number of tokens whose
        KV counts as the request's demand."""
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
        """Choose how a request that is preempted with ``tokens`` tokens of KV recovers them.

        ``copied_tokens``: how many of these tokens are in host memory already."""
        return self._preset.recovery.recovery(self._preempted_view(tokens, copied_tokens), now)

    # -- inside ---------------------------------------------------------------

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
    """Return the neural network's last prediction, reduced by the tokens generated since then. Predicted
    values that the output has reached are left out. ``None``: no prediction, a prediction that is too old, or
    no value left."""
    written = output_tokens - request_state.network_predicted_at_tokens
    if request_state.network_prediction is None or written > max(
        PREDICTION_VALID_TOKENS, output_tokens // PREDICTION_VALID_DIVISOR
    ):
        return None
    prediction = request_state.network_prediction
    return tuple(max(1.0, left - written) for left in prediction if left > written) or None
