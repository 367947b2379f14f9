"""Random life of the tiers: whatever is loaded is what was asked for, and no slot is lost or used twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from random_clients import (
    DEVICE_BLOCKS,
    DISK_BLOCKS,
    HOST_SLOTS,
    Loading,
    RandomClients,
)
from sojourn_server.kv_offload.disk_tier import TierLimits
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadJobs, OffloadResults
from sojourn_server.kv_offload.offload_scheduler import OffloadScheduler

Content = tuple[bytes, int]
"""Whose hash it has, and by which weights it was computed."""
GARBAGE: Content = (b"garbage", -1)


class FakeMover:
    """Carries out orders as the real one promises to, with background copies as slow as a test likes."""

    def __init__(self, device: list[Content], disk: dict[bytes, Content]) -> None:
        self.device = device
        self.host: list[Content] = [GARBAGE] * HOST_SLOTS
        self.disk = disk
        self.stores: dict[int, list[Any]] = {}
        self.loads: dict[str, list[Any]] = {}
        self.file_jobs: list[tuple[str, int, Any]] = []
        """Of both disk lanes, in their order."""
        self.fault: CopyResult | None = None
        self.results = OffloadResults()

    def before_forward(self, jobs: OffloadJobs) -> None:
        for job, copies in jobs.awaited.items():
            self.stores.pop(job, None)
            self.results.stored.pop(job, None)
            for copy in copies:
                self.host[copy.slot] = self.device[copy.block_id]
        for copy in jobs.saves:
            self.host[copy.slot] = self.device[copy.block_id]
        self.loads.update(jobs.loads)
        self.stores.update(jobs.stores)
        for copies in jobs.stores.values():
            for copy in copies:
                self.host[copy.slot] = GARBAGE  # half written
        for job, keys in jobs.probes.items():
            self.file_jobs.append(("probe", job, keys))
        for file in jobs.spills:
            self.file_jobs.append(("spill", 0, file))
        for file in jobs.stages:
            self.host[file.slot] = GARBAGE
            self.file_jobs.append(("stage", 0, file))

    def finish_load(self, request_id: str) -> set[int]:
        """As late as it may be: whatever else used the slot meanwhile is what arrives."""
        copies = self.loads.pop(request_id)
        for copy in copies:
            self.device[copy.block_id] = self.host[copy.slot]
        return {copies[-1].block_id} if self.fault is CopyResult.FAILED else set()

    def finish_store(self, job: int) -> None:
        copies = self.stores.pop(job)
        if self.fault is CopyResult.FAILED:
            self.results.stored[job] = CopyResult.FAILED
            return
        for copy in copies:
            self.host[copy.slot] = self.device[copy.block_id]
        self.results.stored[job] = CopyResult.MOVED

    def finish_file_job(self) -> None:
        kind, job, files = self.file_jobs.pop(0)
        if kind == "probe":
            here = [key in self.disk for key in files]
            found = [*here, False].index(False) if self.fault is None else 0
            self.results.probed[job] = found, self.fault is None and found < len(files)
            return
        file = files
        if self.fault is not None and (kind == "spill" or self.fault is not CopyResult.FULL):
            copy_result = self.fault
        elif kind == "spill" and self.host[file.slot][0] != file.key:
            copy_result = CopyResult.FAILED  # the mover knows that it could not fill the slot
        elif kind == "spill":
            self.disk.setdefault(file.key, self.host[file.slot])
            if len(self.disk) > DISK_BLOCKS:
                del self.disk[next(iter(self.disk))]
            copy_result = CopyResult.MOVED
        elif file.key in self.disk:
            self.host[file.slot] = self.disk[file.key]
            copy_result = CopyResult.MOVED
        else:
            copy_result = CopyResult.MISSING
        (self.results.spilled if kind == "spill" else self.results.staged)[file.key] = copy_result

    def take_results(self) -> OffloadResults:
        results, self.results = self.results, OffloadResults()
        return results


class TierLife(RandomClients):
    """A device that caches chains of blocks, and loses some; requests that ask for chains."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 100.0
        self.weights = 0
        self.device: list[Content] = [GARBAGE] * DEVICE_BLOCKS
        self.cached: dict[bytes, int] = {}
        """Which block of the device has the content of a key."""
        self.waiting: dict[str, int] = {}
        """Requests the disk is read for, and the chain each wants."""
        self.requests = 0
        self.taken: set[int] = set()
        self.loading: dict[str, Loading] = {}
        self.done: Counter[str] = Counter()
        self.disk: dict[bytes, Content] = {}
        self._start()

    def _start(self) -> None:
        self.planner = OffloadScheduler(
            TierLimits(host_slots=HOST_SLOTS, disk_blocks=DISK_BLOCKS, max_spilling=3, min_probe_blocks=2)
        )
        self.mover = FakeMover(self.device, self.disk)

    def _now(self) -> float:
        return self.now

    def _step(self, writes: dict[int, bytes]) -> None:
        """Plan, carry out, forward pass, results."""
        self.taken.clear()
        self.mover.before_forward(self.planner.take_jobs())
        for block_id, key in writes.items():
            self.device[block_id] = (key, self.weights)
        self.planner.take_results(self.mover.take_results())

    def _check(self, block_id: int, key: bytes) -> None:
        assert self.device[block_id] == (key, self.weights), "a wrong token would follow"

    def a_load_ends(self) -> None:
        if self.mover.loads:
            request_id = self.draw.choice(sorted(self.mover.loads))
            self._arrived(request_id, self.mover.finish_load(request_id))

    def a_background_copy_ends(self) -> None:
        if self.mover.stores and self.draw.random() < 0.5:
            self.mover.finish_store(self.draw.choice(sorted(self.mover.stores)))
        elif self.mover.file_jobs:
            self.mover.finish_file_job()

    def time_passes(self) -> None:
        self.now += self.draw.choice([0.1, 5.0, 60.0, -30.0])

    def another_engine_uses_the_disk(self) -> None:
        """It deletes a block, or writes one that the first weights have computed."""
        key = self.draw.choice(self._chain())
        if self.disk.pop(key, None) is None and len(self.disk) < DISK_BLOCKS:
            self.disk[key] = (key, 0)

    def the_disk_fails(self) -> None:
        self.mover.fault = self.draw.choice(
            [CopyResult.FULL, CopyResult.CORRUPT, CopyResult.FAILED, CopyResult.MISSING]
        )

    def the_disk_works(self) -> None:
        self.mover.fault = None

    def new_weights(self) -> None:
        """What was computed by the old ones must not be found any more, wherever it is. The engine resets
        nothing while a request holds blocks."""
        while self.mover.loads:
            self.a_load_ends()
        self.weights += 1
        self.cached.clear()
        self.waiting.clear()
        self.planner.forget()

    def restart(self) -> None:
        """The engine is killed: memory is gone, files are there, and orders under way are not. It starts with
        the first weights again, which the directory's identity names, whichever it had last."""
        if self.draw.random() < 0.3:
            self.disk.clear()
        self.weights = 0
        self.device[:] = [GARBAGE] * DEVICE_BLOCKS
        self.cached.clear()
        self.waiting.clear()
        self.loading.clear()
        self._start()

    # -- what must hold after each

    def the_slots_add_up(self) -> None:
        host = self.planner.host
        slots = [*(entry.slot for entry in host), *host._free]
        assert len(set(slots)) == len(slots) <= HOST_SLOTS
        for key, entry in host._entries.items():
            assert entry.key == key
            assert not entry.removal_pending
        idle = {id(entry) for members in host._idle.values() for entry in members.values()}
        assert idle == {id(e) for e in host if not e.pins and e.job is None}
        dirty = {id(entry) for members in host._dirty.values() for entry in members.values()}
        assert dirty == {id(e) for e in host if not e.pins and e.job is None and e.dirty}
        assert not any(e.dirty and e.key in self.planner.disk.blocks for e in host)

    def pins_are_those_of_somebody(self) -> None:
        planner = self.planner
        expected: Counter[int] = Counter()
        found = [lookup.found for lookup in planner._looked_up.values()]
        loads = [load.entries for load in planner.loads.values()]
        for entries in [*found, *loads, planner.disk._spilling.values()]:
            expected.update(entry.slot for entry in entries)
        for waiting in planner.disk._waits.values():
            expected.update(entry.slot for entry in waiting.entries)
        for entry in planner.host:
            assert entry.pins == expected[entry.slot]

    def every_job_is_still_to_come_or_was_answered(self) -> None:
        planner, mover = self.planner, self.mover
        on_their_way = {*planner._jobs.stores, *mover.stores, *mover.results.stored}
        assert planner._storing.keys() <= on_their_way
        assert planner.loads.keys() == self.loading.keys() == mover.loads.keys()
        assert planner._loading.keys() == {key for load in self.loading.values() for key in load.keys}
        files = {(kind, file.key) for kind, _, file in mover.file_jobs if kind != "probe"}
        for kind, begun, jobs, results in (
            ("spill", planner.disk._spilling, planner._jobs.spills, mover.results.spilled),
            ("stage", planner.disk._staging, planner._jobs.stages, mover.results.staged),
        ):
            sent = {key for other, key in files if other == kind}
            assert begun.keys() == {*(file.key for file in jobs), *sent, *results}

    def it_comes_to_rest(self) -> None:
        self.mover.fault = None
        for _ in range(50):
            while self.mover.file_jobs:
                self.mover.finish_file_job()
            for job in list(self.mover.stores):
                self.mover.finish_store(job)
            while self.mover.loads:
                self.a_load_ends()
            self._step({})
        for request_id in list(self.waiting):
            self.planner.abandon(request_id)
        self._step({})
        assert not any(entry.pins for entry in self.planner.host)
        assert len(self.planner.host) + self.planner.host.free == HOST_SLOTS, "no slot is lost"
        assert self.planner.under_way == 0
        assert len(self.planner.disk.blocks) <= DISK_BLOCKS


