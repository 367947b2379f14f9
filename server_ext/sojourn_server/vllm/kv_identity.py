"""Strings that identify an engine's KV. Stores and peers compare them before they share blocks."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..launch.weights_fingerprint import UnknownWeights, processor_digest, weights_fingerprint
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    from .compat import KVCacheSpec, ModelConfig, VllmConfig

_MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
"""Multi-modal options that change the KV of an image, video or sound, but not vLLM's hash of it."""
_SPEED_OPTIONS = frozenset(
    (
        "enable_multithread_load",
        "num_threads",
        "enable_weights_track",
        "distributed",
        "concurrency",
        "memory_limit",
    )
)
"""Options of vLLM's loaders that do not change the weights."""


def model_identity(vllm_config: VllmConfig, *, sure: bool = True) -> str:
    """Return a text that identifies the model: weights, shape, load format, the seed of dummy weights, and a
    hash of other settings that change the KV.

    ``sure``: raise ``SettingsError`` if other weights could have the same text. It must be true for KV that
    is shared or outlives the engine.
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
    return f"{weights} {model.dtype} {shape} {how}{_settings_digest(vllm_config)}"


def _settings_digest(vllm_config: VllmConfig) -> str:
    """Return a space and a hash of those settings that change the KV of the same weights; empty without such
    settings. Only a hash is returned, because the options of a loader may contain passwords."""
    model = vllm_config.model_config
    loader: Any = getattr(vllm_config.load_config, "model_loader_extra_config", None) or {}
    if isinstance(loader, dict):
        loader = {name: value for name, value in loader.items() if name not in _SPEED_OPTIONS}
    settings = {
        "length": _length_settings(model),
        "quantization_config": getattr(model, "quantization_config", None),
        "loader": loader,
        "media": _media_settings(model),
    }
    changed = {name: value for name, value in settings.items() if value}
    if not changed:
        return ""
    text = json.dumps(changed, sort_keys=True, default=repr)
    return f" {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _length_settings(model: ModelConfig) -> list[Any]:
    """Return the settings through which the KV depends on ``--max-model-len``; empty for most models.
    LongRoPE rotates all keys by it, and vLLM scales the attention of Llama 4 by it."""
    if not re.search(r'"(longrope|su|llama4\w*)"', model.hf_config.to_json_string()):
        return []
    length = model.max_model_len
    if getattr(model, "original_max_model_len", None) == -1:
        # ``--max-model-len auto``: vLLM builds the model with the length that it derives from the model's
        # configuration, and lowers ``max_model_len`` afterwards to what fits in memory.
        length = model.get_and_verify_max_len(-1)
    given = getattr(model, "override_generation_config", None) or {}
    return [length, given.get("attn_temperature_tuning")]


def _media_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the given ``_MEDIA_OPTIONS`` and the processor's digest; empty for a text-only model."""
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return {}
    found = {name: getattr(media, name, None) for name in _MEDIA_OPTIONS}
    if found["video_pruning_rate"]:
        found["video_pruning_method"] = getattr(media, "video_pruning_method", None)
    found["processor"] = processor_digest(model.model)
    return {name: value for name, value in found.items() if value}


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
    # Another process may have downloaded other weights after this process read its own.
    cache = None if envs.VLLM_USE_MODELSCOPE else Path(folder or constants.HF_HUB_CACHE)
    since_s = psutil.Process().create_time()
    return weights_fingerprint(model.model, model.revision, cache=cache, since_s=since_s)


def dtype_identity(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """Return the KV cache's data type. On a CPU, add the name of the packing, as in ``torch.bfloat16/amx``.

    vLLM's CPU attention packs a block for the processor's instructions, so the same bytes are different KV on
    another kind of processor. ``spec``: spec of the model's first KV cache group. Raises ``SettingsError`` if
    the processor does not support the KV cache.
    """
    cache = vllm_config.cache_config
    dtype = str(cache.cache_dtype if cache.cache_dtype != "auto" else vllm_config.model_config.dtype)
    packings = sorted({_cpu_packing(vllm_config, each) for each in layer_specs(spec)} - {None, ""})  # type: ignore[type-var]
    return "/".join([dtype, *map(str, packings)])


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers if they differ in size, otherwise the group's own spec."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _cpu_packing(vllm_config: VllmConfig, spec: KVCacheSpec) -> str | None:
    """Return the name of the packing that vLLM chooses on a CPU; ``None`` on other devices."""
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
