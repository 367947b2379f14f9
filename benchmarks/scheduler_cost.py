"""CPU cost of one scheduling step of sojourn and of stock, on vLLM's scheduler without a model.

    python benchmarks/scheduler_cost.py --json benchmarks/results/scheduler_cost.json

80 requests decode with long contexts; the extension tracks 10,000 programs and has leases. Stock and sojourn
alternate in short slices within one process, so that other load affects both. The result is the median ratio
of thread CPU time of neighbouring slices, for ``schedule()`` alone and for ``schedule()`` with
``update_from_output()``. Also measured: the step in which 10,000 leases expire.

    python benchmarks/scheduler_cost.py --full --policy tetris --host-blocks 60000

Measures the same with a full pool. Both engines get the same requests and the same pool, which 80 of the
requests fill. Each step produces one token per request, so about every hundred steps the pool is too small
and a request is preempted while others wait. Every 240 steps one request ends. The comparison begins when
more than 95 % of both pools is used and both engines have preempted, and uses steps with equal numbers. The
policy has learned short outputs, but these are long. At first it therefore admits about as many requests as
stock. Later, forecasts, admission, victim selection, preemptions and copies to host memory all occur. Stock
admits the next request as soon as it fits. The policy runs admission control in each step and delays the
request. The comparison is about the cost of a step, not its effect. Time is virtual: 30 ms per step and 0.1
ms for each further token. Only the policy has host memory. Reports the mean and median CPU time of
``schedule()``, and the mean of the calls that preempted or admitted.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from result_pages import show

RUNNING = 80
KNOWN_PROGRAMS = 10_000
CONTEXT_TOKENS = 8_000
BLOCK_SIZE = 16

FULL_WAITING = 16
"""Number of requests that wait while the pool is full."""
FULL_SHARE = 0.95
FULL_AGENT = "writer"
FULL_ENDS = range(620, 3_000, 240)
"""Output lengths of the first requests, in order of arrival. All other requests never end."""
FULL_MAX_STEPS = 3_000
"""Maximum number of steps in which the pool must fill."""


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


class Call(NamedTuple):
    """One ``schedule()`` call with a full pool."""

    cpu_s: float
    preempted: int
    taken_in: int
    running: int
    used_share: float
    whole_step_s: float
    """CPU seconds of ``schedule()`` and ``update_from_output()``, and of making the tokens in between."""


class Link:
    """Times of copies over PCIe 4."""

    def copy_s(self, size: int, *, to_host: bool) -> float:
        """Return the seconds to copy ``size`` bytes."""
        return size / 20e9

    def disk_s(self, size: int, *, to_disk: bool) -> float:
        """Return 0, because there is no disk."""
        return 0.0


class FullEngine:
    """An engine whose requests exceed its pool, with virtual time and copies."""

    def __init__(self, policy: str | None, host_blocks: int) -> None:
        self._now_s = 0.0
        # The pool is full when each of 80 requests has written 500 tokens.
        fitting = RUNNING * (CONTEXT_TOKENS + CONTEXT_TOKENS // 16) // BLOCK_SIZE
        host_blocks = host_blocks if policy is not None else 0
        self.engine = engine_of(policy, fitting + 1, lambda: self._now_s, host_blocks)
        self._copies: Any = None
        if policy is not None:
            self._be_told(host_blocks)
        for number in range(RUNNING + FULL_WAITING):
            prompt = range(number * 100_000, number * 100_000 + CONTEXT_TOKENS)
            context = {"sojourn": {"agent_type": FULL_AGENT}}
            self.engine.add(
                f"run{number}",
                prompt,
                max_tokens=FULL_ENDS[number] if number < len(FULL_ENDS) else 100_000,
                program_id=f"run{number}" if policy else None,
                context=context,
            )

    def _be_told(self, host_blocks: int) -> None:
        """Give the scheduler ``KNOWN_PROGRAMS`` programs, and a history of short outputs."""
        engine = self.engine
        if host_blocks:
            from sojourn_server.simulator.tier_transfers import TierTransfers

            self._copies = TierTransfers(Link(), 2 << 20)  # type: ignore[arg-type]

        def run() -> None:
            while engine.scheduler.has_unfinished_requests():
                self.step()

        add_programs(engine, KNOWN_PROGRAMS, run)
        lengths = engine.scheduler.sojourn.program_scheduler.histories.output_lengths
        for tokens in range(1, 501):
            lengths.observe(FULL_AGENT, None, 1 + tokens // 16)

    def step(self) -> Call:
        """Run one engine step, and return its measurements."""
        engine = self.engine
        began = time.thread_time()
        planned = engine.plan()
        cpu_s = time.thread_time() - began
        copies = None
        if self._copies is not None and planned.kv_connector_metadata is not None:
            self._now_s = self._copies.begin_step(planned.kv_connector_metadata, self._now_s)
        self._now_s += 0.03 + 1e-4 * max(0, planned.total_num_scheduled_tokens - RUNNING)
        if self._copies is not None:
            copies = self._copies.get_finished(self._now_s)
        began = time.thread_time()
        if planned.total_num_scheduled_tokens or copies is not None:
            engine.update_from_output(planned, copies)
        pool = engine.pool
        return Call(
            cpu_s,
            len(planned.preempted_req_ids or ()),
            len(planned.scheduled_new_reqs) + len(planned.scheduled_cached_reqs.resumed_req_ids),
            len(engine.scheduler.running),
            1 - pool.get_num_free_blocks() / (pool.num_gpu_blocks - 1),
            cpu_s + time.thread_time() - began,
        )

    @property
    def waiting(self) -> int:
        """Number of requests that do not run."""
        return len(self.engine.scheduler.requests) - len(self.engine.scheduler.running)


def fill(engines: Sequence[FullEngine]) -> int:
    """Step all engines until each has a full pool and a preempted request. Return the number of steps."""
    preempted = [0] * len(engines)
    for steps in range(1, FULL_MAX_STEPS):
        calls = [engine.step() for engine in engines]
        preempted = [before + call.preempted for before, call in zip(preempted, calls, strict=True)]
        if all(preempted) and all(call.used_share > FULL_SHARE for call in calls):
            return steps
    raise SystemExit(f"error: in {FULL_MAX_STEPS} steps the pool was not full in both: {preempted}")


def full_figures(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the figures of one engine."""

    def mean_ms(of: Sequence[Call]) -> float | None:
        return statistics.fmean(call.cpu_s for call in of) * 1e3 if of else None

    return {
        "mean_ms": mean_ms(calls),
        "median_ms": statistics.median(call.cpu_s for call in calls) * 1e3,
        "mean_ms_preempting": mean_ms([call for call in calls if call.preempted]),
        "mean_ms_taking_in": mean_ms([call for call in calls if call.taken_in and not call.preempted]),
        "mean_ms_whole_step": statistics.fmean(call.whole_step_s for call in calls) * 1e3,
        "preemptions": sum(call.preempted for call in calls),
        "taken_in": sum(call.taken_in for call in calls),
        "running_mean": statistics.fmean(call.running for call in calls),
        "used_share_mean": statistics.fmean(call.used_share for call in calls),
        "used_share_least": min(call.used_share for call in calls),
    }


