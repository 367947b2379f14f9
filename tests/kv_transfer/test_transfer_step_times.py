"""How long steps stand still for KV, by a clock that only their waits move; and waiting for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_transfer_requests import FULL_TOKENS, Request, prompt, to_prefill
from sojourn_server.kv_offload.cpu_device_backend import KvBlockArrays
from sojourn_server.kv_transfer import transfer_worker
from sojourn_server.kv_transfer.block_load import BlockLoad
from sojourn_server.kv_transfer.transfer_stats import TransferStepTimes
from toy_transfer_engine import LAYERS, MemoryStore, ToyEngine, expected, run, settle

Make = Callable[..., ToyEngine]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def spend(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which takes so long."""

        def slow(*arguments: Any, **options: Any) -> Any:
            answer = call(*arguments, **options)
            self.now_s += seconds
            return answer

        return slow


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ToyEngine] = []
    store = MemoryStore()

    def engine(name: str, **options: Any) -> ToyEngine:
        made.append(ToyEngine(name, store, f"unix:{tmp_path / name}", **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def test_waiting_and_copying_are_told_apart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("e")
    start = prompt(1, 4 * FULL_TOKENS)
    engine.add(Request("before", start))
    settle(engine)
    assert engine.worker.times == TransferStepTimes(), "nothing was loaded, nothing was waited for"

    clock = Clock()
    monkeypatch.setattr(transfer_worker.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(BlockLoad, "layer", clock.spend(2.0, BlockLoad.layer))
    monkeypatch.setattr(KvBlockArrays, "scatter", clock.spend(0.5, KvBlockArrays.scatter))
    engine.add(Request("after", [*start, *prompt(2, 50)]))
    settle(engine)
    assert engine.worker.times.waited_s == 2.0 * LAYERS
    assert engine.worker.times.copied_s == 0.5 * LAYERS
    assert engine.worker.times.streamed_s < 0.01, "blocks of its own store arrive whole"
    assert engine.worker.take_times() == engine.worker.times
    assert not engine.worker.take_times()


def test_a_peers_layers_are_streamed_and_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make("p"), make("d", rates={"compute": 8_000.0})
    start = prompt(1, 6 * FULL_TOKENS)
    d.add(Request("before", start))
    settle(d)
    whole = [*start, *prompt(2, 50)]
    ready_at: list[int] = []
    ready = BlockLoad.ready

    def watched(self: BlockLoad, *arguments: Any) -> int | None:
        found = ready(self, *arguments)
        if found is not None:
            ready_at.append(self.layers_loaded)
        return found

    monkeypatch.setattr(BlockLoad, "ready", watched)
    for layerwise in (True, False):
        p.worker.layerwise = layerwise
        before_s = p.worker.times.streamed_s
        name = f"r{layerwise}"
        p.add(Request(name, whole, to_prefill(name, d.address, decode_reads=True)))
        run(lambda name=name: name in p.done, p)  # type: ignore[misc]
        assert p.worker.times.streamed_s > before_s
        d.add(Request(name, whole, p.done[name].answer))
        settle(p, d)
        assert d.done[name].request.output == expected(whole, 1)
    assert ready_at[0] < LAYERS, "it waited for all of it"
    assert ready_at[1] == LAYERS
