"""The planner, rule by rule; its random lives are beside it."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import takewhile

import pytest
from block_contexts import as_context
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.kv_offload.context_keys import ContextKeys
from sojourn_server.kv_offload.disk_tier import TierLimits
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadJobs, OffloadResults
from sojourn_server.kv_offload.offload_scheduler import OffloadScheduler


def key(number: int) -> bytes:
    return b"%032d" % number


def find(planner: OffloadScheduler, *contexts: list[bytes]) -> None:
    """The store is asked for these and has them."""
    for context in contexts:
        assert planner.lookup("finder", as_context(context), -100.0) is None
        [job] = planner.take_jobs().probes
        planner.take_results(OffloadResults(probed={job: (len(context), False)}))
        planner.abandon("finder")


def stored(planner: OffloadScheduler, keys: list[bytes], rank: int = RetentionRank.PLAIN) -> None:
    """Copied ahead of need, in a step."""
    planner.store([(each, 1) for each in keys], rank)
    planner.take_results(OffloadResults(stored=dict.fromkeys(planner.take_jobs().stores, CopyResult.MOVED)))


def in_host(planner: OffloadScheduler, keys: list[bytes]) -> list[bool]:
    return [planner.host.get(each) is not None for each in keys]


def keys(start: int, count: int) -> list[bytes]:
    return [key(number) for number in range(start, start + count)]


def test_of_what_was_stored_ahead_the_end_is_reused_first() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=100))
    context = keys(0, 80)
    stored(planner, context)
    for number in range(1000, 1050):
        planner.plan_save(key(number), 2)
    assert in_host(planner, context) == [True] * 50 + [False] * 30


def test_a_look_up_of_an_earlier_step_is_made_anew_unless_it_was_the_latest() -> None:
    """Between two looks at a request, host memory may have got more of its context."""
    planner = OffloadScheduler(TierLimits(host_slots=100))
    context, other = keys(0, 80), keys(1000, 10)
    stored(planner, context[:40])
    stored(planner, other)
    assert planner.lookup("waits", as_context(context), 0.0) == 40
    assert planner.lookup("loads", as_context(other), 0.0) == 10
    planner.load("loads", other, range(10))
    planner.take_jobs()
    stored(planner, context[40:])
    assert planner.lookup("waits", as_context(context), 1.0) == 80


def test_what_belongs_on_disk_is_written_though_there_is_room_and_only_then_goes_first() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=100, disk_blocks=1000))
    cold = keys(0, 30)
    planner.store([(each, 1) for each in cold], RetentionRank.COLD)
    assert planner.has_jobs, "an idle engine runs steps for it"
    jobs = planner.take_jobs()
    assert not jobs.spills, "it is being stored"
    assert planner.has_jobs
    planner.take_results(OffloadResults(stored=dict.fromkeys(jobs.stores, CopyResult.MOVED)))
    assert planner.host.room(RetentionRank.PLAIN) == 70, "before the write it is kept as what belongs here"
    jobs = planner.take_jobs()
    assert [file.key for file in jobs.spills] == cold[::-1]
    planner.take_results(OffloadResults(spilled=dict.fromkeys(cold[::-1], CopyResult.MOVED)))
    assert [*planner.disk.blocks] == cold[::-1], "the end is the first to go"
    assert planner.host.room(RetentionRank.COLD) == 100
    assert not planner.take_jobs().spills
    for number in range(1000, 1080):
        planner.plan_save(key(number), 2)
    assert in_host(planner, cold) == [True] * 20 + [False] * 10


def test_a_write_that_fails_is_not_repeated_until_it_is_ordered_again() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=40, disk_blocks=1000))
    stored(planner, keys(0, 30), RetentionRank.IDLE)
    assert not planner.has_jobs
    planner.set_rank(keys(0, 30), RetentionRank.COLD)
    assert planner.has_jobs, "an idle engine runs a step for it"
    tries = 0
    for _ in range(200):
        spills = planner.take_jobs().spills
        assert not planner.has_jobs, "it is being written, or has failed: to turn in circles helps nobody"
        planner.take_results(OffloadResults(spilled={file.key: CopyResult.FULL for file in spills}))
        tries += len(spills)
    assert tries == 30
    assert planner.host.room(RetentionRank.COLD) == 40, "nothing waits for a write any more"
    assert key(0) not in planner.disk.blocks
    planner.set_rank(keys(0, 30), RetentionRank.IDLE)
    planner.set_rank(keys(0, 30), RetentionRank.COLD)
    assert len(planner.take_jobs().spills) == 30


def waited_s(planner: OffloadScheduler, request: str, context: list[bytes], now: float) -> float:
    """The seconds until a request is not held for the disk any more; its worker answers nothing."""
    began = now
    while planner.lookup(request, as_context(context), now) is None:
        planner.take_jobs()
        now += 0.125
    planner.abandon(request)
    return now - began


def test_a_disk_that_does_not_answer_holds_one_request_and_not_every_turn() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=100, disk_blocks=100))
    contexts = [keys(20 * number, 20) for number in range(4)]
    find(planner, *contexts)
    assert waited_s(planner, "first", contexts[0], 0.0) == 10.0
    reads = [*planner.disk._staging]
    assert [waited_s(planner, f"r{at}", contexts[at % 4], 11.0 + at) for at in range(8)] == [0.0] * 8
    assert planner.disk.fetch(contexts[1], 2) == 0
    assert [*planner.disk._staging] == reads, "nothing is read behind a read that does not end"
    planner.take_results(OffloadResults(staged=dict.fromkeys(contexts[0], CopyResult.MOVED)))
    assert planner.lookup("again", as_context(contexts[0]), 30.0) == 20
    assert planner.lookup("other", as_context(contexts[2]), 30.0) is None, "the disk answers, so it is read"


def calls_of_a_look_up(planner: OffloadScheduler, context: list[bytes]) -> int:
    calls, waiting = Counter[str](), as_context(context)
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    found = planner.lookup("r", waiting, 1.0)
    sys.setprofile(None)
    assert found is None
    return calls["call"]


def test_who_waits_for_a_read_or_for_anothers_load_looks_at_few_of_its_blocks() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=2000, disk_blocks=2000))
    context = keys(0, 2000)
    find(planner, context)
    assert planner.lookup("r", as_context(context), 0.0) is None
    planner.take_jobs()
    planner.take_results(OffloadResults(staged=dict.fromkeys(context[:1000], CopyResult.MOVED)))
    assert calls_of_a_look_up(planner, context) < 100
    planner = OffloadScheduler(TierLimits(host_slots=2000))
    stored(planner, context)
    assert planner.lookup("loads", as_context(context), 0.0) == 2000
    planner.load("loads", context, range(2000))
    assert calls_of_a_look_up(planner, context) < 100


def test_a_disk_that_ends_no_write_neither_fills_host_memory_nor_is_given_more() -> None:
    """Blocks that wait for their write used to keep a rank that nothing may displace."""
    planner = OffloadScheduler(TierLimits(host_slots=1000, disk_blocks=10_000))
    for program in range(40):
        context = keys(100 * program, 100)
        for each in context:
            planner.plan_save(each, 1, RetentionRank.COLD)
        assert planner.lookup(f"r{program}", as_context(keys(10**6, 1)), float(program)) == 0
        spills = planner.take_jobs().spills
    assert not spills
    assert not planner.has_jobs
    assert all(planner.plan_save(key(2 * 10**6 + number), 1) for number in range(500))
    assert planner.persist(context, {}, 40.0)[:2] == (0, 0), "a program that leaves does not wait for it"
    written = dict.fromkeys(planner.disk.spilling, CopyResult.MOVED)
    planner.take_results(OffloadResults(spilled=written))
    planner.set_rank(keys(2 * 10**6, 100), RetentionRank.COLD)
    assert len(planner.take_jobs().spills) >= 100, "it answers, so it is written again"


def unwritten(planner: OffloadScheduler) -> int:
    return len(planner.host.unwritten) + len(planner.disk.spilling)


def test_writes_of_an_engine_that_looked_nothing_up_for_long_are_no_hang() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=1000, disk_blocks=10_000))
    old, new = keys(0, 300), keys(300, 300)
    assert planner.lookup("r", as_context(keys(5000, 1)), 0.0) == 0
    for each in old + new:
        planner.plan_save(each, 1, RetentionRank.IDLE)
    planner.set_rank(old, RetentionRank.COLD)
    for _ in range(3):
        planner.take_jobs()  # of a long answer
    assert planner.lookup("s", as_context(keys(6000, 1)), 100.0) == 0
    planner.set_rank(new, RetentionRank.COLD)
    planner.take_jobs()
    assert unwritten(planner) == 600
    assert planner.lookup("s", as_context(keys(6001, 1)), 109.0) == 0
    written = [*planner.disk.spilling][:1]
    planner.take_results(OffloadResults(spilled=dict.fromkeys(written, CopyResult.MOVED)))
    assert planner.lookup("s", as_context(keys(6002, 1)), 118.0) == 0
    planner.take_jobs()
    assert unwritten(planner) == 599, "one has ended, so the others will"


def test_requests_that_wait_for_the_disk_leave_half_of_host_memory() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=1000, disk_blocks=2000))
    contexts = [keys(100 * number, 100) for number in range(10)]
    find(planner, *contexts)
    for number, context in enumerate(contexts):
        planner.lookup(f"r{number}", as_context(context), 0.0)
        read = {file.key: CopyResult.MOVED for file in planner.take_jobs().stages}
        planner.take_results(OffloadResults(staged=read))
    assert planner.pinned_host_blocks == 500
    assert planner.lookup("r9", as_context(contexts[9]), 0.0) == 0, "computed"
    alone = OffloadScheduler(TierLimits(host_slots=1000, disk_blocks=2000))
    find(alone, keys(0, 900))
    assert alone.lookup("r", as_context(keys(0, 900)), 0.0) is None
    assert len(alone.take_jobs().stages) == 900


def test_a_repeated_look_up_after_a_read_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for room on the device is looked up in every step."""
    planner, chain = OffloadScheduler(TierLimits(host_slots=100, disk_blocks=100)), keys(0, 50)
    find(planner, chain)
    assert planner.lookup("r", as_context(chain), 0.0) is None
    planner.take_results(OffloadResults(staged=dict.fromkeys(chain, CopyResult.MOVED)))
    assert planner.lookup("r", as_context(chain), 1.0) == 50
    planner.take_jobs()
    monkeypatch.setattr(ContextKeys, "needed", None)
    assert planner.lookup("r", as_context(chain), 2.0) == 50


