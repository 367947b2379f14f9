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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from ..kv_offload.block_file import HEADER_BYTES, KvIdentity
from ..kv_offload.disk_planner import MAX_STAGE_WAIT_S, TierLimits
from ..kv_offload.disk_store import DiskStore
from ..kv_offload.shared_store import FULL_BLOCK_TOKENS, SharedStore, SiblingStores, blocks_per_full
from ..kv_offload.store_folder import is_store_name
from ..kv_transfer.peer_transport import UnknownTransport, check_address
from ..kv_transfer.rank_transfers import rank_address
from ..kv_transfer.transfer_limits import MAX_WAITING_WRITE_BYTES, TransferLimits
from ..launch.launch_environment import read_memory
from .compat import running_vllm
from .kv_cache_groups import stored_block_bytes
from .kv_identity import dtype_identity, hash_identity, layer_specs, model_identity
from .plugin_settings import Seconds, SettingsError, data_parallel_rank, read_settings

if TYPE_CHECKING:
    from typing import Self

    from .compat import KVCacheConfig, KVCacheSpec, VllmConfig

NO_CONTEXTS = "no layer of this model has full attention, and a request frees blocks behind its window"
AUTO_DEVICES = 4
"""Under ``auto``, host memory is at most this multiple of the device's KV."""
GROUP_KINDS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""Names of the KV cache spec classes of vLLM that the host memory tier supports together in one model."""
_GIB = 1 << 30
_NO_KV = KvIdentity(
    model="", kv_dtype="", block_tokens=1, block_bytes=1, layers=1, hash_scheme="", vllm_version=""
)

AtLeast1 = Annotated[int, Meta(ge=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadOptions:
    """The options of ``SojournConnector``."""

    host_bytes: AtLeast1 | Literal["auto"]
    host_bytes_max: int = 0
    disk: NotEmpty | None = None
    disk_bytes: int = 0
    disk_name: str | None = None
    max_stage_wait_s: Seconds = MAX_STAGE_WAIT_S
    kv_layout: NotEmpty | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferOptions:
    """The options of ``PathsConnector``."""

    listen: NotEmpty
    store: NotEmpty
    store_name: str
    store_bytes: AtLeast1
    buffer_bytes: AtLeast1
    block_tokens: AtLeast1 = FULL_BLOCK_TOKENS
    save: bool = True
    read_width: AtLeast1 = 1
    patience_s: float = 1.5
    lease_s: float = 30.0
    waiting_write_bytes: AtLeast1 = MAX_WAITING_WRITE_BYTES
    role: Literal["prefill", "decode"] | None = None
    node: NotEmpty = field(default_factory=socket.gethostname)
    keep_on_reset: bool = False


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
    ranks: int
    """Number of workers. Each has its part of every block."""
    block_bytes: int
    """Bytes of one stored block, all layers and all workers."""

    def with_layout(self, layout: str) -> Self:
        """Return a copy of these settings in which the identity's data type also names ``layout``.
        ``layout``: text for the order of bytes in a block; an empty text adds nothing."""
        dtype = f"{self.identity.kv_dtype}/{layout}" if layout else self.identity.kv_dtype
        return replace(self, identity=replace(self.identity, kv_dtype=dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadSettings(KVConnectorSettings):
    """Settings of ``SojournConnector``."""

    options: KVOffloadOptions
    host_slots: int
    """Number of blocks that fit in host memory. Each worker has a slot for its part of each block."""
    host_because: str
    """Under ``auto``: why host memory has this size, or why there is none. Otherwise empty."""
    disk_name: str | None
    """Name of this engine's store. If it is ``None``, the store has no name, and the engine does not read
    the stores of other engines."""

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVOffloadSettings:
        """Return the engine's settings. Raises ``SettingsError`` for a wrong setting or an unsupported
        engine."""
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = read_settings(given, KVOffloadOptions, "connector setting")
        try:
            return cls._checked(options, vllm_config, kv_cache_config)
        except SettingsError as error:
            if options.disk is not None or options.host_bytes != "auto":
                raise
            return cls(
                blocks=kv_cache_config.num_blocks, block_tokens=1, identity=_NO_KV, ranks=1, block_bytes=1,
                options=options, host_slots=0, host_because=str(error), disk_name=None,
            )  # fmt: skip

    @classmethod
    def _checked(
        cls, options: KVOffloadOptions, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> KVOffloadSettings:
        on_disk = options.disk is not None
        for refusal in _refusals(vllm_config, kv_cache_config, transfers=False, on_disk=on_disk):
            raise SettingsError(refusal)
        identity = _identity(vllm_config, kv_cache_config, 1, sure=on_disk)
        block_bytes = _all_ranks_block_bytes(vllm_config, identity)
        if options.host_bytes == "auto":
            host_bytes, because = _auto_host_bytes(options, kv_cache_config, block_bytes)
        else:
            host_bytes, because = options.host_bytes, ""
        _check_bytes("host_bytes (--kv-host-gib)", host_bytes, block_bytes, kv_cache_config)
        if on_disk:
            _check_bytes("disk_bytes (--kv-disk-gib)", options.disk_bytes, block_bytes)
        name, rank = options.disk_name, data_parallel_rank(vllm_config)
        if rank is not None and (on_disk or name is not None):
            # All ranks get the same name from the user, or none, but each rank needs a store of its own.
            name = f"{name or 'rank'}.{rank}"
        if name is not None and not on_disk:
            raise SettingsError(f"disk_name (--kv-disk-name) is {name!r}; expected a disk too")
        if name is not None:
            _check_store_name("disk_name (--kv-disk-name)", name)
        return cls(
            blocks=kv_cache_config.num_blocks,
            block_tokens=identity.block_tokens,
            identity=identity,
            ranks=identity.tp_size,
            block_bytes=block_bytes,
            options=options,
            host_slots=host_bytes // block_bytes,
            host_because=because,
            disk_name=name,
        )

    @property
    def disk_blocks(self) -> int:
        """Number of blocks that fit in ``disk_bytes``. Each worker writes one file per block."""
        if self.options.disk is None:
            return 0
        return self.options.disk_bytes // (self.block_bytes + self.ranks * HEADER_BYTES)

    def limits(self) -> TierLimits:
        """Return the planner's limits."""
        return TierLimits(
            host_slots=self.host_slots,
            disk_blocks=self.disk_blocks,
            max_stage_wait_s=self.options.max_stage_wait_s,
            shared=self.disk_name is not None,
        )

    def open_disk(self, block_bytes: int, layers: int) -> tuple[DiskStore | None, SiblingStores | None]:
        """Open and return (this worker's store on disk, the stores of other engines beside it).

        Without ``disk`` both are ``None``. Without ``disk_name`` the second is ``None``. ``block_bytes`` and
        ``layers``: size and number of layers of this worker's part of a block. Raises ``OffloadError`` if the
        store is in use or has KV of another identity.
        """
        folder, budget_bytes = self.options.disk, self.options.disk_bytes
        if folder is None:
            return None, None
        identity = replace(self.identity, block_bytes=block_bytes, layers=layers)
        if self.ranks > 1:
            folder = rank_folder(folder, identity)
            budget_bytes = self.disk_blocks * (block_bytes + HEADER_BYTES)
        store = DiskStore.open(folder, identity, budget_bytes=budget_bytes, name=self.disk_name)
        return store, SiblingStores(store.path, identity) if self.disk_name is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSettings(KVConnectorSettings):
    """Settings of ``PathsConnector``."""

    options: KVTransferOptions
    concurrent_steps: int
    """Maximum number of planned steps whose results are not known yet."""
    shape: str
    """How the model is split over the workers, as text for operators and for comparison with the peer."""
    listen: str
    """Address at which this worker listens."""
    per_full: int
    """Number of engine blocks per Full Block."""
    limits: TransferLimits
    longest_blocks: int
    """Number of Full Blocks of the longest prompt that the engine accepts."""

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVTransferSettings:
        """Return the engine's settings. Raises ``SettingsError`` for a wrong setting or an unsupported
        engine."""
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = read_settings(given, KVTransferOptions, "connector setting")
        for refusal in _refusals(vllm_config, kv_cache_config, transfers=True):
            raise SettingsError(refusal)
        _check_store_name("store_name", options.store_name)
        parallel = vllm_config.parallel_config
        tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        try:
            per_full = blocks_per_full(block_tokens, options.block_tokens)
            identity = _identity(vllm_config, kv_cache_config, per_full)
            block_bytes, ranks = _all_ranks_block_bytes(vllm_config, identity), identity.tp_size
            _check_bytes("store_bytes (--kv-store-gib)", options.store_bytes, block_bytes)
            _check_bytes("buffer_bytes (--kv-buffer-gib)", options.buffer_bytes, block_bytes, kv_cache_config)
            limits = TransferLimits(
                slots=options.buffer_bytes // block_bytes,
                patience_s=options.patience_s,
                lease_s=options.lease_s,
                report_interval_s=options.patience_s / 4,
                read_width=options.read_width,
                max_waiting_writes=max(1, options.waiting_write_bytes // (ranks * identity.block_bytes)),
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error
        try:
            listen = rank_address(options.listen, identity.tp_rank, ranks)
            check_address(listen)
        except (ValueError, UnknownTransport) as error:
            raise SettingsError(f"listen: {error}") from error
        return cls(
            blocks=kv_cache_config.num_blocks,
            block_tokens=block_tokens,
            identity=identity,
            ranks=ranks,
            block_bytes=block_bytes,
            options=options,
            concurrent_steps=stages + bool(vllm_config.scheduler_config.async_scheduling),
            shape=f"tensor parallel {tensor}, pipeline parallel {stages}",
            listen=listen,
            per_full=per_full,
            limits=limits,
            longest_blocks=-(-vllm_config.model_config.max_model_len // options.block_tokens),
        )

    @property
    def needed_buffer_bytes(self) -> int:
        """The value of ``buffer_bytes`` that the longest prompt needs; 0 if the present value is enough."""
        short = self.limits.slots < self.longest_blocks
        return self.longest_blocks * self.block_bytes if short else 0

    def open_store(self) -> SharedStore:
        """Open and return this worker's store. Raises ``OffloadError`` if it is in use or has KV of another
        identity."""
        folder, budget_bytes = self.options.store, self.options.store_bytes
        if self.ranks > 1:
            folder, budget_bytes = rank_folder(folder, self.identity), budget_bytes // self.ranks
        name = self.options.store_name
        return SharedStore.open(folder, self.identity, name=name, budget_bytes=budget_bytes)


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


def _auto_host_bytes(
    options: KVOffloadOptions, kv_cache_config: KVCacheConfig, block_bytes: int
) -> tuple[int, str]:
    """Return (size of host memory under ``auto``, text that says why). Raises ``SettingsError`` where only a
    size given by hand gives host memory."""
    from .compat import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise SettingsError("auto is for CUDA and CPUs; set a size with --kv-host-gib")
    if not keeps_contexts(kv_cache_config):
        raise SettingsError(NO_CONTEXTS)
    device_bytes = kv_cache_config.num_blocks * block_bytes
    host_bytes, why = options.host_bytes_max, "this engine's part of half of the memory that was free"
    if AUTO_DEVICES * device_bytes <= host_bytes:
        host_bytes = AUTO_DEVICES * device_bytes
        why = f"{AUTO_DEVICES} times the device's {device_bytes / _GIB:.2f} GiB"
    return host_bytes, f"{host_bytes / _GIB:.2f} GiB, {why}"


def _check_bytes(
    name: str, given_bytes: int, block_bytes: int, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Raise ``SettingsError`` if a size has no room for one block, or is host memory (``kv_cache_config`` is
    given) and exceeds the machine's memory. In the simulator, which has no tensors, memory is no limit."""
    if given_bytes < block_bytes:
        raise SettingsError(
            f"{name} is {given_bytes}; expected at least one block of this model, {block_bytes}"
        )
    if kv_cache_config is not None and kv_cache_config.kv_cache_tensors:
        memory = read_memory()
        if given_bytes > memory.total_bytes:
            raise SettingsError(
                f"{name} is {given_bytes}; expected at most what {memory.owner} has, {memory.total_bytes}"
            )


def _check_store_name(setting: str, name: str) -> None:
    if not is_store_name(name):
        raise SettingsError(
            f"{setting} is {name!r}; expected letters, digits, '.', '_' and '-', at most 64, different for "
            "each engine"
        )


def _refusals(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, transfers: bool, on_disk: bool = False
) -> Iterator[str]:
    """Yield why sojourn's connectors do not support an engine's model or settings: what was found, what is
    supported and what to change. ``transfers``: for ``PathsConnector``."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        yield (
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}; expected 'recompute': otherwise "
            'a block that cannot be loaded fails its request. Add "kv_load_failure_policy": "recompute" to '
            "the value of --kv-transfer-config"
        )
    if vllm_config.cache_config.enable_prefix_caching is False:
        yield (
            "prefix caching is off, by --no-enable-prefix-caching or because vLLM turns it off for this "
            "model (latent attention on a CPU without AMX); sojourn's KV connectors find KV by its block "
            "hashes. Leave out --kv-host-gib, --kv-disk and --role"
        )
    if kv_cache_config.needs_kv_cache_zeroing:
        # A worker may clear a block before the connector has saved what was in it.
        yield (
            "vLLM clears this model's KV blocks before it reuses them (mixed precision or state-space "
            "layers); sojourn's KV connectors support models whose blocks are overwritten. Leave out "
            "--kv-host-gib and --kv-disk, or use --tier-backend vllm"
        )
    # With several groups, a pipeline stage does not know how many layers the other stages have in each group.
    # So it cannot compute a number of slots that is the same for all stages.
    windows = not (transfers or on_disk) and parallel.pipeline_parallel_size == 1
    groups = kv_cache_config.kv_cache_groups
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    if len(groups) != 1 and not (windows and "FullAttentionSpec" in kinds and kinds <= GROUP_KINDS):
        yield (
            f"this model has {len(groups)} groups of KV caches ({', '.join(sorted(kinds))}); host memory "
            "supports full attention beside sliding windows, each with layers of one size"
            f"{'' if windows else '; a disk, pairs and pipeline parallel support one group'}. "
            "--disable-hybrid-kv-cache-manager makes one group of sliding windows and full attention; "
            "otherwise leave out --kv-host-gib and --kv-disk, or use --tier-backend vllm"
        )
    if parallel.world_size != parallel.tensor_parallel_size * parallel.pipeline_parallel_size or (
        parallel.decode_context_parallel_size > 1
    ):
        # Each worker has the KV of only some of a block's tokens.
        what = "transfers" if transfers else "host memory and disk (--kv-host-gib, --kv-disk)"
        yield (
            f"the tokens of a context are split over workers (context parallel); {what} support workers that "
            "split heads or layers"
        )
    if (transfers or on_disk) and vllm_config.lora_config is not None:
        # The block hashes contain an adapter's name, not its weights, and another engine may have others.
        yield (
            "adapters are enabled (--enable-lora); their KV is identified by their names and not by their "
            f"weights, so {'transfers do' if transfers else 'KV on disk does'} not support them"
        )
    if (transfers or on_disk) and os.environ.get("PYTHONHASHSEED") in (None, "random"):
        yield (
            "stored blocks are found by hashes that differ between processes unless PYTHONHASHSEED is set: "
            "set it to 0 for every engine, as `sojourn serve` does"
        )
    if transfers:
        if vllm_config.speculative_config is not None:
            yield "transfers do not support speculative decoding (--speculative-config)"
        if transfer.kv_role != "kv_both":
            yield f"kv_role is {transfer.kv_role!r}; expected 'kv_both': each engine sends and receives"
        for kept in filter(None, map(_partial_retention, layer_specs(groups[0].kv_cache_spec))):
            yield (
                f"this model's layers keep KV of {kept}; transfers support layers that keep KV of all tokens"
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
