"""What of a member of a pair can be told before its engine starts, as ``tier_checks`` does for tiers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from .errors import BadOption
from .machine_memory import read_memory
from .pairs import BUFFER_GIB, LISTEN, STORE_GIB, PairOptions
from .tier_checks import check_memory, on_free_space, stores_in, writable

STORE = "--kv-store"


def check_pair(
    options: PairOptions, name: str, *, vllm_version: str | None, weights: str | None, try_it: bool = True
) -> list[str]:
    """Refuse what the engine is certain to refuse; notes of a line each on what it may.

    ``name`` is what its part of the store is called; the rest is as for ``check_tiers``. Without ``try_it``
    nothing is made in the store for a moment, and no port is opened. Raises ``BadOption``.
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
    ours = [store for store in stores if store.name == name]
    store_gib = STORE_GIB if options.store_gib is None else options.store_gib
    notes += on_free_space(options.store, store_gib, root, ours, STORE)
    if try_it:
        _check_listen(LISTEN if options.listen is None else options.listen)
    return notes


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
