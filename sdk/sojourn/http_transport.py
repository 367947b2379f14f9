"""The SDK's own HTTP client, separate from the clients that it instruments.

It uses the standard library, since that takes the least CPU time from the agent and tracers do not patch it.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import time
from base64 import b64encode
from functools import partial
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

KEEP_ALIVE_S = 4.0
"""Longest idle time after which a connection is used again. It is below 5 s, since vLLM's server closes a
connection that is idle for 5 s, and a batch sent at that moment would be lost."""
MAX_ANSWER_BYTES = 1024 * 1024
"""Longest answer that is read, in bytes."""


class HttpResponse(NamedTuple):
    """Status and body of a response."""

    status: int
    body: bytes


class ServerTransport(Protocol):
    """The network access that the event sender and the probe need. Methods raise on network failure."""

    def post(self, path: str, body: bytes) -> HttpResponse:
        """POST JSON to ``path`` below the server's root."""

    def get(self, path: str, timeout_s: float) -> HttpResponse:
        """GET ``path`` below the server's root."""

    def after_fork(self) -> None:
        """Drop the parent's connections without closing them."""

    def close(self) -> None:
        """Close the connections."""


class HttpTransport:
    """A ``ServerTransport`` over one connection, for one thread. Proxies and certificates come from the
    environment, as for the agent's own client. Raises ``ValueError`` for a proxy that is not HTTP.

    A timeout bounds a whole request, not each read, since a server may send its answer byte by byte. The
    look-up of the host's name and the connection to each of its addresses have their own time; the request's
    time starts after them."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "host": parts.netloc.rpartition("@")[2]}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        elif parts.username:
            self._headers["authorization"] = _basic(parts.username, parts.password)
        # Loading certificates takes tens of milliseconds; plain HTTP needs none.
        self._tls = tls_context() if self._secure else None
        self._proxy = _Proxy.of_environment(parts.scheme, self._host)
        if self._proxy is not None and not self._secure:
            self._prefix = f"{parts.scheme}://{self._headers['host']}{self._prefix}"
            self._headers |= self._proxy.headers
        self._connection: _Connection | None = None
        self._used_at_s = 0.0
        self._inherited: list[_Connection] = []
        # The first address look-up imports this codec. It is imported now, since a fork during the sender's
        # import would leave the child with an incomplete module.
        "x".encode("idna")

    def post(self, path: str, body: bytes) -> HttpResponse:
        return self._ask("POST", path, body, self._timeout_s)

    def get(self, path: str, timeout_s: float) -> HttpResponse:
        return self._ask("GET", path, None, timeout_s)

    def after_fork(self) -> None:
        # Kept, not closed, since closing a TLS connection would end the parent's session.
        if self._connection is not None:
            self._inherited.append(self._connection)
        self._connection = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> HttpResponse:
        if self._connection is not None and time.monotonic() - self._used_at_s > KEEP_ALIVE_S:
            self.close()
        reused = self._connection is not None
        end_s = time.monotonic() + timeout_s
        try:
            return self._once(method, path, body, end_s)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not reused:
                raise
        # The server had closed the idle connection. If it did read the events, it detects duplicates.
        return self._once(method, path, body, end_s)

    def _once(self, method: str, path: str, body: bytes | None, end_s: float) -> HttpResponse:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connected()
        try:
            connection.end_at(end_s)
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            answer = HttpResponse(response.status, response.read(MAX_ANSWER_BYTES))
            if not response.isclosed():
                self.close()  # the rest of a too long answer stays unread
        except BaseException:
            self.close()
            raise
        self._used_at_s = time.monotonic()
        return answer

    def _connected(self) -> _Connection:
        proxy = self._proxy
        host, port = (self._host, self._port) if proxy is None else (proxy.host, proxy.port)
        if self._tls is None:
            return _Connection(host, port)
        secure = _TlsConnection(host, port, context=self._tls)
        if proxy is not None:
            secure.set_tunnel(self._host, self._port, proxy.headers)
        return secure


class _Connection(http.client.HTTPConnection):
    """A connection whose requests raise ``TimeoutError`` at the time that ``end_at`` has set."""

    _end_s = 0.0
    _restart_s = 0.0
    """Seconds allowed for the request. The time starts with the first send on a new connection. 0: it has
    started."""

    def end_at(self, end_s: float) -> None:
        """Bound the next request. ``end_s``: monotonic seconds."""
        self._end_s = end_s
        self.response_class = cast("type[http.client.HTTPResponse]", partial(_response, end_s))

    def connect(self) -> None:
        # The time starts again twice: before a proxy is asked for a tunnel, and before the request itself.
        self.timeout = self._restart_s = left_s = _left_s(self._end_s)
        super().connect()
        self._restart_s = left_s

    def send(self, data: Any) -> None:
        # In pieces, since ``sendall`` on a TLS connection gives each piece the whole timeout.
        if self.sock is None:
            self.connect()
        if self._restart_s:
            self.end_at(time.monotonic() + self._restart_s)
            self._restart_s = 0.0
        unsent = memoryview(data)
        while unsent:
            self.sock.settimeout(_left_s(self._end_s))
            unsent = unsent[self.sock.send(unsent) :]


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """A ``_Connection`` over TLS."""


class _BoundedReader(io.RawIOBase):
    """Reads a socket until ``end_s`` (monotonic seconds). Then raises ``TimeoutError``."""

    def __init__(self, sock: socket.socket, end_s: float) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._end_s = end_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._end_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return this reader with a buffer. ``HTTPResponse`` calls this method of its socket."""
        return io.BufferedReader(self)


