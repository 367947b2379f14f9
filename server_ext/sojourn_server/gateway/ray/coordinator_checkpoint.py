"""Options of a coordinator, and its checkpoint file. The next coordinator restores the state from this file.
Each write replaces the whole file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...metrics.rate_limited_log import RateLimitedLog
from ...routing.routing_snapshot import RoutingState
from ..http.routing_state_file import run_in_steps
from .coordinator_messages import ReplicaInfo
from .engine_autoscaler import AutoscaleLimits

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the format of checkpoints."""

MAX_COPY_TIME_FRACTION = 0.02
"""Maximum fraction of the event loop's time that copies of the state for checkpoints may take."""
CHECKPOINT_S = 1.0
"""Default minimum seconds between two checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """Options of a coordinator that an operator sets."""

    checkpoint: Path | None = None
    """File of the checkpoint. ``None``: no checkpoint is written, and a new coordinator learns its state only
    from the reports of gateways and engines."""
    checkpoint_s: float = CHECKPOINT_S
    autoscale: AutoscaleLimits = field(default_factory=AutoscaleLimits)


class CoordinatorCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one coordinator that the next one needs."""

    version: int = VERSION
    epoch: int
    """Epoch of the coordinator."""
    unix_s: float
    """Unix time, in seconds, at which ``core`` was copied."""
    core: RoutingState | None
    """State of the routing core. ``None``: the coordinator has just started, without an earlier state, or its
    engines are prefill and decode engines."""
    engines: dict[str, list[ReplicaInfo]]
    """Replicas of each engine, by engine id."""


class _CheckpointHeader(msgspec.Struct):
    """The fields that checkpoints of all versions have."""

    version: int
    epoch: int


def read_checkpoint(path: Path) -> CoordinatorCheckpoint | None:
    """Read a checkpoint. Return ``None`` if there is no file, or if it cannot be read. A file that cannot be
    read is logged."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=CoordinatorCheckpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("checkpoint %s cannot be used: %s", path, error)
        return None


def read_checkpoint_epoch(path: Path) -> int:
    """Return the epoch of the coordinator that wrote the file; 0: there is no file, or it cannot be read."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_CheckpointHeader).epoch
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


def write_checkpoint(path: Path, checkpoint: CoordinatorCheckpoint) -> int:
    """Write ``checkpoint`` to the file. Do not write it if a coordinator with a higher epoch wrote the file.
    Return the epoch of the checkpoint that is in the file afterwards. Raises ``OSError``."""
    found = read_checkpoint_epoch(path)
    if found > checkpoint.epoch:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{checkpoint.epoch}.tmp")
    try:
        written = msgspec.msgpack.encode(checkpoint)
        draft.unlink(missing_ok=True)  # a leftover may have other permissions
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(written)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return checkpoint.epoch


class CheckpointWriter:
    """Writes one coordinator's checkpoints when its state has changed."""

    def __init__(
        self,
        path: Path,
        pause_s: float,
        copy: Callable[[], Generator[None, None, CoordinatorCheckpoint]],
        on_epoch: Callable[[int], object],
    ) -> None:
        """``copy``: function that copies the present state in steps and returns a checkpoint. Other tasks run
        between two steps. ``pause_s``: minimum seconds between two writes. ``on_epoch``: function that gets
        the epoch of the checkpoint in the file, after each write and regularly between writes."""
        self._path = path
        self._pause_s = pause_s
        self._copy = copy
        self._on_epoch = on_epoch
        self._rate_limited_log = RateLimitedLog(logger)
        self._changes = 0
        self._written = -1
        """Value of ``_changes`` in the last checkpoint that was written; -1: none was written."""

    def mark_changed(self) -> None:
        """Record that the state has changed."""
        self._changes += 1

    @property
    def is_current(self) -> bool:
        """Whether the file has all changes of the state."""
        return self._written == self._changes

    def write(self, checkpoint: CoordinatorCheckpoint) -> bool:
        """Write a checkpoint now, unless a later coordinator has written the file. Return False if the write
        failed. The failure is logged."""
        try:
            self._on_epoch(write_checkpoint(self._path, checkpoint))
        except OSError as error:
            logger.error("checkpoint %s cannot be written: %s", self._path, error)
            return False
        return True

    async def run(self) -> None:
        """Write checkpoints while the state changes, until cancelled."""
        pause_s = self._pause_s
        while True:
            await asyncio.sleep(pause_s)
            changes = self._changes
            if changes == self._written:
                # Nothing to write, but a later coordinator may have written.
                self._on_epoch(await asyncio.to_thread(read_checkpoint_epoch, self._path))
                continue
            try:
                checkpoint, took_s = await run_in_steps(self._copy())
                pause_s = max(self._pause_s, took_s / MAX_COPY_TIME_FRACTION)
                if await asyncio.to_thread(self.write, checkpoint):
                    self._written = changes
            except Exception:
                # The value that cannot be written, such as a number beyond 64 bits, may be gone next time.
                self._rate_limited_log.log(
                    logging.ERROR, "no checkpoint can be made; please report this", exc_info=True
                )
