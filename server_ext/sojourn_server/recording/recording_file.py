"""The file of a recording: its header, its writer, and a reader that checks every line."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from sojourn.errors import InputError

from ..core.scheduler_limits import SchedulerLimits
from ..core.scheduler_state import Histories, KVPoolConfig, SchedulerState
from ..policies.costs.engine_profile import PrefillCurve
from ..policies.preset import parse_preset
from ..programs.output_length_history import HintErrors, OutputLengthHistory
from ..programs.tool_and_turn_history import SlidingMean, ToolHistory, TurnHistory
from ..programs.workflow_history import WorkflowHistory
from .record_format import RECORD_SHAPES
from .recording_scheduler import RecordingScheduler, RecordSink

RECORDING_VERSION = 12
"""Version of the format. To replay an older recording, use the version of sojourn that wrote it."""

MAX_RECORDING_BYTES = 1 << 30
"""Compressed size in bytes at which a recording ends. The file may be larger by the records written last
(``FLUSH_RECORDS``) and the end record."""

FLUSH_RECORDS = 256
"""Number of records written at once (about 20 KiB, 0.2 ms). A killed engine loses fewer records than this."""

_GZIP = 31
"""``wbits`` of zlib for a gzip member with a window of 32 KiB."""

_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 18
_TRUNCATION_CAUSES = (
    "the engine was killed, its disk was full, or the file was cut; "
    "allow_unfinished replays it as far as it goes"
)
MAX_LINE_BYTES = 1 << 28
"""Maximum length of a line; a file with a longer line is damaged."""

encode_record = msgspec.json.Encoder().encode


class RecordingHeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """First line of a recording: what the recorded scheduler was built from, including learned histories."""

    sojourn_recording: int = RECORDING_VERSION
    versions: dict[str, str]
    """Versions of sojourn, the engine and Python."""
    preset_toml: str
    preset_source: str
    """Name of the preset's TOML file, for messages."""
    pool: dict[str, Any]
    limits: dict[str, Any]
    curve: tuple[float, float, float] | None
    """Coefficients of the prefill cost curve; ``None``: prefill speed was learned while serving."""
    tools: dict[str, Any]
    turns: dict[str, Any]
    evicted_waits: list[float]
    growth_tokens: list[float]
    workflows: dict[str, Any]
    output_lengths: dict[str, Any]
    hints_off: dict[str, list[float]]
    service: dict[str, Any]

    @classmethod
    def of(
        cls,
        *,
        preset_toml: str,
        preset_source: str,
        pool: KVPoolConfig,
        limits: SchedulerLimits,
        curve: PrefillCurve | None,
        histories: Histories,
        versions: dict[str, str],
    ) -> RecordingHeader:
        """Return the header for a scheduler built from these arguments. The header copies the present content
        of the histories."""
        return cls(
            versions={"sojourn": version("sojourn"), "python": platform.python_version(), **versions},
            preset_toml=preset_toml,
            preset_source=preset_source,
            pool=asdict(pool),
            limits=asdict(limits),
            curve=(curve.a_s, curve.b_s_per_token, curve.c_s_per_token2) if curve is not None else None,
            tools=histories.tools.snapshot(),
            turns=histories.turns.snapshot(),
            evicted_waits=histories.evicted_waits.values(),
            growth_tokens=histories.growth_tokens.values(),
            workflows=histories.workflows.snapshot(),
            output_lengths=histories.output_lengths.snapshot(),
            hints_off=histories.hints_off.snapshot(),
            service=histories.service.snapshot(),
        )

    def program_scheduler(self, sink: RecordSink) -> RecordingScheduler:
        """Return a new scheduler in the initial state of the recorded scheduler. The new scheduler writes its
        records to ``sink``. Raises ``ValueError`` or ``TypeError`` for invalid fields."""
        # Older recordings have no ``hold_timeout_s``; ``gate_timeout_s`` limited both waits.
        limits = {"hold_timeout_s": self.limits.get("gate_timeout_s", math.inf), **self.limits}
        state = SchedulerState(
            parse_preset(self.preset_toml, source=self.preset_source),
            KVPoolConfig(**self.pool),
            limits=SchedulerLimits(**limits),
            curve=PrefillCurve(*self.curve) if self.curve is not None else None,
            histories=Histories(
                tools=ToolHistory.restore(self.tools),
                turns=TurnHistory.restore(self.turns),
                evicted_waits=_mean_of(self.evicted_waits),
                growth_tokens=_mean_of(self.growth_tokens),
                workflows=WorkflowHistory.restore(self.workflows),
                output_lengths=OutputLengthHistory.restore(self.output_lengths),
                hints_off=HintErrors.restore(self.hints_off),
                service=ToolHistory.restore(self.service),
            ),
        )
        return RecordingScheduler(sink, state)


