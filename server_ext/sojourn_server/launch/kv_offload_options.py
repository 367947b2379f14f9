"""Options of KV offload to host memory and disk, and vLLM's ``--kv-transfer-config`` for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kv_offload.store_folder import is_store_name
from .engine_flags import EngineFlags, own_flag, parallel_size
from .launch_errors import InvalidOption

GIB = 1 << 30
AUTO = "auto"
"""Value of ``--kv-host-gib``: four times the device's KV, at most ``auto_host_bytes``."""
BACKENDS = ("sojourn", "vllm")
OFFLOAD_CONNECTOR = "SojournConnector"
OFFLOAD_CONNECTOR_MODULE = "sojourn_server.vllm.kv_offload_connector"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffloadOptions:
    """Options of KV offload to host memory and disk. An option that is not given is ``None``."""

    host_gib: str | None = own_flag(
        "--kv-host-gib",
        "Host memory for KV evicted from the device: GiB, 0 or auto: four times the device's KV, at most "
        "half of the free memory",
        shown_default="auto on CUDA, else 0",
    )
    disk: str | None = own_flag(
        "--kv-disk", "Directory for KV evicted from host memory; made if it is missing", is_path=True
    )
    disk_gib: float | None = own_flag("--kv-disk-gib", "Capacity of the directory, GiB")
    disk_name: str | None = own_flag(
        "--kv-disk-name", "This engine's name in a directory that several engines share"
    )
    backend: str = own_flag(
        "--tier-backend",
        "Code that moves KV: sojourn, or vllm for its own connector (CUDA only)",
        default="sojourn",
    )

    @property
    def any(self) -> bool:
        """Whether any of the options is set."""
        return self != KvOffloadOptions()


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
        check_size("--kv-host-gib", gib)
    return gib


def auto_host_bytes(available_bytes: int, flags: EngineFlags) -> int:
    """Return the most host memory that each engine of a command takes under ``auto``: half of the available
    memory, divided among the data parallel ranks. Workers of one engine share its part."""
    local = "--data-parallel-size-local"
    ranks = parallel_size(flags, local if flags.has(local) else "--data-parallel-size")
    return available_bytes // 2 // max(1, ranks)


def offload_transfer_config(
    options: KvOffloadOptions,
    *,
    cpu_build: bool,
    stock: bool,
    block_tokens: str | None = None,
    auto_bytes: int = 0,
) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` for ``options``. Raises ``InvalidOption`` for options that
    are wrong, incomplete or impossible on this engine. ``cpu_build``: whether the engine is vLLM's CPU build.
    ``stock``: whether the policy is ``stock``. ``block_tokens``: value of ``--block-size``, if given.
    ``auto_bytes``: result of ``auto_host_bytes``."""
    if options.backend not in BACKENDS:
        raise InvalidOption(f"--tier-backend is {options.backend!r}; expected {' or '.join(BACKENDS)}")
    host_gib = host_size_gib(options.host_gib)
    if not host_gib and options.host_gib != AUTO:
        raise InvalidOption(
            "tiers below the device need host memory, which also fills the disk: give --kv-host-gib"
        )
    if (options.disk is None) != (options.disk_gib is None):
        raise InvalidOption("--kv-disk and --kv-disk-gib go together: give the directory and its capacity")
    if options.disk_name is not None and options.disk is None:
        raise InvalidOption(
            "--kv-disk-name names a store in a directory: give --kv-disk and --kv-disk-gib too"
        )
    if options.disk_name is not None and not is_store_name(options.disk_name):
        raise InvalidOption(
            f"--kv-disk-name is {options.disk_name!r}; expected letters, digits, '.', '_' and '-', at most "
            "64, the first a letter or digit"
        )
    if options.backend == "vllm":
        if host_gib is None:
            raise InvalidOption(
                "--kv-host-gib is auto; expected a size in GiB, which vLLM's own connector needs"
            )
        if options.disk is not None:
            raise InvalidOption(
                "--kv-disk is for --tier-backend sojourn; vLLM's own connector has host memory only"
            )
        if cpu_build:
            raise InvalidOption(
                "--tier-backend vllm needs CUDA: vLLM's own connector does not serve CPU engines"
            )
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            # By default vLLM keeps prompts only, but an agent's next prompt contains its last output.
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": int(host_gib * GIB),
                "offload_prompt_only": False,
                **({} if stock else CACHE_POLICY),
            },
        }
    if stock:
        raise InvalidOption(
            "--tier-backend sojourn needs our scheduler: choose a policy, for example observe"
        )
    extra: dict[str, Any] = {"host_bytes": AUTO, "host_bytes_max": auto_bytes}
    if host_gib is not None:
        extra = {"host_bytes": int(host_gib * GIB)}
    if not cpu_build and not _may_be_split(block_tokens):
        extra["kv_layout"] = CUDA_LAYOUT
    if options.disk is not None and options.disk_gib is not None:
        check_size("--kv-disk-gib", options.disk_gib)
        extra |= {"disk": options.disk, "disk_bytes": int(options.disk_gib * GIB)}
        if options.disk_name is not None:
            extra["disk_name"] = options.disk_name
    return {
        "kv_connector": OFFLOAD_CONNECTOR,
        "kv_connector_module_path": OFFLOAD_CONNECTOR_MODULE,
        "kv_role": "kv_both",
        # Compute KV that cannot be loaded. By default the request would fail.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _may_be_split(block_tokens: str | None) -> bool:
    """Return whether vLLM may have to split blocks of this size for an attention kernel. vLLM cannot split
    blocks in a layout with blocks outermost. All kernels accept blocks of 16, 32 and 64 tokens. Without
    ``--block-size`` vLLM chooses a size that needs no split."""
    return block_tokens not in (None, "16", "32", "64")


def hash_seed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes block hashes equal in every process. An engine then finds
    its stored blocks after a restart. The result is empty if ``environ`` sets a fixed hash seed already."""
    return {"PYTHONHASHSEED": "0"} if environ.get("PYTHONHASHSEED") in (None, "random") else {}


def check_size(flag: str, gib: float) -> None:
    """Check that ``gib`` is positive and finite. Raises ``InvalidOption``, which names ``flag``."""
    if not 0 < gib < math.inf:
        raise InvalidOption(f"{flag} is {gib}; expected a size in GiB above 0")
