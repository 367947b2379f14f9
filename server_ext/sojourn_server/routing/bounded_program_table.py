"""The programs that a routing core knows: a table of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

Key = tuple[str, str]
"""Tenant and program id. Two tenants may use the same id for different programs."""

MAX_PROGRAMS = 200_000
"""Default maximum number of programs in a table."""


MAX_EXPIRED_PROGRAMS = 1000
"""Maximum number of programs that one call of ``silent_since`` returns. A core removes them in one tick,
which takes about a millisecond. Later ticks remove the rest. A full table at once takes 0.3 s."""


class TableEntry(Protocol):
    """What a table needs to know of a program."""

    key: Key
    last_s: float
    """Time of the program's last event, on the core's clock."""

    @property
    def is_idle(self) -> bool:
        """Whether the program has no open request and may be removed."""
        ...


Program = TypeVar("Program", bound=TableEntry)


class BoundedProgramTable(Generic[Program]):
    """Programs that have not ended, least recently active first.

    If there are more than ``most`` programs, one idle program is removed: the least recently active idle
    program of the tenant with the most programs. If that tenant has no idle program, the tenant with the next
    most programs loses one. So a tenant with many programs does not displace other tenants' programs.
    Programs with open requests are never removed, so their number may exceed ``most``.
    """

    def __init__(self, most: int = MAX_PROGRAMS) -> None:
        self._most = most
        self._programs: OrderedDict[Key, Program] = OrderedDict()
        self._of: dict[str, OrderedDict[Key, Program]] = {}
        """The same programs by tenant."""

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def unordered(self) -> list[Program]:
        """Return all programs, in no certain order. This is much faster than the order of activity: a
        twentieth of the time for a full table."""
        return list(dict.values(self._programs))

    def get(self, key: Key | None) -> Program | None:
        """The program with this key; ``None``: unknown."""
        return self._programs.get(key) if key is not None else None

    def find(self, tenant: str | None, program_id: str) -> Program | None:
        """Return the program with this id; ``None``: unknown. If ``tenant`` is ``None``, return the most
        recently active program with this id, of any tenant."""
        tenants = self._of if tenant is None else (tenant,)
        found = [self._programs[key] for one in tenants if (key := (one, program_id)) in self._programs]
        return max(found, key=lambda program: program.last_s, default=None)

    def newest(self, tenant: str | None, most: int) -> tuple[list[Program], int]:
        """Return (programs of a tenant, number of all its programs). The first part has at most ``most``
        programs, most recently active first. If ``tenant`` is ``None``, both parts are about all tenants."""
        programs = self._programs if tenant is None else self._of.get(tenant, OrderedDict())
        return list(islice(reversed(programs.values()), most)), len(programs)

    def find_or_add(self, key: Key, new: Callable[[], Program], now: float) -> tuple[Program, Program | None]:
        """Find the program of a request, or add the program that ``new`` builds. Returns the program, and the
        program that was removed to make room (``None``: no program was removed)."""
        program = self._programs.get(key)
        if program is not None:
            self.touched(program, now)
            return program, None
        program = new()
        self.add(program)
        forgotten = self._oldest_idle(program) if len(self._programs) > self._most else None
        if forgotten is not None:
            self.remove(forgotten.key)
        return program, forgotten

    def _oldest_idle(self, but: Program) -> Program | None:
        """Return the program to remove in order to make room. It is never ``but``. ``None``: all programs
        except ``but`` have open requests."""
        for of_tenant in sorted(self._of.values(), key=len, reverse=True):
            for program in of_tenant.values():
                if program.is_idle and program is not but:
                    return program
        return None

    def add(self, program: Program) -> None:
        """Add a program as the most recently active one. Removes no other program."""
        self._programs[program.key] = program
        self._of.setdefault(program.key[0], OrderedDict())[program.key] = program

    def touched(self, program: Program, now: float) -> None:
        """Record that an event of a program arrived at ``now``, which makes the program the most recently
        active one."""
        program.last_s = now
        for programs in (self._programs, self._of[program.key[0]]):
            programs.move_to_end(program.key)

    def remove(self, key: Key) -> None:
        """Remove a program. No effect if it is unknown."""
        if self._programs.pop(key, None) is None:
            return
        of_tenant = self._of[key[0]]
        del of_tenant[key]
        if not of_tenant:
            del self._of[key[0]]

    def silent_since(self, before_s: float) -> list[Program]:
        """Return the idle programs whose last event was before the time ``before_s``: the
        ``MAX_EXPIRED_PROGRAMS`` least recently active ones."""
        found: list[Program] = []
        for program in self._programs.values():
            if program.last_s >= before_s or len(found) >= MAX_EXPIRED_PROGRAMS:
                break
            if program.is_idle:
                found.append(program)
        return found
