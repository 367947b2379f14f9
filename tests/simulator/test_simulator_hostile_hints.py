"""Lies cost little: under SAGA with false hints, hardly more is computed again than under LRU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from simulator_small_runs import SmallRun
from simulator_small_workload import small_workload
from sojourn_server.simulator import client_hints

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

SEEDS = range(6)
MOST = 1.05
"""Times the tokens that LRU computes again."""

Liar = Callable[[random.Random, client_hints.ClientHints], dict[str, Any]]
LIARS: dict[str, Liar] = {
    "anything": lambda rng, _: {"expected_steps_left": rng.choice((0.0, 0.1, 3.0, 1e9))},
    "always at its end": lambda rng, _: {"expected_steps_left": 0.0},
    "never at its end": lambda rng, _: {"expected_steps_left": 1e12},
    "another type each turn": lambda rng, _: {
        "agent_type": f"t{rng.randrange(1000)}", "expected_steps_left": rng.choice((0.0, 50.0)),
    },
    "half of them lie": lambda rng, client: {
        "expected_steps_left": 0.0 if hash_of(client) % 2 else 20.0
    },
}  # fmt: skip


def hash_of(client: client_hints.ClientHints) -> int:
    return sum(map(ord, client._program_id))


def again(policy: str, seed: int) -> int:
    """Tokens computed again, at three times the pool."""
    log = SmallRun(policy, small_workload(seed=seed, programs=60, turns=8), blocks=100).log
    assert log.hook_failures == log.refused_hints == 0
    return sum(turn.regenerated_tokens for program in log.programs for turn in program.turns)


@pytest.fixture(scope="module")
def lru() -> int:
    """What LRU computes again that knows as much of the ends of programs."""
    return sum(again("known-ends", seed) for seed in SEEDS)


@pytest.mark.parametrize("policy", ["saga", "saga-paper"])
@pytest.mark.parametrize("name", LIARS)
def test_lies_cost_no_more_than_a_twentieth(
    name: str, policy: str, lru: int, monkeypatch: pytest.MonkeyPatch
):
    rng = random.Random(name)
    told = client_hints.ClientHints.context

    def lies(self: client_hints.ClientHints) -> dict[str, Any]:
        context = told(self)
        context["sojourn"] = {"agent_type": "agent", **LIARS[name](rng, self)}
        return context

    monkeypatch.setattr(client_hints.ClientHints, "context", lies)
    assert sum(again(policy, seed) for seed in SEEDS) <= MOST * lru
