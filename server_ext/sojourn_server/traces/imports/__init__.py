"""Imports of agent runs from other records: OpenTelemetry spans and sojourn's ledgers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .import_records import ImportResult
from .ledger_import import read_ledgers
from .otel_import import read_otel

IMPORT_FORMATS: Mapping[str, Callable[[Sequence[str | Path]], ImportResult]] = {
    "otel": read_otel,
    "sojourn": read_ledgers,
}
"""Formats that ``sojourn trace import --from`` reads: name → function that reads several files, plain or
gzipped, as one trace. The function raises ``TraceError``, which names the file."""
