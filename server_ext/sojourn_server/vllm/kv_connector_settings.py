"""Settings of both KV connectors: ``kv_connector_extra_config``, checked against the engine.

Bytes are those of all workers of the engine together. An option without a default is required.

``SojournConnector``, for host memory and disk:

option               meaning
host_bytes           host memory for blocks; "auto": four times the device's KV, at most host_bytes_max. An
                     engine that supports no host memory then starts without it
host_bytes_max       only and always with "auto"
disk, disk_bytes     directory of the blocks on disk, and its budget in bytes; both or none. Default: no disk
disk_name            name of this engine's store in ``disk``. If given, stores with other names are read too
max_stage_wait_s     maximum seconds that a request waits for the disk; default: 10
kv_layout            vLLM's KV cache layout to prefer on the device, such as "BLHNC"; default: vLLM's choice

``PathsConnector``, for a shared store and other engines. It stores and transfers Full Blocks. A Full Block is
one or more engine blocks:

option               meaning
listen               address of this engine's transfer manager: unix:PATH or tcp:HOST:PORT. Further workers
                     listen at the next ports, or at unix:PATH.rank1 and so on
store                directory that all engines of the fleet share
store_name           name of this engine's store
store_bytes          budget of this engine's store
buffer_bytes         host memory for blocks being transferred
block_tokens         tokens of a Full Block; default: 64
save                 false: store nothing; default: true
read_width           maximum number of concurrent reads from the store; default: 1
patience_s           seconds without progress after which a transfer fails; default: 1.5
lease_s              seconds after which a peer's lease on buffers expires if not renewed; default: 30
waiting_write_bytes  memory for copies of blocks that wait to be stored; default: 256 MiB
role                 "prefill" or "decode": the engine's part in a gateway's pairs; default: none
node                 machine whose storage link this engine uses; default: the host's name
keep_on_reset        true: a reset of vLLM's prefix cache alone, as before a measurement, does not turn the
                     connector off; a reset that includes connectors (reset_external) does. Default: false
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..kv_offload.block_file import HEADER_BYTES, KvIdentity
from ..kv_offload.disk_planner import MAX_STAGE_WAIT_S, TierLimits
from ..kv_offload.disk_store import DiskStore
from ..kv_offload.shared_store import (
    FULL_BLOCK_TOKENS,
    SharedStore,
    SiblingStores,
    blocks_per_full,
)
from ..kv_offload.store_folder import is_store_name
from ..kv_transfer.peer_transport import UnknownTransport, check_address
from ..kv_transfer.rank_transfers import rank_address
from ..kv_transfer.transfer_limits import (
    MAX_WAITING_WRITE_BYTES,
    TransferLimits,
)
from .compat import running_vllm
from .connector_options import ConnectorOptions
from .kv_cache_groups import stored_block_bytes
from .kv_connector_checks import (
    check_adapters,
    check_auto,
    check_context_parallel,
    check_groups,
    check_hash_seed,
    check_load_failures,
    check_memory,
    check_prefix_caching,
    check_transfers,
)
from .kv_identity import dtype_identity, hash_identity, model_identity
from .plugin_settings import SettingsError, data_parallel_rank

if TYPE_CHECKING:
    from typing import Self

    from .compat import KVCacheConfig, VllmConfig

ROLES = ("prefill", "decode")
_STORE_NAME = "letters, digits, '.', '_' and '-', at most 64"
_OFFLOAD_OPTIONS = (
    "host_bytes", "host_bytes_max", "disk", "disk_bytes", "disk_name", "max_stage_wait_s", "kv_layout",
)  # fmt: skip
AUTO_DEVICES = 4
"""Under ``auto``, host memory is at most this multiple of the device's KV."""
_GIB = 1 << 30
_TRANSFER_OPTIONS = (
    "listen", "store", "store_name", "store_bytes", "buffer_bytes", "block_tokens",
    "save", "read_width", "patience_s", "lease_s", "waiting_write_bytes", "role", "node", "keep_on_reset",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSettings:
    """Settings that both connectors have. They describe the engine's KV."""

    blocks: int
    """Number of blocks on the device, including vLLM's null block."""
    block_tokens: int
    """Number of tokens per engine block."""
    identity: KvIdentity
    """Identity of the KV in this worker's stored blocks. A stored block is an engine block for
    ``SojournConnector``, and a Full Block for ``PathsConnector``."""

    def with_layout(self, layout: str) -> Self:
        """Return a copy of these settings in which the identity's data type also names ``layout``.
        ``layout``: text for the order of bytes in a block; an empty text adds nothing."""
        dtype = f"{self.identity.kv_dtype}/{layout}" if layout else self.identity.kv_dtype
        return replace(self, identity=replace(self.identity, kv_dtype=dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadSettings(KVConnectorSettings):
    """Settings of ``SojournConnector``. ``identity`` describes this worker's part of a block."""

    ranks: int
    """Number of workers. Each has its part of every block."""
    block_bytes: int
    """Bytes of one block, all layers and all workers."""
    host_slots: int
    """Number of blocks that fit in host memory. Each worker has a slot for its part of each block."""
    host_because: str
    """Under ``auto``: why host memory has this size, or why there is none. Otherwise empty."""
    disk: str | None
    disk_bytes: int
    disk_name: str | None
    """Name of this engine's store. If it is ``None``, the store has no name, and the engine does not read
    the stores of other engines."""
    max_stage_wait_s: float

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVOffloadSettings:
        """Return the engine's settings. Raises ``SettingsError`` for a wrong setting or an unsupported
        engine."""
        options = ConnectorOptions(vllm_config.kv_transfer_config.kv_connector_extra_config, _OFFLOAD_OPTIONS)
        try:
            return cls._read(options, vllm_config, kv_cache_config)
        except SettingsError as error:
            if "disk" in options or not options.is_auto("host_bytes"):
                raise
            nothing = KvIdentity(
                model="",
                kv_dtype="",
                block_tokens=1,
                block_bytes=1,
                layers=1,
                hash_scheme="",
                vllm_version="",
            )
            return cls(
                blocks=kv_cache_config.num_blocks, block_tokens=1, identity=nothing, ranks=1, block_bytes=1,
                host_slots=0, host_because=str(error), disk=None, disk_bytes=0, disk_name=None,
                max_stage_wait_s=0.0,
            )  # fmt: skip

    @classmethod
    def _read(
        cls, options: ConnectorOptions, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> KVOffloadSettings:
        has_tensors = bool(kv_cache_config.kv_cache_tensors)
        check_load_failures(vllm_config)
        check_prefix_caching(vllm_config)
        check_context_parallel(vllm_config, "host memory and disk (--kv-host-gib, --kv-disk) support")
        on_disk = "disk" in options
        parallel = vllm_config.parallel_config
        # With several groups, a pipeline stage does not know how many layers the other stages have in each
        # group. So it cannot compute a number of slots that is the same for all stages.
        check_groups(kv_cache_config, windows=not on_disk and parallel.pipeline_parallel_size == 1)
        identity = _identity(vllm_config, kv_cache_config, 1, sure=on_disk)
        block_bytes = _all_ranks_block_bytes(vllm_config, identity)
        ranks = parallel.world_size
        if options.is_auto("host_bytes"):
            check_auto(kv_cache_config)
            limit_bytes = options.size("host_bytes_max", block_bytes, "one block", flag="--kv-host-gib auto")
            host_bytes, because = auto_host_bytes(kv_cache_config.num_blocks * block_bytes, limit_bytes)
        else:
            host_bytes = options.size("host_bytes", block_bytes, "one block", flag="--kv-host-gib")
            because = ""
        check_memory("host_bytes (--kv-host-gib)", host_bytes, has_tensors)
        disk, disk_bytes, name = None, 0, None
        if on_disk:
            disk = options.text("disk", "a directory")
            check_adapters(vllm_config, "KV on disk does")
            check_hash_seed()
            disk_bytes = options.size("disk_bytes", block_bytes, "one block", flag="--kv-disk-gib")
        if "disk_name" in options:
            name = options.store_name("disk_name", f"a disk, and {_STORE_NAME}", flag="--kv-disk-name")
        rank = data_parallel_rank(vllm_config)
        if rank is not None and (disk is not None or name is not None):
            # All ranks get the same name from the user, or none, but each rank needs a store of its own.
            name = f"{name or 'rank'}.{rank}"
        if name is not None and (disk is None or not is_store_name(name)):
            raise SettingsError(f"disk_name (--kv-disk-name) is {name!r}; expected a disk, and {_STORE_NAME}")
        wait_s = options.number("max_stage_wait_s", MAX_STAGE_WAIT_S, "seconds, at least 0")
        if wait_s is None or not 0 <= wait_s < float("inf"):
            raise SettingsError(f"max_stage_wait_s is {wait_s!r}; expected seconds, at least 0")
        return cls(
            blocks=kv_cache_config.num_blocks,
            block_tokens=identity.block_tokens,
            identity=identity,
            ranks=ranks,
            block_bytes=block_bytes,
            host_slots=host_bytes // block_bytes,
            host_because=because,
            disk=disk,
            disk_bytes=disk_bytes,
            disk_name=name,
            max_stage_wait_s=float(wait_s),
        )

    @property
    def disk_blocks(self) -> int:
        """Number of blocks that fit in ``disk_bytes``. Each worker writes one file per block."""
        if self.disk is None:
            return 0
        return self.disk_bytes // (self.block_bytes + self.ranks * HEADER_BYTES)

    def limits(self) -> TierLimits:
        """Return the planner's limits."""
        return TierLimits(
            host_slots=self.host_slots,
            disk_blocks=self.disk_blocks,
            max_stage_wait_s=self.max_stage_wait_s,
            shared=self.disk_name is not None,
        )

    def open_disk(self, block_bytes: int, layers: int) -> tuple[DiskStore | None, SiblingStores | None]:
        """Open and return (this worker's store on disk, the stores of other engines beside it).

        Without ``disk`` both are ``None``. Without ``disk_name`` the second is ``None``. ``block_bytes`` and
        ``layers``: size and number of layers of this worker's part of a block. Raises ``OffloadError`` if the
        store is in use or has KV of another identity.
        """
        if self.disk is None:
            return None, None
        identity = replace(self.identity, block_bytes=block_bytes, layers=layers)
        folder, budget_bytes = self.disk, self.disk_bytes
        if self.ranks > 1:
            folder = rank_folder(folder, identity)
            budget_bytes = self.disk_blocks * (block_bytes + HEADER_BYTES)
        store = DiskStore.open(folder, identity, budget_bytes=budget_bytes, name=self.disk_name)
        return store, SiblingStores(store.path, identity) if self.disk_name is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSettings(KVConnectorSettings):
    """Settings of ``PathsConnector``. ``identity`` describes this worker's part of a Full Block."""

    ranks: int
    """Number of workers. Each has its part of every block."""
    concurrent_steps: int
    """Maximum number of planned steps whose results are not known yet."""
    block_bytes: int
    """Bytes of one Full Block, all layers and all workers."""
    shape: str
    """How the model is split over the workers, as text for operators and for comparison with the peer."""
    listen: str
    """Address at which this worker listens."""
    store: str
    store_name: str
    store_bytes: int
    """Budget of this engine's store, all workers together."""
    save: bool
    per_full: int
    """Number of engine blocks per Full Block."""
    limits: TransferLimits
    longest_blocks: int
    """Number of Full Blocks of the longest prompt that the engine accepts."""
    role: str | None
    """One of ``ROLES``; ``None`` if the engine is not part of a pair."""
    node: str
    keep_on_reset: bool

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVTransferSettings:
        """Return the engine's settings. Raises ``SettingsError`` for a wrong setting or an unsupported
        engine."""
        options = ConnectorOptions(
            vllm_config.kv_transfer_config.kv_connector_extra_config, _TRANSFER_OPTIONS
        )
        check_load_failures(vllm_config)
        check_prefix_caching(vllm_config)
        check_groups(kv_cache_config)
        check_transfers(vllm_config, kv_cache_config)
        check_hash_seed()
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        full_tokens = options.whole("block_tokens", FULL_BLOCK_TOKENS)
        try:
            per_full = blocks_per_full(block_tokens, full_tokens)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        identity = _identity(vllm_config, kv_cache_config, per_full)
        block_bytes, ranks = _all_ranks_block_bytes(vllm_config, identity), identity.tp_size
        listen = options.text("listen", "unix:PATH or tcp:HOST:PORT")
        try:
            listen = rank_address(listen, identity.tp_rank, ranks)
            check_address(listen)
        except (ValueError, UnknownTransport) as error:
            raise SettingsError(f"listen: {error}") from error
        return cls(
            listen=listen,
            ranks=ranks,
            concurrent_steps=_concurrent_steps(vllm_config),
            block_bytes=block_bytes,
            shape=_shape(vllm_config),
            store=options.text("store", "a directory"),
            store_name=options.store_name("store_name", f"{_STORE_NAME}, different for each engine"),
            store_bytes=options.size(
                "store_bytes", block_bytes, "a Full Block of this model", flag="--kv-store-gib"
            ),
            save=options.flag("save", True),
            block_tokens=block_tokens,
            per_full=per_full,
            blocks=kv_cache_config.num_blocks,
            identity=identity,
            limits=_transfer_limits(options, identity, block_bytes, bool(kv_cache_config.kv_cache_tensors)),
            longest_blocks=-(-vllm_config.model_config.max_model_len // full_tokens),
            role=options.choice("role", ROLES, None),
            node=options.text("node", "a machine's name") if "node" in options else socket.gethostname(),
            keep_on_reset=options.flag("keep_on_reset", False),
        )

    @property
    def needed_buffer_bytes(self) -> int:
        """The value of ``buffer_bytes`` that the longest prompt needs; 0 if the present value is enough."""
        short = self.limits.slots < self.longest_blocks
        return self.longest_blocks * self.block_bytes if short else 0

    def open_store(self) -> SharedStore:
        """Open and return this worker's store. Raises ``OffloadError`` if it is in use or has KV of another
        identity."""
        folder, budget_bytes = self.store, self.store_bytes
        if self.ranks > 1:
            folder, budget_bytes = rank_folder(folder, self.identity), budget_bytes // self.ranks
        return SharedStore.open(folder, self.identity, name=self.store_name, budget_bytes=budget_bytes)


def auto_host_bytes(device_bytes: int, limit_bytes: int) -> tuple[int, str]:
    """Return (size of host memory under ``auto``, text that says why). ``device_bytes``: the device's KV."""
    host_bytes = min(AUTO_DEVICES * device_bytes, limit_bytes)
    why = f"{AUTO_DEVICES} times the device's {device_bytes / _GIB:.2f} GiB"
    if host_bytes == limit_bytes:
        why = "this engine's part of half of the memory that was free at the start"
    return host_bytes, f"{host_bytes / _GIB:.2f} GiB, {why}"


def rank_folder(folder: str, identity: KvIdentity) -> str:
    """Return the subdirectory of ``folder`` for one worker's stores. Call it only if the engine has several
    workers."""
    return os.path.join(folder, f"rank{identity.tp_rank}of{identity.tp_size}")


def _all_ranks_block_bytes(vllm_config: VllmConfig, identity: KvIdentity) -> int:
    """Return the size in bytes of one block over all workers. Every worker returns the same number.

    Tensor-parallel workers have equal parts. Pipeline stages differ, and each knows only its own number of
    layers. So the model's number of layers is used.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size == 1:
        return int(identity.block_bytes * parallel.world_size)
    layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    return identity.block_bytes // identity.layers * layers * int(parallel.tensor_parallel_size)


def _concurrent_steps(vllm_config: VllmConfig) -> int:
    """Return the maximum number of planned steps whose results are not known yet. vLLM's own number is never
    larger."""
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    return stages + bool(vllm_config.scheduler_config.async_scheduling)


def _shape(vllm_config: VllmConfig) -> str:
    parallel = vllm_config.parallel_config
    return (
        f"tensor parallel {parallel.tensor_parallel_size}, pipeline parallel "
        f"{parallel.pipeline_parallel_size}"
    )


def _identity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, per_full: int, *, sure: bool = True
) -> KvIdentity:
    """Return the identity of this worker's stored blocks, of ``per_full`` engine blocks each. With ``sure``,
    raises ``SettingsError`` if other weights could have the same identity."""
    groups = kv_cache_config.kv_cache_groups
    spec, layers = groups[0].kv_cache_spec, len(groups[0].layer_names)
    # The simulator has no tensors, but its specs have their sizes.
    engine_bytes = stored_block_bytes(kv_cache_config) or max(
        each.kv_cache_spec.page_size_bytes * len(each.layer_names) for each in groups
    )
    parallel = vllm_config.parallel_config
    ranks = parallel.world_size
    return KvIdentity(
        model=model_identity(vllm_config, sure=sure),
        kv_dtype=dtype_identity(vllm_config, spec),
        block_tokens=spec.block_size * per_full,
        block_bytes=engine_bytes * per_full,
        layers=layers,
        hash_scheme=hash_identity(vllm_config, spec.block_size),
        vllm_version=running_vllm(),
        tp_rank=parallel.rank % ranks,
        tp_size=ranks,
    )


def _transfer_limits(
    options: ConnectorOptions, identity: KvIdentity, block_bytes: int, has_tensors: bool
) -> TransferLimits:
    """Return one worker's limits. ``block_bytes``: size of a Full Block over all workers. ``has_tensors``:
    false in the simulator, where the machine's memory is no limit. Raises ``SettingsError``."""
    buffer_bytes = options.size(
        "buffer_bytes",
        block_bytes,
        "a Full Block of this model",
        flag="--kv-buffer-gib",
    )
    check_memory("buffer_bytes (--kv-buffer-gib)", buffer_bytes, has_tensors)
    limits: dict[str, Any] = {
        name: options.number(name, None, "seconds") for name in ("patience_s", "lease_s") if name in options
    }
    if "patience_s" in limits:
        limits["report_interval_s"] = limits["patience_s"] / 4
    if "read_width" in options:
        limits["read_width"] = options.whole("read_width")
    waiting_bytes = options.whole("waiting_write_bytes", MAX_WAITING_WRITE_BYTES)
    limits["max_waiting_writes"] = max(1, waiting_bytes // (identity.tp_size * identity.block_bytes))
    try:
        return TransferLimits(slots=buffer_bytes // block_bytes, **limits)
    except ValueError as error:
        raise SettingsError(str(error)) from error
