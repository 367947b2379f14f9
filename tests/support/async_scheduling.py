"""Asynchronous scheduling on the CPU: engines plan a step before the previous step's results, as on CUDA.

vLLM turns asynchronous scheduling off on the CPU, where it gains nothing. Its scheduler, engine core (with a
batch queue of two) and model runner work there too, once CUDA's streams and events are replaced by stand-ins.
A forward pass runs inside the call that submits it. Tests therefore see which steps are planned before
results are known, but not the order of a device's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest


def _do_nothing(*args: Any) -> None: ...


class StandInEvent:
    """Stand-in for a CUDA event. It has always passed, since all work runs when it is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = _do_nothing

    def query(self) -> bool:
        return True


class StandInStream:
    """Stand-in for a CUDA stream. It runs all work when it is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self.device = torch.device("cpu")

    wait_stream = wait_event = synchronize = _do_nothing

    def record_event(self, event: Any = None) -> Any:
        return event or StandInEvent()


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Use asynchronous scheduling in engines that start inside the ``with`` block, except those with
    ``async_scheduling=False``. Close these engines before the block ends."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def keeps_it_on(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keeps_it_on))
        stand_in_for_cuda(patch)
        yield


def stand_in_for_cuda(patch: pytest.MonkeyPatch) -> None:
    """Replace CUDA's streams and events in this process."""
    import torch
    from vllm.v1.worker import cpu_model_runner

    stream = StandInStream()
    patch.setattr(torch, "Event", StandInEvent)
    patch.setattr(torch.cuda, "Event", StandInEvent)
    patch.setattr(torch.cuda, "Stream", StandInStream)
    patch.setattr(torch.cuda, "current_stream", lambda *args, **kwargs: stream)
    patch.setattr(torch.cuda, "stream", nullcontext)
    # vLLM's wrapper would restore CUDA's classes once the model runner is built.
    patch.setattr(cpu_model_runner, "_torch_cuda_wrapper", nullcontext)
