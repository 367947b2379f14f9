"""Functions that describe an engine: sizes, versions, KV connector, host memory and disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.engine_answers import TierCapabilities, TierCapacity
from ..core.scheduler_state import KVPoolConfig
from ..policies.costs.engine_profile import EngineProfile
from .compat import running_vllm
from .kv_cache_groups import KVCacheGroups, stored_block_bytes
from .kv_offload_connector import SojournConnector
from .kv_transfer_connector import PathsConnector
from .offload_cache_policy import find_cache_policy
from .pair_connector import offload_connector

if TYPE_CHECKING:
    from .compat import Scheduler


PAIR_CONNECTORS = frozenset(
    {
        PathsConnector.__name__,
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
    }
)
"""KV connectors for prefill/decode pairs. An engine with one is in a pair, even if its ``kv_role`` is
``kv_both``."""


def connector_name(scheduler: Scheduler) -> str | None:
    """Return the name of the engine's KV connector; ``SojournConnector`` if it has host memory of that."""
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    if connector is None or transfer is None:
        return None
    own = offload_connector(connector)
    if own is not None and own.settings.host_slots:
        return str(SojournConnector.__name__)
    if isinstance(connector, PathsConnector):
        return str(PathsConnector.__name__)
    return None if own is not None else str(transfer.kv_connector)


def pool_config(scheduler: Scheduler, profile: EngineProfile | None, groups: KVCacheGroups) -> KVPoolConfig:
    """Return the sizes and speeds of the engine's KV memory. Without a ``profile``, speeds are unknown."""
    connector, size = scheduler.connector, stored_block_bytes(scheduler.kv_cache_config)
    own = offload_connector(connector)
    limits = own.planner.limits if own is not None else None
    chunks = find_cache_policy(connector)
    bytes_per_s = profile.host_to_device_bytes_per_s if profile is not None else None
    host_s_per_token = None
    # A pair without host memory loads KV from its store, at another speed.
    is_store = isinstance(connector, PathsConnector) and own is None
    if connector is not None and not is_store and bytes_per_s and size:
        host_s_per_token = size / groups.tokens_per_block / bytes_per_s
    return KVPoolConfig(
        blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        block_size=groups.hash_tokens,
        tokens_per_block=groups.tokens_per_block,
        fixed_blocks=groups.fixed_blocks,
        block_bytes=size,
        hidden_size=0 if groups.fixed_blocks else scheduler.vllm_config.model_config.get_hidden_size(),
        max_context_tokens=scheduler.max_model_len,
        dropped_hit_blocks=int(getattr(scheduler, "use_eagle_block_drop", False)),
        step_tokens=scheduler.max_num_scheduled_tokens,
        host_s_per_token=host_s_per_token,
        host_blocks=limits.host_slots if limits else chunks.cache_capacity if chunks else 0,
        disk_blocks=limits.disk_blocks if limits is not None else 0,
    )


def offload_description(scheduler: Scheduler) -> TierCapabilities | None:
    """Describe KV offload for clients: the connector, whether offload is on or why it is off, and the sizes
    of the tiers, if known. ``None`` without tiers."""
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    own = offload_connector(connector)
    if connector is None or transfer is None or (isinstance(connector, PathsConnector) and own is None):
        return None
    host: TierCapacity | None = None
    disk: TierCapacity | None = None
    on, why = (not own.off, own.off_because) if own is not None else (True, None)
    if own is not None:
        size, limits = own.settings.block_bytes, own.planner.limits
        host = TierCapacity(blocks=limits.host_slots, bytes=limits.host_slots * size)
        if blocks := limits.disk_blocks:
            is_shared = on and not own.planner.disk.is_closed
            disk = TierCapacity(blocks=blocks, bytes=blocks * size, shared=is_shared)
    # Of other connectors only vLLM's own setting is known.
    elif isinstance(host_bytes := transfer.kv_connector_extra_config.get("cpu_bytes_to_use"), int):
        chunks = find_cache_policy(connector)
        host = TierCapacity(blocks=chunks.cache_capacity if chunks is not None else None, bytes=host_bytes)
    return TierCapabilities(
        connector=str(transfer.kv_connector), on=on, off_because=why, host=host, disk=disk
    )


def is_one_of_a_pair(scheduler: Scheduler) -> bool:
    """Return whether the engine belongs to a prefill/decode pair, judged by the class, names and roles of its
    connectors, also of those inside vLLM's ``MultiConnector``. With ``SojournConnector`` it never does."""
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    if connector is None or transfer is None or isinstance(connector, SojournConnector):
        return False
    is_multi = transfer.kv_connector == "MultiConnector"
    inner = transfer.kv_connector_extra_config.get("connectors", ()) if is_multi else ()
    names = {str(transfer.kv_connector), *(str(one.get("kv_connector")) for one in inner)}
    roles = {str(transfer.kv_role), *(str(one.get("kv_role")) for one in inner)}
    return (
        isinstance(connector, PathsConnector)
        or not names.isdisjoint(PAIR_CONNECTORS)
        or not roles.isdisjoint({"kv_producer", "kv_consumer"})
    )


def profile_description(scheduler: Scheduler, tokens_per_block: float) -> dict[str, str]:
    config = scheduler.scheduler_config
    devices = scheduler.vllm_config.parallel_config.tensor_parallel_size
    found = {
        "vllm": running_vllm(),
        "block_size": str(int(tokens_per_block) or 1),
        "num_blocks": str(scheduler.kv_cache_config.num_blocks),
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
    }
    # ``size`` is for one worker. A scheduler without a model has no tensors.
    if size := stored_block_bytes(scheduler.kv_cache_config):
        found["kv_bytes_per_token"] = str(int(size * devices // tokens_per_block))
    return found
