"""Each operation the HTTP side may ask for: JSON in, JSON out, limits clipped, nonsense refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn.wire_codec import WIRE_VERSION, WireError
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_server.core.engine_service import EngineService
from sojourn_server.core.events_and_actions import RequestArrived
from sojourn_server.core.request_hints import read_identity
from sojourn_server.metrics.live_frame import PROBE_ID, ProgramRow
from sojourn_server.metrics.metric_catalog import METRIC_CATALOG, METRICS_DROPPED
from virtual_engine import TOOL, VirtualEngine, prompt


@pytest.fixture
def engine() -> VirtualEngine:
    """Three programs: ``a`` leased and running a tool, ``b`` with a request in the engine, ``c`` ended."""
    engine = VirtualEngine()
    start = ProgramStart(program_id="a", seq=-1, name="fixer", parent_program_id="b", root_program_id="b")
    engine.send(start)
    engine.turn("a", prompt(40))
    engine.send(ToolStart(program_id="a", seq=-1, call_id="c1", tool="bash", tool_class="pytest"))
    engine.arrive("b", prompt(8, seed=1))
    engine.turn("c", prompt(8, seed=2), "done")
    engine.send(ProgramEnd(program_id="c", seq=-1))
    engine.now += 2.0
    return engine


def test_capabilities(engine: VirtualEngine) -> None:
    told = engine.ask("capabilities")
    assert (told["name"], told["wire"], told["policy"]) == ("sojourn", [WIRE_VERSION], "fixed-ttl")
    assert told["engine"] == {"virtual": "1"}
    assert told["tiers"] is None
    assert told["unused_hints"] == [
        "blocks_parent", "deadline_seconds", "expected_output_length", "expected_resume",
        "kv_retention_ttl_seconds", "priority", "sojourn.expected_steps_left", "step_id",
        "program_start.call_id", "tool_start.expected_s", "tool_start.expected_p95_s", "aeg.graph_hash",
        "aeg.graph",
    ]  # fmt: skip


def test_a_snapshot_says_when_the_last_of_the_reported_tools_has_ended(engine: VirtualEngine) -> None:
    def tool() -> tuple[str | None, bool]:
        rows = {row[0]: dict(zip(fields, row, strict=True)) for row in engine.ask("snapshot")["programs"]}
        return rows["a"]["tool"], rows["a"]["tool_ended"]

    fields = ProgramRow.__struct_fields__
    engine.send(ToolStart(program_id="a", seq=-1, call_id="c2", tool="web"))
    engine.send(ToolStop(program_id="a", seq=-1, call_id="c1", duration_s=2.0))
    assert tool() == ("web", False)
    engine.send(ToolStop(program_id="a", seq=-1, call_id="c2", duration_s=1.0))
    assert tool() == ("web", True)
    engine.turn("a", prompt(60))  # the model calls the tool, and the client reports nothing yet
    assert tool() == (TOOL, False)


def test_a_snapshot_says_whether_leases_are_granted_and_counts_requests_without_a_program(
    engine: VirtualEngine,
) -> None:
    for seed in (7, 8):
        engine.finish(engine.arrive(None, prompt(8, seed=seed)))
    probe = RequestArrived(f"cmpl-{PROBE_ID}-1-0", read_identity(None, None), 8)
    engine.program_scheduler.arrived(probe, 0.0)
    shown = engine.ask("snapshot")["engine"]
    assert (shown["grants_leases"], shown["untracked_requests"]) == (True, 2)
    assert not VirtualEngine("sojourn").ask("snapshot")["engine"]["grants_leases"]


def test_programs_latest_first(engine: VirtualEngine) -> None:
    told = engine.ask("programs")
    assert [p["program_id"] for p in told["programs"]] == ["c", "b", "a"]
    assert (told["shown"], told["total"]) == (3, 3)
    a = told["programs"][-1]
    assert a["name"] == "fixer"
    assert a["parent_program_id"] == "b"
    assert (a["status"], a["turns"], a["context_tokens"], a["requests"]) == ("acting", 1, 42, 0)
    assert (a["tool"], a["lease_blocks"], a["lease_reason"]) == (TOOL, 10, "fixed")
    assert a["lease_until_s"] == told["now_s"] + 8.0


@pytest.mark.parametrize(
    ("asked", "found", "total"),
    [
        ({"status": "acting"}, ["a"], 1),
        ({"status": "ended"}, ["c"], 1),
        ({"status": "gated"}, [], 0),
        ({"limit": 2}, ["c", "b"], 3),
    ],
)
def test_programs_by_status_and_the_newest_of_many(
    engine: VirtualEngine, asked: dict[str, Any], found: list[str], total: int
) -> None:
    told = engine.ask("programs", **asked)
    assert [p["program_id"] for p in told["programs"]] == found
    assert (told["shown"], told["total"]) == (len(found), total)


def test_one_program_with_its_ledger(engine: VirtualEngine) -> None:
    told = engine.ask("program", program_id="a")
    [turn] = told["ledger"]
    assert told["program_id"] == turn["program_id"] == "a"
    assert turn["tokens"] == {"prompt": 40, "device": 0, "host": 0, "new": 40, "tail": 0, "lost": {}}
    assert (turn["outcome"], told["tools_running"]) == ("stopped", 1)
    assert (told["tenant"], told["graph_hash"], told["expected_steps_left"]) == (None, None, None)
    assert engine.ask("program", program_id="nobody") is None
    assert engine.ask("program") is None


def test_a_program_is_written_to_disk_as_far_as_it_is_there(engine: VirtualEngine) -> None:
    asked: list[Any] = []
    told: dict[str, Any] = {"stored_blocks": 3, "pending_blocks": 6}

    def persist(hashes: Any) -> dict[str, Any]:
        asked.append(list(hashes))
        return told

    engine.persist = persist  # type: ignore[method-assign]

    def ask(program_id: str) -> Any:
        return engine.ask("persist", program_id=program_id)

    assert ask("a") == {
        "program_id": "a", "state": "writing", "reason": None, "turns": 1,
        "context_tokens": 42, "stored_tokens": 12, "pending_tokens": 24, "compute_s": None,
    }  # fmt: skip
    assert asked == [list(engine.program_scheduler.state.contexts.get(ProgramId("a")) or ())]
    told.update(stored_blocks=9, pending_blocks=0)
    assert (ask("a")["state"], ask("a")["stored_tokens"]) == ("done", 36)
    engine.program_scheduler.state.reload.observe_step(64, 6.4)
    assert ask("a")["compute_s"] == pytest.approx(4.2), "by the engine's own steps"
    asked.clear()
    assert ask("b")["context_tokens"] == 0, "its first turn still runs"
    assert asked == [[]]
    assert ask("nobody") is None
    assert engine.ask("persist") is None


def test_where_there_is_no_disk_nothing_is_written(engine: VirtualEngine) -> None:
    before = len(engine.done)
    told = engine.ask("persist", program_id="a")
    assert (told["state"], told["reason"]) == ("unsupported", "there is no disk")
    assert (told["stored_tokens"], told["pending_tokens"]) == (0, 0)
    assert len(engine.done) == before


def test_what_the_client_declared_of_a_program(engine: VirtualEngine) -> None:
    engine.send(ProgramStart(program_id="d", seq=-1, tenant="acme"))
    assert engine.ask("program", program_id="d")["tenant"] == "acme"
    engine.turn("d", prompt(8, seed=3), sojourn={"v": 1, "tenant": "x" * 1000, "expected_steps_left": 3.5})
    told = engine.ask("program", program_id="d")
    assert (told["tenant"], told["expected_steps_left"]) == ("x" * 256, 3.5)
    for nonsense in (-1, None):
        engine.turn("d", prompt(8, seed=3), sojourn={"v": 1, "expected_steps_left": nonsense})
        assert engine.ask("program", program_id="d")["expected_steps_left"] is None


def test_stats(engine: VirtualEngine) -> None:
    told = engine.ask("stats")
    assert told["programs"] == {"reasoning": 1, "acting": 1, "gated": 0, "ended": 1, "expired": 0}
    assert told["requests"] == 1
    assert (told["leases"], told["blocks"]["leased"], told["block_tokens"]) == (1, 10, 4)
    assert (told["turns"], told["new_tokens"]) == (2, 48)


def test_a_page_of_decisions_says_where_the_next_begins(engine: VirtualEngine) -> None:
    told = engine.ask("decisions", since=1, limit=1)
    assert [(each["kind"], each["program_id"]) for each in told["decisions"]] == [("keep", "c")]
    assert told["next"] == 2
    assert engine.ask("decisions", since=3) == {**told, "decisions": [], "next": 3}


def test_metrics_are_handed_out_once_and_the_catalogue_knows_them_all(engine: VirtualEngine) -> None:
    told = engine.ask("drain_metrics")
    assert {*told["counters"], *told["histograms"], *told["gauges"]} <= METRIC_CATALOG.keys()
    assert METRICS_DROPPED not in told["counters"]
    assert told["gauges"]["sojourn_leases"] == [[{}, 1]]
    assert [{"tier": "device", "state": "leased"}, 640] in told["gauges"]["sojourn_kv_bytes"]
    again = engine.ask("drain_metrics")
    assert again["counters"] == again["histograms"] == {}
    assert again["gauges"].keys() == told["gauges"].keys()


NO_OBJECTS = ["[5]", "5", "{", '"x"', '{"limit": NaN}', "\ud800", "[" * 100_000]
OF_ANOTHER_TYPE = [{"limit": "ten"}, {"limit": 1.5}, {"limit": True}, {"since": []}]


@pytest.mark.parametrize(
    ("operation", "payload", "told"),
    [
        *((name, "{}", "expected capabilities, policy") for name in ("", "shutdown", "Events", "__class__")),
        *((name, payload, "") for name in ("event_batches", "stats") for payload in NO_OBJECTS),
        *(("decisions", json.dumps(arguments), next(iter(arguments))) for arguments in OF_ANOTHER_TYPE),
    ],
)
def test_an_unknown_operation_and_bad_arguments_are_refused(
    engine: VirtualEngine, operation: str, payload: str, told: str
) -> None:
    with pytest.raises(WireError, match=told or None):
        engine.service.call(operation, payload, engine.now)


def test_a_call_changes_nothing_of_what_is_decided(engine: VirtualEngine) -> None:
    def decided() -> tuple[int, ...]:
        return engine.program_scheduler.decisions._next, len(engine.leases), len(engine.done)

    before = decided()
    for operation in EngineService.OPERATIONS:
        engine.ask(operation)
    assert decided() == before


def test_batches_of_several_clients_are_answered_in_their_order(engine: VirtualEngine) -> None:
    start = {"type": "program_start", "program_id": "new", "seq": 0}
    batches = [
        {"v": WIRE_VERSION, "emitter": "x", "events": [start, start]},
        {"v": WIRE_VERSION, "emitter": "y", "events": [{**start, "program_id": ""}]},
    ]
    answers = json.loads(engine.service.call("event_batches", json.dumps(batches), engine.now))
    found = [[outcome["outcome"] for outcome in answer["outcomes"]] for answer in answers]
    assert found == [["applied", "duplicate"], ["rejected"]]


def test_a_report_of_load_has_the_programs_whose_kv_is_there(engine: VirtualEngine) -> None:
    """What the engine has evicted is gone, under every policy; what runs is there."""
    told = engine.ask("load")
    assert (told["requests"], told["request_tokens"], told["complete"]) == (1, 8, True)
    programs = {one["program_id"]: one for one in told["programs"]}
    assert set(programs) == {"a"}, "b has computed nothing yet, c has ended"
    assert programs["a"]["tokens"] == programs["a"]["context_tokens"] > 40
    assert programs["a"]["idle_s"] >= 2.0
    engine.evict([*prompt(40), 7, 7])
    assert engine.ask("load")["programs"] == []
