"""Two engines of one or two workers, and whatever can go wrong: answers are right, and nothing stays."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_transfer_requests import FULL_TOKENS, Request, prompt, to_prefill
from toy_transfer_engine import MemoryStore, Status, ToyEngine, expected, run, settle, slow_sends

pytestmark = pytest.mark.slow

REQUESTS = 24


class Client:
    """One request on its way through both engines, or through the second alone."""

    def __init__(self, name: str, tokens: list[int], dice: random.Random) -> None:
        self.name = name
        self.tokens = tokens
        self.max_tokens = dice.randint(1, 30)
        self.decode_reads = dice.random() < 0.5
        self.alone = dice.random() < 0.2
        self.leaves = dice.random() < 0.3
        self.is_changed = dice.random() < 0.2
        self.stage = "new"
        self.job: Any = None

    def advance(self, p: ToyEngine, d: ToyEngine, transfer: str, peer: str) -> None:
        if self.stage == "new":
            self.stage = "decode" if self.alone else "prefill"
            said = None if self.alone else to_prefill(transfer, peer, decode_reads=self.decode_reads)
            where, tokens = (d, self.max_tokens) if self.alone else (p, 1)
            self.job = where.add(Request(self.name, self.tokens, said), tokens)
        elif self.stage == "prefill" and self.name in p.done:
            assert self.job.request.output == expected(self.tokens, 1)
            self.stage, answer = "decode", self.job.answer
            if answer and self.is_changed:  # by a router, so its context has other tokens
                self.tokens = [7, *self.tokens[1:]]
            self.job = d.add(Request(self.name, self.tokens, answer), self.max_tokens)
        elif self.stage == "decode" and self.name in d.done:
            assert self.job.request.output == expected(self.tokens, self.max_tokens)
            self.stage = "over"


@pytest.mark.parametrize("concurrent_steps", [1, 2, 3], ids=["as they come", "one ahead", "two ahead"])
@pytest.mark.parametrize(
    ("seed", "ranks", "on_cuda"),
    [*((seed, 1, False) for seed in range(4)), *((seed, 2, False) for seed in range(3))]
    + [(seed, 1, True) for seed in range(3)],
)
def test_whatever_happens_answers_are_right_and_nothing_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    ranks: int,
    on_cuda: bool,
    concurrent_steps: int,
) -> None:
    dice = random.Random(seed)
    stores = [MemoryStore(tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
    limits = {"slots": dice.choice([6, 20, 64]), "lease_s": 3.0, "max_waiting_writes": dice.choice([1, 256])}
    shape: dict[str, Any] = {"limits": limits, "concurrent_steps": concurrent_steps, "stores": stores}
    if ranks > 1:
        shape["late"] = lambda: dice.random() < 0.5
    if dice.random() < 0.5:
        slow_sends(monkeypatch, 300_000.0)
    if dice.random() < 0.5:
        for store in stores:
            store.before = lambda what, key: time.sleep(0.003) if what == "get" else None
    devices = [FakeCuda(seed) if on_cuda else None for _ in range(2)]
    chunk = dice.choice([90, 10_000])
    p = ToyEngine("p", None, f"unix:{tmp_path / 'p'}", blocks=60, chunk=chunk, cuda=devices[0], **shape)
    d = ToyEngine("d", None, f"unix:{tmp_path / 'd'}", blocks=60, max_saves=2, cuda=devices[1], **shape)
    programs = [prompt(number, 700) for number in range(3)]
    clients = []
    for number in range(REQUESTS):
        context = dice.choice(programs)[: dice.randint(1, 700)]
        clients.append(Client(f"r{number}", [*context, *prompt(100 + number, dice.randint(0, 60))], dice))
    here = list(clients)

    def everything() -> bool:
        for client in list(here):
            if client.stage != "new" or dice.random() < 0.1:
                transfer = "twice" if dice.random() < 0.05 else client.name
                peer = d.address if dice.random() < 0.95 else f"unix:{tmp_path / 'nobody'}"
                client.advance(p, d, transfer, peer)
            if client.leaves and client.stage in ("prefill", "decode") and dice.random() < 0.02:
                for engine in (p, d):
                    engine.abort(client.name)
                client.stage = "over"
            if client.stage == "over":
                here.remove(client)
        for engine in (p, d):
            if dice.random() < 0.01:
                running = [name for name, job in engine.jobs.items() if job.status is Status.RUNNING]
                if running:
                    engine.preempt(dice.choice(running))
            if dice.random() < 0.005:
                engine.planner.abandon()
        store = dice.choice(stores)
        if store.blocks and dice.random() < 0.03:
            store.broken = {dice.choice(list(store.blocks))}
        return not here

    try:
        run(everything, p, d)
        settle(p, d)
    finally:
        p.close()
        d.close()


class CopiesFirst(FakeCuda):
    """A device that works only when somebody waits, and does of what it may do the copies first."""

    def run_one(self) -> bool:
        with self.lock:
            streams = self.streams
            self.streams = [stream for stream in streams if stream is not self.compute and stream.runnable]
            self.streams = self.streams or streams
            try:
                return super().run_one()
            finally:
                self.streams = streams

    def run_some(self, most: int) -> None: ...


@pytest.mark.parametrize("concurrent_steps", [1, 2], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("fences", [True, False], ids=["in order", "without fences"])
def test_on_cuda_nothing_is_read_before_it_is_computed(
    tmp_path: Path, fences: bool, concurrent_steps: int
) -> None:
    """What is pushed and what is stored are right, because each copy waits for the model's work before it."""
    wrong = 0
    for seed in range(2):
        store = MemoryStore()
        p, d = (
            ToyEngine(
                name, store, f"unix:{tmp_path / name}", concurrent_steps=concurrent_steps, cuda=CopiesFirst(0)
            )
            for name in ("p", "d")
        )
        try:
            for engine in (p, d) if not fences else ():
                engine.kv.fence = engine.cuda.new_event  # it has passed already
            tokens = prompt(seed, 3 * FULL_TOKENS + 5)
            first = p.add(Request("r", tokens, to_prefill("t", d.address)))
            run(lambda p=p: "r" in p.done, p, d)  # type: ignore[misc]
            second = d.add(Request("r", tokens, first.answer), 80)
            settle(p, d)
            wrong += second.request.output != expected(tokens, 80)
            third = p.add(Request("s", [*tokens, *expected(tokens, 70), 1]), 3)
            settle(p, d)
            wrong += third.request.output != expected(third.request.prompt_token_ids, 3)
        finally:
            p.close()
            d.close()
    assert (wrong == 0) == fences
