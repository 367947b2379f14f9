"""Turns the runs that LangChain's callbacks report into programs, nodes and tool calls.

This module imports no framework: names, ids and metadata come in, programs and tool calls come out. A run is
a *chain* or a *tool*. LLM runs are left out, since the patched client reports the requests.

Which run is a program:

- A graph (LangGraph, ``create_agent``) outside of any program is a program.
- A graph started in a tool call is a child of the call's program.
- A graph directly under ``with sojourn.program()`` *is* that program, if no other graph runs in the program.
  A second graph that runs at the same time, and each graph of a ``batch()``, is a child of the program.
- A chain at the top that has a name (a function, a class, ``run_name``) is a program, also inside a nameless
  ``with_fallbacks()`` or ``map()``. A composition without a name (``prompt | model``) is not a program. Its
  requests belong to the program around it, or else to the process's own program.

Callbacks may come from several threads. There is no lock, since the tree is changed only by single
operations of dicts, which are atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sojourn.aeg import START, Aeg
from sojourn.errors import status_of
from sojourn.ids import ProgramId
from sojourn.program import (
    CallInProgress,
    ExecutionContext,
    Program,
    ResolvedContext,
    live_context,
    new_tuple,
    opened_program,
    process_programs,
)
from sojourn.tools import ToolCall
from sojourn.valid_ids_and_names import SHORT, agent_type_of, call_id_of, name_of, new_program_id

from sojourn_integrations.program_cache import ProgramCache

from .thread_program_ids import thread_program_id

HUMAN = "human"
"""Name and class of the tool call that stands for the time in which a program waits for a person."""
MAX_ROOTS = 10_000
"""Maximum number of open top-level runs. Beyond it the oldest run is dropped, since it may never end."""


@dataclass(slots=True, eq=False)
class GraphStart:
    """A graph that is about to run. The next LangChain run that begins in this context is the graph's run."""

    graph: object
    agent_type: str | None
    aeg: Callable[[], Aeg | None]
    max_steps: Callable[[], int | None]
    """Function that returns the run's limit of turns, if any."""
    saver: object | None
    """The graph's own checkpointer. If it is ``None``, the checkpointer of the outer graph is used."""
    run: RunNode | None = None
    """``None`` until the run begins."""


starting_graph: ContextVar[GraphStart | None] = ContextVar("sojourn_langgraph_start", default=None)
batch_context: ContextVar[tuple[Hashable] | None] = ContextVar("sojourn_langgraph_batch", default=None)
"""Inside a ``batch()`` of graphs: a tuple with one element, the id of the run around the batch. That element
is ``None`` if there is no such run. Outside of a batch the variable is ``None``."""


class RunNode:
    """A node of the ``RunTree``: a LangChain run that has not ended."""

    __slots__ = (
        "adopted", "call", "children", "graph", "id", "interrupts", "name", "node", "ns", "outer_program",
        "owns", "parent", "parent_id", "prefix", "program", "resumable", "saver", "tool",
    )  # fmt: skip

    def __init__(self, id: Hashable, parent_id: Hashable | None, parent: RunNode | None) -> None:
        self.id = id
        self.parent_id = parent_id
        self.parent = parent
        self.name: str | None = None
        self.children: dict[Hashable, RunNode] = {}
        self.program: Program | None = parent.program if parent else None
        self.outer_program: Program | None = parent.outer_program if parent else None
        """The program in the SDK's context variable when the run began. If the variable later has a program
        other than ``outer_program`` and ``program``, code opened that program inside the run."""
        self.owns = False
        """True if the run has a program of its own. The program then ends with the run."""
        self.adopted = False
        """True if the run has no program of its own and is reported as the program that the user opened
        around it."""
        self.graph = False
        self.call: ToolCall | None = None
        """The tool call that this run is reported as; ``None`` for a chain."""
        self.tool: CallInProgress | None = parent.tool if parent else None
        """The innermost tool call around this run, within its program."""
        self.ns: str = parent.ns if parent else ""
        self.prefix: str = parent.prefix if parent else ""
        """Checkpoint namespace of the run with which the program began. Node names leave this prefix out."""
        self.node: str | None = parent.node if parent else None
        self.saver: object | None = parent.saver if parent else None
        self.resumable = False
        """True if the program's id comes from the LangGraph thread (``thread_id``). A later run of the thread
        can then continue the program."""
        self.interrupts: tuple[Any, ...] | None = None
        """Interrupts at which the graph stopped. Empty after a stop at a breakpoint; ``None`` without a
        stop."""