def test_a_busy_disk_that_answers_is_no_hang() -> None:
    """Whoever has waited long enough goes on; later requests still get their turn."""
    planner = OffloadScheduler(TierLimits(host_slots=1000, disk_blocks=1000))
    contexts = [keys(20 * number, 20) for number in range(14)]
    find(planner, *contexts)

    def ask(number: int, now: float) -> int | None:
        found = planner.lookup(f"r{number}", as_context(contexts[number]), now)
        planner.take_jobs()
        return found

    assert [ask(number, 0.0) for number in range(12)] == [None] * 12
    for second in range(1, 10):  # the disk reads one context a second
        read = dict.fromkeys(contexts[second - 1], CopyResult.MOVED)
        planner.take_results(OffloadResults(staged=read))
        assert ask(second - 1, float(second)) == 20
    assert ask(12, 9.5) is None
    assert [ask(number, 10.0) for number in (9, 10, 11)] == [0] * 3
    assert ask(12, 10.0) is None, "other reads end, so its own will"
    assert ask(13, 10.0) is None, "and the disk is read further"
    assert ask(12, 19.5) == 0, "no read has ended since it came: now the disk hangs"
    assert ask(13, 19.5) == 0


def test_the_store_is_asked_once_for_a_request_and_never_for_little() -> None:
    planner, chain = OffloadScheduler(TierLimits(host_slots=20, disk_blocks=20)), keys(0, 10)
    assert planner.lookup("r", as_context(chain[:7]), 0.0) == 0
    assert not planner.take_jobs().probes
    assert planner.lookup("s", as_context(chain), 0.0) is None
    ((job, asked),) = planner.take_jobs().probes.items()
    assert asked == chain
    assert planner.lookup("s", as_context(chain), 0.1) is None
    assert not planner.take_jobs().probes, "it is being asked"
    planner.take_results(OffloadResults(probed={job: (0, True)}))
    assert planner.lookup("s", as_context(chain), 0.2) == 0
    planner.take_jobs()
    assert planner.lookup("s", as_context([*chain, key(50)]), 0.3) == 0, "nor when it has grown"
    assert not planner.take_jobs().probes
    planner.abandon("s")
    assert planner.lookup("s", as_context(chain), 0.4) is None, "a request that was preempted may find more"


