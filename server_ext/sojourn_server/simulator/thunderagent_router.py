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

from sojourn_server.routing import routing_events as ev

from .simulated_gateway import RequestRouter

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
    backend: str | None = None
    """Name of the backend where the program is or was last active; ``None`` if it was never active."""

    @property
    def needs_tokens(self) -> int:
        return self.tokens + BUFFER_TOKENS

    @property
    def resume_order(self) -> tuple[int, int]:
        """Paused programs resume in this order: first those whose second or a later request waits, then new
        ones, with no second request yet, then those that run a tool; of each kind the smallest first."""
        return 1 if self.steps == 1 else 0 if self.reasoning else 2, self.tokens


class ThunderAgentRouter(RequestRouter):
    """Router for vLLM engines of equal size, at least one."""

    tick_s = CHECK_EVERY_S

    def __init__(self) -> None:
        self._backends: dict[str, int] = {}
        """Name → tokens of the device's KV pool."""
        self._programs: dict[str, _RoutedProgram] = {}
        self._waiting: dict[str, tuple[_RoutedProgram, float]] = {}
        """Request that has not been sent → (its program, time of its arrival)."""
        self._sent: dict[str, _RoutedProgram] = {}
        """Unanswered request → its program."""
        self._check_s = CHECK_EVERY_S

    def take(self, event: ev.AnyRoutingEvent, now: float) -> Sequence[ev.SendRequest]:
        resumed: list[str] = []
        if isinstance(event, ev.ReplicaRegistered):
            self._backends[event.replica_id] = event.capacity_tokens
        elif isinstance(event, ev.RequestReceived):
            self._received(event, now)
        elif isinstance(event, ev.RequestFinished):
            known = self._sent.pop(event.request_id)
            known.reasoning = False
            known.tokens += event.output_tokens
            known.paused, known.marked = known.paused or known.marked, False
        elif isinstance(event, ev.ProgramEnded):
            self._programs.pop(event.program_id, None)
        elif isinstance(event, ev.Tick) and now >= self._check_s:
            self._check_s = now + self.tick_s
            resumed = self._resume()
            self._pause()
        resumed += self._force_resume(now)
        place = {program_id: number for number, program_id in enumerate(resumed)}
        going = [(known, request_id) for request_id, (known, _) in self._waiting.items() if not known.paused]
        # Requests of programs that were not paused come first.
        going.sort(key=lambda pair: place.get(pair[0].program_id, -1))
        actions = []
        for known, request_id in going:
            del self._waiting[request_id]
            self._sent[request_id] = known
            assert known.backend is not None
            actions.append(ev.SendRequest(request_id, known.backend, "thunderagent"))
        return actions

    def _received(self, request: ev.RequestReceived, now: float) -> None:
        program_id = request.program_id or request.request_id
        known = self._programs.setdefault(program_id, _RoutedProgram(program_id))
        self._waiting[request.request_id] = known, now
        known.steps += 1
        known.reasoning = True
        known.tokens = request.context_tokens
        if known.steps == 1:
            others_paused = any(k.paused for k in self._programs.values())
            # Paused for now, so that the program's own tokens and buffer do not count as used.
            known.paused = True
            if not others_paused:
                self._begin(known)

    # -- pausing and resuming -------------------------------------------------------

    def _active(self, backend: str) -> Iterator[_RoutedProgram]:
        return (k for k in self._programs.values() if k.backend == backend and not k.paused)

    def _remaining(self, backend: str) -> int:
        return self._backends[backend] - sum(known.needs_tokens for known in self._active(backend))

    def _begin(self, known: _RoutedProgram) -> None:
        """Activate a new program if it fits on a backend. If it fits on several, choose the one with the
        fewest tokens."""
        fitting = [b for b in self._backends if self._remaining(b) >= known.needs_tokens]
        if fitting:
            known.backend = min(fitting, key=lambda b: sum(other.tokens for other in self._active(b)))
            known.paused = False

    def _resume(self) -> list[str]:
        """Resume programs while they fit. Returns their ids in the order of placement."""
        remaining_of = {backend: self._remaining(backend) for backend in self._backends}
        remaining_of = {backend: left for backend, left in remaining_of.items() if left > BUFFER_TOKENS}
        remaining = sum(remaining_of.values())
        chosen = []
        paused = [known for known in self._programs.values() if known.paused]
        for known in sorted(paused, key=lambda known: known.resume_order):
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

    def _pause(self) -> None:
        for backend in self._backends:
            over = -self._remaining(backend)
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

    def _force_resume(self, now: float) -> list[str]:
        forced = []
        for known, since_s in self._waiting.values():
            if known.paused and now - since_s >= FORCE_RESUME_AFTER_S:
                if known.backend is None:
                    known.backend = min(self._backends, key=lambda b: sum(1 for _ in self._active(b)))
                known.paused = False
                forced.append(known.program_id)
        return forced
