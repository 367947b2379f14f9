"""Checks the options of host memory and disk before an engine starts, minutes before the engine's own checks.

The engine checks everything again. Only the engine knows all parts of a store's identity, such as the layout
of the KV. Free memory and disk space may also change before the engine uses them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..kv_offload.block_file import NO_SPACE
from ..kv_offload.store_folder import (
    FoundStore,
    IncompatibleStore,
    StoreInUse,
    block_files_bytes,
    find_stores,
)
from .kv_offload_options import GIB, KvOffloadOptions
from .launch_errors import InvalidOption
from .machine_memory import MachineMemory, read_memory

DISK_FLAG = "--kv-disk"
_FOLDER_ADVICE = {
    DISK_FLAG: f"give {DISK_FLAG} a directory that this user can make and write, on a local disk"
}
_MAX_LISTED = 3
"""Maximum number of names in a message."""


def check_kv_offload(
    options: KvOffloadOptions,
    *,
    vllm_version: str | None,
    weights: str | None,
    block_tokens: int | None,
    workers: int = 1,
    try_writing: bool = True,
) -> list[str]:
    """Return one-line notes on options that the engine may reject, or that may cause trouble later. Raises
    ``InvalidOption`` for an option that the engine will surely reject.

    Call it with ``options`` that ``offload_transfer_config`` has accepted. ``vllm_version``, ``weights`` (a
    result of ``known_weights``) and ``block_tokens`` (value of ``--block-size``) describe the engine;
    ``None`` means unknown. ``workers``: number of its workers. The check takes no lock and leaves nothing on
    the disk. With ``try_writing=False`` it writes nothing and trusts the file permissions.
    """
    notes = []
    if options.host_gib is not None:
        notes += check_host_memory(options.host_gib, read_memory())
    if options.disk is not None and options.disk_gib is not None:
        root = Path(os.path.realpath(options.disk))  # the path that the engine opens
        folder = folder_of_stores(root, workers)
        stores = find_usable_stores(options.disk, folder, vllm_version, weights, options.disk_name)
        there = writable_directory(options.disk, root, allow_full=bool(stores), probe_system=try_writing)
        if there not in (root, root.parent):  # probably a mistyped parent directory
            notes.append(
                f"--kv-disk {options.disk} does not exist: the start makes it and its parents in {there}"
            )
        notes += _contents_notes(options.disk, folder, stores, block_tokens)
        ours = [store for store in stores if store.name == options.disk_name]
        notes += free_space_notes(options.disk, options.disk_gib, there, ours, workers=workers)
    return notes


def folder_of_stores(root: Path, workers: int) -> Path:
    """Return the folder with the KV stores of an engine's first worker. For a single worker it is ``root``.
    Several workers have one folder each below ``root``."""
    return root if workers == 1 else root / f"rank0of{workers}"


def check_host_memory(host_gib: float, memory: MachineMemory, flag: str = "--kv-host-gib") -> list[str]:
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


def find_usable_stores(
    disk: str,
    root: Path,
    vllm_version: str | None,
    weights: str | None,
    name: str | None,
    flag: str = DISK_FLAG,
) -> list[FoundStore]:
    """Return the KV stores in the directory ``root`` that the engine may use; empty if there are none. Raises
    ``InvalidOption`` if the engine would reject the directory, for example because another engine uses its
    store.

    ``vllm_version`` and ``weights`` (a result of ``known_weights``) describe the engine; ``None`` means
    unknown. ``name``: name of the engine's own store, if it has one. ``flag`` and ``disk`` are for errors,
    which name the directory as the user wrote it.
    """
    # Two parts of a KvIdentity are known here: the release and, for most directories, the weights. The rest
    # is unknown: vLLM may override block_tokens (MLA on the CPU); block_bytes, layers, kv_dtype and the rest
    # of model come from the model's configuration as vLLM reads it; vLLM sets hash_scheme's algorithm.
    known = {} if vllm_version is None else {"vllm_version": vllm_version}
    try:
        return find_stores(root, known, weights, name)
    except (IncompatibleStore, StoreInUse) as error:
        advice = error.advice.replace(f"{DISK_FLAG}-name", f"{flag}-name")
        raise InvalidOption(f"{flag} {disk} cannot be used: {error.what}", advice) from None
    except NotADirectoryError:  # ``writable_directory`` reports this, and which part of the path is wrong
        return []
    except OSError as error:
        raise InvalidOption(f"{flag} {disk} cannot be read: {error.strerror}", _advice(flag)) from None


def writable_directory(
    disk: str, root: Path, *, allow_full: bool, probe_system: bool, flag: str = DISK_FLAG
) -> Path:
    """Return the directory ``root`` if it exists, else its nearest existing parent. Raises ``InvalidOption``
    if the result is not a writable directory.

    ``flag`` and ``disk`` are for errors, which name the directory as the user wrote it. ``allow_full``:
    whether a full disk is allowed. ``probe_system``: whether to try to write; if false, only the permissions
    are read.
    """
    there, mode = _nearest_existing(disk, root, flag)
    failed = f"{flag} {disk} cannot be " + ("written" if there == root else f"made in {there}")
    if not stat.S_ISDIR(mode):
        what = f"{flag} {disk}" if there == root else f"{failed}, which"
        raise InvalidOption(f"{what} is not a directory; expected one", _advice(flag))
    expected = "expected a directory in which the engine can make folders"
    if not probe_system:
        if not os.access(there, os.W_OK | os.X_OK):
            raise InvalidOption(f"{failed}: {os.strerror(errno.EACCES)}; {expected}", _advice(flag))
        return there
    # Try to write, because permissions mislead for root, remote disks and file systems like proc.
    try:
        probe = tempfile.mkdtemp(prefix=".sojourn-check-", dir=there)
    except OSError as error:
        # An existing store works on a full disk: it can be read, and evicts its own blocks.
        if not (allow_full and error.errno in NO_SPACE):
            raise InvalidOption(f"{failed}: {error.strerror}; {expected}", _advice(flag)) from None
    else:
        with contextlib.suppress(OSError):
            os.rmdir(probe)
    return there


def _nearest_existing(disk: str, root: Path, flag: str) -> tuple[Path, int]:
    for path in (root, *root.parents):
        try:
            return path, path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise InvalidOption(f"{flag} {disk} cannot be reached: {error.strerror}", _advice(flag)) from None
    raise InvalidOption(f"{flag} {disk}: not even {root.anchor} exists", _advice(flag))


def _advice(flag: str) -> str:
    return _FOLDER_ADVICE.get(flag, f"give {flag} a directory that this user can write")


def _contents_notes(
    disk: str, root: Path, stores: list[FoundStore], block_tokens: int | None
) -> Iterator[str]:
    if not stores:
        # Other files are no error, because each store has its own folder. The top of a disk has a lost+found.
        with contextlib.suppress(OSError):
            names = sorted(set(os.listdir(root)) - {"lost+found"})
            if names:
                yield (
                    f"--kv-disk {disk} has no KV store but other files, which stay untouched: "
                    f"{listed_names(names)}"
                )
    sizes = {store.manifest.get("block_tokens") for store in stores}
    if stores and block_tokens is not None and block_tokens not in sizes:
        listed = ", ".join(sorted(map(str, sizes)))
        yield (
            f"--kv-disk {disk} has blocks of {listed} tokens, and --block-size is {block_tokens}: the "
            "engine will reject it, unless vLLM gives this model that size"
        )


def free_space_notes(
    disk: str,
    disk_gib: float,
    there: Path,
    stores: list[FoundStore],
    flag: str = DISK_FLAG,
    *,
    workers: int = 1,
) -> Iterator[str]:
    """Yield a note if the engine's store cannot grow to ``disk_gib``.

    The store can use the free space of the disk that holds the directory ``there``, plus the space of its
    present blocks. ``stores``: candidates for the first worker's store. The largest candidate counts, and the
    stores of the other ``workers`` are assumed to have the same size. ``flag`` and ``disk`` are for the note,
    which names the directory as the user wrote it."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(there)
        # The store can reuse the space of its blocks. With several stores, only the engine knows its own.
        held = workers * max((block_files_bytes(store.path) for store in stores), default=0)
        if usage.total and usage.free + held < disk_gib * GIB:  # some network file systems report 0 of 0
            has = f", which holds {_format_gib(held)} of blocks already" if held else ""
            yield (
                f"{flag}-gib is {disk_gib:g}, but {_format_gib(usage.free)} are free in {disk}{has}: the "
                "store stops growing when the disk is full"
            )


def listed_names(names: Sequence[str]) -> str:
    """Return the names as text, separated by commas. If there are more than ``_MAX_LISTED`` names, "…" stands
    for the rest."""
    return ", ".join([*names[:_MAX_LISTED], *(["…"] if len(names) > _MAX_LISTED else [])])


def _format_gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
