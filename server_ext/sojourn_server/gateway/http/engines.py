"""Asking one engine: a request goes to one replica, and an answer or nothing comes back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from .replicas import Address

CONNECT_TIMEOUT_S = 5.0
IDLE_CONNECTION_S = 3.0
"""vLLM closes connections that were idle for five; to write to one that closes costs a repetition."""
_ENGINE_DEAD = (b"EngineDeadError", b"EngineCore encountered an issue", b"EngineGenerateError")
"""What an API server says whose engine core is gone, while it lives a moment longer itself."""


class ReplicaLost(Exception):
    """A replica gave no answer; the text says how, for the log."""


@dataclass(slots=True)
class Answer:
    """An engine's answer from its first byte on."""

    response: aiohttp.ClientResponse
    first: bytes
    """All of it where it is no stream; of a stream the first part, ``b""``: there is none."""
    is_stream: bool


def open_session() -> aiohttp.ClientSession:
    """Connections to engines. How many there are at once is not bounded here: the core bounds requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        # What a client sent is what the engine gets: no headers of the library's own.
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trust_env=False,
    )


async def ask_engine(
    session: aiohttp.ClientSession,
    address: Address,
    method: str,
    path: str,
    headers: CIMultiDict[str],
    body: bytes | None,
) -> Answer:
    """Send a request and wait for the first byte of its answer. Raises ``ReplicaLost``.

    A connection that the engine closed because it was idle is no loss: such a request is sent again, once.
    """
    try:
        return await _ask_once(session, address, method, path, headers, body)
    except aiohttp.ClientConnectorError as error:
        raise ReplicaLost(f"cannot be connected to: {error.strerror or error}") from None
    except (aiohttp.ClientError, ConnectionError):
        pass
    except (asyncio.TimeoutError, OSError) as error:
        raise ReplicaLost(str(error) or type(error).__name__) from None
    try:
        return await _ask_once(session, address, method, path, headers, body)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise ReplicaLost(str(error) or type(error).__name__) from None


async def _ask_once(
    session: aiohttp.ClientSession,
    address: Address,
    method: str,
    path: str,
    headers: CIMultiDict[str],
    body: bytes | None,
) -> Answer:
    # The path has come percent-encoded, and is not to be encoded again.
    url = URL(address.url + path, encoded=True)
    response = await session.request(method, url, data=body, headers=headers, allow_redirects=False)
    try:
        is_stream = response.content_type == "text/event-stream"
        first = await (response.content.readany() if is_stream else response.read())
    except BaseException:
        response.close()
        raise
    if response.status == 500 and any(sign in first for sign in _ENGINE_DEAD):
        response.close()
        raise ReplicaLost("its engine core is dead")
    if is_stream and any(first.startswith(b"data: ") and sign in first for sign in _ENGINE_DEAD):
        response.close()
        raise ReplicaLost("its engine core is dead")
    return Answer(response, first, is_stream)
