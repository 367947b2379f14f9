"""Programs: one agent run each, from its first request to its last.

    with sojourn.program("fix-issue") as p: ...     # also: async with, @sojourn.program

A program opened inside another is its child. Whoever leaves the block without
ending the program properly (``os._exit``, SIGKILL, a generator never finished)
leaves it to the server's leases.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, overload

from . import runtime
from .config import claim
from .context import Place, find, leave, place
from .errors import ArgumentError
from .events import ProgramEnd, ProgramStart
from .ids import MAX_ID_BYTES, ProgramId
from .naming import name_of, new_program_id
from .step import NO_ADVICE, Advice, advice

P = ParamSpec("P")
R = TypeVar("R")


class _Inherit:
    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = _Inherit()
"""The parent is the program around the running code, if any."""

_CANCELLED = frozenset({"CancelledError", "KeyboardInterrupt", "GeneratorExit"})


def status_of(error: BaseException | None) -> str:
    """``ok``, ``cancelled`` or ``error``. By name, so that asyncio is not loaded for it."""
    if error is None:
        return "ok"
    return "cancelled" if any(kind.__name__ in _CANCELLED for kind in type(error).__mro__) else "error"


class Program:
    """One agent run. Its fields do not change, but for ``node`` and the counts of what is under way."""

    __slots__ = (
        "__weakref__", "_ends", "_pid", "_state", "advice", "agent_type", "call_id", "depth", "heartbeat",
        "id", "implicit", "name", "node", "open_requests", "parent_id", "root_id", "running_tools",
    )  # fmt: skip

    def __init__(
        self,
        id: ProgramId,
        *,
        name: str | None = None,
        agent_type: str | None = None,
        parent: Program | str | None = None,
        call_id: str | None = None,
        advice: Advice = NO_ADVICE,
        heartbeat: bool = True,
        implicit: bool = False,
        ends: bool = True,
    ) -> None:
        """``ends=False``: another process reports the end."""
        self.id = id
        self.name = name
        self.agent_type = agent_type
        self.parent_id: str | None = parent.id if isinstance(parent, Program) else parent
        self.root_id: str | None = (parent.root_id or parent.id) if isinstance(parent, Program) else parent
        """The program at the top; ``None`` for one that is at the top itself."""
        self.depth: int = parent.depth + 1 if isinstance(parent, Program) else int(parent is not None)
        self.call_id = call_id
        """The parent's tool call in which this program runs."""
        self.advice = advice
        self.heartbeat = heartbeat
        self.implicit = implicit
        """Stands for the whole process; nobody opened it."""
        self.node: str | None = None
        """Current node as an adapter last saw it; a ``step()`` comes first."""
        # Sets, not counts: adding and discarding are atomic, so that threads cannot make them drift.
        self.running_tools: set[str] = set()
        """Ids of the tool calls under way."""
        self.open_requests: set[object] = set()
        """LLM requests under way, as far as a patched client tells."""
        self._state = "new"
        self._pid = os.getpid()
        self._ends = ends

    @property
    def is_open(self) -> bool:
        """Started and not ended."""
        return self._state == "open"

    def start(self) -> Program:
        """Report the start and begin heartbeats. For adapters; ``program()`` does it itself. Never raises."""
        if self._state == "new":
            self._state = "open"
            session = runtime.session()
            try:
                if self.heartbeat and session.online:
                    # First, so that the sender, woken by the event, knows when the first beat is due.
                    session.heartbeats.opened(self, runtime.clock())
                session.emit(
                    self,
                    ProgramStart,
                    name=self.name,
                    agent_type=self.agent_type,
                    parent_program_id=self.parent_id,
                    root_program_id=self.root_id,
                    call_id=self.call_id,
                    heartbeat=self.heartbeat,
                )
            except Exception:
                session.counters.add("internal_error")
        return self

    def end(self, status: str = "ok") -> None:
        """Report the end: no request follows. Repeating it is harmless. Never raises."""
        if self._state != "open":
            return
        self._state = "ended"
        session = runtime.session()
        try:
            session.heartbeats.closed(self)
            # A forked copy leaving the block does not end its parent's run.
            if self._ends and self._pid == os.getpid():
                session.emit(self, ProgramEnd, status=status)
        except Exception:
            session.counters.add("internal_error")

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<Program{label} {self.id} {self._state}>"


