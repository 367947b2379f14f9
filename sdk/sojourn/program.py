"""The class ``Program``, and the context variable with the current program, step and tool call.

A program is one agent run, from its first LLM request to its last. One context variable holds the program,
step and tool call around the running code, so one ``set`` passes all three to a new thread.

Callbacks of some frameworks run in contexts of their own, where setting the variable has no effect on the
agent. Adapters for these frameworks add a *resolver*: a function that reads program, node and tool call from
the framework's own context.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import ref

from . import runtime
from .aeg import Aeg
from .config import claim
from .errors import status_of
from .ids import ProgramId
from .request_warnings import warn_empty_program
from .sdk_logger import logger
from .user_hints import NO_HINTS, StepContext, UserHints
from .valid_ids_and_names import new_program_id, process_name
from .wire_events import AegReport, ProgramEnd, ProgramStart

if TYPE_CHECKING:
    from .resume_file import ResumeFile
    from .stats import Counters

T = TypeVar("T")

MAX_GRAPHS_REPORTED: Final = 4096
"""Maximum number of graphs that a session remembers as sent. At this limit the session forgets all graphs, so
the next report of each graph is in full again."""


class AsyncBlock(Generic[T]):
    """Base class of ``with`` blocks that never wait. So ``async with`` does the same."""

    __slots__ = ()

    def __enter__(self) -> T:
        raise NotImplementedError

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> T:
        return self.__enter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.__exit__(kind, error, trace)


class Program:
    """One agent run: its identity and hints, its graph, and the tool calls and requests in progress.

    Some programs never report their end (``os._exit``, SIGKILL, a generator that is never finished). The
    server ends such a program after a time without events and requests of the program.
    """

    __slots__ = (
        "__weakref__", "_ends", "_has_own_graph", "_outside_before", "_pid", "_resume",
        "_state", "aeg", "agent_type", "call_id", "depth", "ends_as", "has_ended", "heartbeat", "hints", "id",
        "implicit", "is_used", "name", "node", "of_process", "open_requests", "outer_context", "parent_id",
        "root_id", "running_tools", "steps_left", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        id: ProgramId,
        *,
        name: str | None = None,
        agent_type: str | None = None,
        parent: Program | str | None = None,
        call_id: str | None = None,
        hints: UserHints = NO_HINTS,
        heartbeat: bool = True,
        implicit: bool = False,
        of_process: bool = False,
        ends: bool = True,
        tenant: str | None = None,
        aeg: Aeg | None = None,
        resume: ResumeFile | None = None,
        max_steps: float | None = None,
    ) -> None:
        """Create the program without reporting it; ``start`` reports it.

        ``parent``: the parent program or its id. ``heartbeat``: send heartbeats. ``of_process``: the program
        stands for the whole process. ``implicit``: the program may hold several runs. ``ends=False``: another
        process reports the end. ``resume``: the file that the id comes from.
        """
        self.id = id
        self.name = name
        self.agent_type = agent_type
        self.parent_id: str | None = parent.id if isinstance(parent, Program) else parent
        self.root_id: str | None = (parent.root_id or parent.id) if isinstance(parent, Program) else parent
        """Id of the outermost ancestor; ``None`` if this program has no parent."""
        self.depth: int = parent.depth + 1 if isinstance(parent, Program) else int(parent is not None)
        self.outer_context = NO_CONTEXT
        """The context around the ``with`` block that runs the program."""
        self.call_id = call_id
        """Id of the parent's tool call in which this program runs; ``None`` if there is none."""
        self.hints = hints
        self.heartbeat = heartbeat
        self.implicit = implicit
        """True for the program of a whole process in which the user opened no program. The runs in such a
        process cannot be told apart. So a sojourn server treats the requests as requests of no program, and
        gets no events of this program. Some other servers get these events
        (``EventTransport.takes_implicit``)."""
        self.of_process = of_process
        self.tenant = tenant
        """Tenant that the program runs for; ``program()`` takes the parent's tenant by default."""
        self.aeg = aeg
        """The program's graph, if known."""
        self._has_own_graph = aeg is not None
        """Whether the user gave the graph."""
        self.steps_left = None if max_steps is None else float(max_steps)
        """Maximum number of turns that may still begin; ``None`` without a limit. Threads may make it drift,
        which does no harm to an estimate."""
        self.node: str | None = None
        """Graph node that a framework's adapter last reported; the node of a ``step()`` takes precedence."""
        # Sets, not counts: adding and discarding are atomic, so that threads cannot make them drift.
        self.running_tools: set[str] = set()
        """Ids of the tool calls in progress."""
        self.open_requests: set[object] = set()
        """LLM requests in progress, as far as patched clients report them."""
        self.ends_as: str | None = None
        """Status with which the program ends as soon as it has no request in progress. ``None`` if
        ``end_after_requests`` was not called."""
        self.has_ended = False
        """Whether the program has ended. An attribute, since each turn reads it."""
        self.is_used = False
        """Whether a request or a child of this program has begun in this process."""
        if isinstance(parent, Program):
            parent.is_used = True
        self._state = "new"
        self._outside_before = 0
        """Value of the session's ``outside_requests`` when the program started in that session."""
        self._pid = os.getpid()
        self._ends = ends
        self._resume = resume

    @property
    def is_open(self) -> bool:
        """Whether the program has started and not ended."""
        return self._state == "open"

    def start(self) -> Program:
        """Report the start, begin heartbeats, and return the program. ``program()`` calls this itself,
        adapters call it directly. Never raises."""
        if self._state == "new":
            self._state = "open"
            session = runtime.session()
            try:
                self.join(session)
                runtime.notify_listeners("program_started", self)
            except Exception:
                session.counters.add("internal_error")
        return self

    def join(self, session: runtime.Session) -> None:
        """Report the start to ``session`` and begin heartbeats there. Called again for each later session."""
        self._outside_before = session.outside_requests
        session.programs[self] = None
        if not self.of_process:
            session.has_programs = True
            if session.counts_as_one_run:
                session.leave_own_program()
        if self.heartbeat:
            # Before the event, since the event wakes the sender, which then asks when the first beat is due.
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

    def set_graph(self, aeg: Aeg) -> None:
        """Set the program's graph and report it. Does nothing if the program already has this graph, or one
        that the user gave. For adapters, which read the graph from the framework. Never raises."""
        if self._has_own_graph or (self.aeg is not None and self.aeg.hash == aeg.hash):
            return
        self.aeg = aeg
        self.report_graph()

    def enter_node(self, node: str) -> None:
        """Set the current node of the graph. For adapters. Never raises."""
        self.node = node
        runtime.notify_listeners("node_entered", self, node)

    def count_turn(self) -> float | None:
        """Count a turn that begins. Returns the maximum number of turns after it; ``None`` without a
        limit."""
        if self.steps_left is not None:
            self.steps_left = max(0.0, self.steps_left - 1.0)
        return self.steps_left

    def report_graph(self) -> None:
        """Report the graph of an open program: in full, or only its hash if the graph was sent
        before. Never raises."""
        session = runtime.session()
        try:
            if self._state == "open":
                self._report_graph(session)
        except Exception:
            session.counters.add("internal_error")

    def _report_graph(self, session: runtime.Session) -> None:
        aeg = self.aeg
        if aeg is None:
            return
        reported = session.graphs_reported
        lost = session.counters["dropped_send"]
        # A server that missed a batch may have restarted since.
        if len(reported) >= MAX_GRAPHS_REPORTED or lost != session.graphs_lost:
            reported.clear()
            session.graphs_lost = lost
        first = aeg.hash not in reported
        reported.add(aeg.hash)
        session.emit(
            self,
            AegReport,
            graph_hash=aeg.hash,
            agent_type=self.agent_type,
            graph=aeg.wire() if first else None,
        )

    def pause_heartbeats(self) -> None:
        """Stop the heartbeats, so that the lease can end while the program waits for a person. For
        adapters."""
        runtime.session().heartbeats.closed(self)

    def resume_heartbeats(self) -> None:
        """Start the heartbeats again after ``pause_heartbeats``. For adapters. Takes the event sender's lock,
        so the caller must hold no lock that a finalizer takes."""
        if self.heartbeat:
            session = runtime.session()
            session.heartbeats.opened(self, runtime.clock())
            if session.event_sender is not None:
                session.event_sender.heartbeats_changed()

    def end(self, status: str = "ok") -> None:
        """Report the end of the program: no request follows. ``status``: ``ok``, ``error`` or ``cancelled``.
        Repeating it is harmless. Never raises."""
        if self._state != "open":
            return
        self._state = "ended"
        # Requests that name the program later must not promise heartbeats, since nothing sends them.
        self.has_ended, self.heartbeat = True, False
        while (outer := self.outer_context.program) is not None and outer.has_ended:
            self.outer_context = outer.outer_context  # so that a long chain of programs is not kept
        session = runtime.session()
        try:
            session.heartbeats.closed(self)
            if self in process_programs:
                process_programs.remove(self)
            # A forked copy that leaves the block does not end its parent's run.
            if self._ends and self._pid == os.getpid():
                session.emit(self, ProgramEnd, status=status)
                outside = session.outside_requests - self._outside_before
                # Garbage collection may cancel a program, perhaps inside a log handler that holds a lock.
                if outside > 0 and not self.is_used and status != "cancelled":
                    warn_empty_program(session, self.name or self.id, outside)
                runtime.notify_listeners("program_ended", self, status)
                if self._resume is not None:
                    self._resume.remove() if status == "ok" else self._resume.close()
        except Exception:
            session.counters.add("internal_error")

    def end_after_requests(self, status: str) -> None:
        """End the program with ``status`` as soon as it has no request in progress. An earlier end would
        close the session of the running requests at some servers. Never raises."""
        self.ends_as = status
        self.end_if_deferred()

    def end_if_deferred(self) -> None:
        """End the program if ``end_after_requests`` was called and no request is in progress. Never
        raises."""
        if self.ends_as is not None and not self.open_requests:
            self.end(self.ends_as)

    def here(self) -> EnteredProgram:
        """Return a ``with`` block in which this is the current program: ``with p.here(): ...``. The block
        works in any thread, task or process. It neither starts nor ends the program. Use it in workers that
        take jobs of several programs from a queue."""
        return EnteredProgram(self)

    def __reduce__(self) -> Any:
        """Return the parts to pickle. The unpickled copy is open, sends no heartbeats and reports no end."""
        names = ("name", "agent_type", "parent_id", "root_id", "depth", "call_id", "hints", "tenant", "node")
        return _remote_program, (self.id, {name: getattr(self, name) for name in (*names, "steps_left")})

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<Program{label} {self.id} {self._state}>"


