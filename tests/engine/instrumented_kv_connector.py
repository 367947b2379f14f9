"""sojourn's paths connector with hooks for tests, loaded by name in the processes of the tested engines."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from sojourn_server.kv_offload.cpu_device_backend import block_rows
from sojourn_server.vllm.kv_transfer_connector import PathsConnector

SPOIL = "SOJOURN_TEST_SPOIL"
"""Environment variable with the path of a file. While the file exists, the first received block of a layer is
zeroed."""
FAIL = "SOJOURN_TEST_FAIL"
"""Environment variable with the path of a file. While the file exists, only the first half of received blocks
is filled."""


class WatchedPaths(PathsConnector):
    """The connector in strict mode, which damages received blocks on demand."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.strict = True

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        blocks = self._worker._kv
        rows = [block_rows(name, cache, self.settings.blocks) for name, cache in kv_caches.items()]
        scatter = blocks.scatter

        def spoilt(layer: int, *arguments: Any, **options: Any) -> list[int]:
            filled = scatter(layer, *arguments, **options)
            if filled and Path(os.environ[SPOIL]).exists():
                rows[layer][filled[0]] = 0
            if filled and Path(os.environ[FAIL]).exists():
                rows[layer][filled[len(filled) // 2 :]] = 0
                return filled[: len(filled) // 2]
            return filled

        blocks.scatter = spoilt  # type: ignore[method-assign]


def look(worker: Any) -> dict[str, Any]:
    """Return the worker's open operations and its counters of transfers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    traffic = connector._traffic
    return {
        "open": connector._worker.open_operations,
        "clean": traffic.is_clean,
        "counts": traffic.stats()["counts"],
        "worker": dict(connector._worker.counts),
        "reading": len(traffic.node.reads),
        "waiting": len(connector._worker._sources),
        "held": traffic.stats()["slots_used"],
    }


def hold_reads(worker: Any) -> None:
    """Make reads from storage wait until ``let_reads_go``, at most a minute."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = get_kv_transfer_group()._traffic.storage._store
    get_into, store.gate = store.get_into, threading.Event()

    def held(*arguments: Any) -> None:
        store.gate.wait(60.0)
        get_into(*arguments)

    store.get_into = held


def let_reads_go(worker: Any) -> None:
    """Let the reads that ``hold_reads`` stopped continue."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = get_kv_transfer_group()._traffic.storage._store
    del store.get_into
    store.gate.set()
