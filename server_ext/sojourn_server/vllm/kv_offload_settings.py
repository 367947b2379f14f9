"""What the operator sets of the tiers below the device: ``kv_connector_extra_config`` of our connector."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv_offload.block_file import KvIdentity
from ..kv_offload.disk_planner import TierLimits
from ..kv_offload.disk_store import DiskStore
from ..kv_offload.shared_store import SiblingStores
from ..kv_offload.store_folder import is_store_name
from ..launch.machine_memory import read_memory
from .compat import running_vllm
from .kv_identity import dtype_identity, hash_identity, model_identity
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    from .compat import KVCacheConfig, VllmConfig

_KNOWN = {"host_bytes", "disk", "disk_bytes", "disk_name", "max_stage_wait_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadSettings:
    """Everything about the tiers of one engine, worked out when it starts."""

    blocks: int
    """On the device, with vLLM's null block."""
    block_tokens: int
    block_bytes: int
    host_slots: int
    disk: str | None
    disk_bytes: int
    disk_name: str | None
    """What this engine's store is called, beside others' that it reads; ``None``: it is there alone."""
    max_stage_wait_s: float
    model: str
    kv_dtype: str
    hash_scheme: str

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVOffloadSettings:
        """Raises ``SettingsError`` for what is wrong or cannot be served, with what was expected."""
        given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for key in given:
            if key not in _KNOWN:
                raise SettingsError(f"unknown tier setting {key!r}; expected {', '.join(sorted(_KNOWN))}")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise SettingsError(
                f"this model has {len(kv_cache_config.kv_cache_groups)} groups of KV caches, as for sliding "
                "windows or state-space layers; tiers below the device serve models with one"
            )
        parallel = vllm_config.parallel_config
        workers = parallel.world_size
        if workers != 1:
            raise SettingsError(f"{workers} workers share this model; tiers below the device serve one")
        if kv_cache_config.kv_cache_tensors and vllm_config.scheduler_config.async_scheduling:
            # That a load has failed would be known when the next step is planned on top of it, and vLLM
            # takes back only the step that was to load.
            raise SettingsError(
                "steps are scheduled ahead of each other; tiers below the device need one at a time: "
                "--no-async-scheduling"
            )
        blocks = kv_cache_config.num_blocks
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        block_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors) // blocks
        if not block_bytes:  # the lab's scheduler has no tensors, but knows what one would take
            block_bytes = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        host_bytes = _bytes(given, "host_bytes", 0)
        if host_bytes < block_bytes:
            raise SettingsError(
                f"host_bytes (--kv-host-gib) is {host_bytes}; expected at least a block of this model, "
                f"{block_bytes}"
            )
        memory = read_memory()
        if kv_cache_config.kv_cache_tensors and host_bytes > memory.total_bytes:  # the lab's is made up
            raise SettingsError(
                f"host_bytes (--kv-host-gib) is {host_bytes}; expected at most what {memory.owner} has, "
                f"{memory.total_bytes}"
            )
        disk = given.get("disk")
        if disk is not None and not isinstance(disk, str):
            raise SettingsError(f"disk is {disk!r}; expected a directory")
        seed = os.environ.get("PYTHONHASHSEED")
        if disk is not None and seed in (None, "random"):
            raise SettingsError(
                "blocks on disk are found by hashes that differ from start to start unless PYTHONHASHSEED is "
                "set: set it to 0, as `sojourn serve --kv-disk` does"
            )
        disk_bytes = _bytes(given, "disk_bytes", 0)
        if disk is not None and disk_bytes < block_bytes:
            raise SettingsError(
                f"disk_bytes (--kv-disk-gib) is {disk_bytes}; expected at least a block of this model, "
                f"{block_bytes}"
            )
        name = given.get("disk_name")
        if isinstance(name, str) and parallel.data_parallel_size > 1:  # all ranks are told the same name
            name = f"{name}.{parallel.data_parallel_rank}"
        if name is not None and not (disk is not None and isinstance(name, str) and is_store_name(name)):
            raise SettingsError(
                f"disk_name (--kv-disk-name) is {name!r}; expected a disk, and letters, digits, '.', '_' and "
                "'-', at most 64"
            )
        wait_s = given.get("max_stage_wait_s", TierLimits.__dataclass_fields__["max_stage_wait_s"].default)
        if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or not 0 <= wait_s < float("inf"):
            raise SettingsError(f"max_stage_wait_s is {wait_s!r}; expected seconds, at least 0")
        return cls(
            blocks=blocks,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            host_slots=host_bytes // block_bytes,
            disk=disk,
            disk_bytes=disk_bytes,
            disk_name=name,
            max_stage_wait_s=float(wait_s),
            model=model_identity(vllm_config, sure=disk is not None),
            kv_dtype=dtype_identity(vllm_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec),
            hash_scheme=hash_identity(vllm_config, block_tokens),
        )

    @property
    def disk_blocks(self) -> int:
        """How many blocks' files fit into ``disk_bytes``."""
        from ..kv_offload.block_file import HEADER_BYTES

        return self.disk_bytes // (self.block_bytes + HEADER_BYTES) if self.disk is not None else 0

    def limits(self) -> TierLimits:
        """For the planner."""
        return TierLimits(
            host_slots=self.host_slots,
            disk_blocks=self.disk_blocks,
            max_stage_wait_s=self.max_stage_wait_s,
            shared=self.disk_name is not None,
        )

    def open_disk(self, block_bytes: int, layers: int) -> tuple[DiskStore | None, SiblingStores | None]:
        """The store on disk, and those beside it that other engines write.

        Raises ``OffloadError`` where it is another model's, or another process's.
        """
        if self.disk is None:
            return None, None
        identity = KvIdentity(
            model=self.model,
            kv_dtype=self.kv_dtype,
            block_tokens=self.block_tokens,
            block_bytes=block_bytes,
            layers=layers,
            hash_scheme=self.hash_scheme,
            vllm_version=running_vllm(),
        )
        store = DiskStore.open(self.disk, identity, budget_bytes=self.disk_bytes, name=self.disk_name)
        return store, SiblingStores(store.path, identity) if self.disk_name is not None else None


def _bytes(given: dict[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingsError(f"{name} is {value!r}; expected a whole number of bytes")
    return value
