"""A command-line agent names its conversation by a header alone. Side requests come under the same id."""

from __future__ import annotations

from typing import Any

from sojourn_server.vllm.compat import RequestStatus
from turns import add_request, last_turn, tool

TASK = range(10_000, 10_300)
TITLE = range(20_000, 20_060)


def add(engine: Any, name: str, tokens: Any) -> None:
    """Add a request as vLLM's API server does for one with ``X-Session-ID``."""
    add_request(engine, name, tokens, max_tokens=4, session_id="S")


def test_a_title_request_leaves_the_context_of_the_conversation(make_engine: Any) -> None:
    engine = make_engine("fixed-ttl", blocks=65)
    add(engine, "task", TASK)
    engine.run()
    engine.tell(tool("S"))
    add(engine, "title", TITLE)
    engine.run()
    program = engine.ask("program", program_id="S")
    assert (program["turns"], program["tools_running"], program["context_tokens"]) == (1, 1, 304)
    for other in range(8):
        engine.add(f"x{other}", range(1000 * other, 1000 * other + 300))
        engine.run()
    add(engine, "next", [*TASK, 7, 7, 7, 7, *range(30_000, 30_050)])
    engine.run()
    assert last_turn(engine, "S")["turn"] == 2
    assert last_turn(engine, "S")["tokens"]["device"] >= 288


def test_a_request_with_which_vllm_only_frees_transferred_kv_is_not_counted(make_engine: Any) -> None:
    engine = make_engine("observe")
    add_request(engine, "freed", [0], aborts=True)
    engine.scheduler.finish_requests(["freed"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.ask("snapshot")["engine"]["untracked_requests"] == 0
    engine.add("a client's", range(100), max_tokens=1)
    engine.run()
    assert engine.ask("snapshot")["engine"]["untracked_requests"] == 1
