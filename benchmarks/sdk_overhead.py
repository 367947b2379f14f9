"""Cost of the SDK for an agent: microseconds per turn on the agent's thread, and how often it had to wait.

    python benchmarks/sdk_overhead.py [--turns 2000] [--json FILE]

A turn is one ``request_parts()`` and one tool call's start and stop inside an open program. Turns are
measured with a server that answers, with one that never answers, without a server, and without ``init()``.
Also measured: the time of ``import sojourn`` in a fresh interpreter. ``framework_instructions.py`` measures
the frameworks' adapters.
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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import sojourn
from framework_agents import ServerProcess
from result_pages import show as show_table
from sojourn.testing import refusing_url

TARGET_TURN_US = 50.0
"""Agreed maximum of the median turn, in microseconds."""
BLOCKED_US = 5000.0
"""A turn that takes longer, in microseconds, counts as blocked."""
TARGET_IMPORT_MS = 150.0


def main() -> None:
    """Measure and print; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2000, help="turns per sink")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    options = parser.parse_args()
    report = measure(options.turns)
    show(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["passed"] else 1)


def measure(turns: int) -> dict[str, Any]:
    """Run all measurements. Return the figures as plain data."""
    sinks = {}
    for name, sink in SINKS.items():
        with sink() as url:
            sinks[name] = turns_against(url, turns)
    imports = import_ms()
    online = [sinks[name] for name in ("answers", "hangs", "refuses")]
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_1min": round(os.getloadavg()[0], 2),
        "turns": sinks,
        "import_ms": imports,
        "targets": {"turn_us": TARGET_TURN_US, "blocked": 0, "import_ms": TARGET_IMPORT_MS},
        "passed": all(s["median_us"] <= TARGET_TURN_US for s in online)
        and sinks["hangs"]["blocked"] == 0
        and imports["median"] <= TARGET_IMPORT_MS,
    }


SINKS: dict[str, Callable[[], AbstractContextManager[str | None]]] = {
    "answers": lambda: server("ok"),
    "hangs": lambda: server("hang"),
    "refuses": lambda: nullcontext(refusing_url()),
    "no init": nullcontext,
}
"""Servers by name. One answers, in a process of its own, so that its work is not measured. One accepts
connections and never answers. One refuses connections. Without ``init()``, SDK calls in a library cost its
users this much."""


def turns_against(url: str | None, turns: int) -> dict[str, Any]:
    """Measure single turns and return a summary. The sender gets a pause after every tenth turn, because real
    agents wait between turns."""
    if url is not None:
        sojourn.init(url, dialect="sojourn")
    took_us = []
    with sojourn.program("bench", agent_type="bench"):
        for n in range(turns + 100):
            before = time.perf_counter_ns()
            sojourn.request_parts()
            with sojourn.tool_call("bash", f"call-{n}", tool_class="pytest"):
                pass
            took_us.append((time.perf_counter_ns() - before) / 1000)
            if n % 10 == 0:
                time.sleep(0.002)
    stats = sojourn.stats()
    sojourn.shutdown()
    return {**summary(took_us[100:]), "dropped": stats["dropped_full"] + stats["dropped_send"]}


def import_ms(repeats: int = 5) -> dict[str, float]:
    """Return median and maximum milliseconds of ``import sojourn`` in fresh interpreters. A busy machine may
    double them."""
    code = "import time; t = time.perf_counter(); import sojourn; print((time.perf_counter() - t) * 1000)"
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return {"median": round(statistics.median(took), 1), "worst": round(max(took), 1)}


def summary(took_us: list[float]) -> dict[str, Any]:
    """Return median, p99 and maximum in microseconds, and the number of blocked turns."""
    ordered = sorted(took_us)
    return {
        "turns": len(ordered),
        "median_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[int(len(ordered) * 0.99)], 1),
        "max_us": round(ordered[-1], 1),
        "blocked": sum(us > BLOCKED_US for us in ordered),
    }


def server(mode: str) -> ServerProcess:
    """Return the process of a ``FakeServer`` that answers in this way."""
    return ServerProcess(
        "import sys\nfrom sojourn.testing import FakeServer\n"
        f"with FakeServer(mode={mode!r}) as server:\n"
        "    print(server.url, flush=True)\n    sys.stdin.read()"
    )


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    where = f"Python {report['python']}, {report['machine']}, load {report['load_1min']}"
    head = ("server", "median µs", "p99 µs", "max µs", "over 5 ms", "events dropped")
    keys = ("median_us", "p99_us", "max_us", "blocked", "dropped")
    lines = [(name, *(str(row[key]) for key in keys)) for name, row in report["turns"].items()]
    show_table(head, lines, title=f"One turn on the agent's thread ({where})")
    imports = report["import_ms"]
    print(f"import sojourn: {imports['median']} ms median, {imports['worst']} ms worst of 5")
    verdict = "met" if report["passed"] else "missed"
    print(
        f"targets: ≤ {TARGET_TURN_US:.0f} µs a turn, 0 waits, ≤ {TARGET_IMPORT_MS:.0f} ms import: {verdict}"
    )


if __name__ == "__main__":
    gc.collect()
    main()
