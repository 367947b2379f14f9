"""Worker of a CPU engine that schedules a step ahead, for engines with worker processes."""

from __future__ import annotations

from typing import Any

import pytest
from async_scheduling import stand_in_for_cuda
from vllm.v1.worker.cpu_worker import CPUWorker

WORKER_CLASS = f"{__name__}.StandInWorker"
"""Name for vLLM's ``worker_cls``."""


class StandInWorker(CPUWorker):
    """A worker whose process uses stand-ins for CUDA's streams and events until it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in_for_cuda(pytest.MonkeyPatch())
        super().__init__(*args, **kwargs)
