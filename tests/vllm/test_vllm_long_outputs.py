"""Long outputs that overflow the pool, on vLLM's scheduler: who enters, who is preempted; all end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from sojourn_server.simulator.report.run_metrics import cascades
from sojourn_server.simulator.simulated_engine import DUMMY_TOKEN, STOP_TOKEN

SHAPE = {
    "blocks": 129,
    "block_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 4096,
}


@dataclass
class Run:
    """What one load did to an engine."""

    preempted_at: list[int] = field(default_factory=list)
    steps: int = 0
    outputs: dict[str, int] = field(default_factory=dict)


def lengths(seed: int, count: int) -> list[tuple[str, int]]:
    """Kinds and heavy-tailed lengths: a third think long."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        kind = draw.choice(("chat", "chat", "solver"))
        mean = {"chat": 40, "solver": 400}[kind]
        made.append((kind, max(2, min(1500, round(draw.lognormvariate(math.log(mean) - 0.32, 0.8))))))
    return made


def play(engine: Any, seed: int = 0, count: int = 120, *, hint: Any = None, at_once: int = 16) -> Run:
    """``at_once`` programs of one request each, the next as one ends; ``hint`` makes further fields."""
    run = Run()
    wanted: dict[str, int] = {}
    original = engine.scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        run.preempted_at.append(run.steps)
        return original(request, *args, **kwargs)

    engine.scheduler._preempt_request = counted
    engine.tokens = lambda request: (
        STOP_TOKEN if request.num_output_tokens + 1 >= wanted[request.request_id] else DUMMY_TOKEN
    )
    waiting = [(f"r{n}", kind, length) for n, (kind, length) in enumerate(lengths(seed, count))][::-1]
    live: set[str] = set()
    while waiting or live:
        while waiting and len(live) < at_once:
            name, kind, length = waiting.pop()
            wanted[name] = length
            context = {"sojourn": {"agent_type": kind}, **(hint(length) if hint else {})}
            prompt = [(31 * int(name[1:]) + n) % 1000 for n in range(20)]
            engine.add(name, prompt, max_tokens=2000, program_id=name, context=context)
            live.add(name)
        result = engine.step()
        run.steps += 1
        for name in result.finished:
            live.discard(name)
            run.outputs[name] = wanted[name]
        assert run.steps < 60_000, f"nothing ends any more: {sorted(live)}"
    return run


def test_preemptions_and_cascades_become_rare_at_the_same_speed(make_engine: Any) -> None:
    stock, ours = play(make_engine(None, **SHAPE)), play(make_engine("tetris", **SHAPE))
    assert len(stock.preempted_at) > 30, "the load must be heavy enough to mean something"
    assert len(ours.preempted_at) <= 0.5 * len(stock.preempted_at)
    assert cascades(ours.preempted_at) <= 0.5 * cascades(stock.preempted_at)
    assert ours.steps <= 1.1 * stock.steps
    assert ours.outputs == stock.outputs


@pytest.mark.parametrize(
    "hint",
    [
        pytest.param(lambda length: {"expected_output_length": 1}, id="always 1"),
        pytest.param(lambda length: {"expected_output_length": 2**62}, id="never ends"),
        pytest.param(lambda length: {"expected_output_length": 2000 - length}, id="short is long"),
    ],
)
def test_lying_hints_are_not_believed_for_long(make_engine: Any, hint: Any) -> None:
    lied_to = play(make_engine("tetris", **SHAPE), hint=hint)
    honest = play(make_engine("tetris", **SHAPE))
    assert lied_to.outputs == honest.outputs
    assert lied_to.steps <= 1.1 * honest.steps
