"""What runs in place of the AutoGen 0.7 functions that run tools, as ``around(original, args, kwargs)``.

If ``_execute_tool_call`` raises, the agent waits for ever. So all code of ours is guarded, and the original
is called exactly once, outside of the guards.
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

Original = Callable[..., Any]


async def execute_tool_call(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Report a tool call of the model, or a handoff (``AssistantAgent._execute_tool_call``)."""
    call = _begin_call(args[0] if args else kwargs.get("tool_call"))
    return await _in_call(call, functools.partial(original, *args, **kwargs), _status_of_result)


async def execute_code_block(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Report all code blocks of a message as one tool call (``CodeExecutorAgent.execute_code_block``)."""
    call = _begin_code(args[1] if len(args) > 1 else kwargs.get("code_blocks"))
    return await _in_call(call, functools.partial(original, *args, **kwargs), _status_of_code)


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


async def run_json(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Recognise a tool's timeout (``BaseTool.run_json``). AutoGen's callers turn the exception into text."""
    try:
        return await original(*args, **kwargs)
    except Exception as error:
        _note_timeout(error)
        raise


async def run_function(original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry the context (``FunctionTool.run``) into the thread in which AutoGen runs a function that is not
    ``async``."""
    return await original(_with_current_context(args[0]) or args[0], *args[1:], **kwargs)


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
