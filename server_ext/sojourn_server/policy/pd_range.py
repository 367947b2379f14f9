"""For which ratio of prefill to decode nodes all storage NICs can work at once (DualPath §4.2, D8).

The text that we have lost the paper's formulas, so they are derived anew from its description of the traffic.
P prefill and D decode nodes of g devices, each with a compute NIC of B bytes a second; a node's storage NIC
reads S = s·B bytes a second, its DRAM moves M. All storage NICs read all the time, and load is even. A
device's compute NIC then carries, in parts of B, with x = P/D:

    prefill, read     2·s/g              hits to the device and on to the decode buffer
    prefill, write    s/g·(1 + 1/x)      hits from its own storage, and those that the decode side has read
    decode, read      s/g·(x + 2)        what came from prefill to the device; its own hits to both
    decode, write     s/g·(2x + 1)       the prompt's KV as it arrives, and into the device
    prefill DRAM      2·S                read from storage, read again
    decode DRAM       S·(3 + 2x)         its own: in, to prefill, to the device; prefill's: in, to the device

Each at most 1, DRAM at most M, bounds x. With g = 8, s = 1 and M = 10·S that is 1/7 to 7/2, as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """A node's links; the defaults are the paper's example. Raises ``ValueError``."""

    devices: int = 8
    compute_nic_bytes_per_s: float = 50e9
    """Of each device."""
    storage_nic_bytes_per_s: float = 50e9
    """Of the node, whatever its devices."""
    dram_bytes_per_s: float = 500e9
    """Reads and writes together."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices is {self.devices}; expected at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}; expected finite and above 0")

    @property
    def storage_share(self) -> float:
        """s: what the storage NIC is of one compute NIC."""
        return self.storage_nic_bytes_per_s / self.compute_nic_bytes_per_s


class LinkBound(NamedTuple):
    """What one link makes of P/D."""

    link: str
    least: float = 0.0
    most: float = math.inf


class PdRange(NamedTuple):
    """From ``least`` to ``most`` prefill nodes for each decode node no link but storage is the bottleneck."""

    least: float
    most: float
    bounds: tuple[LinkBound, ...]

    @property
    def possible(self) -> bool:
        """False: whatever the ratio, another link is full before storage is."""
        return self.least <= self.most

    def holds(self, ratio: float) -> bool:
        """Whether ``ratio`` is within, but for what floating point is off by."""
        return self.least * (1 - 1e-12) <= ratio <= self.most * (1 + 1e-12)


def pd_range(links: NodeLinks) -> PdRange:
    """The range, and the bound of each link."""
    g, s = links.devices, links.storage_share
    spare = links.dram_bytes_per_s / links.storage_nic_bytes_per_s
    never = math.inf
    bounds = (
        LinkBound("prefill compute NIC, read", least=0.0 if 2 * s <= g else never),
        LinkBound("prefill compute NIC, write", least=s / (g - s) if g > s else never),
        LinkBound("decode compute NIC, read", most=(g - 2 * s) / s),
        LinkBound("decode compute NIC, write", most=(g - s) / (2 * s)),
        LinkBound("prefill DRAM", least=0.0 if spare >= 2 else never),
        LinkBound("decode DRAM", most=(spare - 3) / 2),
    )
    return PdRange(max(bound.least for bound in bounds), min(bound.most for bound in bounds), bounds)


def link_loads(links: NodeLinks, prefill_nodes: int, decode_nodes: int) -> dict[str, float]:
    """How full each link is where all storage NICs read all the time: 1.0 is full, above it is in the way.

    Raises ``ValueError`` for fewer than one node of either kind.
    """
    if prefill_nodes < 1 or decode_nodes < 1:
        raise ValueError(f"{prefill_nodes} prefill and {decode_nodes} decode nodes; expected one at least")
    x = prefill_nodes / decode_nodes
    part = links.storage_share / links.devices
    dram = links.storage_nic_bytes_per_s / links.dram_bytes_per_s
    return {
        "prefill compute NIC, read": 2 * part,
        "prefill compute NIC, write": part * (1 + 1 / x),
        "decode compute NIC, read": part * (x + 2),
        "decode compute NIC, write": part * (2 * x + 1),
        "prefill DRAM": 2 * dram,
        "decode DRAM": dram * (3 + 2 * x),
    }
