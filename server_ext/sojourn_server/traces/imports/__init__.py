"""Imports of agent runs from other records: session files of coding agents, spans, and sojourn's ledgers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from .ledger_import import read_ledgers
from .recorded_calls import ImportResult
from .session_files import SESSION_READERS
from .span_import import read_spans

IMPORT_FORMATS: Mapping[str, Callable[[Sequence[str | Path]], ImportResult]] = {
    **{reader.source: reader.read for reader in SESSION_READERS},
    **{source: partial(read_spans, source=source) for source in ("otel", "langfuse", "langsmith")},
    "sojourn": read_ledgers,
}
"""Formats that ``sojourn trace import --from`` reads: name → function that reads several files, plain or
gzipped, as one trace. The function raises ``TraceError``, which names the file."""
