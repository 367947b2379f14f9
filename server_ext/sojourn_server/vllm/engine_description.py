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
from .pair_status_reporter import PairStatusReporter

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
"""KV connectors for prefill/decode pairs: sojourn's, and vLLM's. An engine with one of them is in a
pair, even if its ``kv_role`` is ``kv_both``."""


def host_s_per_token(
    scheduler: Scheduler, profile: EngineProfile | None, tokens_per_block: float
) -> float | None:
    """Return the seconds to load one token's KV from host memory. ``None`` if the time is unknown, without a
    KV connector, and with ``PathsConnector``."""
    bytes_per_s = profile.host_to_device_bytes_per_s if profile is not None else None
    size = stored_block_bytes(scheduler.kv_cache_config)
    connector = scheduler.connector
    if connector is None or isinstance(connector, PathsConnector) or not bytes_per_s or not size:
        return None  # a pair loads KV from its store, at another speed
    return size / tokens_per_block / bytes_per_s


def connector_name(scheduler: Scheduler) -> str | None:
    """Return the name of the engine's KV connector; ``None`` without a connector. For a subclass of
    ``SojournConnector``, the name is ``SojournConnector``, or ``None`` if it has no host memory."""
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    if connector is None or transfer is None:
        return None
    if isinstance(connector, SojournConnector):
        return SojournConnector.__name__ if connector.settings.host_slots else None
    return str(transfer.kv_connector)


def offload_capacity_blocks(scheduler: Scheduler) -> tuple[int, int]:
    """Return how many blocks fit (in host memory, on disk). A number is 0 if the tier is missing or sojourn
    does not manage it."""
    connector = scheduler.connector
    if not isinstance(connector, SojournConnector):
        return 0, 0
    limits = connector.planner.limits
    return limits.host_slots, limits.disk_blocks


def pool_config(scheduler: Scheduler, profile: EngineProfile | None, groups: KVCacheGroups) -> KVPoolConfig:
    """Return the sizes and speeds of the engine's KV memory. Without a ``profile``, speeds are unknown."""
    host_blocks, disk_blocks = offload_capacity_blocks(scheduler)
    return KVPoolConfig(
        blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        block_size=groups.hash_tokens,
        tokens_per_block=groups.tokens_per_block,
        fixed_blocks=groups.fixed_blocks,
        block_bytes=stored_block_bytes(scheduler.kv_cache_config),
        max_context_tokens=scheduler.max_model_len,
        dropped_hit_blocks=int(getattr(scheduler, "use_eagle_block_drop", False)),
        step_tokens=scheduler.max_num_scheduled_tokens,
        host_s_per_token=host_s_per_token(scheduler, profile, groups.tokens_per_block),
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
    )


def offload_description(scheduler: Scheduler) -> TierCapabilities | None:
    """Return a description of KV offload for clients: the connector, whether offload is on or why it is off,
    and the sizes of the tiers.

    For connectors other than ``SojournConnector``, at most the size of host memory is known. Returns ``None``
    without a connector, and with ``PathsConnector``, which has no tiers.
    """
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    if connector is None or transfer is None or isinstance(connector, PathsConnector):
        return None
    name = str(transfer.kv_connector)
    if isinstance(connector, SojournConnector):
        size, (host_blocks, disk_blocks) = connector.settings.block_bytes, offload_capacity_blocks(scheduler)
        shared = bool(connector.planner.limits.shared)
        return TierCapabilities(
            connector=name,
            on=not connector.off,
            off_because=connector.off_because,
            host=TierCapacity(blocks=host_blocks, bytes=host_blocks * size),
            disk=TierCapacity(blocks=disk_blocks, bytes=disk_blocks * size, shared=shared)
            if disk_blocks
            else None,
        )
    # Of other connectors only vLLM's own setting is known.
    host_bytes = transfer.kv_connector_extra_config.get("cpu_bytes_to_use")
    host = TierCapacity(blocks=None, bytes=host_bytes) if isinstance(host_bytes, int) else None
    return TierCapabilities(connector=name, on=True, off_because=None, host=host, disk=None)


def pair_status_reporter(scheduler: Scheduler) -> PairStatusReporter | None:
    """Return the status object of ``PathsConnector``; ``None`` for an engine without this connector."""
    connector = scheduler.connector
    return connector.pair_status if isinstance(connector, PathsConnector) else None


def is_one_of_a_pair(scheduler: Scheduler) -> bool:
    """Return whether the engine belongs to a prefill/decode pair, judged by its connector.

    It does with one of ``PAIR_CONNECTORS``, with a subclass of ``PathsConnector``, and if the ``kv_role`` is
    ``kv_producer`` or ``kv_consumer``. Connectors inside vLLM's ``MultiConnector`` count too. With
    ``SojournConnector`` it never does.
    """
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    if connector is None or transfer is None or isinstance(connector, SojournConnector):
        return False
    found = transfer.kv_connector_extra_config.get("connectors")  # of vLLM's MultiConnector
    inner = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    names = {str(transfer.kv_connector), *(str(one.get("kv_connector")) for one in inner)}
    roles = {str(transfer.kv_role), *(str(one.get("kv_role")) for one in inner)}
    return (
        isinstance(connector, PathsConnector)
        or not names.isdisjoint(PAIR_CONNECTORS)
        or not roles.isdisjoint({"kv_producer", "kv_consumer"})
    )


def profile_description(scheduler: Scheduler, tokens_per_block: float) -> dict[str, str]:
    """Return the engine's properties that an engine profile records, as text: version, sizes and limits."""
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
