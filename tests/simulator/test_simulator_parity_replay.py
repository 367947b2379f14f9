"""Decisions of the adapter are reproduced exactly when its recorded events are replayed through the lab."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from simulator_parity_workload import Agents, Clock, grants, make_engine, record, recording_lines, write_lines
from sojourn_server.core.events_and_actions import CacheReset, OutputLengthPredicted
from sojourn_server.core.request_lifecycle import RequestLifecycle
from sojourn_server.policies.preset import preset_names
from sojourn_server.programs.output_length_history import MAX_OUTPUT_TOKENS
from sojourn_server.recording import RECORD_SHAPES, RecordingError
from sojourn_server.simulator.parity_replay import replay_recording

KINDS = {"keep", "late_keep", "release", "drop", "preempt"}


@pytest.fixture(scope="module")
def continuum_recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One long life under the preset ``continuum``, and the engine that lived it."""
    path = tmp_path_factory.mktemp("parity") / "continuum.recording"
    return path, record(path, steps=2800)


def test_two_thousand_decisions_of_continuum_are_reproduced_exactly(continuum_recording):
    path, engine = continuum_recording
    report = replay_recording(path)
    assert report.difference is None
    assert report.identical
    assert report.total_decisions >= 2000
    assert report.decisions.keys() == KINDS
    # The recording holds what the engine's own log holds, not a selection of it.
    logged, _ = engine.scheduler.sojourn.program_scheduler.decisions.since(0, 1_000_000)
    assert report.decisions == Counter(decision.kind for decision in logged)
    # And nothing that can be answered was never asked.
    unasked = {"close", "give_way", "look", "park", "prefetch", "standing", "stranger"}
    asked = {op for op, shape in RECORD_SHAPES.items() if shape.answer} - unasked
    assert report.answers.keys() == asked
    assert len(grants(recording_lines(path))) > 500
    assert report.evictions > 5000
    assert report.ended == "the engine stopped"


def test_another_process_without_the_engine_reproduces_it_too(continuum_recording):
    """With other string hashes, so that no order of a set can have decided anything."""
    script = (
        "import sys; from sojourn_server.simulator.parity_replay import replay_recording; "
        "report = replay_recording(sys.argv[1]); "
        "print(report.identical, report.total_decisions, {'vllm', 'torch'} & set(sys.modules))"
    )
    told = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(continuum_recording[0])],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        told.add(done.stdout.strip())
    assert told == {f"True {replay_recording(continuum_recording[0]).total_decisions} set()"}


@pytest.mark.parametrize("policy", preset_names())
def test_every_preset_is_reproduced(policy, tmp_path):
    record(tmp_path / "recording", seed=7, steps=400, policy=policy)
    report = replay_recording(tmp_path / "recording")
    assert report.difference is None
    assert report.preset == policy
    assert report.total_decisions > 50


def test_placement_in_tiers_is_reproduced(tmp_path):
    """With host memory below the device: who is parked, moved, and told to leave after a turn."""
    more = {"host_blocks": 60, "gate_timeout_s": 5.0}
    engine = record(tmp_path / "recording", seed=3, steps=1500, policy="mori-exchange", **more)
    report = replay_recording(tmp_path / "recording")
    assert report.difference is None
    assert {"to_device", "to_host", "to_waiting"} <= report.decisions.keys()
    assert report.answers["park"] > 100
    lines = recording_lines(tmp_path / "recording")[1:]
    assert any(order[0] == "refuse" for line in lines if len(line) > 5 for order in line[5])
    counts = engine.scheduler.connector.planner.counts
    assert counts["stored"]
    assert counts["loaded"]


def test_forecasts_and_preemptions_are_reproduced(tmp_path):
    """With host memory below the device: what all will need, who is let in, preempted, and copied ahead."""
    record(tmp_path / "recording", seed=6, steps=3000, policy="tetris", host_blocks=60)
    report = replay_recording(tmp_path / "recording")
    assert report.difference is None
    assert report.decisions["preempt"] >= 1
    assert report.answers["look"] > 50
    assert report.answers["victim"] >= report.answers["preempt"] >= 1
    assert report.answers["enter"] > 500


