"""Options of KV below the device: host memory and disk, or the store of a prefill/decode pair. vLLM's
``--kv-transfer-config`` for them, and checks before the engine starts, minutes before its own checks.

Prefill and decode engines have the same connector and the same settings. Each request says what the engine
has to do for it. An engine's role matters only to the gateway, which sends the requests.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kv_offload.shared_store import IncompatibleStore, check_root
from ..kv_transfer.peer_transport import parse_address
from .engine_flags import EngineFlags, InvalidOption, own_flag, parallel_size, refuse
from .launch_environment import MachineMemory, read_memory
from .weights_fingerprint import known_weights

GIB = 1 << 30
AUTO = "auto"
"""Value of ``--kv-host-gib``: four times the device's KV, at most an engine's part of the memory."""
OFFLOAD_CONNECTOR = "SojournConnector"
PREFILL_DECODE_CONNECTOR = "PathsConnector"
PAIR_CONNECTOR = "PairConnector"
"""``PathsConnector`` with host memory."""
VLLM_CONNECTOR = "ProgramOffloadingConnector"
"""vLLM's OffloadingConnector, with sojourn's order of eviction and on CPU engines too."""
_MODULES = {
    VLLM_CONNECTOR: "sojourn_server.vllm.program_offload_connector",
    OFFLOAD_CONNECTOR: "sojourn_server.vllm.kv_offload_connector",
    PREFILL_DECODE_CONNECTOR: "sojourn_server.vllm.kv_transfer_connector",
    PAIR_CONNECTOR: "sojourn_server.vllm.pair_connector",
}
CACHE_POLICY = {
    "eviction_policy": "ProgramCachePolicy",
    "cache_policy_module_path": "sojourn_server.vllm.offload_cache_policy",
}
"""Options of vLLM's own connector that make it evict blocks from host memory in sojourn's order."""
CUDA_LAYOUT = "BLHNC"
"""vLLM's KV cache layout that we ask for on CUDA: blocks outermost, then layers. A block is then one run of
bytes, so one copy moves it. With layers outermost, a block of a model with 32 layers needs 32 copies, which
take longer, above all to start. Every CUDA attention backend that supports any layout with blocks outermost
supports this one."""
UNSPLIT_BLOCK_TOKENS = (None, "16", "32", "64")
"""Values of ``--block-size`` (``None``: missing) with which vLLM never splits blocks for an attention kernel.
It cannot split them in a layout with blocks outermost."""
_MAX_NAME_CHARS = 64


class _Options:
    __slots__ = ()

    @property
    def any(self) -> bool:
        """Whether any of the options is set."""
        return self != type(self)()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffloadOptions(_Options):
    """Options of KV offload to host memory and disk. An option that is not given is ``None``."""

    host_gib: str | None = own_flag(
        "--kv-host-gib",
        "Host memory for KV evicted from the device: GiB, 0 or auto: four times the device's KV, at most "
        "half of the free memory",
        shown_default="auto on CUDA, else 0",
    )
    disk: str | None = own_flag(
        "--kv-disk",
        "Directory for KV evicted from host memory; made if it is missing. Engines of one model may share it",
        is_path=True,
    )
    disk_gib: float | None = own_flag(
        "--kv-disk-gib", "Capacity of the directory, GiB, for all engines that share it"
    )
    backend: str = own_flag(
        "--tier-backend",
        "Code that moves KV: sojourn, vllm for its own connector, or auto: sojourn where it serves the model",
        default=AUTO,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDecodeOptions(_Options):
    """Options of a prefill or decode engine. All need a role."""

    role: str | None = own_flag(
        "--role",
        "Serve as the prefill or decode engine of a pair. Prefill engines compute prompts and keep contexts: "
        "the policy and --kv-host-gib are for these",
    )
    store: str | None = own_flag(
        "--kv-store", "Existing directory that all engines of the pair share", is_path=True
    )
    store_gib: float = own_flag(
        "--kv-store-gib", "Capacity of the store, GiB, for all engines that share it", default=16.0
    )
    store_name: str | None = own_flag(
        "--kv-store-name", "This engine's name for its peers and logs", shown_default="node-role-port"
    )
    listen: str = own_flag(
        "--kv-listen",
        "Address for the other engines of the pair: tcp:HOST:PORT or unix:PATH; port 0 is any free port. "
        "Engines on other machines need a HOST of their network. There is no authentication",
        default="tcp:127.0.0.1:0",
    )
    node: str | None = own_flag(
        "--kv-node", "Machine whose storage link this engine uses", shown_default="host's name"
    )
    buffer_gib: float = own_flag(
        "--kv-buffer-gib", "Host memory for KV in transfer, GiB; the longest prompt must fit", default=1.0
    )

    def named_store(self, hostname: str, port: int | None) -> str:
        """Return the engine's name for its peers and logs. The default is NODE-ROLE-PORT, or NODE-ROLE if
        ``port`` is ``None``. NODE is the option ``node``, or else ``hostname``."""
        if self.store_name is not None:
            return self.store_name
        ending = f"-{self.role}" if port is None else f"-{self.role}-{port}"
        node = re.sub(r"[^A-Za-z0-9._-]+", "-", self.node or hostname).lstrip("._-") or "node"
        return node[: _MAX_NAME_CHARS - len(ending)] + ending


# --- vLLM's --kv-transfer-config ------------------------------------------------------------------


def host_size_gib(host_gib: str | None) -> float | None:
    """Return the size that ``--kv-host-gib`` gives, 0 included; ``None`` if the flag is missing or ``auto``.
    Raises ``InvalidOption``."""
    if host_gib is None or host_gib == AUTO:
        return None
    try:
        gib = float(host_gib)
    except ValueError:
        raise InvalidOption(f"--kv-host-gib is {host_gib!r}; expected GiB, {AUTO} or 0") from None
    if gib != 0:
        _check_size("--kv-host-gib", gib)
    return gib


def offload_transfer_config(
    options: KvOffloadOptions,
    *,
    cpu_build: bool,
    stock: bool,
    flags: EngineFlags = EngineFlags(()),
    available_bytes: int = 0,
) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` for ``options``, whose backend is chosen. Raises
    ``InvalidOption`` for options that are wrong, incomplete or impossible on this engine. ``cpu_build``:
    whether the engine is vLLM's CPU build. ``stock``: whether the policy is ``stock``.
    ``available_bytes``: memory, half of which data-parallel ranks share under ``auto``."""
    disk, disk_gib, host_gib = options.disk, options.disk_gib, host_size_gib(options.host_gib)
    by_vllm = options.backend == "vllm"
    refuse({
        f"--tier-backend is {options.backend!r}; expected sojourn, vllm or {AUTO}":
            options.backend not in ("sojourn", "vllm"),
        "a disk needs --kv-disk DIRECTORY, --kv-disk-gib GIB and --kv-host-gib GIB":
            (disk is None) != (disk_gib is None),
        "tiers below the device need host memory, which also fills the disk: give --kv-host-gib":
            not host_gib and options.host_gib != AUTO,
        "--kv-disk is for --tier-backend sojourn; vLLM's own connector has host memory only":
            by_vllm and disk is not None,
        "--tier-backend sojourn needs our scheduler: choose a policy, for example observe":
            stock and not by_vllm,
    })  # fmt: skip
    local = "--data-parallel-size-local"
    ranks = parallel_size(flags, local if flags.has(local) else "--data-parallel-size")
    most = {"host_bytes_max": available_bytes // 2 // max(1, ranks)}
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    if by_vllm:
        size = most if host_bytes is None else {"cpu_bytes_to_use": host_bytes}
        spec = {"spec_name": "ProgramOffloadingSpec", "spec_module_path": _MODULES[VLLM_CONNECTOR]}
        # By default vLLM keeps prompts only, but an agent's next prompt contains its last output.
        outputs = {"offload_prompt_only": False}
        return _transfer_config(VLLM_CONNECTOR, size | spec | outputs | ({} if stock else CACHE_POLICY))
    extra: dict[str, Any] = {"host_bytes": AUTO, **most} if host_bytes is None else {"host_bytes": host_bytes}
    if not cpu_build and flags.value("--block-size") in UNSPLIT_BLOCK_TOKENS:
        extra["kv_layout"] = CUDA_LAYOUT
    if disk_gib is not None:
        _check_size("--kv-disk-gib", disk_gib)
        extra |= {"disk": disk, "disk_bytes": int(disk_gib * GIB)}
    return _transfer_config(OFFLOAD_CONNECTOR, extra)


def prefill_decode_transfer_config(
    options: PrefillDecodeOptions, *, hostname: str, port: int | None, host: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` for a prefill or decode engine. Raises ``InvalidOption``.

    ``hostname``: this machine's name. ``port``: port of the engine's HTTP server; ``None`` for a Unix socket.
    ``host``: result of ``offload_transfer_config``; empty without host memory.
    """
    role = options.role
    refuse({
        "--kv-store and related options are for an engine of a pair: add --role prefill or --role decode":
            role is None,
        f"--role is {role!r}; expected prefill or decode": role not in ("prefill", "decode"),
        f"--role {role} needs --kv-store, the directory through which the pair shares KV":
            options.store is None,
    })  # fmt: skip
    _check_size("--kv-store-gib", options.store_gib)
    _check_size("--kv-buffer-gib", options.buffer_gib)
    try:
        parse_address(options.listen)
    except ValueError as error:
        raise InvalidOption(f"--kv-listen: {error}") from None
    extra = {
        "role": role,
        "node": hostname if options.node is None else options.node,
        "listen": options.listen,
        "store": options.store,
        "store_name": options.named_store(hostname, port),
        "store_bytes": int(options.store_gib * GIB),
        "buffer_bytes": int(options.buffer_gib * GIB),
    }
    if host:
        return _transfer_config(PAIR_CONNECTOR, {**extra, "host": host["kv_connector_extra_config"]})
    return _transfer_config(PREFILL_DECODE_CONNECTOR, extra)


def _transfer_config(connector: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": _MODULES[connector],
        "kv_role": "kv_both",  # of a pair too: a decode engine also reads for a prefill engine
        # Compute KV that cannot be loaded. By default the request would fail.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _check_size(flag: str, gib: float) -> None:
    refuse({f"{flag} is {gib}; expected a size in GiB above 0": not 0 < gib < math.inf})


# --- checks of this machine -----------------------------------------------------------------------


def check_machine(
    tiers: KvOffloadOptions,
    pair: PrefillDecodeOptions,
    files: Mapping[str, str | None],
    vllm_version: str | None,
    model: str,
    workers: int = 1,
) -> list[str]:
    """Return one-line notes on options that may cause trouble later. Raises ``InvalidOption`` for an option
    that the engine will surely reject. The engine, which alone knows all parts of a store's identity, checks
    everything again. The check leaves no file.

    ``files``: those that the engine saves, by flag. ``workers``: of the engine."""
    sizes = {"--kv-host-gib": host_size_gib(tiers.host_gib)}
    if pair.store is not None:
        sizes["--kv-buffer-gib"] = pair.buffer_gib
        if not Path(pair.store).exists():
            raise InvalidOption(
                f"--kv-store {pair.store} does not exist; expected the directory that the pair shares",
                "mount it, or make it with mkdir",
            )
    for flag, folder in (("--kv-disk", tiers.disk), ("--kv-store", pair.store)):
        if folder is not None:
            _check_store(flag, folder, vllm_version, known_weights(model), workers)
    for flag, file in files.items():
        if file is not None:
            refuse({f"{flag} {file} is a directory; expected a file": Path(file).is_dir()})
            _check_store(flag, str(Path(file).parent))
    given = {flag: gib for flag, gib in sizes.items() if gib}
    return check_host_memory(sum(given.values()), read_memory(), " plus ".join(given))


def check_host_memory(host_gib: float, memory: MachineMemory, flag: str) -> list[str]:
    """Return a note if ``host_gib``, the value of ``flag``, exceeds the available memory, else an empty list.
    Raises ``InvalidOption`` if it exceeds the total memory."""
    total, available = (f"{size / GIB:.2f} GiB" for size in (memory.total_bytes, memory.available_bytes))
    if host_gib * GIB > memory.total_bytes:
        raise InvalidOption(
            f"{flag} is {host_gib:g}; expected at most the {total} of {memory.owner}",
            "leave memory for the model, its KV cache and vLLM",
        )
    if host_gib * GIB > memory.available_bytes:
        return [
            f"{flag} is {host_gib:g}, but {available} of the {total} of {memory.owner} are available now, "
            "also for the model and its KV cache: the system may kill the engine when host memory fills"
        ]
    return []


def _check_store(
    flag: str, directory: str, vllm_version: str | None = None, weights: str | None = None, workers: int = 1
) -> None:
    """Raise ``InvalidOption`` if a directory cannot be written, or has only KV that the engine would reject.
    Errors name the ``flag``, and the directory as the user wrote it. ``None`` means unknown."""
    root = Path(os.path.realpath(directory))  # the path that the engine opens
    # Several workers have a folder each.
    folder = root if workers == 1 else root / f"rank0of{workers}"
    # Two parts of a KvIdentity are known here: the release and, for most directories, the weights.
    known = {} if vllm_version is None else {"vllm_version": vllm_version}
    try:
        check_root(folder, known, weights)
    except IncompatibleStore as error:
        raise InvalidOption(f"{flag} {directory} cannot be used: {error.what}", error.advice) from None
    except OSError as error:
        raise InvalidOption(
            f"{flag} {directory} cannot be used: {error.strerror}",
            f"give {flag} a path that this user can write",
        ) from None
