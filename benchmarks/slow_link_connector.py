"""The KV transfer connector with a slow link to storage, for the engines of ``prefill_decode_pair.py``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sojourn_server.kv_offload.shared_store import SharedStore
from sojourn_server.vllm.kv_connector_settings import KVTransferSettings
from sojourn_server.vllm.kv_transfer_connector import PathsConnector as SlowPaths

__all__ = ["MEGABYTES_S", "SlowPaths"]

MEGABYTES_S = 4.0
"""Rate of each engine's storage link."""
MAX_LAG_S = 0.1
"""A read that starts late makes up for at most this many seconds."""


class SlowStore:
    """A store behind a slow link. The connector reads one block at a time."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._busy_until_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_into(self, key: bytes, buffers: Sequence[Any]) -> None:
        self._store.get_into(key, buffers)
        now_s = time.monotonic()
        took_s = self._store.identity.block_bytes / (MEGABYTES_S * 1e6)
        self._busy_until_s = max(self._busy_until_s, now_s - MAX_LAG_S) + took_s
        time.sleep(max(0.0, self._busy_until_s - now_s))


open_store = KVTransferSettings.open_store
KVTransferSettings.open_store = lambda settings: SlowStore(open_store(settings))  # type: ignore[method-assign,assignment,return-value]