class RecordingFile:
    """Writes one recording to a file. After a failure, the recording ends, and ``warn`` is called once with a
    text. No method raises. A file that exists at the path is renamed to ``PATH.previous``."""

    def __init__(
        self,
        path: str | Path,
        header: RecordingHeader,
        *,
        warn: Callable[[str], None],
        max_bytes: int = MAX_RECORDING_BYTES,
    ) -> None:
        self.path = Path(path)
        self.full = False
        """Whether the maximum size is reached. The next record must then be the last."""
        self.records = 0
        """Number of records written so far, without the header."""
        self._warn = warn
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        self._file: BinaryIO | None = None
        try:
            line = encode_record(header)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():  # a device such as /dev/null must not be renamed
                os.replace(self.path, self.path.with_name(self.path.name + ".previous"))
            self._file = self.path.open("wb")
            self._lines.append(line)
            self._flush()
        except Exception as error:
            self.give_up(error)

    @property
    def is_open(self) -> bool:
        """Whether more records can be written."""
        return self._file is not None

    def write(self, record: tuple[Any, ...]) -> None:
        """Write a record. The record is encoded at once, so the caller may change its parts afterwards."""
        if self._file is None:
            return
        try:
            self._lines.append(encode_record(record))
            self.records += 1
            if len(self._lines) >= FLUSH_RECORDS:
                self._flush()
        except Exception as error:
            self.give_up(error)

    def close(self) -> None:
        """Write the records that are not in the file yet, and close the file."""
        if self._file is None:
            return
        try:
            self._flush(zlib.Z_FINISH)
            self._file.close()
            self._file = None
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Call ``warn`` and write no more records. The file can still be read, but has no end record."""
        file, self._file = self._file, None
        self._lines.clear()
        if file is not None:
            with contextlib.suppress(OSError):  # closing retries the failed write
                file.close()
        what = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self._warn(f"recording {self.path} is given up after {self.records} records: {what}")

    def _flush(self, how: int = zlib.Z_SYNC_FLUSH) -> None:
        assert self._file is not None
        text = b"".join(line + b"\n" for line in self._lines)
        self._lines.clear()
        # After a flush the file can be read to its last line.
        data = self._packer.compress(text) + self._packer.flush(how)
        self._file.write(data)
        self._file.flush()
        self._bytes += len(data)
        self.full = self._bytes >= self._max_bytes


class RecordingError(InputError):
    """A recording cannot be used. The text names file and line, what was found and what was expected."""


class RecordedCall(NamedTuple):
    """One line of a recording, with the omitted empty parts restored."""

    line: int
    """Line number; the header is line 1."""
    op: str
    now: float | None
    facts: list[Any]
    answer: Any
    decisions: list[list[Any]]
    orders: list[list[str]]
    raw: bytes


class _HeaderVersion(msgspec.Struct):
    """The header fields that an error message about another format version needs."""

    sojourn_recording: Any = None
    versions: dict[str, str] = {}


class RecordingReader:
    """Reads a recording. The constructor reads the whole file, and raises ``RecordingError`` if the file is
    missing, damaged, truncated or of another version.

    ``allow_unfinished`` accepts a file without an end record, as left by a killed engine or a full disk. Each
    call to ``records`` reads the file again, so that the file is never in memory as a whole.
    """

    def __init__(self, path: str | Path, *, allow_unfinished: bool = False) -> None:
        self.path = Path(path)
        self.allow_unfinished = allow_unfinished
        self._read = 0
        """Number of lines read so far, for messages."""
        last, number = b"", 0
        for number, last in self._lines():
            if number == 1:
                self.header = self._header(last)
        if number == 0:
            raise RecordingError(f"{self.path}: empty; expected a recording")
        self.lines = number
        finished = number > 1 and self._record(number, last).op == "close"
        if not finished and not allow_unfinished:
            raise RecordingError(f"{self.path}, line {number}: no end record: {_TRUNCATION_CAUSES}")

    def records(self) -> Iterator[RecordedCall]:
        """Yield all records in order, including the end record. Raises ``RecordingError``."""
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
                    raise RecordingError(f"{self.path}: empty; expected a recording")
                if magic != _MAGIC:
                    raise RecordingError(f"{self.path}: not gzipped; expected a recording")
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
            if found.sojourn_recording == RECORDING_VERSION:
                return msgspec.json.decode(line, type=RecordingHeader)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordingError(f"{self.path}, line 1: not the header of a recording: {error}") from error
        if found.sojourn_recording is None:
            raise RecordingError(
                f"{self.path}, line 1: not the header of a recording: no field sojourn_recording"
            )
        raise RecordingError(
            f"{self.path}, line 1: recording version {found.sojourn_recording!r}, "
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
        if not isinstance(facts, list) or not 0 <= len(shape.facts) - len(facts) <= shape.optional:
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
    """Return a line of JSON as the recorder would write it, without a newline. Use this function for lines
    that were edited by hand. Raises ``msgspec.DecodeError`` if the line is not JSON."""
    return encode_record(msgspec.json.decode(line))


def _mean_of(values: list[float]) -> SlidingMean:
    mean = SlidingMean()
    for value in values:
        mean.observe(value)
    return mean
