"""Flags for KV below the device, as a pure function: options in, vLLM's ``--kv-transfer-config`` out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..tiers.store_folder import is_name
from .errors import BadOption

GIB = 1 << 30
BACKENDS = ("sojourn", "vllm")
CONNECTOR = "SojournConnector"
CONNECTOR_MODULE = "sojourn_server.vllm.connector"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """What the user asked for below the device. Sizes in GiB."""

    host_gib: float | None = None
    disk: str | None = None
    """A directory, made if it is not there."""
    disk_gib: float | None = None
    disk_name: str | None = None
    """What this engine's store there is called, beside others' that it reads."""
    backend: str = "sojourn"

    @property
    def any(self) -> bool:
        """Whether anything was asked for."""
        return self != TierOptions()


def transfer_config(options: TierOptions, *, cpu_build: bool, stock: bool) -> dict[str, Any]:
    """``kv_transfer_config`` for what was asked for. Raises ``BadOption``."""
    if options.backend not in BACKENDS:
        raise BadOption(f"--tier-backend is {options.backend!r}; expected {' or '.join(BACKENDS)}")
    if options.host_gib is None:
        raise BadOption(
            "host memory below the device has no size, and a disk is filled from it: give --kv-host-gib"
        )
    check_size("--kv-host-gib", options.host_gib)
    if (options.disk is None) != (options.disk_gib is None):
        raise BadOption("--kv-disk and --kv-disk-gib go together: the directory, and how much it may hold")
    if options.disk_name is not None and options.disk is None:
        raise BadOption("--kv-disk-name names a store in a directory: give --kv-disk and --kv-disk-gib too")
    if options.disk_name is not None and not is_name(options.disk_name):
        raise BadOption(
            f"--kv-disk-name is {options.disk_name!r}; expected letters, digits, '.', '_' and '-', at most "
            "64, the first a letter or digit"
        )
    host_bytes = int(options.host_gib * GIB)
    if options.backend == "vllm":
        if options.disk is not None:
            raise BadOption(
                "--kv-disk is for --tier-backend sojourn; vLLM's own connector has host memory only"
            )
        if cpu_build:
            raise BadOption("--tier-backend vllm needs CUDA: vLLM's own connector does not serve CPU engines")
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            # By default vLLM keeps prompts only; an agent's next prompt has its last output in it.
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": False},
        }
    if stock:
        raise BadOption("--tier-backend sojourn works with our scheduler: choose a policy, such as observe")
    if not cpu_build:
        raise BadOption(
            "--tier-backend sojourn copies CPU engines' KV so far: on CUDA give --tier-backend vllm"
        )
    extra: dict[str, Any] = {"host_bytes": host_bytes}
    if options.disk is not None and options.disk_gib is not None:
        check_size("--kv-disk-gib", options.disk_gib)
        extra |= {"disk": options.disk, "disk_bytes": int(options.disk_gib * GIB)}
        if options.disk_name is not None:
            extra["disk_name"] = options.disk_name
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        # What cannot be loaded is computed; by default the request would fail.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def hash_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """What stored blocks need to be found again by another process: hashes that do not change."""
    return {"PYTHONHASHSEED": "0"} if environ.get("PYTHONHASHSEED") in (None, "random") else {}


def check_size(flag: str, gib: float) -> None:
    """Raises ``BadOption`` for what is no size."""
    if not 0 < gib < math.inf:
        raise BadOption(f"{flag} is {gib}; expected a size in GiB, more than 0")
