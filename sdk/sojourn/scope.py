"""How a program runs around code: a block, a decorator, or open until ended where no block can span it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from . import runtime
from .context import Place, leave, opened, place
from .errors import ArgumentError

if TYPE_CHECKING:
    from .program import Program

P = ParamSpec("P")
R = TypeVar("R")

_CANCELLED = frozenset({"CancelledError", "KeyboardInterrupt", "GeneratorExit"})


def status_of(error: BaseException | None) -> str:
    """``ok``, ``cancelled`` or ``error``. By name, so that asyncio is not loaded for it."""
    if error is None:
        return "ok"
    return "cancelled" if any(kind.__name__ in _CANCELLED for kind in type(error).__mro__) else "error"


class ProgramScope:
    """What ``program()`` returns: a block that runs as a program, or a decorator that makes every call
    one."""

    __slots__ = ("_parent_id", "_program", "_token", "make")

    def __init__(self, make: Callable[[], Program], parent_id: str | None = None) -> None:
        """``parent_id``: of the parent that was named, if one was."""
        self.make = make
        """A program for the next run, not started yet: for adapters that cannot use ``with``."""
        self._parent_id = parent_id
        self._program: Program | None = None
        self._token: Token[Place] | None = None

    def open(self) -> Program:
        """Start it and make it the program of the whole process until its ``end()``, in every thread that
        knows no other: for notebooks, whose cells no ``with`` block can span, and consoles.

        One at a time: opening another ends the one before as ``cancelled`` (so that a cell may be run
        again), unless that is the ``parent`` named for the new one. One that is still open when the process
        ends is ended as ``cancelled``.
        """
        while opened and opened[-1].id != self._parent_id:
            opened.pop().end("cancelled")
        program = self.make().start()
        opened.append(program)
        return program

    def __enter__(self) -> Program:
        if self._program is not None:
            raise ArgumentError("this program is already running; call program() once for each run")
        program = self._program = self.make().start()
        # Steps and tool calls around a child belong to its parent.
        self._token = place.set(Place(program))
        return program

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        program, self._program = self._program, None
        token, self._token = self._token, None
        if token is not None:
            leave(token, runtime.session().counters)
        if program is not None:
            program.end(status_of(error))

    async def __aenter__(self) -> Program:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        from .wrapping import scoped

        make = self.make

        def fresh() -> ProgramScope:
            return ProgramScope(make)

        return scoped(function, fresh)


class Inside:
    """What ``Program.here()`` returns: a block whose code belongs to a program that others start and end."""

    __slots__ = ("_program", "_tokens")

    def __init__(self, program: Program) -> None:
        self._program = program
        self._tokens: list[Token[Place]] = []

    def __enter__(self) -> Program:
        self._tokens.append(place.set(Place(self._program)))
        return self._program

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self._tokens.pop(), runtime.session().counters)
