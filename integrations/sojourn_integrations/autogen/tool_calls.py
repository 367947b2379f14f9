"""Wrappers of the AutoGen 0.7 functions that run tools.

Each function here returns a wrapper of an AutoGen function, ``original``. The wrapper reports calls only
while ``active()`` is true. If ``_execute_tool_call`` raises, the agent waits for ever. So all code of ours is
guarded, and the original is called exactly once, outside of the guards.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from sojourn.errors import tool_status_of
from sojourn.program import current_context
from sojourn.shell_command import command_class
from sojourn.tools import ToolCall

from sojourn_integrations.safe_scope import Scope, guarded, leave, set_status

from . import run_scopes


def execute_tool_call(original: Any, active: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap ``AssistantAgent._execute_tool_call``, to report every tool call of the model, including
    handoffs."""

    @functools.wraps(original)
    async def execute(*args: Any, **kwargs: Any) -> Any:
        call = _begin_call(args[0] if args else kwargs.get("tool_call")) if active() else None
        return await _in_call(call, functools.partial(original, *args, **kwargs), _status_of_result)

    return execute


def execute_code_block(original: Any, active: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap ``CodeExecutorAgent.execute_code_block``, to report all code blocks of a message as one tool
    call."""

    @functools.wraps(original)
    async def execute_code_block(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin_code(args[0] if args else kwargs.get("code_blocks")) if active() else None
        return await _in_call(call, functools.partial(original, self, *args, **kwargs), _status_of_code)

    return execute_code_block


async def _in_call(
    call: ToolCall | None, execute: Callable[[], Any], status_of: Callable[[ToolCall, Any], str]
) -> Any:
    """Await ``execute()``, end the tool call ``call``, and return the result. ``call`` is ``None`` if no call
    is to be reported. ``status_of(call, result)`` returns the status of a call that did not raise."""
    if call is None:
        return await execute()
    try:
        result = await execute()
    except BaseException as error:
        _end_call(call, error)
        raise
    set_status(call, functools.partial(status_of, call), result)
    _end_call(call)
    return result


def run_json(original: Any, active: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap ``BaseTool.run_json``, to recognise a tool's timeout. AutoGen's callers of this method turn the
    exception into text."""

    @functools.wraps(original)
    async def run_json(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, *args, **kwargs)
        except Exception as error:
            if active():
                _note_timeout(error)
            raise

    return run_json


def run_function(original: Any, active: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap ``FunctionTool.run``. AutoGen runs a function that is not ``async`` in a thread; with this wrapper
    the function has the caller's context in that thread."""

    @functools.wraps(original)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        carrier = _with_current_context(self) if active() else None
        return await original(self if carrier is None else carrier, *args, **kwargs)

    return run


@guarded
def _begin_call(tool_call: Any) -> ToolCall | None:
    return run_scopes.begin_call(tool_call.name, tool_call.id)


@guarded
def _begin_code(blocks: Any) -> ToolCall | None:
    return run_scopes.begin_call("code", None, _language(blocks))


@guarded
def _end_call(call: ToolCall, error: BaseException | None = None) -> None:
    leave(Scope(call, call), error)
    run_scopes.end_call(call)


def _status_of_result(call: ToolCall, result: Any) -> str:
    return call.status or "error" if result[1].is_error else "ok"


def _status_of_code(_: ToolCall, result: Any) -> str:
    """Return the status of executed code. Exit code 124 means ``timeout``, as for the command ``timeout(1)``.
    Exit code 125 means ``cancelled`` if the output contains ``Cancelled``. Otherwise 0 means ``ok``, and any
    other exit code ``nonzero``."""
    code = getattr(result, "exit_code", 0)
    if code == 124:
        return "timeout"
    if code == 125 and "Cancelled" in str(getattr(result, "output", "")):
        return "cancelled"
    return "nonzero" if code else "ok"


@guarded
def _note_timeout(error: BaseException) -> None:
    call = run_scopes.call_under_way()
    if call is not None and tool_status_of(error) == "timeout":
        call.status = "timeout"


@guarded
def _with_current_context(tool: Any) -> Any:
    """Return a copy of ``tool`` that carries the SDK's current context into the thread of its function.
    Returns ``tool`` itself if its function is ``async``."""
    function = tool._func
    if inspect.iscoroutinefunction(function):
        return tool
    here = current_context.get()

    def carried(*args: Any, **kwargs: Any) -> Any:
        token = current_context.set(here)
        try:
            return function(*args, **kwargs)
        finally:
            current_context.reset(token)

    carried.__wrapped__ = function  # type: ignore[attr-defined]  # for inspect.signature
    carrier = copy.copy(tool)
    carrier._func = carried
    return carrier


def _language(blocks: Any) -> str | None:
    """Return the language of the last code block, or the main command if that block is shell code. Returns
    ``None`` without blocks."""
    if not blocks:
        return None
    language = str(blocks[-1].language).strip().lower()
    if language in ("sh", "bash", "shell"):
        return command_class(str(blocks[-1].code)) or language
    return "python" if language in ("python", "python3", "py") else language or None
