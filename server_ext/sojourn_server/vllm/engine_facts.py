"""What an engine says of itself: sizes, versions and what is below its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..policy.costs import EngineProfile
from .connector import SojournConnector
from .paths_connector import PathsConnector
from .paths_member import PathsMember

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def host_s_per_token(scheduler: Scheduler, profile: EngineProfile | None) -> float | None:
    """Where the engine has a connector and the profile a bandwidth; None: not known."""
    bytes_per_s = profile.host_to_device_bytes_per_s if profile is not None else None
    size = block_bytes(scheduler)
    connector = scheduler.connector
    if connector is None or isinstance(connector, PathsConnector) or not bytes_per_s or not size:
        return None  # a pair's KV comes from storage, at a speed of its own
    return size / scheduler.block_size / bytes_per_s


def blocks_below(scheduler: Scheduler) -> tuple[int, int]:
    """What our tiers in host memory and on disk can hold."""
    connector = scheduler.connector
    if not isinstance(connector, SojournConnector):
        return 0, 0
    limits = connector.planner.limits
    return limits.host_slots, limits.disk_blocks


def below_device(scheduler: Scheduler) -> dict[str, Any] | None:
    """What capabilities tell of host memory and disk below the device; ``None``: there is nothing."""
    connector, transfer = scheduler.connector, scheduler.vllm_config.kv_transfer_config
    if connector is None or transfer is None or isinstance(connector, PathsConnector):
        return None
    told = {"connector": str(transfer.kv_connector), "on": True, "off_because": None, "disk": None}
    if isinstance(connector, SojournConnector):
        size, (host_blocks, disk_blocks) = connector.settings.block_bytes, blocks_below(scheduler)
        told |= {"on": not connector.off, "off_because": connector.off_because}
        told["host"] = {"blocks": host_blocks, "bytes": host_blocks * size}
        if disk_blocks:
            shared = {"shared": True} if connector.planner.limits.shared else {}
            told["disk"] = {"blocks": disk_blocks, "bytes": disk_blocks * size, **shared}
        return told
    # Of other connectors no more is known than what vLLM's own is told.
    host_bytes = transfer.kv_connector_extra_config.get("cpu_bytes_to_use")
    told["host"] = {"blocks": None, "bytes": host_bytes} if isinstance(host_bytes, int) else None
    return told


def member_of_pair(scheduler: Scheduler) -> PathsMember | None:
    """What tells of the paths to storage and to other engines; ``None``: this one is alone."""
    connector = scheduler.connector
    return connector.member if isinstance(connector, PathsConnector) else None


def block_bytes(scheduler: Scheduler) -> int:
    """Of one block of one worker; 0 where there is no model."""
    config = scheduler.kv_cache_config
    tensors = getattr(config, "kv_cache_tensors", None) or []
    blocks = max(1, config.num_blocks)
    return sum(tensor.size for tensor in tensors) // blocks


def described(scheduler: Scheduler) -> dict[str, str]:
    """What ``sojourn profile`` needs to know of the engine to stand in for it."""
    config = scheduler.scheduler_config
    devices = scheduler.vllm_config.parallel_config.tensor_parallel_size
    told = {
        "vllm": vllm_version(),
        "block_size": str(scheduler.block_size),
        "num_blocks": str(scheduler.kv_cache_config.num_blocks),
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
    }
    # One worker's share; a scheduler without a model has no tensors to tell from.
    if size := block_bytes(scheduler):
        told["kv_bytes_per_token"] = str(size * devices // scheduler.block_size)
    return told


def vllm_version() -> str:
    """The release that runs."""
    import vllm

    return str(vllm.__version__)
