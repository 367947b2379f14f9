"""Generates quality-of-service settings that separate KV from the model's traffic on a network fabric
(DualPath §5.1, A.1).

The InfiniBand values are from the paper. The RoCE values are sojourn's, because the paper gives none. No
value has been tried on hardware, and the first line of each text says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNVERIFIED = (
    "NOT VERIFIED ON HARDWARE. Generated from the DualPath paper (§5.1, A.1); see your fabric's manual."
)


@dataclass(frozen=True, slots=True)
class VirtualLane:
    """One of the paper's four virtual lanes: its use, and its weights in InfiniBand's high- and low-priority
    arbiters."""

    use: str
    high: int
    low: int


VIRTUAL_LANES: Mapping[int, VirtualLane] = {
    0: VirtualLane("everything without a class of its own", 192, 192),
    1: VirtualLane("the model's collectives", 192, 192),
    2: VirtualLane("KV", 0, 64),
    3: VirtualLane("the model's point-to-point messages", 192, 192),
}
"""Number of a virtual lane, which is also its service level → the lane. How the model's traffic is divided
between lanes 1 and 3 is a guess."""

MODEL_LANE, KV_LANE = 1, 2
HIGH_LIMIT = 240
"""Number of 4 KiB units that the high-priority arbiter may send before the low-priority one gets a turn; 255
means no limit."""

DSCP: Mapping[int, int] = {0: 0, 1: 26, 2: 10, 3: 34}
"""Traffic class → its DSCP value on RoCE, chosen by sojourn."""
BANDWIDTH_PERCENT: Mapping[int, int] = {0: 33, 1: 33, 2: 1, 3: 33}
"""Traffic class → percent of a saturated RoCE link, chosen by sojourn. KV gets 1 percent, as in §5.1."""


def infiniband_settings() -> str:
    """Return options for the subnet manager and environment variables for each engine, as text."""
    lanes = range(len(VIRTUAL_LANES))
    levels = ",".join(str(level % len(VIRTUAL_LANES)) for level in range(16))
    return "\n".join(
        [
            f"# {UNVERIFIED}",
            "# opensm.conf, of the compute fabric's subnet manager:",
            *(f"#   lane {lane}: {VIRTUAL_LANES[lane].use}" for lane in lanes),
            "qos TRUE",
            f"qos_max_vls {len(VIRTUAL_LANES)}",
            f"qos_high_limit {HIGH_LIMIT}",
            "qos_vlarb_high " + ",".join(f"{lane}:{VIRTUAL_LANES[lane].high}" for lane in lanes),
            "qos_vlarb_low " + ",".join(f"{lane}:{VIRTUAL_LANES[lane].low}" for lane in lanes),
            f"qos_sl2vl {levels}",
            "",
            "# environment of each engine: the model's messages, and what moves KV by UCX (NIXL does)",
            f"export NCCL_IB_SL={MODEL_LANE}",
            f"export UCX_IB_SL={KV_LANE}",
        ]
    )


def roce_settings() -> str:
    """Return ``mlnx_qos`` commands for a NIC named ``DEVICE``, and environment variables for each engine, as
    text. Switches need the same settings."""
    classes = range(8)
    used = len(VIRTUAL_LANES)
    flow_control = ",".join("1" if each < used else "0" for each in classes)
    bandwidth = ",".join(str(BANDWIDTH_PERCENT.get(each, 0)) for each in classes)
    return "\n".join(
        [
            f"# {UNVERIFIED}",
            "# The paper gives no figures for RoCE. Code points and percentages are ours.",
            "mlnx_qos -i DEVICE --trust dscp",
            *(
                f"mlnx_qos -i DEVICE --dscp2prio set,{DSCP[lane]},{lane}  # {VIRTUAL_LANES[lane].use}"
                for lane in VIRTUAL_LANES
            ),
            f"mlnx_qos -i DEVICE --pfc {flow_control}",
            f"mlnx_qos -i DEVICE --tsa {','.join(['ets'] * 8)} --tcbw {bandwidth}",
            "# The same classes, weights and flow control on every switch between the engines.",
            "",
            "# environment of each engine: the traffic class byte is the code point times four",
            f"export NCCL_IB_TC={DSCP[MODEL_LANE] << 2}",
            f"export UCX_IB_TRAFFIC_CLASS={DSCP[KV_LANE] << 2}",
        ]
    )
