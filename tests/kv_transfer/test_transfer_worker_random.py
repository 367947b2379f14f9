"""Two engines, requests of a few programs, and whatever can go wrong: answers are right, nothing stays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_transfer_requests import Request, prompt, to_prefill
from toy_transfer_engine import MemoryStore, Status, ToyEngine, expected, run, settle

REQUESTS = 24


class Client:
    """One request on its way through both engines, or through the second alone."""

    def __init__(self, name: str, tokens: list[int], dice: random.Random) -> None:
        self.name = name
        self.tokens = tokens
        self.max_tokens = dice.randint(1, 30)
        self.share = dice.choice([0.0, 0.3, 0.5, 1.0])
        self.alone = dice.random() < 0.2
        self.leaves = dice.random() < 0.3
        self.stage = "new"
        self.job: Any = None

    def advance(self, p: ToyEngine, d: ToyEngine, transfer: str, peer: str) -> None:
        if self.stage == "new":
            self.stage = "decode" if self.alone else "prefill"
            said = None if self.alone else to_prefill(transfer, peer, decode_share=self.share)
            where, tokens = (d, self.max_tokens) if self.alone else (p, 1)
            self.job = where.add(Request(self.name, self.tokens, said), tokens)
        elif self.stage == "prefill" and self.name in p.done:
            assert self.job.request.output == expected(self.tokens, 1)
            self.stage = "decode"
            self.job = d.add(Request(self.name, self.tokens, self.job.answer), self.max_tokens)
        elif self.stage == "decode" and self.name in d.done:
            assert self.job.request.output == expected(self.tokens, self.max_tokens)
            self.stage = "over"


@pytest.mark.parametrize("concurrent_steps", [1, 2], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_answers_are_right_and_nothing_stays(
    tmp_path: Path, seed: int, concurrent_steps: int
) -> None:
    dice = random.Random(seed)
    store = MemoryStore()
    limits = {"slots": dice.choice([6, 20, 64]), "lease_s": 3.0}
    rates = {"storage_read": dice.choice([None, 200_000.0]), "compute": dice.choice([None, 300_000.0])}
    shape: dict[str, Any] = {"limits": limits, "rates": rates, "concurrent_steps": concurrent_steps}
    p = ToyEngine("p", store, f"unix:{tmp_path / 'p'}", blocks=60, chunk=dice.choice([90, 10_000]), **shape)
    d = ToyEngine("d", store, f"unix:{tmp_path / 'd'}", blocks=60, max_saves=2, **shape)
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
        if store.blocks and dice.random() < 0.02:
            store.broken = {dice.choice(list(store.blocks))}
        return not here

    try:
        run(everything, p, d)
        settle(p, d)
    finally:
        p.close()
        d.close()
