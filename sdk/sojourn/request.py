"""What one LLM request says about its program: body fields, headers, and the events that ride along.

An event that is still unsent when its program's next request goes out would be
overtaken by it (measured: 39 times in 40). So the request takes those events
with it, where the dialect has a place for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from . import runtime
from .context import Place, find
from .hints import AgenticContext, SojournContext
from .ids import EmitterId
from .naming import name_of, new_request_id
from .program import Program, process_program
from .step import NO_ADVICE
from .wire import MAX_CONTEXT_BYTES, encode

if TYPE_CHECKING:
    from .backlog import Pending
    from .dialects import Dialect
    from .emitter import Emitter

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


def additions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What to set in a body that has the user's own fields ``theirs``: theirs win, objects are joined.

    Their ``null`` in place of an object counts as absent, any other is left as it is.
    """
    added: dict[str, Any] = {}
    for name, value in ours.items():
        if name not in theirs:
            added[name] = value
        elif isinstance(value, Mapping):
            given = theirs[name]
            if given is None or isinstance(given, Mapping):
                added[name] = {**(given or {}), **additions(value, given or {})}
    return added


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

    __slots__ = ("_emitter", "_step", "_taken", "id", "node", "program", "session")

    def __init__(self, session: runtime.Session, program: Program | None = None) -> None:
        here, node = find(session.counters)
        if program is not None and program is not here.program:
            here, node = Place(program), None
        self.session = session
        self.program: Program = here.program if here.program is not None else process_program(session)
        step = self._step = here.step
        self.node = (None if step is None else step.node) or node or self.program.node
        self.id = new_request_id()
        """The same for every attempt."""
        self._taken: list[Pending] = []
        self._emitter: EmitterId | None = None
        """Whose numbers the taken events bear."""

    def yields_to(self, theirs: Mapping[str, Any]) -> bool:
        """The user's own body has a field beside which this server would refuse ours."""
        server = self.session.server
        if server is None or not server.dialect.yields_to:
            return False
        return any(theirs.get(name) is not None for name in server.dialect.yields_to)

    def failed(self) -> None:
        """The request is over and was not answered: the events on it may not have arrived. Never raises."""
        taken, self._taken = self._taken, []
        if taken and self._emitter is not None and self.session.emitter is not None:
            self.session.emitter.put_back(self._emitter, taken)

    def parts(self, *, take: bool) -> Parts:
        """Body fields and headers as of now. Events taken for an earlier attempt ride on every later one too:
        the server recognises those it has seen."""
        session = self.session
        server, emitter = session.server, session.emitter
        if server is None or emitter is None:
            return {}, {}
        dialect = server.dialect
        if not take or not dialect.carries_events:
            return dialect.fields(self._context())
        if self._emitter != emitter.id:
            self._taken, self._emitter = [], emitter.id  # a fork lies between two attempts
        if not self._taken:
            fresh = emitter.take(self.program.id, max_events=MAX_PIGGYBACK_EVENTS)
            if not fresh:
                return dialect.fields(self._context())
            self._taken = fresh
            try:
                now = runtime.clock()
                return dialect.fields(self._context([each.event(now) for each in fresh]))
            except Exception:  # they are too long together, or one of them cannot be said
                self._taken = []
                emitter.untake(fresh)
        return self._measured(dialect, emitter)

    def _measured(self, dialect: Dialect, emitter: Emitter) -> Parts:
        """``parts`` with as many events as have room, each encoded by itself first."""
        room_bytes = MAX_CONTEXT_BYTES - _ROOM_BYTES - len(encode(self._context()))
        now = runtime.clock()
        events = [pending.encode(now) for pending in self._taken]
        fresh = emitter.take(
            self.program.id,
            max_events=MAX_PIGGYBACK_EVENTS - len(events),
            max_bytes=room_bytes - sum(map(len, events)) - len(events),
        )
        self._taken += fresh
        events += [pending.encode(now) for pending in fresh]
        return dialect.fields(self._context([msgspec.Raw(event) for event in events]))

    def _context(self, riding: list[Any] | None = None) -> AgenticContext:
        """``riding``: events, as structs or as JSON."""
        program, step = self.program, self._step
        node = None if self.node is None else name_of(self.node)
        hints = program.advice
        if step is not None and step.advice is not NO_ADVICE:
            hints = step.advice.over(hints)
        ours = SojournContext(
            emitter=self._emitter if riding else None,
            agent_type=program.agent_type,
            implicit=program.implicit,
            node=node,
            heartbeat=program.heartbeat,
            final=bool(hints.final),
            tenant=program.tenant,
            expected_steps_left=None if hints.final else self._turns_left(),
            events=riding or [],
        )
        step_id = None if step is None or step.step_id is None else name_of(step.step_id)
        if hints is NO_ADVICE:
            return AgenticContext(
                program_id=program.id,
                parent_program_id=program.parent_id,
                root_program_id=program.root_id,
                request_id=self.id,
                step_id=step_id,
                sojourn=ours,
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
            step_id=step_id,
            priority=hints.priority,
            deadline_seconds=deadline_s,
            expected_output_length=hints.expected_output_length,
            kv_retention_ttl_seconds=hints.kv_retention_ttl_s,
            sojourn=ours,
        )

    def _turns_left(self) -> float | None:
        advisor = self.session.advisor
        return None if advisor is None else advisor.turns_left(self.program, self.node)


__all__ = ["MAX_PIGGYBACK_EVENTS", "Turn", "additions", "headers", "request_fields", "request_parts"]
