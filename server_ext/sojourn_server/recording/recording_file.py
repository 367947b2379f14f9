"""The file of a recording: its header, its writer and its reader."""

from __future__ import annotations

import contextlib
import gzip
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sojourn.errors import InputError

from ..core.events_and_actions import Event
from ..core.scheduler_state import KVPoolConfig, SchedulerLimits, SchedulerState
from ..policies.costs.engine_profile import PrefillCurve

T = TypeVar("T")

encode_record = msgspec.json.Encoder().encode

RECORDING_VERSION = 14
"""Version of the format. To replay an older recording, use the version of sojourn that wrote it."""

MAX_RECORDING_BYTES = 1 << 30
"""Compressed size in bytes at which a recording ends. The file may be larger by the records written last
(``FLUSH_RECORDS``) and the end record."""

FLUSH_RECORDS = 256
"""Number of records written at once (about 20 KiB, 0.2 ms). A killed engine loses fewer records than this."""

_CUT = (
    "the engine was killed, its disk was full, or the file was cut; "
    "allow_unfinished replays it as far as it goes"
)


class RecordingHeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """First line of a recording: what the recorded scheduler was built from, including learned histories."""

    sojourn_recording: int = RECORDING_VERSION
    versions: dict[str, str]
    """Versions of sojourn, the engine and Python."""
    preset_toml: str
    preset_source: str
    """Name of the preset's TOML file, for messages."""
    pool: KVPoolConfig
    limits: SchedulerLimits
    curve: PrefillCurve | None
    """``None``: prefill speed was learned while serving."""
    histories: dict[str, Any]

    @classmethod
    def of(
        cls, state: SchedulerState, *, preset_toml: str, preset_source: str, curve: PrefillCurve | None,
        versions: dict[str, str],
    ) -> RecordingHeader:  # fmt: skip
        """Return the header for a scheduler with this new ``state``. It copies the present histories."""
        return cls(
            versions={"sojourn": version("sojourn"), "python": platform.python_version(), **versions},
            preset_toml=preset_toml,
            preset_source=preset_source,
            pool=state.pool,
            limits=state.limits,
            curve=curve,
            histories=state.histories.snapshot(),
        )


class RecordingFile:
    """Writes one recording to a file. After a failure, the recording ends, and ``warn`` is called once with a
    text. No method raises. A file that exists at the path is renamed to ``PATH.previous``."""

    def __init__(self, path: str | Path, header: RecordingHeader, *, warn: Callable[[str], None]) -> None:
        self.path = Path(path)
        self.is_full = False
        """Whether the maximum size is reached. The next record must then be the last."""
        self.records = -1
        """Number of records written so far, without the header."""
        self._warn = warn
        self._lines: list[bytes] = []
        self._file: gzip.GzipFile | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():  # a device such as /dev/null must not be renamed
                os.replace(self.path, self.path.with_name(self.path.name + ".previous"))
            self._file = gzip.GzipFile(self.path, "wb", compresslevel=1)
        except Exception as error:
            self.give_up(error)
        self.write(header, flush=True)

    @property
    def is_open(self) -> bool:
        """Whether more records can be written."""
        return self._file is not None

    def write(self, record: Any, *, flush: bool = False) -> None:
        """Write a record. It is encoded at once, so the caller may change its parts afterwards."""
        if self._file is None:
            return
        try:
            self._lines.append(encode_record(record))
            self.records += 1
            if flush or len(self._lines) >= FLUSH_RECORDS:
                self._file.write(b"".join(line + b"\n" for line in self._lines))
                self._lines.clear()
                self._file.flush()  # the file can now be read to its last line
                self.is_full = self.path.stat().st_size >= MAX_RECORDING_BYTES
        except Exception as error:
            self.give_up(error)

    def close(self, record: Any) -> None:
        """Write the end record, and no more."""
        self.write(record, flush=True)
        try:
            if self._file is not None:
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
        self._warn(f"recording {self.path} is given up after {max(0, self.records)} records: {what}")


class RecordingError(InputError):
    """A recording cannot be used. The text names file and line, what was found and what was expected."""


class Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One event of a recording, see ``recording``."""

    now: float
    event: Event
    outcome: msgspec.Raw


class EndRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The last record of a recording."""

    ended: str
    totals: msgspec.Raw


class RecordingReader:
    """Reads a recording. Methods raise ``RecordingError`` for a file that is missing, damaged, cut or of
    another version. ``allow_unfinished`` accepts a file without an end record, as left by a killed engine or
    a full disk."""

    def __init__(self, path: str | Path, *, allow_unfinished: bool = False) -> None:
        self.path = Path(path)
        self._allow_unfinished = allow_unfinished
        self._lines = self._read_lines()
        self.header = self._header(next(self._lines, (1, b"null"))[1])

    def records(self) -> Iterator[tuple[int, bytes, Record | EndRecord]]:
        """Yield the remaining records in order: (line number, line, record). Call it once."""
        number, record = 1, None
        for number, line in self._lines:
            if isinstance(record, EndRecord):
                raise self._error(f", line {number}: goes on after its end record")
            kind: type[Record | EndRecord] = EndRecord if line.startswith(b"{") else Record
            record = self._decode(number, line, kind)
            yield number, line, record
        if not isinstance(record, EndRecord) and not self._allow_unfinished:
            raise self._error(f", line {number}: no end record: {_CUT}")

    def _read_lines(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            with gzip.open(self.path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    yield number, line.removesuffix(b"\n")
        except EOFError:
            if not self._allow_unfinished:
                raise self._error(f", after line {number}: the file stops in the middle: {_CUT}") from None
        except (OSError, zlib.error) as error:
            raise self._error(
                f", after line {number}: {getattr(error, 'strerror', None) or error}"
            ) from error

    def _header(self, line: bytes) -> RecordingHeader:
        found = self._decode(1, line, dict[str, Any])
        if found.get("sojourn_recording") == RECORDING_VERSION:
            return self._decode(1, line, RecordingHeader)
        writer = found.get("versions", {}).get("sojourn", "unknown")
        raise self._error(
            f", line 1: recording version {found.get('sojourn_recording')!r}, written by sojourn {writer}; "
            f"expected {RECORDING_VERSION}: run sojourn parity of the version that wrote it"
        )

    def _decode(self, number: int, line: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f", line {number}: {error}") from error

    def _error(self, what: str) -> RecordingError:
        return RecordingError(f"{self.path}{what}")
