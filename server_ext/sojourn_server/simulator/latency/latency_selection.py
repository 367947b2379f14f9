"""Selects the latency model and the device shape for the user's hardware and model."""

from __future__ import annotations

from pathlib import Path

from sojourn_server.policies.costs.engine_profile import EngineProfile

from . import latency_profiles as profiles
from .latency_models import DeviceShape, FittedLatency, LatencyModel, RooflineLatency

GPU_MEMORY_UTILIZATION = 0.92
"""Default of vLLM 0.32 for the share of device memory that an engine uses (config/cache.py)."""
BLOCK_SIZE = 16
"""Tokens of a KV block on hardware without an engine profile: vLLM's default."""
DEFAULT_MODEL = "llama-3.1-8b"
"""Model if neither the user nor an engine profile names one."""


def load_latency_model(
    hardware: str,
    model: str | None = None,
    tp: int = 1,
    *,
    cpu_ratio: float = 0.0,
    kv_pool_tokens: int | None = None,
    max_model_len: int | None = None,
) -> tuple[LatencyModel, DeviceShape]:
    """The latency model and the device shape for ``hardware``, which is one of:

    - a hardware profile: the name of a shipped one, or the path of a TOML file. ``model`` is a name or a TOML
      file (default: ``DEFAULT_MODEL``).
    - the path of an engine profile, made by ``sojourn profile``. ``tp`` must be 1. ``model`` is used only if
      the profile lacks the KV bytes of a token.

    ``cpu_ratio``: host memory for KV, as a multiple of the device's KV memory. ``kv_pool_tokens``: size of
    the KV pool (default: the engine's own, or computed). ``max_model_len``: longest context (default: the
    engine's own, or that of the model; with ``kv_pool_tokens``, at most the pool's size).

    Raises ``LatencyProfileError`` with one line that names the file, the field and a remedy. If the model
    does not fit, it has the missing bytes.
    """
    load = _measured if is_engine_profile(hardware) else _roofline
    latency, device = load(hardware, model, tp, kv_pool_tokens, max_model_len)
    if not 0 <= cpu_ratio < float("inf"):
        raise profiles.LatencyProfileError(f"cpu_ratio is {cpu_ratio}; expected a number ≥ 0")
    block = device.block_size
    pool = device.kv_pool_tokens // block * block
    if pool < 2 * block:
        raise profiles.LatencyProfileError(
            f"the KV pool holds {pool:,} tokens; expected at least {2 * block}, which one request needs"
        )
    if pool < device.max_context_tokens:
        raise profiles.LatencyProfileError(
            f"kv_pool_tokens is {pool:,}, max_model_len {device.max_context_tokens:,}: one request would not "
            f"fit; use a max_model_len of at most {pool}"
        )
    if cpu_ratio and not device.kv_bytes_per_token:
        raise profiles.LatencyProfileError(
            f"{hardware}: limits.kv_bytes_per_token is missing, and host memory needs it: name the model"
        )
    for to_host in (True, False) if cpu_ratio else ():  # raises an error without the bandwidth
        latency.copy_s(1, to_host=to_host)
    return latency, device._replace(
        kv_pool_tokens=pool,
        # vLLM's null block is part of the pool, and the longest request has to fit the rest.
        max_context_tokens=min(device.max_context_tokens, pool - block),
        host_kv_tokens=int(pool * cpu_ratio) // block * block,
    )


