"""How an engine's KV is told from any other's, in the words that stores and peers compare."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..launch.weights import UnknownWeights, fingerprint
from .settings import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


def model_words(vllm_config: VllmConfig, *, sure: bool = True) -> str:
    """Weights, shape and how they were loaded: random weights by their seed.

    For KV that outlives the engine, or that others read: raises ``SettingsError`` where other weights may
    go by the same words. Not where it need not be ``sure``.
    """
    model = vllm_config.model_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    load = vllm_config.load_config.load_format
    how = f"{model.quantization} {f'{load} seed={model.seed}' if load == 'dummy' else load}"
    try:
        weights = _weights_words(vllm_config)
    except UnknownWeights as error:
        if sure and load != "dummy":
            raise SettingsError(f"KV that others read, or later starts: {error}") from None
        weights = f"{model.model}@{model.revision}"
    return f"{weights} {model.dtype} {shape} {how}"


def _weights_words(vllm_config: VllmConfig) -> str:
    """Once they are loaded. Raises ``UnknownWeights``."""
    import psutil  # type: ignore[import-untyped]
    from huggingface_hub import constants
    from vllm import envs

    model, folder = vllm_config.model_config, vllm_config.load_config.download_dir
    if model.model_weights:
        raise UnknownWeights(
            f"which weights are at {model.model_weights} may change; give the path of a copy on a disk"
        )
    # What somebody else downloads meanwhile is not what this process has read.
    cache = None if envs.VLLM_USE_MODELSCOPE else Path(folder or constants.HF_HUB_CACHE)
    since_s = psutil.Process().create_time()
    return fingerprint(model.model, model.revision, cache=cache, since_s=since_s)


def dtype_words(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """Of the cache, and on CPUs the order in which it is packed, as ``torch.bfloat16/amx``.

    vLLM's CPU attention packs a block for the instructions that the processor has: the same bytes are other
    KV on another kind of processor. ``spec`` is that of the only group.
    """
    cache = vllm_config.cache_config
    dtype = str(cache.cache_dtype if cache.cache_dtype != "auto" else vllm_config.model_config.dtype)
    packings = sorted({_cpu_packing(vllm_config, each) for each in specs_of(spec)} - {None, ""})  # type: ignore[type-var]
    return "/".join([dtype, *map(str, packings)])


def specs_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Those of a group's layers, where they differ in size; else the group's own."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _cpu_packing(vllm_config: VllmConfig, spec: KVCacheSpec) -> str | None:
    """By vLLM's own choice; ``None``: it is not a CPU engine."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        return str(
            _get_attn_isa(
                vllm_config.model_config.dtype,
                spec.block_size,
                getattr(spec, "head_size", None),
                vllm_config.cache_config.cache_dtype,
            )
        )
    except NotImplementedError as error:  # the attention layers say so as well
        raise SettingsError(f"this processor has no KV cache of that kind: {error}") from error


def hash_words(vllm_config: VllmConfig, block_tokens: int) -> str:
    """What blocks' hashes depend on."""
    algorithm, seed = vllm_config.cache_config.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")
    return f"{algorithm}/seed={seed}/{block_tokens}"
