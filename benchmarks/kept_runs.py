"""Runs in parallel, each in a process of its own, whose results are kept in a folder.

An interrupted benchmark continues with the runs that are kept. Empty the folder after a change of the code.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from sojourn_server.simulator.fresh_processes import in_fresh_processes
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation


def run_arguments(doc: str | None) -> ArgumentParser:
    """Return a parser of the options of a benchmark that keeps its runs: how many at once, and where."""
    parser = ArgumentParser(description=doc, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    parser.add_argument(
        "--cache", help="folder in which finished runs are kept, to go on after an interruption"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder to write into")
    return parser


def traces_of(folder: Path) -> list[Path]:
    """The traces of a folder, sorted."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    if not found:
        sys.exit(f"{folder} holds no trace")
    return found


def row_of(spec: RunSpec) -> RunRow:
    """The metrics of a simulated run."""
    return summarize_run(run_simulation(spec))


def mean_completion_s(row: RunRow) -> float:
    """The mean completion time of a run until all programs have finished."""
    assert row.completion_s.mean is not None, "an open loop runs until all have finished"
    return row.completion_s.mean


def row_and_log(spec: RunSpec) -> tuple[RunRow, RunLog]:
    """The metrics and the log of a simulated run."""
    log = run_simulation(spec)
    return summarize_run(log), log


def kept_file(folder: Path | str, work: Callable[..., Any], spec: object) -> Path:
    """The file that has the result of ``work(spec)``, if it has been made."""
    key = hashlib.sha256(f"{work.__module__}.{work.__qualname__} {spec!r}".encode()).hexdigest()
    return Path(folder) / f"{key[:24]}.pickle"


def run_kept(
    specs: Sequence[Any],
    folder: Path | str | None,
    jobs: int | None,
    work: Callable[[Any], Any] = row_of,
) -> list[Any]:
    """``work(spec)`` for each of ``specs``, in their order. Equal specs are run once; ``work`` is a function
    at the top of a module. Results that ``folder`` has are read from there, and new ones are kept in it."""
    found: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for spec in specs:
        file = None if folder is None else kept_file(folder, work, spec)
        if file is not None and file.exists():
            found[repr(spec)] = pickle.loads(file.read_bytes())
        else:
            missing[repr(spec)] = spec
    console = Console(stderr=True)
    keys = list(missing)
    for done, (number, result) in enumerate(in_fresh_processes(work, list(missing.values()), jobs), 1):
        key = keys[number]
        found[key] = result
        if folder is not None:
            file = kept_file(folder, work, missing[key])
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(result))
            partial.replace(file)
        console.print(f"{done} of {len(keys)} runs finished", highlight=False)
    return [found[repr(spec)] for spec in specs]
