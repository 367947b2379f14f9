"""Reads the JSON files of ``sojourn simulate --json``."""

from __future__ import annotations

from pathlib import Path

import msgspec
from sojourn_server.simulator.report.results_file import SimulationResults


def read_results(path: Path) -> SimulationResults:
    """Return a file's content. Unknown fields are ignored."""
    return msgspec.json.decode(path.read_bytes(), type=SimulationResults)
