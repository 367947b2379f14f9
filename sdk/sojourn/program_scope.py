"""``program()``: marks one agent run, as a ``with`` block, as a decorator, or from ``open()`` to ``end()``.

    with sojourn.program("fix-issue") as p: ...     # also: async with, @sojourn.program

A program opened inside another one is its child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, overload

from . import runtime
from .aeg import Aeg
from .errors import ArgumentError, status_of
from .ids import ProgramId, id_problem
from .program import (
    AsyncBlock,
    ExecutionContext,
    Program,
    current_context,
    find_context,
    live_context,
    process_programs,
    reset_context,
)
from .sdk_logger import logger
from .user_hints import NO_HINTS, check_number, checked_hints
from .valid_ids_and_names import name_of, new_program_id

if TYPE_CHECKING:
    from .resume_file import ResumeFile


P = ParamSpec("P")
R = TypeVar("R")


class _Inherit:
    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = _Inherit()
"""Default of the argument ``parent``: the program around the running code, if any, is the parent."""


class ProgramScope(AsyncBlock[Program]):
    """The result of ``program()``. As a ``with`` block, it runs the block as one program. As a decorator, it
    runs each call of the function as a program. If several tasks or threads enter the same scope at the same
    time, each of them runs a program of its own."""

    __slots__ = ("_entered", "_parent_id", "make")

    def __init__(self, make: Callable[[], Program], parent_id: str | None = None) -> None:
        """``parent_id``: id of the parent that the caller named, if any."""
        self.make = make
        """Function that returns a new program, not started yet. Adapters that cannot use ``with`` call it."""
        self._parent_id = parent_id
        # Adding and removing are atomic, so that threads cannot take each other's program.
        self._entered: dict[Program, Token[ExecutionContext] | None] = {}
        """The program of each task or thread in the block, with the token that restores its context. The
        token is ``None`` after ``_leave_context``."""

    def open(self) -> Program:
        """Start a program for the whole process and return it. Until its ``end()``, all code outside of other
        programs belongs to it, in every thread. For consoles and notebooks, where no ``with`` block can span
        several cells.

        ``open`` first ends the programs that earlier calls of ``open`` started, as ``cancelled``. So a
        notebook cell can run again. If ``parent`` is one of these programs, it stays open, and so do the
        programs opened before it. A program still open when the process exits ends as ``cancelled``.
        """
        while process_programs and process_programs[-1].id != self._parent_id:
            process_programs.pop().end("cancelled")
        program = self.make().start()
        process_programs.append(program)
        return program

    def __enter__(self) -> Program:
        program = self.make().start()
        program.outer_context = live_context()
        # A child starts without step and tool call, since those around it belong to its parent.
        self._entered[program] = current_context.set(ExecutionContext(program))
        return program

    def _take_entry(self) -> tuple[Program | None, Token[ExecutionContext] | None]:
        """Remove and return the entry of the task or thread that runs this code. Take the newest entry if the
        code is in no program of this block. This happens if another context closes a generator."""
        program = current_context.get().program
        while program is not None:
            try:
                return program, self._entered.pop(program)
            except KeyError:  # a generator that was left early, in this block, keeps its program current
                program = program.outer_context.program
        with suppress(KeyError):  # there is no entry, or another context has just taken the last one
            return self._entered.popitem()
        return None, None

    def _leave_context(self) -> None:
        """Restore the context that was current before the block (see ``scoped_functions.Scope``)."""
        program, token = self._take_entry()
        if program is not None:
            self._entered[program] = None
        if token is not None:
            reset_context(token)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        program, token = self._take_entry()
        if token is not None:
            reset_context(token)
        if program is not None:
            program.end(status_of(error))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        from .scoped_functions import scoped

        make = self.make
        return scoped(function, lambda: ProgramScope(make))


@overload
def program(name: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def program(
    name: str | None = None,
    *,
    id: str | None = None,
    agent_type: str | None = None,
    parent: Program | str | _Inherit | None = INHERIT,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    blocks_parent: bool | None = None,
    max_steps: float | None = None,
    tenant: str | None = None,
    aeg: Aeg | None = None,
    resume: str | os.PathLike[str] | None = None,
    heartbeat: bool = True,
) -> ProgramScope: ...


def program(
    name: str | Callable[..., Any] | None = None,
    *,
    id: str | None = None,
    agent_type: str | None = None,
    parent: Program | str | _Inherit | None = INHERIT,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    blocks_parent: bool | None = None,
    max_steps: float | None = None,
    tenant: str | None = None,
    aeg: Aeg | None = None,
    resume: str | os.PathLike[str] | None = None,
    heartbeat: bool = True,
) -> Any:
    """Return a scope that runs code as one program: for ``with``, ``async with``, or as a decorator of sync
    and async functions and generators. ``@sojourn.program`` works with and without parentheses.

    - ``name`` is a label. Programs with the same ``agent_type`` are taken to behave alike: the server
      learns from all of them.
    - ``id`` resumes a known program; without it a fresh id is made.
    - ``parent`` is by default the program around the code; ``None`` means no parent.
    - ``priority`` to ``blocks_parent`` are hints for every request of the program; a ``step()`` may give
      others (see there). ``deadline_s`` counts from the program's start. ``blocks_parent`` says whether the
      parent waits for this program.
    - ``max_steps`` is the maximum number of turns, such as a limit of the agent's loop. Each request states
      how many of them are left, unless a ``step()`` around it gives its own ``expected_steps_left``.
    - ``tenant`` is the tenant that the program runs for, ``aeg`` is its Agent Execution Graph.
    - ``resume`` names a file that holds the id until the run ends cleanly, so that a restarted client
      continues the same program (see ``sojourn.resume_file``).
    - ``heartbeat=False`` sends no heartbeats.

    Raises ``ArgumentError`` for an invalid id or hint, or an unusable resume file.

    If no ``with`` block can span the run, as in a notebook, call ``p = sojourn.program("x").open()`` and
    later ``p.end()``.

    A ``with`` block inside a *generator* also covers the consumer's code between two items, as any context
    variable does. The decorator covers only the generator's own code.
    """
    if callable(name) or isinstance(name, classmethod):
        label = getattr(name, "__name__", None)
        return ProgramScope(lambda: _make_program(label))(name)
    _check_id("id", id)
    if isinstance(parent, str):
        _check_id("parent", parent)
    elif parent is not None and not isinstance(parent, (Program, _Inherit)):
        raise ArgumentError(f"parent is {parent!r}; expected a Program, an id or None")
    if tenant is not None and not isinstance(tenant, str):
        raise ArgumentError(f"tenant is {tenant!r}; expected a string")
    if aeg is not None and not isinstance(aeg, Aeg):
        raise ArgumentError(f"aeg is {aeg!r}; expected a sojourn.Aeg")
    path = None if resume is None else os.fspath(resume)
    if path is not None:
        if id is not None:
            raise ArgumentError("both id and resume are given; expected one, since the file holds the id")
        if not isinstance(path, str) or not path:
            raise ArgumentError(f"resume is {resume!r}; expected the path of a file, as a string")
        from .resume_file import check

        path = check(path)  # now, because a mistake must not raise when the agent runs
    hints: dict[str, Any] = {
        "priority": priority,
        "deadline_s": deadline_s,
        "expected_output_length": expected_output_length,
        "kv_retention_ttl_s": kv_retention_ttl_s,
        "blocks_parent": blocks_parent,
    }
    plain = all(value is None for value in hints.values())
    try:
        checked_hints(**hints)
        check_number("max_steps", max_steps, "steps")
    except ValueError as error:
        raise ArgumentError(str(error)) from None

    def make() -> Program:
        # Deadlines count from the start of each run, not from the moment of decoration.
        return _make_program(
            name,
            parent,
            id=id,
            agent_type=agent_type,
            hints=NO_HINTS if plain else checked_hints(**hints),
            heartbeat=heartbeat,
            tenant=tenant,
            aeg=aeg,
            resume=path,
            max_steps=max_steps,
        )

    named = parent.id if isinstance(parent, Program) else parent
    return ProgramScope(make, named if isinstance(named, str) else None)


def current_program() -> Program | None:
    """Return the program around the running code, or ``None`` if there is none. Requests made outside of any
    program belong to the process's own program."""
    return find_context(runtime.session().counters)[0].program


