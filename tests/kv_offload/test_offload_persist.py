"""A context is written to disk since its program is about to leave: which way, how far, at whose cost."""

from __future__ import annotations

from collections.abc import Sequence

from block_contexts import as_context
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.kv_offload.disk_tier import PersistStatus, TierLimits
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadJobs, OffloadResults
from sojourn_server.kv_offload.offload_scheduler import OffloadScheduler


def key(number: int) -> bytes:
    return b"%032d" % number


def keys(count: int, start: int = 0) -> list[bytes]:
    return [key(start + number) for number in range(count)]


def placed(chain: Sequence[bytes]) -> dict[bytes, int]:
    return {each: index for index, each in enumerate(chain)}


def planner(host_slots: int = 20, disk_blocks: int = 40, **limits: int) -> OffloadScheduler:
    return OffloadScheduler(TierLimits(host_slots=host_slots, disk_blocks=disk_blocks, **limits))


def answered(jobs: OffloadJobs, copy_result: CopyResult = CopyResult.MOVED) -> OffloadResults:
    return OffloadResults(
        stored=dict.fromkeys(jobs.stores, CopyResult.MOVED),
        spilled={file.key: copy_result for file in jobs.spills},
    )


def step(planner: OffloadScheduler) -> OffloadJobs:
    jobs = planner.take_jobs()
    planner.take_results(answered(jobs))
    return jobs


def test_after_a_reset_nothing_is_written_or_read_until_a_restart() -> None:
    """The store's identity names the weights of the start. A later engine with these would read what other
    weights have computed."""
    kept = planner(host_slots=4, disk_blocks=8, spill_below=1, min_probe_blocks=1)
    kept.plan_save(key(0), 3)
    assert kept.lookup("early", as_context([key(9)]), 0.0) is None
    jobs = kept.take_jobs()
    kept.forget()
    results = answered(jobs)
    results.probed = dict.fromkeys(jobs.probes, (1, False))
    kept.take_results(results)
    assert len(kept.disk.blocks) == 0
    for number in range(1, 5):
        kept.plan_save(key(number), 3)
        kept.write_to_disk([key(number)], RetentionRank.COLD)
        assert kept.lookup("late", as_context([key(9)]), 0.1) == 0
        jobs = step(kept)
        assert [*jobs.spills, *jobs.stages, *jobs.probes] == []
    assert kept.persist(keys(5), placed(keys(5)), 0.0) == PersistStatus(0, 0)
    assert not kept.has_jobs
    assert kept.lookup("r", as_context([key(1)]), 0.0) == 1, "host memory goes on"


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
            told = kept.persist(chain[: number + 1], placed(chain[: number + 1]), 0.0)
            assert all(each in kept.disk.blocks for each in chain[: told.stored])
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
        assert len(kept.disk.blocks) <= disk_blocks
    kept.take_results(late)
    for _ in range(400):
        told = kept.persist(chain, placed(chain), 0.0)
        step(kept)
    assert told.pending == 0
    assert told.stored == min(10, disk_blocks)
    assert not any(entry.pins for entry in kept.host)
