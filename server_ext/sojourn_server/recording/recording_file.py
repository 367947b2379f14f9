"""Writing a tape while the engine runs: buffered, bounded, and never the engine's problem."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from .recording_header import RecordingHeader

MAX_RECORDING_BYTES = 1 << 30
"""Longest tape, compressed. The end record may go beyond it by a few hundred bytes."""

FLUSH_RECORDS = 256
"""Records written at once: what an engine that is killed leaves untold. About 20 KiB, 0.2 ms."""

_GZIP = 31
"""``wbits`` of zlib for a gzip member with a window of 32 KiB."""

encode_record = msgspec.json.Encoder().encode


class RecordingFile:
    """One tape, written as records come. No failure is raised: a tape is worth a warning, not an engine.

    An earlier tape of the same path is kept as ``PATH.previous``. ``warn`` is
    called once, where the tape has to be given up.
    """

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
        """It has reached its bound: the next record must be the last."""
        self.records = 0
        """Records written, the header not counted."""
        self._warn = warn
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        self._file: BinaryIO | None = None
        try:
            line = encode_record(header)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():  # a device is not to be moved
                os.replace(self.path, self.path.with_name(self.path.name + ".previous"))
            self._file = self.path.open("wb")
            self._lines.append(line)
            self._flush()
        except Exception as error:
            self.give_up(error)

    @property
    def open(self) -> bool:
        """Whether records are still taken."""
        return self._file is not None

    def write(self, record: tuple[Any, ...]) -> None:
        """Take in a record; nothing of it is referred to afterwards."""
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
        """Write out all that was taken in; the tape takes no more."""
        if self._file is None:
            return
        try:
            self._flush(zlib.Z_FINISH)
            self._file.close()
            self._file = None
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Say what went wrong and take no more. What is written can still be read, but has no end."""
        file, self._file = self._file, None
        self._lines.clear()
        if file is not None:
            with contextlib.suppress(OSError):  # closing tries once more to write what could not be written
                file.close()
        what = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self._warn(f"tape {self.path} is given up after {self.records} records: {what}")

    def _flush(self, how: int = zlib.Z_SYNC_FLUSH) -> None:
        assert self._file is not None
        text = b"".join(line + b"\n" for line in self._lines)
        self._lines.clear()
        # What is flushed can be read to its last line, even if nothing follows.
        data = self._packer.compress(text) + self._packer.flush(how)
        self._file.write(data)
        self._file.flush()
        self._bytes += len(data)
        self.full = self._bytes >= self._max_bytes
