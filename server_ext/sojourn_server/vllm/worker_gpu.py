"""vLLM's CUDA worker, from which hidden states are read: a value of ``--worker-cls``."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .hidden_states import TappingMixin


class TappingGpuWorker(TappingMixin, Worker):  # type: ignore[misc]
    """Nothing else is different."""