class RunTree:
    """All open runs of this process."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, RunNode] = {}
        self.get = self._runs.get
        """Returns the open run with an id; ``None`` if there is none."""
        self._roots: dict[Hashable, RunNode] = {}
        self._adopted_runs: dict[int, RunNode] = {}
        """``id()`` of a program that the user opened → the graph run that is reported as this program."""
        self._open_ids: dict[str, RunNode] = {}
        self.waiting = ProgramCache(status="cancelled", ends_at_exit=False)
        """The programs that wait for a person, by id. A wait is reported as a tool call, so that the server
        learns how long people take. It may last for days, so a waiting program sends no heartbeats, and the
        server ends its lease. The program's next request continues the program."""

    def __len__(self) -> int:
        return len(self._runs)

    def resolve(self, id: Hashable) -> ResolvedContext | None:
        """Return the program, node and tool call of code in this run. Returns ``None`` if the run has no
        program, or if code opened another program inside the run."""
        run = self._runs.get(id)
        if run is None or run.program is None:
            return None
        program = live_context().program
        if program is not None and program is not run.outer_program and program is not run.program:
            return None
        return new_tuple(ResolvedContext, (run.program, run.node, run.tool))

    # ---- chains

    def chain_started(
        self,
        id: Hashable,
        parent_id: Hashable | None,
        *,
        name: str | None,
        kind: str | None,
        metadata: Mapping[str, Any],
    ) -> None:
        """Record the start of a chain. ``kind`` and ``metadata`` are LangChain's run type and metadata."""
        if id in self._runs:
            return  # two handlers report the same run
        here = _context_here()
        run = self._enter(id, parent_id, here)
        run.name, parent = name, run.parent
        ns = metadata.get("langgraph_checkpoint_ns")
        is_node = bool(ns) and "langgraph_node" in metadata and parent is not None and ns != parent.ns
        start = starting_graph.get()
        if start is not None and start.run is None:
            start.run = run
            run.ns = ns or run.ns if parent is not None else ""
            self._graph_started(run, start, metadata, here)
        elif is_node and parent is not None and not parent.graph:
            # The start of the graph was not announced, since the user added the handler by hand.
            self._graph_started(parent, None, metadata, here)
            run.program, run.tool, run.prefix = parent.program, parent.tool, parent.prefix
        elif run.program is None and is_named(kind, name) and _is_outermost(run):
            self._open(run, None, None, name, None, metadata)
        if is_node:
            run.ns = str(ns)
            self._node_entered(run)

    def chain_ended(self, id: Hashable, error: BaseException | None) -> None:
        """Record the end of a chain. If the chain has a program of its own or no parent, unfinished runs
        inside it end too. Otherwise the unfinished runs move to the chain's parent. One exception: if the
        chain failed, its unfinished tool calls end."""
        run = self._runs.pop(id, None)
        if run is None:
            return
        status = "ok" if error is None else status_of(error)
        interrupts = None if error is None else interrupts_of(error)
        parent = run.parent
        (self._roots if parent is None else parent.children).pop(id, None)
        if interrupts is not None:
            status = "cancelled"
            if run.owns:
                run.interrupts = interrupts
            elif parent is not None and parent.graph:
                parent.interrupts = (*(parent.interrupts or ()), *interrupts)
        if run.owns or parent is None:
            self._close_children(run)
        else:
            if error is not None:
                for child in list(run.children.values()):
                    if child.call is not None:
                        self._close(child)
            # Work that outlives its step still belongs to the program.
            for child in list(run.children.values()):
                child.parent = parent
                parent.children[child.id] = child
        if run.owns or run.adopted:
            self._release_program(run, status)

    def give_up(self, run: RunNode) -> None:
        """Drop a run that will not report its end. Its program and tool calls end as cancelled."""
        if self._runs.get(run.id) is run:
            self._close(run)

    def _enter(self, id: Hashable, parent_id: Hashable | None, here: ExecutionContext) -> RunNode:
        parent = self._runs.get(parent_id) if parent_id is not None else None
        run = RunNode(id, parent_id, parent)
        outer = here.program
        if outer is not None and outer is not run.outer_program:
            run.outer_program = outer
            if outer is not run.program:
                # The user opened this program inside the parent run, or around all runs.
                run.program, run.node, run.tool, run.prefix = outer, None, None, run.ns
        self._runs[id] = run
        if parent is not None:
            parent.children[id] = run
        else:
            self._roots[id] = run
            while len(self._roots) > MAX_ROOTS:
                # ``list`` copies in one step, so another thread may add runs meanwhile.
                oldest = list(self._roots.values())[:1]
                if not oldest:
                    break
                self._close(oldest[0])
        return run

    def _leave(self, run: RunNode) -> None:
        self._runs.pop(run.id, None)
        if run.parent is not None:
            run.parent.children.pop(run.id, None)
        else:
            self._roots.pop(run.id, None)

    def _close(self, run: RunNode) -> None:
        """Drop a run whose end will not be reported, and all runs inside it. Its tool call ends as cancelled.
        If the run has a program of its own, the program ends as cancelled too."""
        self._leave(run)
        self._close_children(run)
        if run.call is not None:
            run.call.stop("cancelled")
        self._release_program(run, "cancelled")

    def _close_children(self, run: RunNode) -> None:
        for child in list(run.children.values()):
            self._close(child)

    def _release_program(self, run: RunNode, status: str) -> None:
        program = run.program
        if program is None:
            return
        if run.adopted:
            if self._adopted_runs.get(id(program)) is run:
                del self._adopted_runs[id(program)]
        elif run.owns:
            try:
                if run.interrupts is not None and run.resumable:
                    ids = (getattr(each, "id", None) for each in run.interrupts)
                    mark = next((f"{HUMAN}-{id}" for id in ids if id), None)
                    wait = ToolCall(HUMAN, mark, tool_class=HUMAN, program=program).start()
                    program.pause_heartbeats()
                    self.waiting.keep(program.id, program, wait)
                else:
                    program.end("ok" if run.interrupts is not None else status)
            finally:
                self._open_ids.pop(program.id, None)  # from here on another run may begin under this id

    # ---- graphs

    def _graph_started(
        self, run: RunNode, start: GraphStart | None, metadata: Mapping[str, Any], here: ExecutionContext
    ) -> None:
        run.graph = True
        if start is not None and start.saver is not None:
            run.saver = start.saver
        if run.owns:
            return
        agent_type = (start.agent_type if start is not None else None) or run.name
        outer = run.program
        if outer is None:
            self._open(run, None, None, agent_type, start, metadata)
        elif run.tool is not None:
            self._open(run, outer, run.tool.call_id, agent_type, start, metadata)
        elif run.parent is None or run.parent.program is not outer:
            call = here.tool_call
            if call is not None and call.program is outer:
                self._open(run, outer, call.call_id, agent_type, start, metadata)
            elif self._is_batched(run) or id(outer) in self._adopted_runs:
                self._open(run, outer, None, agent_type, start, metadata)
            else:
                run.adopted = True
                self._adopted_runs[id(outer)] = run
                self._set_graph(outer, start)
        elif self._is_batched(run):
            self._open(run, outer, None, agent_type, start, metadata)
        elif outer.aeg is None:
            self._set_graph(outer, start)

    def _open(
        self,
        run: RunNode,
        parent: Program | None,
        call_id: str | None,
        agent_type: str | None,
        start: GraphStart | None,
        metadata: Mapping[str, Any],
    ) -> None:
        known = self._thread_program_id(run, start, metadata)
        run.resumable = known is not None
        program = self.waiting.take(known) if known else None
        if program is None:
            program = Program(
                ProgramId(known) if known else new_program_id(),
                name=program_name(run.name, parent),
                agent_type=program_name(agent_type, parent),
                parent=parent,
                call_id=call_id,
                tenant=parent.tenant if parent is not None else None,
            )
        else:
            program.resume_heartbeats()
        self._set_graph(program, start)
        program.start()
        program.steps_left = start.max_steps() if start is not None else None
        run.program, run.owns = program, True
        run.tool, run.node, run.prefix = None, None, run.ns

    def _thread_program_id(
        self, run: RunNode, start: GraphStart | None, metadata: Mapping[str, Any]
    ) -> str | None:
        """Return the program id that belongs to the run's LangGraph thread. Returns ``None`` if there is no
        thread or no checkpointer, or if another run in progress has that id."""
        thread = metadata.get("thread_id")
        if thread is None or (start is not None and run.saver is None):
            return None
        graph = start.agent_type if start is not None else run.name
        known = thread_program_id(graph or "", run.saver, str(thread), run.ns)
        return known if self._open_ids.setdefault(known, run) is run else None

    @staticmethod
    def _set_graph(program: Program, start: GraphStart | None) -> None:
        if start is not None and (aeg := start.aeg()) is not None:
            program.set_graph(aeg)

    def _is_batched(self, run: RunNode) -> bool:
        return batch_context.get() == (run.parent_id,)

    def _node_entered(self, run: RunNode) -> None:
        run.node = node_path(run.ns, run.prefix)
        program = run.program
        if program is None or run.node is None or run.node.endswith(START):
            return
        known = program.aeg.nodes if program.aeg is not None else ()
        if known and run.node not in known:
            below = run.node + ":"
            if any(node.startswith(below) for node in known):
                return  # a sub-graph, whose own nodes are the steps
        program.enter_node(run.node)

    # ---- tools

    def tool_started(
        self,
        id: Hashable,
        parent_id: Hashable | None,
        *,
        name: str,
        call_id: str | None,
    ) -> None:
        """Record the start of a tool call. If our middleware or the user already reports the call, it is not
        reported again. ``call_id`` is the model's id of the call; if it is ``None``, the run's id is used."""
        if id in self._runs:
            return
        here = _context_here()
        run = self._enter(id, parent_id, here)
        outer = here.tool_call
        if outer is not None and (run.program is None or outer.program is run.program):
            same = outer.tool == name_of(name) if call_id is None else outer.call_id == call_id_of(call_id)
            if same:
                run.tool = outer
                return
        if call_id is None:
            call_id = str(UUID(int=id) if isinstance(id, int) else id)
        call = ToolCall(name, call_id, program=run.program)
        run.call = call.start()
        if run.program is not None:
            run.tool = call

    def tool_ended(self, id: Hashable, status: str) -> None:
        """Record the end of a tool call; ``status`` is one of ``sojourn.tools.STATUSES``."""
        run = self._runs.get(id)
        if run is None:
            return
        self._leave(run)
        self._close_children(run)
        if run.call is not None:
            run.call.stop(status)


