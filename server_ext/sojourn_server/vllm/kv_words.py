"""How an engine's KV is told from any other's, in the words that stores and peers compare."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from ..launch.weights import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def model_words(vllm_config: VllmConfig) -> str:
    """Weights, shape and how they were loaded: random weights by their seed."""
    model = vllm_config.model_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    load = vllm_config.load_config.load_format
    how = f"{model.quantization} {f'{load} seed={model.seed}' if load == 'dummy' else load}"
    return f"{fingerprint(model.model, model.revision)} {model.dtype} {shape} {how}"


def dtype_words(vllm_config: VllmConfig) -> str:
    """Of the cache."""
    cache = vllm_config.cache_config
    return str(cache.cache_dtype if cache.cache_dtype != "auto" else vllm_config.model_config.dtype)


def hash_words(vllm_config: VllmConfig, block_tokens: int) -> str:
    """What blocks' hashes depend on."""
    algorithm, seed = vllm_config.cache_config.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")
    return f"{algorithm}/seed={seed}/{block_tokens}"
