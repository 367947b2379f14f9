"""What one LLM request says about its program: body fields, headers, and the events that ride along.

An event that is still unsent when its program's next request goes out would be
overtaken by it (measured: 39 times in 40). So the request takes those events
with it, where the dialect has a place for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from . import runtime
from .context import Place, find
from .hints import AgenticContext, SojournContext
from .ids import EmitterId
from .naming import name_of
from .program import Program, process_program
from .step import NO_ADVICE
from .wire import MAX_CONTEXT_BYTES, encode

if TYPE_CHECKING:
    from .backlog import Pending

MAX_PIGGYBACK_EVENTS = 64
_ROOM_BYTES = 256
"""Left free of the context's limit for keys and quotes that appear together with the events."""

Parts = tuple[dict[str, Any], dict[str, str]]


def request_fields() -> dict[str, Any]:
    """Fields to merge into the JSON body of a request made without a patched client. Never raises.

    Empty before ``init()``, and for servers that get headers only. Events stay queued; ``request_parts``
    takes them along.
    """
    return _parts(take=False)[0]


def headers() -> dict[str, str]:
    """Headers for a request made without a patched client; empty before ``init()``. Never raises."""
    return _parts(take=False)[1]


def request_parts(program: Program | None = None) -> Parts:
    """``(body fields, headers)`` for one request; events not yet sent move into the body. Never raises.

    Send what it returns, to the server named by ``init()``: events it took are not sent again, and no other
    server knows what to do with them. ``program`` speaks for another program than the one around the running
    code.
    """
    return _parts(take=True, program=program)


def _parts(*, take: bool, program: Program | None = None) -> Parts:
    session = runtime.session()
    if not session.online:
        return {}, {}
    try:
        return Turn(session, program).parts(take=take)
    except Exception:
        session.counters.add("inject_error")
        return {}, {}


class Turn:
    """One logical request: its program and advice are settled when it begins, retries say the same again."""

    def __init__(self, session: runtime.Session, program: Program | None = None) -> None:
        here, node = find(session.counters)
        if program is not None and program is not here.program:
            here, node = Place(program), None
        self.session = session
        self.program: Program = here.program if here.program is not None else process_program(session)
        self._step = here.step
        self._node = (here.step.node if here.step is not None else None) or node or self.program.node
        self._taken: list[Pending] = []
        self._emitter: EmitterId | None = None
        """Whose numbers the taken events bear."""

    def failed(self) -> None:
        """The request is over and was not answered: the events on it may not have arrived. Never raises."""
        taken, self._taken = self._taken, []
        if taken and self._emitter is not None and self.session.emitter is not None:
            self.session.emitter.put_back(self._emitter, taken)

    def parts(self, *, take: bool) -> Parts:
        """Body fields and headers as of now. Events taken for an earlier attempt ride on every later one too:
        the server recognises those it has seen."""
        session = self.session
        if session.server is None or session.emitter is None:
            return {}, {}
        dialect = session.server.dialect
        context = self._context()
        if not take or not dialect.carries_events:
            return dialect.fields(context)
        if self._emitter != session.emitter.id:
            self._taken, self._emitter = [], session.emitter.id  # a fork lies between two attempts
        plain_bytes = len(encode(context))
        room_bytes = MAX_CONTEXT_BYTES - _ROOM_BYTES - plain_bytes
        now = runtime.clock()
        events = [pending.encode(now) for pending in self._taken]
        fresh = session.emitter.take(
            self.program.id,
            max_events=MAX_PIGGYBACK_EVENTS - len(events),
            max_bytes=room_bytes - sum(map(len, events)) - len(events),
        )
        self._taken += fresh
        events += [pending.encode(now) for pending in fresh]
        if events:
            context = self._context(session.emitter.id, [msgspec.Raw(event) for event in events])
        return dialect.fields(context)

    def _context(self, emitter: str | None = None, events: list[msgspec.Raw] | None = None) -> AgenticContext:
        program, step = self.program, self._step
        hints = program.advice
        if step is not None and step.advice is not NO_ADVICE:
            hints = step.advice.over(hints)
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
            step_id=None if step is None or step.step_id is None else name_of(step.step_id),
            priority=hints.priority,
            deadline_seconds=deadline_s,
            expected_output_length=hints.expected_output_length,
            kv_retention_ttl_seconds=hints.kv_retention_ttl_s,
            sojourn=SojournContext(
                emitter=emitter,
                agent_type=program.agent_type,
                implicit=program.implicit,
                node=None if self._node is None else name_of(self._node),
                heartbeat=program.heartbeat,
                final=bool(hints.final),
                events=events or [],
            ),
        )


__all__ = ["MAX_PIGGYBACK_EVENTS", "Turn", "headers", "request_fields", "request_parts"]
