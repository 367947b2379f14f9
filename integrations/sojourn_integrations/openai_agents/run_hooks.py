"""One run of the OpenAI Agents SDK: its node, its tool calls, and the hooks that report them.

The runner calls ``hooks.on_…()`` in the task that later runs the tool, but awaits the result in another task
(``gather``). Only the call itself can set context variables for the tool. So our code runs during the call,
which then returns the awaitable of the user's hook. Our code adds no frame, task or exception.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from importlib import import_module
from typing import Any
from weakref import ReferenceType

from sojourn.program import (
    ExecutionContext,
    Program,
    ResolvedContext,
    current_context,
    find_context,
    live_context,
    new_tuple,
)
from sojourn.runtime import clock, session
from sojourn.shell_command import command_class
from sojourn.tools import ToolCall
from sojourn.valid_ids_and_names import call_id_of

from sojourn_integrations.safe_scope import count_error, guarded

_COMMANDS = ("command", "cmd")
"""Names of tool arguments that hold a shell command. The main command becomes the call's tool class."""


class Run:
    """One run: a call of the framework's runner."""

    def __init__(
        self, program: Program, *, owned: bool, agent: str = "", conversation: Hashable = None
    ) -> None:
        self.program = program
        self.owned = owned
        """True if this package made the program. Otherwise the user's code ends the program."""
        self.agent = agent
        """Name of the agent that the run started with."""
        self.conversation = conversation
        """Key of the run's conversation in the ``ProgramCache``; ``None`` without a conversation."""
        self.session: ReferenceType[Any] | None = None
        """The run's session object, if it can be referenced weakly."""
        self.node: str | None = None
        self.calls: dict[Call, None] = {}
        """Tool calls in progress, in order."""
        self._tokens: list[tuple[ContextVar[Any], Token[Any]]] = []

    def enter(self) -> None:
        """Make this the current run, for the calling code and for tasks that the code starts."""
        values: tuple[tuple[ContextVar[Any], Any], ...] = ((running, self), (_calling, None))
        if current_context.get().program is not self.program:
            values += ((current_context, ExecutionContext(self.program)),)
        self._tokens = [(variable, variable.set(value)) for variable, value in values]

    def leave(self) -> None:
        """Restore the previous run. Never raises."""
        for variable, token in reversed(self._tokens):
            try:
                variable.reset(token)
            except ValueError:
                count_error("context_reset_failed")
        self._tokens = []

    def enter_node(self, node: object) -> None:
        """Record that the turn of the agent named ``node`` begins."""
        if node != self.node:
            self.node = str(node)
            self.program.enter_node(self.node)

    def stop_calls(self) -> None:
        """End the run's open tool calls: as ``cancelled``, or with the status that a call already has."""
        for call in list(self.calls):
            call.stop(call.tool_call.status or "cancelled")


class Call:
    """A tool call in progress, and the context that the task had before it."""

    __slots__ = ("outer_context", "run", "started_s", "task", "tool_call")

    def __init__(self, tool_call: ToolCall, run: Run | None, outer_context: ExecutionContext) -> None:
        self.tool_call = tool_call
        self.run = run
        self.outer_context = outer_context
        self.started_s = clock()
        if run is not None:
            run.calls[self] = None
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        if self.task is not None:
            self.task.add_done_callback(self.task_done)

    def stop(self, status: str) -> None:
        """End the call. Only the first status counts."""
        task, self.task = self.task, None
        if task is not None:  # the task may live as long as the process
            task.remove_done_callback(self.task_done)
        if self.run is not None:
            self.run.calls.pop(self, None)
        self.tool_call.stop(status)

    @guarded
    def task_done(self, task: asyncio.Task[Any]) -> None:
        """End the call when its task ends, since ``on_tool_end`` is not called for a tool that raises or is
        cancelled."""
        # Not task.exception(), which would tell asyncio that the exception was handled.
        error = None if task.cancelled() else getattr(task, "_exception", None)
        if task.cancelled():
            status = "cancelled"
        elif type(error).__name__ == "ToolTimeoutError":
            status = "timeout"
        else:
            status = self.tool_call.status or ("ok" if error is None else "error")
        self.stop(status)


running: ContextVar[Run | None] = ContextVar("sojourn_agents_run", default=None)
"""The run that the current task belongs to; ``None`` outside of any run."""
_calling: ContextVar[Call | None] = ContextVar("sojourn_agents_call", default=None)


