"""Cost of instrumentation for an agent of each framework: microseconds per turn over the bare framework.

    .tox/frameworks/bin/python benchmarks/framework_overhead.py [--rounds 40] [--turns 20] [--json FILE]

A scripted agent makes ``turns`` turns, each with one LLM request and one tool call, against a server in
another process. The server takes ``--answer-ms`` per answer, as a model would. Meanwhile the SDK's sender
thread works. With ``--answer-ms 0`` the agent never waits, unlike real agents, so the sender competes with it
for the interpreter. Rounds alternate between the arms, in turning order, so that all see the same machine. A
result is the median of the differences of each group of rounds. Frameworks that cannot be imported are left
out. Use the engine's environment for openai, litellm and mini-swe-agent, and ``tox``'s for the others.

The arms: bare; empty, with the framework's own extension points and nothing in them (callbacks, hooks,
subclasses that only call their base, hooks of the HTTP client); and sojourn. The empty arm is a lower bound,
because a library that uses these points cannot add less. sojourn's own cost is the difference between sojourn
and empty.

``least_hooks`` is another lower bound. In place of sojourn, the plain ``openai`` loop has only what any such
SDK needs, which is an id and a hint in the request, and four notes with times in a queue without a reader.

Wall time varies by more than the differences unless nothing else runs. The CPU time of the agent's own thread
varies less. It excludes all waiting of the agent, also for the interpreter's lock. The number of Python
functions that this thread calls per turn hardly varies. It is counted in runs of its own, after the timed
ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import sojourn
from framework_agents import FRAMEWORKS, Arm, Framework, Run  # sets what frameworks read at their import
from rich.console import Console
from rich.table import Table

TARGET_TURN_US = 100.0
"""Agreed maximum of the median difference, in microseconds per turn."""
WARM_UP_ROUNDS = 2

SERVER = """
import sys
from sojourn.testing import FakeServer, ToolUse

def answer(request):
    messages = request.body["messages"]
    if sum(message["role"] == "tool" for message in messages) >= {turns} - 1:
        name = None
    else:
        name = request.body["tools"][0]["function"]["name"]
    if name == "bash" or (name is None and any("bash" in str(m.get("tool_calls")) for m in messages)):
        return ToolUse("bash", {{"command": "submit" if name is None else "true"}})
    return "done" if name is None else ToolUse(name, {{"text": "x"}})

with FakeServer(answer) as server:
    server.reply_delay_s = {answer_s}
    print(server.url, flush=True)
    sys.stdin.read()
"""


def main() -> None:
    """Measure and print; exit code 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=40, help="groups of rounds per framework, one round in each arm"
    )
    parser.add_argument("--turns", type=int, default=20, help="turns of one agent")
    parser.add_argument("--answer-ms", type=float, default=10.0, help="how long the model takes")
    parser.add_argument("--framework", action="append", choices=sorted(FRAMEWORKS), help="only this one")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    options = parser.parse_args()
    names = options.framework or sorted(FRAMEWORKS)
    report = measure(options.rounds, options.turns, options.answer_ms, names)
    show(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["passed"] else 1)


def measure(rounds: int, turns: int, answer_ms: float, names: list[str]) -> dict[str, Any]:
    """Measure the named frameworks that are installed. Return all figures as plain data."""
    here = [name for name in names if find_spec(FRAMEWORKS[name].package) is not None]
    rows = {name: one(name, rounds, turns, answer_ms) for name in here}
    settings = f"--rounds {rounds} --turns {turns} --answer-ms {answer_ms:g}"
    return {
        "command": f"python benchmarks/framework_overhead.py {settings}",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_1min": round(os.getloadavg()[0], 2),
        "frameworks": rows,
        "targets": {"turn_us": TARGET_TURN_US},
        "passed": bool(rows)
        and all(row["added_us"] <= TARGET_TURN_US for name, row in rows.items() if FRAMEWORKS[name].is_ours),
    }