def _make_program(
    name: str | None,
    parent: Program | str | _Inherit | None = INHERIT,
    *,
    id: str | None = None,
    agent_type: str | None = None,
    tenant: str | None = None,
    resume: str | None = None,
    **others: Any,
) -> Program:
    file = None if resume is None else _resume_file(resume)
    call_id: str | None = None
    if isinstance(parent, _Inherit):
        here = find_context(runtime.session().counters)[0]
        parent = here.program
        if here.tool_call is not None and here.tool_call.program is parent:
            call_id = here.tool_call.call_id
    return Program(
        file.id if file is not None else ProgramId(id) if id else new_program_id(),
        name=None if name is None else name_of(name),
        agent_type=None if agent_type is None else name_of(agent_type),
        parent=parent,
        call_id=call_id,
        tenant=name_of(tenant) if tenant else parent.tenant if isinstance(parent, Program) else None,
        resume=file,
        **others,
    )


def _resume_file(path: str) -> ResumeFile | None:
    """Return the locked resume file, or ``None`` if it cannot be used. Never raises, since the agent is about
    to run."""
    session = runtime.session()
    if session.disabled:
        return None
    from .resume_file import ResumeBusy, ResumeFile

    try:
        return ResumeFile(path)
    except ResumeBusy:
        session.counters.add("resume_busy")
        logger.warning("another run holds %r; this run gets a fresh id", path)
    except ArgumentError as error:
        session.counters.add("resume_failed")
        logger.warning("%s; this run gets a fresh id", error)
    return None


def _check_id(field: str, value: str | None) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise ArgumentError(f"{field} is {value!r}; expected a string")
    if (problem := id_problem(value)) is not None:
        raise ArgumentError(f"{field} {problem}")
