"""Where replicas are: an engine's address, or one data-parallel rank behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit


class BadAddress(ValueError):
    """An engine's address cannot be used; the text names it and says what was expected."""


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach a replica."""

    replica_id: str
    url: str
    """Of the engine's API, without a slash at its end."""
    rank: int | None = None
    """Data-parallel rank; ``None``: the engine has but one."""


def read_url(text: str) -> str:
    """An engine's address as an operator writes it. Raises ``BadAddress``."""
    text = text.strip().rstrip("/")
    parts = urlsplit(text)
    try:
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits:
        raise BadAddress(f"{text!r} is no address of an engine; expected http://HOST:PORT")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise BadAddress(f"{text!r} has more than an address; expected http://HOST:PORT without a path")
    if parts.username is not None:
        raise BadAddress("an engine's address has a user in it; expected http://HOST:PORT, and --engine-key")
    return text


def addresses(url: str, ranks: int) -> list[Address]:
    """The replicas behind one address."""
    name = urlsplit(url).netloc
    if ranks <= 1:
        return [Address(name, url)]
    return [Address(f"{name}/{rank}", url, rank) for rank in range(ranks)]


class Replicas:
    """Addresses by replica."""

    def __init__(self) -> None:
        self._addresses: dict[str, Address] = {}

    def __iter__(self) -> Iterator[Address]:
        return iter(self._addresses.values())

    def __len__(self) -> int:
        return len(self._addresses)

    def get(self, replica_id: str | None) -> Address | None:
        """``None``: not known."""
        return self._addresses.get(replica_id) if replica_id is not None else None

    def add(self, address: Address) -> None:
        """It can be reached."""
        self._addresses[address.replica_id] = address

    def remove(self, replica_id: str) -> None:
        """It is gone."""
        self._addresses.pop(replica_id, None)

    def engines(self) -> list[Address]:
        """One for each engine: ranks behind one address hear everything that one of them is told."""
        return list({address.url: address for address in reversed(self._addresses.values())}.values())[::-1]