def one(name: str, rounds: int, turns: int, answer_ms: float) -> dict[str, Any]:
    """Measure one framework and return its figures. Raises ``RuntimeError`` if its agent does not make the
    expected turns."""
    framework = FRAMEWORKS[name]
    arms: tuple[Arm, ...] = ("bare", "empty", "sojourn") if framework.is_ours else ("bare", "sojourn")
    took: dict[Arm, list[Took]] = {arm: [] for arm in arms}
    with ServerProcess(turns, answer_ms / 1000) as url:
        sojourn.init(url, dialect="sojourn")
        for number in range(rounds + WARM_UP_ROUNDS):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                instruments = set_arm(framework, arm)
                before = sojourn.stats()["requests_started"]
                took[arm].append(timed(framework.prepare(f"{url}/v1", arm), turns))
                told = sojourn.stats()["requests_started"] - before
                if told != (turns if instruments else 0):
                    raise RuntimeError(
                        f"{name}: {told} requests were told in the arm {arm}, of {turns} turns"
                    )
                sojourn.flush(2)
        stats = sojourn.stats()
        calls = {arm: calls_per_turn(framework, f"{url}/v1", arm, turns) for arm in arms}
        sojourn.shutdown()
    kept = {arm: each[WARM_UP_ROUNDS:] for arm, each in took.items()}
    figures = {
        "version": version(framework.distribution),
        "rounds": rounds,
        "turns": turns,
        "bare_us": round(statistics.median(each.wall_us for each in kept["bare"]), 1),
        "instrumented_us": round(statistics.median(each.wall_us for each in kept["sojourn"]), 1),
        **differences("added", kept["sojourn"], kept["bare"]),
        "bare_calls": calls["bare"],
        "added_calls": round(calls["sojourn"] - calls["bare"], 1),
        "dropped": stats["dropped_full"] + stats["dropped_send"],
    }
    if "empty" in kept:
        figures |= differences("empty_added", kept["empty"], kept["bare"])
        figures |= differences("own", kept["sojourn"], kept["empty"])
        figures["empty_added_calls"] = round(calls["empty"] - calls["bare"], 1)
    return figures


def set_arm(framework: Framework, arm: Arm) -> bool:
    """Instrument the frameworks, or restore them. Return whether they are instrumented."""
    instruments = arm == "sojourn" and framework.is_ours
    if instruments:
        sojourn.instrument()
    else:
        sojourn.uninstrument()
    return instruments


def calls_per_turn(framework: Framework, base_url: str, arm: Arm, turns: int) -> float:
    """Return the number of Python functions per turn that the agent's thread calls: the median of five
    runs."""
    set_arm(framework, arm)
    counts: list[int] = []

    def count(_frame: Any, event: str, _argument: Any) -> None:
        counts[-1] += event == "call"

    for _ in range(5):
        run = framework.prepare(base_url, arm)
        counts.append(0)
        sys.setprofile(count)
        try:
            run()
        finally:
            sys.setprofile(None)
    return round(statistics.median(counts) / turns, 1)


def differences(name: str, these: list[Took], those: list[Took]) -> dict[str, Any]:
    """Return median and quartiles of the differences of each group of rounds, for wall and CPU time."""
    figures: dict[str, Any] = {}
    pairs = [this.minus(that) for this, that in zip(these, those, strict=True)]
    for kind, values in (("", [each.wall_us for each in pairs]), ("_cpu", [each.cpu_us for each in pairs])):
        values.sort()
        quarter = len(values) // 4
        figures[f"{name}{kind}_us"] = round(statistics.median(values), 1)
        figures[f"{name}{kind}_quartiles_us"] = [round(values[quarter], 1), round(values[-1 - quarter], 1)]
    return figures


class Took(NamedTuple):
    """Cost per turn in microseconds."""

    wall_us: float
    cpu_us: float
    """CPU time of the agent's own thread; other threads of the framework and the sender do not count."""

    def minus(self, other: Took) -> Took:
        return Took(self.wall_us - other.wall_us, self.cpu_us - other.cpu_us)


def timed(run: Run, turns: int) -> Took:
    """Return the cost per turn of one run, with garbage collection disabled."""
    gc.collect()
    gc.disable()
    try:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        run()
        cpu_ns, wall_ns = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
    finally:
        gc.enable()
    return Took(wall_ns / 1000 / turns, cpu_ns / 1000 / turns)


class ServerProcess:
    """Context manager that runs a scripted ``FakeServer`` in its own process. Yields the server's URL."""

    def __init__(self, turns: int, answer_s: float) -> None:
        code = SERVER.format(turns=turns, answer_s=answer_s)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    console = Console()
    where = f"Python {report['python']}, {report['machine']}, load {report['load_1min']}"
    table = Table(title=f"One turn of an agent ({where})")
    columns = (
        "framework",
        "version",
        "bare µs",
        "instrumented µs",
        "added µs",
        "quartiles",
        "added CPU µs",
        "quartiles",
        "empty hooks CPU µs",
        "own µs",
        "own CPU µs",
        "added calls",
        "empty hooks calls",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for name, row in report["frameworks"].items():
        cells = (
            row["bare_us"],
            row["instrumented_us"],
            row["added_us"],
            "{} to {}".format(*row["added_quartiles_us"]),
            row["added_cpu_us"],
            "{} to {}".format(*row["added_cpu_quartiles_us"]),
            row.get("empty_added_cpu_us", ""),
            row.get("own_us", ""),
            row.get("own_cpu_us", ""),
            row["added_calls"],
            row.get("empty_added_calls", ""),
        )
        table.add_row(name, row["version"], *map(str, cells))
    console.print(table)
    verdict = "[green]met[/]" if report["passed"] else "[red]missed[/]"
    console.print(f"target: ≤ {TARGET_TURN_US:.0f} µs a turn beyond the bare framework: {verdict}")


if __name__ == "__main__":
    main()
