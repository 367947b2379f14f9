"""Which headers go on to an engine, and back: all but those of one connection (RFC 9110 §7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

Raw = Iterable[tuple[bytes, bytes]]

SESSION = "X-Session-ID"
RANK = "X-data-parallel-rank"
REPLICA = "X-Sojourn-Replica"
"""In every answer of an engine: the replica that gave it."""
GATEWAY = "X-Sojourn-Gateway"
"""In every answer that is the gateway's own: a proxy before it may answer 404 or 503 too."""

_OF_ONE_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_SERVERS_OWN = frozenset((b"date", b"server"))
# The body is read here, so its length and the question whether it is wanted are answered here; the rank is
# the gateway's to choose, and which codings an answer may have is a matter between it and the engine.
_ANSWERED_HERE = frozenset(b"host content-length expect accept-encoding x-data-parallel-rank".split())


def onwards(headers: Raw, *, key: str | None, rank: int | None, session: str | None) -> CIMultiDict[str]:
    """Of a client's request, for the engine. ``key``: in place of the client's own. ``session``: as the
    program's id, ``None``: none is passed on."""
    headers = list(headers)
    dropped = _OF_ONE_CONNECTION | _ANSWERED_HERE | _named(headers) | {SESSION.lower().encode()}
    if key is not None:
        dropped |= {b"authorization", b"x-api-key"}
    passed: CIMultiDict[str] = CIMultiDict(
        (name.decode("latin-1"), _as_sent(value)) for name, value in headers if name.lower() not in dropped
    )
    passed["Accept-Encoding"] = "identity"
    if key is not None:
        passed["Authorization"] = f"Bearer {key}"
    if rank is not None:
        passed[RANK] = str(rank)
    if session is not None:
        passed[SESSION] = _as_sent(session.encode("latin-1"))
    return passed


def without_key(headers: Raw) -> Raw:
    """Of an operator's request: its key is for the gateway alone."""
    return [pair for pair in headers if pair[0].lower() not in (b"authorization", b"x-api-key")]


def back(headers: Raw, replica_id: str) -> list[tuple[bytes, bytes]]:
    """Of an engine's answer, for the client."""
    headers = list(headers)
    dropped = _OF_ONE_CONNECTION | _SERVERS_OWN | _named(headers)
    passed = [(name.lower(), value) for name, value in headers if name.lower() not in dropped]
    passed.append((REPLICA.lower().encode(), replica_id.encode("latin-1", "replace")))
    return passed


def _as_sent(value: bytes) -> str:
    """Text that has the same bytes again when it is sent, which is done in UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def one(headers: Raw, name: bytes) -> str | None:
    """The first of a name, given in lower case; its characters are its bytes, as engines read them."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def _named(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that ``Connection`` says are of this connection only."""
    named: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            named.update(part.strip().lower() for part in value.split(b","))
    return frozenset(named)


def plain(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """As ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
