"""What every import shares: the reader of files with JSON records, the result, and the estimate of the prefix
that the runs of an agent share."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..trace_schema import TraceError, TraceProgram


class ImportResult(NamedTuple):
    """The programs that an import found, and notes for the user."""

    programs: list[TraceProgram]
    notes: list[str]
    """What the import left out or inferred, one line each."""


def with_shared_prefixes(programs: Sequence[TraceProgram]) -> list[TraceProgram]:
    """Return the programs with ``shared_prefix_tokens`` estimated from the cached tokens of first prompts.

    All programs of one ``group`` are runs of one agent. Their estimate is the smallest number of cached
    tokens in any of their first prompts, limited to the length of the program's own first prompt. Larger
    numbers are not used, because runs on the same task share more than the system prompt. Counts of 0 are
    ignored, because the first run finds no blocks of an earlier run. If all counts are 0 or missing, the
    field stays unset.
    """
    least: dict[str | None, int] = {}
    for program in programs:
        found = program.turns[0].cached_tokens or 0
        if found > 0:
            least[program.group] = min(found, least.get(program.group, found))
    return [
        msgspec.structs.replace(
            program, shared_prefix_tokens=min(least[program.group], program.turns[0].prompt_tokens)
        )
        if program.group in least
        else program
        for program in programs
    ]


_BLANK = " \t\r\n,"
"""Characters allowed between records; some writers separate them by commas."""


def read_records(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) for each record of a file. Each element of an array is a record.

    The line is the one on which the record or its array begins. Raises ``TraceError``, which names file and
    line, for a file that cannot be read, is cut off, or is not JSON.
    """
    path = Path(path)
    text = _text(path)
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


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: the gzip data is cut off or damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text: {error.reason} at byte {error.start}") from None
