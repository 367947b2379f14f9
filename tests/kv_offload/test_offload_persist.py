"""A context is written to disk since its program is about to leave: which way, how far, at whose cost."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.kv_offload.context_persistence import PersistStatus
from sojourn_server.kv_offload.disk_backoff import DiskBackoff
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadJobs, OffloadResults
from sojourn_server.kv_offload.offload_planner import OffloadPlanner
from sojourn_server.kv_offload.tier_limits import TierLimits


def key(number: int) -> bytes:
    return b"%032d" % number


def keys(count: int, start: int = 0) -> list[bytes]:
    return [key(start + number) for number in range(count)]


def placed(chain: Sequence[bytes]) -> dict[bytes, int]:
    return {each: index for index, each in enumerate(chain)}


def planner(host_slots: int = 20, disk_blocks: int = 40, **limits: int) -> OffloadPlanner:
    made = OffloadPlanner(TierLimits(host_slots=host_slots, disk_blocks=disk_blocks, **limits))
    made.take_results(OffloadResults(on_disk=[]))
    return made


def answered(jobs: OffloadJobs, copy_result: CopyResult = CopyResult.MOVED) -> OffloadResults:
    return OffloadResults(
        stored=dict.fromkeys(jobs.stores, CopyResult.MOVED),
        spilled={job: {file.key: copy_result for file in files} for job, files in jobs.spills.items()},
    )


def step(planner: OffloadPlanner) -> OffloadJobs:
    jobs = planner.take_jobs()
    planner.take_results(answered(jobs))
    return jobs


@pytest.mark.parametrize("shared", [False, True], ids=["a disk of its own", "a shared disk"])
def test_after_a_reset_nothing_is_written_until_a_restart(shared: bool) -> None:
    """The store's identity names the weights of the start. A later engine with these would read what other
    weights have computed."""
    kept = planner(host_slots=4, disk_blocks=8, spill_below=1, shared=shared)
    kept.plan_save(key(0), 3)
    (job,) = kept.take_jobs().spills
    kept.forget()
    kept.take_results(OffloadResults(spilled={job: {key(0): CopyResult.MOVED}}))
    assert kept.take_jobs().drops == [key(0)], "it was under way"
    for number in range(1, 5):
        kept.plan_save(key(number), 3)
        kept.write_to_disk([key(number)], RetentionRank.COLD)
        jobs = step(kept)
        assert [*jobs.spills, *jobs.stages, *jobs.drops] == []
    assert kept.persist(keys(5), placed(keys(5))) == PersistStatus(0, 0)
    assert not kept.has_jobs
    assert kept.lookup("r", [key(1)], 0.0) == 1, "host memory goes on"


def test_what_the_device_has_goes_by_host_memory_to_disk() -> None:
    kept, chain = planner(), keys(5)
    assert kept.persist(chain, placed(chain)) == PersistStatus(0, 5)
    assert kept.has_jobs
    assert sum(map(len, step(kept).stores.values())) == 5
    assert sum(map(len, step(kept).spills.values())) == 5
    assert kept.persist(chain, placed(chain)) == PersistStatus(5, 0)
    assert not kept.has_jobs
    jobs = step(kept)
    assert not jobs, "asked again, nothing is done again"
    assert all(each in kept.disk for each in chain)


def test_what_host_memory_has_is_written_from_there() -> None:
    kept, chain = planner(), keys(6)
    for number, each in enumerate(chain[:4]):
        kept.plan_save(each, number)
    step(kept)
    assert kept.persist(chain, {chain[5]: 15}) == PersistStatus(0, 4), (
        "without what comes before it it is no use"
    )
    assert kept.persist(chain, {chain[4]: 14, chain[5]: 15}) == PersistStatus(0, 6)
    step(kept)
    step(kept)
    assert kept.persist(chain, {}) == PersistStatus(6, 0)


def test_an_idle_engine_takes_a_step_for_each_question_and_none_for_the_writing() -> None:
    kept, chain = planner(), keys(4)
    kept.persist(chain, placed(chain))
    while kept.has_jobs:
        jobs = kept.take_jobs()
        kept.take_results(OffloadResults(stored=dict.fromkeys(jobs.stores, CopyResult.MOVED)))
        spilled = answered(jobs)
    assert kept.under_way, "it is being written"
    assert kept.persist(chain, placed(chain)) == PersistStatus(0, 4)
    assert kept.has_jobs
    kept.take_jobs()
    kept.take_results(OffloadResults(spilled=spilled.spilled))
    assert not kept.has_jobs
    assert kept.persist(chain, placed(chain)) == PersistStatus(4, 0)


def test_a_context_larger_than_host_memory_goes_in_parts() -> None:
    kept, chain = planner(host_slots=6, disk_blocks=40), keys(30)
    stored = []
    for _ in range(40):
        stored.append(kept.persist(chain, placed(chain)).stored)
        step(kept)
        step(kept)
    assert stored == sorted(stored)
    assert stored[-1] == 30


def test_a_context_larger_than_the_disk_keeps_its_beginning() -> None:
    kept, chain = planner(host_slots=40, disk_blocks=10), keys(30)
    for _ in range(10):
        told = kept.persist(chain, placed(chain))
        step(kept)
    assert told == PersistStatus(10, 0)
    assert [each in kept.disk for each in chain] == [True] * 10 + [False] * 20
    assert kept.counts["disk_dropped"] == 0


def test_a_full_disk_keeps_the_beginning_that_only_it_has() -> None:
    """The beginning was used longest ago, so it used to make room for the end: lost, and the end useless."""
    kept, chain, others = planner(disk_blocks=8, spill_below=0), keys(6), keys(4, start=100)
    for context in (chain[:4], others):
        while kept.persist(context, placed(context)) != PersistStatus(4, 0):
            step(kept)
    for number in range(40):
        kept.plan_save(key(200 + number), 1)
    assert [kept.host.get(each) for each in chain] == [None] * 6
    for _ in range(4):
        told = kept.persist(chain, {chain[4]: 14, chain[5]: 15})
        step(kept)
    assert told == PersistStatus(6, 0)
    assert [each in kept.disk for each in others] == [True, True, False, False], "the end of another's"


def test_it_takes_no_place_in_host_memory_that_is_kept_for_the_idle() -> None:
    kept, idle, chain = planner(host_slots=6), keys(4, start=100), keys(5)
    for number, each in enumerate(idle):
        kept.plan_save(each, 50 + number, RetentionRank.IDLE)
    step(kept)
    for _ in range(12):
        told = kept.persist(chain, placed(chain))
        step(kept)
        assert all(kept.host.get(each) is not None for each in idle)
    assert told == PersistStatus(5, 0), "in parts"


@pytest.mark.parametrize("rank", [RetentionRank.WORTHLESS, RetentionRank.SPARE, RetentionRank.PLAIN])
def test_what_host_memory_has_keeps_its_place_until_it_is_written(rank: RetentionRank) -> None:
    kept, chain = planner(host_slots=6, spill_below=0), keys(4)
    kept.store(placed(chain).items(), rank)
    step(kept)
    kept.persist(chain, {})
    for number in range(10):
        kept.plan_save(key(200 + number), 1, RetentionRank.PLAIN)
    assert all(kept.host.get(each) is not None for each in chain)
    for _ in range(3):
        step(kept)
    assert kept.persist(chain, {}) == PersistStatus(4, 0)


def test_until_it_is_written_nobody_takes_its_place() -> None:
    kept, chain = planner(host_slots=6, spill_below=0), keys(4)
    kept.persist(chain, placed(chain))
    kept.take_results(answered(kept.take_jobs()))
    for number in range(10):
        kept.plan_save(key(200 + number), 1, RetentionRank.PLAIN)
    assert all(kept.host.get(each) is not None for each in chain)
    step(kept)
    assert kept.persist(chain, {}) == PersistStatus(4, 0)
    for number in range(10):
        kept.plan_save(key(300 + number), 1, RetentionRank.PLAIN)
    assert all(kept.host.get(each) is None for each in chain), "then the disk is the place for it"
    assert kept.persist(chain, {}) == PersistStatus(4, 0)


def test_what_a_request_waits_to_load_stays_wanted() -> None:
    kept, chain = planner(), keys(4)
    kept.store(placed(chain).items(), RetentionRank.WANTED)
    step(kept)
    kept.persist(chain, {})
    step(kept)
    step(kept)
    assert kept.persist(chain, {}) == PersistStatus(4, 0)
    ranks = {entry.rank for each in chain if (entry := kept.host.get(each)) is not None}
    assert ranks == {RetentionRank.WANTED}


@pytest.mark.parametrize("copy_result", [CopyResult.FAILED, CopyResult.FULL, CopyResult.MISSING])
def test_a_disk_that_fails_is_told_of_as_nothing_stored(copy_result: CopyResult) -> None:
    kept, chain = planner(), keys(4)
    for _ in range(10):
        assert kept.persist(chain, placed(chain)).stored == 0
        kept.take_results(answered(kept.take_jobs(), copy_result))
    for _ in range(600):
        kept.persist(chain, placed(chain))
        step(kept)
    assert kept.persist(chain, placed(chain)) == PersistStatus(4, 0), "once it works again"


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_broken_disk_leaves_host_memory_to_others(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be written to it used to fill host memory, and no block of a busy program was saved."""
    monkeypatch.setattr(DiskBackoff, "LONGEST_STEPS", 64)
    kept = planner(host_slots=32, disk_blocks=64, max_spilling=4)
    last: OffloadJobs | None = None

    def broken_step() -> None:
        nonlocal last
        jobs = kept.take_jobs()
        results = answered(jobs, CopyResult.FAILED)
        if how == "hangs":
            last, results.spilled = (jobs if jobs.spills else last), {}
        kept.take_results(results)

    for program in range(8):
        chain = keys(4, start=100 * program)
        kept.persist(chain, placed(chain))
        broken_step()
    for _ in range(500):
        broken_step()
    for start in (1000, 2000):
        assert all(kept.plan_save(each, 0, RetentionRank.PLAIN) for each in keys(32, start=start))
        chain = keys(4, start=start + 500)
        kept.persist(chain, placed(chain))
        broken_step()
    if last is not None:
        kept.take_results(answered(last))
    for _ in range(200):
        kept.persist(chain, placed(chain))
        step(kept)
    assert kept.persist(chain, placed(chain)) == PersistStatus(4, 0), "once it works again"


