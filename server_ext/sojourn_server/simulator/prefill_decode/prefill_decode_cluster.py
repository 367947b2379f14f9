"""The simulated cluster: its models, its machines, and the number of nodes. Sections are DualPath's.

FLOPs and bytes of DualPath's three models are counted from public configurations, not measured. The paper's
Table 1 gives the KV bytes per operation of a turn, in GB/PFLOP, for contexts from 16K to 64K. The counts here
differ from Table 1 by at most 2 % for Qwen2.5-32B and by at most 20 % for DeepSeek-V3.2
(tests/simulator/test_simulator_prefill_decode_models.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PdModel:
    """One model on separated prefill and decode engines of one device each."""

    name: str
    title: str
    layers: int
    kv_bytes_per_token: int
    """Cached bytes of a token over all layers: its KV and, with sparse attention, its index keys."""
    local_token_flops: float
    """FLOPs of a new token on its request's device: projections, and attention over the tokens that sparse
    attention selects."""
    spread_token_flops: float
    """FLOPs of a new token in the experts, whose work the devices of a prefill group share; 0 without
    experts."""
    pair_flops: float
    """Attention FLOPs of one pair of tokens: a new token and an earlier token that it is compared with."""
    group_nodes: int
    """Number of prefill nodes that share experts and run steps together; 0 if each device computes alone."""
    prefill_weight_bytes: float
    """Bytes of weights on each prefill device."""
    decode_weight_bytes: float
    prefill_step_s: float
    """Fixed seconds of a prefill step."""
    decode_step_s: float
    """Seconds of a nearly empty decode step."""
    decode_request_s: float
    """Additional seconds of a decode step for each of its requests."""
    decode_bytes_per_token: float
    """KV bytes that a decode step reads per context token."""

    def turn_flops(self, context_tokens: float, new_tokens: float) -> float:
        """FLOPs to compute ``new_tokens`` tokens after a context of ``context_tokens`` tokens."""
        pairs = new_tokens * (context_tokens + (new_tokens + 1) / 2)
        return (self.local_token_flops + self.spread_token_flops) * new_tokens + self.pair_flops * pairs


def _mla(layers: int, heads: int, index_heads: int, index_size: int, picked: int) -> tuple[int, float, float]:
    """Costs of DeepSeek's sparse attention (MLA): (KV bytes per token, FLOPs per new token, FLOPs per pair).

    The latent has 512 numbers in FP8 with four scales of 4 bytes, and 64 rotary numbers in BF16. The index
    key has one byte per number, and a scale of 4 bytes. The indexer compares every new token with all earlier
    tokens (the pairs). Attention then reads only ``picked`` of the earlier tokens. For each of these it uses
    576 numbers for the score and 512 for the value.
    """
    kv_bytes = layers * (512 + 4 * 4 + 64 * 2 + index_size + 4)
    attended = 2.0 * heads * (576 + 512) * layers * picked
    return kv_bytes, attended, 2.0 * index_heads * index_size * layers


def _deepseek_660b() -> PdModel:
    layers = 61
    kv_bytes, attended, pair = _mla(layers, heads=128, index_heads=64, index_size=128, picked=2048)
    active, local = 37e9, layers * 187e6  # attention's share of a token's parameters
    experts, rest = 650e9, 17e9  # bytes in FP8: routed experts, and the weights on every device
    return PdModel(
        name="ds-660b",
        title="DeepSeek-V3.2 660B, FP8",
        layers=layers,
        kv_bytes_per_token=kv_bytes,
        local_token_flops=2 * local + attended,
        spread_token_flops=2 * (active - local),
        pair_flops=pair,
        group_nodes=2,
        prefill_weight_bytes=experts / 16 + rest,
        decode_weight_bytes=experts / 32 + rest,
        prefill_step_s=0.02,
        decode_step_s=0.030,
        # DeepSeek's published service: 14,800 output tokens/s on a node of eight H800 at 20 to 22 tokens/s
        # per user, hence 88 users per device and 47.6 ms per step.
        decode_request_s=(0.0476 - 0.030) / 88,
        decode_bytes_per_token=layers * (128 + 4),
    )


def _deepseek_27b() -> PdModel:
    """The 27B model of Appendix A.2: hidden size 2,560, 30 layers, 32 heads, no query LoRA, 72 experts of
    width 1,536. A token uses 6 of them and 2 shared experts."""
    layers, hidden = 30, 2560
    kv_bytes, attended, pair = _mla(layers, heads=32, index_heads=32, index_size=64, picked=1024)
    absorbed = 2 * 32 * 128 * 512
    attention = hidden * 32 * 192 + hidden * 576 + absorbed + 32 * 128 * hidden
    index = hidden * 32 * 64 + hidden * 64 + hidden * 32
    local = layers * (attention + index)
    experts = layers * 8 * 3 * hidden * 1536
    large = _deepseek_660b()
    return PdModel(
        name="ds-27b",
        title="DeepSeek-V3.2 scaled down to 27B, FP8",
        layers=layers,
        kv_bytes_per_token=kv_bytes,
        local_token_flops=2.0 * local + attended,
        spread_token_flops=2.0 * experts,
        pair_flops=pair,
        group_nodes=1,
        prefill_weight_bytes=27e9 / 8 + 2e9,
        decode_weight_bytes=27e9 / 8 + 2e9,
        # Scaled by layers, and by active parameters.
        prefill_step_s=large.prefill_step_s * layers / large.layers,
        decode_step_s=large.decode_step_s * layers / large.layers,
        decode_request_s=large.decode_request_s * (local + experts) / 37e9,
        decode_bytes_per_token=layers * (64 + 4),
    )


def _qwen_32b() -> PdModel:
    """Qwen2.5-32B: 64 layers, 40 heads and 8 KV heads of 128, 32.5 billion parameters, in FP16 on every
    device."""
    kv_bytes = 64 * 2 * 8 * 128 * 2
    return PdModel(
        name="qwen2.5-32b",
        title="Qwen2.5-32B, FP16",
        layers=64,
        kv_bytes_per_token=kv_bytes,
        local_token_flops=2 * 32.5e9,
        spread_token_flops=0.0,
        pair_flops=4.0 * 40 * 128 * 64,
        group_nodes=0,
        prefill_weight_bytes=65e9,
        decode_weight_bytes=65e9,
        prefill_step_s=0.005,
        decode_step_s=65e9 / (4.8e12 * 0.85) + 0.004,  # all weights are read
        decode_request_s=0.0001,
        decode_bytes_per_token=kv_bytes,
    )


PD_MODELS = {model.name: model for model in (_deepseek_660b(), _deepseek_27b(), _qwen_32b())}
"""Models by name."""


CALIBRATED_EFFICIENCY = 0.31
"""Share of its FLOP peak that a prefill device achieves. This is the only value fitted to the paper: DualPath
on 2P4D with 2,000 agents of the 64K workload takes 3,167 s, as in Table 3."""
CALIBRATION_JCT_S = 3167.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PdMachine:
    """A node and its devices. Raises ``ValueError`` unless all values are finite and above 0.

    The paper says only "Hopper". Qwen2.5-32B in FP16 with contexts of 64K requires 141 GB per device, so peak
    and bandwidth are from the H200's data sheet.
    """

    devices: int = 8
    storage_nic_bytes_per_s: float = 50e9
    """400 Gbit/s per node and direction. Storage is at least as fast (§7.2)."""
    compute_nic_bytes_per_s: float = 50e9
    """400 Gbit/s per device and direction."""
    buffer_bytes: float = 80e9
    """DRAM of a node for KV in transit (A.4)."""
    device_flops_per_s: float = 989e12
    device_memory_bytes: float = 141e9
    device_bytes_per_s: float = 4.8e12
    efficiency: float = CALIBRATED_EFFICIENCY
    read_efficiency: float = 0.7
    """Share of the device's memory bandwidth that decode attention achieves."""
    memory_share: float = 0.9
    """Share of the device's memory for the engine, vLLM's default."""
    activation_bytes: float = 5e9
    collective_share: float = 0.3
    """Share of a step in which devices exchange tokens over the compute network. The value is an
    assumption."""

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{constant.name} is {value}; expected finite and above 0")

    @property
    def flops_per_s(self) -> float:
        """Achieved FLOP/s of a prefill device."""
        return self.device_flops_per_s * self.efficiency

    def prefill_kv_tokens(self, model: PdModel) -> int:
        """KV tokens that fit on a prefill device. Raises ``ValueError`` if the weights leave no memory."""
        return self._kv_tokens(model, model.prefill_weight_bytes)

    def decode_kv_tokens(self, model: PdModel) -> int:
        """KV tokens that fit on a decode device. Raises ``ValueError`` if the weights leave no memory."""
        return self._kv_tokens(model, model.decode_weight_bytes)

    def buffer_tokens(self, model: PdModel) -> int:
        """KV tokens that fit in a node's DRAM buffer."""
        return int(self.buffer_bytes / model.kv_bytes_per_token)

    def _kv_tokens(self, model: PdModel, weight_bytes: float) -> int:
        free = self.device_memory_bytes * self.memory_share - weight_bytes - self.activation_bytes
        tokens = int(free / model.kv_bytes_per_token)
        if tokens < 1:
            raise ValueError(
                f"{model.name} leaves {free / 1e9:.1f} GB of {self.device_memory_bytes / 1e9:.0f} GB for KV; "
                "expected room for a token at least"
            )
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PdCluster:
    """Number of nodes, their machine and model, and the scheduler's limits. Raises ``ValueError`` for invalid
    values, and for a model whose weights leave a device no room for KV."""

    prefill_nodes: int
    decode_nodes: int
    model: PdModel
    machine: PdMachine = field(default_factory=PdMachine)
    isolated: bool = True
    """Whether traffic classes give model traffic priority over KV on the compute network. If false, both have
    equal priority."""
    short_queue_s: float = 3.0
    """The paper's α: the longest read queue, in seconds, that counts as short."""
    most_tokens_s: float = 5.0
    """The paper's β, as seconds. A prefill device gets no new request while it has more unfinished tokens
    than it can compute in this time, at its speed for the workload's mean turn."""
    quota_s: float = 0.3
    """Compute quota: maximum attention seconds of a prefill step, the same for all systems."""
    step_tokens: int | None = None
    """Maximum number of new tokens per device and prefill step, instead of ``quota_s``. ``None``: ``quota_s``
    applies."""
    fetch_between_steps: bool = False
    """Whether requests are assigned only when a prefill group is idle or between two steps. The paper's
    engines fetch requests at these times (§6.1). If false, requests are assigned at any event."""

    def __post_init__(self) -> None:
        if self.prefill_nodes < 1 or self.decode_nodes < 1:
            raise ValueError(
                f"{self.prefill_nodes} prefill and {self.decode_nodes} decode nodes; expected one at least"
            )
        if self.step_tokens is not None and self.step_tokens < 1:
            raise ValueError(f"step_tokens is {self.step_tokens}; expected at least 1")
        for name in ("short_queue_s", "most_tokens_s", "quota_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected finite and above 0")
        self.machine.prefill_kv_tokens(self.model)
        self.machine.decode_kv_tokens(self.model)

    @property
    def name(self) -> str:
        """Numbers of prefill and decode nodes in the paper's notation, such as 2P4D."""
        return f"{self.prefill_nodes}P{self.decode_nodes}D"

    @property
    def devices(self) -> int:
        """Number of devices on all nodes."""
        return (self.prefill_nodes + self.decode_nodes) * self.machine.devices
