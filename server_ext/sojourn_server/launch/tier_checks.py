"""What of the tiers can be told before an engine starts: an engine takes minutes until it says so itself.

It says so all the same. Only it knows the whole identity of a store, and the machine changes meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..tiers.full_block import NO_SPACE
from ..tiers.store_folder import ForeignStore, FoundStore, StoreInUse, blocks_bytes, find_stores
from .errors import BadOption
from .machine_memory import Memory, read_memory
from .tiers import GIB, TierOptions

DISK = "--kv-disk"
_FOLDER_ADVICE = {DISK: f"give {DISK} a directory that this user can make and write, on a local disk"}
_SHOWN = 3
"""Names of things in a folder that a note lists."""


def check_tiers(
    options: TierOptions,
    *,
    vllm_version: str | None,
    weights: str | None,
    block_tokens: int | None,
    try_writing: bool = True,
) -> list[str]:
    """Refuse what the engine is certain to refuse; notes of a line each on what it may.

    ``vllm_version`` and ``weights`` (``known_weights``) are what the engine will find, ``block_tokens`` is
    what it is told; ``None`` where that is open. Nothing is left on the disk, no lock is taken; without
    ``try_writing`` nothing is made there for a moment either, and the permissions are believed. Options are
    as ``transfer_config`` has let them through. Raises ``BadOption``.
    """
    notes = []
    if options.host_gib is not None:
        notes += check_memory(options.host_gib, read_memory())
    if options.disk is not None and options.disk_gib is not None:
        root = Path(os.path.realpath(options.disk))  # as the engine opens it
        stores = stores_in(options.disk, root, vllm_version, weights, options.disk_name)
        there = writable(options.disk, root, full_is_fine=bool(stores), try_it=try_writing)
        if there not in (root, root.parent):  # a name mistyped further up, as like as not
            notes.append(
                f"--kv-disk {options.disk} is not there: a start makes it, with what is above it in {there}"
            )
        notes += _on_contents(options.disk, root, stores, block_tokens)
        ours = [store for store in stores if store.name == options.disk_name]
        notes += on_free_space(options.disk, options.disk_gib, there, ours)
    return notes


def check_memory(host_gib: float, memory: Memory, flag: str = "--kv-host-gib") -> list[str]:
    """Raises ``BadOption`` for more GiB than there are in all; a note for more than are available."""
    if host_gib * GIB > memory.total_bytes:
        raise BadOption(
            f"{flag} is {host_gib:g}; expected at most the {_gib(memory.total_bytes)} that "
            f"{memory.owner} has",
            "leave room for the model, its KV cache and vLLM as well",
        )
    if host_gib * GIB > memory.available_bytes:
        return [
            f"{flag} is {host_gib:g}, and of the {_gib(memory.total_bytes)} that {memory.owner} has "
            f"{_gib(memory.available_bytes)} are available now, for the model and its KV cache as well: the "
            "system may end the engine when host memory fills"
        ]
    return []


def stores_in(
    disk: str, root: Path, vllm_version: str | None, weights: str | None, name: str | None, flag: str = DISK
) -> list[FoundStore]:
    """The stores in a directory that ``flag`` names. Raises ``BadOption`` where the engine would refuse."""
    # Of a KvIdentity the release and, for most directories, the weights are certain. Not so the rest:
    # block_tokens, since vLLM gives some models (MLA on the CPU) a block size of its own, whatever it is
    # told; block_bytes, layers, kv_dtype and the rest of model, since they come of the model's
    # configuration as vLLM reads it; and the algorithm of hash_scheme, whose default is vLLM's.
    known = {} if vllm_version is None else {"vllm_version": vllm_version}
    try:
        return find_stores(root, known, weights, name)
    except (ForeignStore, StoreInUse) as error:
        advice = error.advice.replace(f"{DISK}-name", f"{flag}-name")
        raise BadOption(f"{flag} {disk} cannot be used: {error.what}", advice) from None
    except NotADirectoryError:  # which of its parts is none, _writable says
        return []
    except OSError as error:
        raise BadOption(f"{flag} {disk} cannot be read: {error.strerror}", _advice(flag)) from None


def writable(disk: str, root: Path, *, full_is_fine: bool, try_it: bool, flag: str = DISK) -> Path:
    """The folder itself, or the nearest above it that is there. Raises ``BadOption``."""
    there, mode = _nearest(disk, root, flag)
    failed = f"{flag} {disk} cannot be " + ("written" if there == root else f"made in {there}")
    if not stat.S_ISDIR(mode):
        what = f"{flag} {disk}" if there == root else f"{failed}, which"
        raise BadOption(f"{what} is not a directory; expected one", _advice(flag))
    expected = "expected a directory in which the engine can make folders"
    if not try_it:
        if not os.access(there, os.W_OK | os.X_OK):
            raise BadOption(f"{failed}: {os.strerror(errno.EACCES)}; {expected}", _advice(flag))
        return there
    # Tried, since permissions tell little: not of root, of a remote disk, or of a file system like proc.
    try:
        probe = tempfile.mkdtemp(prefix=".sojourn-check-", dir=there)
    except OSError as error:
        # A store that is there can be read, and makes room for itself.
        if not (full_is_fine and error.errno in NO_SPACE):
            raise BadOption(f"{failed}: {error.strerror}; {expected}", _advice(flag)) from None
    else:
        with contextlib.suppress(OSError):
            os.rmdir(probe)
    return there


def _nearest(disk: str, root: Path, flag: str) -> tuple[Path, int]:
    for path in (root, *root.parents):
        try:
            return path, path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BadOption(f"{flag} {disk} cannot be reached: {error.strerror}", _advice(flag)) from None
    raise BadOption(f"{flag} {disk} is nowhere: not even {root.anchor} is there", _advice(flag))


def _advice(flag: str) -> str:
    return _FOLDER_ADVICE.get(flag, f"give {flag} a directory that this user can write")


def _on_contents(disk: str, root: Path, stores: list[FoundStore], block_tokens: int | None) -> Iterator[str]:
    if not stores:
        # No reason to refuse: stores have folders of their own, and a disk's top has its lost+found.
        with contextlib.suppress(OSError):
            names = sorted(set(os.listdir(root)) - {"lost+found"})
            if names:
                shown = ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])
                yield f"--kv-disk {disk} has no KV store, but other things: {shown}; they are left alone"
    sizes = {store.manifest.get("block_tokens") for store in stores}
    if stores and block_tokens is not None and block_tokens not in sizes:
        listed = ", ".join(sorted(map(str, sizes)))
        yield (
            f"--kv-disk {disk} holds blocks of {listed} tokens, and --block-size is {block_tokens}: the "
            "engine will refuse it, unless vLLM gives this model that size"
        )


def on_free_space(
    disk: str, disk_gib: float, there: Path, stores: list[FoundStore], flag: str = DISK
) -> Iterator[str]:
    """A note where there is less room than a store, one of ``stores``, may take."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(there)
        # What a store has counts against what it may have. Of several, only the engine knows which is its.
        held = max((blocks_bytes(store.path) for store in stores), default=0)
        if usage.total and usage.free + held < disk_gib * GIB:  # some network file systems say 0 of 0
            has = f", where {_gib(held)} of blocks are already" if held else ""
            yield (
                f"{flag}-gib is {disk_gib:g}, and {_gib(usage.free)} are free in {disk}{has}: what the "
                "store has once the disk is full is all that it may have"
            )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