def test_a_question_that_is_not_answered_holds_nobody() -> None:
    """As where a share hangs: who comes later does not wait for it at all."""
    planner = OffloadScheduler(TierLimits(host_slots=20, disk_blocks=20, max_stage_wait_s=0.5))
    chain = keys(0, 10)
    assert planner.lookup("r", as_context(chain), 0.0) is None
    jobs = planner.take_jobs().probes
    for number in range(50):
        now = 0.5 + number / 10
        assert planner.lookup("r", as_context(chain), now) == 0
        assert planner.lookup(f"s{number}", as_context(chain), now) == 0
        planner.abandon(f"s{number}")
        assert not planner.take_jobs().probes
    assert planner.under_way == 1
    planner.take_results(OffloadResults(probed=dict.fromkeys(jobs, (0, True))))  # it answers at last
    assert planner.lookup("s", as_context(chain), 6.6) is None
    jobs = planner.take_jobs().probes
    planner.take_results(OffloadResults(probed=dict.fromkeys(jobs, (1, True))))
    assert planner.lookup("s", as_context(chain), 6.7) is None
    (stage,) = planner.take_jobs().stages
    planner.take_results(OffloadResults(staged={stage.key: CopyResult.MOVED}))
    assert planner.lookup("s", as_context(chain), 6.8) == 1


