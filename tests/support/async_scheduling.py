"""Engines on the CPU that schedule a step ahead, as engines on CUDA do: vLLM's own batch queue of two.

vLLM turns asynchronous scheduling off on the CPU, where it gains nothing. Its scheduler, engine core and
model runner support it there too, once CUDA's streams and events have stand-ins. Forward passes run within
the call that submits them: this shows what is planned before results are known, and nothing about the order
of a device's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest


class StandInEvent:
    """Of work that is over when it is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class StandInStream:
    """Carries out all work when it is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self.device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or StandInEvent()


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Engines that start meanwhile schedule a step ahead unless they are given ``async_scheduling=False``.

    Close them before it ends.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner

    original = CpuPlatform.check_and_update_config.__func__

    def keeps_it_on(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    stream = StandInStream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keeps_it_on))
        patch.setattr(torch, "Event", StandInEvent)
        patch.setattr(torch.cuda, "Event", StandInEvent)
        patch.setattr(torch.cuda, "Stream", StandInStream)
        patch.setattr(torch.cuda, "current_stream", lambda *args, **kwargs: stream)
        patch.setattr(torch.cuda, "stream", nullcontext)
        # It would put the real ones back when the model runner has been made.
        patch.setattr(cpu_model_runner, "_torch_cuda_wrapper", nullcontext)
        yield
