"""vLLM's CPU worker with hidden state capture, for ``--worker-cls``."""

from __future__ import annotations

from .compat import CPUWorker
from .hidden_state_capture import HiddenStateWorkerMixin


class HiddenStateCPUWorker(HiddenStateWorkerMixin, CPUWorker):
    """vLLM's CPU worker with hidden state capture."""
