"""Checks the options of a prefill or decode engine before it starts, as ``kv_offload_checks`` does for host
memory and disk."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from ..kv_offload.store_folder import FoundStore
from ..kv_transfer.rank_transfers import rank_address
from .kv_offload_checks import (
    check_host_memory,
    find_usable_stores,
    folder_of_stores,
    free_space_notes,
    listed_names,
    writable_directory,
)
from .launch_errors import InvalidOption
from .machine_memory import read_memory
from .prefill_decode_options import (
    DEFAULT_BUFFER_GIB,
    DEFAULT_LISTEN_ADDRESS,
    DEFAULT_STORE_GIB,
    PrefillDecodeOptions,
)

STORE_FLAG = "--kv-store"
_CUSTOM_BLOCK_SIZE_KEYS = ("lora_rank", "compress_ratios", "deepseek_v4")
"""Texts that show in a ``config.json`` that the model has latent attention (MLA). For such a model, vLLM on
the CPU chooses the block size itself."""


def check_prefill_decode(
    options: PrefillDecodeOptions,
    name: str,
    *,
    vllm_version: str | None,
    weights: str | None,
    block_tokens: int | None,
    block_tokens_certain: bool,
    workers: int = 1,
    probe_system: bool = True,
) -> list[str]:
    """Return one-line notes on options that the engine may reject, or that may cause trouble later.

    Raises ``InvalidOption`` for an option that the engine will surely reject. ``name``: name of the engine's
    part of the store. ``vllm_version``, ``weights`` (a result of ``known_weights``) and ``block_tokens``
    (value of ``--block-size``) describe the engine; ``None`` means unknown. ``block_tokens_certain``: whether
    the engine surely uses this block size (``keeps_block_size``). ``workers``: number of its workers. With
    ``probe_system=False`` the check writes nothing and opens no port.
    """
    notes = check_host_memory(
        DEFAULT_BUFFER_GIB if options.buffer_gib is None else options.buffer_gib,
        read_memory(),
        "--kv-buffer-gib",
    )
    assert options.store is not None, "prefill_decode_transfer_config has let it through"
    root = Path(os.path.realpath(options.store))
    if not root.exists():
        raise InvalidOption(
            f"{STORE_FLAG} {options.store} does not exist; expected the directory that the pair shares",
            "mount it, or make it with mkdir",
        )
    folder = folder_of_stores(root, workers)
    stores = find_usable_stores(options.store, folder, vllm_version, weights, name, STORE_FLAG)
    writable_directory(
        options.store, root, allow_full=bool(stores), probe_system=probe_system, flag=STORE_FLAG
    )
    notes += _block_size_notes(options.store, stores, block_tokens, certain=block_tokens_certain)
    ours = [store for store in stores if store.name == name]
    store_gib = DEFAULT_STORE_GIB if options.store_gib is None else options.store_gib
    notes += free_space_notes(options.store, store_gib, root, ours, STORE_FLAG, workers=workers)
    if probe_system:
        address = DEFAULT_LISTEN_ADDRESS if options.listen is None else options.listen
        try:
            addresses = [rank_address(address, rank, workers) for rank in range(workers)]
        except ValueError as error:
            raise InvalidOption(f"--kv-listen {error}") from None
        for each in addresses:
            _check_listen_address(each)
    return notes


def keeps_block_size(model_path: str) -> bool:
    """Return whether an engine for ``model_path`` surely uses the block size given by ``--block-size``.

    For models with latent attention, vLLM on the CPU chooses another block size. The model's ``config.json``
    shows the kind of attention. Without this file, as for a hub id, the result is false.
    """
    try:
        text = (Path(model_path).expanduser() / "config.json").read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and not any(word in text for word in _CUSTOM_BLOCK_SIZE_KEYS)


def _block_size_notes(
    folder: str, stores: list[FoundStore], block_tokens: int | None, *, certain: bool
) -> list[str]:
    """Return a note if all ``stores`` were written with another block size than this engine's
    ``block_tokens``, else an empty list. Engines that share KV need the same block size.

    If the engine surely uses ``block_tokens`` (``certain``), raises ``InvalidOption`` instead of returning a
    note. The engine itself would report the error only after a minute, without the name of the option.
    """
    if block_tokens is None:
        return []
    others: list[FoundStore] = []
    sizes: set[int] = set()
    for store in stores:
        size = _engine_block_tokens(store)
        if size is None or size == block_tokens:
            return []  # one store with our block size is enough; the engine checks unknown sizes
        others.append(store)
        sizes.add(size)
    if not others:
        return []
    listed = " or ".join(map(str, sorted(sizes)))
    names = listed_names([str(store.name) for store in others])
    is_of = (
        f"{STORE_FLAG} {folder} has KV of {names} in engine blocks of {listed} tokens, and this engine's "
        f"blocks have {block_tokens} (--block-size {block_tokens})"
    )
    start = f"start with --block-size {listed}, like the other engines"
    if not certain:
        return [f"{is_of}: the engine will reject it, unless vLLM gives this model that size; if so, {start}"]
    paths = listed_names([str(store.path) for store in others])
    raise InvalidOption(is_of, f"{start}; or name another directory, or delete {paths} if no engine uses it")


def _engine_block_tokens(store: FoundStore) -> int | None:
    """Return the block size of the engine that wrote a store; ``None`` if unknown. It is the last part of the
    text that ``hash_identity`` made for the store's manifest."""
    size = str(store.manifest.get("hash_scheme")).rpartition("/")[2]
    return int(size) if size.isdecimal() else None


def _check_listen_address(address: str) -> None:
    """Raise ``InvalidOption`` for an address at which this machine cannot listen. The engine would fail only
    after it has loaded the model."""
    scheme, _, rest = address.partition(":")
    if scheme != "tcp":
        folder = Path(rest).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidOption(
                f"--kv-listen {address}: no socket can be made in {folder}",
                "give a path in a directory that this user can write",
            )
        return
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise InvalidOption(
            f"--kv-listen {address}: cannot listen there: {error.strerror}",
            "give an address of this machine, with port 0 for any free port",
        ) from None
