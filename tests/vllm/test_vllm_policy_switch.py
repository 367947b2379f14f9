"""The policy switched off and on while vLLM's own scheduler runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sojourn_server.simulator.parity_replay import replay_recording
from turns import prompt, running, tool, waiting


def test_off_gives_the_queue_vllms_order_and_on_gives_it_back(make_engine: Any) -> None:
    engine = make_engine("fixed-ttl", blocks=129, max_num_seqs=1)
    for name in ("OLD", "HELD"):
        engine.add(f"{name}1", prompt(ord(name[0]), 64), program_id=name)
        engine.run()
    engine.tell(tool("HELD"))
    engine.add("busy", prompt(1, 32), max_tokens=30)
    engine.step()
    engine.add("new1", prompt(2, 64), program_id="NEW")
    engine.add("plain", prompt(3, 64))
    engine.add("OLD2", prompt(4, 64), program_id="OLD")
    engine.add("HELD2", [*prompt(ord("H"), 64), 7, 1, 2], program_id="HELD")
    assert waiting(engine) == ["HELD2", "OLD2", "new1", "plain"]
    engine.ask("policy", on=False)
    assert waiting(engine) == ["new1", "plain", "OLD2", "HELD2"]
    assert engine.scheduler.sojourn.pool_state()["leased"] == 0
    engine.ask("policy", on=True)
    assert waiting(engine) == ["OLD2", "HELD2", "new1", "plain"], (
        "by the program's arrival; the lease is gone"
    )
    engine.ask("policy", on=False)
    engine.run()
    assert not engine.scheduler.requests


@pytest.mark.parametrize(("policy", "parks"), [("sojourn", True), ("mori", True), ("admit", False)])
def test_off_lets_a_held_request_run_and_a_recording_replays_it(
    make_engine: Any, clock: Any, tmp_path: Path, policy: str, parks: bool
) -> None:
    path = tmp_path / "engine.recording"
    shape = {"blocks": 41, "host_blocks": 60, "own_tiers": True, "max_model_len": 640}
    engine = make_engine(policy, {"recording_file": str(path)}, **shape)
    tokens = {}
    for name in ("A", "B", "C"):
        tokens[name] = engine.add(f"{name}1", prompt(ord(name), 200), program_id=name, max_tokens=60)
        clock.now += 0.1
        engine.step()
    late = engine.add("D1", prompt(9, 300), program_id="D", max_tokens=4)
    engine.step()
    assert waiting(engine) == ["D1"]
    assert (late in engine.scheduler.waiting.parked) is parks
    before = running(engine)
    engine.ask("policy", on=False)
    assert running(engine) == before
    assert late not in engine.scheduler.waiting.parked
    while engine.scheduler.requests:
        clock.now += 0.1
        engine.step()
    assert all(request.num_output_tokens == 60 for request in tokens.values())
    engine.ask("policy", on=True)
    engine.add("A2", prompt(ord("A"), 260), program_id="A", max_tokens=4)
    engine.run()
    engine.scheduler.sojourn.shutdown()
    report = replay_recording(path)
    assert report.difference is None, report.difference
    assert report.events_by_kind["PolicySwitched"] == 2
