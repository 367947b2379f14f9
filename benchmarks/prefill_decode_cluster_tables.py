"""Rows and headers shared by the tables of ``prefill_decode_cluster.py``."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_decode_cluster_runs import Capacity
from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import TPOT_SLO_S, TTFT_SLO_S, PdOutcome

COMPARED_HEAD = ("Basic", "DualPath", "Oracle", "against Basic", "of Oracle", "prefill busy: Basic, DualPath")
SEEN_HEAD = ("", "turns/s", "TTFT, mean", "TTFT, P95", "TTST", "TPOT")


def compared(outcomes: Sequence[PdOutcome]) -> list[str]:
    """Return the cells of a table row that compares the three ``COMPARED`` systems."""
    basic, dual, oracle = (outcome.virtual_s for outcome in outcomes)
    return [
        *(f"{each:,.0f} s" for each in (basic, dual, oracle)),
        f"{basic / dual:.2f}×",
        f"{oracle / dual:.0%}",
        f"{outcomes[0].prefill_busy:.0%}, {outcomes[1].prefill_busy:.0%}",
    ]


def seen(outcome: PdOutcome) -> list[str]:
    """Return the cells of a table row: turns per second, and latencies."""
    found = outcome.seen
    if found is None:
        return ["–"] * 5
    return [
        f"{outcome.turns / outcome.virtual_s:,.1f}",
        f"{found.ttft_mean:.3f} s",
        f"{found.ttft_p95:.3f} s",
        f"{found.ttst_mean:.3f} s",
        f"{1000 * found.tpot_mean:.1f} ms",
    ]


def links(outcome: PdOutcome) -> str:
    """Return the bytes of the busiest storage NIC ÷ the mean over storage NICs, as text."""
    return f"{outcome.nic_max_over_mean:.2f}" if outcome.nic_max_over_mean else "–"


def attention(outcome: PdOutcome) -> str:
    """Return the attention time of the slowest device ÷ the mean over devices, as text."""
    return f"{outcome.attention_max_over_mean:.2f}" if outcome.attention_max_over_mean else "–"


def broken(capacity: Capacity) -> str:
    """Return the service levels that are violated at the next tried rate above a capacity, as text."""
    if capacity.above is None or capacity.above.seen is None:
        return "–"
    found = capacity.above.seen
    told = []
    if found.ttft_mean > TTFT_SLO_S:
        told.append(f"TTFT {found.ttft_mean:.0f} s")
    if found.tpot_mean > TPOT_SLO_S:
        told.append(f"TPOT {1000 * found.tpot_mean:.0f} ms")
    return " and ".join(told)
