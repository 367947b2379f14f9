"""Requests that wait at a gateway: for any replica, or for the one they are to go to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .programs import Program


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that the gateway has."""

    request_id: str
    number: int
    tenant: str
    program: Program | None
    context_tokens: int
    size_tokens: int
    since_s: float
    output_tokens: int = 0
    prefix: tuple[int, ...] = ()
    replica_id: str | None = None
    """Where it waits to be sent, or was sent; ``None``: it waits for any."""
    sent_s: float | None = None
    began: bool = False
    failures: int = 0
    """Replicas that did not answer it."""
    reason: str = ""
    moved_from: str | None = None


class Line:
    """Those who wait for the same, by tenant, each tenant's in order of arrival."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Waiting]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting]:
        for waiting in self._tenants.values():
            yield from waiting.values()

    @property
    def tenants(self) -> list[str]:
        """Of whom somebody waits."""
        return list(self._tenants)

    def first(self, tenant: str) -> Waiting:
        """The one of a tenant's that came first."""
        return next(iter(self._tenants[tenant].values()))

    def add(self, waiting: Waiting) -> None:
        """At the end of its tenant's."""
        self._tenants.setdefault(waiting.tenant, {})[waiting.request_id] = waiting
        self._count += 1

    def add_back(self, waiting: Waiting) -> None:
        """Where its arrival puts it: it was sent before, in vain."""
        own = self._tenants.pop(waiting.tenant, {})
        later = [other for other in own.values() if other.number > waiting.number]
        for other in later:
            del own[other.request_id]
        for other in (waiting, *later):
            own[other.request_id] = other
        self._tenants[waiting.tenant] = own
        self._count += 1

    def remove(self, waiting: Waiting) -> bool:
        """Take one out; False: it does not wait here."""
        own = self._tenants.get(waiting.tenant)
        if own is None or own.pop(waiting.request_id, None) is None:
            return False
        self._count -= 1
        if not own:
            del self._tenants[waiting.tenant]
        return True