def test_what_a_network_guessed_is_reproduced(tmp_path):
    """Predictions come from a thread that a replay does not have, so the recording has them."""
    draw = random.Random(2)
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock, "tetris-learned", host_blocks=60)
    adapter = engine.scheduler.sojourn
    told: list[Any] = []

    def guess(step: int) -> None:
        for request in [*engine.scheduler.requests.values()]:
            if step % 3 == 0 and request.num_output_tokens:
                exact = max(1, request.max_tokens - request.num_output_tokens)
                points = tuple(sorted(exact * draw.uniform(1.0, 1.1) for _ in range(8)))
                written = request.num_output_tokens
                adapter.handle(
                    OutputLengthPredicted(request.request_id, written, points, 2 * exact), clock.now
                )
                told.append([written, list(points), 2 * exact])
        if step % 50 == 0:
            adapter.handle(OutputLengthPredicted(f"gone-{step}", 3, (4.0,) * 8), clock.now)
            told.append([3, [4.0] * 8, MAX_OUTPUT_TOKENS])

    Agents(engine, clock, seed=5).run(1500, guess)
    judged = adapter.program_scheduler.output_length_errors()
    engine.scheduler.shutdown()
    report = replay_recording(tmp_path / "recording")
    assert report.difference is None
    recorded = [line[2] for line in recording_lines(tmp_path / "recording")[1:] if line[0] == "guess"]
    assert len(recorded) > 200
    assert [facts[1:] for facts in recorded] == told
    assert {type(facts[0]) for facts in recorded} == {int, str}, (
        "a number for who is in the engine, else the id"
    )
    assert judged["network_off"] < judged["without_off"], "so that they were believed"
    assert report.answers["look"] > 30


def test_an_order_of_reuse_by_program_is_reproduced(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'extends = "continuum-paper"\nname = "mine"\neviction = "latest-program"\n', encoding="utf-8"
    )
    record(tmp_path / "recording", steps=400, policy_file=str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").unlink()  # the recording holds its own copy
    report = replay_recording(tmp_path / "recording")
    assert report.identical
    assert report.preset == "mine"
    assert report.answers["standing"] > 100


def test_what_was_learned_before_and_measured_is_part_of_the_recording(tmp_path):
    """A history of earlier runs and a prefill profile change the leases: the header must hold both."""
    from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve

    profile = EngineProfile("tiny", "cpu", "vllm", 16, PrefillCurve(0.1, 0.01, 1e-6), points=((100, 1.1),))
    (tmp_path / "profile.toml").write_text(profile.to_toml(), encoding="utf-8")
    options = {"history_file": str(tmp_path / "history.json"), "profile_file": str(tmp_path / "profile.toml")}
    record(tmp_path / "first", steps=500, **options)
    record(tmp_path / "second", seed=2, steps=300, **options)
    header = recording_lines(tmp_path / "second")[0]
    assert len(header["tools"]["newest"]) > 50
    assert header["curve"] == [0.1, 0.01, 1e-6]
    assert replay_recording(tmp_path / "second").identical
    for field, cold in (("curve", None), ("tools", recording_lines(tmp_path / "first")[0]["tools"])):
        lines = recording_lines(tmp_path / "second")
        lines[0][field] = cold
        assert not replay_recording(write_lines(tmp_path / "edited", lines)).identical, field


def test_a_reset_cache_and_strangers_are_reproduced(tmp_path):
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)

    def now_and_then(step: int) -> None:
        if step % 40 == 0:
            engine.add(f"x{step}", range(step, step + 100), max_tokens=4)
        if step % 150 == 149:
            refused.append(not engine.scheduler.reset_prefix_cache())
            engine.run()
            assert engine.scheduler.reset_prefix_cache()

    refused: list[bool] = []
    Agents(engine, clock, seed=3).run(600, now_and_then)
    assert any(refused), "requests ran"
    engine.scheduler.shutdown()
    lines = recording_lines(tmp_path / "recording")
    assert {"reset_start", "reset", "left"} <= {line[0] for line in lines if isinstance(line, list)}
    assert replay_recording(tmp_path / "recording").identical


def test_a_reset_below_the_device_is_reproduced(tmp_path):
    """Its record has a field that others leave out, so recordings made before there was one stay valid."""
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)

    def now_and_then(step: int) -> None:
        if step % 100 == 99:
            engine.scheduler.sojourn.handle(CacheReset(device=step % 200 == 99), clock.now)

    Agents(engine, clock, seed=3).run(400, now_and_then)
    engine.scheduler.shutdown()
    lines = recording_lines(tmp_path / "recording")
    resets = [line for line in lines if isinstance(line, list) and line[0] == "reset"]
    assert [[*line, []][2] for line in resets] == [[], [False], [], [False]]
    assert replay_recording(tmp_path / "recording").identical
    resets[-1][2:3] = [[False, 1]]
    with pytest.raises(RecordingError, match="facts of 'reset'"):
        replay_recording(write_lines(tmp_path / "edited", lines))


