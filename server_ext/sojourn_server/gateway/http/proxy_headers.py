"""Chooses the headers to forward. Headers that concern a single connection are left out (RFC 9110 §7.6.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from multidict import CIMultiDict

RawHeaders = Collection[tuple[bytes, bytes]]
ClientHeaders = Mapping[str, str]
"""Headers of a client's request, as engines read them: names in lower case, values decoded as Latin-1, the
first of repeated headers."""
EngineHeaders = CIMultiDict[str]

SESSION = "x-session-id"
"""Request header with the program's id, in lower case. The hint and the body's ``session_id`` take
precedence."""
RANK = "x-data-parallel-rank"
"""Request header that chooses a data-parallel rank of an engine, in lower case."""
PASSED = "x-sojourn-passed"
"""Request header, in lower case, of requests that another gateway has passed on. They are not passed on
again."""
REPLICA = "X-Sojourn-Replica"
"""Header that the gateway adds to every answer of an engine. It holds the id of the replica."""
GATEWAY = "X-Sojourn-Gateway"
"""Header that marks the gateway's own answers. A proxy in front of the gateway does not send it, so clients
can distinguish the two."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# The gateway handles these itself: it reads the body, chooses the rank, names the session, and agrees with
# the engine on the encoding of the answer.
_NOT_SENT = _HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"accept-encoding",
    RANK.encode(), SESSION.encode(), PASSED.encode(),
}  # fmt: skip
_KEYS = frozenset((b"authorization", b"x-api-key"))
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}


def engine_request_headers(
    headers: RawHeaders, *, key: str | None, rank: int | None, session: str | None
) -> EngineHeaders:
    """Return the headers to send to an engine with a client's request.

    ``key``: replaces the client's key; ``None``: the client's key is sent. ``rank``: the data-parallel rank
    to choose; ``None``: no rank is chosen. ``session``: replaces the client's session id; ``None``: no
    session id is sent.
    """
    sent = _without(headers, _NOT_SENT if key is None else _NOT_SENT | _KEYS)
    # aiohttp writes headers as UTF-8, so the bytes stay what they are.
    passed = CIMultiDict([(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in sent])
    passed["accept-encoding"] = "identity"
    if key is not None:
        passed["authorization"] = f"Bearer {key}"
    if rank is not None:
        passed[RANK] = str(rank)
    if session is not None:
        passed[SESSION] = session.encode("latin-1", "replace").decode("utf-8", "replace")
    return passed


def client_response_headers(headers: RawHeaders, replica_id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers to send to the client with an engine's answer, including ``X-Sojourn-Replica``."""
    return [
        *_without(headers, _NOT_RETURNED),
        (REPLICA.lower().encode(), replica_id.encode("latin-1", "replace")),
    ]


def end_to_end_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return the headers that another gateway, or the client of its answer, gets. Names are in lower case."""
    return _without(headers, _NOT_RETURNED)


def client_headers(headers: RawHeaders) -> ClientHeaders:
    """Return the headers of a client's request by name."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed([*headers])}


def _without(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers with names in lower case. Leave out the headers in ``dropped``, and those that the
    header ``Connection`` lists, which concern only one connection."""
    kept = []
    for name, value in headers:
        name = name.lower()
        if name == b"connection":
            dropped |= {part.strip().lower() for part in value.split(b",")}
        kept.append((name, value))
    return [pair for pair in kept if pair[0] not in dropped]
