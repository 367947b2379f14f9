"""The SDK's own HTTP client, separate from the clients that it instruments.

It uses the standard library, since that takes the least CPU time from the agent and tracers do not patch it.
"""

from __future__ import annotations

import http.client
import os
import ssl
import time
from base64 import b64encode
from typing import NamedTuple, Protocol
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

    A timeout bounds the connection and each read."""

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
        self._connection: http.client.HTTPConnection | None = None
        self._used_at_s = 0.0
        self._inherited: list[http.client.HTTPConnection] = []
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
        try:
            return self._once(method, path, body, timeout_s)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not reused:
                raise
        # The server had closed the idle connection. If it did read the events, it detects duplicates.
        return self._once(method, path, body, timeout_s)

    def _once(self, method: str, path: str, body: bytes | None, timeout_s: float) -> HttpResponse:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connected()
        try:
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
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

    def _connected(self) -> http.client.HTTPConnection:
        proxy = self._proxy
        host, port = (self._host, self._port) if proxy is None else (proxy.host, proxy.port)
        if self._tls is None:
            return http.client.HTTPConnection(host, port)
        secure = http.client.HTTPSConnection(host, port, context=self._tls)
        if proxy is not None:
            secure.set_tunnel(self._host, self._port, proxy.headers)
        return secure


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
