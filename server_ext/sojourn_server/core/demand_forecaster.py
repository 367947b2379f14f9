"""What the requests in the engine will yet write, and the KV that takes: the forecasts of one engine.

It asks the preset's remaining policy about each request, adds up what all that run will need, and learns
from every output that ends. Between two looks at all that run, what somebody will need is taken away when
it leaves and added when it comes, so that a look every few steps is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from ..policies.forecasting.kv_demand import STEP_POINTS, RequestGrowth, needed_blocks
from ..policies.forecasting.remaining_tokens import OutputLengthView, RemainingTokens
from ..policies.forecasting.shortage_forecast import KvDemandView
from ..policies.policy_views import BlockShortage, RunningRequestView
from ..policies.preemption.preemption_recovery import PreemptedRequestView, RecoveryMethod
from ..programs.execution_history import SlidingMean
from .request_table import RequestState
from .scheduler_state import SchedulerState

REPREDICT_AFTER_TOKENS = 32
"""A request is asked about again when it has written so many more; until then each is one less."""
MIN_OUTPUT_SAMPLES = 16
"""Outputs that are enough to know a kind of output by; else a wider kind is taken."""
MIN_JUDGED_HINTS = 8
"""Hints of an agent type that were judged before the next one can count."""
MIN_JUDGED_OUTPUTS = 16
"""Outputs by which a network was judged before its next guess can count, of all types together."""
PREDICTION_ERROR_WINDOW = 128
"""By the newest so many it is judged. Each counts once: guesses of one output are off alike."""
MAX_JUDGED_PREDICTIONS_PER_OUTPUT = 16
"""Of one output no more are looked at."""
JUDGED_PREDICTION_SPACING = 1.25
"""Each when it has written so many times as much as at the one before, so that late ones count as well."""
PREDICTION_VALID_TOKENS = 4 * REPREDICT_AFTER_TOKENS
"""A guess is forgotten when so many tokens were written since."""
PREDICTION_VALID_DIVISOR = 4
"""Or a quarter of all that was written, where that is more."""
STEP_SMOOTHING = 0.05
"""Weight of the newest step in the mean step time."""
ASSUMED_LINK_BYTES_PER_S = 4e9
"""Of copies to host memory, until one was measured: a quarter of what PCIe 4 gives."""


class DemandForecaster:
    """Those of one engine. Times are seconds on its monotonic clock."""

    def __init__(self, state: SchedulerState) -> None:
        preset = state.preset
        self._preset = preset
        self._pool = state.pool
        self._lengths = state.histories.output_lengths
        self._hints_off = state.histories.hints_off
        self._reload = state.reload
        self._request_states = state.requests.states
        self._recorder = state.recorder
        self.predictor = preset.remaining
        """Another one may stand in its place: the lab has some that no engine can have."""
        self._step_s = 0.0
        self._link_s_per_token: tuple[float | None, float | None] = self._assumed_link()
        """Seconds to copy a token's KV to host memory, and back."""
        self._queued_s = 0.0
        self._guess_off = SlidingMean(PREDICTION_ERROR_WINDOW)
        self._known_off = SlidingMean(PREDICTION_ERROR_WINDOW)
        """Of each output, by how much a network's guesses were off on average, and what was known without it
        at the same places."""
        self._counted: dict[str, RequestGrowth] = {}
        """Requests that ran at the last look, or came since, as they were then."""
        self._needed = [0.0] * len(STEP_POINTS)
        """Blocks that these are expected to need at each of ``POINTS``."""
        self._room_blocks = self._pool.blocks
        self.changes = 0
        """Grows when somebody leaves, and with each look: who was kept out before may enter now."""

    @property
    def predicts(self) -> bool:
        """Whether it is asked at all what requests will yet write."""
        return self.predictor.predicts

    # -- what happens -----------------------------------------------------------

    def record_step(self, seconds: float) -> None:
        """An engine step took so long."""
        if seconds > 0:
            self._step_s += (STEP_SMOOTHING if self._step_s else 1.0) * (seconds - self._step_s)

    def copied(
        self, offload_s_per_token: float | None, load_back_s_per_token: float | None, queued_s: float
    ) -> None:
        """What copies to host memory and back have taken a token so far, ``None`` before the first, and how
        long those that are queued will yet take."""
        out_s, back_s = self._assumed_link()
        if out_s is not None:
            self._link_s_per_token = offload_s_per_token or out_s, load_back_s_per_token or back_s
        self._queued_s = queued_s

    def gone(self, request_id: str) -> None:
        """A request has left the device."""
        if self.remove_demand(request_id):
            self.changes += 1

    def remove_demand(self, request_id: str) -> bool:
        """A request waits and is counted no more, though it may have been let in: the engine need not admit
        who may enter. Returns whether it was counted. No change to others, for it is asked about first."""
        view = self._counted.pop(request_id, None)
        if view is None:
            return False
        # What it shares was counted for it too, in what is needed and in the room there is.
        self._room_blocks -= view.shared_blocks
        its = needed_blocks([view], self._pool.block_size)
        self._needed = [whole - part for whole, part in zip(self._needed, its, strict=True)]
        return True

    def admitted(self, request_state: RequestState, tokens: int, most_tokens: int, now: float) -> None:
        """A request with so many tokens runs, and may write ``most_tokens`` more: it counts from now on,
        though nobody was asked to let it in."""
        if self.predicts and most_tokens and request_state.request_id not in self._counted:
            written = max(0, tokens - request_state.prompt_tokens)
            view = self.as_running_view(
                request_state, tokens=tokens, output_tokens=written, most_tokens=most_tokens, now=now
            )
            self.came(view)

    def came(self, view: RunningRequestView) -> None:
        """A request is let in."""
        self.remove_demand(view.request_id)
        self._counted[view.request_id] = RequestGrowth(view.context_tokens, view.remaining)
        its = needed_blocks([view], self._pool.block_size)
        self._needed = [whole + part for whole, part in zip(self._needed, its, strict=True)]

    def ended(self, request_state: RequestState, output_tokens: int, *, cut: bool = False) -> None:
        """An output has come to its own end, or was ``cut`` at what it was allowed."""
        program = request_state.program
        if not self.predicts or program is None or output_tokens < 1:
            return
        self._lengths.observe(program.agent_type, request_state.tool, output_tokens)
        # One that is cut where its client set the bound says nothing of a hint that lies at or beyond it.
        if not cut or (request_state.hinted_tokens or 0) < output_tokens:
            self._judge_hint(request_state, output_tokens)
        if request_state.predicted_output_tokens is not None:
            self._recorder.observe(
                "sojourn_output_length_ratio", output_tokens / request_state.predicted_output_tokens
            )
        self._judge_predictions(request_state, output_tokens)

    def broken_off(self, request_state: RequestState, output_tokens: int) -> None:
        """An output was aborted by its client, which teaches nothing of lengths. What was hinted is judged as
        if it had ended there, else whoever lies and then aborts would be believed for ever; but no hint comes
        true so, for little would buy that. An output that had not begun says nothing."""
        if self.predicts and output_tokens >= 1:
            self._judge_hint(request_state, output_tokens, only_worse=True)

    def guessed(
        self, request_id: str, at_tokens: int, remaining: RemainingTokens, now: float, *, most_tokens: int
    ) -> None:
        """A network expects a request that has written ``at_tokens`` tokens, and may write ``most_tokens``
        more, to write ``remaining`` more."""
        request_state = self._request_states.get(request_id)
        if (
            request_state is None
            or not self.predicts
            or not remaining
            or at_tokens < request_state.model_predicted_at_tokens
        ):
            return
        if not all(1.0 <= left < math.inf for left in remaining):
            return
        counted = request_state.guesses
        if not counted or (
            len(counted) < MAX_JUDGED_PREDICTIONS_PER_OUTPUT
            and at_tokens >= JUDGED_PREDICTION_SPACING * max(1, counted[-1][0])
        ):
            known = self.predictor.remaining(self._view(request_state, at_tokens, most_tokens), now)
            middle = known[len(known) // 2] if known else None
            counted.append((at_tokens, min(remaining[len(remaining) // 2], most_tokens), middle))
        request_state.guess, request_state.model_predicted_at_tokens = remaining, at_tokens
        request_state.remaining = None  # so that the next to ask is answered by it

    def known(self) -> dict[str, float | None]:
        """Return the number of known outputs and the errors of the predictions (``prediction_errors``)."""
        prediction_error, baseline_error = self.prediction_errors
        return {
            "outputs": self._lengths.count(),
            "network_off": prediction_error,
            "without_off": baseline_error,
        }

    @property
    def prediction_errors(self) -> tuple[float | None, float | None]:
        """By how much a network's guesses were off, mean |ln(actual ÷ guessed)| of what was left, and what
        was expected without it, over outputs; ``None``: too few are known."""
        if self._guess_off.count() < MIN_JUDGED_OUTPUTS:
            return None, None
        return self._guess_off.mean(), self._known_off.mean()

    # -- what is asked ------------------------------------------------------------

    def look(self, running: Sequence[RunningRequestView], used_blocks: int, now: float) -> int | None:
        """Look at all that run; returns in how many steps they will be short of blocks, ``None`` for not
        soon. ``used_blocks`` are used or held in the whole pool."""
        self.changes += 1
        # Only what is added up: what else there is to say of each is asked where somebody is to be chosen.
        self._counted = {view.request_id: self._growth(view, now) for view in running}
        self._needed = needed_blocks(self._counted.values(), self._pool.block_size)
        self._room_blocks = self.available_blocks(running, used_blocks)
        if not self._preset.forecast.looks:
            return None
        return self._preset.forecast.steps_until_shortage(KvDemandView(self._needed, self._room_blocks), now)

    @property
    def demand(self) -> KvDemandView:
        """What all that run are expected to need, as of the last look and who came and went since."""
        return KvDemandView(tuple(self._needed), self._room_blocks)

    def available_blocks(self, running: Iterable[RunningRequestView], used_blocks: int) -> int:
        """Blocks that running requests may have, with what they share counted for each: not those that
        leases hold."""
        return self._pool.blocks - used_blocks + sum(view.blocks for view in running)

    def need(
        self, running: Iterable[RunningRequestView], short_blocks: int, used_blocks: int
    ) -> BlockShortage:
        """Why one of them is to be preempted."""
        room = self.available_blocks(running, used_blocks)
        return BlockShortage(short_blocks, room, self._pool.block_size, self._step_s)

    def foreseen(self, running: Sequence[RunningRequestView], now: float) -> list[RunningRequestView]:
        """The engine's views of requests, with what each will yet write and how it would come back."""
        return [self._with_predictions(view, now) for view in running]

    def as_running_view(
        self, request_state: RequestState, *, tokens: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningRequestView:
        """A waiting request as it would run: ``tokens`` are those whose KV it needs and nobody else has."""
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
        """How a request that is preempted with ``tokens`` tokens of KV will get them back."""
        return self._preset.recovery.recovery(self._victim(tokens, copied_tokens), now)

    # -- inside ---------------------------------------------------------------

    def _judge_hint(
        self, request_state: RequestState, output_tokens: int, *, only_worse: bool = False
    ) -> None:
        if request_state.program is not None and request_state.hinted_tokens:
            kind = request_state.program.agent_type or ""
            # A client may hint a number that no float holds.
            off = abs(math.log(output_tokens) - math.log(request_state.hinted_tokens))
            if not only_worse or off > (self._hints_off.mean(kind, 1) or 0.0):
                self._hints_off.observe(kind, off)

    def _judge_predictions(self, request_state: RequestState, output_tokens: int) -> None:
        prediction_error, baseline_error = [], []
        for written, guessed, known in request_state.guesses:
            left = output_tokens - written
            if left >= 1 and known is not None:  # where only one of them says something, neither is better
                prediction_error.append(abs(math.log(left / guessed)))
                baseline_error.append(abs(math.log(left / known)))
        if prediction_error:
            self._guess_off.observe(fmean(prediction_error))
            self._known_off.observe(fmean(baseline_error))

    def _assumed_link(self) -> tuple[float | None, float | None]:
        pool = self._pool
        if not pool.host_blocks:
            return None, None
        back_s = pool.host_s_per_token
        if back_s is None:
            back_s = pool.block_bytes / pool.block_size / ASSUMED_LINK_BYTES_PER_S
        return back_s, back_s

    def _victim(self, tokens: int, copied_tokens: int) -> PreemptedRequestView:
        recompute_s = self._reload.seconds(tokens) if self._reload.known else math.inf
        return PreemptedRequestView(
            tokens, recompute_s, *self._link_s_per_token, copied_tokens, self._queued_s
        )

    def _growth(self, view: RunningRequestView, now: float) -> RequestGrowth:
        request_state = self._request_states.get(view.request_id)
        remaining = None
        if request_state is not None:
            remaining = self._remaining(request_state, view.output_tokens, view.most_tokens, now)
        return RequestGrowth(view.context_tokens, remaining, view.shared_blocks)

    def _with_predictions(self, view: RunningRequestView, now: float) -> RunningRequestView:
        request_state = self._request_states.get(view.request_id)
        if request_state is None:
            return view
        victim = self._victim(view.context_tokens, 0)
        recover_s = min(victim.recompute_s, victim.offload_s)
        return view._replace(
            remaining=self._remaining(request_state, view.output_tokens, view.most_tokens, now),
            preemptions=request_state.preemptions,
            stayed_tokens=view.output_tokens - request_state.output_tokens_at_admission,
            recover_s=recover_s if recover_s < math.inf else 0.0,
            of_program=request_state.program is not None,
        )

    def _remaining(
        self, request_state: RequestState, output_tokens: int, most_tokens: int, now: float
    ) -> RemainingTokens | None:
        if not self.predicts:
            return None
        written = output_tokens - request_state.asked_at
        if request_state.remaining is None or not 0 <= written < REPREDICT_AFTER_TOKENS:
            request_state.asked_at, written = output_tokens, 0
            request_state.remaining = self._ask(request_state, output_tokens, most_tokens, now)
            begins = request_state.predicted_output_tokens is None and output_tokens < REPREDICT_AFTER_TOKENS
            if begins and request_state.remaining is not None:
                middle = request_state.remaining[len(request_state.remaining) // 2]
                request_state.predicted_output_tokens = output_tokens + middle
        if request_state.remaining is None or not written:
            return request_state.remaining
        return tuple(max(1.0, left - written) for left in request_state.remaining)

    def _ask(
        self, request_state: RequestState, output_tokens: int, most_tokens: int, now: float
    ) -> RemainingTokens | None:
        view = self._view(request_state, output_tokens, most_tokens)
        guess = _remaining_of_prediction(request_state, output_tokens)
        if guess is not None:
            prediction_error, baseline_error = self.prediction_errors
            view = view._replace(
                guess=guess, prediction_error=prediction_error, baseline_error=baseline_error
            )
        return self.predictor.remaining(view, now)

    def _view(self, request_state: RequestState, output_tokens: int, most_tokens: int) -> OutputLengthView:
        program = request_state.program
        kind = program.agent_type if program is not None else None
        return OutputLengthView(
            request_state.request_id,
            output_tokens,
            most_tokens,
            self._lengths.known(kind, request_state.tool, MIN_OUTPUT_SAMPLES),
            request_state.hinted_tokens,
            self._hints_off.mean(kind or "", MIN_JUDGED_HINTS),
        )


def _remaining_of_prediction(request_state: RequestState, output_tokens: int) -> RemainingTokens | None:
    """What a network last guessed, less what was written since: of the lengths that have not been passed, as
    it lives. ``None``: it guessed nothing, all have been passed, or that is too long ago."""
    written = output_tokens - request_state.model_predicted_at_tokens
    if request_state.guess is None or written > max(
        PREDICTION_VALID_TOKENS, output_tokens // PREDICTION_VALID_DIVISOR
    ):
        return None
    return tuple(max(1.0, left - written) for left in request_state.guess if left > written) or None
