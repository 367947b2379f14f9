"""Settings of both KV connectors: ``kv_connector_extra_config``, checked against the engine.

Bytes are those of all workers of the engine together. An option without a default is required.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from ..kv_offload.disk_tier import MAX_STAGE_WAIT_S, TierLimits
from ..kv_offload.shared_store import (
    FULL_BLOCK_TOKENS,
    HEADER_BYTES,
    KvIdentity,
    SharedStore,
    blocks_per_full,
)
from ..kv_transfer.peer_transport import parse_address
from ..kv_transfer.rank_transfers import rank_address
from ..kv_transfer.staging_buffers import TransferLimits
from ..launch.weights_fingerprint import UnknownWeights, processor_digest, weights_fingerprint
from .compat import running_vllm
from .kv_cache_groups import stored_block_bytes
from .plugin_settings import Seconds, SettingsError, read_settings

if TYPE_CHECKING:
    from typing import Self

    from .compat import KVCacheConfig, KVCacheSpec, ModelConfig, VllmConfig

NO_CONTEXTS = "no layer of this model has full attention, and a request frees blocks behind its window"
AUTO_DEVICES = 4
"""Under ``auto``, host memory is at most this multiple of the device's KV."""
PROBE_TOKENS = 128
"""The disk is asked if a request misses at least this many tokens. Computing fewer is faster."""
GROUP_KINDS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""Names of the KV cache spec classes of vLLM that the host memory tier supports together in one model."""
GIB = 1 << 30
_NO_KV = KvIdentity(
    model="", kv_dtype="", block_tokens=1, block_bytes=1, layers=1, hash_scheme="", vllm_version=""
)

_MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
"""Multi-modal options that change the KV of an image, video or sound, but not vLLM's hash of it."""
AtLeast1 = Annotated[int, Meta(ge=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadOptions:
    host_bytes: AtLeast1 | Literal["auto"]
    """Host memory for blocks; "auto": four times the device's KV, at most ``host_bytes_max``, and none on an
    engine that supports none."""
    host_bytes_max: int = 0  # only and always with "auto"
    disk: NotEmpty | None = None  # directory of the blocks on disk; given with its budget, or neither is
    disk_bytes: int = 0
    max_stage_wait_s: Seconds = MAX_STAGE_WAIT_S  # maximum time that a request waits for the disk
    kv_layout: NotEmpty | None = None  # vLLM's KV cache layout to prefer on the device, such as "BLHNC"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferOptions:
    """The options of ``PathsConnector``, for a shared store and other engines. It stores and transfers Full
    Blocks. A Full Block is one or more engine blocks."""

    listen: NotEmpty
    """Address of this engine's transfer manager: unix:PATH or tcp:HOST:PORT. Further workers listen at the
    next ports, or at unix:PATH.rank1 and so on."""
    store: NotEmpty  # directory that all engines of the fleet share, and its budget
    store_bytes: AtLeast1
    store_name: NotEmpty  # name of this engine for its peers and logs
    buffer_bytes: AtLeast1  # host memory for blocks being transferred
    block_tokens: AtLeast1 = FULL_BLOCK_TOKENS  # tokens of a Full Block
    save: bool = True  # false: store nothing
    patience_s: float = 1.5  # time after which a silent peer, or a read, counts as failed
    lease_s: float = 30.0  # time without new data after which a transfer fails or gives up its buffers
    waiting_write_bytes: AtLeast1 = 256 << 20  # for copies of blocks that wait to be stored
    role: Literal["prefill", "decode"] | None = None  # the engine's part in a gateway's pairs
    node: NotEmpty = field(default_factory=socket.gethostname)  # machine whose storage link it uses
    keep_on_reset: bool = False
    """True: a reset of vLLM's prefix cache alone, as before a measurement, does not turn the connector off;
    one that includes connectors (reset_external) does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSettings:
    blocks: int
    """Number of blocks on the device, including vLLM's null block."""
    block_tokens: int
    identity: KvIdentity
    """Identity of this worker's stored blocks: engine blocks for ``SojournConnector``, else Full Blocks."""
    ranks: int
    block_bytes: int
    """Bytes of one stored block, all layers and all workers."""

    def with_layout(self, layout: str) -> Self:
        """Return a copy whose identity also names ``layout``, the order of bytes in a block, if not empty."""
        dtype = f"{self.identity.kv_dtype}/{layout}" if layout else self.identity.kv_dtype
        return replace(self, identity=replace(self.identity, kv_dtype=dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffloadSettings(KVConnectorSettings):
    options: KVOffloadOptions
    host_slots: int
    """Number of blocks that fit in host memory, over all workers."""
    host_because: str
    """Under ``auto``: why host memory has this size, or why there is none. Otherwise empty."""

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVOffloadSettings:
        """Raises ``SettingsError`` for a wrong setting or an unsupported engine."""
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = read_settings(given, KVOffloadOptions, "connector setting")
        on_disk, host_bytes, because = options.disk is not None, options.host_bytes, ""
        try:
            for refusal in _refusals(vllm_config, kv_cache_config, transfers=False, on_disk=on_disk):
                raise SettingsError(refusal)
            kv = _describe_kv(vllm_config, kv_cache_config, sure=on_disk)
            if host_bytes == "auto":
                host_bytes, because = _auto_host_bytes(options, kv_cache_config, kv["block_bytes"])
            _check_bytes("host_bytes (--kv-host-gib)", host_bytes, kv["block_bytes"])
            if on_disk:
                _check_bytes("disk_bytes (--kv-disk-gib)", options.disk_bytes, kv["block_bytes"])
        except SettingsError as error:
            if on_disk or options.host_bytes != "auto":
                raise
            kv = {"block_tokens": 1, "identity": _NO_KV, "ranks": 1, "block_bytes": 1}
            kv["blocks"], host_bytes, because = kv_cache_config.num_blocks, 0, str(error)
        return cls(**kv, options=options, host_slots=host_bytes // kv["block_bytes"], host_because=because)

    @property
    def disk_blocks(self) -> int:
        """Number of blocks that fit in ``disk_bytes``. Each worker writes one file per block."""
        if self.options.disk is None:
            return 0
        return self.options.disk_bytes // (self.block_bytes + self.ranks * HEADER_BYTES)

    def limits(self) -> TierLimits:
        return TierLimits(
            host_slots=self.host_slots,
            disk_blocks=self.disk_blocks,
            max_stage_wait_s=self.options.max_stage_wait_s,
            min_probe_blocks=max(1, PROBE_TOKENS // self.block_tokens),
        )

    def open_disk(self, block_bytes: int, layers: int) -> SharedStore | None:
        """Open this worker's store on disk; ``None`` without ``disk``. ``block_bytes`` and ``layers`` are
        those of this worker's part of a block. Raises ``IncompatibleStore`` for a directory
        that has only KV of other identities."""
        if self.options.disk is None:
            return None
        identity = replace(self.identity, block_bytes=block_bytes, layers=layers)
        return _open_store(self.options.disk, identity, self.disk_blocks * (block_bytes + HEADER_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSettings(KVConnectorSettings):
    options: KVTransferOptions
    concurrent_steps: int
    """Maximum number of planned steps whose results are not known yet."""
    shape: str
    """How the model is split over the workers, for operators and for comparison with the peer."""
    listen: str
    per_full: int
    limits: TransferLimits
    longest_blocks: int
    """Number of Full Blocks of the longest prompt that the engine accepts."""

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVTransferSettings:
        """Raises ``SettingsError`` for a wrong setting or an unsupported engine."""
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = read_settings(given, KVTransferOptions, "connector setting")
        for refusal in _refusals(vllm_config, kv_cache_config, transfers=True):
            raise SettingsError(refusal)
        parallel = vllm_config.parallel_config
        tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        try:
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            per_full = blocks_per_full(spec.block_size, options.block_tokens)
            kv = _describe_kv(vllm_config, kv_cache_config, per_full)
            block_bytes, ranks, identity = kv["block_bytes"], kv["ranks"], kv["identity"]
            _check_bytes("store_bytes (--kv-store-gib)", options.store_bytes, block_bytes)
            _check_bytes("buffer_bytes (--kv-buffer-gib)", options.buffer_bytes, block_bytes)
            limits = TransferLimits(
                slots=options.buffer_bytes // block_bytes,
                patience_s=options.patience_s,
                lease_s=options.lease_s,
                max_waiting_writes=max(1, options.waiting_write_bytes // (ranks * identity.block_bytes)),
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error
        try:
            listen = rank_address(options.listen, identity.tp_rank, ranks)
            parse_address(listen)
        except ValueError as error:
            raise SettingsError(f"listen: {error}") from error
        return cls(
            **kv,
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
        """Raises ``IncompatibleStore`` if the directory has only KV of other identities."""
        return _open_store(self.options.store, self.identity, self.options.store_bytes // self.ranks)


def keeps_contexts(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether some layers have full attention. Only their groups keep the blocks of a whole context:
    others free blocks of a running request, and vLLM puts a placeholder in their place."""
    from .compat import FullAttentionSpec

    return any(
        isinstance(each, FullAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
        for each in layer_specs(group.kv_cache_spec)
    )


def _open_store(folder: str, identity: KvIdentity, budget_bytes: int) -> SharedStore:
    """Open one worker's store: in ``folder``, or below it if the engine has several workers."""
    if identity.tp_size > 1:
        folder = os.path.join(folder, f"rank{identity.tp_rank}of{identity.tp_size}")
    return SharedStore(folder, identity, budget_bytes=budget_bytes)


def _describe_kv(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, per_full: int = 1, *, sure: bool = True
) -> dict[str, Any]:
    """Return the fields of ``KVConnectorSettings``, for stored blocks of ``per_full`` engine blocks. With
    ``sure``, raises ``SettingsError`` if other weights could have the same identity."""
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    spec, layers, ranks = groups[0].kv_cache_spec, len(groups[0].layer_names), parallel.world_size
    # The simulator has no tensors, but its specs have their sizes.
    engine_bytes = stored_block_bytes(kv_cache_config) or max(
        each.kv_cache_spec.page_size_bytes * len(each.layer_names) for each in groups
    )
    identity = KvIdentity(
        model=model_identity(vllm_config, sure=sure),
        kv_dtype=dtype_identity(vllm_config, spec),
        block_tokens=spec.block_size * per_full,
        block_bytes=engine_bytes * per_full,
        layers=layers,
        hash_scheme=(
            f"{vllm_config.cache_config.prefix_caching_hash_algo}/seed={os.environ.get('PYTHONHASHSEED')}"
            f"/{spec.block_size}"
        ),
        vllm_version=running_vllm(),
        tp_rank=parallel.rank % ranks,
        tp_size=ranks,
    )
    block_bytes = identity.block_bytes * ranks
    if parallel.pipeline_parallel_size > 1:
        # Stages differ, and each knows only its own number of layers. Every worker must get the same size.
        layers_of_all = int(vllm_config.model_config.get_total_num_hidden_layers())
        block_bytes = identity.block_bytes // layers * layers_of_all * parallel.tensor_parallel_size
    return {
        "blocks": kv_cache_config.num_blocks,
        "block_tokens": spec.block_size,
        "identity": identity,
        "ranks": ranks,
        "block_bytes": int(block_bytes),
    }


def _auto_host_bytes(
    options: KVOffloadOptions, kv_cache_config: KVCacheConfig, block_bytes: int
) -> tuple[int, str]:
    """Return (size of host memory under ``auto``, why). Raises ``SettingsError`` where it must be given."""
    from .compat import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise SettingsError("auto is for CUDA and CPUs; set a size with --kv-host-gib")
    if not keeps_contexts(kv_cache_config):
        raise SettingsError(NO_CONTEXTS)
    device_bytes = kv_cache_config.num_blocks * block_bytes
    host_bytes, why = options.host_bytes_max, "this engine's part of half of the memory that was free"
    if AUTO_DEVICES * device_bytes <= host_bytes:
        host_bytes = AUTO_DEVICES * device_bytes
        why = f"{AUTO_DEVICES} times the device's {device_bytes / GIB:.2f} GiB"
    return host_bytes, f"{host_bytes / GIB:.2f} GiB, {why}"


def _check_bytes(name: str, given_bytes: int, block_bytes: int) -> None:
    """Raise ``SettingsError`` if a size has no room for one block."""
    if given_bytes < block_bytes:
        raise SettingsError(
            f"{name} is {given_bytes}; expected at least one block of this model, {block_bytes}"
        )


def _refusals(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, transfers: bool, on_disk: bool = False
) -> Iterator[str]:
    """Yield why an engine's model or settings are not supported: what was found, what is supported and what
    to change. ``transfers``: for ``PathsConnector``."""
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
        for spec in layer_specs(groups[0].kv_cache_spec):
            kind = type(spec).__name__
            if kind not in ("FullAttentionSpec", "MLAAttentionSpec") or (
                spec.sliding_window is not None or spec.attention_chunk_size is not None
            ):
                yield f"layers of kind {kind} do not keep the KV of all tokens, which transfers need"


# -- strings that identify an engine's KV, which stores and peers compare before they share blocks


def model_identity(vllm_config: VllmConfig, *, sure: bool = True) -> str:
    """Return a text that identifies the model: weights, shape, load format, the seed of dummy weights, and a
    hash of other settings that change the KV. ``sure``, for KV that is shared or outlives the engine: raise
    ``SettingsError`` if other weights could have the same text."""
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
    """Return a space and a hash of the settings that change the KV of the same weights, if any. Only a hash,
    because the options of a loader may contain passwords."""
    model = vllm_config.model_config
    settings = {
        "length": _length_settings(model),
        "quantization_config": getattr(model, "quantization_config", None),
        "loader": getattr(vllm_config.load_config, "model_loader_extra_config", None),
        "media": _media_settings(model),
    }
    changed = {name: value for name, value in settings.items() if value}
    if not changed:
        return ""
    text = json.dumps(changed, sort_keys=True, default=repr)
    return f" {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _length_settings(model: ModelConfig) -> list[Any]:
    """Return the settings through which the KV depends on ``--max-model-len``: LongRoPE rotates all keys by
    it, and vLLM scales the attention of Llama 4 by it."""
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
    """Return the KV cache's data type, and on a CPU the name of the packing, as in ``torch.bfloat16/amx``.
    vLLM's CPU attention packs a block for the processor's instructions, so the same bytes are different KV on
    another kind of processor."""
    from .compat import current_platform

    cache, dtype = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    kv_dtype = str(cache if cache != "auto" else dtype)
    if not current_platform.is_cpu():
        return kv_dtype
    from .compat import cpu_attention_isa

    packings = {
        str(cpu_attention_isa(dtype, each.block_size, getattr(each, "head_size", None), cache))
        for each in layer_specs(spec)
    }
    return "/".join([kv_dtype, *sorted(packings - {""})])


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers if they differ in size, otherwise the group's own spec."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
