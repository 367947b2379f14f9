"""The copy jobs of one engine step, and the results of earlier jobs.

The ``OffloadScheduler``, in the engine scheduler's process, writes ``OffloadJobs``. The worker, in the
model's process, carries them out in the order of the fields below and answers with ``OffloadResults``. Block
ids are the engine's. Slots of host memory are numbered from 0. A key is a block's chain hash, with a suffix
for its KV cache group if there are several.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

BlockKey = bytes


class BlockCopy(NamedTuple):
    """A copy of one block between the device and host memory."""

    block_id: int
    slot: int


class FileCopy(NamedTuple):
    """A copy of one block between host memory and disk."""

    slot: int
    key: BlockKey


class CopyResult(Enum):
    """The result of one block's copy, from best to worst."""

    MOVED = "moved"
    FULL = "full"
    """The destination has no free space."""
    MISSING = "missing"
    """The source does not have the block."""
    CORRUPT = "corrupt"
    """The source has the block, but with wrong content."""
    FAILED = "failed"
    """The device, the memory or the disk reported an error."""


@dataclass(slots=True)
class OffloadJobs:
    """The jobs of one step. The worker reports one result for each job number, one for each request in
    ``loads``, and one for each key in ``spills`` and ``stages``. "Host" is host memory."""

    settles: bool = False
    """Whether the worker must first wait for all loads of earlier steps: one was cancelled."""
    awaited: dict[int, list[BlockCopy]] = field(default_factory=dict)
    """Number of a store job of an earlier step → its copies. They must end before this step, which overwrites
    their blocks or uses their slots. If the store failed, the worker repeats it."""
    saves: list[BlockCopy] = field(default_factory=list)
    """Copies from device to host, in this order, before this step's forward pass overwrites the blocks."""
    loads: dict[str, list[BlockCopy]] = field(default_factory=dict)
    """Request id → copies from host to device. They begin after the saves and run in parallel with this step
    and later ones. vLLM runs a request once the worker has reported its load."""
    rejected: dict[str, list[int]] = field(default_factory=dict)
    """Request id → ids of blocks that it waits for, to be reported as not filled."""
    stores: dict[int, list[BlockCopy]] = field(default_factory=dict)
    """Job number → copies from device to host while the model computes."""
    spills: list[FileCopy] = field(default_factory=list)
    """Copies from host to disk. A key that has no result yet is not ordered again; as in ``stages``."""
    stages: list[FileCopy] = field(default_factory=list)
    """Copies from disk to host."""
    probes: dict[int, Sequence[BlockKey]] = field(default_factory=dict)
    """Job number → keys, in context order, to look for on disk."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(slots=True)
class OffloadResults:
    """Results since the last report, of one worker or of all workers combined (``WorkerReports``)."""

    stored: dict[int, CopyResult] = field(default_factory=dict)
    """Number of a store job that has ended → its result."""
    spilled: dict[BlockKey, CopyResult] = field(default_factory=dict)
    """Key → result of its copy from host to disk, in the order of the copies."""
    staged: dict[BlockKey, CopyResult] = field(default_factory=dict)
    """Key → result of its copy from disk to host."""
    probed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Job number → number of leading keys that the disk has, and whether it lacks the next one. If not, all
    are there or the time ran out."""
    seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    """Direction (one of ``TRANSFER_DIRECTIONS``) → seconds of copying since the last report."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """Direction → bytes copied since the last report."""
    waited_s: float = 0.0
    """Seconds for which the thread that runs the model waited for copies before a forward pass, since the
    last report. Waits of the device itself are not counted."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


def _worst(results: Iterable[CopyResult]) -> CopyResult:
    return max(results, key=list(CopyResult).index)


_COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "stored": _worst,
    "spilled": _worst,
    "staged": _worst,
    "probed": min,
}
"""Field of ``OffloadResults`` with answers by job or key → how the workers' answers are combined."""


