"""Where programs are at home and what was learned of them, over a restart of the gateway."""

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

from ..core.core import RoutingCore
from ..core.state import CoreState

logger = logging.getLogger(__name__)

EVERY_S = 2.0
MOST_AGE_S = 3600.0
"""A state that is older says nothing of what engines still have."""


class _Kept(msgspec.Struct):
    unix_s: float
    core: CoreState


def make_place(path: Path) -> None:
    """Make the folder of a file that is to be written later, and see that it can be. Raises ``OSError``."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(draft)
    os.unlink(name)


class KeptState:
    """A file that is replaced as a whole. That it cannot be read or written is logged, and stops nobody."""

    def __init__(
        self,
        path: Path,
        core: RoutingCore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._core = core
        self._clock = clock
        self._wall = wall
        self._written = -1
        """Changes of the core that the file has."""

    def restore(self) -> int:
        """Have a new core go on from the file; returns how many programs it knows by that."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
            age_s = max(0.0, self._wall() - kept.unix_s)
            if age_s > MOST_AGE_S:
                logger.info("%s is %.0f s old; programs begin without homes", self._path, age_s)
                return 0
            self._core.restore(kept.core, self._clock(), age_s)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used (%s); programs begin without homes", self._path, error)
            return 0
        return len(self._core.programs)

    async def run(self) -> None:
        """Write it every two seconds in which something changed, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                changes = self._core.changes
                if changes != self._written:
                    text = self._text()
                    await asyncio.to_thread(self._write, text, "partial")
                    self._written = changes
        finally:
            # Another name: a thread may still be writing the other one.
            self._write(self._text(), "last")

    def _text(self) -> bytes:
        return msgspec.json.encode(_Kept(self._wall(), self._core.snapshot(self._clock())))

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