def resolve() -> ResolvedContext | None:
    """Return the current run's program and node, for ``sojourn.program.add_resolver``. Returns ``None``
    outside of a run, or if the user's code opened another program inside the run. The node comes from the
    run, not from ``Program.node``, since two concurrent runs may share a program but have different nodes."""
    run = running.get()
    if run is None:
        return None
    program = live_context().program
    if program is not None and program is not run.program:
        return None  # the user's code has opened this program inside the run
    return new_tuple(ResolvedContext, (run.program, run.node, None))


def record_tool_errors(attach_error: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the framework's function ``attach_error`` that also marks the current tool call as
    failed. The framework calls ``attach_error``, even with tracing off, when a tool's exception becomes text
    for the model. No other function sees that exception."""

    @functools.wraps(attach_error)
    def attach_error_to_current_span(*args: Any, **kwargs: Any) -> Any:
        call = _calling.get()
        if call is not None and call.tool_call.status is None:
            call.tool_call.status = "error"
        return attach_error(*args, **kwargs)

    return attach_error_to_current_span


class BaseHooks:
    """Reports nodes and tool calls, then calls the user's hooks ``inner``. Without ``inner`` there are none.
    ``by_runner``: True if ``SojournRunner`` made the object, False if the user did."""

    # ``_kinds`` makes the class ``Hooks``: this base class and docstring, and a ``chain_hook`` for each hook.

    def __init__(self, inner: Any = None, *, by_runner: bool = False) -> None:
        self._inner = inner if inner is not None else import_module("agents.lifecycle").RunHooksBase()
        self._by_runner = by_runner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there before __init__, as in a copy
            raise AttributeError(name)
        return getattr(self._inner, name)


def chain_hook(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of ``Hooks``. The method runs our hook, a plain function, then calls the
    user's hook and returns its awaitable."""
    ours = guarded(HOOKS[name]) if name in HOOKS else None

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ours is not None:
            ours(*args, **kwargs)
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _on_turn(context: Any, agent: Any, *_: Any, **__: Any) -> None:
    run = running.get()
    if run is not None:
        run.enter_node(agent.name)
        return
    program = find_context(session().counters)[0].program  # ``Hooks`` used alone, in the user's own program
    if program is not None and program.node != agent.name:
        program.enter_node(str(agent.name))


def _on_tool_start(context: Any, agent: Any, tool: Any) -> None:
    run = running.get()
    id = getattr(context, "tool_call_id", None)
    tool_class = _command_head(getattr(context, "tool_arguments", None))
    program = run.program if run is not None else None
    tool_call = ToolCall(tool.name, id, tool_class=tool_class, program=program).start()
    call = Call(tool_call, run, current_context.get())
    _calling.set(call)
    if id is not None:
        # A function tool has its own task, so nothing has to be reset if it fails.
        program, step, _ = call.outer_context
        current_context.set(new_tuple(ExecutionContext, (program, step, tool_call)))


def _on_tool_end(context: Any, agent: Any, tool: Any, result: Any) -> None:
    call = _calling.get()
    id = getattr(context, "tool_call_id", None)
    known_as = None if call is None else call.tool_call.call_id
    if call is None or (id is not None and known_as != id and known_as != call_id_of(id)):
        return  # the second half of a call that an approval had interrupted
    _calling.set(None)
    if id is not None:
        current_context.set(call.outer_context)
    limit_s = getattr(tool, "timeout_seconds", None)
    late = limit_s is not None and clock() - call.started_s >= limit_s
    call.stop(call.tool_call.status or ("timeout" if late else "ok"))


HOOKS: dict[str, Callable[..., None]] = {
    "on_agent_start": _on_turn,
    "on_llm_start": _on_turn,
    "on_tool_start": _on_tool_start,
    "on_tool_end": _on_tool_end,
}
"""Our hooks, by the name of the ``RunHooks`` method that calls them. Other methods only call the user's
hooks."""


def _command_head(arguments: Any) -> str | None:
    """Return the main command of the shell command in ``arguments``, a tool's arguments as JSON text. Returns
    ``None`` if they have no shell command."""
    if not isinstance(arguments, str) or ('"command"' not in arguments and '"cmd"' not in arguments):
        return None
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    commands = [given.get(name) for name in _COMMANDS] if isinstance(given, dict) else []
    return next((command_class(command) for command in commands if isinstance(command, str)), None)