OFTEN = {
    TierLife.turns: 40,
    TierLife.ask_again: 12,
    TierLife.a_background_copy_ends: 14,
    TierLife.a_load_ends: 20,
    TierLife.store_ahead: 10,
    TierLife.step: 4,
    TierLife.fetch_ahead: 3,
    TierLife.relabel: 3,
    TierLife.a_client_goes: 2,
    TierLife.time_passes: 12,
    TierLife.another_engine_uses_the_disk: 16,
    TierLife.the_disk_fails: 1,
    TierLife.the_disk_works: 3,
    TierLife.new_weights: 0.1,
    TierLife.restart: 0.8,
}
"""How often each operation is drawn."""


HAPPENS = (
    *("kept", "saved", "stored", "loaded", "spilled", "staged", "stage_missing", "gave_up", "dropped"),
    *("invalid", "shared a load"),
)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_what_is_loaded_is_right(seed: int) -> None:
    life = TierLife(seed)
    done: Counter[str] = Counter()
    for operations in range(20_000):
        if operations > 6000 and all(done[what] or life.done[what] for what in HAPPENS):
            break
        (operation,) = life.draw.choices(list(OFTEN), list(OFTEN.values()))
        operation(life)
        done.update(life.planner.counts)
        life.the_slots_add_up()
        life.pins_are_those_of_somebody()
        life.every_job_is_still_to_come_or_was_answered()
    life.it_comes_to_rest()
    done.update(life.done)
    for what in HAPPENS:
        assert done[what], f"nothing was ever {what}: the life is too quiet to tell anything"
