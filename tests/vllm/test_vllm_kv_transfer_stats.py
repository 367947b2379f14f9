"""How long steps stood still for KV, from the worker's count to a line of vLLM's log."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from sojourn_server.kv_transfer.transfer_stats import TransferStepTimes
from sojourn_server.vllm.kv_transfer_connector import PathsConnector


class Worker:
    def __init__(self, *steps: TransferStepTimes) -> None:
        self.steps = list(steps)

    def take_times(self) -> TransferStepTimes:
        return self.steps.pop(0)


def test_steps_are_summed_in_another_process() -> None:
    connector = object.__new__(PathsConnector)
    connector._worker = Worker(
        TransferStepTimes(waited_s=0.25, streamed_s=2.0), TransferStepTimes(), TransferStepTimes(waited_s=0.5)
    )
    told = [connector.get_kv_connector_stats() for _ in range(3)]
    assert told[1] is None, "a step that waits for nothing has nothing to tell"
    summed = PathsConnector.build_kv_connector_stats(None)
    assert summed.is_empty()
    for each in (told[0], told[2]):
        assert each is not None
        summed = summed.aggregate(PathsConnector.build_kv_connector_stats(each.to_dict()))
    assert summed.reduce() == {
        "waited_s": 0.75, "copied_s": 0.0, "streamed_s": 2.0, "gathered_s": 0.0, "push_waited_s": 0.0
    }  # fmt: skip
    assert not summed.is_empty()
    summed.reset()
    assert summed.is_empty()
