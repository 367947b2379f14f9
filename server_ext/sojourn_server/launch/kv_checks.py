"""Checks the options of host memory, disk and pairs before an engine starts, minutes before the engine's own
checks.

The engine checks everything again. Only the engine knows all parts of a store's identity, such as the layout
of the KV.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..kv_offload.store_folder import IncompatibleStore, StoreInUse, check_stores
from .kv_offload_options import GIB, KvOffloadOptions
from .launch_errors import InvalidOption
from .machine_memory import MachineMemory, read_memory
from .prefill_decode_options import DEFAULT_BUFFER_GIB, PrefillDecodeOptions

DISK_FLAG = "--kv-disk"
STORE_FLAG = "--kv-store"


def check_kv_offload(
    options: KvOffloadOptions, *, vllm_version: str | None, weights: str | None, workers: int = 1
) -> list[str]:
    """Return one-line notes on options that may cause trouble later. Raises ``InvalidOption`` for an option
    that the engine will surely reject.

    Call it with ``options`` that ``offload_transfer_config`` has accepted. ``vllm_version`` and ``weights``
    (a result of ``known_weights``) describe the engine; ``None`` means unknown. ``workers``: number of its
    workers. The check takes no lock and writes nothing.
    """
    notes = []
    if options.host_gib is not None:
        notes += check_host_memory(options.host_gib, read_memory(), "--kv-host-gib")
    if options.disk is not None:
        check_store(DISK_FLAG, options.disk, options.disk_name, vllm_version, weights, workers)
    return notes


def check_pair(
    options: PrefillDecodeOptions,
    name: str,
    *,
    vllm_version: str | None,
    weights: str | None,
    workers: int = 1,
) -> list[str]:
    """Do for a prefill or decode engine what ``check_kv_offload`` does for host memory and disk. ``name``:
    name of the engine's part of the store."""
    assert options.store is not None, "prefill_decode_transfer_config has let it through"
    if not Path(options.store).exists():
        raise InvalidOption(
            f"{STORE_FLAG} {options.store} does not exist; expected the directory that the pair shares",
            "mount it, or make it with mkdir",
        )
    check_store(STORE_FLAG, options.store, name, vllm_version, weights, workers)
    buffer_gib = DEFAULT_BUFFER_GIB if options.buffer_gib is None else options.buffer_gib
    return check_host_memory(buffer_gib, read_memory(), "--kv-buffer-gib")


def check_host_memory(host_gib: float, memory: MachineMemory, flag: str) -> list[str]:
    """Return a note if ``host_gib`` exceeds the available memory, else an empty list. Raises
    ``InvalidOption`` if ``host_gib`` exceeds the total memory."""
    if host_gib * GIB > memory.total_bytes:
        raise InvalidOption(
            f"{flag} is {host_gib:g}; expected at most the {_format_gib(memory.total_bytes)} of "
            f"{memory.owner}",
            "leave memory for the model, its KV cache and vLLM",
        )
    if host_gib * GIB > memory.available_bytes:
        return [
            f"{flag} is {host_gib:g}, but {_format_gib(memory.available_bytes)} of the "
            f"{_format_gib(memory.total_bytes)} of {memory.owner} are available now, also for the model and "
            "its KV cache: the system may kill the engine when host memory fills"
        ]
    return []


def check_store(
    flag: str, directory: str, name: str | None, vllm_version: str | None, weights: str | None, workers: int
) -> None:
    """Raise ``InvalidOption`` if the engine would reject a directory, for example because another engine uses
    its store. ``name``: name of the engine's own store, if it has one. Errors name the ``flag``, and the
    directory as the user wrote it."""
    root = Path(os.path.realpath(directory))  # the path that the engine opens
    # Several workers have a folder each.
    folder = root if workers == 1 else root / f"rank0of{workers}"
    # Two parts of a KvIdentity are known here: the release and, for most directories, the weights.
    known = {} if vllm_version is None else {"vllm_version": vllm_version}
    try:
        check_stores(folder, known, weights, name)
    except (IncompatibleStore, StoreInUse) as error:
        advice = error.advice.replace(f"{DISK_FLAG}-name", f"{flag}-name")
        raise InvalidOption(f"{flag} {directory} cannot be used: {error.what}", advice) from None
    except OSError as error:
        raise InvalidOption(
            f"{flag} {directory} cannot be read: {error.strerror}",
            f"give {flag} a directory that this user can write",
        ) from None


def _format_gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
