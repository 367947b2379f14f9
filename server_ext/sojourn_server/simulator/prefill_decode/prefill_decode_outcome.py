"""What a run came to: how long, how evenly, and how soon agents saw tokens."""

from __future__ import annotations

from statistics import fmean

import msgspec

from .cluster_devices import WINDOW_S
from .prefill_decode_simulation import PdSimulation, TokenLatencies

LOADED = (0.05, 0.5)
"""Between which parts of a run links are compared: at the start nothing is in storage, at the end little is
left to do (§7.5)."""
FULL = 0.9
"""A window in which the prefill nodes' storage NICs read that much of what they could counts as full."""
EARLY = 0.05
"""Up to which part of a run attention is compared, as in the paper's Figure 14."""
TTFT_SLO_S = 4.0
TPOT_SLO_S = 0.05
"""The paper's service levels, as means (§7.4)."""


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of the turns that were submitted after warming up and have ended, in seconds."""

    turns: int
    ttft_mean: float
    ttft_p95: float
    ttst_mean: float
    tpot_mean: float

    @property
    def within_slo(self) -> bool:
        return self.ttft_mean <= TTFT_SLO_S and self.tpot_mean <= TPOT_SLO_S


class PdOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run's figures."""

    system: str
    model: str
    workload: str
    cluster: str
    devices: int
    agents: int
    rate_per_s: float | None
    """Agents that arrive each second; ``None``: all were there at the start."""
    seed: int
    virtual_s: float
    """When the last agent ended: the job's completion time."""
    turns: int
    finished_agents: int
    prompt_tokens: int
    output_tokens: int
    read_tokens: int
    """From storage."""
    nic_max_over_mean: float | None
    """Of bytes read by all storage NICs in windows of 10 s, averaged while the system is loaded."""
    nic_busy: tuple[float, float]
    """Share of the time in which prefill and decode nodes' storage NICs read, while the system is loaded."""
    attention_max_over_mean: float | None
    """Of a prefill group's devices in a step, over the first twentieth of the run."""
    prefill_busy: float
    """Share of all the time in which prefill groups compute."""
    events: int
    """That were simulated."""
    cpu_s: float
    """Of the process that simulated it."""
    seen: LatencySummary | None = None
    """``None`` where all agents were there at the start, and where no turn has ended after warming up."""
    prefill_nics_full: float | None = None
    """Share of all the time, by windows of 10 s, in which the prefill nodes' storage NICs read at least 90 %
    of what they could; ``None`` for a run shorter than that, and of outcomes kept by earlier releases."""


def run_outcome(
    simulation: PdSimulation,
    *,
    workload: str,
    rate_per_s: float | None,
    seed: int,
    cpu_s: float,
) -> PdOutcome:
    """A run that has ended."""
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
