"""Why a server could not be reached, and the next step, for ``sojourn doctor``, ``top``, ``explain`` and
``trace``."""

from __future__ import annotations

import socket
import ssl

import httpx

_START = 'start one: sojourn serve tiny; if it is starting, wait for its line "sojourn: ready at"'


def connection_advice(error: httpx.HTTPError, url: str) -> tuple[str, str]:
    """Return why a request to the server at ``url`` got no answer, and the next step for the user."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url} is no URL of a server", "give http://HOST:PORT, e.g. http://127.0.0.1:8000"
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    at = url.partition("://")[2]
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    certificate = "set SSL_CERT_FILE to the certificate of its authority, or use the name in its certificate"
    faults = {
        socket.gaierror: (
            f"the name {at.partition(':')[0]} is unknown ({text})", "check the name of the host in the URL",
        ),
        ssl.SSLCertVerificationError: (f"its certificate is not accepted ({text})", certificate),
        ssl.SSLError: (f"it does not answer in TLS ({text})", f"use http://{at}"),
        ConnectionRefusedError: (f"no server listens there ({text})", _START),
        httpx.RemoteProtocolError: (text, f"check the port; if the server there uses TLS, give https://{at}"),
        httpx.ReadTimeout: (text, "wait if it is loading; otherwise see its log"),
    }  # fmt: skip
    found = (advice for kind, advice in faults.items() if any(isinstance(one, kind) for one in causes))
    fallback = (
        _START
        if isinstance(error, httpx.ConnectError) and len(causes) == 1
        else ("check the host and the port, and whether this machine may reach them")
    )
    reason, next_step = next(found, (text, fallback))
    return f"{url} does not answer: {reason}", next_step