class ProgramScope:
    """What ``program()`` returns: a block that runs as a program, or a decorator that makes every call
    one."""

    __slots__ = ("_program", "_token", "make")

    def __init__(self, make: Callable[[], Program]) -> None:
        self.make = make
        """A program for the next run, not started yet: for adapters that cannot use ``with``."""
        self._program: Program | None = None
        self._token: Token[Place] | None = None

    def __enter__(self) -> Program:
        if self._program is not None:
            raise ArgumentError("this program is already running; call program() once for each run")
        program = self._program = self.make().start()
        # Steps and tool calls around a child belong to its parent.
        self._token = place.set(Place(program))
        return program

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        program, self._program = self._program, None
        token, self._token = self._token, None
        if token is not None:
            leave(token, runtime.session().counters)
        if program is not None:
            program.end(status_of(error))

    async def __aenter__(self) -> Program:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        from .wrapping import scoped

        make = self.make

        def fresh() -> ProgramScope:
            return ProgramScope(make)

        return scoped(function, fresh)


@overload
def program(name: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def program(
    name: str | None = None,
    *,
    id: str | None = None,
    agent_type: str | None = None,
    parent: Program | str | _Inherit | None = INHERIT,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    blocks_parent: bool | None = None,
    heartbeat: bool = True,
) -> ProgramScope: ...


def program(
    name: str | Callable[..., Any] | None = None,
    *,
    id: str | None = None,
    agent_type: str | None = None,
    parent: Program | str | _Inherit | None = INHERIT,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    blocks_parent: bool | None = None,
    heartbeat: bool = True,
) -> Any:
    """One agent run, as ``with``, ``async with`` or decorator (bare or called; sync, async, generators).

    ``id`` resumes a known program, else a fresh one is made up. ``parent`` is the program around the code
    unless given; ``None`` starts at the top. ``deadline_s`` counts from the start, in seconds; the hints
    hold for every request of the program unless a ``step()`` says otherwise. ``heartbeat=False`` promises
    none. Raises ``ArgumentError`` for an id the wire does not accept or a hint that makes no sense.

    Inside a *generator* a ``with`` block also covers its consumer between two items, as with any context
    variable; the decorator does not.
    """
    if callable(name):
        label = getattr(name, "__name__", None)
        return ProgramScope(lambda: _program(label, INHERIT, None, None, NO_ADVICE, True))(name)
    _check_id("id", id)
    if isinstance(parent, str):
        _check_id("parent", parent)
    elif parent is not None and not isinstance(parent, (Program, _Inherit)):
        raise ArgumentError(f"parent is {parent!r}; expected a Program, an id or None")
    hints: dict[str, Any] = {
        "priority": priority,
        "deadline_s": deadline_s,
        "expected_output_length": expected_output_length,
        "kv_retention_ttl_s": kv_retention_ttl_s,
        "blocks_parent": blocks_parent,
    }
    plain = all(value is None for value in hints.values())
    try:
        advice(**hints)
    except ValueError as error:
        raise ArgumentError(str(error)) from None

    def make() -> Program:
        # Deadlines count from the start of each run, not from the decorator's line.
        return _program(name, parent, id, agent_type, NO_ADVICE if plain else advice(**hints), heartbeat)

    return ProgramScope(make)


def current_program() -> Program | None:
    """The program around the running code; ``None`` outside, where requests go to the process's own."""
    return find(runtime.session().counters)[0].program


def process_program(session: runtime.Session) -> Program:
    """The program that stands for this process: named by ``SOJOURN_PROGRAM_ID``, else flagged implicit.

    A named one outlives the processes that an agent starts, which find the same variable: only the first to
    use the name reports the end.
    """
    found = session.program
    if found is not None:
        return found
    with session.exclusive():  # so that its start comes before any other event of it, whichever thread wins
        found = session.program
        if found is None:
            given = session.config.program_id if session.config else None
            found = Program(
                ProgramId(given) if given else new_program_id(),
                heartbeat=given is not None,
                implicit=given is None,
                ends=given is None or claim(given),
            )
            found.start()
            session.program = found
    return found


def _program(
    name: str | None,
    parent: Program | str | _Inherit | None,
    id: str | None,
    agent_type: str | None,
    advice: Advice,
    heartbeat: bool,
) -> Program:
    call_id: str | None = None
    if isinstance(parent, _Inherit):
        here = find(runtime.session().counters)[0]
        parent = here.program
        if here.tool_call is not None and here.tool_call.program is parent:
            call_id = here.tool_call.call_id
    return Program(
        ProgramId(id) if id else new_program_id(),
        name=None if name is None else name_of(name),
        agent_type=None if agent_type is None else name_of(agent_type),
        parent=parent,
        call_id=call_id,
        advice=advice,
        heartbeat=heartbeat,
    )


def _check_id(field: str, value: str | None) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise ArgumentError(f"{field} is {value!r}; expected a string")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"{field} holds lone surrogates, which UTF-8 cannot say") from None
    if not 0 < size <= MAX_ID_BYTES:
        raise ArgumentError(f"{field} has {size} bytes; expected 1 to {MAX_ID_BYTES}")
