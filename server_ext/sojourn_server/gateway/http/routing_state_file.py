"""Keeps programs' homes and statistics over a restart of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...routing.affinity_core import AffinityCore
from ...routing.routing_state import RoutingState

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 2.0
MAX_STATE_AGE_S = 3600.0
"""An older state does not tell what engines still have."""


class _SavedState(msgspec.Struct):
    unix_s: float
    core: RoutingState


def prepare_state_file(path: Path) -> None:
    """Create the folder of a file, and check that the file can be written. Raises ``OSError``."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(draft)
    os.unlink(name)


class RoutingStateFile:
    """A file that is replaced as a whole. Read and write errors are logged, and do not stop the gateway."""

    def __init__(
        self,
        path: Path,
        core: AffinityCore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._core = core
        self._clock = clock
        self._wall = wall
        self._written = -1
        """The core's ``changes`` that the file has."""

    def restore(self) -> int:
        """Restore a new core from the file; returns the number of programs."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_SavedState)
            age_s = max(0.0, self._wall() - kept.unix_s)
            if age_s > MAX_STATE_AGE_S:
                logger.info("%s is %.0f s old; programs start without homes", self._path, age_s)
                return 0
            self._core.restore(kept.core, self._clock(), age_s)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used (%s); programs start without homes", self._path, error)
            return 0
        return len(self._core.programs)

    async def run(self) -> None:
        """Write the file every two seconds with changes, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_INTERVAL_S)
                changes = self._core.changes
                if changes != self._written:
                    text = self._text()
                    await asyncio.to_thread(self._write, text, "partial")
                    self._written = changes
        finally:
            # Another name: a thread may still be writing the first one.
            self._write(self._text(), "last")

    def _text(self) -> bytes:
        return msgspec.json.encode(_SavedState(self._wall(), self._core.snapshot(self._clock())))

    def _write(self, text: bytes, name: str) -> None:
        draft = self._path.with_name(f"{self._path.name}.{name}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)
            with contextlib.suppress(OSError):
                draft.unlink()
