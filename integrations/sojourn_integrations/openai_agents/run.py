"""One run of the OpenAI Agents SDK: its node, its tool calls, and the hooks that tell of them.

The runner calls ``hooks.on_…()`` in the task that goes on to run the tool, and only awaits the result under
``gather``. So our part runs before a hook's coroutine is even made, where context variables last; and what
is returned is the user's own awaitable: no frame, task or exception of ours gets between.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from importlib import import_module
from typing import Any

from sojourn.commandline import command_class
from sojourn.context import Place, Resolved, find, place
from sojourn.naming import call_id_of
from sojourn.program import Program
from sojourn.runtime import clock, session
from sojourn.tools import ToolCall

from sojourn_integrations.scope import fault

_COMMANDS = ("command", "cmd")
"""Arguments that hold a shell command, whose head is the tool's class."""


class Run:
    """One call of the runner."""

    def __init__(
        self, program: Program, *, owned: bool, agent: str = "", conversation: Hashable = None
    ) -> None:
        self.program = program
        self.owned = owned
        """Its program was made for it; else it is the user's, who ends it."""
        self.agent = agent
        """Where it started."""
        self.conversation = conversation
        """What its session is known by."""
        self.node: str | None = None
        self.calls: dict[Call, None] = {}
        """Tool calls under way, in order."""
        self._tokens: list[tuple[ContextVar[Any], Token[Any]]] = []

    def enter(self) -> None:
        """Be the run around the code, for the tasks it starts."""
        values: tuple[tuple[ContextVar[Any], Any], ...] = ((running, self), (_calling, None))
        if place.get().program is not self.program:
            values += ((place, Place(self.program)),)
        self._tokens = [(variable, variable.set(value)) for variable, value in values]

    def leave(self) -> None:
        """The code around is itself again. Never raises."""
        for variable, token in reversed(self._tokens):
            try:
                variable.reset(token)
            except ValueError:
                fault("context_reset_failed")
        self._tokens = []

    def enter_node(self, node: object) -> None:
        """A turn of this agent begins."""
        if node != self.node:
            self.node = str(node)
            self.program.enter_node(self.node)

    def stop_calls(self) -> None:
        """Nothing of it goes on."""
        for call in list(self.calls):
            call.stop(call.tool_call.status or "cancelled")


class Call:
    """A tool call under way, and what it replaced in its task's context."""

    __slots__ = ("around", "run", "started_s", "task", "tool_call")

    def __init__(self, tool_call: ToolCall, run: Run | None, around: Place) -> None:
        self.tool_call = tool_call
        self.run = run
        self.around = around
        self.started_s = clock()
        if run is not None:
            run.calls[self] = None
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        if self.task is not None:
            self.task.add_done_callback(self.task_done)

    def stop(self, status: str) -> None:
        """It is over; only the first word counts."""
        task, self.task = self.task, None
        if task is not None:  # which may be one that lives as long as the process
            task.remove_done_callback(self.task_done)
        if self.run is not None:
            self.run.calls.pop(self, None)
        self.tool_call.stop(status)

    def task_done(self, task: asyncio.Task[Any]) -> None:
        """A tool that raises or is cancelled has no ``on_tool_end``."""
        try:
            # Not task.exception(), which would tell asyncio that somebody dealt with it.
            error = None if task.cancelled() else getattr(task, "_exception", None)
            if task.cancelled():
                status = "cancelled"
            elif type(error).__name__ == "ToolTimeoutError":
                status = "timeout"
            else:
                status = self.tool_call.status or ("ok" if error is None else "error")
            self.stop(status)
        except Exception:
            fault("internal_error")


running: ContextVar[Run | None] = ContextVar("sojourn_agents_run", default=None)
"""The run around the code."""
_calling: ContextVar[Call | None] = ContextVar("sojourn_agents_call", default=None)


