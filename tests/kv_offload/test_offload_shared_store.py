"""Engines that share a disk: what one has written the others load, and whatever goes wrong is computed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from block_contexts import as_context
from sojourn_server.kv_offload.disk_planner import TierLimits
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults, ProbeResult
from sojourn_server.kv_offload.offload_planner import OffloadPlanner

pytest.importorskip("torch")

from offload_harness import Engine, nothing_is_pinned, slots_add_up


def key(number: int) -> bytes:
    return b"%032d" % number


CHAIN = [key(number) for number in range(10)]
SHAPE = {"blocks": 12, "slots": 20, "disk_blocks": 12, "min_probe_blocks": 2}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """``a``, which has computed a context and written it to its disk, and ``b`` beside it."""
    a, b = (Engine(tmp_path, name=name, **SHAPE) for name in "ab")
    told = a.persist(CHAIN, a.compute(CHAIN))
    assert told == (10, 0)
    yield a, b
    for engine in (a, b):
        engine.rest()
        assert nothing_is_pinned(engine.planner)
        assert slots_add_up(engine.planner)
        engine.close()


def test_what_one_engine_has_written_another_loads(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    b.load(CHAIN)
    assert (b.planner.counts["shared"], b.planner.counts["loaded"]) == (10, 10)
    assert b.planner.state()["disk"]["used"] == 0, "it is the other's to keep"
    assert a.disk is not None
    assert b.disk is not None
    assert (len(a.disk), len(b.disk)) == (10, 0)


def test_a_store_of_other_weights_is_nobodys_sibling(tmp_path: Path) -> None:
    import torch

    a = Engine(tmp_path, name="a", dtype=torch.float16, **SHAPE)
    a.persist(CHAIN, a.compute(CHAIN))
    b_folder = tmp_path / "elsewhere"
    b = Engine(b_folder, name="b", **SHAPE)
    assert a.disk is not None
    shutil.copytree(a.disk.path, b_folder / a.disk.path.name)
    assert b.wait_for(CHAIN) == 0
    assert b.planner.counts["shared"] == 0
    a.close()
    b.close()


# -- the planner's rules ---------------------------------------------------------------------


def planner(**limits: float) -> OffloadPlanner:
    made = OffloadPlanner(TierLimits(host_slots=20, disk_blocks=20, shared=True, **limits))  # type: ignore[arg-type]
    made.take_results(OffloadResults(on_disk=[]))
    return made


def test_others_are_asked_once_a_request_and_never_for_little() -> None:
    asked = planner(min_probe_blocks=8)
    assert asked.lookup("r", as_context(CHAIN[:7]), 0.0) == 0
    assert not asked.take_jobs().probes
    assert asked.lookup("s", as_context(CHAIN), 0.0) is None
    (job, looked_for), *others = asked.take_jobs().probes.items()
    assert (list(looked_for), others) == (CHAIN, [])
    assert asked.lookup("s", as_context(CHAIN), 0.1) is None
    assert not asked.take_jobs().probes, "it is being asked"
    asked.take_results(OffloadResults(probed={job: ProbeResult(0, 1)}))
    assert asked.lookup("s", as_context(CHAIN), 0.2) == 0
    asked.take_jobs()
    assert asked.lookup("s", as_context([*CHAIN, key(50)]), 0.3) == 0, "nor when it has grown"
    assert not asked.take_jobs().probes
    asked.abandon("s")
    assert asked.lookup("s", as_context(CHAIN), 0.4) is None, "a request that was preempted may find more"


def test_after_a_reset_nothing_of_others_is_read_and_nothing_is_written_for_them() -> None:
    """The engine may have other weights by then than its stores' name says."""
    asked = planner()
    asked.plan_save(key(1), 1)
    assert asked.lookup("r", as_context(CHAIN), 0.0) is None
    (early,) = asked.take_jobs().probes
    asked.forget()
    asked.take_results(OffloadResults(probed={early: ProbeResult(10, 1)}))
    assert asked.lookup("s", as_context(CHAIN), 0.1) == 0
    for number in range(30):
        asked.plan_save(key(100 + number), 1)
        asked.write_to_disk([key(100 + number)], 2)  # type: ignore[arg-type]
        jobs = asked.take_jobs()
        assert [*jobs.probes, *jobs.spills, *jobs.stages] == []
    assert asked.persist([key(120)], {}) == (0, 0)
    assert not asked.has_jobs


# -- a random life ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_three_engines_write_read_and_lose_nobody_loads_what_is_wrong(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    shape = {"blocks": 8, "slots": 6, "disk_blocks": 7, "min_probe_blocks": 1}
    engines = [Engine(tmp_path, name=name, **shape) for name in "abc"]
    chains = [[key(100 * chain + index) for index in range(6)] for chain in range(4)]
    loaded = 0
    for request in range(60):
        engine = draw.choice(engines)
        engine.now += draw.random()
        wanted = draw.choice(chains)[: draw.randint(1, 6)]
        act = draw.random()
        if act < 0.35:
            told = engine.persist(wanted, engine.compute(wanted))
            assert told.stored <= len(wanted)
            engine.rest()  # what is being copied of the device must stay as it is until then
        elif act < 0.45:
            assert engine.disk is not None
            for name in engine.disk.keys()[: draw.randint(1, 3)]:
                engine.disk.drop(name)  # behind its planner's back too
        elif act < 0.5:
            assert engine.disk is not None
            files = list(engine.disk.path.glob("*/*.kv"))
            if files:
                torn = draw.choice(files)
                torn.write_bytes(torn.read_bytes()[: draw.randint(0, 50)])
        else:
            name = f"r{request}"
            found = engine.wait_for(wanted, name)
            for content in engine._bytes:
                content[:found] = 0
            engine.planner.load(name, wanted[:found], range(found))
            assert engine.step() == set()
            for block_id, each in enumerate(wanted[:found]):
                assert engine.holds(block_id, each), "a wrong token would follow"
            loaded += found
            engine.planner.abandon(name)
        assert slots_add_up(engine.planner)
    assert loaded > 0
    assert sum(engine.planner.counts["shared"] for engine in engines) > 0
    for engine in engines:
        engine.rest()
        assert nothing_is_pinned(engine.planner)
        assert slots_add_up(engine.planner)
        assert not engine.planner.disk._borrowed
        engine.close()


def test_a_probe_that_is_not_answered_holds_nobody() -> None:
    """As where another engine's share hangs: who comes later does not wait for it at all."""
    asked = planner(max_probe_wait_s=0.5)
    assert asked.lookup("r", as_context(CHAIN), 0.0) is None
    jobs = asked.take_jobs().probes
    for number in range(50):
        now = 0.5 + number / 10
        assert asked.lookup("r", as_context(CHAIN), now) == 0
        assert asked.lookup(f"s{number}", as_context(CHAIN), now) == 0
        asked.abandon(f"s{number}")
        assert not asked.take_jobs().probes
    assert asked.under_way == 1
    # It answers at last.
    asked.take_results(OffloadResults(probed=dict.fromkeys(jobs, ProbeResult(0, 1))))
    assert asked.lookup("s", as_context(CHAIN), 6.6) is None
    jobs = asked.take_jobs().probes
    asked.take_results(OffloadResults(probed=dict.fromkeys(jobs, ProbeResult(1, 1))))
    assert asked.lookup("s", as_context(CHAIN), 6.7) is None
    (stage,) = asked.take_jobs().stages
    asked.take_results(OffloadResults(staged={stage: {CHAIN[0]: CopyResult.MOVED}}))
    assert asked.lookup("s", as_context(CHAIN), 6.8) == 1
