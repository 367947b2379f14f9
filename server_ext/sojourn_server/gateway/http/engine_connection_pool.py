"""The gateway's connections to engines for clients' requests: opens them, and keeps idle ones.

These requests use no HTTP client library. Each library that was tried costs more than the rest of the gateway
together (``docs/decisions/0005-own-engine-connections.md``). The gateway's own queries use aiohttp.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from ...metrics.rate_limited_log import RateLimitedLog
from .cancel_scope import CancelScope
from .engine_connection import EngineConnectError, EngineConnection, EngineResponse, GatewayConnectError
from .proxy_headers import RawHeaders

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds until a new connection is open, including name lookup and TLS."""
NEXT_ADDRESS_S = 0.25
"""Seconds to wait for one address of an engine's host name before the next address is tried too (RFC 8305).
Otherwise a first address that drops packets, such as an IPv6 address, would use up ``CONNECT_TIMEOUT_S``."""
IDLE_CONNECTION_S = 3.0
"""Maximum idle seconds of a connection that is used again. vLLM closes connections after five idle seconds,
and a write to a closing connection costs a retry."""
OWN_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL))
"""``errno`` values that mean a shortage in the gateway's process or machine, not a fault of the engine."""
_NOT_IN_TARGET = re.compile(rb"[\x00-\x20\x7f]")
_AddressInfo = tuple[int, int, int, str, Any]
"""An address as ``getaddrinfo`` returns it."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Where an engine listens."""

    host: str
    port: int
    is_tls: bool
    host_header: bytes
    is_name: bool
    """Whether the host is a name, which may have several addresses."""


@lru_cache(maxsize=1024)
def _endpoint(url: str) -> _Endpoint:
    parts = urlsplit(url)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    name = f"[{host}]" if ":" in host else host.encode("idna").decode()
    header = name if parts.port is None else f"{name}:{parts.port}"
    try:
        ipaddress.ip_address(host)
        is_name = False
    except ValueError:
        is_name = True
    return _Endpoint(host, parts.port or (443 if is_tls else 80), is_tls, header.encode(), is_name)


@lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def request_head(method: bytes, target: bytes, host: bytes, headers: RawHeaders, body_bytes: int) -> bytes:
    """Return the request line and headers, and the empty line after them. ``target``: path and query. Raises
    ``ValueError`` if a part has a character that would end its line."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (method, target, host)]
    lines += [b"%b: %b" % pair for pair in headers]
    lines.append(b"content-length: %d" % body_bytes)
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
        raise ValueError("a header has a line break or a null byte; expected neither")
    if _NOT_IN_TARGET.search(target):
        raise ValueError("the target has a space or a control character; expected neither")
    return head + b"\r\n\r\n"


class EngineConnectionPool:
    """All connections of a gateway for clients' requests. For use in one event loop.

    The pool does not limit the number of connections, because the routing core bounds the number of requests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate_limited_log = RateLimitedLog(logger, clock)
        self._open: dict[EngineConnection, _Endpoint] = {}
        self._idle: dict[_Endpoint, dict[EngineConnection, float]] = {}
        """Idle connections of each engine, with the time at which each became idle. Oldest first."""
        self._closing: asyncio.TimerHandle | None = None
        """Next call of ``_close_idle``."""

    async def request(
        self, url: str, method: bytes, target: bytes, headers: RawHeaders, body: bytes, *, reuse: bool = True
    ) -> EngineResponse:
        """Send a request to the engine at ``url``. Return the response once its headers have arrived.

        ``target``: path and query. ``reuse``: whether an idle connection may be used. If not, the request
        gets a new connection, which is closed after the response. Raises ``EngineConnectionError`` or
        ``GatewayConnectError``, and ``ValueError`` for invalid headers.
        """
        endpoint = _endpoint(url)
        if not reuse:
            headers = [*headers, (b"connection", b"close")]
        head = request_head(method, target, endpoint.host_header, headers, len(body))
        idle_s = 0.0
        connection = None
        if reuse:
            connection, idle_s = self._take(endpoint)
        if connection is None:
            connection = await self._connect(endpoint)
        response = connection.send(head, body, idle_s)
        try:
            await response.headers()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        """Close all connections, even those in use."""
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()

    # -- ConnectionOwner --------------------------------------------------------------

    def release(self, connection: EngineConnection) -> None:
        """Keep a connection for further requests."""
        self._idle.setdefault(self._open[connection], {})[connection] = self._clock()
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.call_later(IDLE_CONNECTION_S, self._close_idle)

    def lost(self, connection: EngineConnection) -> None:
        """Forget a connection."""
        endpoint = self._open.pop(connection, None)
        idle = self._idle.get(endpoint) if endpoint is not None else None
        if idle is not None:
            idle.pop(connection, None)

    # -- internals --------------------------------------------------------------------

    def _take(self, endpoint: _Endpoint) -> tuple[EngineConnection | None, float]:
        """Take the engine's connection that became idle last. Return it (or ``None``) and its idle
        seconds."""
        idle = self._idle.get(endpoint)
        while idle:
            connection, since_s = idle.popitem()
            idle_s = self._clock() - since_s
            if connection.is_open and idle_s < IDLE_CONNECTION_S:
                return connection, idle_s
            connection.abort()
        return None, 0.0

    async def _connect(self, endpoint: _Endpoint) -> EngineConnection:
        """Open a connection. Raises ``EngineConnectError`` or ``GatewayConnectError``."""
        connection = EngineConnection(self)
        tls: dict[str, Any] = {}
        if endpoint.is_tls:
            tls = {"ssl": _tls_context(), "server_hostname": endpoint.host}
        loop = asyncio.get_running_loop()
        self._open[connection] = endpoint
        try:
            with CancelScope() as scope:
                scope.end_after(CONNECT_TIMEOUT_S)
                if endpoint.is_name:
                    kind = socket.SOCK_STREAM
                    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=kind)
                    connected = await _connect_to_any(found)
                    await loop.create_connection(lambda: connection, sock=connected, **tls)
                else:
                    await loop.create_connection(lambda: connection, endpoint.host, endpoint.port, **tls)
                return connection
        except OSError as error:
            self._drop(connection)
            if error.errno in OWN_ERRORS:
                message = "the gateway cannot open a connection to an engine: %s"
                self._rate_limited_log.log(logging.ERROR, message, error)
                raise GatewayConnectError(message % error) from None
            raise EngineConnectError(str(error) or type(error).__name__) from None
        except BaseException:
            self._drop(connection)
            raise
        self._drop(connection)
        raise EngineConnectError(f"it was not open after {CONNECT_TIMEOUT_S:g} s")

    def _drop(self, connection: EngineConnection) -> None:
        """Close and forget a connection, open or not."""
        connection.abort()
        self.lost(connection)

    def _close_idle(self) -> None:
        """Close connections that have been idle for ``IDLE_CONNECTION_S``. Schedule the next call if any are
        left."""
        now, next_s = self._clock(), None
        for endpoint, idle in list(self._idle.items()):
            for connection, since_s in list(idle.items()):
                if now - since_s < IDLE_CONNECTION_S:
                    next_s = since_s if next_s is None else min(next_s, since_s)
                    break
                del idle[connection]
                connection.abort()
            if not idle:
                del self._idle[endpoint]
        self._closing = None
        if next_s is not None:
            after_s = next_s + IDLE_CONNECTION_S - now
            self._closing = asyncio.get_running_loop().call_later(after_s, self._close_idle)


async def _connect_to_any(addresses: Sequence[_AddressInfo]) -> socket.socket:
    """Connect to the first address that answers. Raises ``OSError`` if all addresses fail.

    The next address is tried after a failure, or after ``NEXT_ADDRESS_S`` without an answer. Earlier attempts
    go on meanwhile.
    """
    left, errors = list(addresses), []
    tried: list[asyncio.Task[socket.socket]] = []
    chosen = None
    try:
        while left or not all(task.done() for task in tried):
            if left:
                tried.append(asyncio.ensure_future(_connect_to(left.pop(0))))
            running = [task for task in tried if not task.done()]
            timeout_s = NEXT_ADDRESS_S if left else None
            done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    chosen = task
                    return task.result()
                errors.append(error)
    finally:
        for task in tried:
            if task is not chosen and not task.cancel() and not task.cancelled() and not task.exception():
                task.result().close()
    # If this machine cannot use an address, such as one of IPv6, an error of another address says more.
    raise next((error for error in errors if getattr(error, "errno", None) not in OWN_ERRORS), errors[0])


async def _connect_to(address: _AddressInfo) -> socket.socket:
    """Connect to one address. Raises ``OSError``."""
    family, kind, protocol, _, where = address
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, where)
    except BaseException:
        opened.close()
        raise
    return opened