TRANSFER_DIRECTIONS = ("to_host", "to_device", "to_disk", "from_disk")
"""Names of the directions in which a worker copies blocks. Each direction has a thread of the same name."""

SPEED_SAMPLES = 16
"""The speed of a direction is computed from this many of its newest reports. They are enough to average out
one slow copy, and few enough to notice soon that a link has become slow."""

SPEED_MAX_AGE_S = 30.0
"""Seconds after which a report no longer counts for its direction's speed. A slow direction is used little.
After its reports have expired, its speed is unknown. Then the direction is used again, and so measured."""


class WorkerReports:
    """Combines the reports of an engine's workers, which may arrive in different steps. Keeps their totals,
    and the recent speed of each direction.

    Each worker copies its own part of every block. A job has ended when all workers have reported it. Its
    result is the worst: a block counts as copied only if all workers have copied their parts.
    """

    def __init__(self, ranks: int) -> None:
        """``ranks``: number of workers that report."""
        self._ranks = ranks
        self._answers: defaultdict[tuple[str, int | BlockKey], list[Any]] = defaultdict(list)
        """(field of ``OffloadResults``, job number or key) → answers so far."""
        self._total = OffloadResults()
        self._newest: dict[str, deque[tuple[float, float, int]]] = {
            lane: deque(maxlen=SPEED_SAMPLES) for lane in TRANSFER_DIRECTIONS
        }
        """Direction → (time, seconds, bytes) of each of its newest reports."""

    def add(self, reports: Iterable[OffloadResults], now: float) -> OffloadResults:
        """Add the reports of one step, at most one from each worker. Return the results of the jobs that all
        workers have reported now, with the slowest one's ``seconds`` and ``waited_s``, and all bytes.
        ``now``: seconds on the clock that ``seconds_a_byte`` uses too."""
        combined, total = OffloadResults(), self._total
        for report in reports:
            for name, combine in _COMBINED.items():
                for job, answer in getattr(report, name).items():
                    answers = self._answers[name, job]
                    answers.append(answer)
                    if len(answers) == self._ranks:
                        getattr(combined, name)[job] = combine(self._answers.pop((name, job)))
            for lane, seconds in report.seconds.items():
                combined.seconds[lane] = max(combined.seconds[lane], seconds)
            combined.moved_bytes.update(report.moved_bytes)
            combined.waited_s = max(combined.waited_s, report.waited_s)
        for lane, seconds in combined.seconds.items():
            total.seconds[lane] += seconds
            self._newest[lane].append((now, seconds, combined.moved_bytes[lane]))
        total.moved_bytes.update(combined.moved_bytes)
        total.waited_s += combined.waited_s
        return combined

    def seconds_a_byte(self, lane: str, now: float) -> float | None:
        """Return the recent seconds per byte in the direction ``lane``; ``None`` without a recent copy."""
        newest = [report for report in self._newest[lane] if now - report[0] <= SPEED_MAX_AGE_S]
        took_s, moved = sum(seconds for _, seconds, _ in newest), sum(size for _, _, size in newest)
        return took_s / moved if moved and took_s > 0 else None

    def totals(self) -> dict[str, Any]:
        """Return totals since the engine started, by name:

        ``moved_bytes``   direction → bytes copied
        ``seconds``       direction → seconds of copying
        ``waited_s``      seconds for which forward passes waited for copies to or from the device
        ``overlapped``    share of the time of these copies in which no forward pass waited; ``None``
                          before the first copy
        """
        seconds, moved_bytes, waited_s = self._total.seconds, self._total.moved_bytes, self._total.waited_s
        copied_s = seconds["to_host"] + seconds["to_device"]
        return {
            "moved_bytes": {lane: moved_bytes[lane] for lane in TRANSFER_DIRECTIONS},
            "seconds": {lane: round(seconds[lane], 6) for lane in TRANSFER_DIRECTIONS},
            "waited_s": round(waited_s, 6),
            "overlapped": round(1.0 - min(1.0, waited_s / copied_s), 4) if copied_s else None,
        }
