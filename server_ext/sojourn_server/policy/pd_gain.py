"""What a second path to storage can bring at most, from a turn's sizes and the links (DualPath §3, §7.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from .pd_range import NodeLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSizes:
    """An average turn; the defaults are the 64K workload on DeepSeek-V3.2, as the lab plays it.

    Averages are over turns; those that the paper prints are over trajectories, of which long ones append less
    a turn. Raises ``ValueError``.
    """

    hit_tokens: float = 33_147.0
    """Tokens whose KV is read from storage."""
    new_tokens: float = 292.0
    """Tokens that are computed."""
    kv_bytes_per_token: float = 48_068.0
    """DeepSeek-V3.2's in FP8, index keys included."""
    new_tokens_per_s: float = 2_160.0
    """What one device prefills behind contexts of this length: measure it. This is the lab's, fitted to the
    paper."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; expected finite and above 0")


class PdGain(NamedTuple):
    """Turns a second that each resource allows, all of its kind together."""

    one_path: float
    """The prefill nodes' storage NICs."""
    two_paths: float
    """All storage NICs."""
    compute: float
    """The prefill devices."""

    @property
    def most(self) -> float:
        """How many times as many turns two paths allow at most; 1.0 where computing is the bottleneck
        with one path already."""
        return min(self.two_paths, self.compute) / min(self.one_path, self.compute)


def pd_gain(links: NodeLinks, turn: TurnSizes, prefill_nodes: int, decode_nodes: int) -> PdGain:
    """An upper bound: load is even, nothing waits, decoding never in the way. Raises ``ValueError``."""
    if prefill_nodes < 1 or decode_nodes < 1:
        raise ValueError(f"{prefill_nodes} prefill and {decode_nodes} decode nodes; expected one at least")
    reads_per_s = links.storage_nic_bytes_per_s / (turn.hit_tokens * turn.kv_bytes_per_token)
    return PdGain(
        one_path=prefill_nodes * reads_per_s,
        two_paths=(prefill_nodes + decode_nodes) * reads_per_s,
        compute=prefill_nodes * links.devices * turn.new_tokens_per_s / turn.new_tokens,
    )
