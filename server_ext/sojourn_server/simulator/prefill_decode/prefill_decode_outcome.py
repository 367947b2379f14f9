"""Metrics of a prefill/decode run: duration, balance, and latencies. References such as §7.5 and Figure 14
are to the DualPath paper."""

from __future__ import annotations

from statistics import fmean

import msgspec

from .cluster_devices import WINDOW_S
from .prefill_decode_simulation import PdSimulation, TokenLatencies

LOADED = (0.05, 0.5)
"""Start and end of the *loaded part* of a run without arrivals, as shares of the run's duration. ``nic_busy``
and ``nic_max_over_mean`` cover only this part, because storage is empty at the start, and little work is left
at the end (§7.5). In a run with arrivals, the loaded part is the second half."""
FULL = 0.9
"""NICs count as full in a window (``WINDOW_S``) if they read at least this share of what they can read."""
EARLY = 0.05
"""Share of a run, from its start, in which attention times of devices are compared (Figure 14)."""
TTFT_SLO_S = 4.0
TPOT_SLO_S = 0.05
"""DualPath's SLO (§7.4), in seconds: at most ``TTFT_SLO_S`` mean TTFT, and ``TPOT_SLO_S`` mean TPOT."""


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies, in seconds, of turns that were submitted after the warm-up and have finished with more than
    one token. TTST is the time from the first token to the second."""

    turns: int
    ttft_mean: float
    ttft_p95: float
    ttst_mean: float
    tpot_mean: float

    @property
    def within_slo(self) -> bool:
        return self.ttft_mean <= TTFT_SLO_S and self.tpot_mean <= TPOT_SLO_S


class PdOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one run."""

    system: str
    model: str
    workload: str
    cluster: str
    devices: int
    agents: int
    rate_per_s: float | None
    """Arrivals per second; ``None`` if all agents are present from the start."""
    seed: int
    virtual_s: float
    """Virtual time of the last event. If all agents end, this is the job's completion time."""
    turns: int
    finished_agents: int
    prompt_tokens: int
    output_tokens: int
    read_tokens: int
    """Tokens read from storage."""
    nic_max_over_mean: float | None
    """Imbalance of the storage NICs: bytes of the busiest NIC ÷ mean bytes of all NICs, in a window of 10 s.
    This is the mean over all windows of the loaded part (``LOADED``) with reads; ``None``: there are none."""
    nic_busy: tuple[float, float]
    """Bytes read ÷ bytes that the storage NICs can read in the loaded part: (prefill nodes, decode nodes)."""
    attention_max_over_mean: float | None
    """Imbalance of prefill groups: attention seconds of a step's slowest device ÷ mean attention seconds of
    the group's devices. Both are summed over the steps in the first twentieth of the run. ``None`` without
    attention work."""
    prefill_busy: float
    """Busy share of the prefill groups over the whole run."""
    events: int
    """Number of simulated events."""
    cpu_s: float
    """CPU seconds of the simulating process."""
    seen: LatencySummary | None = None
    """Latencies that clients saw. ``None`` if all agents are present from the start, or if no turn was
    measured."""
    prefill_nics_full: float | None = None
    """Share of the whole run's 10 s windows in which the prefill nodes' storage NICs together read at least
    90 % of what they can. ``None`` for a run of less than 10 s, and in results of earlier releases."""


def run_outcome(
    simulation: PdSimulation,
    *,
    workload: str,
    rate_per_s: float | None,
    seed: int,
    cpu_s: float,
) -> PdOutcome:
    """Metrics of a finished run."""
    cluster = simulation.cluster
    low, high = LOADED if rate_per_s is None else (0.5, 1.0)
    shares, busy = _nic_balance(simulation, low, high)
    groups = simulation.groups
    return PdOutcome(
        system=simulation.system.name,
        model=cluster.model.name,
        workload=workload,
        cluster=cluster.name,
        devices=cluster.devices,
        agents=len(simulation.agents),
        rate_per_s=rate_per_s,
        seed=seed,
        virtual_s=simulation.now,
        turns=simulation.turns,
        finished_agents=simulation.finished_agents,
        prompt_tokens=simulation.prompt_tokens,
        output_tokens=simulation.output_tokens,
        read_tokens=sum(nic.blocks for nic in simulation.nics) * 64,
        nic_max_over_mean=fmean(shares) if shares else None,
        nic_busy=busy,
        attention_max_over_mean=_attention_balance(simulation),
        prefill_busy=sum(group.busy_s for group in groups) / len(groups) / max(simulation.now, 1e-9),
        events=simulation.events,
        cpu_s=cpu_s,
        seen=_latency_summary(simulation.latencies),
        prefill_nics_full=_full_prefill_nics(simulation),
    )


def _nic_balance(
    simulation: PdSimulation, low: float, high: float
) -> tuple[list[float], tuple[float, float]]:
    nics = simulation.nics
    first = int(low * simulation.now / WINDOW_S) + 1
    last = int(high * simulation.now / WINDOW_S)
    shares = []
    read = [0.0, 0.0]
    for window in range(first, last):
        counts = [nic.blocks_in[window] if window < len(nic.blocks_in) else 0.0 for nic in nics]
        mean = fmean(counts)
        if mean:
            shares.append(max(counts) / mean)
        prefill = simulation.cluster.prefill_nodes
        read[0] += sum(counts[:prefill]) / prefill
        read[1] += sum(counts[prefill:]) / (len(counts) - prefill)
    could = max(1, last - first) * WINDOW_S * nics[0].rate_blocks_per_s
    return shares, (read[0] / could, read[1] / could)


def _full_prefill_nics(simulation: PdSimulation) -> float | None:
    nics = simulation.nics[: simulation.cluster.prefill_nodes]
    windows = int(simulation.now / WINDOW_S)
    if not windows:
        return None
    enough = FULL * len(nics) * WINDOW_S * nics[0].rate_blocks_per_s
    read = (
        sum(nic.blocks_in[window] for nic in nics if window < len(nic.blocks_in)) for window in range(windows)
    )
    return sum(blocks >= enough for blocks in read) / windows


def _attention_balance(simulation: PdSimulation) -> float | None:
    early = simulation.attention_in[: max(1, int(EARLY * simulation.now / WINDOW_S))]
    longest, mean = sum(each[0] for each in early), sum(each[1] for each in early)
    return longest / mean if mean else None


def _latency_summary(latencies: TokenLatencies | None) -> LatencySummary | None:
    if latencies is None or not latencies.first_token_s:
        return None
    first = sorted(latencies.first_token_s)
    return LatencySummary(
        turns=len(first),
        ttft_mean=fmean(first),
        ttft_p95=first[min(len(first) - 1, int(0.95 * len(first)))],
        ttst_mean=fmean(latencies.second_token_s),
        tpot_mean=fmean(latencies.per_token_s),
    )
