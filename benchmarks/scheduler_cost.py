"""CPU of one scheduling step: sojourn against stock, on vLLM's own scheduler without a model.

    python benchmarks/scheduler_cost.py --json benchmarks/results/scheduler_cost.json

80 requests decode with long contexts; the extension knows 10,000 programs and
holds leases. Stock and sojourn take turns in short slices within one process, so
that whatever else the machine does hits both; the figure is the median ratio of
neighbouring slices, of thread CPU time, for ``schedule()`` alone and for
``schedule()`` with ``update_from_output()``. Also: the step in which 10,000
leases run out.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

RUNNING = 80
KNOWN_PROGRAMS = 10_000
CONTEXT_TOKENS = 8_000
BLOCK_SIZE = 16


def build(policy: str | None, host_blocks: int = 0) -> Any:
    """An engine with ``RUNNING`` decoding requests; with a policy, also ``KNOWN_PROGRAMS`` programs, and host
    memory below the device where it gets some."""
    from sojourn_server.lab.bare_engine import BareEngine, BareEngineOptions

    settings = None if policy is None else {"policy": policy, "strict": True}
    engine = BareEngine(
        BareEngineOptions(
            # Room enough for all of them to grow as expected: the entry gate is to keep nobody out.
            blocks=RUNNING * 6 * CONTEXT_TOKENS // BLOCK_SIZE + 60_000,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=65_536,
            host_blocks=host_blocks,
            own_tiers=True,
            sojourn=settings,
        ),
        time.monotonic,
    )
    if policy is not None:
        for first in range(0, KNOWN_PROGRAMS, 500):
            for number in range(first, first + 500):
                engine.add(f"known{number}", range(number, number + 33), program_id=f"known{number}")
            engine.run()
        engine.tell(
            *(
                {"type": "tool_start", "program_id": f"known{n}", "seq": 1, "call_id": "c", "tool": "bash"}
                for n in range(1000)
            )
        )
    for number in range(RUNNING):
        prompt = range(number * 100_000, number * 100_000 + CONTEXT_TOKENS)
        engine.add(f"run{number}", prompt, max_tokens=100_000, program_id=f"run{number}" if policy else None)
    until = time.monotonic() + 60.0  # a policy that places programs lets them in by and by
    while time.monotonic() < until:
        engine.step()
        if all(r.num_output_tokens for r in engine.scheduler.requests.values()):
            break
    assert len(engine.scheduler.running) == RUNNING
    return engine


def slice_cost(engine: Any, steps: int) -> tuple[float, float]:
    """CPU seconds of ``steps`` steps: (in ``schedule``, in ``schedule`` and ``update_from_output``)."""
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
    """Wall seconds of every step until ``leases`` leases that run out together are gone."""
    from sojourn_server.lab.bare_engine import BareEngine, BareEngineOptions

    now = [0.0]
    engine = BareEngine(
        BareEngineOptions(
            blocks=2 * leases + 1_000,
            block_size=BLOCK_SIZE,
            sojourn={"policy": "fixed-ttl", "strict": True, "lease_budget_fraction": 1.0},
        ),
        lambda: now[0],
    )
    for first in range(0, leases, 500):
        for number in range(first, first + 500):
            engine.add(f"p{number}", range(number * 7, number * 7 + 33), program_id=f"p{number}")
        engine.run()
        engine.tell(
            *(
                {"type": "tool_start", "program_id": f"p{n}", "seq": 1, "call_id": "c", "tool": "bash"}
                for n in range(first, first + 500)
            )
        )
    held = len(engine.scheduler.sojourn.steward.leases)
    engine.add("running", range(10), max_tokens=1_000)
    engine.step()
    now[0] += 100.0
    steps = []
    while len(engine.scheduler.sojourn.steward.leases):
        begin = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begin)
    return {"leases": held, "steps": len(steps), "longest_step_ms": max(steps) * 1e3}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--policy", default="continuum")
    parser.add_argument("--host-blocks", type=int, default=0, help="host memory below the device, ours")
    parser.add_argument("--slices", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25, help="steps in a slice")
    options = parser.parse_args()
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
        "command": (
            f"python benchmarks/scheduler_cost.py --policy {options.policy} "
            f"--host-blocks {options.host_blocks} --slices {options.slices} --steps {options.steps}"
        ),
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {"vllm": _vllm_version(), "sojourn": version("sojourn")},
        "running": RUNNING,
        "known_programs": len(ours.scheduler.sojourn.steward.table),
        "context_tokens": CONTEXT_TOKENS,
        "slices": options.slices,
        "steps_in_a_slice": options.steps,
    }
    for position, name in enumerate(("schedule", "schedule_and_update")):
        result[name] = {
            "stock_ms": statistics.median(s[position] for s, _ in pairs) / options.steps * 1e3,
            "sojourn_ms": statistics.median(o[position] for _, o in pairs) / options.steps * 1e3,
            "ratio": statistics.median(o[position] / s[position] for s, o in pairs),
        }
    result["expiry"] = expiry_step(10_000)
    table = Table("what", "stock ms", "sojourn ms", "ratio", title="CPU of one step")
    for name in ("schedule", "schedule_and_update"):
        row = result[name]
        table.add_row(name, f"{row['stock_ms']:.3f}", f"{row['sojourn_ms']:.3f}", f"{row['ratio']:.3f}")
    Console().print(table)
    Console().print(
        f"{result['expiry']['leases']} leases running out together: {result['expiry']['steps']} steps, "
        f"the longest {result['expiry']['longest_step_ms']:.1f} ms"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=2) + "\n")


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main()