def _remote_program(id: ProgramId, fields: dict[str, Any]) -> Program:
    found = Program(id, heartbeat=False, ends=False)
    for name, value in fields.items():
        setattr(found, name, value)
    found._state = "open"
    return found


# ---- the code's context


class CallInProgress(Protocol):
    """A running tool call, such as ``sojourn.ToolCall``."""

    @property
    def call_id(self) -> str: ...

    @property
    def tool(self) -> str: ...

    @property
    def program(self) -> Program | None: ...


class ExecutionContext(NamedTuple):
    """Program, step and tool call around the running code."""

    program: Program | None = None
    step: StepContext | None = None
    tool_call: CallInProgress | None = None


NO_CONTEXT = ExecutionContext()
new_tuple = tuple.__new__
"""Makes a named tuple: ``new_tuple(ExecutionContext, (p, s, t))``. Faster than the constructor."""
process_programs: list[Program] = []
"""Programs opened for the whole process by ``program().open()``. The last one is the program of all code that
has no other program."""
current_context: ContextVar[ExecutionContext] = ContextVar("sojourn_place", default=NO_CONTEXT)
_entered: ContextVar[tuple[list[Any], ...]] = ContextVar("sojourn_entered", default=())
"""One list for each ``Program.here()`` and ``step()`` block around the code. It holds a weak reference to the
block, and the token that restores the context. After the block is left, its list is empty. Threads and tasks
may be in the same block at the same time."""
MAX_ENTERED: Final = 1000
"""Maximum number of blocks in ``_entered``. Beyond it the outermost block is forgotten."""