def _roofline(
    hardware: str, model: str | None, tp: int, pool_tokens: int | None, max_len: int | None
) -> tuple[LatencyModel, DeviceShape]:
    """As ``load_latency_model``, for a hardware profile."""
    profile = profiles.load_hardware_profile(hardware)
    shape = profiles.load_model_shape(DEFAULT_MODEL if model is None else model)
    latency = RooflineLatency(profile, shape, tp)
    context = shape.max_context_tokens if max_len is None else max_len
    if context > shape.max_context_tokens:
        raise profiles.LatencyProfileError(
            f"max_model_len is {context:,}; {shape.name} takes at most {shape.max_context_tokens:,}"
        )
    if pool_tokens is None:
        pool_tokens = _pool_tokens(profile, shape, tp, context)
    elif max_len is None:
        context = min(context, pool_tokens // BLOCK_SIZE * BLOCK_SIZE)
    name, seqs, batched = profile.name, int(profile.max_num_seqs), int(profile.max_num_batched_tokens)
    return latency, DeviceShape(
        name if tp == 1 else f"{tp}x {name}", shape.name, shape.kv_bytes_per_token(tp), pool_tokens,
        context, seqs, batched, BLOCK_SIZE,
    )  # fmt: skip


def _measured(
    path: str, model: str | None, tp: int, pool_tokens: int | None, max_len: int | None
) -> tuple[LatencyModel, DeviceShape]:
    """As ``load_latency_model``, for an engine profile."""
    try:
        profile = EngineProfile.from_toml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise profiles.LatencyProfileError(f"{path}: {error}") from error
    if profile.steps is None:
        raise profiles.LatencyProfileError(
            f"{path}: the engine profile holds no step costs; measure with sojourn profile, decoding included"
        )
    if tp != 1:
        raise profiles.LatencyProfileError(
            f"tp is {tp}; {path} was measured on the engine as it was: leave tp at 1"
        )
    limits = profile.limits
    longest = limits.max_context_tokens
    if longest and pool_tokens:
        longest = min(longest, pool_tokens // profile.block_size * profile.block_size)
    found = {
        "kv_pool_tokens": pool_tokens or limits.kv_pool_tokens or 0,
        "max_model_len": max_len or longest or 0,
        "max_num_seqs": limits.max_num_seqs or 0,
        "max_num_batched_tokens": limits.max_num_batched_tokens or 0,
    }
    if missing := [name for name, value in found.items() if not value]:
        raise profiles.LatencyProfileError(
            f"{path}: the engine's {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the "
            "profile; set it, or measure again with sojourn profile"
        )
    kv_bytes = limits.kv_bytes_per_token
    if kv_bytes is None and model is not None:
        kv_bytes = profiles.load_model_shape(model).kv_bytes_per_token()
    pool, context, seqs, batched = found.values()
    latency = FittedLatency(
        profile.steps, profile.device_to_host_bytes_per_s, profile.host_to_device_bytes_per_s
    )
    return latency, DeviceShape(
        profile.hardware, profile.model, kv_bytes or 0, pool, context, seqs, batched, profile.block_size
    )


def is_engine_profile(hardware: str) -> bool:
    """Whether ``hardware`` is the path of an engine profile: measurements of one engine, made by ``sojourn
    profile``."""
    path = Path(hardware)
    return (
        profiles.is_profile_path(hardware)
        and path.is_file()
        and "prefill" in profiles.read_profile_toml(path)
    )


def _pool_tokens(
    hardware: profiles.HardwareProfile, model: profiles.ModelShape, tp: int, context: int
) -> int:
    """KV tokens that fit beside the weights on ``tp`` devices, rounded down to whole blocks. Raises
    ``LatencyProfileError`` if a request of ``context`` tokens does not fit."""

    def kv_capacity_bytes(devices: int) -> float:
        """Bytes for KV on each device; negative if the weights do not fit.

        vLLM measures the peak of activations in its profiling run. Here they are the largest tensors of one
        layer, and the logits, in 32 bits. Every device has the whole residual and hidden states. Queries,
        keys, values and the MLP's inner state are split over the devices.
        """
        inner = model.intermediate_size * max(1, model.experts_per_token)
        qkv = model.head_size * (model.heads + 2 * model.kv_heads)
        per_token = model.weight_bytes * (4 * model.hidden_size + (3 * inner + qkv) / devices)
        batched = int(hardware.max_num_batched_tokens)
        logits = min(int(hardware.max_num_seqs), batched) * model.vocabulary * 4 * 2
        taken = model.weights_bytes / devices + batched * per_token + logits + profiles.RUNTIME_BYTES
        return hardware.memory_bytes * GPU_MEMORY_UTILIZATION - taken

    def pool_tokens(devices: int) -> int:
        per_device = model.kv_bytes_per_token(devices) / devices
        return int(max(0.0, kv_capacity_bytes(devices)) / per_device) // BLOCK_SIZE * BLOCK_SIZE

    tokens = pool_tokens(tp)
    if tokens >= context:
        return tokens
    # vLLM refuses to start if one request of the longest context does not fit.
    missing = context * model.kv_bytes_per_token(tp) / tp - kv_capacity_bytes(tp)
    larger = (n for n in range(tp + 1, model.heads + 1) if model.splits(n))
    enough = next((f"use tp {n}" for n in larger if pool_tokens(n) >= context), "no tp is enough")
    advice = f"{enough}, or a max_model_len of at most {tokens}" if tokens > 0 else enough
    raise profiles.LatencyProfileError(
        f"{model.name} with a context of {context:,} tokens does not fit on {tp} × {hardware.name}: "
        f"{missing / 2**30:.1f} GiB a device are missing; {advice}"
    )
