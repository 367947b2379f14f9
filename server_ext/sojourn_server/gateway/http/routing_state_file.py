"""The file in which a gateway on one machine keeps its routing core's state."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ...metrics.rate_limited_log import RateLimitedLog
from ...routing.affinity_core import AffinityCore
from ...routing.routing_snapshot import RoutingState

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 2.0
"""Seconds between two writes of the state file."""
MAX_RETRY_PAUSE_S = 60.0
"""Maximum seconds between a failed write and the next one."""
ENCODED_PROGRAMS = 2000
"""Number of programs that are encoded at once, which takes about a millisecond."""
MAX_STATE_AGE_S = 3600.0
"""Maximum age, in seconds, of a state file. An older file is ignored, because the engines' KV has probably
changed."""


Result = TypeVar("Result")


class _SavedState(msgspec.Struct):
    """Content of a state file, and the time at which it was written."""

    unix_s: float
    core: RoutingState


def prepare_state_file(path: Path) -> None:
    """Create the folder of a state file, and check that the file can be written. Raises ``OSError``."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(draft)
    os.unlink(name)


class RoutingStateFile:
    """A file with a routing core's state. Each write replaces the whole file. Read and write errors are
    logged, and the gateway goes on. ``clock``: the core's clock. ``wall``: Unix time in seconds."""

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
        self._rate_limited_log = RateLimitedLog(logger, clock)
        self._written = -1
        """Value of the core's ``changes`` at the last successful write; -1: there was no such write."""
        self._taken = 0
        """Number of snapshots begun so far."""
        self._newest = 0
        """Number of the snapshot in the file; 0: this gateway has not written the file."""
        self._lock = threading.Lock()
        """Held during a write."""

    def restore(self) -> int:
        """Restore the core from the file. The core must be new. Return the number of restored programs; 0:
        the file is missing, too old or invalid."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_SavedState)
            age_s = max(0.0, self._wall() - kept.unix_s)
            if age_s > MAX_STATE_AGE_S:
                logger.info("%s is %.0f s old; programs start without homes", self._path, age_s)
                return 0
            self._core.restore(kept.core, self._clock(), age_s)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s cannot be used (%s); programs start without homes", self._path, error)
            return 0
        return len(self._core.programs)

    async def run(self) -> None:
        """Write the file every ``SAVE_INTERVAL_S`` if the core's state changed since the last successful
        write. Write it once more when cancelled. The pause doubles after each failure, up to
        ``MAX_RETRY_PAUSE_S``."""
        pause_s = SAVE_INTERVAL_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                changes = self._core.changes
                if changes == self._written:
                    continue
                if await self._save():
                    self._written, pause_s = changes, SAVE_INTERVAL_S
                else:
                    pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
        finally:
            number, unix_s = self._next_snapshot()
            if not self._write(number, _SavedState(unix_s, self._core.snapshot(self._clock()))):
                logger.warning("%s lacks the newest programs: its last write failed", self._path)

    async def _save(self) -> bool:
        """Take a snapshot and write it. Other tasks can run meanwhile. Return False if the write failed."""
        number, unix_s = self._next_snapshot()
        core, _ = await run_in_steps(self._core.snapshot_steps(self._clock()))
        return await asyncio.to_thread(self._write, number, _SavedState(unix_s, core))

    def _next_snapshot(self) -> tuple[int, float]:
        """Return (number of the snapshot that begins now, Unix time in seconds)."""
        self._taken += 1
        return self._taken, self._wall()

    def _write(self, number: int, state: _SavedState) -> bool:
        """Write a snapshot. Skip it if the file has a newer one: when the gateway stops, its last write may
        overtake an earlier one that waits for a thread. Return False if the write failed. The failure is
        logged."""
        draft = self._path.with_name(f"{self._path.name}.partial")
        with self._lock:
            if number < self._newest:
                return True
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.writelines(_encoded(state))
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(self._path)
                self._newest = number
                return True
            except OSError as error:
                self._rate_limited_log.log(logging.WARNING, "%s cannot be written: %s", self._path, error)
                with contextlib.suppress(OSError):
                    draft.unlink()
                return False


async def run_in_steps(steps: Generator[None, None, Result]) -> tuple[Result, float]:
    """Run a generator to its end. Other tasks of the event loop run between two of its steps. Return (result
    of the generator, seconds that its steps took)."""
    busy_s = 0.0
    while True:
        began_s = time.perf_counter()
        try:
            next(steps)
        except StopIteration as end:
            return end.value, busy_s + time.perf_counter() - began_s
        busy_s += time.perf_counter() - began_s
        await asyncio.sleep(0)


def _encoded(state: _SavedState) -> Iterator[bytes]:
    """Yield ``state`` as JSON, in parts. The event loop cannot run while a part is encoded. So programs are
    encoded in slices of ``ENCODED_PROGRAMS``.

    Replicas and estimates are one further part. ``tenant_statistics`` keeps it below two megabytes.
    """
    core = state.core
    fields = {name: getattr(core, name) for name in core.__struct_fields__ if name != "programs"}
    yield msgspec.json.encode({"unix_s": state.unix_s, "core": fields}).removesuffix(b"}}") + b',"programs":['
    for start in range(0, len(core.programs), ENCODED_PROGRAMS):
        part = msgspec.json.encode(core.programs[start : start + ENCODED_PROGRAMS])
        yield (b"," if start else b"") + part[1:-1]
    yield b"]}}"
