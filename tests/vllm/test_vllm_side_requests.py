"""A command-line agent names its conversation by a header alone. Side requests come under the same id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sojourn_server.simulator.parity_replay import replay_recording
from sojourn_server.vllm.compat import RequestStatus
from turns import add_request, tool

TASK = range(10_000, 10_300)
TITLE = range(20_000, 20_060)


def add(engine: Any, name: str, tokens: Any) -> None:
    """Add a request as vLLM's API server does for one with ``X-Session-ID``."""
    add_request(engine, name, tokens, max_tokens=4, session_id="S")


@pytest.mark.parametrize("policy", ["fixed-ttl", "sojourn"])
@pytest.mark.parametrize("order", [("title", "task"), ("task", "title")])
def test_a_title_request_leaves_the_context_of_the_conversation(
    make_engine: Any, clock: Any, tmp_path: Path, policy: str, order: tuple[str, str]
) -> None:
    recording = tmp_path / "side.recording"
    engine = make_engine(policy, {"recording_file": str(recording)}, blocks=65)
    for name in order:
        add(engine, name, TITLE if name == "title" else TASK)
    engine.run()
    add(engine, "another title", TITLE)
    engine.run()
    engine.tell(tool("S"))
    program = engine.ask("program", program_id="S")
    assert (program["turns"], program["tools_running"]) == (1, 1)
    assert program["context_tokens"] == 304
    for other in range(8):
        add(engine, f"x{other}", range(1000 * other, 1000 * other + 60))
        engine.run()
        clock.now += 0.1
    assert engine.ask("program", program_id="S")["tools_running"] == 1
    add(engine, "next", [*TASK, 7, 7, 7, 7, *range(30_000, 30_050)])
    engine.run()
    ledger = engine.ask("program", program_id="S")["ledger"]
    assert [turn["turn"] for turn in ledger] == [1, 2]
    assert ledger[-1]["tokens"]["device"] >= 288
    assert ledger[-1]["gap_s"] == pytest.approx(0.8)
    engine.scheduler.shutdown()
    report = replay_recording(recording)
    assert report.difference is None
    assert report.decisions_by_kind["side_request"] >= 9


def test_a_request_with_which_vllm_only_frees_transferred_kv_is_not_counted(make_engine: Any) -> None:
    engine = make_engine("observe")
    add_request(engine, "freed", [0], aborts=True)
    engine.scheduler.finish_requests(["freed"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.ask("snapshot")["engine"]["untracked_requests"] == 0
    engine.add("a client's", range(100), max_tokens=1)
    engine.run()
    assert engine.ask("snapshot")["engine"]["untracked_requests"] == 1