def test_a_block_whose_load_fails_is_not_read_from_disk_for_ever() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=20, disk_blocks=20, min_probe_blocks=1))
    chain, reads = keys(0, 2), 0
    for now in range(20):
        found = planner.lookup("r", as_context(chain), float(now))
        if found == 0:
            break
        if found:
            planner.load("r", chain, [1, 2])
        jobs = planner.take_jobs()
        reads += len(jobs.stages)
        read = {file.key: CopyResult.MOVED for file in jobs.stages}
        planner.take_results(OffloadResults(probed=dict.fromkeys(jobs.probes, (2, False)), staged=read))
        planner.end_loads(["r"], {1, 2})
    assert found == 0
    assert reads == 2


# -- writing a context to disk, because its program leaves


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
    kept = OffloadScheduler(TierLimits(host_slots=4, disk_blocks=8, spill_below=1, min_probe_blocks=1))
    kept.plan_save(key(0), 3)
    assert kept.lookup("early", as_context([key(9)]), 0.0) is None
    jobs = kept.take_jobs()
    kept.forget()
    results = answered(jobs)
    results.probed = dict.fromkeys(jobs.probes, (1, False))
    kept.take_results(results)
    assert len(kept.disk.blocks) == 0
    for number in range(1, 5):
        kept.plan_save(key(number), 3, RetentionRank.COLD)
        assert kept.lookup("late", as_context([key(9)]), 0.1) == 0
        jobs = step(kept)
        assert [*jobs.spills, *jobs.stages, *jobs.probes] == []
    assert kept.persist(keys(0, 5), dict.fromkeys(keys(0, 5), 1), 0.0)[:2] == (0, 0)
    assert not kept.has_jobs
    assert kept.lookup("r", as_context([key(1)]), 0.0) == 1, "host memory goes on"


ACTS = st.tuples(
    st.sampled_from(["persist", "step", "late", "evict", "fail", "hurry", "lose"]), st.integers(0, 9)
)


