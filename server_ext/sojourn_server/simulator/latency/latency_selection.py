"""Selects the latency model and the device shape for the user's hardware and model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn_server.policies.costs.engine_profile import EngineProfile

from .fitted_latency import FittedLatency
from .latency_profiles import (
    HardwareProfile,
    LatencyProfileError,
    ModelShape,
    is_profile_path,
    load_hardware_profile,
    load_model_shape,
    parse_hardware_profile,
    read_profile_toml,
    shipped_profile_names,
)
from .latency_protocol import DeviceShape, LatencyModel
from .roofline_latency import RooflineLatency

GPU_MEMORY_UTILIZATION = 0.92
"""Default of vLLM 0.32 for the share of device memory that an engine uses (config/cache.py)."""
RUNTIME_BYTES = 1.0 * 2**30
"""Estimated device bytes of CUDA context, NCCL and captured graphs. vLLM's start-up logs show 0.5–1.5 GiB."""
MAX_TP = 64


def activation_bytes(model: ModelShape, tp: int, max_num_batched_tokens: int, max_num_seqs: int) -> float:
    """Approximate peak bytes of activations per device in vLLM's profiling run: one layer's largest tensors,
    and the logits.

    vLLM measures the actual peak at start. Every device has the whole residual and hidden states. Queries,
    keys, values and the MLP's inner state are split over the devices. Logits have 32 bits.
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
    """Shape of an engine on ``tp`` devices. By default ``max_model_len`` is the model's limit, and
    ``max_num_seqs`` and ``max_num_batched_tokens`` are vLLM's defaults on this device.

    ``cpu_ratio`` is host memory for KV as a multiple of the device's KV memory. Raises
    ``LatencyProfileError`` if a value is out of range or the model does not fit. For a model that does not
    fit, the message has the missing bytes and the smallest sufficient ``tp``.
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
        """Bytes for KV on each device; negative if the weights do not fit."""
        taken = (
            model.weights_bytes / devices + activation_bytes(model, devices, batched, seqs) + RUNTIME_BYTES
        )
        return hardware.memory_bytes * gpu_memory_utilization - taken

    def pool_tokens(devices: int) -> int:
        per_device = model.kv_bytes_per_token(devices) / devices
        return int(max(0.0, kv_capacity_bytes(devices)) / per_device) // block_size * block_size

    tokens = pool_tokens(tp)
    if tokens < context:
        # vLLM refuses to start if one request of the longest context does not fit.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options that the user may set. An option that is ``None`` has the profile's value, or vLLM's default on
    that device."""

    cpu_ratio: float = 0.0
    """Host memory for KV as a multiple of the device's KV memory; 0 for no offload."""
    gpu_memory_utilization: float | None = None
    """Used only with a hardware profile, because an engine profile states the size of its KV pool."""
    kv_pool_tokens: int | None = None
    """Overrides the computed or measured size of the pool."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None


def is_engine_profile(hardware: str) -> bool:
    """Whether ``hardware`` is the path of an engine profile, which has measurements of one model on one
    device."""
    return (
        is_profile_path(hardware)
        and Path(hardware).is_file()
        and _is_engine_profile_document(read_profile_toml(Path(hardware)))
    )


def _is_engine_profile_document(document: dict[str, Any]) -> bool:
    return "prefill" in document


def load_latency_model(
    hardware: str, model: str | None = None, tp: int = 1, options: DeviceOptions | None = None
) -> tuple[LatencyModel, DeviceShape]:
    """The latency model and the device shape for ``hardware``.

    ``hardware`` is the name of a shipped hardware profile, the path of another hardware profile (TOML), or
    the path of an engine profile from ``sojourn profile``. A hardware profile needs a ``model`` (a name or a
    TOML file). An engine profile names its model; if the profile lacks the KV bytes of a token, ``model``
    provides them. Raises ``LatencyProfileError`` with one line that names the file, the field and a remedy.
    """
    options = options or DeviceOptions()
    if is_profile_path(hardware):
        path = Path(hardware)
        if not path.is_file():
            raise LatencyProfileError(f"{path}: no such file")
        document = read_profile_toml(path)
        if _is_engine_profile_document(document):
            return _measured_latency_model(path, model, tp, options)
        device = parse_hardware_profile(document, path)
    else:
        device = load_hardware_profile(hardware)
    if model is None:
        known = ", ".join(shipped_profile_names("models"))
        raise LatencyProfileError(f"hardware {hardware} needs a model: one of {known}, or a TOML file")
    shape = load_model_shape(model)
    utilization = options.gpu_memory_utilization
    if options.kv_pool_tokens is None:
        described = device_shape(
            device,
            shape,
            tp,
            cpu_ratio=options.cpu_ratio,
            gpu_memory_utilization=GPU_MEMORY_UTILIZATION if utilization is None else utilization,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=options.block_size or 16,
        )
    else:
        shape.check_tp(tp)
        shape.check_context(options.max_model_len)
        batched = options.max_num_batched_tokens or int(device.max_num_batched_tokens)
        block_size = options.block_size or 16
        described = _rounded_device_shape(
            DeviceShape(
                hardware=device.name if tp == 1 else f"{tp}x {device.name}",
                model=shape.name,
                kv_bytes_per_token=shape.kv_bytes_per_token(tp),
                kv_pool_tokens=options.kv_pool_tokens,
                max_context_tokens=min(
                    shape.max_context_tokens, options.kv_pool_tokens // block_size * block_size
                )
                if options.max_model_len is None
                else options.max_model_len,
                max_num_seqs=options.max_num_seqs or int(device.max_num_seqs),
                max_num_batched_tokens=batched,
                block_size=block_size,
            ),
            options.cpu_ratio,
        )
    return RooflineLatency(device, shape, tp), described


def _measured_latency_model(
    path: Path, model: str | None, tp: int, options: DeviceOptions
) -> tuple[LatencyModel, DeviceShape]:
    try:
        profile = EngineProfile.from_toml(path.read_text(encoding="utf-8"))
        latency = FittedLatency.of(profile)
    except ValueError as error:
        raise LatencyProfileError(f"{path}: {error}") from error
    if tp != 1:
        raise LatencyProfileError(f"tp is {tp}; {path} was measured on the engine as it was: leave tp at 1")
    limits = profile.limits
    longest = limits.max_context_tokens
    if longest and options.kv_pool_tokens:
        block_size = options.block_size or profile.block_size
        longest = min(longest, options.kv_pool_tokens // block_size * block_size)
    found = {
        "kv_pool_tokens": options.kv_pool_tokens or limits.kv_pool_tokens,
        "max_model_len": options.max_model_len or longest,
        "max_num_seqs": options.max_num_seqs or limits.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens or limits.max_num_batched_tokens,
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise LatencyProfileError(
            f"{path}: the engine's {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the "
            "profile; set it, or measure again with sojourn profile"
        )
    kv_bytes = limits.kv_bytes_per_token
    if kv_bytes is None and model is not None:
        kv_bytes = load_model_shape(model).kv_bytes_per_token()
    if options.cpu_ratio > 0:
        if kv_bytes is None:
            raise LatencyProfileError(
                f"{path}: limits.kv_bytes_per_token is missing, and host memory needs it: name the model"
            )
        latency.copy_s(1, to_host=True)
        latency.copy_s(1, to_host=False)
    device = DeviceShape(
        hardware=profile.hardware,
        model=profile.model,
        kv_bytes_per_token=kv_bytes or 0,
        kv_pool_tokens=found["kv_pool_tokens"] or 0,
        max_context_tokens=found["max_model_len"] or 0,
        max_num_seqs=found["max_num_seqs"] or 0,
        max_num_batched_tokens=found["max_num_batched_tokens"] or 0,
        block_size=options.block_size or profile.block_size,
    )
    return latency, _rounded_device_shape(device, options.cpu_ratio)


def _rounded_device_shape(device: DeviceShape, cpu_ratio: float) -> DeviceShape:
    """Return ``device`` with its pool rounded down to whole blocks, and host memory set by ``cpu_ratio``.
    Raises ``LatencyProfileError`` if the pool cannot hold one request of the longest context."""
    if not 0 <= cpu_ratio < float("inf"):
        raise LatencyProfileError(f"cpu_ratio is {cpu_ratio}; expected a number ≥ 0")
    block = device.block_size
    pool = device.kv_pool_tokens // block * block
    if pool < device.max_context_tokens:
        raise LatencyProfileError(
            f"kv_pool_tokens is {pool:,}, max_model_len {device.max_context_tokens:,}: one request would not "
            f"fit; use a max_model_len of at most {pool}"
        )
    return device._replace(kv_pool_tokens=pool, host_kv_tokens=int(pool * cpu_ratio) // block * block)
