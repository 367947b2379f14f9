"""Chooses the headers to forward. Headers that concern a single connection are left out (RFC 9110 §7.6.1)."""

from __future__ import annotations

from collections.abc import Collection

RawHeaders = Collection[tuple[bytes, bytes]]

SESSION = b"x-session-id"
"""Request header with the program's id, in lower case. The hint and the body's ``session_id`` take
precedence."""
PASSED = b"x-sojourn-passed"
"""Request header, in lower case, of requests that another gateway has passed on. They are not passed on
again."""
RANK = b"x-data-parallel-rank"
"""Request header that chooses a data-parallel rank of an engine, in lower case."""
REPLICA = "X-Sojourn-Replica"
"""Header that the gateway adds to every answer of an engine. It holds the id of the replica."""
GATEWAY = "X-Sojourn-Gateway"
"""Header that marks the gateway's own answers. A proxy in front of the gateway does not send it, so clients
can distinguish the two."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_SERVER_HEADERS = frozenset((b"date", b"server"))
# The gateway handles these itself: it reads the body, chooses the rank, names the session, and agrees with
# the engine on the encoding of the answer.
_CONSUMED_HEADERS = frozenset(
    (b"host", b"content-length", b"expect", b"accept-encoding", RANK, SESSION, PASSED)
)
_NOT_SENT = _HOP_BY_HOP | _CONSUMED_HEADERS
_NOT_SENT_WITH_KEY = _NOT_SENT | {b"authorization", b"x-api-key"}
_NOT_RETURNED = _HOP_BY_HOP | _SERVER_HEADERS


def engine_request_headers(
    headers: RawHeaders, *, key: str | None, rank: int | None, session: str | None
) -> list[tuple[bytes, bytes]]:
    """Return the headers to send to an engine with a client's request. Names are in lower case. Values of the
    client's headers are unchanged.

    ``key``: replaces the client's key; ``None``: the client's key is sent. ``rank``: the data-parallel rank
    to choose; ``None``: no rank is chosen. ``session``: replaces the client's session id; ``None``: no
    session id is sent.
    """
    dropped = _NOT_SENT if key is None else _NOT_SENT_WITH_KEY
    passed = _without(headers, dropped)
    passed.append((b"accept-encoding", b"identity"))
    if key is not None:
        passed.append((b"authorization", b"Bearer " + key.encode()))
    if rank is not None:
        passed.append((RANK, b"%d" % rank))
    if session is not None:
        passed.append((SESSION, session.encode("latin-1")))
    return passed


def without_credentials(headers: RawHeaders) -> RawHeaders:
    """Return the headers of a request without its API key. For the admin key, which engines must not get."""
    return [pair for pair in headers if pair[0].lower() not in (b"authorization", b"x-api-key")]


def client_response_headers(headers: RawHeaders, replica_id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers to send to the client with an engine's answer, including ``X-Sojourn-Replica``."""
    passed = _without(headers, _NOT_RETURNED)
    passed.append((REPLICA.lower().encode(), replica_id.encode("latin-1", "replace")))
    return passed


def end_to_end_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return the headers that another gateway, or the client of its answer, gets. Names are in lower case."""
    return _without(headers, _NOT_RETURNED)


def first_value(headers: RawHeaders, name: bytes) -> str | None:
    """Return the first value of the header ``name`` (lower case), decoded as Latin-1 as engines do. ``None``:
    there is no such header."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def _without(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers with names in lower case. Leave out the headers in ``dropped``, and those that the
    header ``Connection`` lists, which concern only one connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    for name, value in lowered:
        if name == b"connection":
            dropped |= {part.strip().lower() for part in value.split(b",")}
    return [pair for pair in lowered if pair[0] not in dropped]
