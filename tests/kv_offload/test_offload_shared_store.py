"""Engines that share a disk: what one has written the others load, and whatever goes wrong is computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from faulty_file_system import FaultyFiles, broken, files_below
from offload_harness import Engine, check_accounts, nothing_is_pinned


def key(number: int) -> bytes:
    return b"%032d" % number


def test_persist_asks_the_store_for_what_it_has_not_just_seen_and_writes_what_another_deleted(
    tmp_path: Path,
) -> None:
    chain = [key(number) for number in range(10)]
    a, b = (Engine(tmp_path, blocks=12, slots=20, disk_blocks=12) for _ in range(2))
    assert a.persist(chain, a.compute(chain)) == (10, 0)
    a.now += 11.0  # longer than the writes of one move
    for each in chain[4:7]:
        next(tmp_path.glob(f"*/*/{each.hex()}.kv")).unlink()
    assert a.planner.persist(chain, {}, a.now) == (0, 10), "the store is asked"
    assert a.persist(chain, a.compute(chain)) == (10, 0)
    b.load(chain)
    for engine in (a, b):
        engine.close()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_three_engines_write_read_and_lose_nobody_loads_what_is_wrong(
    tmp_path: Path, seed: int
) -> None:
    draw, loaded, others = random.Random(seed), 0, 0
    engines = [Engine(tmp_path, blocks=8, slots=6, disk_blocks=9, files=FaultyFiles()) for _ in "abc"]
    chains = [[key(100 * chain + index) for index in range(6)] for chain in range(4)]
    written: dict[bytes, Engine] = {}
    for request in range(60):
        engine = draw.choice(engines)
        engine.now += draw.random()
        wanted = draw.choice(chains)[: draw.randint(1, 6)]
        act = draw.random()
        assert engine.disk is not None
        files = engine.disk._files
        assert isinstance(files, FaultyFiles)
        if act < 0.35:
            told = engine.persist(wanted, engine.compute(wanted))
            assert told == (len(wanted), 0)
            written.update(dict.fromkeys(wanted, engine))
            engine.rest()  # what is being copied of the device must stay as it is until then
        elif act < 0.5:
            there = sorted(tmp_path.glob("*/*/*.kv"))
            for file in draw.sample(there, min(1, len(there))):
                content = file.read_bytes()
                damaged = content[: draw.randint(0, 50)], content[:-1] + b"\0"
                file.write_bytes(draw.choice(damaged)) if draw.random() < 0.5 else file.unlink()
        else:
            if act < 0.6:
                files.before = broken(draw.choice(["read", "stat"]))
            name = f"r{request}"
            found = engine.wait_for(wanted, name)
            files.before = lambda name, path: None
            for content in engine._bytes:
                content[:found] = 0
            engine.planner.load(name, wanted[:found], range(found))
            assert engine.step() == set()
            for block_id, each in enumerate(wanted[:found]):
                assert engine.holds(block_id, each), "a wrong token would follow"
                others += written[each] is not engine
            loaded += found
            engine.planner.abandon(name)
        check_accounts(engine.planner)
        assert len(files_below(engine.disk.path)) <= 9 + 3
    assert loaded > 0
    assert others > 0
    for engine in engines:
        engine.rest()
        assert nothing_is_pinned(engine.planner)
        engine.close()
