"""Finds the program and turn around the running code of an AutoGen team or agent.

AutoGen 0.7 hands messages to agents in tasks of a runtime. A runtime that the team makes starts inside the
run, so its tasks have the run's context. A runtime that the user passes in has tasks without this context.
In these tasks, AutoGen's ``MessageHandlerContext`` names the agent that handles the message.

    team.run ──▶ TeamRun (one program) ──▶ turn of "alice" ──▶ tool call ──▶ child TeamRun
                      │
                      └─▶ a team inside the team: the same program, its agents at "inner/alice"

This module neither calls nor imports AutoGen. The callers in the package guard against exceptions.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, NamedTuple

import sojourn
from sojourn.aeg import Aeg
from sojourn.errors import status_of
from sojourn.program import (
    ExecutionContext,
    Program,
    ResolvedContext,
    add_resolver,
    current_context,
    find_context,
    live_context,
    reset_context,
    resolvers,
)
from sojourn.runtime import session
from sojourn.tools import ToolCall
from sojourn.user_hints import StepContext, step_limit
from sojourn.valid_ids_and_names import agent_type_of

from sojourn_integrations.autogen.team_graph import graph_of, node_name
from sojourn_integrations.safe_scope import count_error, guarded


class TeamRun:
    """One outermost run of a team or an agent."""

    __slots__ = ("calls", "owned", "program")

    def __init__(self, program: Program, *, owned: bool) -> None:
        self.program = program
        self.owned = owned
        """True if this run opened the program. The program then ends with the run."""
        self.calls: set[ToolCall] = set()
        """Tool calls in progress."""

    def close(self, status: str) -> None:
        """End the run. If the run opened its program, end the program too. Tool calls in progress are
        reported as cancelled: after a cancellation AutoGen lets the tools run on, but does not use their
        results."""
        for call in tuple(self.calls):
            call.stop("cancelled")
        self.calls.clear()
        if self.owned:
            self.program.end(status)


class RunFrame(NamedTuple):
    """Position of the running code within a run: the team, and the agent whose turn it is."""

    run: TeamRun
    prefix: str = ""
    """Prefix of agent names in the graph: the path of their team."""
    node: str | None = None
    """The agent whose turn it is; ``None`` between turns of a team."""
    team: int | None = None
    """``id()`` of the running team; ``None`` in an agent's turn."""


_frame: ContextVar[RunFrame | None] = ContextVar("sojourn_autogen_frame", default=None)
_teams: dict[str, RunFrame] = {}
"""AutoGen's key for the messages of a running team → the team's frame."""


def resolve() -> ResolvedContext | None:
    """Return the program of the team whose message AutoGen handles in this task. Returns ``None`` if there is
    no such team, or if the task already has the run's own context.

    The first team that starts registers this function with the SDK, which then calls it to find the program
    of a request. The result has no node, since ``begin_turn`` reports the nodes."""
    handled = _handled_frame()
    if handled is None:
        return None
    frame, program = _frame.get(), live_context().program
    if frame is not None and frame.run is handled.run and program is not None:
        return None  # this task has the run's own context, with the programs that user code opened inside
    return ResolvedContext(handled.run.program)


def restore_resolver() -> None:
    """Register ``resolve`` again after ``unpatch`` if a team runs."""
    if _teams:
        add_resolver(resolve)


def _handled_frame() -> RunFrame | None:
    """Return the frame of the team whose message AutoGen handles in this task; ``None`` if there is none."""
    if not _teams:
        return None
    core = sys.modules.get("autogen_core")
    if core is None:
        return None
    try:
        agent = core.MessageHandlerContext.agent_id()
    except RuntimeError:  # no message is being handled here
        return None
    return _teams.get(agent.key)


def _enclosing_context() -> tuple[ExecutionContext, RunFrame | None, bool]:
    """Return three values:

    - the current context;
    - the frame of the run around the code; ``None`` outside of a run, and inside a tool call;
    - whether the code is inside a tool call.
    """
    here = live_context()
    if here.program is None or resolvers:
        here, _ = find_context(session().counters)
    inside_tool = here.tool_call is not None and here.tool_call.program is here.program
    if inside_tool or here.program is None:
        return here, None, inside_tool
    frame = _frame.get()
    if frame is None or frame.run.program is not here.program:
        handled = _handled_frame()
        frame = handled if handled is not None and handled.run.program is here.program else None
    return here, frame, False


