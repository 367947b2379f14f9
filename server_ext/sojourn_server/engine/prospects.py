"""What the requests in the engine will yet write, and the KV that takes: the forecasts of one engine.

It asks the preset's remaining policy about each request, adds up what all that run will need, and learns
from every output that ends. Between two looks at all that run, what somebody will need is taken away when
it leaves and added when it comes, so that a look every few steps is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from ..metrics.recorder import Recorder
from ..policy.demand import POINTS, Growth, needed_blocks
from ..policy.forecast import DemandView
from ..policy.preset import Preset
from ..policy.recovery import Recovery, RecoveryView
from ..policy.reload import ReloadEstimate
from ..policy.remaining import LengthView, Remaining
from ..policy.views import RunningView, VictimNeed
from ..program.history import SlidingMean
from .state import Histories, Pool, Ticket

ASK_AGAIN_TOKENS = 32
"""A request is asked about again when it has written so many more; until then each is one less."""
LEAST_OUTPUTS = 16
"""Outputs that are enough to know a kind of output by; else a wider kind is taken."""
HINTS_TO_BELIEVE = 8
"""Hints of an agent type that were judged before the next one can count."""
JUDGED_TO_BELIEVE = 16
"""Outputs by which a network was judged before its next guess can count, of all types together."""
JUDGED_COUNTED = 128
"""By the newest so many it is judged. Each counts once: guesses of one output are off alike."""
GUESSES_AN_OUTPUT = 16
"""Of one output no more are looked at."""
GUESSES_APART = 1.25
"""Each when it has written so many times as much as at the one before, so that late ones count as well."""
GUESS_HOLDS_TOKENS = 4 * ASK_AGAIN_TOKENS
"""A guess is forgotten when so many tokens were written since."""
GUESS_HOLDS_SHARE = 4
"""Or a quarter of all that was written, where that is more."""
STEP_SMOOTHING = 0.05
"""Weight of the newest step in the mean step time."""
ASSUMED_LINK_BYTES_PER_S = 4e9
"""Of copies to host memory, until one was measured: a quarter of what PCIe 4 gives."""


class Prospects:
    """Those of one engine. Times are seconds on its monotonic clock."""

    def __init__(
        self,
        preset: Preset,
        pool: Pool,
        *,
        histories: Histories,
        reload: ReloadEstimate,
        tickets: dict[str, Ticket],
        recorder: Recorder,
    ) -> None:
        self._preset = preset
        self._pool = pool
        self._lengths = histories.output_lengths
        self._hints_off = histories.hints_off
        self._reload = reload
        self._tickets = tickets
        self._recorder = recorder
        self.predictor = preset.remaining
        """Another one may stand in its place: the lab has some that no engine can have."""
        self._step_s = 0.0
        self._link_s_per_token: tuple[float | None, float | None] = self._assumed_link()
        """Seconds to copy a token's KV to host memory, and back."""
        self._queued_s = 0.0
        self._guess_off = SlidingMean(JUDGED_COUNTED)
        self._known_off = SlidingMean(JUDGED_COUNTED)
        """Of each output, by how much a network's guesses were off on average, and what was known without it
        at the same places."""
        self._counted: dict[str, Growth] = {}
        """Requests that ran at the last look, or came since, as they were then."""
        self._needed = [0.0] * len(POINTS)
        """Blocks that these are expected to need at each of ``POINTS``."""
        self._room_blocks = pool.blocks
        self.changes = 0
        """Grows when somebody leaves, and with each look: who was kept out before may enter now."""

    @property
    def predicts(self) -> bool:
        """Whether it is asked at all what requests will yet write."""
        return self.predictor.predicts

    # -- what happens -----------------------------------------------------------

    def step_took(self, seconds: float) -> None:
        """An engine step took so long."""
        if seconds > 0:
            self._step_s += (STEP_SMOOTHING if self._step_s else 1.0) * (seconds - self._step_s)

    def copied(self, out_s_per_token: float | None, back_s_per_token: float | None, queued_s: float) -> None:
        """What copies to host memory and back have taken a token so far, ``None`` before the first, and how
        long those that are queued will yet take."""
        out_s, back_s = self._assumed_link()
        if out_s is not None:
            self._link_s_per_token = out_s_per_token or out_s, back_s_per_token or back_s
        self._queued_s = queued_s

    def gone(self, request_id: str) -> None:
        """A request has left the device."""
        if self.not_in(request_id):
            self.changes += 1

    def not_in(self, request_id: str) -> bool:
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

    def admitted(self, ticket: Ticket, tokens: int, most_tokens: int, now: float) -> None:
        """A request with so many tokens runs, and may write ``most_tokens`` more: it counts from now on,
        though nobody was asked to let it in."""
        if self.predicts and most_tokens and ticket.request_id not in self._counted:
            written = max(0, tokens - ticket.prompt_tokens)
            view = self.would_run(
                ticket, tokens=tokens, output_tokens=written, most_tokens=most_tokens, now=now
            )
            self.came(view)

    def came(self, view: RunningView) -> None:
        """A request is let in."""
        self.not_in(view.request_id)
        self._counted[view.request_id] = Growth(view.context_tokens, view.remaining)
        its = needed_blocks([view], self._pool.block_size)
        self._needed = [whole + part for whole, part in zip(self._needed, its, strict=True)]

    def ended(self, ticket: Ticket, output_tokens: int, *, cut: bool = False) -> None:
        """An output has come to its own end, or was ``cut`` at what it was allowed."""
        program = ticket.program
        if not self.predicts or program is None or output_tokens < 1:
            return
        self._lengths.observe(program.agent_type, ticket.tool, output_tokens)
        # One that is cut where its client set the bound says nothing of a hint that lies at or beyond it.
        if not cut or (ticket.hinted_tokens or 0) < output_tokens:
            self._judge_hint(ticket, output_tokens)
        if ticket.foreseen_tokens is not None:
            self._recorder.observe("sojourn_output_length_ratio", output_tokens / ticket.foreseen_tokens)
        self._judge_guesses(ticket, output_tokens)

    def broken_off(self, ticket: Ticket, output_tokens: int) -> None:
        """An output was aborted by its client, which teaches nothing of lengths. What was hinted is judged as
        if it had ended there, else whoever lies and then aborts would be believed for ever; but no hint comes
        true so, for little would buy that. An output that had not begun says nothing."""
        if self.predicts and output_tokens >= 1:
            self._judge_hint(ticket, output_tokens, only_worse=True)

    def guessed(
        self, request_id: str, at_tokens: int, remaining: Remaining, now: float, *, most_tokens: int
    ) -> None:
        """A network expects a request that has written ``at_tokens`` tokens, and may write ``most_tokens``
        more, to write ``remaining`` more."""
        ticket = self._tickets.get(request_id)
        if ticket is None or not self.predicts or not remaining or at_tokens < ticket.guessed_at:
            return
        if not all(1.0 <= left < math.inf for left in remaining):
            return
        counted = ticket.guesses
        if not counted or (
            len(counted) < GUESSES_AN_OUTPUT and at_tokens >= GUESSES_APART * max(1, counted[-1][0])
        ):
            known = self.predictor.remaining(self._view(ticket, at_tokens, most_tokens), now)
            middle = known[len(known) // 2] if known else None
            counted.append((at_tokens, min(remaining[len(remaining) // 2], most_tokens), middle))
        ticket.guess, ticket.guessed_at = remaining, at_tokens
        ticket.remaining = None  # so that the next to ask is answered by it

    def known(self) -> dict[str, float | None]:
        """What there is to judge by: outputs, and by how much predictions were off (``guesses_off``)."""
        guess_off, known_off = self.guesses_off
        return {"outputs": self._lengths.count(), "network_off": guess_off, "without_off": known_off}

    @property
    def guesses_off(self) -> tuple[float | None, float | None]:
        """By how much a network's guesses were off, mean |ln(actual ÷ guessed)| of what was left, and what
        was expected without it, over outputs; ``None``: too few are known."""
        if self._guess_off.count() < JUDGED_TO_BELIEVE:
            return None, None
        return self._guess_off.mean(), self._known_off.mean()

    # -- what is asked ------------------------------------------------------------

    def look(self, running: Sequence[RunningView], used_blocks: int, now: float) -> int | None:
        """Look at all that run; returns in how many steps they will be short of blocks, ``None`` for not
        soon. ``used_blocks`` are used or held in the whole pool."""
        self.changes += 1
        # Only what is added up: what else there is to say of each is asked where somebody is to be chosen.
        self._counted = {view.request_id: self._growth(view, now) for view in running}
        self._needed = needed_blocks(self._counted.values(), self._pool.block_size)
        self._room_blocks = self.room_blocks(running, used_blocks)
        if not self._preset.forecast.looks:
            return None
        return self._preset.forecast.short_in(DemandView(self._needed, self._room_blocks), now)

    @property
    def demand(self) -> DemandView:
        """What all that run are expected to need, as of the last look and who came and went since."""
        return DemandView(tuple(self._needed), self._room_blocks)

    def room_blocks(self, running: Iterable[RunningView], used_blocks: int) -> int:
        """Blocks that running requests may have, with what they share counted for each: not those that
        leases hold."""
        return self._pool.blocks - used_blocks + sum(view.blocks for view in running)

    def need(self, running: Iterable[RunningView], short_blocks: int, used_blocks: int) -> VictimNeed:
        """Why one of them is to be preempted."""
        room = self.room_blocks(running, used_blocks)
        return VictimNeed(short_blocks, room, self._pool.block_size, self._step_s)

    def foreseen(self, running: Sequence[RunningView], now: float) -> list[RunningView]:
        """The engine's views of requests, with what each will yet write and how it would come back."""
        return [self._foreseen(view, now) for view in running]

    def would_run(
        self, ticket: Ticket, *, tokens: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningView:
        """A waiting request as it would run: ``tokens`` are those whose KV it needs and nobody else has."""
        return RunningView(
            request_id=ticket.request_id,
            program_rank=ticket.rank,
            position=-1,
            blocks=0,
            context_tokens=tokens,
            output_tokens=output_tokens,
            most_tokens=most_tokens,
            remaining=self._remaining(ticket, output_tokens, most_tokens, now),
            preemptions=ticket.preemptions,
            of_program=ticket.program is not None,
        )

    def recovery(self, tokens: int, now: float, *, copied_tokens: int = 0) -> Recovery:
        """How a request that is preempted with ``tokens`` tokens of KV will get them back."""
        return self._preset.recovery.recovery(self._victim(tokens, copied_tokens), now)

    # -- inside ---------------------------------------------------------------

    def _judge_hint(self, ticket: Ticket, output_tokens: int, *, only_worse: bool = False) -> None:
        if ticket.program is not None and ticket.hinted_tokens:
            kind = ticket.program.agent_type or ""
            # A client may hint a number that no float holds.
            off = abs(math.log(output_tokens) - math.log(ticket.hinted_tokens))
            if not only_worse or off > (self._hints_off.mean(kind, 1) or 0.0):
                self._hints_off.observe(kind, off)

    def _judge_guesses(self, ticket: Ticket, output_tokens: int) -> None:
        guess_off, known_off = [], []
        for written, guessed, known in ticket.guesses:
            left = output_tokens - written
            if left >= 1 and known is not None:  # where only one of them says something, neither is better
                guess_off.append(abs(math.log(left / guessed)))
                known_off.append(abs(math.log(left / known)))
        if guess_off:
            self._guess_off.observe(fmean(guess_off))
            self._known_off.observe(fmean(known_off))

    def _assumed_link(self) -> tuple[float | None, float | None]:
        pool = self._pool
        if not pool.host_blocks:
            return None, None
        back_s = pool.host_s_per_token
        if back_s is None:
            back_s = pool.block_bytes / pool.block_size / ASSUMED_LINK_BYTES_PER_S
        return back_s, back_s

    def _victim(self, tokens: int, copied_tokens: int) -> RecoveryView:
        recompute_s = self._reload.seconds(tokens) if self._reload.known else math.inf
        return RecoveryView(tokens, recompute_s, *self._link_s_per_token, copied_tokens, self._queued_s)

    def _growth(self, view: RunningView, now: float) -> Growth:
        ticket = self._tickets.get(view.request_id)
        remaining = None
        if ticket is not None:
            remaining = self._remaining(ticket, view.output_tokens, view.most_tokens, now)
        return Growth(view.context_tokens, remaining, view.shared_blocks)

    def _foreseen(self, view: RunningView, now: float) -> RunningView:
        ticket = self._tickets.get(view.request_id)
        if ticket is None:
            return view
        victim = self._victim(view.context_tokens, 0)
        recover_s = min(victim.recompute_s, victim.offload_s)
        return view._replace(
            remaining=self._remaining(ticket, view.output_tokens, view.most_tokens, now),
            preemptions=ticket.preemptions,
            stayed_tokens=view.output_tokens - ticket.output_when_in,
            recover_s=recover_s if recover_s < math.inf else 0.0,
            of_program=ticket.program is not None,
        )

    def _remaining(
        self, ticket: Ticket, output_tokens: int, most_tokens: int, now: float
    ) -> Remaining | None:
        if not self.predicts:
            return None
        written = output_tokens - ticket.asked_at
        if ticket.remaining is None or not 0 <= written < ASK_AGAIN_TOKENS:
            ticket.asked_at, written = output_tokens, 0
            ticket.remaining = self._ask(ticket, output_tokens, most_tokens, now)
            begins = ticket.foreseen_tokens is None and output_tokens < ASK_AGAIN_TOKENS
            if begins and ticket.remaining is not None:
                middle = ticket.remaining[len(ticket.remaining) // 2]
                ticket.foreseen_tokens = output_tokens + middle
        if ticket.remaining is None or not written:
            return ticket.remaining
        return tuple(max(1.0, left - written) for left in ticket.remaining)

    def _ask(self, ticket: Ticket, output_tokens: int, most_tokens: int, now: float) -> Remaining | None:
        view = self._view(ticket, output_tokens, most_tokens)
        guess = _left_of_guess(ticket, output_tokens)
        if guess is not None:
            guess_off, known_off = self.guesses_off
            view = view._replace(guess=guess, guess_off=guess_off, known_off=known_off)
        return self.predictor.remaining(view, now)

    def _view(self, ticket: Ticket, output_tokens: int, most_tokens: int) -> LengthView:
        program = ticket.program
        kind = program.agent_type if program is not None else None
        return LengthView(
            ticket.request_id,
            output_tokens,
            most_tokens,
            self._lengths.known(kind, ticket.tool, LEAST_OUTPUTS),
            ticket.hinted_tokens,
            self._hints_off.mean(kind or "", HINTS_TO_BELIEVE),
        )


def _left_of_guess(ticket: Ticket, output_tokens: int) -> Remaining | None:
    """What a network last guessed, less what was written since: of the lengths that have not been passed, as
    it lives. ``None``: it guessed nothing, all have been passed, or that is too long ago."""
    written = output_tokens - ticket.guessed_at
    if ticket.guess is None or written > max(GUESS_HOLDS_TOKENS, output_tokens // GUESS_HOLDS_SHARE):
        return None
    return tuple(max(1.0, left - written) for left in ticket.guess if left > written) or None