def _context_here() -> ExecutionContext:
    """Return the context of the running code, with the program that the user's code opened for the whole
    process if there is no other. Calls no resolvers."""
    here = live_context()
    if process_programs and here.program is None:
        return here._replace(program=opened_program())
    return here


def _is_outermost(run: RunNode) -> bool:
    """Return whether only wrappers without a name are around the chain ``run``."""
    while run.parent is not None and str(run.parent.name).startswith(_WRAPPERS):
        run = run.parent
    return run.parent_id is None


# ---- names and results of runs. Exception classes are recognised by their names, so that neither framework
# is imported.

_INTERNAL_PREFIX = "Runnable"
"""Start of LangChain's default names for compositions, e.g. ``RunnableSequence``."""
_WRAPPERS = ("RunnableWithFallbacks", "RunnableEach")
"""Starts of the names of compositions that run a chain as a whole, not as one of several steps."""
_DEFAULT_GRAPH_NAME = "LangGraph"
"""LangGraph's name for a graph compiled without ``name``. LangChain uses it for an agent without a name."""


def node_path(ns: str, prefix: str = "") -> str | None:
    """Return the name of a node from its checkpoint namespace ``ns``: ``sub:UUID|model:UUID`` gives
    ``sub:model``. ``get_graph(xray=True)`` uses the same names. Leaves out the namespace ``prefix`` of an
    outer graph, and the numbers that LangGraph gives to later sub-graphs of a step. Returns ``None`` if
    ``ns`` names no node."""
    if prefix and ns.startswith(prefix + "|"):
        ns = ns[len(prefix) + 1 :]
    if "|" not in ns:
        name, colon, _ = ns.partition(":")
        if not colon:
            return None
        return name if 0 < len(name) <= SHORT and name.isascii() else name_of(name)
    names = [part.partition(":")[0] for part in ns.split("|") if ":" in part]
    return name_of(":".join(names)) if names else None


