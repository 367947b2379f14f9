"""Bodies of requests: read from clients, bounded each and in sum."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from .leaving import Leave

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_BODY_BYTES = 64 << 20
MAX_HELD_BYTES = 2 << 30
"""Of all requests that wait or are answered: each is kept until then, to go elsewhere if its replica dies."""
MAX_TENANT_SHARE = 0.5
"""What one of several tenants holds of that at most: one that floods leaves the other half."""
BODY_TIMEOUT_S = 60.0
"""Without a byte; and for all of it so long, and what it takes at the least rate."""
LEAST_BYTES_PER_S = 256 << 10
FULL_RETRY_S = 2.0


class BodyRefused(Exception):
    """A body is not taken; the text says why."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Bodies:
    """All that one gateway holds. Used in one event loop."""

    def __init__(
        self,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        *,
        several_tenants: bool = False,
    ) -> None:
        """Raises ``ValueError`` for bounds that let no body in."""
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        share = MAX_TENANT_SHARE if several_tenants else 1.0
        self._max_tenant_bytes = int(max_held_bytes * share)
        if not 0 < max_body_bytes <= self._max_tenant_bytes:
            raise ValueError(
                f"bodies of {max_body_bytes} bytes, of one tenant {self._max_tenant_bytes}; expected 0 < one "
                "body ≤ a tenant's"
            )
        self.held_bytes = 0
        self._held_of: dict[str, int] = {}
        """By tenant; those that hold nothing are left out."""

    def begin(self, tenant: str, max_bytes: int | None = None) -> Body:
        """One request's. ``max_bytes``: of it alone, where that is less than any may have."""
        return Body(self, tenant, min(max_bytes or self._max_body_bytes, self._max_body_bytes))

    def check(self, tenant: str, more_bytes: int) -> None:
        """Whether there is room for so many more. Raises ``BodyRefused``."""
        own_bytes = self._held_of.get(tenant, 0) + more_bytes
        if own_bytes > self._max_tenant_bytes or self.held_bytes + more_bytes > self._max_held_bytes:
            message = "the requests that are on their way fill the gateway; try again"
            raise BodyRefused(503, "gateway_full", message, FULL_RETRY_S)

    def add(self, tenant: str, more_bytes: int) -> None:
        """So many more are held; less than 0: so many fewer."""
        self.held_bytes += more_bytes
        left = self._held_of.get(tenant, 0) + more_bytes
        if left:
            self._held_of[tenant] = left
        else:
            self._held_of.pop(tenant, None)


class Body:
    """One request's, from its first byte until ``free``."""

    def __init__(self, bodies: Bodies, tenant: str, max_bytes: int) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def read(self, declared: str | None, receive: Receive) -> bytes | None:
        """All of it; ``None``: the client went away. ``declared``: its length as the client says, if it does.
        Raises ``BodyRefused``."""
        if declared is not None and declared.isascii() and declared.isdigit():
            # Refused before it is sent, where its sender waits for that; what counts is what comes.
            self._check(int(declared[:20]))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first, rest = b"", bytearray()
        with Leave() as leave:
            while True:
                left_s = began_s + BODY_TIMEOUT_S + self._held_bytes / LEAST_BYTES_PER_S - loop.time()
                leave.after(min(BODY_TIMEOUT_S, max(0.0, left_s)))
                message = await receive()
                if message["type"] != "http.request":
                    return None
                part = message.get("body", b"")
                self._check(len(part))
                self._bodies.add(self._tenant, len(part))
                self._held_bytes += len(part)
                if self._held_bytes == len(part):
                    first = part
                else:
                    rest += part
                if not message.get("more_body"):
                    return first + rest if rest else first
        raise BodyRefused(408, "slow_body", f"after {loop.time() - began_s:.0f} s the body has not come")

    def _check(self, more_bytes: int) -> None:
        if self._held_bytes + more_bytes > self._max_bytes:
            raise BodyRefused(413, "body_too_large", f"the body is larger than {self._max_bytes} bytes")
        self._bodies.check(self._tenant, more_bytes)

    def becomes(self, body_bytes: int) -> None:
        """Another body of so many bytes is held in its place. Nobody is refused for what was made here."""
        self._bodies.add(self._tenant, body_bytes - self._held_bytes)
        self._held_bytes = body_bytes

    @contextlib.contextmanager
    def beside(self, body_bytes: int) -> Iterator[None]:
        """So many bytes made of it are held for a while, as ``becomes`` has it."""
        self._bodies.add(self._tenant, body_bytes)
        try:
            yield
        finally:
            self._bodies.add(self._tenant, -body_bytes)

    def free(self) -> None:
        """Nobody needs it any more."""
        self.becomes(0)
