"""What a coordinator leaves to the next one, in a file that is replaced as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..core.state import CoreState
from .messages import Place
from .seldom import Seldom

logger = logging.getLogger(__name__)

VERSION = 1

SHARE = 0.02
"""Of the event loop's time that copies for checkpoints may take."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One coordinator's, as it was then."""

    version: int = VERSION
    epoch: int
    unix_s: float
    core: CoreState | None
    """``None``: this coordinator has only just begun."""
    engines: dict[str, list[Place]]
    """Replicas by engine."""


class _Head(msgspec.Struct):
    version: int
    epoch: int


def read_checkpoint(path: Path) -> Checkpoint | None:
    """``None``: there is none, or none that can be read, which is logged."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Checkpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("checkpoint %s cannot be used: %s", path, error)
        return None


def read_epoch(path: Path) -> int:
    """Of whoever wrote it last; 0: nobody, or it cannot be read."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Head).epoch
    except (OSError, msgspec.DecodeError):
        return 0


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> int:
    """Replace it, unless a later coordinator has; returns the epoch of whoever's it is now.

    Raises ``OSError`` where it cannot be written.
    """
    found = read_epoch(path)
    if found > checkpoint.epoch:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{checkpoint.epoch}.tmp")
    try:
        written = msgspec.msgpack.encode(checkpoint)
        draft.unlink(missing_ok=True)  # one that is left over may be anybody's to read
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(written)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return checkpoint.epoch


class Checkpoints:
    """Those that one coordinator writes while it lives; it says when there is something new to write."""

    def __init__(
        self,
        path: Path,
        pause_s: float,
        copy: Callable[[], Checkpoint],
        on_epoch: Callable[[int], object],
    ) -> None:
        """``copy`` makes the next one. ``on_epoch`` hears whose the file is, whenever that was seen."""
        self._path = path
        self._pause_s = pause_s
        self._copy = copy
        self._on_epoch = on_epoch
        self._seldom = Seldom(logger)
        self._changes = 0
        self._written = -1
        """Changes that the newest checkpoint is of."""

    def changed(self) -> None:
        """Something happened that the file does not know."""
        self._changes += 1

    @property
    def is_current(self) -> bool:
        """Everything that happened is in the file."""
        return self._written == self._changes

    def write(self, checkpoint: Checkpoint) -> bool:
        """Now; False: it cannot be written, which is logged."""
        try:
            self._on_epoch(write_checkpoint(self._path, checkpoint))
        except OSError as error:
            logger.error("checkpoint %s cannot be written: %s", self._path, error)
            return False
        return True

    async def run(self) -> None:
        """Write what is new, in pauses, until cancelled."""
        pause_s = self._pause_s
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.perf_counter()
            changes = self._changes
            if changes == self._written:
                # Nothing to write, but somebody else may have.
                self._on_epoch(await asyncio.to_thread(read_epoch, self._path))
                continue
            try:
                checkpoint = self._copy()
                took_s = time.perf_counter() - began_s
                pause_s = max(self._pause_s, took_s / SHARE)
                if await asyncio.to_thread(self.write, checkpoint):
                    self._written = changes
            except Exception:
                # What cannot be written now, such as a number beyond 64 bits, may be over by the next one.
                self._seldom.say(
                    logging.ERROR, "no checkpoint can be made; please report this", exc_info=True
                )