def program_name(name: str | None, parent: Program | None) -> str | None:
    """Return ``name`` as a program's name or agent type; ``None`` if ``name`` is ``None``. For a program
    without a parent, LangGraph's default name is replaced by the script's name."""
    if name is None:
        return None
    return agent_type_of(name, _DEFAULT_GRAPH_NAME) if parent is None else name_of(name)


def is_named(kind: str | None, name: str | None) -> bool:
    return kind in (None, "chain") and bool(name) and not str(name).startswith(_INTERNAL_PREFIX)


def result_status(output: Any) -> str:
    """Return the status of a tool call that raised nothing: ``error`` if the result has the status ``error``,
    else ``ok``. For example, ``handle_tool_error`` turns an exception into a message with the status
    ``error``."""
    return "error" if getattr(output, "status", None) == "error" else "ok"


def interrupts_of(error: BaseException | None) -> tuple[Any, ...] | None:
    """Return the interrupts at which a graph stopped, if ``error`` is LangGraph's ``GraphInterrupt``. The
    result is empty for a breakpoint. It is ``None`` for any other error, and if ``error`` is ``None``."""
    if error is None or all(kind.__name__ != "GraphInterrupt" for kind in type(error).__mro__):
        return None
    given = error.args[0] if error.args else ()
    return tuple(given) if isinstance(given, (list, tuple)) else ()
