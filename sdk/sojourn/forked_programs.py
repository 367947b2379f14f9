"""Programs in a forked child. A program that was open at the fork ends in the child when it ends in the
parent. Otherwise a worker of a process pool would count all its later jobs for the program that started the
pool.
"""

from __future__ import annotations

from typing import Any

from . import ended_programs_for_forks, process_hooks, runtime
from .program import Program, current_context, process_programs

_has_ended: Any = Program.__dict__["has_ended"]
"""The slot ``has_ended`` of ``Program``, which the property of ``InheritedProgram`` hides."""


class InheritedProgram(Program):
    """A program that was open in the parent process at the fork. It ends in this process when it ends in the
    parent."""

    __slots__ = ()

    @property
    def has_ended(self) -> bool:
        shared = self._shared
        return _has_ended.__get__(self) or (shared is not None and shared.has(self._number))

    @has_ended.setter
    def has_ended(self, value: bool) -> None:
        _has_ended.__set__(self, value)

    @property
    def is_open(self) -> bool:
        return super().is_open and not self.has_ended


def _after_fork() -> None:
    ended_programs_for_forks.forget_parent()
    session = runtime.live
    programs: list[Any] = [*process_programs, *(session.heartbeats.programs() if session is not None else ())]
    inner = current_context.get().program
    while inner is not None:
        programs.append(inner)
        inner = inner.outer_context.program
    for program in programs:
        if type(program) is Program and program.is_open:
            program.__class__ = InheritedProgram


def watch_forks() -> None:
    """Register the fork hook. From then on, a program that is open at a fork ends in the child when it ends
    in this process. Call this once, before the first fork."""
    process_hooks.register_at_fork(after_in_child=_after_fork)
