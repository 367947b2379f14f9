"""Lists all programs of a routing core. For a core that is in another process, or has no table of programs by
tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from ...routing.routing_status import ProgramRouteStatus

PAUSE_FACTOR = 20
"""Length of the pause after a listing ÷ the time that the listing took."""
MAX_PAUSE_S = 10.0
"""Maximum seconds of the pause after a listing."""


class ListedPrograms:
    """The programs of one listing, with the queries of ``BoundedProgramTable``."""

    def __init__(self, programs: Sequence[ProgramRouteStatus]) -> None:
        """``programs``: most recently active first."""
        self._programs = programs
        self._by_tenant: dict[str, dict[str, ProgramRouteStatus]] = {}
        """The programs by tenant and program id."""
        for program in programs:
            self._by_tenant.setdefault(program.tenant, {})[program.program_id] = program

    def find(self, tenant: str | None, program_id: str) -> ProgramRouteStatus | None:
        """Return a tenant's program; ``None``: unknown. If ``tenant`` is ``None``, search all tenants, the
        most recently active programs first."""
        if tenant is not None:
            return self._by_tenant.get(tenant, {}).get(program_id)
        return next((one for one in self._programs if one.program_id == program_id), None)

    def newest(self, tenant: str | None, most: int) -> tuple[list[ProgramRouteStatus], int]:
        """Return at most ``most`` programs of a tenant, most recently active first, and the number of all its
        programs. If ``tenant`` is ``None``, include the programs of all tenants."""
        programs = self._programs if tenant is None else list(self._by_tenant.get(tenant, {}).values())
        return list(programs[:most]), len(programs)


class ProgramListing:
    """Lists all programs. Clients that wait for a list share one listing. A pause follows each listing.

    A listing of 100,000 programs stops the coordinator's decisions for 0.1 s. Without pauses, a tenant that
    requests lists in a loop would delay the requests of all tenants.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[ProgramRouteStatus]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read``: function that returns all programs, most recently active first. ``clock``: time in
        seconds."""
        self._read = read
        self._clock = clock
        self._free_s = clock()
        """Time at which the pause after the last listing ends."""
        self._next: asyncio.Task[ListedPrograms] | None = None
        """The listing that has not begun yet; ``None``: no client waits for one."""
        self._running: asyncio.Task[ListedPrograms] | None = None
        """The listing in progress, if any."""

    async def get(self) -> ListedPrograms:
        """Return a listing that begins after this call. Raises what ``read`` raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._list(self._running))
        return await asyncio.shield(self._next)

    async def _list(self, before: asyncio.Task[ListedPrograms] | None) -> ListedPrograms:
        """Wait until the listing ``before`` and the pause after it are over, then list the programs."""
        if before is not None:
            await asyncio.wait({before})
        await asyncio.sleep(max(0.0, self._free_s - self._clock()))
        self._running, self._next = self._next, None  # later clients wait for another listing
        began_s = self._clock()
        try:
            return ListedPrograms(await self._read())
        finally:
            self._running, now = None, self._clock()
            self._free_s = now + min(MAX_PAUSE_S, PAUSE_FACTOR * (now - began_s))
