"""CPU cost of one scheduling step of sojourn and of stock, on vLLM's scheduler without a model.

    python benchmarks/scheduler_cost.py --json benchmarks/results/scheduler_cost.json

80 requests decode with long contexts; the extension tracks 2,000 programs and has leases. Stock and sojourn
alternate in short slices within one process, so that other load affects both. The result is the median ratio
of thread CPU time of neighbouring slices, for ``schedule()`` alone and for ``schedule()`` with
``update_from_output()``. Also measured: the step in which all leases of as many programs expire.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from result_pages import show

RUNNING = 80
KNOWN_PROGRAMS = 2_000
CONTEXT_TOKENS = 8_000
BLOCK_SIZE = 16


def engine_of(
    policy: str | None, blocks: int, clock: Callable[[], float], host_blocks: int = 0, **settings: Any
) -> Any:
    """Return an engine without requests."""
    from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

    options = SimulatedEngineOptions(
        blocks=blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=65_536,
        host_blocks=host_blocks,
        own_tiers=True,
        sojourn=None if policy is None else {"policy": policy, "strict": True, **settings},
    )
    return SimulatedEngine(options, clock)


def add_programs(engine: Any, count: int, run: Callable[[], Any]) -> None:
    """Have ``count`` programs take a turn of two blocks each. ``run`` steps until all have."""
    for first in range(0, count, 500):
        for number in range(first, first + 500):
            engine.add(f"known{number}", range(number, number + 33), program_id=f"known{number}")
        run()


def start_tools(engine: Any, programs: range) -> None:
    """Tell that these programs run a tool."""
    start = {"type": "tool_start", "seq": 1, "call_id": "c", "tool": "bash"}
    engine.tell(*({**start, "program_id": f"known{number}"} for number in programs))


def build(policy: str | None, host_blocks: int = 0) -> Any:
    """Return an engine with ``RUNNING`` decoding requests and ``host_blocks`` of host memory. With a policy,
    the engine also knows ``KNOWN_PROGRAMS`` programs."""
    # Enough blocks for the expected growth of all requests, so that admission control rejects none.
    blocks = RUNNING * 6 * CONTEXT_TOKENS // BLOCK_SIZE + 60_000
    engine = engine_of(policy, blocks, time.monotonic, host_blocks)
    if policy is not None:
        add_programs(engine, KNOWN_PROGRAMS, engine.run)
        start_tools(engine, range(1000))
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


def expiry_step(leases: int) -> dict[str, Any]:
    """Let ``leases`` leases expire together. Return the number of steps until all are gone, and the wall
    milliseconds of the longest step."""
    now_s = 0.0
    engine = engine_of("fixed-ttl", 2 * leases + 1_000, lambda: now_s, lease_budget_fraction=1.0)
    add_programs(engine, leases, engine.run)
    for first in range(0, leases, 500):
        start_tools(engine, range(first, first + 500))
    held = len(engine.scheduler.sojourn.program_scheduler.state.leases)
    engine.add("running", range(10), max_tokens=1_000)
    engine.step()
    now_s += 100.0
    steps = []
    while len(engine.scheduler.sojourn.program_scheduler.state.leases):
        begin = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begin)
    return {"leases": held, "steps": len(steps), "longest_step_ms": max(steps) * 1e3}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--policy", default="continuum")
    parser.add_argument("--host-blocks", type=int, default=0, help="host memory below the device, ours")
    parser.add_argument("--slices", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25, help="steps in a slice")
    options = parser.parse_args()
    command = (
        f"python benchmarks/scheduler_cost.py --policy {options.policy} "
        f"--host-blocks {options.host_blocks} --slices {options.slices} --steps {options.steps}"
    )
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
        **made(command, options),
        "known_programs": len(ours.scheduler.sojourn.program_scheduler.state.programs),
    }
    for position, name in enumerate(("schedule", "schedule_and_update")):
        result[name] = {
            "stock_ms": statistics.median(s[position] for s, _ in pairs) / options.steps * 1e3,
            "sojourn_ms": statistics.median(o[position] for _, o in pairs) / options.steps * 1e3,
            "ratio": statistics.median(o[position] / s[position] for s, o in pairs),
        }
    result["expiry"] = expiry_step(KNOWN_PROGRAMS)
    keys = ("stock_ms", "sojourn_ms", "ratio")
    lines = [
        (name, *(f"{result[name][key]:.3f}" for key in keys)) for name in ("schedule", "schedule_and_update")
    ]
    show(("what", "stock ms", "sojourn ms", "ratio"), lines, title="CPU of one step")
    print(
        f"{result['expiry']['leases']} leases running out together: {result['expiry']['steps']} steps, "
        f"the longest {result['expiry']['longest_step_ms']:.1f} ms"
    )
    write(result, options.json)


def made(command: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts that every result includes: command, machine, versions, settings."""
    return {
        "command": command,
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {"vllm": _vllm_version(), "sojourn": version("sojourn")},
        "running": RUNNING,
        "known_programs": KNOWN_PROGRAMS,
        "context_tokens": CONTEXT_TOKENS,
        "slices": options.slices,
        "steps_in_a_slice": options.steps,
    }


def write(result: dict[str, Any], path: str | None) -> None:
    """Write the result as JSON if ``path`` is given."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=2) + "\n")


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main()
