"""What an eviction order is asked, and which ones there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol


class ReplayEvictionOrder(Protocol):
    """In what order free cached blocks are reused. Blocks are places in the pool, 0, 1, ….

    A block is handed over when nobody holds it any more (``freed``) and is the
    order's until somebody finds it (``reused``) or the order gives it up
    (``victims``). Orders see the past only.
    """

    def freed(self, blocks: Sequence[int], owner: int, now: int) -> None:
        """Nobody holds these any more; tails come before heads. ``now`` is the entry's number in the log."""
        ...

    def reused(self, blocks: Sequence[int]) -> None:
        """These were found by a request that was admitted: they are no longer free."""
        ...

    def victims(self, count: int) -> list[int]:
        """Give up ``count`` blocks, or all there are if these are fewer."""
        ...

    def over(self, owner: int) -> None:
        """The program has ended."""
        ...


EvictionOrderFactory = Callable[[list[str]], ReplayEvictionOrder]
"""Builds an order for the programs of a log, by rank of arrival."""

_REGISTRY = {
    "lru": "lru_eviction_order:LruEvictionOrder",
    "prefix-lru": "program_eviction_orders:prefix_lru",
    "latest-program": "program_eviction_orders:latest_program",
}
"""Name → ``module:maker`` in this package."""

OPTIMAL_ORDER = "belady"
"""Not an order: it decides from the future."""


def eviction_order_names() -> list[str]:
    return list(_REGISTRY)


def eviction_order_factory(name: str) -> EvictionOrderFactory:
    """The maker of a named order. Raises ``ValueError`` with the nearest name for an unknown one."""
    found = _REGISTRY.get(name)
    if found is None:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown eviction order {name!r}; expected one of {', '.join(_REGISTRY)}{hint}")
    module, _, attribute = found.partition(":")
    maker: EvictionOrderFactory = getattr(import_module(f".{module}", __package__), attribute)
    return maker
