"""Options of a prefill or decode engine, and the value of vLLM's ``--kv-transfer-config`` for them.

Prefill and decode engines have the same connector and the same settings. Each request says what the engine
has to do for it. An engine's role matters only to the gateway, which sends the requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..kv_offload.shared_store import FULL_BLOCK_TOKENS, blocks_per_full
from ..kv_offload.store_folder import is_store_name
from ..kv_transfer.peer_transport import UnknownTransport, check_address
from .engine_flags import own_flag
from .kv_offload_options import GIB, check_size
from .launch_errors import InvalidOption

ROLES = ("prefill", "decode")
PREFILL_DECODE_CONNECTOR = "PathsConnector"
PREFILL_DECODE_CONNECTOR_MODULE = "sojourn_server.vllm.kv_transfer_connector"

_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDecodeOptions:
    """Options of a prefill or decode engine. All need a role."""

    role: str | None = own_flag(
        "--role",
        "Serve as the prefill or decode engine of a pair. KV goes through --kv-store, so leases are useless "
        "here and the default policy is observe",
    )
    store: str | None = own_flag(
        "--kv-store", "Existing directory that all engines of the pair share", is_path=True
    )
    store_gib: float = own_flag("--kv-store-gib", "Capacity of this engine in the store, GiB", default=16.0)
    store_name: str | None = own_flag(
        "--kv-store-name",
        "This engine's name in the store; unique, and the same after a restart",
        shown_default="node-role-port",
    )
    listen: str = own_flag(
        "--kv-listen",
        "Address for the other engines of the pair: tcp:HOST:PORT or unix:PATH; port 0 is any free port. "
        "Engines on other machines need a HOST of their network. There is no authentication",
        default="tcp:127.0.0.1:0",
    )
    node: str | None = own_flag(
        "--kv-node", "Machine whose storage link this engine uses", shown_default="host's name"
    )
    buffer_gib: float = own_flag(
        "--kv-buffer-gib", "Host memory for KV in transfer, GiB; the longest prompt must fit", default=1.0
    )

    @property
    def any(self) -> bool:
        """Whether any of the options is set."""
        return self != PrefillDecodeOptions()

    def named_store(self, hostname: str, port: int | None) -> str:
        """Return the name of the engine's part of the store. The default is NODE-ROLE-PORT, or NODE-ROLE if
        ``port`` is ``None``. NODE is the option ``node``, or else ``hostname``."""
        if self.store_name is not None:
            return self.store_name
        ending = f"-{self.role}" if port is None else f"-{self.role}-{port}"
        node = re.sub(r"[^A-Za-z0-9._-]+", "-", self.node or hostname).lstrip("._-") or "node"
        return node[: _MAX_NAME_CHARS - len(ending)] + ending


def prefill_decode_transfer_config(
    options: PrefillDecodeOptions, *, hostname: str, port: int | None
) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` for a prefill or decode engine. Raises ``InvalidOption``.

    ``hostname``: this machine's name. ``port``: port of the engine's HTTP server; ``None`` for a Unix socket.
    """
    if options.role is None:
        raise InvalidOption(
            "--kv-store and related options are for an engine of a pair: add --role prefill or --role decode"
        )
    if options.role not in ROLES:
        raise InvalidOption(f"--role is {options.role!r}; expected {' or '.join(ROLES)}")
    if options.store is None:
        raise InvalidOption(
            f"--role {options.role} needs --kv-store, the directory through which the pair shares KV"
        )
    check_size("--kv-store-gib", options.store_gib)
    check_size("--kv-buffer-gib", options.buffer_gib)
    name = options.named_store(hostname, port)
    if not is_store_name(name):
        raise InvalidOption(
            f"--kv-store-name is {name!r}; expected letters, digits, '.', '_' and '-', at most "
            f"{_MAX_NAME_CHARS}, the first a letter or digit"
        )
    try:
        check_address(options.listen)
    except (ValueError, UnknownTransport) as error:
        raise InvalidOption(f"--kv-listen: {error}") from None
    node = hostname if options.node is None else options.node
    if not node.strip():
        raise InvalidOption(f"--kv-node is {node!r}; expected the name of the machine")
    return {
        "kv_connector": PREFILL_DECODE_CONNECTOR,
        "kv_connector_module_path": PREFILL_DECODE_CONNECTOR_MODULE,
        "kv_role": "kv_both",  # both send and receive: a decode engine also reads for a prefill engine
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "role": options.role,
            "node": node,
            "listen": options.listen,
            "store": options.store,
            "store_name": name,
            "store_bytes": int(options.store_gib * GIB),
            "buffer_bytes": int(options.buffer_gib * GIB),
        },
    }


def check_block_size(block_size: str | None) -> None:
    """Raise ``InvalidOption`` if a Full Block (the unit of storage, 64 tokens) does not consist of whole
    engine blocks of ``block_size`` tokens. A missing or non-numeric size passes."""
    if block_size is None or not block_size.isdecimal():
        return
    try:
        blocks_per_full(int(block_size), FULL_BLOCK_TOKENS)
    except ValueError as error:
        raise InvalidOption(f"--block-size is {block_size}: {error}") from None
