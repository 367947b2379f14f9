"""ThunderAgent's router: whole programs are paused and resumed so that their contexts fit the device.

Follows the public router (ThunderAgent-org/ThunderAgent at a7eef77 of March 2026: ``scheduler/router.py``,
``backend/state.py``, ``wiki/Scheduler.md``) with its defaults, for one backend. What the paper (arXiv
2602.13692) and the code do differently follows the code.

- A program is *active* (counted against the device, its requests go on at once) or *paused* (its
  requests wait). A context counts in full while its program acts.
- A new program becomes active at once where nobody is paused and it fits; else it is paused.
- Every 5 s: first resume, then pause. Resumed are, as far as they fit, programs with a request waiting,
  then new ones, then those still in a tool; the smallest first within each. Paused are, until the rest
  fits, acting programs, the smallest first; then reasoning ones, the smallest first, which are marked and
  stay until their turn is over.
- Whoever has waited for half an hour goes on regardless.

Left out: more than one backend (and with it best-fit placement, which for one is only the order of resuming,
largest first: kept); counting tokens from characters, since here they are known; counting output while it
is generated, so a turn's output counts from its end; ``--use-acting-token-decay``, off by default. At that
revision the loop that pauses does not subtract what it has already marked, and so marks every reasoning
program once no acting one is left; its documentation says otherwise and later revisions subtract. So do we.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..door import DoorProgram, DoorRequest, DoorView

BUFFER_TOKENS = 100
"""Kept free for each active program (``BUFFER_PER_PROGRAM``)."""

CHECK_EVERY_S = 5.0
"""``--scheduler-interval``."""

PATIENCE_S = 1800.0
"""After so long a waiting request goes on though nothing has room (``_wait_for_resume``)."""


@dataclass(slots=True)
class _Known:
    """A program, as the router books it."""

    program_id: str
    tokens: int = 0
    steps: int = 0
    """Requests that have arrived."""
    reasoning: bool = False
    paused: bool = False
    marked: bool = False
    """It will be paused when its turn is over."""
    request_id: str | None = None
    """Its newest request."""

    @property
    def needs_tokens(self) -> int:
        return self.tokens + BUFFER_TOKENS


class ThunderAgentDoor:
    """The router before an untouched engine."""

    is_open = False
    tick_s = CHECK_EVERY_S

    def __init__(self) -> None:
        self._programs: dict[str, _Known] = {}
        self._check_s: float | None = None

    def let_in(self, view: DoorView, now: float) -> Sequence[str]:
        self._forget_the_gone(view)
        for program in view.programs:
            self._take_note(program)
        for request in view.waiting:
            self._arrived(request, view.capacity_tokens)
        resumed: list[str] = []
        if self._check_s is None:
            self._check_s = now + self.tick_s
        elif now >= self._check_s:
            self._check_s = now + self.tick_s
            resumed = self._resume(view.capacity_tokens)
            self._pause(view.capacity_tokens)
        resumed += self._lose_patience(view.waiting, now)
        place = {program_id: number for number, program_id in enumerate(resumed)}
        going = [request for request in view.waiting if not self._programs[request.program_id].paused]
        # Those whom nothing held back were here first.
        going.sort(key=lambda request: place.get(request.program_id, -1))
        return [request.request_id for request in going]

    # -- what happened ------------------------------------------------------------

    def _forget_the_gone(self, view: DoorView) -> None:
        present = {program.program_id for program in view.programs if program.state != "over"}
        present.update(request.program_id for request in view.waiting)
        for program_id in [known for known in self._programs if known not in present]:
            del self._programs[program_id]

    def _take_note(self, program: DoorProgram) -> None:
        known = self._programs.get(program.program_id)
        if known is not None and known.reasoning and program.state == "acting":
            self._turn_over(known, program.context_tokens)

    def _turn_over(self, known: _Known, context_tokens: int) -> None:
        known.reasoning = False
        known.tokens = context_tokens
        if known.marked:
            known.marked, known.paused = False, True

    def _arrived(self, request: DoorRequest, capacity_tokens: int) -> None:
        known = self._programs.get(request.program_id)
        if known is None:
            known = self._programs[request.program_id] = _Known(request.program_id)
        if known.request_id == request.request_id:
            return
        if known.reasoning and not known.paused:  # the end of the turn before came at the same moment
            self._turn_over(known, known.tokens)
        known.request_id = request.request_id
        known.steps += 1
        known.reasoning = True
        known.tokens = request.prompt_tokens
        if known.steps == 1:
            # A new program is not among the active yet: neither it nor its buffer counts against itself.
            known.paused = True
            others_wait = any(k.paused for k in self._programs.values() if k is not known)
            if not others_wait and self._remaining(capacity_tokens) >= known.needs_tokens:
                known.paused = False

    # -- pausing and resuming -------------------------------------------------------

    def _active(self) -> Iterator[_Known]:
        return (known for known in self._programs.values() if not known.paused)

    def _remaining(self, capacity_tokens: int) -> int:
        return capacity_tokens - sum(known.needs_tokens for known in self._active())

    def _resume(self, capacity_tokens: int) -> list[str]:
        remaining = self._remaining(capacity_tokens)
        if remaining <= BUFFER_TOKENS:
            return []
        candidates = sorted(
            (known for known in self._programs.values() if known.paused),
            key=lambda known: (_group(known), known.tokens),
        )
        chosen = []
        for known in candidates:
            if known.needs_tokens <= remaining:
                remaining -= known.needs_tokens
                known.paused = False
                chosen.append(known)
        chosen.sort(key=lambda known: -known.tokens)
        return [known.program_id for known in chosen]

    def _pause(self, capacity_tokens: int) -> None:
        over = -self._remaining(capacity_tokens)
        over -= sum(known.needs_tokens for known in self._active() if known.marked)
        smallest_first = sorted(self._active(), key=lambda known: known.tokens)
        for known in smallest_first:
            if over > 0 and not known.reasoning:
                known.paused = True
                over -= known.needs_tokens
        for known in smallest_first:
            if over > 0 and known.reasoning and not known.marked:
                known.marked = True
                over -= known.needs_tokens

    def _lose_patience(self, waiting: Sequence[DoorRequest], now: float) -> list[str]:
        forced = []
        for request in waiting:
            known = self._programs[request.program_id]
            if known.paused and now - request.since_s >= PATIENCE_S:
                known.paused = False
                forced.append(known.program_id)
        return forced


def _group(known: _Known) -> int:
    """0: comes back and waits. 1: new (a second request has not been seen). 2: in a tool."""
    if known.steps == 1:
        return 1
    return 0 if known.reasoning else 2
