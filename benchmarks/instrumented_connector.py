"""The KV transfer connector with a control socket, loaded by name in the engines of a benchmark.

The connector listens on a Unix socket in a folder, which an environment variable names
(``prefill_decode_engines.WATCHES``). It answers each line with a line of JSON: statistics, such as the bytes
moved by links. Its reads from the store take as long as over a link of ``MEGABYTES_S``.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefill_decode_engines import MEGABYTES_S, WATCHES
from sojourn_server.kv_offload.shared_store import SharedStore
from sojourn_server.vllm.kv_connector_settings import KVTransferSettings
from sojourn_server.vllm.kv_transfer_connector import PathsConnector

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


class WatchedPaths(PathsConnector):
    """sojourn's connector with a control socket on the worker."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Register the KV caches, then open the control socket."""
        super().register_kv_caches(kv_caches)
        line = socket.socket(socket.AF_UNIX)
        line.bind(str(Path(os.environ[WATCHES]) / f"{self.settings.options.store_name}.watch"))
        line.listen()
        threading.Thread(target=self._take_in, args=(line,), daemon=True).start()

    def _take_in(self, line: socket.socket) -> None:
        while True:
            client, _ = line.accept()
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, client.makefile("rw") as lines:
            for _ in lines:
                lines.write(json.dumps(self._look()) + "\n")
                lines.flush()

    def _look(self) -> dict[str, Any]:
        worker, traffic = self._worker, self._traffic
        assert worker is not None
        assert traffic is not None
        return {
            "read_bytes": traffic.stats()["links"]["storage read"]["moved_bytes"],
            "open": worker.open_operations,
            "clean": traffic.is_clean,
            "block_bytes": self.settings.identity.block_bytes,
            "counts": {**traffic.stats()["counts"], **worker.counts},
        }
