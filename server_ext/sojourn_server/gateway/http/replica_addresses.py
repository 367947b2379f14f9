"""Addresses of replicas. A replica is an engine, or one of its data-parallel ranks if it has several."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from sojourn.config import with_scheme


class InvalidReplicaAddress(ValueError):
    """An engine's address is invalid. The text names the address and says what was expected."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Address of a replica: the URL of its engine, and its data-parallel rank."""

    replica_id: str
    url: str
    """URL of the engine's API, without a trailing slash."""
    rank: int | None = None
    """Data-parallel rank; ``None``: the engine has a single rank."""


def parse_engine_url(text: str) -> str:
    """Return an engine's URL without a trailing slash. Raises ``InvalidReplicaAddress``."""
    text = with_scheme(text.strip().rstrip("/"))
    parts = urlsplit(text)
    try:
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits:
        raise InvalidReplicaAddress(f"{text!r} is not an engine's address; expected http://HOST:PORT")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise InvalidReplicaAddress(f"{text!r} has a path, a query or a fragment; expected http://HOST:PORT")
    if parts.username is not None:
        what = "an engine's address has a user name"
        raise InvalidReplicaAddress(f"{what}; expected http://HOST:PORT, and the key in --engine-key")
    return text


def rank_addresses(url: str, ranks: int) -> list[ReplicaAddress]:
    """Return the addresses of an engine's replicas, one per data-parallel rank."""
    name = urlsplit(url).netloc
    if ranks <= 1:
        return [ReplicaAddress(name, url)]
    return [ReplicaAddress(f"{name}/{rank}", url, rank) for rank in range(ranks)]


class ReplicaAddresses(dict[str | None, ReplicaAddress]):
    """Addresses of the replicas that a gateway knows, by replica id; ``None`` is the id of none."""

    def engines(self) -> list[ReplicaAddress]:
        """Return one address per engine, for messages that concern all ranks of an engine."""
        return list({address.url: address for address in reversed(self.values())}.values())[::-1]
