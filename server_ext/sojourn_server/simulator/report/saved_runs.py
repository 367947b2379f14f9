"""Whole run logs on disk: ``--explain`` and plots work on them later.

The name says the form: ``.json`` or ``.msgpack``, with ``.gz`` compressed. When
reading the content does, so a renamed file is still read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sojourn_server.traces.atomic_files import write_atomically

from ..run_log import RunLog
from .results_file import Provenance, ResultsError, check_version, decode
from .run_row import RunRow

SAVED_RUNS_VERSION = 1
SUFFIXES = (".json", ".json.gz", ".msgpack", ".msgpack.gz")


class SavedRuns(msgspec.Struct, kw_only=True):
    """What is in the file."""

    version: int
    made_with: Provenance
    runs: list[RunLog]
    rows: list[RunRow] = msgspec.field(default_factory=list)
    """Their figures, and those of limits that have no log."""


def save_runs(
    path: str | Path, runs: Iterable[RunLog], made: Provenance, rows: Iterable[RunRow] = ()
) -> None:
    """Write the logs; the file appears whole or not at all.

    The same logs give the same bytes. Raises ``ResultsError`` for a name that tells no form.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise ResultsError(f"{path}: the name ends in none of {', '.join(SUFFIXES)}")
    saved = SavedRuns(version=SAVED_RUNS_VERSION, made_with=made, runs=list(runs), rows=list(rows))
    packed = ".msgpack" in "".join(path.suffixes[-2:])
    data = msgspec.msgpack.encode(saved) if packed else msgspec.json.encode(saved)
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_atomically({path: data})


def load_runs(path: str | Path) -> SavedRuns:
    """Raises ``ResultsError`` naming the file, and the field where one is wrong."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ResultsError(f"{path}: the gzip data is cut off or damaged: {error}") from error
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}") from error
    check_version(data, str(path), expected=SAVED_RUNS_VERSION, what="saved runs")
    saved: SavedRuns = decode(data, SavedRuns, str(path))
    return saved
