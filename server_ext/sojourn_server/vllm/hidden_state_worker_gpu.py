"""vLLM's CUDA worker with hidden state capture, for ``--worker-cls``."""

from __future__ import annotations

from .compat import GPUWorker
from .hidden_state_capture import HiddenStateWorkerMixin


class HiddenStateGPUWorker(HiddenStateWorkerMixin, GPUWorker):
    """vLLM's CUDA worker with hidden state capture."""
