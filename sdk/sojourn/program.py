"""Programs: one agent run each, from its first request to its last.

    with sojourn.program("fix-issue") as p: ...     # also: async with, @sojourn.program

A program opened inside another is its child. Whoever leaves the block without
ending the program properly (``os._exit``, SIGKILL, a generator never finished)
leaves it to the server's leases.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, overload

from . import runtime
from .aeg import Aeg
from .config import claim
from .context import find, opened
from .errors import ArgumentError
from .events import AegReport, ProgramEnd, ProgramStart
from .ids import MAX_ID_BYTES, ProgramId
from .naming import name_of, new_program_id
from .observe import tell
from .scope import Inside, ProgramScope
from .scope import status_of as status_of
from .step import NO_ADVICE, Advice, advice

if TYPE_CHECKING:
    from .learning.trail import Trail
    from .resume import ResumeFile

logger = logging.getLogger("sojourn")

MAX_GRAPHS_TOLD: Final = 4096
"""Hashes remembered; after so many different graphs they are spelt out once more."""

P = ParamSpec("P")
R = TypeVar("R")


class _Inherit:
    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = _Inherit()
"""The parent is the program around the running code, if any."""


class Program:
    """One agent run. Its fields do not change, but for ``node`` and the counts of what is under way."""

    __slots__ = (
        "__weakref__", "_ends", "_pid", "_resume", "_state", "advice", "aeg", "agent_type", "call_id",
        "depth", "heartbeat", "id", "implicit", "name", "node", "open_requests", "parent_id", "root_id",
        "running_tools", "tenant", "trail",
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
        tenant: str | None = None,
        aeg: Aeg | None = None,
        resume: ResumeFile | None = None,
    ) -> None:
        """``ends=False``: another process reports the end. ``resume``: the file that held the id."""
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
        self.tenant = tenant
        """On whose behalf it runs; a sub-program's is its parent's unless given."""
        self.aeg = aeg
        """The graph it follows, where one is known."""
        self.node: str | None = None
        """Current node as an adapter last saw it; a ``step()`` comes first."""
        # Sets, not counts: adding and discarding are atomic, so that threads cannot make them drift.
        self.running_tools: set[str] = set()
        """Ids of the tool calls under way."""
        self.open_requests: set[object] = set()
        """LLM requests under way, as far as a patched client tells."""
        self.trail: Trail | None = None
        """What the ``Advisor`` has heard of it; nobody else's business."""
        self._state = "new"
        self._pid = os.getpid()
        self._ends = ends
        self._resume = resume

    @property
    def is_open(self) -> bool:
        """Started and not ended."""
        return self._state == "open"

    @property
    def is_whole(self) -> bool:
        """All of it happens in this process: no earlier one began it, and no other one ends it."""
        return self._ends and (self._resume is None or self._resume.is_new)

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
                    tenant=self.tenant,
                )
                self._report_graph(session)
                tell("program_started", self)
            except Exception:
                session.counters.add("internal_error")
        return self

    def follows(self, aeg: Aeg) -> None:
        """The graph became known, or better known, after the start. For adapters. Never raises."""
        if self.aeg is not None and self.aeg.hash == aeg.hash:
            return
        self.aeg = aeg
        self.report_graph()

    def enter_node(self, node: str) -> None:
        """An adapter saw this node of the graph begin. Never raises."""
        self.node = node
        tell("node_entered", self, node)

    def report_graph(self) -> None:
        """Tell the graph once more, since the server does not know it. Never raises."""
        session = runtime.session()
        try:
            if self._state == "open":
                self._report_graph(session)
        except Exception:
            session.counters.add("internal_error")

    def _report_graph(self, session: runtime.Session) -> None:
        # What was seen of other programs of this kind corrects what is declared.
        aeg = self.aeg if session.advisor is None else session.advisor.graph(self)
        if aeg is None:
            return
        told = session.graphs_told
        lost = session.counters["dropped_send"]
        # Whoever did not take a batch may have been restarted since.
        if len(told) >= MAX_GRAPHS_TOLD or lost != session.graphs_lost:
            told.clear()
            session.graphs_lost = lost
        first = aeg.hash not in told
        told.add(aeg.hash)
        session.emit(
            self,
            AegReport,
            graph_hash=aeg.hash,
            agent_type=self.agent_type,
            graph=aeg.wire() if first else None,
        )

    def end(self, status: str = "ok") -> None:
        """Report the end: no request follows. Repeating it is harmless. Never raises."""
        if self._state != "open":
            return
        self._state = "ended"
        session = runtime.session()
        try:
            session.heartbeats.closed(self)
            if self in opened:
                opened.remove(self)
            # A forked copy leaving the block does not end its parent's run.
            if self._ends and self._pid == os.getpid():
                session.emit(self, ProgramEnd, status=status)
                tell("program_ended", self, status)
                if self._resume is not None:
                    self._resume.remove() if status == "ok" else self._resume.close()
        except Exception:
            session.counters.add("internal_error")

    def here(self) -> Inside:
        """``with p.here(): ...``: this code belongs to the program, in whatever thread, task or process it
        runs; the block starts and ends nothing. For workers that take jobs from a queue."""
        return Inside(self)

    def __reduce__(self) -> Any:
        """To another process it goes as one that is under way: it neither beats nor reports the end."""
        names = ("name", "agent_type", "parent_id", "root_id", "depth", "call_id", "advice", "tenant", "node")
        return _from_elsewhere, (self.id, {name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<Program{label} {self.id} {self._state}>"


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
    tenant: str | None = None,
    aeg: Aeg | None = None,
    resume: str | os.PathLike[str] | None = None,
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
    tenant: str | None = None,
    aeg: Aeg | None = None,
    resume: str | os.PathLike[str] | None = None,
    heartbeat: bool = True,
) -> Any:
    """One agent run, as ``with``, ``async with`` or decorator (bare or called; sync, async, generators).

    ``id`` resumes a known program, else a fresh one is made up. ``parent`` is the program around the code
    unless given; ``None`` starts at the top. ``deadline_s`` counts from the start, in seconds; the hints
    hold for every request of the program unless a ``step()`` says otherwise. ``tenant`` says on whose behalf
    it runs, ``aeg`` which graph it follows. ``resume`` names a file that holds the id until the run ends
    cleanly, so that a restarted client goes on with the same program (see ``sojourn.resume``).
    ``heartbeat=False`` promises none. Raises ``ArgumentError`` for an id the wire does not accept, a hint
    that makes no sense or a resume file that cannot be used.

    Where no block can span the run, as in a notebook: ``p = sojourn.program("x").open()`` and ``p.end()``.

    Inside a *generator* a ``with`` block also covers its consumer between two items, as with any context
    variable; the decorator does not.
    """
    if callable(name):
        label = getattr(name, "__name__", None)
        plain_one = (INHERIT, None, None, NO_ADVICE, True, None, None, None)
        return ProgramScope(lambda: _program(label, *plain_one))(name)
    _check_id("id", id)
    if isinstance(parent, str):
        _check_id("parent", parent)
    elif parent is not None and not isinstance(parent, (Program, _Inherit)):
        raise ArgumentError(f"parent is {parent!r}; expected a Program, an id or None")
    if tenant is not None and not isinstance(tenant, str):
        raise ArgumentError(f"tenant is {tenant!r}; expected a string")
    if aeg is not None and not isinstance(aeg, Aeg):
        raise ArgumentError(f"aeg is {aeg!r}; expected a sojourn.Aeg")
    path = None if resume is None else os.fspath(resume)
    if path is not None:
        if id is not None:
            raise ArgumentError("both id and resume are given; expected one, since the file holds the id")
        if not isinstance(path, str) or not path:
            raise ArgumentError(f"resume is {resume!r}; expected the path of a file, as a string")
        from .resume import check

        check(path)  # here, where a mistake may still raise
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
        hinted = NO_ADVICE if plain else advice(**hints)
        return _program(name, parent, id, agent_type, hinted, heartbeat, tenant, aeg, path)

    named = parent.id if isinstance(parent, Program) else parent
    return ProgramScope(make, named if isinstance(named, str) else None)


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
    tenant: str | None,
    aeg: Aeg | None,
    resume: str | None,
) -> Program:
    file = None if resume is None else _resumed(resume)
    call_id: str | None = None
    if isinstance(parent, _Inherit):
        here = find(runtime.session().counters)[0]
        parent = here.program
        if here.tool_call is not None and here.tool_call.program is parent:
            call_id = here.tool_call.call_id
    return Program(
        file.id if file is not None else ProgramId(id) if id else new_program_id(),
        name=None if name is None else name_of(name),
        agent_type=None if agent_type is None else name_of(agent_type),
        parent=parent,
        call_id=call_id,
        advice=advice,
        heartbeat=heartbeat,
        tenant=name_of(tenant) if tenant else parent.tenant if isinstance(parent, Program) else None,
        aeg=aeg,
        resume=file,
    )


def _resumed(path: str) -> ResumeFile | None:
    """The file, or ``None`` where the run has to do without. The agent is about to run: nothing raises."""
    session = runtime.session()
    if session.disabled:
        return None
    from .resume import ResumeBusy, ResumeFile

    try:
        return ResumeFile(path)
    except ResumeBusy:
        session.counters.add("resume_busy")
        logger.warning("another run holds %r; this one gets an id of its own", path)
    except ArgumentError as error:
        session.counters.add("resume_failed")
        logger.warning("%s; this run gets an id of its own", error)
    return None


def _from_elsewhere(id: ProgramId, fields: dict[str, Any]) -> Program:
    found = Program(id, heartbeat=False, ends=False)
    for name, value in fields.items():
        setattr(found, name, value)
    found._state = "open"
    return found


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
