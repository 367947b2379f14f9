"""What the label of a program's blocks is worth in host memory (M5; MORI §4.3.2).

The device keeps busy programs longest and then idle ones (``policy.labels.device_rank``).
Host memory has it the other way round: each tier keeps those longest who were placed in
it. Inactive ones go first in both, and then who belongs on disk.
"""

from __future__ import annotations

from ..policy.labels import Label
from ..tiers.ranks import Rank

_RANKS = {
    Label.INACTIVE: Rank.WORTHLESS,
    Label.COLD: Rank.COLD,
    Label.BUSY: Rank.PLAIN,
    Label.IDLE: Rank.IDLE,
}


def host_rank(marked: Label) -> Rank:
    """The rank of what has this label, once it is where it belongs: see ``Rank.until_written``."""
    return _RANKS[marked]
