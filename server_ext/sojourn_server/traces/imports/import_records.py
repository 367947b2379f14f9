"""Readers of files with JSON records and of the times in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..trace_file import read_bytes
from ..trace_schema import TraceError

_BLANK = " \t\r\n,"
"""Characters allowed between records; some writers separate them by commas."""


def read_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) for each record of a file. Each element of an array is a record.

    The line is the one on which the record or its array begins. Raises ``TraceError``, which names file and
    line, for a file that cannot be read, is cut off, or is not JSON.
    """
    try:
        text = read_bytes(Path(path)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text: {error.reason} at byte {error.start}") from None
    decoder = json.JSONDecoder()
    at, line, counted = 0, 1, 0
    while True:
        while at < len(text) and text[at] in _BLANK:
            at += 1
        if at >= len(text):
            return
        line += text.count("\n", counted, at)
        counted = at
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {line}: not JSON: {error}") from None
        if isinstance(record, list):
            yield from ((line, element) for element in record)
        else:
            yield line, record


def seconds(value: Any) -> float:
    """Return a time in seconds since 1970: ISO 8601, UTC if it names no zone, or a number of seconds or
    milliseconds. Raises ``ValueError`` or ``TypeError``."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return float(value) / 1000 if float(value) > 1e11 else float(value)