def resolve() -> Resolved | None:
    """A resolver: two runs at once may share one program, and each knows its own node."""
    run = running.get()
    return None if run is None else Resolved(run.program, run.node)


def noting_errors(attach_error: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for the function by which the framework tells its tracing of an exception that becomes text
    for the model: the one place where that is seen, whether tracing is on or off."""

    @functools.wraps(attach_error)
    def attach_error_to_current_span(*args: Any, **kwargs: Any) -> Any:
        call = _calling.get()
        if call is not None and call.tool_call.status is None:
            call.tool_call.status = "error"
        return attach_error(*args, **kwargs)

    return attach_error_to_current_span


class BaseHooks:
    """The framework's ``RunHooks``, telling of nodes and tool calls; ``inner`` is the user's own."""

    def __init__(self, inner: Any = None, *, by_runner: bool = False) -> None:
        self._inner = inner if inner is not None else import_module("agents.lifecycle").RunHooksBase()
        self._by_runner = by_runner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there before __init__, as in a copy
            raise AttributeError(name)
        return getattr(self._inner, name)


def passing_on(name: str) -> Callable[..., Any]:
    """The method ``name`` of ``Hooks``: ours at once, then the user's, whose awaitable is returned."""
    ours = HOOKS.get(name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ours is not None:
            try:
                ours(*args, **kwargs)
            except Exception:
                fault("internal_error")
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _on_turn(context: Any, agent: Any, *_: Any, **__: Any) -> None:
    run = running.get()
    if run is not None:
        run.enter_node(agent.name)
        return
    program = find(session().counters)[0].program  # ``Hooks`` used alone, in a program of the user's
    if program is not None and program.node != agent.name:
        program.enter_node(str(agent.name))


def _on_tool_start(context: Any, agent: Any, tool: Any) -> None:
    run = running.get()
    id = getattr(context, "tool_call_id", None)
    tool_class = _command_head(getattr(context, "tool_arguments", None))
    program = run.program if run is not None else None
    tool_call = ToolCall(tool.name, id, tool_class=tool_class, program=program).start()
    call = Call(tool_call, run, place.get())
    _calling.set(call)
    if id is not None:
        # A function tool has a task for itself, so that nothing has to be reset if it fails.
        place.set(call.around._replace(tool_call=tool_call))


def _on_tool_end(context: Any, agent: Any, tool: Any, result: Any) -> None:
    call = _calling.get()
    id = getattr(context, "tool_call_id", None)
    if call is None or (id is not None and call.tool_call.call_id != call_id_of(id)):
        return  # the second half of a call that an approval had interrupted
    _calling.set(None)
    if id is not None:
        place.set(call.around)
    late = _timed_out(tool, result, clock() - call.started_s)
    call.stop(call.tool_call.status or ("timeout" if late else "ok"))


HOOKS: dict[str, Callable[..., None]] = {
    "on_agent_start": _on_turn,
    "on_llm_start": _on_turn,
    "on_tool_start": _on_tool_start,
    "on_tool_end": _on_tool_end,
}
"""Ours; all others are only passed on."""


def _timed_out(tool: Any, result: Any, elapsed_s: float) -> bool:
    """Whether the framework gave up waiting, which it tells nobody but the model."""
    limit_s = getattr(tool, "timeout_seconds", None)
    if limit_s is None or elapsed_s < limit_s:
        return False
    if getattr(tool, "timeout_error_function", None) is not None:
        return True
    text = import_module("agents.tool").default_tool_timeout_error_message
    return bool(result == text(tool_name=tool.name, timeout_seconds=limit_s))


def _command_head(arguments: Any) -> str | None:
    """``pytest`` of a tool that runs a shell command; nothing else of its arguments is looked at."""
    if not isinstance(arguments, str) or ('"command"' not in arguments and '"cmd"' not in arguments):
        return None
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    commands = [given.get(name) for name in _COMMANDS] if isinstance(given, dict) else []
    return next((command_class(command) for command in commands if isinstance(command, str)), None)
