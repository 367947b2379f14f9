"""Why a server could not be reached, and the next step, for ``sojourn doctor``, ``top``, ``explain`` and
``trace``."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import httpx

URL_FORMAT = "http://HOST:PORT, e.g. http://127.0.0.1:8000"
_START = 'start one: sojourn serve tiny; if it is starting, wait for its line "sojourn: ready at"'


def connection_advice(error: httpx.HTTPError, url: str) -> tuple[str, str]:
    """Return why a request to the server at ``url`` got no answer, and the next step for the user."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url} is no URL of a server", f"give {URL_FORMAT}"
    reason, next_step = _reason(error, url)
    return f"{url} does not answer: {reason}", next_step


def _reason(error: httpx.HTTPError, url: str) -> tuple[str, str]:
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    host, at = _host(url), url.partition("://")[2]
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return f"the name {host} is unknown ({text})", "check the name of the host in the URL"
        if isinstance(cause, ssl.SSLCertVerificationError):
            advice = (
                "set SSL_CERT_FILE to the certificate of its authority, or use the name in its certificate"
            )
            return f"its certificate is not accepted ({text})", advice
        if isinstance(cause, ssl.SSLError):
            return f"it does not answer in TLS ({text})", f"use http://{at}"
        if isinstance(cause, ConnectionRefusedError):
            return f"no server listens there ({text})", _START
    if isinstance(error, httpx.RemoteProtocolError):
        return text, f"check the port; if the server there uses TLS, give https://{at}"
    if isinstance(error, httpx.ReadTimeout):
        return text, "wait if it is loading; otherwise see its log"
    if isinstance(error, httpx.ConnectError) and error.__cause__ is None:
        return text, _START
    return text, "check the host and the port, and whether this machine may reach them"


def _host(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return url


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
