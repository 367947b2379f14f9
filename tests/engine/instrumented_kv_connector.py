"""sojourn's paths connector with hooks for tests, loaded by name in the processes of the tested engines. It
imports vLLM, so no test imports it while pytest collects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine_tools import FAIL, SPOIL
from sojourn_server.kv_offload.kv_pages import page_views
from sojourn_server.vllm.kv_transfer_connector import PathsConnector


class WatchedPaths(PathsConnector):
    """The connector in strict mode, which damages received blocks on demand."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.strict = True

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        blocks = self._worker._kv
        rows = [page_views(name, cache, self.settings.blocks)[0] for name, cache in kv_caches.items()]
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
