"""Tool calls: what an agent does between two turns. Names and times are reported, arguments never."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from . import runtime
from .context import Place, find, leave, place
from .events import ToolStart, ToolStop
from .naming import call_id_of, name_of, new_call_id
from .observe import tell
from .program import Program, process_program, status_of

P = ParamSpec("P")
R = TypeVar("R")

STATUSES = frozenset({"ok", "error", "timeout", "nonzero", "cancelled"})


class ToolCall:
    """One call, as ``with`` or ``async with``; set ``status`` inside where an exception does not tell it."""

    __slots__ = ("_expected_s", "_started_s", "_token", "call_id", "program", "status", "tool", "tool_class")

    def __init__(
        self,
        tool: str,
        call_id: str | None = None,
        *,
        tool_class: str | None = None,
        expected_s: float | None = None,
        program: Program | None = None,
    ) -> None:
        self.tool = name_of(tool)
        self.call_id = new_call_id() if call_id is None else call_id_of(call_id)
        self.tool_class = None if tool_class is None else name_of(tool_class)
        self.program = program
        """Whose call it is; settled at the start where not given."""
        self.status: str | None = None
        """``ok``, ``error``, ``timeout``, ``nonzero`` or ``cancelled``; ``None`` goes by the exception."""
        self._expected_s = expected_s
        self._started_s: float | None = None
        self._token: Token[Place] | None = None

    def start(self) -> ToolCall:
        """Report the start, without touching the context. For adapters. Never raises."""
        session = runtime.session()
        try:
            if self.program is None:
                self.program = find(session.counters)[0].program
                if self.program is None and session.online:
                    self.program = process_program(session)
            self._started_s = runtime.clock()
            if self.program is not None:
                self.program.running_tools.add(self.call_id)
                expected_s, expected_p95_s = self._sane_expectation(session)
                session.emit(
                    self.program,
                    ToolStart,
                    call_id=self.call_id,
                    tool=self.tool,
                    tool_class=self.tool_class,
                    expected_s=expected_s,
                    expected_p95_s=expected_p95_s,
                )
                tell("tool_started", self)
        except Exception:
            session.counters.add("internal_error")
        return self

    def stop(self, status: str = "ok", *, duration_s: float | None = None) -> None:
        """Report the end. Repeating it is harmless. Never raises. ``duration_s``: for a call that became
        known only at its end."""
        started_s, self._started_s = self._started_s, None
        if started_s is None:
            return
        session = runtime.session()
        try:
            if status not in STATUSES:
                session.counters.add("hint_invalid")
                status = "ok"
            if self.program is not None:
                self.program.running_tools.discard(self.call_id)
                if duration_s is None:
                    duration_s = runtime.clock() - started_s
                duration_s = round(max(0.0, duration_s), 6)
                session.emit(
                    self.program, ToolStop, call_id=self.call_id, duration_s=duration_s, status=status
                )
                tell("tool_stopped", self, duration_s, status)
        except Exception:
            session.counters.add("internal_error")

    def __enter__(self) -> ToolCall:
        self.start()
        here = place.get()
        self._token = place.set(Place(here.program, here.step, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            leave(token, runtime.session().counters)
        self.stop(self.status if self.status is not None else _status(error))

    async def __aenter__(self) -> ToolCall:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _sane_expectation(self, session: runtime.Session) -> tuple[float | None, float | None]:
        """Median and 95th percentile: the caller's estimate, which knows nothing of a tail, or else what was
        learned from earlier calls."""
        value = self._expected_s
        if value is not None:
            if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
                return float(value), None
            session.counters.add("hint_invalid")
        seen = None if session.advisor is None else session.advisor.expected(self.tool, self.tool_class)
        return (None, None) if seen is None else (seen.median_s, seen.p95_s)


def tool_call(
    name: str,
    call_id: str | None = None,
    *,
    tool_class: str | None = None,
    expected_s: float | None = None,
) -> ToolCall:
    """A tool call of the current program: ``with sojourn.tool_call("bash", call.id, tool_class="pytest"):
    ...``.

    ``call_id`` is the id of the model's tool call where there is one. ``tool_class`` says more finely what
    runs, e.g. the head of a command; ``expected_s`` is an own estimate of the duration, in seconds.
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
    """Make every call of a function a tool call: ``@sojourn.tool`` or ``@sojourn.tool(name="search")``."""
    from .wrapping import scoped

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        label = name or str(getattr(function, "__name__", "tool"))
        return scoped(function, lambda: ToolCall(label, tool_class=tool_class, expected_s=expected_s))

    return decorate if function is None else decorate(function)


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    # subprocess.TimeoutExpired is no TimeoutError, and asyncio's was not one before Python 3.11.
    if any(kind.__name__ in ("TimeoutError", "TimeoutExpired") for kind in type(error).__mro__):
        return "timeout"
    return status_of(error)
