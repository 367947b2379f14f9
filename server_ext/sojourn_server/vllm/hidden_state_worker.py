"""The platform's vLLM worker with hidden state capture, for ``--worker-cls``."""

from __future__ import annotations

from typing import Any

from . import compat
from .hidden_state_capture import HiddenStateWorkerMixin

Worker: Any = compat.CPUWorker if compat.current_platform.is_cpu() else compat.GPUWorker


class HiddenStateWorker(HiddenStateWorkerMixin, Worker):
    """vLLM's worker with hidden state capture."""
