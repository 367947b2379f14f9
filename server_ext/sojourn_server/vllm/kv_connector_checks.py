"""Checks that sojourn's KV connectors support an engine's model and settings.

Each check raises ``SettingsError``, whose text names what was found, what is supported and what to change.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..launch.machine_memory import read_memory
from .kv_identity import layer_specs
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    from .compat import KVCacheConfig, KVCacheSpec, VllmConfig

GROUP_KINDS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""Names of the KV cache spec classes of vLLM that the host memory tier supports together in one model."""


NO_CONTEXTS = "no layer of this model has full attention, and a request frees blocks behind its window"


def check_prefix_caching(vllm_config: VllmConfig) -> None:
    """Raise ``SettingsError`` if requests have no block hashes. The connectors find KV by these hashes."""
    if vllm_config.cache_config.enable_prefix_caching is False:
        raise SettingsError(
            "prefix caching is off, by --no-enable-prefix-caching or because vLLM turns it off for this "
            "model (latent attention on a CPU without AMX); sojourn's KV connectors find KV by its block "
            "hashes. Leave out --kv-host-gib, --kv-disk and --role"
        )


def check_groups(kv_cache_config: KVCacheConfig, *, windows: bool = False) -> None:
    """Raise ``SettingsError`` for a model with KV cache groups that a connector does not support.

    ``windows``: whether the connector supports sliding-window groups beside a full-attention group."""
    if kv_cache_config.needs_kv_cache_zeroing:
        # A worker may clear a block before the connector has saved what was in it.
        raise SettingsError(
            "vLLM clears this model's KV blocks before it reuses them (mixed precision or state-space "
            "layers); sojourn's KV connectors support models whose blocks are overwritten. Leave out "
            "--kv-host-gib and --kv-disk, or use --tier-backend vllm"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if windows and "FullAttentionSpec" in kinds and set(kinds) <= GROUP_KINDS:
        return
    supported = "host memory supports full attention beside sliding windows, each with layers of one size"
    if not windows:
        supported = f"{supported}; a disk, pairs and pipeline parallel support one group"
    raise SettingsError(
        f"this model has {len(groups)} groups of KV caches ({', '.join(sorted(set(kinds)))}); {supported}. "
        "--disable-hybrid-kv-cache-manager makes one group of sliding windows and full attention; otherwise "
        "leave out --kv-host-gib and --kv-disk, or use --tier-backend vllm"
    )


def keeps_contexts(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether some layers of the model have full attention. Only their groups keep the blocks of a
    request's whole context. Other groups free blocks of a running request, and vLLM puts a placeholder in
    their place."""
    from .compat import FullAttentionSpec

    return any(
        isinstance(each, FullAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
        for each in layer_specs(group.kv_cache_spec)
    )


def check_auto(kv_cache_config: KVCacheConfig) -> None:
    """Raise ``SettingsError`` where ``auto`` gives no host memory, although a size given by hand does."""
    from .compat import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise SettingsError("auto is for CUDA and CPUs; set a size with --kv-host-gib")
    if not keeps_contexts(kv_cache_config):
        raise SettingsError(NO_CONTEXTS)


def check_transfers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ``SettingsError`` for a model or a setting with which engines cannot exchange KV."""
    for each in layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec):
        kept = _partial_retention(each)
        if kept:
            raise SettingsError(
                f"this model's layers keep KV of {kept}; transfers support layers that keep KV of all tokens"
            )
    check_context_parallel(vllm_config, "transfers support")
    check_adapters(vllm_config, "transfers do")
    if vllm_config.speculative_config is not None:
        raise SettingsError("transfers do not support speculative decoding (--speculative-config)")
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise SettingsError(
            f"kv_role is {transfer.kv_role!r}; expected 'kv_both': each engine sends and receives"
        )


def check_load_failures(vllm_config: VllmConfig) -> None:
    """Raise ``SettingsError`` if vLLM would fail requests whose KV cannot be loaded."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise SettingsError(
            f"kv_load_failure_policy is {policy!r}; expected 'recompute': otherwise a block that cannot be "
            'loaded fails its request. Add "kv_load_failure_policy": "recompute" to the value of '
            "--kv-transfer-config"
        )


def check_context_parallel(vllm_config: VllmConfig, what: str) -> None:
    """Raise ``SettingsError`` if workers split the tokens of a context, in prefill or in decode. Each worker
    then has the KV of only some of a block's tokens. ``what``: text for the error that names the use."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size * parallel.pipeline_parallel_size or (
        parallel.decode_context_parallel_size > 1
    ):
        raise SettingsError(
            f"the tokens of a context are split over workers (context parallel); {what} workers that split "
            "heads or layers"
        )


def check_adapters(vllm_config: VllmConfig, what: str) -> None:
    """Raise ``SettingsError`` if LoRA adapters are enabled. Call this if KV is shared with other engines or
    outlives the engine. ``what``: text for the error that names this use."""
    if vllm_config.lora_config is not None:
        # The block hashes contain an adapter's name, not its weights, and another engine may have other
        # weights.
        raise SettingsError(
            "adapters are enabled (--enable-lora); their KV is identified by their names and not by their "
            f"weights, so {what} not support them"
        )


def check_hash_seed() -> None:
    """Raise ``SettingsError`` if block hashes differ between processes, because ``PYTHONHASHSEED`` is not
    set."""
    if os.environ.get("PYTHONHASHSEED") in (None, "random"):
        raise SettingsError(
            "stored blocks are found by hashes that differ between processes unless PYTHONHASHSEED is set: "
            "set it to 0 for every engine, as `sojourn serve` does"
        )


def check_memory(name: str, given_bytes: int, has_tensors: bool) -> None:
    """Raise ``SettingsError`` if ``given_bytes`` exceeds the machine's memory. ``name``: name of the setting,
    for the error. Engines without tensors, as in the simulator, are not checked."""
    memory = read_memory()
    if has_tensors and given_bytes > memory.total_bytes:
        raise SettingsError(
            f"{name} is {given_bytes}; expected at most what {memory.owner} has, {memory.total_bytes}"
        )


def _partial_retention(spec: KVCacheSpec) -> str:
    """Return why a layer is not known to keep the KV of all tokens: the part that it keeps, or the name of
    its kind if that is not plain full or latent attention. Empty if it keeps all."""
    from .compat import FullAttentionSpec, MLAAttentionSpec

    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"another kind ({type(spec).__name__})"
    if spec.sliding_window is not None:
        return f"a sliding window of {spec.sliding_window} tokens"
    if spec.attention_chunk_size is not None:
        return f"a chunk of {spec.attention_chunk_size} tokens"
    return ""
