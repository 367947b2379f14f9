"""vLLM's CPU worker, from which hidden states are read: a value of ``--worker-cls``."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from .hidden_states import TappingMixin


class TappingCpuWorker(TappingMixin, CPUWorker):  # type: ignore[misc]
    """Nothing else is different."""
