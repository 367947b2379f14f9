"""How much KV fits beside a model on a device, and the limits vLLM would set there."""

from __future__ import annotations

from .hardware_profile import HardwareProfile
from .latency_model import DeviceShape
from .latency_profile_files import LatencyProfileError
from .model_shape import ModelShape

GPU_MEMORY_UTILIZATION = 0.92
"""vLLM 0.32's default (config/cache.py)."""
RUNTIME_BYTES = 1.0 * 2**30
"""CUDA context, NCCL, captured graphs. An estimate: vLLM's start-up logs show 0.5 to 1.5 GiB."""
MAX_TP = 64


def activation_bytes(model: ModelShape, tp: int, max_num_batched_tokens: int, max_num_seqs: int) -> float:
    """Peak beside the weights in vLLM's profiling run, roughly: one layer's largest tensors, and the logits.

    An estimate: vLLM measures it when it starts. Residual and hidden states are whole on every device,
    queries, keys, values and the MLP's inner state are split; logits are sampled in 32 bits.
    """
    inner = model.intermediate_size * max(1, model.experts_per_token)
    qkv = model.head_size * (model.heads + 2 * model.kv_heads)
    per_token = model.weight_bytes * (4 * model.hidden_size + (3 * inner + qkv) / tp)
    logits = min(max_num_seqs, max_num_batched_tokens) * model.vocabulary * 4 * 2
    return max_num_batched_tokens * per_token + logits


def device_shape(
    hardware: HardwareProfile,
    model: ModelShape,
    tp: int = 1,
    *,
    cpu_ratio: float = 0.0,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
) -> DeviceShape:
    """What the scheduler would be given. ``None``: the model's own limit, and vLLM's default on this device.

    ``cpu_ratio`` is host memory for KV as a multiple of the device's KV. Raises ``LatencyProfileError``
    where the model does not fit, naming what is missing and the smallest ``tp`` that would do.
    """
    model.check_tp(tp)
    if not 0 < gpu_memory_utilization <= 1:
        raise LatencyProfileError(f"gpu_memory_utilization is {gpu_memory_utilization}; expected 0 to 1")
    if not 0 <= cpu_ratio < float("inf"):
        raise LatencyProfileError(f"cpu_ratio is {cpu_ratio}; expected a number ≥ 0")
    context = model.max_context_tokens if max_model_len is None else max_model_len
    seqs = int(hardware.max_num_seqs) if max_num_seqs is None else max_num_seqs
    batched = (
        int(hardware.max_num_batched_tokens) if max_num_batched_tokens is None else max_num_batched_tokens
    )
    for name, value in (
        ("max_model_len", context),
        ("max_num_seqs", seqs),
        ("max_num_batched_tokens", batched),
        ("block_size", block_size),
    ):
        if value < 1:
            raise LatencyProfileError(f"{name} is {value}; expected at least 1")
    model.check_context(context)

    def kv_capacity_bytes(devices: int) -> float:
        """Left on each device, negative where the weights alone do not fit."""
        taken = (
            model.weights_bytes / devices + activation_bytes(model, devices, batched, seqs) + RUNTIME_BYTES
        )
        return hardware.memory_bytes * gpu_memory_utilization - taken

    def pool_tokens(devices: int) -> int:
        per_device = model.kv_bytes_per_token(devices) / devices
        return int(max(0.0, kv_capacity_bytes(devices)) / per_device) // block_size * block_size

    tokens = pool_tokens(tp)
    if tokens < context:
        # vLLM refuses to start where not even one request of the longest context fits.
        needed = context * model.kv_bytes_per_token(tp) / tp
        missing = needed - kv_capacity_bytes(tp)
        enough = next(
            (n for n in _valid_tensor_parallel_sizes(model) if n > tp and pool_tokens(n) >= context), None
        )
        advice = (
            f"use tp {enough}"
            if enough
            else "no tp is enough"
            if kv_capacity_bytes(tp) <= 0
            else f"use a max_model_len of at most {tokens}"
        )
        if enough and tokens > 0:
            advice += f", or a max_model_len of at most {tokens}"
        raise LatencyProfileError(
            f"{model.name} with a context of {context:,} tokens does not fit on {tp} × {hardware.name}: "
            f"{missing / 2**30:.1f} GiB a device are missing; {advice}"
        )
    return DeviceShape(
        hardware=hardware.name if tp == 1 else f"{tp}x {hardware.name}",
        model=model.name,
        kv_bytes_per_token=model.kv_bytes_per_token(tp),
        kv_pool_tokens=tokens,
        max_context_tokens=context,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        block_size=block_size,
        host_kv_tokens=int(tokens * cpu_ratio) // block_size * block_size,
    )


def _valid_tensor_parallel_sizes(model: ModelShape) -> list[int]:
    return [n for n in range(1, MAX_TP + 1) if model.splits(n)]