def test_a_request_that_cannot_be_taken_in_is_reproduced(tmp_path, monkeypatch):
    """A hook of ours that fails half-way leaves what it did until then; so must the replay."""
    arrived = RequestLifecycle.arrived

    def fails_at_times(self: Any, fact: Any, now: float) -> Any:
        if fact.prompt_tokens % 7 == 0:
            self._programs.open(fact.identity.program_id or "nobody", now)
            raise RuntimeError("no")
        return arrived(self, fact, now)

    monkeypatch.setattr(RequestLifecycle, "arrived", fails_at_times)
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock, strict=False)
    Agents(engine, clock, seed=3).run(300)
    engine.scheduler.shutdown()
    assert engine.scheduler.sojourn.failures > 5
    report = replay_recording(tmp_path / "recording")
    assert report.identical
    assert report.answers["stranger"] == engine.scheduler.sojourn.failures


PROGRAMS = st.sampled_from(["A", "B", "C"])
SECONDS = st.floats(0, 500, allow_subnormal=True)
OPERATIONS = st.one_of(
    st.tuples(st.just("turn"), PROGRAMS, st.integers(1, 200), st.integers(1, 20)),
    st.tuples(st.just("hinted"), PROGRAMS, st.floats(-1, 1e9), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 9), st.floats(1e-6, 3.0)),
    st.tuples(st.just("tool_start"), PROGRAMS, SECONDS),
    st.tuples(st.just("tool_stop"), PROGRAMS, SECONDS),
    st.tuples(st.just("program_start"), PROGRAMS, st.booleans()),
    st.tuples(st.just("program_end"), PROGRAMS, st.sampled_from(["ok", "cancelled", "whatever"])),
    st.tuples(st.just("heartbeat"), PROGRAMS, st.integers(0, 2**80)),
    st.tuples(st.just("garbage"), st.sampled_from([{"type": "nonsense"}, {"type": "heartbeat", "seq": -1}])),
    st.tuples(st.just("wait"), st.floats(0, 2000)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=60))
def test_any_life_is_reproduced(operations, tmp_path_factory):
    path = tmp_path_factory.mktemp("life") / "recording"
    clock = Clock()
    engine = make_engine(path, clock)
    contexts: dict[str, list[int]] = {}
    for number, (what, *how) in enumerate(operations):
        if what in ("turn", "hinted"):
            program = how[0]
            new, output = (how[1], how[2]) if what == "turn" else (33, 2)
            context = contexts.setdefault(program, [])
            if len(context) + new + output > 700:
                context.clear()
            context += range(1000 * number, 1000 * number + new)
            hint = {"kv_retention_ttl_seconds": how[1], "expected_resume": how[2]} if what == "hinted" else {}
            engine.add(f"r{number}", context, max_tokens=output, program_id=program, context=hint)
        elif what == "step":
            for _ in range(how[0]):
                clock.now += how[1]
                engine.step()
        elif what == "wait":
            clock.now += how[0]
            engine.ask("stats")
        elif what == "abort":
            for request_id in sorted(engine.scheduler.requests)[how[0] : how[0] + 1]:
                engine.abort(request_id)
        elif what == "garbage":
            engine.tell(how[0])
        else:
            fields: dict[str, Any] = {
                "tool_start": {"call_id": "c", "tool": "bash", "age_s": how[1]},
                "tool_stop": {"call_id": "c", "duration_s": how[1]},
                "program_start": {"heartbeat": how[1]},
                "program_end": {"status": how[1]},
                "heartbeat": {},
            }[what]
            seq = how[1] if what == "heartbeat" else number
            engine.tell({"type": what, "program_id": how[0], "seq": seq, **fields})
    engine.scheduler.shutdown()
    report = replay_recording(path)
    assert report.difference is None
    assert report.ended == "the engine stopped"


# -- negative controls ---------------------------------------------------------------------


def first_grant(lines: list[Any]) -> int:
    """Index of the first record that granted a lease whose time was computed."""
    return next(n for n in grants(lines) if lines[n][3][6] == "this_tool")


def test_another_constant_is_found_where_it_first_tells(continuum_recording, tmp_path):
    lines = recording_lines(continuum_recording[0])
    longest_ttl_s = max(lines[n][3][0] for n in grants(lines) if lines[n][3][6] != "hinted")
    first = next(n for n in grants(lines) if lines[n][3][0] > 0.9 * longest_ttl_s)
    assert "max_ttl_s = 300.0" in lines[0]["preset_toml"]
    lines[0]["preset_toml"] = lines[0]["preset_toml"].replace(
        "max_ttl_s = 300.0", f"max_ttl_s = {0.9 * longest_ttl_s!r}"
    )
    report = replay_recording(write_lines(tmp_path / "edited", lines))
    found = report.difference
    assert found is not None
    assert found.line == first + 1
    assert found.where == "decisions.0.numbers.ttl_s"
    assert found.recorded == lines[first][3][0]
    assert found.replayed < found.recorded
    assert not report.identical
    assert report.records == first  # the header is no record


