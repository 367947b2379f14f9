"""What of a member of a pair can be told before its engine starts, as ``tier_checks`` does for tiers."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from ..tiers.store_folder import FoundStore
from .errors import BadOption
from .machine_memory import read_memory
from .pairs import BUFFER_GIB, LISTEN, STORE_GIB, PairOptions
from .tier_checks import check_memory, on_free_space, stores_in, writable

STORE = "--kv-store"


_SHOWN = 3
"""Names of stores in a message."""
_OWN_BLOCKS = ("lora_rank", "compress_ratios", "deepseek_v4")
"""In the configuration of a model with latent attention: vLLM on the CPU has blocks of its own for these."""


def check_pair(
    options: PairOptions,
    name: str,
    *,
    vllm_version: str | None,
    weights: str | None,
    block_tokens: int | None,
    block_tokens_certain: bool,
    try_it: bool = True,
) -> list[str]:
    """Refuse what the engine is certain to refuse; notes of a line each on what it may.

    ``name`` is what its part of the store is called, ``block_tokens`` are those of an engine block that it is
    told, which it takes for ``certain`` or not (``keeps_block_size``); the rest is as for ``check_tiers``.
    Without ``try_it`` nothing is made in the store for a moment, and no port is opened. Raises ``BadOption``.
    """
    notes = check_memory(
        BUFFER_GIB if options.buffer_gib is None else options.buffer_gib, read_memory(), "--kv-buffer-gib"
    )
    assert options.store is not None, "pair_config has let it through"
    root = Path(os.path.realpath(options.store))
    if not root.exists():
        raise BadOption(
            f"{STORE} {options.store} is not there; expected the directory that engines of the pair share",
            "mount it, or make it with mkdir",
        )
    stores = stores_in(options.store, root, vllm_version, weights, name, STORE)
    writable(options.store, root, full_is_fine=bool(stores), try_it=try_it, flag=STORE)
    notes += _on_block_size(options.store, stores, block_tokens, certain=block_tokens_certain)
    ours = [store for store in stores if store.name == name]
    store_gib = STORE_GIB if options.store_gib is None else options.store_gib
    notes += on_free_space(options.store, store_gib, root, ours, STORE)
    if try_it:
        _check_listen(LISTEN if options.listen is None else options.listen)
    return notes


def keeps_block_size(model_path: str) -> bool:
    """Whether an engine takes the block size that it is told; ``False`` where that is not known here.

    vLLM on the CPU gives models with latent attention one of its own, whatever it is told. Which models
    have it their configuration tells; of a hub's id there is none here to look into.
    """
    try:
        text = (Path(model_path).expanduser() / "config.json").read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and not any(word in text for word in _OWN_BLOCKS)


def _on_block_size(
    folder: str, stores: list[FoundStore], block_tokens: int | None, *, certain: bool
) -> list[str]:
    """All engines on a store have one block size: what KV is called there depends on it.

    The engine says so after a minute, with both hash schemes and no option's name. Raises ``BadOption``.
    """
    if block_tokens is None:
        return []
    others: list[FoundStore] = []
    sizes: set[int] = set()
    for store in stores:
        size = _engine_block_tokens(store)
        if size is None or size == block_tokens:
            return []  # one of our own is enough; what cannot be told here the engine knows
        others.append(store)
        sizes.add(size)
    if not others:
        return []
    listed = " or ".join(map(str, sorted(sizes)))
    names = ", ".join([str(store.name) for store in others[:_SHOWN]] + ["…"] * (len(others) > _SHOWN))
    is_of = (
        f"{STORE} {folder} has KV in engine blocks of {listed} tokens, stored by {names}, and this engine's "
        f"are of {block_tokens} (--block-size {block_tokens})"
    )
    start = f"start with --block-size {listed}, as the others"
    if not certain:
        return [f"{is_of}: unless vLLM gives this model that size, it will be refused; then {start}"]
    paths = ", ".join([str(store.path) for store in others[:_SHOWN]] + ["…"] * (len(others) > _SHOWN))
    raise BadOption(
        is_of, f"{start}; or name another directory, or delete {paths} if no engine uses it any more"
    )


def _engine_block_tokens(store: FoundStore) -> int | None:
    """By the store's own description; ``hash_words`` writes it so."""
    size = str(store.manifest.get("hash_scheme")).rpartition("/")[2]
    return int(size) if size.isdecimal() else None


def _check_listen(address: str) -> None:
    """Fail now rather than after the model has been loaded."""
    scheme, _, rest = address.partition(":")
    if scheme != "tcp":
        folder = Path(rest).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise BadOption(
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
        raise BadOption(
            f"--kv-listen {address}: cannot listen there: {error.strerror}",
            "give an address of this machine, and port 0 for any that is free",
        ) from None
