"""What a turn of each of DualPath's three models computes, moves and holds, from public configurations.

FLOPs and bytes are counted, not measured; what a device makes of them is the machine's business. Counted so,
the KV bytes read for each operation of a turn (the paper's Table 1, GB/PFLOP from 16K to 64K) come out within
2 % for Qwen2.5-32B and within a fifth for DeepSeek-V3.2
(tests/simulator/test_simulator_prefill_decode_models.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PdModel:
    """One model on separated prefill and decode engines, a device each."""

    name: str
    title: str
    layers: int
    kv_bytes_per_token: int
    """Of all layers, with whatever else attention needs of a token."""
    local_token_flops: float
    """Of a new token, on the device that has its request: projections, and attention over the tokens that
    sparse attention picks."""
    spread_token_flops: float
    """Of a new token, on all devices of its prefill group alike: experts. 0: there are none."""
    pair_flops: float
    """Of a new token for each token before it."""
    group_nodes: int
    """Prefill nodes whose devices compute in step, since they share experts; 0: each device by itself."""
    prefill_weight_bytes: float
    """On each prefill device."""
    decode_weight_bytes: float
    prefill_step_s: float
    """What a prefill step takes beside its FLOPs."""
    decode_step_s: float
    """What a decode step takes with next to nobody in it."""
    decode_request_s: float
    """And for each request."""
    decode_bytes_per_token: float
    """KV that a decode step reads of each token of context."""

    def turn_flops(self, context_tokens: float, new_tokens: float) -> float:
        """Of computing ``new_tokens`` behind ``context_tokens``."""
        pairs = new_tokens * (context_tokens + (new_tokens + 1) / 2)
        return (self.local_token_flops + self.spread_token_flops) * new_tokens + self.pair_flops * pairs

    def gb_per_pflop(self, context_tokens: float, new_tokens: float) -> float:
        """The paper's cache-compute ratio of such a turn."""
        read = context_tokens * self.kv_bytes_per_token
        return read / 1e9 / (self.turn_flops(context_tokens, new_tokens) / 1e15)


def _mla(layers: int, heads: int, index_heads: int, index_size: int, picked: int) -> tuple[int, float, float]:
    """Of DeepSeek's sparse attention: KV bytes a token, FLOPs a new token, FLOPs a pair.

    The latent is 512 numbers in FP8 with four scales of 4 bytes, and 64 rotary ones in BF16; the index key
    one byte a number with a scale. Every new token is compared with all before it by the indexer, and attends
    to ``picked`` of them by the absorbed form, 576 numbers for the score and 512 for the value.
    """
    kv_bytes = layers * (512 + 4 * 4 + 64 * 2 + index_size + 4)
    attended = 2.0 * heads * (576 + 512) * layers * picked
    return kv_bytes, attended, 2.0 * index_heads * index_size * layers


def _deepseek_660b() -> PdModel:
    layers = 61
    kv_bytes, attended, pair = _mla(layers, heads=128, index_heads=64, index_size=128, picked=2048)
    active, local = 37e9, layers * 187e6  # of the parameters a token uses, those of attention
    experts, rest = 650e9, 17e9  # bytes in FP8: routed experts, and what every device has
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
        # DeepSeek's own service: 14,800 output tokens a second on a node of eight H800 at 20 to 22 tokens a
        # second for each user, which is 88 a device and 47.6 ms a step.
        decode_request_s=(0.0476 - 0.030) / 88,
        decode_bytes_per_token=layers * (128 + 4),
    )


def _deepseek_27b() -> PdModel:
    """Appendix A.2: hidden 2,560, 30 layers, 32 heads, 72 experts of 1,536, 6 and 2 shared, no query LoRA."""
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
        # By layers, and by parameters a token uses.
        prefill_step_s=large.prefill_step_s * layers / large.layers,
        decode_step_s=large.decode_step_s * layers / large.layers,
        decode_request_s=large.decode_request_s * (local + experts) / 37e9,
        decode_bytes_per_token=layers * (64 + 4),
    )


def _qwen_32b() -> PdModel:
    """64 layers, 40 heads and 8 KV heads of 128, 32.5 billion parameters, all in FP16 on every device."""
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
"""By name."""