class ResolvedContext(NamedTuple):
    """What a resolver returns: program, graph node and tool call of the running code, if known."""

    program: Program | None = None
    node: str | None = None
    tool_call: CallInProgress | None = None
    """The tool call in which the code runs. A program opened by this code gets the call's id as
    ``call_id``."""


Resolver = Callable[[], "ResolvedContext | None"]
resolvers: list[Resolver] = []
"""Registered resolvers; only ``add_resolver`` and ``remove_resolver`` change the list."""


def add_resolver(resolver: Resolver) -> None:
    """Register ``resolver`` to be called at each look-up of the context. The resolver must be quick and free
    of side effects. Adding it again is harmless."""
    if resolver not in resolvers:
        resolvers.append(resolver)


def remove_resolver(resolver: Resolver) -> None:
    """Remove ``resolver``. Does nothing if it is not registered."""
    # Two threads may have added it at the same time. There is no lock, since a fork could find it held.
    while resolver in resolvers:
        with suppress(ValueError):
            resolvers.remove(resolver)


def live_context() -> ExecutionContext:
    """Return the context of the running code.

    A task may outlive its program. If the context's program has ended, return the context around that program
    instead. Exception: inside ``Program.here()`` an ended program stays the current program, since the code
    names it.
    """
    here = current_context.get()
    while (program := here.program) is not None and program.has_ended:
        if any(getattr(_block(entry), "_program", None) is program for entry in _entered.get()):
            break
        here = program.outer_context
    return here


