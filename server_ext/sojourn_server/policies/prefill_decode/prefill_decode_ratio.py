"""The ratio of prefill to decode nodes at which all storage NICs work at once (DualPath §4.2; mechanism D8).

The paper's formulas are illegible in the text available to us. The formulas here are derived from the paper's
description of the traffic. There are P prefill and D decode nodes; x = P/D. A node has g devices, each with a
compute NIC of B bytes per second. It has one storage NIC, which reads S = s·B bytes per second all the time.
Its DRAM moves at most M bytes per second. Load is even. "Hits" are KV read from storage, "prefill hits" those
read by the prefill nodes. A compute NIC reads from and writes to the memory of its own node. Its load is a
share of B; the load of DRAM is in bytes per second:

    link              load               traffic
    prefill, read     2·s/g              hits go to the device, and then to the decode node's buffer
    prefill, write    s/g·(1 + 1/x)      hits that its own node read, and hits that decode nodes read
    decode, read      s/g·(x + 2)        prefill hits go to the device, own hits to device and prefill
    decode, write     s/g·(2x + 1)       prefill hits go to the buffer; these and own hits, to the device
    prefill DRAM      2·S                hits are written once and read once
    decode DRAM       S·(3 + 2x)         its own hits move 3 times, the hits of prefill nodes twice

Each share must be at most 1, and DRAM traffic at most M. This bounds x. With g = 8, s = 1 and M = 10·S, x is
1/7 to 7/2, as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """Rates of one node's compute NICs, storage NIC and DRAM; the defaults are DualPath's example."""

    devices: int = 8
    compute_nic_bytes_per_s: float = 50e9
    """Rate of each device's compute NIC."""
    storage_nic_bytes_per_s: float = 50e9
    """Rate of the node's storage NIC, independent of the number of devices."""
    dram_bytes_per_s: float = 500e9
    """Rate of reads and writes together."""

    @property
    def storage_share(self) -> float:
        """s: the storage NIC's bandwidth divided by the bandwidth of one compute NIC."""
        return self.storage_nic_bytes_per_s / self.compute_nic_bytes_per_s


class LinkRatioBound(NamedTuple):
    """The limits that one link sets to P/D, the number of prefill nodes per decode node."""

    link: str
    """Name of the link and direction, for instance ``decode compute NIC, read``."""
    least: float = 0.0
    most: float = math.inf


class PdRatioRange(NamedTuple):
    """The range of P/D, prefill nodes per decode node, in which only storage NICs limit the throughput."""

    least: float
    most: float
    bounds: tuple[LinkRatioBound, ...]
    """The bounds set by each link. The range is their intersection."""

    @property
    def possible(self) -> bool:
        """Whether the range contains any ratio. If not, some other link always saturates first."""
        return self.least <= self.most

    def contains_ratio(self, ratio: float) -> bool:
        """Return whether ``ratio`` is in the range, with a tolerance for floating point."""
        return self.least * (1 - 1e-12) <= ratio <= self.most * (1 + 1e-12)


def pd_ratio_range(links: NodeLinks) -> PdRatioRange:
    """Return the range of P/D in which storage NICs are the only bottleneck, with the bounds of each link."""
    g, s = links.devices, links.storage_share
    spare = links.dram_bytes_per_s / links.storage_nic_bytes_per_s
    never = math.inf
    bounds = (
        LinkRatioBound("prefill compute NIC, read", least=0.0 if 2 * s <= g else never),
        LinkRatioBound("prefill compute NIC, write", least=s / (g - s) if g > s else never),
        LinkRatioBound("decode compute NIC, read", most=(g - 2 * s) / s),
        LinkRatioBound("decode compute NIC, write", most=(g - s) / (2 * s)),
        LinkRatioBound("prefill DRAM", least=0.0 if spare >= 2 else never),
        LinkRatioBound("decode DRAM", most=(spare - 3) / 2),
    )
    return PdRatioRange(max(bound.least for bound in bounds), min(bound.most for bound in bounds), bounds)


def link_utilisation(links: NodeLinks, prefill_nodes: int, decode_nodes: int) -> dict[str, float]:
    """Return the utilisation of each link, by name, while all storage NICs read all the time. A link above
    1.0 is a bottleneck. There is at least one node of either kind."""
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
