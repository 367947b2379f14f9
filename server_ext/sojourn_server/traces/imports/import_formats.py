"""The formats that ``sojourn trace import --from`` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from . import ImportedTrace
from .ledger_import import read_ledgers
from .otel_import import read_otel

TraceReader = Callable[[Sequence[str | Path]], ImportedTrace]
"""Reads files, plain or gzipped, as one trace. Raises ``TraceError``, which names the file."""

IMPORT_FORMATS: Mapping[str, TraceReader] = MappingProxyType(
    {
        "otel": read_otel,
        "sojourn": read_ledgers,
    }
)
"""Name of each format → its reader."""