def find_context(counters: Counters, *, of_process: bool = True) -> tuple[ExecutionContext, str | None]:
    """Return the innermost program, step and tool call around the running code, and the graph node that a
    framework reports for them, if any. ``counters`` counts resolvers that raise. ``of_process=False`` ignores
    programs opened for the whole process."""
    here = live_context()
    node: str | None = None
    for resolver in resolvers:
        try:
            resolved = resolver()
        except Exception:
            counters.add("resolver_error")
            continue
        if resolved is None:
            continue
        program = resolved.program
        if program is not None and program.has_ended and program is not here.program:
            continue
        if program is not None and (here.program is None or program.depth > here.program.depth):
            call = here.tool_call
            step = here.step if here.program is None else None
            call = call if call is not None and call.program is program else None
            here = new_tuple(ExecutionContext, (program, step, call))
        if resolved.tool_call is not None and here.tool_call is None and program is here.program:
            here = here._replace(tool_call=resolved.tool_call)
        if program is None or program is here.program:
            node = resolved.node or node
    if of_process and process_programs and here.program is None:
        here = here._replace(program=opened_program())
    return here, node


def opened_program() -> Program | None:
    """Return the open program of the whole process; if there are several, the one that was opened last."""
    return process_programs[-1] if process_programs else None


def reset_context(token: Token[ExecutionContext]) -> None:
    """Restore the context variable with ``token``, which its ``set`` returned. This fails if Python finalises
    a generator in another context. The failure is counted and not raised."""
    try:
        current_context.reset(token)
    except ValueError:
        runtime.session().counters.add("context_reset_failed")


