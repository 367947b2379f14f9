"""How an engine's KV is told from any other's, in the words that stores and peers compare."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from ..launch.weights import fingerprint
from .settings import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


def model_words(vllm_config: VllmConfig) -> str:
    """Weights, shape and how they were loaded: random weights by their seed."""
    model = vllm_config.model_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    load = vllm_config.load_config.load_format
    how = f"{model.quantization} {f'{load} seed={model.seed}' if load == 'dummy' else load}"
    return f"{fingerprint(model.model, model.revision)} {model.dtype} {shape} {how}"


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
