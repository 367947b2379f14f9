"""Cost of instrumentation in machine instructions, which other work on the machine does not change.

    .tox/frameworks/bin/python benchmarks/framework_instructions.py [--rounds 3] [--turns 10] [--json FILE]

Needs ``valgrind``. Use the engine's environment for openai, litellm and mini-swe-agent, and ``tox``'s for the
others; ``framework_agents.py`` has the agents and the arms. Callgrind counts the instructions of each thread.
It makes a program some fifty times slower. The counts of equal rounds differ by about 0.1 %, so a few rounds
suffice, and other processes may run meanwhile. A result is the median over the rounds. The SDK's own threads,
which send events while the agent waits, are counted apart. All other threads count for the agent, because it
waits for those that run its tools.

The time is an estimate: the added share of the instructions times the CPU time of a bare turn, which is
measured without valgrind. It assumes that the added instructions take as long as the others do on average.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sojourn
from framework_agents import FRAMEWORKS, Arm, fake_server
from result_pages import show as show_table

TARGET_TURN_US = 100.0
"""Agreed maximum of what a turn costs more, in microseconds."""
WARM_UP_ROUNDS = 2
TIMED_ROUNDS = 15
"""Rounds without valgrind, after the warm-up, that give the CPU time of a bare turn."""
ARMS: tuple[Arm, ...] = ("bare", "sojourn")
_ARM = re.compile(r"^desc: Trigger: dump (bare|sojourn)$", re.MULTILINE)
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)$", re.MULTILINE)


def main() -> None:
    """Count and print; exit code 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds in each arm")
    parser.add_argument("--turns", type=int, default=10, help="turns of one agent")
    parser.add_argument("--framework", action="append", choices=sorted(FRAMEWORKS), help="only this one")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--counted", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        run_rounds(options.counted, options.rounds, options.turns)
        return
    if shutil.which("valgrind") is None:
        parser.error("valgrind is missing; expected it on PATH: apt-get install valgrind")
    names = options.framework or sorted(FRAMEWORKS)
    here = [name for name in names if find_spec(FRAMEWORKS[name].package) is not None]
    rows = {name: one(name, options.rounds, options.turns) for name in here}
    report = {
        "command": "python benchmarks/framework_instructions.py "
        f"--rounds {options.rounds} --turns {options.turns}",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "frameworks": rows,
        "targets": {"turn_us": TARGET_TURN_US},
        "passed": bool(rows) and all(row["added_us"] <= TARGET_TURN_US for row in rows.values()),
    }
    show(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["passed"] else 1)


def set_arm(arm: Arm) -> None:
    """Instrument the frameworks, or restore them."""
    if arm == "sojourn":
        sojourn.instrument()
    else:
        sojourn.uninstrument()


def run_rounds(name: str, rounds: int, turns: int) -> None:
    """Run the agent in each arm under callgrind, and have the counts of each round written to a file.

    Prints how many threads there are before and after the SDK starts its own. Callgrind numbers threads in
    the order of their start, so this tells which are the SDK's.
    """
    framework = FRAMEWORKS[name]
    with fake_server(turns) as url:
        before = len(os.listdir("/proc/self/task"))
        sojourn.init(url, dialect="sojourn")
        with sojourn.program("starts all threads"), sojourn.tool_call("work", "call"):
            pass
        sojourn.flush(10)
        print("threads", before, len(os.listdir("/proc/self/task")), flush=True)
        for number in range(WARM_UP_ROUNDS + rounds):
            for arm in ARMS:
                set_arm(arm)
                run = framework.prepare(f"{url}/v1", arm)
                gc.collect()
                gc.disable()
                if number >= WARM_UP_ROUNDS:
                    _control("--zero")
                run()
                if number >= WARM_UP_ROUNDS:
                    _control(f"--dump={arm}")
                gc.enable()
                sojourn.flush(10)
        sojourn.shutdown()


