"""Reads request bodies from clients, with limits per body, per tenant and in total."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .cancel_scope import CancelScope
from .client_apis import GATEWAY_FULL, RequestRejected

AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_BODY_BYTES = 64 << 20
"""Default maximum bytes of one body."""
MAX_HELD_BYTES = 2 << 30
"""Default maximum of the total bytes of all bodies. A body is kept until its answer ends, in case it has to
be sent again."""
MAX_TENANT_SHARE = 0.5
"""Maximum fraction of the total bytes that one tenant may use, if there are several tenants."""
BODY_TIMEOUT_S = 60.0
"""Maximum seconds without new bytes of a body. The whole body may take this time, plus its bytes ÷
``MIN_BYTES_PER_S``."""
MIN_BYTES_PER_S = 256 << 10
"""Minimum rate, in bytes per second, at which a long body must arrive."""
BUDGET_RETRY_S = 2.0
"""``Retry-After``, in seconds, if the gateway holds too many bodies."""
LARGE_BODY_BYTES = 1 << 20
"""Bodies of at least this many bytes are processed in a thread, so that other requests do not wait."""
BODY_THREADS = 2
"""Number of threads that process large bodies. More threads would not be faster, because Python runs one
thread at a time. Each thread costs a few MiB in the allocator."""

TRIM_AFTER_S = 5.0
"""Seconds after which free memory is returned to the operating system. They count from the end of processing
a large body."""

ResultT = TypeVar("ResultT")
_body_threads = ThreadPoolExecutor(BODY_THREADS, thread_name_prefix="sojourn-body")
_trims_in: asyncio.AbstractEventLoop | None = None
"""The event loop in which a call of ``trim_memory`` is due; ``None``: no call is due."""


async def process_body(body: bytes, process: Callable[[], ResultT]) -> ResultT:
    """Call ``process``, a function that works on ``body``, and return its result. For a large body, call it
    in a thread."""
    if len(body) < LARGE_BODY_BYTES:
        return process()
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_body_threads, process)
    finally:
        _trim_later(loop)


def trim_memory() -> bool:
    """Return free memory of the C allocator to the operating system. Return False if the C library has no
    function for this (musl, macOS)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim(0)
    return True


def _trim_later(loop: asyncio.AbstractEventLoop) -> None:
    """Call ``trim_memory`` in a thread after ``TRIM_AFTER_S``. No effect if a call is already due.

    Without such calls, the allocator keeps the memory of large bodies. The process then seems to grow for
    hours.
    """
    global _trims_in
    if _trims_in is not loop:
        _trims_in = loop
        loop.call_later(TRIM_AFTER_S, _trim, loop)


def _trim(loop: asyncio.AbstractEventLoop) -> None:
    global _trims_in
    _trims_in = None
    with contextlib.suppress(RuntimeError):  # the interpreter exits
        loop.run_in_executor(_body_threads, trim_memory)


class BodyBudget:
    """Counts the bytes of all bodies that a gateway holds, and enforces the limits. For use in one event
    loop."""

    def __init__(
        self,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        *,
        several_tenants: bool = False,
    ) -> None:
        """``several_tenants``: whether to limit each tenant to ``MAX_TENANT_SHARE`` of ``max_held_bytes``.
        Raises ``ValueError`` if a tenant could not hold one body of ``max_body_bytes``."""
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        share = MAX_TENANT_SHARE if several_tenants else 1.0
        self._max_tenant_bytes = int(max_held_bytes * share)
        if not 0 < max_body_bytes <= self._max_tenant_bytes:
            raise ValueError(
                f"max_body_bytes is {max_body_bytes}, and one tenant may hold {self._max_tenant_bytes} "
                f"bytes; expected 0 < max_body_bytes ≤ {self._max_tenant_bytes}"
            )
        self.held_bytes = 0
        self._held_of: dict[str, int] = {}
        """Bytes held by each tenant. Tenants without bodies are absent."""

    def begin(self, tenant: str, max_bytes: int | None = None) -> RequestBody:
        """Create the ``RequestBody`` of one request. ``max_bytes``: a lower limit for this body; ``None``:
        only ``max_body_bytes`` applies."""
        return RequestBody(self, tenant, min(max_bytes or self._max_body_bytes, self._max_body_bytes))

    def check(self, tenant: str, more_bytes: int) -> None:
        """Check that a tenant may hold ``more_bytes`` more. Raises ``RequestRejected`` if not."""
        own_bytes = self._held_of.get(tenant, 0) + more_bytes
        if own_bytes > self._max_tenant_bytes or self.held_bytes + more_bytes > self._max_held_bytes:
            message = "the gateway holds too many request bodies; try again"
            raise RequestRejected(503, GATEWAY_FULL, message, BUDGET_RETRY_S)

    def add(self, tenant: str, more_bytes: int) -> None:
        """Add ``more_bytes`` to the bytes that a tenant holds, without a check. A negative number releases
        bytes."""
        self.held_bytes += more_bytes
        left = self._held_of.get(tenant, 0) + more_bytes
        if left:
            self._held_of[tenant] = left
        else:
            self._held_of.pop(tenant, None)


class RequestBody:
    """The body of one request. It counts towards the limits from its first byte until ``free`` is called."""

    def __init__(self, bodies: BodyBudget, tenant: str, max_bytes: int) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def read(self, declared: str | None, receive: AsgiReceive) -> bytes | None:
        """Read the body; ``None``: the client disconnected. Raises ``RequestRejected`` if the body exceeds a
        limit or arrives too slowly. ``declared``: value of ``Content-Length``; ``None``: no such header."""
        if declared is not None and declared.isascii() and declared.isdigit():
            # Reject a large body before the client sends it. The bytes that arrive are counted in any case.
            self._check(int(declared[:20]))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first, rest = b"", bytearray()
        with CancelScope() as leave:
            while True:
                left_s = began_s + BODY_TIMEOUT_S + self._held_bytes / MIN_BYTES_PER_S - loop.time()
                leave.end_after(min(BODY_TIMEOUT_S, max(0.0, left_s)))
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
        why = f"after {loop.time() - began_s:.0f} s the body has not arrived"
        raise RequestRejected(408, "slow_body", why)

    def _check(self, more_bytes: int) -> None:
        """Check that the body may grow by ``more_bytes``. Raises ``RequestRejected`` if not."""
        if self._held_bytes + more_bytes > self._max_bytes:
            raise RequestRejected(413, "body_too_large", f"the body is larger than {self._max_bytes} bytes")
        self._bodies.check(self._tenant, more_bytes)

    def set_size(self, body_bytes: int) -> None:
        """Count this body as ``body_bytes`` from now on, because another body has replaced it. Limits do not
        apply."""
        self._bodies.add(self._tenant, body_bytes - self._held_bytes)
        self._held_bytes = body_bytes

    @contextlib.contextmanager
    def counting_copy(self, body_bytes: int) -> Iterator[None]:
        """Context manager that counts a copy of ``body_bytes`` during its block. The copy is a second body
        made from this one. Limits do not apply."""
        self._bodies.add(self._tenant, body_bytes)
        try:
            yield
        finally:
            self._bodies.add(self._tenant, -body_bytes)

    def free(self) -> None:
        """Stop counting this body. Call this when the request has ended."""
        self.set_size(0)