@settings(max_examples=150, deadline=None)
@given(
    host_slots=st.integers(1, 12),
    disk_blocks=st.integers(1, 12),
    acts=st.lists(ACTS, min_size=20, max_size=40),
    every_s=st.sampled_from([0.5, 9.0, 11.0]),
)
def test_what_is_told_is_true_and_everything_comes_to_an_end(
    host_slots: int, disk_blocks: int, acts: list[tuple[str, int]], every_s: float
) -> None:
    """A search may run out of time, and other engines delete files. However seldom one asks, a context is on
    disk in the end: so what a search has found counts as there until the next question."""
    # Nothing else is written: it would displace what is persisted on so small a disk.
    limits = {"host_slots": host_slots, "disk_blocks": disk_blocks}
    kept = OffloadScheduler(TierLimits(**limits, spill_below=0.0, max_spilling=3))
    chain, late, now = keys(0, 10), OffloadResults(), 0.0
    files, found_once = set[bytes](), set[bytes]()

    def work(copy_result: CopyResult = CopyResult.MOVED, *, hurry: bool = False) -> OffloadResults:
        jobs = kept.take_jobs()
        results = answered(jobs, copy_result)
        files.update(each.key for each in jobs.spills if copy_result is CopyResult.MOVED)
        for job, asked in jobs.probes.items():
            found = sum(1 for _ in takewhile(files.__contains__, asked))
            in_time = (found + 1) // 2 if hurry else found
            found_once.update(asked[:in_time])
            results.probed[job] = in_time, in_time == found < len(asked)
        return results

    def persist(wanted: list[bytes], on_device: list[bytes]) -> tuple[int, int]:
        return kept.persist(wanted, {each: at for at, each in enumerate(on_device)}, now)[:2]

    for act, number in acts:
        if act == "persist":
            on_disk, pending = persist(chain[: number + 1], chain[: number + 1])
            assert (files | found_once).issuperset(chain[:on_disk])
            assert on_disk + pending <= min(number + 1, disk_blocks)
        elif act == "evict":
            kept.plan_save(key(500 + number), 20 + number)
        elif act == "fail":
            kept.take_results(work(CopyResult.FAILED))
        elif act == "lose":
            files.difference_update(chain[number:])
            now += 11.0
        else:
            for _ in range(number):
                results = work(hurry=act == "hurry")
                kept.take_results(late)
                late = results if act == "late" else OffloadResults()
                if act != "late":
                    kept.take_results(results)
        assert len(kept.disk.blocks) <= disk_blocks
    kept.take_results(late)
    for on_device in (chain, chain, []):  # what was written is not lost with its block on the device
        told = []
        while (min(10, disk_blocks), 0) not in told:
            now += every_s
            told.append(persist(chain, on_device))
            assert len(told) < 400
            while kept.has_jobs:
                kept.take_results(work(hurry=True))
        now += 11.0
    assert files.issuperset(chain[:disk_blocks])
    assert not any(entry.pins for entry in kept.host)


# -- a disk that is smaller than what belongs there


@settings(max_examples=150, deadline=None)
@given(
    disk_blocks=st.integers(1, 40),
    spill_below=st.sampled_from([0.0, 0.25, 1.0]),
    programs=st.lists(st.tuples(st.integers(1, 12), st.sampled_from(RetentionRank)), max_size=6),
)
def test_a_small_disk_is_written_to_an_end(
    disk_blocks: int, spill_below: float, programs: list[tuple[int, RetentionRank]]
) -> None:
    """What the budget deletes used to be written again in every step."""
    limits = TierLimits(host_slots=48, disk_blocks=disk_blocks, spill_below=spill_below, max_spilling=5)
    planner, written = OffloadScheduler(limits), 0
    for number, (blocks, rank) in enumerate(programs):
        stored(planner, keys(100 * number, blocks), rank)
    for _ in range(60):
        written += len(step(planner).spills)
    assert not planner.has_jobs
    assert not step(planner).spills
    assert written <= sum(blocks for blocks, _ in programs) + disk_blocks


def test_of_programs_that_leave_together_a_small_disk_keeps_what_it_can() -> None:
    """Each write of one used to delete a block of the other, which was written again."""
    planner, now = OffloadScheduler(TierLimits(host_slots=100, disk_blocks=10)), 0.0
    contexts = [keys(100 * number, 8) for number in range(3)]
    for context in contexts:
        stored(planner, context)
    told = {}
    for _ in range(20):
        now += 0.25
        told = {at: planner.persist(context, {}, now) for at, context in enumerate(contexts)}
        step(planner)
    assert sum(on_disk for on_disk, _, _ in told.values()) == 10
    assert not any(pending for _, pending, _ in told.values())
    assert any("has not kept" in reason for _, _, reason in told.values())
    now += 11.0
    for _ in range(3):  # what was refused is written now, as the other programs may have gone
        planner.persist(contexts[0], {}, now)
        found = {job: (len(asked), False) for job, asked in step(planner).probes.items()}
        planner.take_results(OffloadResults(probed=found))
    assert planner.persist(contexts[0], {}, now) == (8, 0, "")


def test_a_full_disk_ends_the_write_of_a_program_with_the_reason() -> None:
    planner = OffloadScheduler(TierLimits(host_slots=100, disk_blocks=100))
    stored(planner, keys(0, 5))
    assert planner.persist(keys(0, 5), {}, 1.0) == (0, 5, "")
    planner.take_results(answered(planner.take_jobs(), CopyResult.FULL))
    on_disk, pending, reason = planner.persist(keys(0, 5), {}, 2.0)
    assert (on_disk, pending) == (0, 0)
    assert "has not kept" in reason
    assert planner.persist(keys(0, 5), {}, 13.0) == (0, 5, ""), "it may have room again"
