"""DualPath's clusters: models, machines, and workloads without text. Sections are DualPath's.

FLOPs and bytes of the paper's three models are counted from public configurations, not measured. They differ
from the paper's Table 1 (KV bytes per operation of a turn, 16K to 64K) by at most 2 % for Qwen2.5-32B and by
at most 20 % for DeepSeek-V3.2.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from sojourn_server.policies.prefill_decode.engine_pair_scheduler import FULL_BLOCK_TOKENS
from sojourn_server.simulator.workloads.synthetic_workloads import DUALPATH, synthetic_programs
from sojourn_server.traces.trace_schema import TraceProgram


@dataclass(frozen=True, kw_only=True)
class PdModel:
    """One model on separated prefill and decode engines of one device each."""

    name: str
    layers: int
    kv_bytes_per_token: int
    """Cached bytes of a token over all layers: its KV and, with sparse attention, its index keys."""
    local_token_flops: float
    """FLOPs of a new token on its request's device: projections, and attention over selected tokens."""
    spread_token_flops: float
    """FLOPs of a new token in the experts, which the devices of a prefill group share."""
    pair_flops: float  # attention FLOPs of one pair of tokens: a new token and an earlier one
    group_nodes: int
    """Number of prefill nodes that share experts and run steps together; 0: each device computes alone."""
    prefill_weight_bytes: float
    decode_weight_bytes: float
    prefill_step_s: float  # fixed seconds of a prefill step
    decode_step_s: float  # seconds of a nearly empty decode step; decode_request_s is added for each request
    decode_request_s: float
    decode_bytes_per_token: float  # KV bytes that a decode step reads per context token

    def turn_flops(self, context_tokens: float, new_tokens: float) -> float:
        """FLOPs to compute ``new_tokens`` tokens after a context of ``context_tokens`` tokens."""
        pairs = new_tokens * (context_tokens + (new_tokens + 1) / 2)
        return (self.local_token_flops + self.spread_token_flops) * new_tokens + self.pair_flops * pairs


def _mla(layers: int, heads: int, index_heads: int, index_size: int, picked: int) -> tuple[int, float, float]:
    """Costs of DeepSeek's sparse attention: (KV bytes per token, FLOPs per new token, FLOPs per pair).

    The latent has 512 numbers in FP8 with four scales of 4 bytes, and 64 rotary numbers in BF16. The index
    key has a byte per number and a scale of 4 bytes. The indexer compares every new token with all earlier
    ones; attention then reads ``picked`` of them: 576 numbers for the score, 512 for the value.
    """
    kv_bytes = layers * (512 + 4 * 4 + 64 * 2 + index_size + 4)
    return kv_bytes, 2.0 * heads * (576 + 512) * layers * picked, 2.0 * index_heads * index_size * layers


def _deepseek_660b() -> PdModel:
    layers = 61
    kv_bytes, attended, pair = _mla(layers, heads=128, index_heads=64, index_size=128, picked=2048)
    active, local = 37e9, layers * 187e6  # attention's share of a token's parameters
    experts, rest = 650e9, 17e9  # bytes in FP8: routed experts, and the weights on every device
    return PdModel(
        name="ds-660b", layers=layers, kv_bytes_per_token=kv_bytes,
        local_token_flops=2 * local + attended, spread_token_flops=2 * (active - local), pair_flops=pair,
        group_nodes=2, prefill_weight_bytes=experts / 16 + rest, decode_weight_bytes=experts / 32 + rest,
        prefill_step_s=0.02, decode_step_s=0.030,
        # DeepSeek's published service: 14,800 output tokens/s on a node of eight H800 at 20 to 22 tokens/s
        # per user, hence 88 users per device and 47.6 ms per step.
        decode_request_s=(0.0476 - 0.030) / 88, decode_bytes_per_token=layers * (128 + 4),
    )  # fmt: skip


def _deepseek_27b() -> PdModel:
    """The 27B model of Appendix A.2: hidden size 2,560, 30 layers, 32 heads, no query LoRA, 72 experts of
    width 1,536. A token uses 6 of them and 2 shared experts."""
    layers, hidden = 30, 2560
    kv_bytes, attended, pair = _mla(layers, heads=32, index_heads=32, index_size=64, picked=1024)
    absorbed = 2 * 32 * 128 * 512
    attention = hidden * 32 * 192 + hidden * 576 + absorbed + 32 * 128 * hidden
    local = layers * (attention + hidden * 32 * 64 + hidden * 64 + hidden * 32)
    experts = layers * 8 * 3 * hidden * 1536
    large = _deepseek_660b()
    return PdModel(
        name="ds-27b", layers=layers, kv_bytes_per_token=kv_bytes,
        local_token_flops=2.0 * local + attended, spread_token_flops=2.0 * experts, pair_flops=pair,
        group_nodes=1, prefill_weight_bytes=27e9 / 8 + 2e9, decode_weight_bytes=27e9 / 8 + 2e9,
        # Scaled by layers, and by active parameters.
        prefill_step_s=large.prefill_step_s * layers / large.layers,
        decode_step_s=large.decode_step_s * layers / large.layers,
        decode_request_s=large.decode_request_s * (local + experts) / 37e9,
        decode_bytes_per_token=layers * (64 + 4),
    )  # fmt: skip


