"""Reports the tool calls between two turns of an agent: their names and times, never their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from . import runtime
from .errors import tool_status_of
from .ids import CallId
from .program import (
    AsyncBlock,
    ExecutionContext,
    Program,
    current_context,
    find_context,
    live_context,
    new_tuple,
    process_program,
    reset_context,
    resolvers,
)
from .valid_ids_and_names import SHORT, call_id_of, name_of, new_call_id
from .wire_events import ToolStart, ToolStop

P = ParamSpec("P")
R = TypeVar("R")

MAX_ROUNDED_S = 1e9
"""Durations below this many seconds are rounded to whole microseconds; longer ones are not rounded."""
STATUSES = frozenset({"ok", "error", "timeout", "nonzero", "cancelled"})


class ToolCall(AsyncBlock["ToolCall"]):
    """One tool call, as a ``with`` or ``async with`` block. If the tool fails without an exception, set
    ``status`` of the call that the block returns. If several tasks enter the same block at the same time,
    each further task gets another call, with a fresh id."""

    __slots__ = (
        "_expected_s", "_given_program", "_pid", "_started_s", "_token", "_twins", "call_id", "program",
        "status", "tool", "tool_class",
    )  # fmt: skip

    def __init__(
        self,
        tool: str,
        call_id: str | None = None,
        *,
        tool_class: str | None = None,
        expected_s: float | None = None,
        program: Program | None = None,
    ) -> None:
        # ``name_of`` and ``call_id_of`` are called for unusual texts only; see ``start``.
        plain = type(tool) is str and 0 < len(tool) <= SHORT and tool.isascii()
        self.tool = tool if plain else name_of(tool)
        if type(call_id) is str and 0 < len(call_id) <= SHORT and call_id.isascii() and call_id.isprintable():
            self.call_id = CallId(call_id)
        else:
            self.call_id = new_call_id() if call_id is None else call_id_of(call_id)
        self.tool_class = None if tool_class is None else name_of(tool_class)
        self.program = self._given_program = program
        """The program of the call. If none was given, ``start`` sets the current program."""
        self.status: str | None = None
        """``ok``, ``error``, ``timeout``, ``nonzero`` or ``cancelled``. ``None``: the status follows from the
        exception that ends the block, and is ``ok`` without an exception."""
        self._expected_s = expected_s
        self._started_s: float | None = None
        self._pid = 0
        """Id of the process that last started the call; 0 before the first start."""
        self._token: Token[ExecutionContext] | None = None
        self._twins: list[ToolCall] = []
        """Calls of tasks that entered this block while it was already entered."""

    def start(self) -> ToolCall:
        """Report the start and return the call, without changing the context. For adapters. Never raises."""
        # While the model answers, other code replaces ours in the CPU's caches. The first call of a function
        # then takes microseconds, so small functions are inlined here.
        session = runtime.live or runtime.session()
        try:
            program = self.program
            if program is None:
                program = current_context.get().program
                if program is None or program.has_ended or resolvers:
                    program = find_context(session.counters)[0].program
                if program is None and session.online:
                    program = process_program(session)
                self.program = program
            self._started_s = runtime.clock()
            self._pid = runtime.pid
            if program is not None:
                program.running_tools.add(self.call_id)
                # The caller's own estimate; it has no percentile.
                expected_s = None
                given = self._expected_s
                if given is not None:
                    if isinstance(given, (int, float)) and math.isfinite(given) and given >= 0:
                        expected_s = float(given)
                    else:
                        session.counters.add("hint_invalid")
                sender = session.event_sender
                if sender is not None:
                    sender.put(
                        program,
                        ToolStart,
                        call_id=self.call_id,
                        tool=self.tool,
                        tool_class=self.tool_class,
                        expected_s=expected_s,
                    )
                if runtime.hears_turns:
                    runtime.notify_listeners("tool_started", self)
        except Exception:
            session.counters.add("internal_error")
        return self

    def stop(self, status: str = "ok", *, duration_s: float | None = None) -> None:
        """Report the end of the tool call. ``status`` is one of ``STATUSES``; another value counts as ``ok``.
        ``duration_s`` is the duration in seconds, by default the time since ``start()``. A second call is
        harmless. Never raises."""
        started_s, self._started_s = self._started_s, None
        if started_s is None:
            return
        session = runtime.live or runtime.session()
        try:
            if status not in STATUSES:
                session.counters.add("hint_invalid")
                status = "ok"
            program = self.program
            if program is not None:
                program.running_tools.discard(self.call_id)
                if self._pid != runtime.pid:
                    return  # a forked copy that leaves the block does not end its parent's tool call
                if duration_s is None:
                    duration_s = runtime.clock() - started_s
                # Whole microseconds. ``round`` takes ten times as long with cold caches.
                if 0.0 < duration_s < MAX_ROUNDED_S:
                    duration_s = int(duration_s * 1e6 + 0.5) / 1e6
                elif not duration_s > 0.0:
                    duration_s = 0.0
                if session.event_sender is not None:
                    session.event_sender.put(
                        program, ToolStop, call_id=self.call_id, duration_s=duration_s, status=status
                    )
                if runtime.hears_turns:
                    runtime.notify_listeners("tool_stopped", self, duration_s, status)
        except Exception:
            session.counters.add("internal_error")

    def __enter__(self) -> ToolCall:
        if self._token is not None:
            return self._enter_twin()
        if self._pid:  # the block is entered once more, perhaps in another program
            self.program, self.status = self._given_program, None
        self.start()
        program, step, _ = current_context.get()
        if program is not None and program.has_ended:
            program, step, _ = live_context()
        self._token = current_context.set(new_tuple(ExecutionContext, (program, step, self)))
        return self

    def _enter_twin(self) -> ToolCall:
        """Enter the block once more, as another call."""
        twin = ToolCall(self.tool, tool_class=self.tool_class, expected_s=self._expected_s)
        self._twins.append(twin)
        return twin.__enter__()

    def _twin_to_leave(self) -> ToolCall | None:
        """Return the call of ``_twins`` that the running code leaves, and remove it from ``_twins``. Returns
        ``None`` if the code leaves this call itself."""
        here = current_context.get().tool_call
        found = next((twin for twin in tuple(self._twins) if twin is here), None)
        if found is None and self._token is None:  # a generator that another context closes
            found = self._twins[-1]
        if found is not None:
            self._twins.remove(found)
        return found

    def _leave_context(self) -> None:
        """Restore the context that was current before the block (see ``scoped_functions.Scope``)."""
        token, self._token = self._token, None
        if token is not None:
            reset_context(token)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._twins and (twin := self._twin_to_leave()) is not None:
            return twin.__exit__(kind, error, trace)
        token, self._token = self._token, None
        if token is not None:
            try:
                current_context.reset(token)
            except ValueError:  # as in ``reset_context``
                runtime.session().counters.add("context_reset_failed")
        status = self.status
        if status is None:
            status = "ok" if error is None else tool_status_of(error)
        self.stop(status)


def tool_call(
    name: str,
    call_id: str | None = None,
    *,
    tool_class: str | None = None,
    expected_s: float | None = None,
) -> ToolCall:
    """Return a tool call of the current program:
    ``with sojourn.tool_call("bash", call.id, tool_class="pytest"): ...``.

    ``call_id`` is the id of the model's tool call, if there is one. ``tool_class`` is a finer class, such as
    the command's name. ``expected_s`` is your own estimate of the duration, in seconds.
    """
    return ToolCall(name, call_id, tool_class=tool_class, expected_s=expected_s)


@overload
def tool(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def tool(
    *, name: str | None = None, tool_class: str | None = None, expected_s: float | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    tool_class: str | None = None,
    expected_s: float | None = None,
) -> Any:
    """Decorate a function to report each of its calls as a tool call: ``@sojourn.tool`` or
    ``@sojourn.tool(name="search")``. ``name`` is by default the function's name; ``tool_class`` and
    ``expected_s`` are those of ``tool_call``."""
    from .scoped_functions import scoped

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        label = name or str(getattr(function, "__name__", "tool"))
        return scoped(function, lambda: ToolCall(label, tool_class=tool_class, expected_s=expected_s))

    return decorate if function is None else decorate(function)
