"""The policy's order of labels in host memory, in ranks of the tiers (M5; MORI §4.3.2)."""

from __future__ import annotations

from ..policy.labels import HOST_ORDER, Label
from ..tiers.ranks import Rank

_RANKS = dict(zip(HOST_ORDER, (Rank.WORTHLESS, Rank.COLD, Rank.PLAIN, Rank.IDLE), strict=True))


def host_rank(marked: Label) -> Rank:
    """The rank of what has this label, once it is where it belongs: see ``Rank.until_written``."""
    return _RANKS[marked]