_QWEN_KV_BYTES = 64 * 2 * 8 * 128 * 2
_QWEN_32B = PdModel(
    # 64 layers, 40 heads and 8 KV heads of 128, 32.5 billion parameters, in FP16 on every device.
    name="qwen2.5-32b", layers=64, kv_bytes_per_token=_QWEN_KV_BYTES, local_token_flops=2 * 32.5e9,
    spread_token_flops=0.0, pair_flops=4.0 * 40 * 128 * 64, group_nodes=0,
    prefill_weight_bytes=65e9, decode_weight_bytes=65e9, prefill_step_s=0.005,
    decode_step_s=65e9 / (4.8e12 * 0.85) + 0.004,  # all weights are read
    decode_request_s=0.0001, decode_bytes_per_token=_QWEN_KV_BYTES,
)  # fmt: skip
PD_MODELS = {model.name: model for model in (_deepseek_660b(), _deepseek_27b(), _QWEN_32B)}


CALIBRATED_EFFICIENCY = 0.31
"""Share of its FLOP peak that a prefill device achieves. This is the only value fitted to the paper: DualPath
on 2P4D with 2,000 agents of the 64K workload takes 3,167 s, as in Table 3."""
CALIBRATION_JCT_S = 3167.0


@dataclass(frozen=True, kw_only=True)
class PdMachine:
    """A node and its devices. The paper says only "Hopper". Qwen2.5-32B in FP16 with contexts of 64K needs
    141 GB per device, so peak and bandwidth are from the H200's data sheet."""

    devices: int = 8
    storage_nic_bytes_per_s: float = 50e9
    """400 Gbit/s per node and direction. Storage is at least as fast (§7.2)."""
    compute_nic_bytes_per_s: float = 50e9
    """400 Gbit/s per device and direction."""
    buffer_bytes: float = 80e9  # DRAM of a node for KV in transit (A.4)
    device_flops_per_s: float = 989e12
    device_memory_bytes: float = 141e9
    device_bytes_per_s: float = 4.8e12
    efficiency: float = CALIBRATED_EFFICIENCY
    read_efficiency: float = 0.7  # share of the device's memory bandwidth that decode attention achieves
    memory_share: float = 0.9  # share of the device's memory for the engine, vLLM's default
    activation_bytes: float = 5e9
    collective_share: float = 0.3
    """Share of a step in which devices exchange tokens over the compute network: an assumption."""

    @property
    def flops_per_s(self) -> float:
        return self.device_flops_per_s * self.efficiency

    def kv_tokens(self, model: PdModel, weight_bytes: float) -> int:
        """KV tokens that fit on a device beside ``weight_bytes``."""
        free = self.device_memory_bytes * self.memory_share - weight_bytes - self.activation_bytes
        return int(free / model.kv_bytes_per_token)


@dataclass(frozen=True, kw_only=True)
class PdCluster:
    """Number of nodes, their machine and model, and the scheduler's limits."""

    prefill_nodes: int = 2
    decode_nodes: int = 4
    model: PdModel = PD_MODELS["ds-660b"]
    machine: PdMachine = PdMachine()
    short_queue_s: float = 3.0  # the paper's α: the longest read queue, in seconds, that counts as short
    most_tokens_s: float = 5.0
    """The paper's β, as seconds. A prefill device gets no new request while it has more unfinished tokens
    than it can compute in this time, at its speed for the workload's mean turn."""
    quota_s: float = 0.3
    """Compute quota: maximum attention seconds of a prefill step, the same for all systems."""

    @property
    def name(self) -> str:
        """Numbers of prefill and decode nodes in the paper's notation, such as 2P4D."""
        return f"{self.prefill_nodes}P{self.decode_nodes}D"


class TurnShape(NamedTuple):
    """Lengths of one turn."""

    hit_blocks: int
    """Number of the prompt's leading Full Blocks (64 tokens each) that earlier turns have stored."""
    prompt_tokens: int
    output_tokens: int
    gap_s: float  # client-side seconds until the next turn


Trajectory = tuple[TurnShape, ...]
"""The turns of one agent."""


@lru_cache(maxsize=8)
def load_trajectories(workload: str, seed: int) -> tuple[Trajectory, ...]:
    """The trajectories of a workload's 500 programs, as many as in DualPath."""
    programs = synthetic_programs(workload, seed=seed)
    return tuple(filter(None, (trajectory(program, DUALPATH[workload][0]) for program in programs)))


def trajectory(program: TraceProgram, most_tokens: int) -> Trajectory:
    """The trajectory of one program. It ends before its first turn beyond ``most_tokens``, the workload's
    longest context.

    A turn's cache hit is the prefix that it shares with the program's previous turn, rounded down to Full
    Blocks (A.4). Programs share nothing.
    """
    turns: list[TurnShape] = []
    context = 0
    for turn in program.turns:
        # The last token of a prompt is always computed.
        hit_tokens = min(context, turn.prompt_tokens - 1)
        context = turn.prompt_tokens + turn.output_tokens
        if context > most_tokens:
            break
        hit_blocks = hit_tokens // FULL_BLOCK_TOKENS
        turns.append(TurnShape(hit_blocks, turn.prompt_tokens, turn.output_tokens, turn.idle_s))
    return tuple(turns)


def sample_agents(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """``count`` trajectories in random order, one for each agent. All are drawn once before any is drawn
    again. Further draws are with replacement, as in the paper (A.3)."""
    rng = random.Random(f"pd agents/{seed}")
    order = list(trajectories)
    rng.shuffle(order)
    return order[:count] + [rng.choice(order) for _ in range(count - len(order))]
