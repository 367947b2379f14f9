"""ThunderAgent's router: pauses and resumes whole programs so that their contexts fit the device.

This module follows the public router (ThunderAgent-org/ThunderAgent at a7eef77 of March 2026:
``scheduler/router.py``, ``backend/state.py``, ``wiki/Scheduler.md``) with its defaults, for one backend or
several. Where paper (arXiv 2602.13692) and code differ, the module follows the code.

- A program is either *active* on a backend (an engine) or *paused*. Requests of an active program pass at
  once. Its whole context counts against the device's KV memory, even while the program runs a tool. Requests
  of a paused program wait.
- A new program becomes active at once if no program is paused and a backend has capacity for it. Otherwise
  the program is paused. Of several backends with capacity, it gets the one with the fewest tokens.
- Every 5 s the router first resumes, then pauses programs. It selects programs to resume, up to the capacity
  of all backends together: first those with a waiting request, then new ones, then those in a tool. Within
  each group, the smallest come first. It places the selected programs, the largest first, each on the backend
  with the most capacity left. A program that does not fit stays paused.
- On each backend the router pauses programs until the rest fits. Programs in a tool come first, then programs
  whose request the engine has; within each group, the smallest come first. Programs of the second group are
  only marked, and pause at the end of their turn.
- After half an hour of waiting, a program resumes regardless of capacity. It resumes on its former backend; a
  new program gets the backend with the fewest programs.

Left out:

- tokens that programs share, which the router reads from each backend's metrics
- estimates of token counts from characters, since the counts are known here
- output tokens during generation: here they count only from the end of the turn
- ``--use-acting-token-decay``, which is off by default

One point follows later revisions and the router's documentation, not a7eef77: the pause loop subtracts the
tokens of marked programs. Otherwise it would mark every program whose request the engine has, as soon as no
program in a tool is left to pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .request_router import RequestRouterView, RoutableRequest, RoutedProgramView

BUFFER_TOKENS = 100
"""Tokens kept free for each active program (the public router's ``BUFFER_PER_PROGRAM``)."""

CHECK_EVERY_S = 5.0
"""Seconds between two rounds of resuming and pausing (the public router's ``--scheduler-interval``)."""

FORCE_RESUME_AFTER_S = 1800.0
"""Seconds after which a waiting request passes without capacity (the public router's
``_wait_for_resume``)."""


@dataclass(slots=True)
class _RoutedProgram:
    program_id: str
    tokens: int = 0
    """Tokens of the newest prompt; after its turn, of the prompt and the output."""
    steps: int = 0
    """Number of requests so far."""
    reasoning: bool = False
    """Whether the program has an unanswered request. If false, it runs a tool."""
    paused: bool = False
    marked: bool = False
    """Whether the program is to be paused at the end of its turn."""
    request_id: str | None = None
    """Id of the program's newest request."""
    backend: int | None = None
    """Number, from 0, of the backend where the program is or was last active; ``None`` if it was never
    active."""

    @property
    def needs_tokens(self) -> int:
        return self.tokens + BUFFER_TOKENS


class ThunderAgentRouter:
    """Router for ``backends`` vLLM engines of equal size, at least one."""

    is_open = False
    tick_s = CHECK_EVERY_S

    def __init__(self, backends: int = 1) -> None:
        self._backends = range(backends)
        self._programs: dict[str, _RoutedProgram] = {}
        self._check_s: float | None = None

    def select_requests(self, view: RequestRouterView, now: float) -> Sequence[str]:
        self._drop_ended_programs(view)
        for program in view.programs:
            self._update_program(program)
        for request in view.waiting:
            self._arrived(request, view.capacity_tokens)
        resumed: list[str] = []
        if self._check_s is None:
            self._check_s = now + self.tick_s
        elif now >= self._check_s:
            self._check_s = now + self.tick_s
            resumed = self._resume(view.capacity_tokens)
            self._pause(view.capacity_tokens)
        resumed += self._force_resume(view.waiting, now)
        place = {program_id: number for number, program_id in enumerate(resumed)}
        going = [request for request in view.waiting if not self._programs[request.program_id].paused]
        # Requests of programs that were not paused come first.
        going.sort(key=lambda request: place.get(request.program_id, -1))
        return [request.request_id for request in going]

    def replica_of(self, program_id: str) -> int:
        """Number of a program's backend, from 0. Call it only after ``select_requests`` has admitted a
        request of the program."""
        backend = self._programs[program_id].backend
        assert backend is not None
        return backend

    # -- events -------------------------------------------------------------------

    def _drop_ended_programs(self, view: RequestRouterView) -> None:
        present = {program.program_id for program in view.programs if program.state != "over"}
        present.update(request.program_id for request in view.waiting)
        for program_id in [known for known in self._programs if known not in present]:
            del self._programs[program_id]

    def _update_program(self, program: RoutedProgramView) -> None:
        known = self._programs.get(program.program_id)
        if known is not None and known.reasoning and program.state == "acting":
            self._turn_over(known, program.context_tokens)

    def _turn_over(self, known: _RoutedProgram, context_tokens: int) -> None:
        known.reasoning = False
        known.tokens = context_tokens
        if known.marked:
            known.marked, known.paused = False, True

    def _arrived(self, request: RoutableRequest, capacity_tokens: int) -> None:
        known = self._programs.get(request.program_id)
        if known is None:
            known = self._programs[request.program_id] = _RoutedProgram(request.program_id)
        if known.request_id == request.request_id:
            return
        if known.reasoning and not known.paused:  # the previous turn ended at this very time
            self._turn_over(known, known.tokens)
        known.request_id = request.request_id
        known.steps += 1
        known.reasoning = True
        known.tokens = request.prompt_tokens
        if known.steps == 1:
            # Paused for now, so that the program's own tokens and buffer do not count as used.
            known.paused = True
            others_paused = any(k.paused for k in self._programs.values() if k is not known)
            if not others_paused:
                self._begin(known, capacity_tokens)

    # -- pausing and resuming -------------------------------------------------------

    def _active(self, backend: int) -> Iterator[_RoutedProgram]:
        return (k for k in self._programs.values() if k.backend == backend and not k.paused)

    def _remaining(self, capacity_tokens: int, backend: int) -> int:
        return capacity_tokens - sum(known.needs_tokens for known in self._active(backend))

    def _begin(self, known: _RoutedProgram, capacity_tokens: int) -> None:
        """Activate a new program if it fits on a backend. If it fits on several, choose the one with the
        fewest tokens."""
        fitting = [b for b in self._backends if self._remaining(capacity_tokens, b) >= known.needs_tokens]
        if fitting:
            known.backend = min(fitting, key=lambda b: sum(other.tokens for other in self._active(b)))
            known.paused = False

    def _resume(self, capacity_tokens: int) -> list[str]:
        """Resume programs while they fit. Returns their ids in the order of placement."""
        remaining_of = {
            backend: tokens
            for backend in self._backends
            if (tokens := self._remaining(capacity_tokens, backend)) > BUFFER_TOKENS
        }
        remaining = sum(remaining_of.values())
        candidates = sorted(
            (known for known in self._programs.values() if known.paused),
            key=lambda known: (_pause_priority(known), known.tokens),
        )
        chosen = []
        for known in candidates:
            if known.needs_tokens <= remaining:
                remaining -= known.needs_tokens
                chosen.append(known)
        resumed = []
        for known in sorted(chosen, key=lambda known: -known.tokens):
            backend = max(remaining_of, key=remaining_of.__getitem__)
            if known.needs_tokens > remaining_of[backend]:
                continue
            remaining_of[backend] -= known.needs_tokens
            known.paused, known.backend = False, backend
            resumed.append(known.program_id)
        return resumed

    def _pause(self, capacity_tokens: int) -> None:
        for backend in self._backends:
            over = -self._remaining(capacity_tokens, backend)
            over -= sum(known.needs_tokens for known in self._active(backend) if known.marked)
            smallest_first = sorted(self._active(backend), key=lambda known: known.tokens)
            for known in smallest_first:
                if over > 0 and not known.reasoning:
                    known.paused = True
                    over -= known.needs_tokens
            for known in smallest_first:
                if over > 0 and known.reasoning and not known.marked:
                    known.marked = True
                    over -= known.needs_tokens

    def _force_resume(self, waiting: Sequence[RoutableRequest], now: float) -> list[str]:
        forced = []
        for request in waiting:
            known = self._programs[request.program_id]
            if known.paused and now - request.since_s >= FORCE_RESUME_AFTER_S:
                if known.backend is None:
                    known.backend = min(self._backends, key=lambda b: sum(1 for _ in self._active(b)))
                known.paused = False
                forced.append(known.program_id)
        return forced


def _pause_priority(known: _RoutedProgram) -> int:
    """Order in which paused programs resume, lowest number first. 0: the program's second or a later request
    waits. 1: the program is new, with no second request yet. 2: the program runs a tool."""
    if known.steps == 1:
        return 1
    return 0 if known.reasoning else 2