def full_cost(policy: str, host_blocks: int, slices: int, steps: int) -> dict[str, Any]:
    """Run stock and the policy with a full pool, alternating, and return the figures of both."""
    engines = FullEngine(None, 0), FullEngine(policy, host_blocks)
    gc.collect()
    gc.disable()
    filling = fill(engines)
    calls: tuple[list[Call], list[Call]] = [], []
    ratios = []
    for index in range(slices):
        cost = [0.0, 0.0]
        for which in (index % 2, 1 - index % 2):
            taken = [engines[which].step() for _ in range(steps)]
            calls[which].extend(taken)
            assert engines[which].waiting, "nobody waits any more: fewer slices"
            cost[which] = sum(call.cpu_s for call in taken)
        ratios.append(cost[1] / cost[0])
        gc.collect()
    gc.enable()
    stock, ours = (full_figures(of) for of in calls)
    return {
        "filling_steps": filling,
        "stock": stock,
        "sojourn": ours,
        "ratio": {
            "mean": ours["mean_ms"] / stock["mean_ms"],
            "median": ours["median_ms"] / stock["median_ms"],
            "median_of_slices": statistics.median(ratios),
            "whole_step_mean": ours["mean_ms_whole_step"] / stock["mean_ms_whole_step"],
        },
    }


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
    parser.add_argument("--full", action="store_true", help="with a full pool; see above")
    options = parser.parse_args()
    command = (
        f"python benchmarks/scheduler_cost.py {'--full ' if options.full else ''}--policy {options.policy} "
        f"--host-blocks {options.host_blocks} --slices {options.slices} --steps {options.steps}"
    )
    if options.full:
        full = full_cost(options.policy, options.host_blocks, options.slices, options.steps)
        show_full(full)
        write({**made(command, options), **full}, options.json)
        return
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
    result["expiry"] = expiry_step(10_000)
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


def show_full(result: dict[str, Any]) -> None:
    """Print the results with a full pool."""
    lines = [
        (name, *("–" if of is None else f"{of:.3f}" for of in (result["stock"][name], mine)))
        for name, mine in result["sojourn"].items()
    ]
    show(("what", "stock", "sojourn"), lines, title="A step with a full pool")
    print(f"measured from step {result['filling_steps']} on")
    print(", ".join(f"ratio of {name} {value:.3f}" for name, value in result["ratio"].items()))


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