def _control(command: str) -> None:
    """Tell callgrind, in which this process runs, to do something."""
    subprocess.run(["callgrind_control", command, str(os.getpid())], check=True, capture_output=True)


def one(name: str, rounds: int, turns: int) -> dict[str, Any]:
    """Count the instructions of one framework's agent and return its figures."""
    counts = counted(name, rounds, turns)
    bare = counts["bare"][0]
    cpu_us = bare_cpu_us(name, turns)
    added = counts["sojourn"][0] - bare
    return {
        "version": version(FRAMEWORKS[name].distribution),
        "rounds": rounds,
        "turns": turns,
        "bare_instructions": bare,
        "bare_cpu_us": round(cpu_us, 1),
        "added_instructions": added,
        "added_share": round(added / bare, 5),
        "added_us": round(added / bare * cpu_us, 1),
        "added_sdk_threads_instructions": counts["sojourn"][1] - counts["bare"][1],
    }


def counted(name: str, rounds: int, turns: int) -> dict[str, tuple[int, int]]:
    """Instructions per turn in each arm: of the agent, and of the SDK's threads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={folder}/out",
            sys.executable, __file__, "--counted", name, "--rounds", str(rounds), "--turns", str(turns),
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{name}: valgrind failed\n{done.stderr[-2000:]}")
        threads = re.search(r"^threads (\d+) (\d+)$", done.stdout, re.MULTILINE)  # frameworks print too
        assert threads is not None, done.stdout
        before, after = map(int, threads.groups())
        # For each arm and dump: instructions of the agent, and of the SDK's threads.
        found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for path in Path(folder).glob("out.*-*"):  # out.DUMP-THREAD
            text = path.read_text()
            arm, total = _ARM.search(text), _TOTAL.search(text)
            if arm and total:
                dump, _, thread = path.name.rpartition("-")
                found[arm[1]][dump][before < int(thread) <= after] += int(total[1])
    if not any(sdk for _, sdk in found["sojourn"].values()):
        raise RuntimeError(f"{name}: the SDK's threads have other numbers than {before + 1} to {after}")
    return {
        arm: (
            round(statistics.median(agent for agent, _ in dumps.values()) / turns),
            round(statistics.median(sdk for _, sdk in dumps.values()) / turns),
        )
        for arm, dumps in found.items()
    }


def bare_cpu_us(name: str, turns: int) -> float:
    """CPU time of the agent's thread per turn of the bare framework, in microseconds: the median."""
    framework, took_ns = FRAMEWORKS[name], []
    set_arm("bare")
    with fake_server(turns) as url:
        for _ in range(WARM_UP_ROUNDS + TIMED_ROUNDS):
            run = framework.prepare(f"{url}/v1", "bare")
            gc.collect()
            gc.disable()
            began_ns = time.thread_time_ns()
            run()
            took_ns.append(time.thread_time_ns() - began_ns)
            gc.enable()
    return statistics.median(took_ns[WARM_UP_ROUNDS:]) / 1000 / turns


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    head = (
        "framework", "version", "bare, million instructions", "added", "added %", "added µs",
        "the SDK's threads",
    )  # fmt: skip
    lines = []
    for name, row in report["frameworks"].items():
        cells = (
            f"{row['bare_instructions'] / 1e6:.2f}",
            f"{row['added_instructions'] / 1e6:.3f}",
            f"{100 * row['added_share']:.2f}",
            f"{row['added_us']:.0f}",
            f"{row['added_sdk_threads_instructions'] / 1e6:.3f}",
        )
        lines.append((name, row["version"], *cells))
    show_table(head, lines, title=f"One turn of an agent (Python {report['python']}, {report['machine']})")
    verdict = "met" if report["passed"] else "missed"
    print(f"target: ≤ {TARGET_TURN_US:.0f} µs a turn beyond the bare framework: {verdict}")


if __name__ == "__main__":
    main()
