"""What one LLM request carries about its program: body fields, headers and unsent events.

When a request is sent, earlier events of its program may still be queued. The request would then arrive
before them (measured: 39 times in 40). So the request carries these events, if the server's dialect (the form
in which this server takes hints) has a place for events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import runtime, valid_ids_and_names
from .hints import AgenticContext, SojournContext
from .ids import EmitterId
from .program import (
    ExecutionContext,
    Program,
    current_context,
    find_context,
    process_program,
    resolvers,
)
from .user_hints import NO_HINTS, StepContext
from .valid_ids_and_names import name_of

if TYPE_CHECKING:
    from .event_queue import PendingEvent

MAX_PIGGYBACK_EVENTS = 64

Parts = tuple[dict[str, Any], dict[str, str]]


def request_fields() -> dict[str, Any]:
    """Return fields to merge into the JSON body of a request made without a patched client. Never raises.

    The result is empty before ``init()``, and for servers that get headers only. Unsent events stay queued;
    ``request_parts`` adds them.
    """
    return _parts(take=False)[0]


def headers() -> dict[str, str]:
    """Return headers for a request made without a patched client; empty before ``init()``. Never raises."""
    return _parts(take=False, is_turn=False)[1]


def request_parts(program: Program | None = None) -> Parts:
    """Return ``(body fields, headers)`` for one request; both are empty before ``init()``. The program's
    unsent events move into the body fields. Never raises.

    Send the result to the server named by ``init()``. The moved events are not sent again, and no other
    server reads them. ``program`` is the program of the request, by default the program around the running
    code.
    """
    return _parts(take=True, program=program)


def body_additions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``ours`` to set in a request body that already has the user's fields ``theirs``.

    If both have a field, the user's value is kept. If both values are objects, they are merged. If the user's
    value is ``null`` and ours is an object, our object is set.
    """
    added: dict[str, Any] = {}
    for name, value in ours.items():
        if name not in theirs:
            added[name] = value
        elif isinstance(value, Mapping):
            given = theirs[name]
            if given is None or isinstance(given, Mapping):
                added[name] = {**(given or {}), **body_additions(value, given or {})}
    return added


def _parts(*, take: bool, program: Program | None = None, is_turn: bool = True) -> Parts:
    """``is_turn``: False for headers alone, which a user asks for beside the fields of the same request."""
    session = runtime.session()
    if not session.online:
        return {}, {}
    try:
        turn = Turn(session, program)
        if is_turn:
            turn._steps_left = turn.program.count_turn()
        return turn.context_parts(take=take)
    except Exception:
        session.counters.add("inject_error")
        return {}, {}


def place_of_request(
    session: runtime.Session, program: Program | None = None
) -> tuple[Program, StepContext | None, str | None]:
    """Return the program of a request that begins now, its step and its node. The program is ``program``, or
    else the one around the running code, or else the process's own."""
    here, node = current_context.get(), None
    if resolvers or here.program is None or here.program.has_ended:
        here, node = find_context(session.counters)
    if program is None:
        program = here.program or process_program(session, asks=True)
    elif program is not here.program:
        here, node = ExecutionContext(program), None
    return program, here.step, (here.step and here.step.node) or node or program.node


class RequestContext:
    """What one logical request (an LLM call with its retries) says about its program. Program and hints are
    chosen once, at the start, so all retries carry the same. Subclasses set the attributes."""

    session: runtime.Session
    program: Program
    node: str | None
    id: str
    """Id of the request, the same for every attempt."""
    _step: StepContext | None
    _steps_left: float | None
    """Turns left after this one, by the program's limit."""
    _taken: list[PendingEvent]
    _emitter: EmitterId | None
    """Id of the event sender that numbered the carried events; ``None`` before the first take."""

    def return_events(self) -> None:
        """Put the carried events back into the queue. Called after a request without an answer, since its
        events may not have arrived. Never raises."""
        taken, self._taken = self._taken, []
        if taken and self._emitter is not None and self.session.event_sender is not None:
            self.session.event_sender.put_back(self._emitter, taken)

    def context_parts(self, *, take: bool) -> Parts:
        """Return the current body fields and headers.

        ``take=True`` takes the program's unsent events from the queue and adds them, if the dialect carries
        events. A retry carries the events of earlier attempts again; the server recognises events that it has
        seen. While the events are too long together, or one of them cannot be encoded, the newer half returns
        to the queue.
        """
        server, sender = self.session.server, self.session.event_sender
        if server is None or sender is None:
            return {}, {}
        dialect = server.dialect
        if not take or not dialect.carries_events:
            return dialect.fields(self._context())
        if self._emitter != sender.id:
            self._taken, self._emitter = [], sender.id  # the process forked between two attempts
        self._taken += sender.take(self.program.id, max_events=MAX_PIGGYBACK_EVENTS - len(self._taken))
        while True:
            try:
                now = runtime.clock()
                return dialect.fields(self._context([each.event(now) for each in self._taken]))
            except Exception:
                if not self._taken:
                    raise
                half = len(self._taken) // 2
                sender.put_back(sender.id, self._taken[half:])
                del self._taken[half:]

    def _context(self, carried: list[Any] | None = None) -> AgenticContext:
        """Return program id and hints as a wire message. ``carried``: events to include, as structs or
        JSON."""
        program, step = self.program, self._step
        node = None if self.node is None else name_of(self.node)
        hints = program.hints
        if step is not None and step.hints is not NO_HINTS:
            hints = step.hints.with_defaults(hints)
        left = hints.expected_steps_left
        ours = SojournContext(
            emitter=self._emitter if carried else None,
            agent_type=program.agent_type,
            implicit=program.implicit,
            node=node,
            heartbeat=program.heartbeat,
            final=bool(hints.final),
            tenant=program.tenant,
            expected_steps_left=self._steps_left if left is None else left,
            events=carried or [],
        )
        deadline_s: float | None = None
        if hints.deadline_at_s is not None:
            deadline_s = round(max(0.0, hints.deadline_at_s - runtime.clock()), 3)
        resume = hints.expected_resume
        return AgenticContext(
            program_id=program.id,
            parent_program_id=program.parent_id,
            root_program_id=program.root_id,
            blocks_parent=hints.blocks_parent,
            expected_resume=False if resume is None and hints.final else resume,
            request_id=self.id,
            step_id=None if step is None or step.step_id is None else name_of(step.step_id),
            priority=hints.priority,
            deadline_seconds=deadline_s,
            expected_output_length=hints.expected_output_length,
            kv_retention_ttl_seconds=hints.kv_retention_ttl_s,
            sojourn=ours,
        )


class Turn(RequestContext):
    """A logical request that the user's code sends, without a patched client."""

    def __init__(self, session: runtime.Session, program: Program | None = None) -> None:
        self.program, self._step, self.node = place_of_request(session, program)
        self.session = session
        session.has_turns = True
        self.program.is_used = True
        self._steps_left = None
        self.id = next(valid_ids_and_names.request_ids)
        self._taken = []
        self._emitter = None