def _response(end_s: float, sock: socket.socket, *rest: Any, **named: Any) -> http.client.HTTPResponse:
    """Return a response that is read from ``sock`` until ``end_s``."""
    return http.client.HTTPResponse(cast(socket.socket, _BoundedReader(sock, end_s)), *rest, **named)


def _left_s(end_s: float) -> float:
    """Return the seconds until ``end_s``. Raises ``TimeoutError`` if there are none, since a socket with a
    timeout of 0 never waits."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the server did not answer in time")
    return left_s


class _Proxy(NamedTuple):
    """Address of an HTTP proxy, and the headers that authenticate with it."""

    host: str
    port: int
    headers: dict[str, str]

    @classmethod
    def of_environment(cls, scheme: str, host: str) -> _Proxy | None:
        """Return the proxy that ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` name for
        ``host``, or ``None``. Raises ``ValueError`` for a proxy that is not HTTP."""
        proxies = getproxies()
        url = proxies.get(scheme) or proxies.get("all")
        if not url or proxy_bypass(host):
            return None
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the proxy for {host} is {parts.scheme}://{parts.hostname}; expected http://")
        try:
            port = parts.port or 80
        except ValueError:  # its text may quote a part of the password
            raise ValueError(
                f"the proxy for {host} has no number as its port; expected http://host:port"
            ) from None
        headers = {}
        if parts.username:
            headers["proxy-authorization"] = _basic(parts.username, parts.password)
        return cls(parts.hostname, port, headers)


def _basic(user: str, password: str | None) -> str:
    return "Basic " + b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()


def tls_context() -> ssl.SSLContext:
    """Return a client's TLS settings, with the certificates that ``SSL_CERT_FILE`` or the platform names.
    Raises ``OSError`` if the file that ``SSL_CERT_FILE`` names cannot be read."""
    context = ssl.create_default_context()
    named = os.environ.get("SSL_CERT_FILE")
    if named:
        context.load_verify_locations(named)  # raises if the file is missing; the default context does not
    elif not os.environ.get("SSL_CERT_DIR") and not context.get_ca_certs():
        try:  # an interpreter built elsewhere may not find this machine's certificates
            import certifi
        except ImportError:
            return context
        context.load_verify_locations(certifi.where())
    return context
