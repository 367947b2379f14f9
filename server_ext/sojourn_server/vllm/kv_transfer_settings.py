"""What the operator sets of the two paths to storage: ``kv_connector_extra_config`` of our paths connector.

listen               where peers reach this engine's traffic manager: unix:PATH or tcp:HOST:PORT
store                a directory that all engines of the fleet share
store_layout         "sojourn" (the default): a store of this engine's own there, and the others' are read;
                     "vllm-fs": the one folder of vLLM's own fs tier
store_name           what this engine's store is called ("sojourn" only)
store_bytes          how much it may write ("sojourn" only)
buffer_bytes         host memory for blocks on their way
storage_read_rate, storage_write_rate, compute_rate
                     bytes a second; left out: as fast as it goes
block_tokens         of a Full Block, 64 where it is left out
save                 false: store nothing
read_width, patience_s, lease_s
                     as in ``TransferLimits``
waiting_write_bytes  memory for copies of blocks that wait to be stored, beside buffer_bytes; 256 MiB
role                 "prefill" or "decode": what a gateway sends this engine; left out: it is told to none
node                 the machine whose storage link this engine uses; left out: the host's name
keep_on_reset        true: a reset of vLLM's own prefix cache, as before a measurement, is no sign of new
                     weights; only one that names connectors (reset_external) ends the traffic
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv_offload.block_file import KvIdentity
from ..kv_offload.block_store import FULL_BLOCK_TOKENS, BlockStore, blocks_per_full
from ..kv_offload.shared_store import SharedStore
from ..kv_offload.store_folder import is_store_name
from ..kv_offload.vllm_fs_store import VllmFsLayout, VllmFsStore
from ..kv_transfer.peer_transport import UnknownTransport, check_address
from ..kv_transfer.transfer_limits import (
    MAX_WAITING_WRITE_BYTES,
    LinkRates,
    TransferLimits,
    waiting_write_limit,
)
from ..launch.machine_memory import read_memory
from .compat import running_vllm
from .kv_identity import dtype_identity, hash_identity, layer_specs, model_identity
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    from .compat import KVCacheConfig, KVCacheSpec, VllmConfig

_EXPECTED = {"store": "a directory", "listen": "unix:PATH or tcp:HOST:PORT", "node": "a machine's name"}
LAYOUTS = ("sojourn", "vllm-fs")
ROLES = ("prefill", "decode")
_RATES = ("storage_read_rate", "storage_write_rate", "compute_rate")
_KNOWN = (
    "listen", "store", "store_layout", "store_name", "store_bytes", "buffer_bytes", *_RATES, "block_tokens",
    "save", "read_width", "patience_s", "lease_s", "waiting_write_bytes", "role", "node",
    "keep_on_reset",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSettings:
    """Everything about the paths of one engine, worked out when it starts."""

    listen: str
    store: str
    store_layout: str
    store_name: str
    store_bytes: int
    save: bool
    block_tokens: int
    """Of an engine block."""
    per_full: int
    """Engine blocks of a Full Block."""
    blocks: int
    """On the device, with vLLM's null block."""
    identity: KvIdentity
    limits: TransferLimits
    rates: LinkRates
    fs_layout: VllmFsLayout | None
    """Of vLLM's folder, where that is the store."""
    longest_blocks: int
    """Full Blocks of the longest prompt that the engine takes."""
    role: str | None
    """Of ``ROLES``; ``None``: it is in no pair that a gateway makes."""
    node: str
    keep_on_reset: bool

    @classmethod
    def read(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVTransferSettings:
        """Raises ``SettingsError`` for what is wrong or cannot be served, with what was expected."""
        given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for key in given:
            if key not in _KNOWN:
                raise SettingsError(f"unknown setting of the paths {key!r}; expected {', '.join(_KNOWN)}")
        _check_engine(vllm_config, kv_cache_config)
        group = kv_cache_config.kv_cache_groups[0]
        block_tokens = group.kv_cache_spec.block_size
        try:
            full_tokens = _whole(given, "block_tokens", FULL_BLOCK_TOKENS)
            per_full = blocks_per_full(block_tokens, full_tokens)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        layers = len(group.layer_names)
        # The lab's scheduler has no tensors, but knows what one would take.
        sizes = [tensor.size for tensor in kv_cache_config.kv_cache_tensors]
        page = group.kv_cache_spec.page_size_bytes
        engine_bytes = sum(sizes) // kv_cache_config.num_blocks if sizes else page * layers
        block_bytes = engine_bytes * per_full
        kv_dtype = dtype_identity(vllm_config, group.kv_cache_spec)
        identity = _identity(vllm_config, kv_dtype, full_tokens, block_bytes, layers, block_tokens)
        layout = given.get("store_layout", LAYOUTS[0])
        if layout not in LAYOUTS:
            raise SettingsError(f"store_layout is {layout!r}; expected {' or '.join(LAYOUTS)}")
        fs_layout = None
        if layout == "vllm-fs":
            for only in ("store_name", "store_bytes"):
                if only in given:
                    raise SettingsError(f"{only} is for store_layout sojourn; vLLM's folder has no bounds")
            fs_layout = _fs_layout(vllm_config, kv_cache_config, per_full)
        name, store_bytes = given.get("store_name"), 0
        if layout == "sojourn":
            if not isinstance(name, str) or not is_store_name(name):
                raise SettingsError(
                    f"store_name is {name!r}; expected letters, digits, '.', '_' and '-', at most 64, and "
                    "another one for each engine"
                )
            store_bytes = _whole(given, "store_bytes")
            if store_bytes < identity.block_bytes:
                raise SettingsError(
                    f"store_bytes (--kv-store-gib) is {store_bytes}; expected at least a Full Block of this "
                    f"model, {identity.block_bytes}"
                )
        listen = _text(given, "listen")
        try:
            check_address(listen)
        except (ValueError, UnknownTransport) as error:
            raise SettingsError(f"listen: {error}") from error
        role = given.get("role")
        if role is not None and role not in ROLES:
            raise SettingsError(f"role is {role!r}; expected {' or '.join(ROLES)}")
        return cls(
            listen=listen,
            store=_text(given, "store"),
            store_layout=layout,
            store_name=name if isinstance(name, str) else "",
            store_bytes=store_bytes,
            save=_flag(given, "save", True),
            block_tokens=block_tokens,
            per_full=per_full,
            blocks=kv_cache_config.num_blocks,
            identity=identity,
            limits=_limits(given, identity, with_tensors=bool(sizes)),
            rates=_rates(given),
            fs_layout=fs_layout,
            longest_blocks=-(-vllm_config.model_config.max_model_len // full_tokens),
            role=role,
            node=_text(given, "node") if "node" in given else socket.gethostname(),
            keep_on_reset=_flag(given, "keep_on_reset", False),
        )

    @property
    def buffers_short_bytes(self) -> int:
        """What ``buffer_bytes`` had to be at least for the longest prompt; 0: it is enough."""
        short = self.limits.slots < self.longest_blocks
        return self.longest_blocks * self.identity.block_bytes if short else 0

    def open_store(self) -> BlockStore:
        """Raises ``OffloadError`` where it is another model's, or another process's."""
        if self.fs_layout is not None:
            return VllmFsStore(self.store, self.identity, self.fs_layout)
        return SharedStore.open(
            self.store, self.identity, name=self.store_name, budget_bytes=self.store_bytes
        )


def _check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Whether KV of this engine can go from engine to engine at all."""
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise SettingsError(
            f"this model has {groups} groups of KV caches, as for sliding windows or state-space layers; the "
            "paths serve models with one"
        )
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    for each in layer_specs(spec):
        keeps_less = _partial_retention(each)
        if keeps_less:
            raise SettingsError(
                f"this model's layers keep KV of {keeps_less}; the paths serve models whose layers keep that "
                "of all tokens"
            )
    if vllm_config.lora_config is not None:
        # An adapter's KV is told by its name alone, in the blocks' hashes: behind it may be other weights on
        # the other engine, or tomorrow.
        raise SettingsError(
            "adapters are served (--enable-lora), whose KV is told apart by their names and not by their "
            "weights; the paths serve engines without"
        )
    workers = vllm_config.parallel_config.world_size
    if workers != 1:
        raise SettingsError(f"{workers} workers share this model; the paths serve one")
    if vllm_config.scheduler_config.async_scheduling:
        # That a layer has not come would be known when the next step is planned on top of it.
        raise SettingsError(
            "steps are scheduled ahead of each other; the paths need one at a time: --no-async-scheduling"
        )
    if vllm_config.speculative_config is not None:
        raise SettingsError(
            "tokens are guessed ahead (--speculative-config); the paths serve engines without"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise SettingsError(
            f"kv_role is {transfer.kv_role!r}; expected 'kv_both': either side sends and receives"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise SettingsError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}; expected 'recompute': else a "
            "block that cannot be read is a request that fails"
        )
    if os.environ.get("PYTHONHASHSEED") in (None, "random"):
        raise SettingsError(
            "blocks are found by hashes that differ from process to process unless PYTHONHASHSEED is set: "
            "set it to 0 for every engine of the fleet"
        )


def _partial_retention(spec: KVCacheSpec) -> str:
    """Of what a layer keeps KV where that is not all tokens, in words; empty: of all."""
    from .compat import FullAttentionSpec, MLAAttentionSpec

    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"another kind ({type(spec).__name__})"
    if spec.sliding_window is not None:
        return f"a sliding window of {spec.sliding_window} tokens"
    if spec.attention_chunk_size is not None:
        return f"a chunk of {spec.attention_chunk_size} tokens"
    return ""


def _identity(
    vllm_config: VllmConfig,
    kv_dtype: str,
    full_tokens: int,
    block_bytes: int,
    layers: int,
    block_tokens: int,
) -> KvIdentity:
    return KvIdentity(
        model=model_identity(vllm_config),
        kv_dtype=kv_dtype,
        block_tokens=full_tokens,
        block_bytes=block_bytes,
        layers=layers,
        hash_scheme=hash_identity(vllm_config, block_tokens),
        vllm_version=running_vllm(),
    )


def _fs_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, per_full: int) -> VllmFsLayout:
    """What vLLM's fs tier would call its folder with the same engine and ``blocks_per_chunk``."""
    from .compat import build_offloading_config

    config = build_offloading_config(vllm_config, kv_cache_config)
    if config.canonical_layout:
        raise SettingsError("vLLM would write its canonical layout, which Full Blocks are not")
    replicated = bool(config.replicated_layout)
    return VllmFsLayout(
        model_name=config.model.name,
        dtype=str(config.model.dtype),
        engine_block_tokens=config.cache.tokens_per_hash,
        blocks_per_file=per_full,
        layer_names=list(config.groups[0].layer_names),
        parallel_agnostic=bool(config.parallel.is_parallelism_agnostic or replicated),
        extra={"replicated_layout": True} if replicated else {},
    )


def _limits(given: dict[str, Any], identity: KvIdentity, with_tensors: bool) -> TransferLimits:
    buffer_bytes = _whole(given, "buffer_bytes")
    slots = buffer_bytes // identity.block_bytes
    if slots < 1:
        raise SettingsError(
            f"buffer_bytes (--kv-buffer-gib) is {buffer_bytes}; expected at least a Full Block of this "
            f"model, {identity.block_bytes}, and room for the longest prompt"
        )
    memory = read_memory()
    if with_tensors and buffer_bytes > memory.total_bytes:
        raise SettingsError(
            f"buffer_bytes (--kv-buffer-gib) is {buffer_bytes}; expected at most what {memory.owner} has, "
            f"{memory.total_bytes}"
        )
    bounds: dict[str, Any] = {name: given[name] for name in ("patience_s", "lease_s") if name in given}
    for name, value in bounds.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SettingsError(f"{name} is {value!r}; expected seconds")
    if "patience_s" in bounds:
        bounds["beat_s"] = bounds["patience_s"] / 4
    if "read_width" in given:
        bounds["read_width"] = _whole(given, "read_width")
    waiting_bytes = _whole(given, "waiting_write_bytes", MAX_WAITING_WRITE_BYTES)
    bounds["max_waiting_writes"] = waiting_write_limit(waiting_bytes, identity.block_bytes)
    try:
        return TransferLimits(slots=slots, **bounds)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _rates(given: dict[str, Any]) -> LinkRates:
    found: dict[str, float | None] = {}
    for name in _RATES:
        rate = given.get(name)
        if rate is not None and (not isinstance(rate, int | float) or isinstance(rate, bool)):
            raise SettingsError(f"{name} is {rate!r}; expected bytes a second")
        found[name.removesuffix("_rate")] = rate
    try:
        return LinkRates(**found)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        what = _EXPECTED[name]
        raise SettingsError(f"{name} is {value!r}; expected {what}")
    return value


def _whole(given: dict[str, Any], name: str, default: int | None = None) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{name} is {value!r}; expected a whole number, at least 1")
    return value


def _flag(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; expected true or false")
    return value
