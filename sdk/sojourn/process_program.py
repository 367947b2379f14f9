"""The process's own program, to which requests outside of any other program belong, and what happens to the
programs of the whole process when it exits."""

from __future__ import annotations

import sys

from . import runtime
from .config import claim
from .errors import status_of
from .ids import ProgramId
from .program import Program, process_programs
from .sdk_logger import logger
from .valid_ids_and_names import new_program_id, process_name


def process_program(session: runtime.Session, *, asks: bool = False) -> Program:
    """Return the process's own program, made at the first call.

    Its id is the value of ``SOJOURN_PROGRAM_ID`` if that variable is set, else a fresh id. The program is
    implicit (``Program.implicit``) if the variable is not set and the process does not count as one run
    (``session.counts_as_one_run``). ``asks``: True for a new LLM request. If ``asks`` is True and another
    request still waits for its answer, the process stops counting as one run.

    Child processes inherit ``SOJOURN_PROGRAM_ID``, so several processes may share one program. Only the first
    process that uses the id reports the program's end.
    """
    found = session.program
    if isinstance(found, Program):
        if not (asks and session.counts_as_one_run and _awaits_answer(found)):
            return found
        stop_counting_as_one_run(session)
    with session.exclusive():  # so that the start event precedes the program's other events
        found = session.program
        if isinstance(found, Program):
            return found
        given = session.config.program_id if session.config else None
        own = session.counts_as_one_run
        fresh = Program(
            ProgramId(given) if given else new_program_id(),
            name=process_name() if own else None,
            heartbeat=given is not None or own,
            implicit=given is None and not own,
            of_process=True,
            ends=given is None or claim(given),
        )
        session.program = fresh.start()
    return fresh


def _awaits_answer(program: Program) -> bool:
    """Return whether a request of ``program`` still waits for the first byte of its answer."""
    return any(getattr(request, "awaits_answer", False) for request in tuple(program.open_requests))


def stop_counting_as_one_run(session: runtime.Session) -> None:
    """Stop counting the process as one run, with a warning the first time."""
    if session.leave_own_program():
        logger.warning(
            "requests of this process overlap, so the process no longer counts as one agent run; "
            "open a program for each run, with sojourn.program()"
        )


def _end_process_programs() -> None:
    while process_programs:
        process_programs.pop().end("cancelled")
    own = runtime.session().program
    if isinstance(own, Program):
        own.end(status_of(_uncaught_error()))


def _uncaught_error() -> BaseException | None:
    """Return the exception that ends the process; ``None`` if the process ends by ``sys.exit`` or without an
    exception. Always ``None`` in an interactive interpreter, where ``sys.last_value`` may come from any
    earlier line."""
    if hasattr(sys, "ps1"):
        return None
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


runtime.before_exit.append(_end_process_programs)
