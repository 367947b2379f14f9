"""CPU cost of one scheduling step of sojourn and of stock, on vLLM's scheduler without a model.

    python benchmarks/scheduler_cost.py --json benchmarks/results/scheduler_cost.json

80 requests decode with long contexts; the extension tracks 2,000 programs and has leases. Stock and sojourn
alternate in short slices within one process, so that other load affects both. The result is the median ratio
of thread CPU time of neighbouring slices, for ``schedule()`` alone and for ``schedule()`` with
``update_from_output()``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

from result_pages import provenance, show
from sojourn_server.cli.console import write_json
from sojourn_server.simulator.report.results_file import made_with

RUNNING = 80
KNOWN_PROGRAMS = 2_000
CONTEXT_TOKENS = 8_000
BLOCK_SIZE = 16


def build(policy: str | None, host_blocks: int = 0) -> Any:
    """Return an engine with ``RUNNING`` decoding requests and ``host_blocks`` of host memory. With a policy,
    the engine also knows ``KNOWN_PROGRAMS`` programs of two blocks, half of which run a tool."""
    from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

    options = SimulatedEngineOptions(
        # Enough for the expected growth of all requests, so that admission control rejects none.
        blocks=RUNNING * 6 * CONTEXT_TOKENS // BLOCK_SIZE + 60_000,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=65_536,
        host_blocks=host_blocks,
        own_tiers=True,
        sojourn=None if policy is None else {"policy": policy, "strict": True},
    )
    engine = SimulatedEngine(options, time.monotonic)
    for first in range(0, KNOWN_PROGRAMS if policy is not None else 0, 500):
        for number in range(first, first + 500):
            engine.add(f"known{number}", range(number, number + 33), program_id=f"known{number}")
        engine.run()
    if policy is not None:
        start = {"type": "tool_start", "seq": 1, "call_id": "c", "tool": "bash"}
        engine.tell(*({**start, "program_id": f"known{number}"} for number in range(1000)))
    for number in range(RUNNING):
        prompt = range(number * 100_000, number * 100_000 + CONTEXT_TOKENS)
        engine.add(f"run{number}", prompt, max_tokens=100_000, program_id=f"run{number}" if policy else None)
    until = time.monotonic() + 60.0  # a policy with tiers admits the requests one by one
    while time.monotonic() < until:
        engine.step()
        if all(r.num_output_tokens for r in engine.scheduler.requests.values()):
            break
    assert len(engine.scheduler.running) == RUNNING
    return engine


def slice_cost(engine: Any, steps: int) -> tuple[float, float]:
    """Return the CPU seconds of ``steps`` steps: in ``schedule``, and in ``schedule`` plus
    ``update_from_output``."""
    scheduler = engine.scheduler
    in_schedule = 0.0
    original = scheduler.schedule

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_schedule
        begin = time.thread_time()
        output = original(*args, **kwargs)
        in_schedule += time.thread_time() - begin
        return output

    scheduler.schedule = timed
    begin = time.thread_time()
    for _ in range(steps):
        engine.step()
    total = time.thread_time() - begin
    del scheduler.schedule
    return in_schedule, total


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--policy", default="continuum")
    parser.add_argument("--host-blocks", type=int, default=0, help="host memory below the device, ours")
    parser.add_argument("--slices", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25, help="steps in a slice")
    options = parser.parse_args()
    made = made_with(sys.argv)
    stock, ours = build(None), build(options.policy, options.host_blocks)
    gc.collect()
    gc.disable()
    slice_cost(stock, options.steps)
    slice_cost(ours, options.steps)
    pairs = []
    for index in range(options.slices):
        first, second = (stock, ours) if index % 2 else (ours, stock)
        costs = {id(first): slice_cost(first, options.steps), id(second): slice_cost(second, options.steps)}
        pairs.append((costs[id(stock)], costs[id(ours)]))
        gc.collect()
    gc.enable()
    result: dict[str, Any] = {
        **provenance(made),
        "running": RUNNING,
        "context_tokens": CONTEXT_TOKENS,
        "known_programs": len(ours.scheduler.sojourn.program_scheduler.state.programs),
    }
    for position, name in enumerate(("schedule", "schedule_and_update")):
        result[name] = {
            "stock_ms": statistics.median(s[position] for s, _ in pairs) / options.steps * 1e3,
            "sojourn_ms": statistics.median(o[position] for _, o in pairs) / options.steps * 1e3,
            "ratio": statistics.median(o[position] / s[position] for s, o in pairs),
        }
    keys = ("stock_ms", "sojourn_ms", "ratio")
    lines = [
        (name, *(f"{result[name][key]:.3f}" for key in keys)) for name in ("schedule", "schedule_and_update")
    ]
    show(("what", "stock ms", "sojourn ms", "ratio"), lines, title="CPU of one step")
    if options.json:
        write_json(result, options.json)


if __name__ == "__main__":
    main()
