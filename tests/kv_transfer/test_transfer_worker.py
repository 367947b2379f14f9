"""Both halves of the connector with real traffic managers: what is computed is what the tokens make of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_transfer_requests import FULL_TOKENS, PER_FULL, Request, full_keys, prompt, to_prefill
from sojourn_server.kv_transfer.transfer import BlockLoad
from toy_transfer_engine import (
    LAYERS,
    MemoryStore,
    ToyEngine,
    expected,
    kv_of,
    run,
    settle,
    slow_sends,
    through,
)
from waiting import wait_until

Make = Callable[..., ToyEngine]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(tmp_path: Path, store: MemoryStore) -> Iterator[Make]:
    made: list[ToyEngine] = []

    def engine(name: str, **options: Any) -> ToyEngine:
        given = options.pop("store", store)
        made.append(ToyEngine(name, given, f"unix:{tmp_path / name}", **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def test_layers_go_out_while_later_ones_are_computed(make: Make) -> None:
    p, d = make("p"), make("d")
    taken: list[int] = []

    def watch(layer: int) -> None:
        size = 3 * p.kv.layer_bytes
        if layer + 1 < LAYERS:  # the next layer is not computed before this one has arrived
            counts = d.manager.node.counts
            wait_until(lambda: counts["bytes_taken"] >= (layer + 1) * size)
            taken.append(counts["bytes_taken"] // size)

    p.after_layer = watch
    first = p.add(Request("r", prompt(1, 150), to_prefill("t", d.address)))
    run(lambda: "r" in p.done, p)
    assert taken == [1, 2]
    d.add(Request("r", prompt(1, 150), first.answer))
    settle(p, d)


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_peers_layers_are_used_as_they_come(
    make: Make, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    p, d = make("p"), make("d")
    start = prompt(1, 6 * FULL_TOKENS)
    d.add(Request("before", start))
    settle(d)
    ready_at: list[int] = []
    ready = BlockLoad.ready

    def watched(self: BlockLoad, *arguments: Any) -> int | None:
        found = ready(self, *arguments)
        if found is not None:
            ready_at.append(self.layers_loaded)
        return found

    monkeypatch.setattr(BlockLoad, "ready", watched)
    slow_sends(monkeypatch, 8_000.0)
    p.worker._layerwise = layerwise
    through(p, d, [*start, *prompt(2, 50)], decode_reads=True)
    assert (ready_at[0] < LAYERS) == layerwise


@pytest.mark.parametrize("lost_at", [0, 1, LAYERS - 1])
def test_what_was_computed_from_holes_is_neither_pushed_nor_stored(
    make: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, lost_at: int
) -> None:
    p, d = make("p"), make("d")
    start = prompt(1, 6 * FULL_TOKENS)
    through(p, d, start, "before")
    layer_of = BlockLoad.wait_layer

    def lose_some(self: BlockLoad, layer: int, timeout_s: float) -> list[memoryview]:
        return layer_of(self, layer, timeout_s)[: 2 if layer == lost_at else None]

    monkeypatch.setattr(BlockLoad, "wait_layer", lose_some)
    whole = [*start, *prompt(2, 100)]
    first = p.add(Request("r", whole, to_prefill("t", d.address, decode_reads=True)))
    run(lambda: "r" in p.done, p, d)
    assert first.prefilled == 100 + 4 * FULL_TOKENS
    assert p.worker.counts["blocks_not_filled"] == 4 * PER_FULL
    wait_until(lambda: p.manager.node.counts["pushes_failed"] == 1)
    monkeypatch.undo()
    second = d.add(Request("r", whole, first.answer), max_tokens=3)
    settle(p, d)
    assert first.request.output == expected(whole, 1)
    assert second.request.output == expected(whole, 3)
    assert second.prefilled == 100, "it had what is stored"

    monkeypatch.setattr(BlockLoad, "wait_layer", lose_some)
    longer = [*whole, *prompt(3, 200)]
    p.add(Request("s", longer))
    settle(p, d)
    assert p.worker.counts["blocks_not_filled"] > 4 * PER_FULL
    for at, key in enumerate(full_keys(longer)):
        rows = [kv_of(longer[: (at + 1) * FULL_TOKENS], layer)[-FULL_TOKENS:] for layer in range(LAYERS)]
        assert store.blocks[key] == b"".join(each.tobytes() for each in rows)


def test_open_pushes_hold_at_most_what_the_buffers_do(make: Make, tmp_path: Path) -> None:
    """Also if a live peer has no room, and so keeps pushes open for as long as it reports progress."""
    p, d = make("p", limits={"slots": 2, "patience_s": 300.0, "lease_s": 600.0}), make("d")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        address = f"unix:{tmp_path / 'silent'}"
        for name in ("first", "second"):
            p.add(Request(name, prompt(len(name), FULL_TOKENS), to_prefill(f"t-{name}", address)))
        refused = p.add(Request("third", prompt(3, FULL_TOKENS), to_prefill("t-third", d.address)))
        run(lambda: "third" in p.done, p, d)
        assert len(p.manager.node.pushes) == 2
        assert p.worker.counts["pushes_refused"] == 1
        second = d.add(Request("third", prompt(3, FULL_TOKENS), refused.answer))
        run(lambda: "third" in d.done, p, d)
        assert second.prefilled == FULL_TOKENS, "the decode side computes it"
    settle(p, d)
    through(p, d, prompt(4, 2 * FULL_TOKENS), "fourth")
    assert p.worker.counts["pushes_refused"] == 1


def test_a_store_without_room_gets_a_block_in_a_later_step_and_the_end_of_a_request_does_not_wait(
    make: Make, store: MemoryStore
) -> None:
    engine, gate = make("e", limits={"max_waiting_writes": 3}), threading.Event()
    store.before = lambda what, key: (what == "put" and gate.wait(60.0)) and None
    tokens = prompt(1, 6 * FULL_TOKENS)
    running = engine.add(Request("r", tokens), max_tokens=100_000)
    engine.add(Request("s", prompt(2, 2 * FULL_TOKENS)))
    run(lambda: "s" in engine.done and "s" not in engine.jobs, engine)
    assert engine.worker.counts["writes_refused"] > 0
    gate.set()
    run(lambda: len(running.request.output) > FULL_TOKENS, engine)
    engine.abort("r")
    settle(engine)
    whole = [*tokens, *expected(tokens, FULL_TOKENS)]
    keys = full_keys(whole)
    assert set(keys) <= set(store.blocks), "output is stored as well"
    assert [store.parents[key] for key in keys] == [b"", *keys[:-1]]
    for at, key in enumerate(keys):
        rows = [kv_of(whole[: (at + 1) * FULL_TOKENS], layer)[-FULL_TOKENS:] for layer in range(LAYERS)]
        assert store.blocks[key] == b"".join(each.tobytes() for each in rows)
