"""Engines of several workers in a pair: each exchanges its part with its counterpart, and one's failure is
everybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_transfer_requests import FULL_TOKENS, Request, full_keys, prompt, to_prefill
from sojourn_server.kv_transfer.rank_transfers import (
    combined_status,
    jobs_of_rank,
    rank_address,
)
from sojourn_server.kv_transfer.transfer_jobs import AbortJob, FetchJob, PushJob, TransferJobs
from toy_transfer_engine import MemoryStore, ToyEngine, through

RANKS = 2
STORED = 6
"""Full Blocks of a context that a turn before has stored."""


@pytest.fixture
def stores() -> list[MemoryStore]:
    return [MemoryStore(tp_rank=rank, tp_size=RANKS) for rank in range(RANKS)]


@pytest.mark.parametrize("decode_reads", [False, True])
def test_each_worker_moves_its_part(tmp_path: Path, stores: list[MemoryStore], decode_reads: bool) -> None:
    p, d = (ToyEngine(name, None, f"unix:{tmp_path / name}", stores=stores) for name in "pd")
    start = prompt(1, STORED * FULL_TOKENS)
    first, second = through(p, d, start, "before")
    assert (first.prefilled, second.prefilled) == (len(start), 1)
    assert stores[0].blocks.keys() == stores[1].blocks.keys() >= set(full_keys(start))
    assert all(stores[0].blocks[key] != stores[1].blocks[key] for key in full_keys(start))
    first, second = through(p, d, [*start, *prompt(2, 50)], "after", decode_reads=decode_reads)
    assert (first.prefilled, second.prefilled) == (50, 1)
    for ours, theirs in zip(p.ranks, d.ranks, strict=True):
        read = [each.manager.node.counts["blocks_read"] for each in (ours, theirs)]
        assert read == [STORED * (not decode_reads), STORED * decode_reads]
        # What the decode side has read is not sent back to it.
        assert theirs.manager.node.counts["blocks_needed"] == STORED + STORED * (not decode_reads) + 1
    p.close()
    d.close()


def test_a_peer_with_another_number_of_workers_is_named(tmp_path: Path, stores: list[MemoryStore]) -> None:
    p = ToyEngine("p", None, f"unix:{tmp_path / 'p'}", stores=stores)
    try:
        wrong = p.planner.arrived(Request("r", prompt(1, 100), to_prefill("t", "tcp:10.0.0.7:8500")))
        assert "the decode engine has 1 worker and this engine 2" in wrong
        assert "--tensor-parallel-size" in wrong
        p.planner.finished("r", well=True)
    finally:
        p.close()


# -- the parts -------------------------------------------------------------------------------------


def test_each_worker_listens_at_an_address_of_its_own() -> None:
    assert rank_address("tcp:[::1]:8500", 0, 2) == "tcp:[::1]:8500"
    assert rank_address("tcp:[::1]:8500", 1, 2) == "tcp:[::1]:8501"
    assert rank_address("tcp:h:0", 1, 2) == "tcp:h:0"
    assert rank_address("unix:/a", 1, 2) == "unix:/a.rank1"
    with pytest.raises(ValueError, match="expected at most 65534"):
        rank_address("tcp:h:65535", 1, 2)


def test_a_worker_gets_the_address_of_its_counterpart() -> None:
    jobs = TransferJobs(
        fetches=[FetchJob(3, [b"k"], "c", "tcp:h:1,tcp:h:2", 1), FetchJob(4, [b"k"])],
        pushes=[PushJob("r", "c", "tcp:h:1,tcp:h:2", [b"k"], [1])],
        aborts=[AbortJob("c", "tcp:h:1,tcp:h:2")],
        ends=[7],
    )
    part = jobs_of_rank(jobs, 1, 2)
    assert [each.peer for each in part.fetches] == ["tcp:h:2", ""]
    assert [each.address for each in (*part.pushes, *part.aborts)] == ["tcp:h:2"] * 2
    assert part.ends == [7]
    assert jobs.pushes[0].address == "tcp:h:1,tcp:h:2", "the other worker has its own"
    assert jobs_of_rank(jobs, 0, 1) is jobs


def test_the_status_of_an_engine_is_that_of_its_workers() -> None:
    def told(rank: int, **changed: Any) -> dict[str, Any]:
        link = {"queued_bytes": 10, "queued_s": 0.5 + rank, "moved_bytes": 100}
        status = {"slots": 8, "links": {"storage read": link}, "counts": {"pushes": 2, "bytes_taken": 7}}
        of_rank = {"addresses": [f"tcp:h:{rank}"], "epoch": f"e{rank}", "kv": f"k{rank}", "block_s": 0.1}
        return {**status, **of_rank, "received_bytes": 7, **changed}

    status = combined_status([told(0), told(1, counts={"pushes": 2, "pushes_lost": 1})])
    assert (status["peer"], status["epoch"]) == ("tcp:h:0,tcp:h:1", "e0,e1")
    assert status["counts"] == {"pushes": 2, "bytes_taken": 7, "pushes_lost": 1}
    assert status["links"] == {"storage read": {"queued_bytes": 20, "queued_s": 1.5, "moved_bytes": 200}}
    assert (status["slots"], status["received_bytes"], status["block_s"]) == (8, 14, 0.1)
    other = combined_status([told(0), told(1, kv="k9")])
    assert status["kv"] != other["kv"]
    alone = combined_status([told(0)])
    assert (alone["kv"], alone["peer"], alone["epoch"]) == ("k0", "tcp:h:0", "e0")
    assert combined_status([told(0), None]) is None
    assert combined_status([]) is None