def test_what_a_disk_took_before_it_was_full_is_told_of_as_stored() -> None:
    kept, chain = planner(), keys(10)
    kept.persist(chain, placed(chain))
    step(kept)
    ((job, files),) = kept.take_jobs().spills.items()
    outcomes = {file.key: CopyResult.MOVED if file.key in chain[:6] else CopyResult.FULL for file in files}
    kept.take_results(OffloadResults(spilled={job: outcomes}))
    assert kept.disk.room == len(kept.disk) == 6
    assert kept.persist(chain, placed(chain)) == PersistStatus(6, 0)


def test_of_nothing_nothing_is_written() -> None:
    kept = planner()
    assert kept.persist([], {}) == PersistStatus(0, 0)
    assert kept.persist(keys(5), {}) == PersistStatus(0, 0)
    assert not kept.has_jobs


def test_without_a_disk_nothing_is_ordered() -> None:
    kept, chain = planner(disk_blocks=0), keys(5)
    assert kept.persist(chain, placed(chain)) == PersistStatus(0, 0)
    assert not kept.has_jobs


@settings(max_examples=150, deadline=None)
@given(
    host_slots=st.integers(1, 12),
    disk_blocks=st.integers(1, 12),
    acts=st.lists(
        st.tuples(st.sampled_from(["persist", "step", "late", "evict", "fail"]), st.integers(0, 9)),
        max_size=40,
    ),
)
def test_what_is_told_is_true_and_everything_comes_to_an_end(
    host_slots: int, disk_blocks: int, acts: list[tuple[str, int]]
) -> None:
    kept, chain = planner(host_slots, disk_blocks, max_spilling=3), keys(10)
    late = OffloadResults()
    for act, number in acts:
        if act == "persist":
            told = kept.persist(chain[: number + 1], placed(chain[: number + 1]))
            assert all(each in kept.disk for each in chain[: told.stored])
            assert told.stored + told.pending <= min(number + 1, disk_blocks)
        elif act == "evict":
            kept.plan_save(key(500 + number), 20 + number)
        elif act == "fail":
            kept.take_results(answered(kept.take_jobs(), CopyResult.FAILED))
        else:
            results = answered(kept.take_jobs())
            kept.take_results(late)
            late = results if act == "late" else OffloadResults()
            if act == "step":
                kept.take_results(results)
        assert len(kept.disk) + len(kept.disk.being_spilled) <= disk_blocks
    kept.take_results(late)
    for _ in range(400):
        told = kept.persist(chain, placed(chain))
        step(kept)
    assert told.pending == 0
    assert told.stored == min(10, disk_blocks)
    assert not any(entry.pins for entry in kept.host)


def test_on_a_real_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from faulty_file_system import FaultyFiles
    from offload_harness import Engine

    files = FaultyFiles()
    engine = Engine(tmp_path, name="a", files=files, blocks=8, slots=8, disk_blocks=8)
    chain = keys(6)
    there = engine.compute(chain)

    def full(name: str, path: Path) -> None:
        if name == "writev" and path.suffix == ".partial":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    files.before = full
    engine.planner.persist(chain, there)
    engine.steps_until(lambda: engine.planner.counts["spill_full"] > 0)
    files.before = lambda name, path: None

    def stored() -> bool:
        return engine.planner.persist(chain, there) == PersistStatus(6, 0)

    engine.steps_until(stored)
    engine.close()
