"""Reading a tape: all of it is checked before anything of it is believed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .record_format import RECORD_SHAPES
from .recording_file import encode_record
from .recording_header import RECORDING_VERSION, RecordingHeader

_GZIP = 31
_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 18
_TRUNCATION_CAUSES = (
    "the engine was killed, its disk was full, or the file was cut; "
    "allow_unfinished replays it as far as it goes"
)
MAX_LINE_BYTES = 1 << 28
"""A longer line is damage, not a record."""


class RecordingError(ValueError):
    """A tape cannot be used; the text names the file, the line, what was found and what was expected."""


class RecordedCall(NamedTuple):
    """One line of a tape, its parts filled up where they were left out."""

    line: int
    """Counted from 1, which is the header."""
    op: str
    now: float | None
    facts: list[Any]
    answer: Any
    decisions: list[list[Any]]
    orders: list[list[str]]
    raw: bytes


class _HeaderVersion(msgspec.Struct):
    """As much of a header of another version as a message needs."""

    sojourn_tape: Any = None
    versions: dict[str, str] = {}


class RecordingReader:
    """A whole recording. Raises ``RecordingError`` if it is missing, damaged, cut off or of a wrong version.

    With ``allow_unfinished`` a tape that just stops is read as far as it goes:
    its engine was killed, or the disk was full. ``records`` may be called again
    and again; each call reads the file anew, so that it never lies in memory.
    """

    def __init__(self, path: str | Path, *, allow_unfinished: bool = False) -> None:
        self.path = Path(path)
        self.allow_unfinished = allow_unfinished
        self.finished = False
        """It has an end record."""
        self._read = 0
        """Lines read so far, for messages."""
        last, number = b"", 0
        for number, last in self._lines():
            if number == 1:
                self.header = self._header(last)
        if number == 0:
            raise RecordingError(f"{self.path}: empty; expected a tape")
        self.lines = number
        self.finished = number > 1 and self._record(number, last).op == "close"
        if not self.finished and not allow_unfinished:
            raise RecordingError(
                f"{self.path}, line {number}: the tape stops without its end record: {_TRUNCATION_CAUSES}"
            )

    def records(self) -> Iterator[RecordedCall]:
        """All records in order, the end record included. Raises ``RecordingError``."""
        ended = False
        for number, line in self._lines():
            if number == 1:
                continue
            if ended:
                raise RecordingError(f"{self.path}, line {number}: goes on after its end record")
            record = self._record(number, line)
            ended = record.op == "close"
            yield record

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        number = self._read = 0
        rest: list[bytes] = []
        rest_bytes = 0
        for chunk in self._unpacked():
            *lines, tail = chunk.split(b"\n")
            for line in lines:
                number = self._read = number + 1
                yield number, b"".join((*rest, line)) if rest else line
                rest, rest_bytes = [], 0
            if tail:
                rest.append(tail)
                rest_bytes += len(tail)
                if rest_bytes > MAX_LINE_BYTES:
                    raise RecordingError(
                        f"{self.path}, line {number + 1}: longer than {MAX_LINE_BYTES} bytes"
                    )
        if rest and not self.allow_unfinished:
            raise RecordingError(f"{self.path}, line {number + 1}: cut in the middle of the line")

    def _unpacked(self) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(_GZIP)
        try:
            with self.path.open("rb") as file:
                magic = file.read(len(_MAGIC))
                if not magic:
                    raise RecordingError(f"{self.path}: empty; expected a tape")
                if magic != _MAGIC:
                    raise RecordingError(f"{self.path}: not gzipped; expected a tape")
                unpacker.decompress(magic)
                while packed := file.read(_CHUNK_BYTES):
                    while packed:
                        if unpacker.eof:
                            raise RecordingError(f"{self.path}: goes on after its end")
                        chunk = unpacker.decompress(packed, 16 * _CHUNK_BYTES)
                        packed = unpacker.unconsumed_tail or unpacker.unused_data
                        if chunk:
                            yield chunk
        except OSError as error:
            raise RecordingError(f"{self.path}: {error.strerror}") from error
        except zlib.error as error:
            raise RecordingError(f"{self.path}, after line {self._read}: damaged ({error})") from error
        if not unpacker.eof and not self.allow_unfinished:
            raise RecordingError(
                f"{self.path}, after line {self._read}: the file stops in the middle: {_TRUNCATION_CAUSES}"
            )

    def _header(self, line: bytes) -> RecordingHeader:
        try:
            found = msgspec.json.decode(line, type=_HeaderVersion)
            if found.sojourn_tape == RECORDING_VERSION:
                return msgspec.json.decode(line, type=RecordingHeader)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}, line 1: not the header of a tape: {error}") from error
        if found.sojourn_tape is None:
            raise RecordingError(f"{self.path}, line 1: not the header of a tape: no field sojourn_tape")
        raise RecordingError(
            f"{self.path}, line 1: tape version {found.sojourn_tape!r}, "
            f"written by sojourn {found.versions.get('sojourn', 'unknown')}; expected {RECORDING_VERSION}: "
            "run sojourn parity of the version that wrote it"
        )

    def _record(self, number: int, line: bytes) -> RecordedCall:
        try:
            parts = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}, line {number}: not JSON: {error}") from error
        if not isinstance(parts, list) or not 2 <= len(parts) <= 6:
            raise RecordingError(
                f"{self.path}, line {number}: expected [op, now, facts, answer, decisions, orders]"
            )
        op, now, facts, answer, decisions, orders = parts + [None] * (6 - len(parts))
        shape = RECORD_SHAPES.get(op) if isinstance(op, str) else None
        if shape is None:
            raise RecordingError(
                f"{self.path}, line {number}: op is {op!r}; expected {', '.join(RECORD_SHAPES)}"
            )
        facts = facts if facts is not None else []
        if not isinstance(facts, list) or len(facts) != len(shape.facts):
            expected = ", ".join(shape.facts) or "none"
            raise RecordingError(
                f"{self.path}, line {number}: facts of {op!r} are {facts!r:.80}; expected {expected}"
            )
        if not isinstance(now, int | float | None):
            raise RecordingError(f"{self.path}, line {number}: now is {now!r:.80}; expected seconds")
        if not isinstance(decisions, list | None):
            raise RecordingError(
                f"{self.path}, line {number}: decisions are {decisions!r:.80}; expected a list"
            )
        if not isinstance(orders, list | None):
            raise RecordingError(f"{self.path}, line {number}: orders are {orders!r:.80}; expected a list")
        return RecordedCall(number, op, now, facts, answer, decisions or [], orders or [], line)


def canonical_line(line: bytes) -> bytes:
    """The line as it would have been written, whoever edited it meanwhile."""
    return encode_record(msgspec.json.decode(line))
