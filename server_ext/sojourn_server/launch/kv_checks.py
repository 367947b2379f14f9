"""Checks the options of host memory, disk and pairs before an engine starts, minutes before the engine's own
checks.

The engine checks everything again. Only the engine knows all parts of a store's identity, such as the layout
of the KV.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..kv_offload.store_folder import IncompatibleStore, StoreInUse, check_stores
from .kv_offload_options import GIB, KvOffloadOptions, host_size_gib
from .launch_errors import InvalidOption
from .machine_memory import MachineMemory, read_memory
from .prefill_decode_options import PrefillDecodeOptions

DISK_FLAG = "--kv-disk"
STORE_FLAG = "--kv-store"


class EngineFacts(NamedTuple):
    """What is known of an engine before it starts; ``None`` means unknown."""

    vllm_version: str | None
    weights: str | None
    """Result of ``known_weights``."""
    workers: int = 1


def check_kv_offload(options: KvOffloadOptions, engine: EngineFacts) -> list[str]:
    """Return one-line notes on options that may cause trouble later. Raises ``InvalidOption`` for an option
    that the engine will surely reject. ``options``: accepted by ``offload_transfer_config``. The check takes
    no lock and writes nothing."""
    notes = []
    host_gib = host_size_gib(options.host_gib)
    if host_gib is not None:
        notes += check_host_memory(host_gib, read_memory(), "--kv-host-gib")
    if options.disk is not None:
        check_store(DISK_FLAG, options.disk, options.disk_name, engine)
    return notes


def check_pair(options: PrefillDecodeOptions, name: str, engine: EngineFacts) -> list[str]:
    """Do for a prefill or decode engine what ``check_kv_offload`` does for host memory and disk. ``name``:
    name of the engine's part of the store."""
    assert options.store is not None, "prefill_decode_transfer_config has let it through"
    if not Path(options.store).exists():
        raise InvalidOption(
            f"{STORE_FLAG} {options.store} does not exist; expected the directory that the pair shares",
            "mount it, or make it with mkdir",
        )
    check_store(STORE_FLAG, options.store, name, engine)
    return check_host_memory(options.buffer_gib, read_memory(), "--kv-buffer-gib")


def check_host_memory(host_gib: float, memory: MachineMemory, flag: str) -> list[str]:
    """Return a note if ``host_gib`` exceeds the available memory, else an empty list. Raises
    ``InvalidOption`` if ``host_gib`` exceeds the total memory."""
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


def check_store(flag: str, directory: str, name: str | None, engine: EngineFacts) -> None:
    """Raise ``InvalidOption`` if the engine would reject a directory, for example because another engine uses
    its store. ``name``: name of the engine's own store, if it has one. Errors name the ``flag``, and the
    directory as the user wrote it."""
    root = Path(os.path.realpath(directory))  # the path that the engine opens
    # Several workers have a folder each.
    folder = root if engine.workers == 1 else root / f"rank0of{engine.workers}"
    # Two parts of a KvIdentity are known here: the release and, for most directories, the weights.
    known = {} if engine.vllm_version is None else {"vllm_version": engine.vllm_version}
    try:
        check_stores(folder, known, engine.weights, name)
    except (IncompatibleStore, StoreInUse) as error:
        advice = error.advice.replace(f"{DISK_FLAG}-name", f"{flag}-name")
        raise InvalidOption(f"{flag} {directory} cannot be used: {error.what}", advice) from None
    except OSError as error:
        raise InvalidOption(
            f"{flag} {directory} cannot be read: {error.strerror}",
            f"give {flag} a directory that this user can write",
        ) from None