def test_the_last_bit_of_a_lease_is_compared(continuum_recording, monkeypatch):
    """One part in 2**52 more, where a tool's own history decides: found at the first such lease."""
    from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
    from sojourn_server.policies.retention.continuum_ttl import ContinuumRetention

    path, _ = continuum_recording
    ttl = ContinuumRetention.ttl

    def a_bit_more(self: Any, turn: Any) -> RetentionDecision:
        choice = ttl(self, turn)
        more = choice.reason is DecisionReason.THIS_TOOL and choice.ttl_s
        return RetentionDecision(choice.ttl_s * (1 + 2**-52), choice.reason) if more else choice

    monkeypatch.setattr(ContinuumRetention, "ttl", a_bit_more)
    found = replay_recording(path).difference
    lines = recording_lines(path)
    assert found is not None
    assert found.line == first_grant(lines) + 1
    assert found.where == "decisions.0.numbers.ttl_s"
    assert 0 < found.replayed - found.recorded < 1e-12
    assert found.before  # what came before of the same program


def applied(line: list[Any]) -> bool:
    return line[3][0] == "applied" and len(line[3]) > 1


def is_overdue(line: list[Any]) -> bool:
    """Whether a ``room`` record is of an overdue request, for which leases end whatever they would free."""
    return bool(line[2][0].get("overdue"))


EDITS = {
    # op: which record of it, what is changed in it, where that must tell (None: somewhere later)
    "enter": (lambda line: line[3] is False, lambda line: line[2].__setitem__(2, 10_000), "answer"),
    "room": (
        lambda line: len(line) > 5 and not is_overdue(line),
        lambda line: line[2].__setitem__(1, dict.fromkeys(line[2][1], 0)),
        None,
    ),
    "room ": (lambda line: len(line) > 5, lambda line: line[5].pop(), "orders.length"),
    "tick": (lambda line: len(line) > 5, lambda line: line[5][0].__setitem__(2, "end"), "orders.0.2"),
    "end": (
        lambda line: line[3] is not None,
        lambda line: line[2].__setitem__(5, 10_000),
        "decisions.0.numbers.blocks",
    ),
    "key": (lambda line: line[3][0] != 5, lambda line: line[3].__setitem__(2, 10**6), "answer.2"),
    "gate": (lambda line: line[3], lambda line: line.__setitem__(3, False), "answer"),
    "event": (applied, lambda line: line[3].__setitem__(0, "duplicate"), "answer.outcome"),
    "event ": (applied, lambda line: line.__setitem__(1, line[1] + 100.0), None),
    "admit": (lambda line: line[2][1], lambda line: line[2].__setitem__(1, 0), "answer.device"),
    "line": (lambda line: line[3] is False, lambda line: line.__setitem__(3, True), "answer"),
    "victim": (lambda line: line[3], lambda line: line[2][1].clear(), "answer"),
}


@pytest.mark.parametrize("name", EDITS)
def test_one_changed_fact_or_answer_is_found(continuum_recording, tmp_path, name):
    which, edit, where = EDITS[name]
    lines = recording_lines(continuum_recording[0])
    of_its_kind = [n for n, line in enumerate(lines) if isinstance(line, list) and line[0] == name.strip()]
    of_its_kind = [n for n in of_its_kind if len(lines[n]) > 3 and which(lines[n])]
    at = of_its_kind[len(of_its_kind) // 2]
    edit(lines[at])
    found = replay_recording(write_lines(tmp_path / "edited", lines)).difference
    assert found is not None
    assert found.line >= at + 1
    if where is not None:
        assert (found.line, found.op, found.where) == (at + 1, name.strip(), where)


def test_a_record_left_out_is_found(continuum_recording, tmp_path):
    lines = recording_lines(continuum_recording[0])
    events = [n for n, line in enumerate(lines) if isinstance(line, list) and line[0] == "event"]
    at = next(n for n in events if lines[n][2][1]["type"] == "program_end")
    del lines[at]
    found = replay_recording(write_lines(tmp_path / "edited", lines)).difference
    assert found is not None
    assert found.line > at


def test_the_report_says_what_was_found(continuum_recording, tmp_path):
    path, _ = continuum_recording
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(replay_recording(path))
        lines = recording_lines(path)
        at = first_grant(lines)
        lines[at][3][1] += 1.0
        report = replay_recording(write_lines(tmp_path / "edited", lines))
        console.print(report)
    text = console.export_text()
    assert "identical: " in text
    assert "answer.expires_s" in text
    assert f"line {at + 1}" in text
    assert "before:" in text
    assert json.loads(json.dumps(report.as_dict()))["identical"] is False
