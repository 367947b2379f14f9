"""Strings that identify an engine's KV. Stores and peers compare them before they share blocks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..launch.weights_fingerprint import UnknownWeights, weights_fingerprint
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    from .compat import KVCacheSpec, VllmConfig


def model_identity(vllm_config: VllmConfig, *, sure: bool = True) -> str:
    """Return a text that identifies the model: weights, shape, load format, and the seed of dummy weights.

    With ``sure``, raises ``SettingsError`` if other weights could have the same identity. KV that is shared
    or outlives the engine needs this.
    """
    model = vllm_config.model_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    load = vllm_config.load_config.load_format
    how = f"{model.quantization} {f'{load} seed={model.seed}' if load == 'dummy' else load}"
    try:
        weights = _weights_identity(vllm_config)
    except UnknownWeights as error:
        if sure and load != "dummy":
            raise SettingsError(
                f"KV that is shared or outlives the engine needs known weights: {error}"
            ) from None
        weights = f"{model.model}@{model.revision}"
    return f"{weights} {model.dtype} {shape} {how}"


def _weights_identity(vllm_config: VllmConfig) -> str:
    """Return the fingerprint of the loaded weights. Raises ``UnknownWeights``."""
    import psutil  # type: ignore[import-untyped]
    from huggingface_hub import constants

    from .compat import envs

    model, folder = vllm_config.model_config, vllm_config.load_config.download_dir
    if model.model_weights:
        raise UnknownWeights(
            f"the weights at {model.model_weights} may change; expected the path of a copy on a disk"
        )
    # Another process may have downloaded other weights since, which this process has not read.
    cache = None if envs.VLLM_USE_MODELSCOPE else Path(folder or constants.HF_HUB_CACHE)
    since_s = psutil.Process().create_time()
    return weights_fingerprint(model.model, model.revision, cache=cache, since_s=since_s)


def dtype_identity(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """Return the cache's data type, and on CPUs its packing, as ``torch.bfloat16/amx``.

    vLLM's CPU attention packs a block for the processor's instructions, so the same bytes are different KV on
    another kind of processor. ``spec`` is the spec of the only KV cache group.
    """
    cache = vllm_config.cache_config
    dtype = str(cache.cache_dtype if cache.cache_dtype != "auto" else vllm_config.model_config.dtype)
    packings = sorted({_cpu_packing(vllm_config, each) for each in layer_specs(spec)} - {None, ""})  # type: ignore[type-var]
    return "/".join([dtype, *map(str, packings)])


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers if they differ in size, otherwise the group's own spec."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _cpu_packing(vllm_config: VllmConfig, spec: KVCacheSpec) -> str | None:
    """Return the packing that vLLM chooses on a CPU, ``None`` on other devices."""
    from .compat import current_platform

    if not current_platform.is_cpu():
        return None
    from .compat import cpu_attention_isa

    try:
        return str(
            cpu_attention_isa(
                vllm_config.model_config.dtype,
                spec.block_size,
                getattr(spec, "head_size", None),
                vllm_config.cache_config.cache_dtype,
            )
        )
    except NotImplementedError as error:  # the attention layers raise it too
        raise SettingsError(f"this processor does not support the KV cache: {error}") from error


def hash_identity(vllm_config: VllmConfig, block_tokens: int) -> str:
    """Return a text with all settings that block hashes depend on."""
    algorithm, seed = vllm_config.cache_config.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")
    return f"{algorithm}/seed={seed}/{block_tokens}"
