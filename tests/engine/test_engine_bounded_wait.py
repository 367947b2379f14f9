"""A request of no program waits at most ``queue_patience_s`` longer than on stock, on a real engine.

The load is the one in which such a request once waited for five minutes: programs with hinted leases in a
loop, and one request that always runs.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from typing import Any

import pytest
from engine_tools import one_thread

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 2.0
MARGIN_STEPS = 20
"""Beside the steps of the longest turn of the load. The wait beyond the patience is counted in steps: they do
not hang on what else this machine does."""
BLOCKS = 65
BLOCK_TOKENS = 32
STRANGER_TOKENS = 33 * BLOCK_TOKENS
PROGRAMS, LOOPING = 24, 6
ALWAYS_RUNNING_TOKENS = 200


class GreedyClients:
    """Programs with leases of 300 s, ``LOOPING`` of them in the engine at a time, beside one long answer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.random = random.Random(3)
        self.contexts = {
            n: [1 + (7919 * (n + 1) * (i + 3)) % 3000 for i in range(self.random.randrange(200, 500))]
            for n in range(PROGRAMS)
        }
        self.busy: dict[str, int | None] = {}
        """Requests with their program."""
        self.numbers = itertools.count()
        self.finished = 0

    def step(self) -> set[str]:
        """Keep the engine busy for one step; returns what is answered and not of the load."""
        if None not in self.busy.values():
            self.start(None, [5] * 40, ALWAYS_RUNNING_TOKENS)
        busy = set(self.busy.values())
        idle = [n for n in self.contexts if n not in busy]
        for n in self.random.sample(idle, max(0, LOOPING + 1 - len(self.busy))):
            self.start(n, self.contexts[n], 4)
        others = set()
        for output in self.engine.step():
            if not output.finished:
                continue
            if output.request_id not in self.busy:
                others.add(output.request_id)
                continue
            n = self.busy.pop(output.request_id)
            self.finished += 1
            if n is not None and len(self.contexts[n]) < 800:
                self.contexts[n] += [
                    *output.outputs[0].token_ids,
                    *[1 + (n * 31 + i) % 3000 for i in range(20)],
                ]
        return others

    def start(self, n: int | None, prompt: list[int], max_tokens: int) -> None:
        hint = {"program_id": f"P{n}", "kv_retention_ttl_seconds": 300}
        self.busy[self.add(prompt, max_tokens, hint if n is not None else None)] = n

    def add(self, prompt: list[int], max_tokens: int, hint: dict[str, Any] | None) -> str:
        from vllm import SamplingParams

        request_id = f"r{next(self.numbers)}"
        extra = {"agentic_context": json.dumps(hint)} if hint is not None else None
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        self.engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        return request_id


def wait_of_a_stranger(llm: Any, patience_s: float = 0.0, most_steps: float = math.inf) -> int:
    """Steps, after the patience, until a request for half of the pool is answered: ``most_steps`` at most."""
    clients = GreedyClients(llm.llm_engine)
    while clients.finished < 3 * PROGRAMS:
        clients.step()
    patient_until_s = time.monotonic() + patience_s
    stranger = clients.add([1 + (104_729 * i) % 3000 for i in range(STRANGER_TOKENS)], 1, None)
    steps = 0
    while stranger not in clients.step() and steps < most_steps:
        steps += time.monotonic() > patient_until_s
    llm.llm_engine.abort_request([*clients.busy, stranger])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return steps


@pytest.mark.parametrize("policy", ["static-ttl", "continuum"])
def test_hinted_leases_delay_a_stranger_by_no_more_than_the_patience(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    with one_thread(monkeypatch):
        stock = wait_of_a_stranger(make_llm("stock", num_blocks=BLOCKS))
        most = stock + ALWAYS_RUNNING_TOKENS + MARGIN_STEPS
        llm = make_llm(policy, sojourn={"strict": True, "queue_patience_s": PATIENCE_S}, num_blocks=BLOCKS)
        ours = wait_of_a_stranger(llm, PATIENCE_S, most + 1)
    print(f"\n{policy}: stock {stock} steps, ours {ours} steps after {PATIENCE_S:g} s")
    assert ours <= most