class RunScope:
    """A run or turn in progress. As a ``with`` block, which never raises, it enters its context around each
    step of the coroutine or generator; ``close`` ends it. See ``sojourn.scoped_functions.GeneratorScope``."""

    __slots__ = ("_frame", "_key", "_open", "_outer", "_place", "_run", "_tokens")

    def __init__(
        self, frame: RunFrame, inside: ExecutionContext, *, run: TeamRun | None, key: str | None = None
    ) -> None:
        self._frame = frame
        self._place = inside
        """The context inside the scope, saved after each step, since a ``with`` block of the user may span
        steps."""
        self._run = run
        """The run that this scope begins, if any."""
        self._key = key
        self._open = True
        self._outer: RunFrame | None = None
        if key is not None:
            self._outer = _teams.get(key)
            _teams[key] = frame
            add_resolver(resolve)
        if frame.node is not None:
            frame.run.program.enter_node(frame.node)

    def __enter__(self) -> None:
        self._tokens = current_context.set(self._place), _frame.set(self._frame)

    def __exit__(self, *_: object) -> None:
        try:
            self._place = current_context.get()
            reset_context(self._tokens[0])
            _frame.reset(self._tokens[1])
        except Exception:
            count_error("context_reset_failed")

    def yields(self, item: Any) -> None:
        """End with the last item of a stream, since many consumers do not ask for another one."""
        kind = type(item)
        if kind.__name__ in ("TaskResult", "Response") and kind.__module__.startswith(
            "autogen_agentchat.base"
        ):
            self.close()

    @guarded
    def close(self, error: BaseException | None = None) -> None:
        """End the run or turn, with ``error`` if it failed. Repeating it is harmless. Never raises."""
        if not self._open:
            return
        self._open = False
        frame, run, key = self._frame, self._run, self._key
        program = frame.run.program
        if frame.node is not None and program.node == frame.node:
            program.node = None  # the manager that selects the next agent has no node
        if key is not None and _teams.get(key) is frame:
            if self._outer is None:
                del _teams[key]
            else:
                _teams[key] = self._outer
        if run is not None:
            run.close(status_of(error))

    def __del__(self) -> None:
        # Without an event loop, Python destroys an async generator without closing it.
        self.close(GeneratorExit())


def begin_team(team: Any) -> RunScope | None:
    """Begin a team's run and return its scope; ``None`` if the running code is already inside a run of this
    team."""
    here, frame, inside_tool = _enclosing_context()
    if frame is not None and frame.team == id(team):
        return None
    run, begun, inside = _run(team, here, frame, inside_tool)
    prefix = ""
    if frame is not None:
        prefix = f"{frame.node or node_name(frame.prefix, team)}/"
    key = str(team._team_id)
    return RunScope(RunFrame(run, prefix, None, id(team)), inside, run=begun, key=key)


def begin_turn(agent: Any) -> RunScope | None:
    """Begin an agent's turn and return its scope; ``None`` if the code is already inside a turn."""
    here, frame, inside_tool = _enclosing_context()
    if frame is not None and frame.node is not None:
        return None
    run, begun, inside = _run(agent, here, frame, inside_tool)
    prefix = frame.prefix if frame is not None else ""
    node = node_name(prefix, agent)
    # The user's step() around the run still gives its hints, but the node is the agent.
    inside = inside._replace(step=StepContext(node).within(inside.step))
    return RunScope(RunFrame(run, prefix, node), inside, run=begun)


@guarded
def _graph(runner: Any) -> Aeg | None:
    return graph_of(runner)  # if it fails, the program is reported without its graph


def _run(
    runner: Any, here: ExecutionContext, frame: RunFrame | None, inside_tool: bool
) -> tuple[TeamRun, TeamRun | None, ExecutionContext]:
    """Return three values:

    - the run that ``runner`` (a team or agent) belongs to;
    - the same run if it begins here, else ``None``; a run begins here if ``frame`` is ``None``;
    - the context inside the run.

    ``here``, ``frame`` and ``inside_tool`` are the result of ``_enclosing_context``.
    """
    if frame is not None:
        return frame.run, None, here
    program = here.program
    if program is not None and program.is_open and not inside_tool:
        run = TeamRun(program, owned=False)
        if (aeg := _graph(runner)) is not None:
            # Not complete, since the user's program may do more than this run.
            program.set_graph(Aeg(aeg.nodes, [(*edge, p) for edge, p in aeg.edges.items()], complete=False))
        return run, run, here
    name = str(runner.name)
    if program is None:
        name = agent_type_of(name, getattr(runner, "DEFAULT_NAME", None))  # the default of a team's class
    program = sojourn.program(name, agent_type=name, max_steps=_most_steps(runner)).make()
    if (aeg := _graph(runner)) is not None:
        program.set_graph(aeg)
    run = TeamRun(program.start(), owned=True)
    return run, run, ExecutionContext(program)


def _most_steps(runner: Any) -> int | None:
    """Return a team's limit of turns, or an ``AssistantAgent``'s limit of requests in a turn, if any."""
    rounds = step_limit(getattr(runner, "_max_tool_iterations", None))
    reflects = getattr(runner, "_reflect_on_tool_use", None) is True
    return step_limit(getattr(runner, "_max_turns", None)) or (rounds and rounds + reflects)


def begin_call(tool: str, call_id: str | None, tool_class: str | None = None) -> ToolCall | None:
    """Enter a new tool call, which is in progress for the run too, and return it. Returns ``None`` if the
    running code is already inside this tool call."""
    here = live_context()
    if here.program is None or resolvers:
        here, _ = find_context(session().counters)
    running = here.tool_call
    frame = _frame.get()
    if running is not None and running.program is here.program and frame is not None:
        begun = running in frame.run.calls
        if begun and (call_id is None or running.call_id == call_id):
            return None
    call = ToolCall(tool, call_id, tool_class=tool_class)
    if frame is not None and frame.run.program is here.program:
        frame.run.calls.add(call)
    return call.__enter__()


def end_call(call: ToolCall) -> None:
    """Remove a tool call from the run's calls in progress."""
    frame = _frame.get()
    if frame is not None:
        frame.run.calls.discard(call)


def call_under_way() -> ToolCall | None:
    """Return the tool call around the running code, if ``begin_call`` made it in this run; else ``None``."""
    call, frame = current_context.get().tool_call, _frame.get()
    return call if frame is not None and call in frame.run.calls else None
