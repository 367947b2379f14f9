"""Flags for a member of a pair, as a pure function: options in, vLLM's ``--kv-transfer-config`` out.

A prefill and a decode engine take the same connector and the same settings: what they do for a request the
request says. The role is for whoever sends requests.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..paths.transport import TransportMissing, check_address
from ..tiers.store import FULL_BLOCK_TOKENS, blocks_per_full
from ..tiers.store_folder import is_name
from .errors import BadOption
from .tiers import GIB, check_size

ROLES = ("prefill", "decode")
CONNECTOR = "PathsConnector"
CONNECTOR_MODULE = "sojourn_server.vllm.paths_connector"

LISTEN = "tcp:127.0.0.1:0"
"""Any port that is free, for engines of one machine."""
STORE_GIB = 16.0
BUFFER_GIB = 1.0

_BYTES_PER_GBIT = 1e9 / 8
_MAX_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What the user asked for. ``None``: nothing was said."""

    role: str | None = None
    """Of ``ROLES``; without it none of the others may be given."""
    store: str | None = None
    """The directory that all engines of the pair share. It has to be there: it may be a disk to mount."""
    store_gib: float | None = None
    """How much this engine may write there."""
    store_name: str | None = None
    """What its own part there is called: another name for each engine, and the same after a restart."""
    listen: str | None = None
    """Where peers reach it."""
    node: str | None = None
    """The machine whose storage link it uses."""
    buffer_gib: float | None = None
    """Host memory for KV on its way."""
    storage_gbit: float | None = None
    compute_gbit: float | None = None
    """Rates of its links, each way, Gbit/s; ``None``: as fast as they go."""

    @property
    def any(self) -> bool:
        """Whether anything was asked for."""
        return self != PairOptions()

    def named_store(self, hostname: str, port: int | None) -> str:
        """What its part of the store is called, by default after its node, role and port."""
        if self.store_name is not None:
            return self.store_name
        ending = f"-{self.role}" if port is None else f"-{self.role}-{port}"
        node = re.sub(r"[^A-Za-z0-9._-]+", "-", self.node or hostname).lstrip("._-") or "node"
        return node[: _MAX_NAME - len(ending)] + ending


def pair_config(options: PairOptions, *, cpu_build: bool, hostname: str, port: int | None) -> dict[str, Any]:
    """``kv_transfer_config`` for a member. ``hostname`` is this machine's, ``port`` that of its HTTP server;
    ``None``: a Unix socket. Raises ``BadOption``."""
    if options.role is None:
        raise BadOption(
            "--kv-store and what belongs to it are for an engine of a pair: say which by --role prefill or "
            "--role decode"
        )
    if options.role not in ROLES:
        raise BadOption(f"--role is {options.role!r}; expected {' or '.join(ROLES)}")
    if not cpu_build:
        raise BadOption(f"--role {options.role}: engines of a pair move CPU engines' KV so far")
    if options.store is None:
        raise BadOption(
            f"--role {options.role} needs --kv-store, the directory that all engines of the pair share: KV "
            "goes through it"
        )
    store_gib = STORE_GIB if options.store_gib is None else options.store_gib
    buffer_gib = BUFFER_GIB if options.buffer_gib is None else options.buffer_gib
    check_size("--kv-store-gib", store_gib)
    check_size("--kv-buffer-gib", buffer_gib)
    name = options.named_store(hostname, port)
    if not is_name(name):
        raise BadOption(
            f"--kv-store-name is {name!r}; expected letters, digits, '.', '_' and '-', at most {_MAX_NAME}, "
            "the first a letter or digit"
        )
    listen = LISTEN if options.listen is None else options.listen
    try:
        check_address(listen)
    except (ValueError, TransportMissing) as error:
        raise BadOption(f"--kv-listen: {error}") from None
    node = hostname if options.node is None else options.node
    if not node.strip():
        raise BadOption(f"--kv-node is {node!r}; expected the name of the machine")
    extra: dict[str, Any] = {
        "role": options.role,
        "node": node,
        "listen": listen,
        "store": options.store,
        "store_name": name,
        "store_bytes": int(store_gib * GIB),
        "buffer_bytes": int(buffer_gib * GIB),
    }
    if options.storage_gbit is not None:
        rate = _bytes_per_s("--storage-nic-gbit", options.storage_gbit)
        extra |= {"storage_read_rate": rate, "storage_write_rate": rate}
    if options.compute_gbit is not None:
        extra["compute_rate"] = _bytes_per_s("--compute-nic-gbit", options.compute_gbit)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",  # either side sends and receives: a decode engine reads for the other
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def check_block_size(block_size: str | None) -> None:
    """Whether Full Blocks are made of whole engine blocks of so many tokens. Raises ``BadOption``."""
    if block_size is None or not block_size.isdecimal():
        return
    try:
        blocks_per_full(int(block_size), FULL_BLOCK_TOKENS)
    except ValueError as error:
        raise BadOption(f"--block-size is {block_size}: {error}") from None


def _bytes_per_s(flag: str, gbit: float) -> float:
    if not 0 < gbit < math.inf:
        raise BadOption(f"{flag} is {gbit}; expected Gbit/s, more than 0: a link that never moves is no link")
    return gbit * _BYTES_PER_GBIT