def _block(entry: list[Any]) -> object:
    """Return the block of an entry of ``_entered``; ``None`` if the block was left or is gone."""
    found = entry[:1]  # a copy, since another thread may clear the entry
    return found[0]() if found else None


def enter_block(block: object, inside: ExecutionContext) -> None:
    """Make ``inside`` the context until ``leave_block(block)``. A block may be entered again before it is
    left, also by other threads and tasks."""
    entry = [ref(block), current_context.set(inside)]
    # If a generator that began here ends in another context, its entry stays, but its block is gone.
    around = [entry for entry in _entered.get() if _block(entry) is not None]
    _entered.set((*around[1 - MAX_ENTERED :], entry))


def leave_block(block: object) -> None:
    """Restore the context that this thread or task had before it last entered ``block``. Never raises."""
    for entry in reversed(_entered.get()):
        if _block(entry) is block:
            token = entry[1]
            entry.clear()  # tasks started in the block may keep the entry for long
            _entered.set(tuple(filter(None, _entered.get())))
            return reset_context(token)
    runtime.session().counters.add("context_reset_failed")  # a generator that another context closes


class EnteredProgram:
    """The ``with`` block that ``Program.here()`` returns: inside it, the program is the current one."""

    __slots__ = ("__weakref__", "_program")

    def __init__(self, program: Program) -> None:
        self._program = program

    def __enter__(self) -> Program:
        enter_block(self, ExecutionContext(self._program))
        return self._program

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_block(self)


# ---- the process's own program


def process_program(session: runtime.Session, *, asks: bool = False) -> Program:
    """Return the process's own program, made at the first call.

    Its id is the value of ``SOJOURN_PROGRAM_ID`` if that variable is set, else a fresh id. The program is
    implicit (``Program.implicit``) if the variable is not set and the process does not count as one run
    (``session.counts_as_one_run``). ``asks``: True for a new LLM request. If ``asks`` is True and another
    request still waits for its answer, the process stops counting as one run.

    Child processes inherit ``SOJOURN_PROGRAM_ID``, so several processes may share one program. Only the first
    process that uses the id reports the program's end.
    """
    found = session.program
    if isinstance(found, Program):
        if not (asks and session.counts_as_one_run and _awaits_answer(found)):
            return found
        stop_counting_as_one_run(session)
    with session.exclusive():  # so that the start event precedes the program's other events
        found = session.program
        if isinstance(found, Program):
            return found
        given = session.config.program_id if session.config else None
        own = session.counts_as_one_run
        fresh = Program(
            ProgramId(given) if given else new_program_id(),
            name=process_name() if own else None,
            heartbeat=given is not None or own,
            implicit=given is None and not own,
            of_process=True,
            ends=given is None or claim(given),
        )
        session.program = fresh.start()
    return fresh


def _awaits_answer(program: Program) -> bool:
    """Return whether a request of ``program`` still waits for the first byte of its answer."""
    return any(getattr(request, "awaits_answer", False) for request in tuple(program.open_requests))


def stop_counting_as_one_run(session: runtime.Session) -> None:
    """Stop counting the process as one run, with a warning the first time."""
    if session.leave_own_program():
        logger.warning(
            "requests of this process overlap, so the process no longer counts as one agent run; "
            "open a program for each run, with sojourn.program()"
        )


def _end_process_programs() -> None:
    while process_programs:
        process_programs.pop().end("cancelled")
    own = runtime.session().program
    if isinstance(own, Program):
        own.end(status_of(_uncaught_error()))


def _uncaught_error() -> BaseException | None:
    """Return the exception that ends the process; ``None`` if the process ends by ``sys.exit`` or without an
    exception. Always ``None`` in an interactive interpreter, where ``sys.last_value`` may come from any
    earlier line."""
    if hasattr(sys, "ps1"):
        return None
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


runtime.before_exit.append(_end_process_programs)
