"""Addresses of replicas. A replica is an engine, or one of its data-parallel ranks if it has several."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from sojourn.config import with_scheme


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    replica_id: str
    url: str
    """URL of the engine, without a trailing slash."""
    rank: int | None = None
    """Data-parallel rank; ``None``: the engine has a single rank."""


def parse_engine_url(text: str) -> str:
    """Return an engine's URL without a trailing slash. Raises ``ValueError``."""
    text = with_scheme(text.strip().rstrip("/"))
    parts = urlsplit(text)
    try:
        is_base = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port
        is_base = False
    if not is_base or parts.path or parts.query or parts.fragment or parts.username is not None:
        shown = text.rpartition("@")[2]  # without a password
        raise ValueError(
            f"{shown!r} is not an engine's address; expected http://HOST:PORT, and a key in --engine-key"
        )
    return text


def rank_addresses(url: str, ranks: int) -> list[ReplicaAddress]:
    name = urlsplit(url).netloc
    if ranks <= 1:
        return [ReplicaAddress(name, url)]
    return [ReplicaAddress(f"{name}/{rank}", url, rank) for rank in range(ranks)]


class ReplicaAddresses(dict[str | None, ReplicaAddress]):
    """The replicas that a gateway knows, by id; ``None`` is the id of none."""

    def engines(self) -> list[ReplicaAddress]:
        """Return one address per engine, for messages that concern all ranks of an engine."""
        return list({address.url: address for address in reversed(self.values())}.values())[::-1]
