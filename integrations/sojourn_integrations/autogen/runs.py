"""Where an AutoGen team or agent is: in which program, at which agent's turn.

AutoGen 0.7 hands messages to agents in tasks of a runtime. A runtime that the team keeps for
itself starts inside the run and so carries our context along; one given from outside does not,
and there AutoGen's own ``MessageHandlerContext`` tells whose message is being handled.

    team.run ──▶ Run (one program) ──▶ turn of "alice" ──▶ tool call ──▶ another Run, its child
                      │
                      └─▶ a team inside the team: the same program, its agents at "inner/alice"

Nothing here calls AutoGen or imports it. What can fail is guarded by the callers in the package itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import sojourn
from sojourn.aeg import Aeg
from sojourn.context import Place, Resolved, find, place
from sojourn.context import leave as lay_down
from sojourn.program import Program, status_of
from sojourn.runtime import session
from sojourn.step import NO_ADVICE, Step
from sojourn.tools import ToolCall

from sojourn_integrations.scope import fault


class Run:
    """One outermost run of a team or an agent."""

    __slots__ = ("calls", "owned", "program")

    def __init__(self, program: Program, *, owned: bool) -> None:
        self.program = program
        self.owned = owned
        """We opened the program, and end it."""
        self.calls: set[ToolCall] = set()
        """Tool calls under way."""

    def close(self, status: str) -> None:
        """Nothing of it goes on. AutoGen leaves tools running when an agent is cancelled: they are told as
        cancelled here, since whatever they return is used no more."""
        for call in tuple(self.calls):
            call.stop("cancelled")
        self.calls.clear()
        if self.owned:
            self.program.end(status)


class Frame(NamedTuple):
    """Where the running code is within a run."""

    run: Run
    prefix: str = ""
    """Before the names of agents: the path of the team they are in."""
    node: str | None = None
    """Whose turn it is; ``None`` in a team between turns."""
    team: int | None = None
    """``id()`` of the team that runs."""


_frame: ContextVar[Frame | None] = ContextVar("sojourn_autogen_frame", default=None)
_teams: dict[str, Frame] = {}
"""Running teams by the key that their messages bear."""
_graphs: WeakKeyDictionary[Program, str] = WeakKeyDictionary()
"""Hash of the graph we told of a program that is not ours."""


def resolve() -> Resolved | None:
    """The program whose message is being handled; for ``sojourn.context``. Turns say their own node."""
    handled = _handled()
    return None if handled is None else Resolved(handled.run.program)


def _handled() -> Frame | None:
    """Of the team whose message is being handled."""
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


def _around() -> tuple[Place, Frame | None, bool]:
    """The place, the frame where it belongs to that place, and whether this is inside a tool call."""
    here, _ = find(session().counters)
    inside_tool = here.tool_call is not None and here.tool_call.program is here.program
    if inside_tool or here.program is None:
        return here, None, inside_tool
    frame = _frame.get()
    if frame is None or frame.run.program is not here.program:
        handled = _handled()
        frame = handled if handled is not None and handled.run.program is here.program else None
    return here, frame, False


class Scope:
    """A run or a turn that was begun here, taken up for each step of its coroutine or generator."""

    __slots__ = ("_frame", "_key", "_open", "_outer", "_place", "_run")

    def __init__(self, frame: Frame, inside: Place, *, run: Run | None, key: str | None = None) -> None:
        self._frame = frame
        self._place = inside
        self._run = run
        """The run, where it begins with this scope."""
        self._key = key
        self._open = True
        self._outer: Frame | None = None
        if key is not None:
            self._outer = _teams.get(key)
            _teams[key] = frame
        if frame.node is not None:
            frame.run.program.enter_node(frame.node)

    def put_on(self) -> tuple[Token[Place], Token[Frame | None]] | None:
        """Be there. Never raises."""
        try:
            return place.set(self._place), _frame.set(self._frame)
        except Exception:
            fault("internal_error")
            return None

    def take_off(self, tokens: tuple[Token[Place], Token[Frame | None]] | None) -> None:
        """Be where we were. Never raises."""
        if tokens is None:
            return
        try:
            lay_down(tokens[0], session().counters)
            _frame.reset(tokens[1])
        except Exception:
            fault("context_reset_failed")

    def close(self, error: BaseException | None = None) -> None:
        """It is over, as after ``error`` where there was one. Repeating it is harmless. Never raises."""
        if not self._open:
            return
        self._open = False
        try:
            frame, run, key = self._frame, self._run, self._key
            program = frame.run.program
            if frame.node is not None and program.node == frame.node:
                program.node = None  # the manager that picks the next agent is at no node
            if key is not None and _teams.get(key) is frame:
                if self._outer is None:
                    del _teams[key]
                else:
                    _teams[key] = self._outer
            if run is not None:
                run.close(status_of(error))
        except Exception:
            fault("internal_error")

    def __del__(self) -> None:
        # A generator whose event loop is gone is destroyed as it stands: nobody can close it.
        self.close(GeneratorExit())


def begin_team(team: Any, graph: Callable[[Any], Aeg | None]) -> Scope | None:
    """A team begins to run; ``None`` where this very run has begun already."""
    here, frame, inside_tool = _around()
    if frame is not None and frame.team == id(team):
        return None
    run, begun, inside = _run(team, here, frame, inside_tool, graph)
    prefix = ""
    if frame is not None:
        prefix = f"{frame.node or frame.prefix + str(team.name)}/"
    key = str(team._team_id)
    return Scope(Frame(run, prefix, None, id(team)), inside, run=begun, key=key)


def begin_turn(agent: Any, graph: Callable[[Any], Aeg | None]) -> Scope | None:
    """An agent begins its turn; ``None`` where it is part of a turn under way."""
    here, frame, inside_tool = _around()
    if frame is not None and frame.node is not None:
        return None
    run, begun, inside = _run(agent, here, frame, inside_tool, graph)
    prefix = frame.prefix if frame is not None else ""
    node = prefix + str(agent.name)
    step = Step(node, None, NO_ADVICE)
    # A step of the user's around the run goes on to give its advice; the node is ours.
    inside = inside._replace(step=step if inside.step is None else step._within(inside.step))
    return Scope(Frame(run, prefix, node), inside, run=begun)


def _run(
    runner: Any, here: Place, frame: Frame | None, inside_tool: bool, graph: Callable[[Any], Aeg | None]
) -> tuple[Run, Run | None, Place]:
    """The run this belongs to, the same again where it begins here, and the place inside."""
    if frame is not None:
        return frame.run, None, here
    name = str(runner.name)
    program = here.program
    if program is not None and program.is_open and not inside_tool:
        run = Run(program, owned=False)
        _tell_graph(program, graph(runner))
        return run, run, here
    program = sojourn.program(name, agent_type=name, aeg=graph(runner)).make().start()
    run = Run(program, owned=True)
    return run, run, Place(program)


def _tell_graph(program: Program, aeg: Aeg | None) -> None:
    """Of a program somebody else opened: unless they told one themselves. They may do more than this run."""
    if aeg is None or (program.aeg is not None and _graphs.get(program) != program.aeg.hash):
        return
    aeg = Aeg(aeg.nodes, [(*edge, p) for edge, p in aeg.edges.items()], complete=False)
    program.follows(aeg)
    _graphs[program] = aeg.hash


def begin_call(tool: str, call_id: str | None, tool_class: str | None = None) -> ToolCall | None:
    """A tool call of the run begins; ``None`` where it has begun already."""
    here, _ = find(session().counters)
    running = here.tool_call
    frame = _frame.get()
    if running is not None and running.program is here.program and frame is not None:
        begun = running in frame.run.calls
        if begun and (call_id is None or running.call_id == call_id):
            return None
    call = ToolCall(tool, call_id, tool_class=tool_class)
    if frame is not None and frame.run.program is here.program:
        frame.run.calls.add(call)
    return call


def end_call(call: ToolCall) -> None:
    """It is over."""
    frame = _frame.get()
    if frame is not None:
        frame.run.calls.discard(call)


def call_under_way() -> ToolCall | None:
    """The tool call of an agent around the running code."""
    call, frame = place.get().tool_call, _frame.get()
    return call if frame is not None and call in frame.run.calls else None
