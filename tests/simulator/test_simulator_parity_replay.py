"""A live engine's decisions are those of a replay of its recording. What is in recordings, and recordings
that are damaged, cut or edited."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator_parity_workload import Agents, Clock, grants, make_engine, record, recording_lines, write_lines
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.core.events_and_actions import CacheReset, OutputLengthPredicted
from sojourn_server.core.program_scheduler import ProgramScheduler
from sojourn_server.core.scheduler_state import KVPoolConfig, SchedulerState
from sojourn_server.policies.preset import load_preset, preset_text
from sojourn_server.recording.recording_file import (
    FLUSH_RECORDS,
    RecordingError,
    RecordingFile,
    RecordingHeader,
)
from sojourn_server.simulator.parity_replay import replay_recording


@pytest.fixture(scope="module")
def continuum_recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One long life under the preset ``continuum``, and the engine that lived it."""
    path = tmp_path_factory.mktemp("parity") / "continuum.recording"
    return path, record(path, steps=2800)


def parity(*arguments: str) -> tuple[CliError | None, str]:
    """The error of ``sojourn parity``, and what it printed."""
    done = typer.testing.CliRunner().invoke(build_app(), ["parity", *arguments])
    assert done.exception is None or isinstance(done.exception, CliError), done.exception
    return done.exception, " ".join(done.output.split())


# -- the replay decides the same --------------------------------------------------------------------


@pytest.mark.slow
def test_two_thousand_decisions_of_continuum_are_reproduced_exactly(continuum_recording):
    path, engine = continuum_recording
    report = replay_recording(path)
    assert report.difference is None
    assert report.decisions >= 2000
    assert report.decisions_by_kind.keys() == {"keep", "late_keep", "release", "drop", "preempt"}
    # The recording holds what the engine's own log holds, not a selection of it.
    logged, _ = engine.scheduler.sojourn.program_scheduler.decisions.since(0, 1_000_000)
    assert report.decisions_by_kind == Counter(decision.kind for decision in logged)
    assert report.actions_by_kind["LeaseGranted"] > 500
    assert report.actions_by_kind["RequestChosen"] > 100
    assert report.evictions > 5000
    assert report.ended == "the engine stopped"


def test_another_process_without_the_engine_reproduces_it_too(continuum_recording, tmp_path):
    """With other string hashes, so that no order of a set can have decided anything."""
    script = (
        "import sys; from sojourn_server.simulator.parity_replay import replay_recording; "
        "report = replay_recording(sys.argv[1]); "
        "print(report.identical, report.decisions, {'vllm', 'torch'} & set(sys.modules))"
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
    failed, _ = parity("--json", str(tmp_path / "parity.json"), str(continuum_recording[0]))
    assert failed is None
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["identical"] is True
    assert told == {f"True {report['decisions']} set()"}


@pytest.mark.parametrize("policy", ["continuum", "saga", "mori", "tetris", "sojourn", "observe"])
def test_each_policy_is_reproduced(policy, tmp_path):
    """With host memory below the device: placement, forecasts, preemptions, copies ahead of need."""
    seed, steps = (10, 1500) if policy == "tetris" else (3, 1000)
    engine = record(tmp_path / "recording", seed=seed, steps=steps, policy=policy, host_blocks=60)
    report = replay_recording(tmp_path / "recording")
    assert report.difference is None
    assert report.policy == policy
    assert report.decisions > 50
    if policy == "mori":
        assert {"to_device", "to_host", "to_waiting"} <= report.decisions_by_kind.keys()
        assert engine.scheduler.connector.planner.counts["loaded"]
    if policy == "tetris":
        assert report.decisions_by_kind["preempt"] >= 1
        assert report.events_by_kind["DemandSampled"] > 30
        assert report.events_by_kind["AdmissionRequested"] > 250


def test_an_own_policy_is_reproduced_from_the_recordings_copy(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'extends = "continuum-paper"\nname = "mine"\neviction = "typed-labels"\n', encoding="utf-8"
    )
    record(tmp_path / "recording", steps=400, policy_file=str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").unlink()
    report = replay_recording(tmp_path / "recording")
    assert (report.identical, report.policy) == (True, "mine")


def test_what_a_network_guessed_is_reproduced(tmp_path):
    """Predictions come from a thread that a replay does not have, so the recording has them."""
    draw = random.Random(2)
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock, "tetris", host_blocks=60)
    adapter = engine.scheduler.sojourn

    def guess(step: int) -> None:
        for request in [*engine.scheduler.requests.values()]:
            if step % 3 == 0 and request.num_output_tokens:
                exact = max(1, request.max_tokens - request.num_output_tokens)
                points = tuple(sorted(exact * draw.uniform(1.0, 1.1) for _ in range(8)))
                written = request.num_output_tokens
                adapter.handle(
                    OutputLengthPredicted(request.request_id, written, points, 2 * exact), clock.now
                )
        if step % 50 == 0:
            adapter.handle(OutputLengthPredicted(f"gone-{step}", 3, (4.0,) * 8), clock.now)

    Agents(engine, clock, seed=5).run(800, guess)
    engine.scheduler.shutdown()
    report = replay_recording(tmp_path / "recording")
    assert report.difference is None
    assert report.events_by_kind["OutputLengthPredicted"] > 100


def test_what_was_learned_before_and_measured_is_part_of_the_recording(tmp_path):
    """A history of earlier runs and a prefill profile change the leases: the header must hold both."""
    from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve

    profile = EngineProfile("tiny", "cpu", "vllm", 16, PrefillCurve(0.1, 0.01, 1e-6), points=((100, 1.1),))
    (tmp_path / "profile.toml").write_text(profile.to_toml(), encoding="utf-8")
    options = {"history_file": str(tmp_path / "history.json"), "profile_file": str(tmp_path / "profile.toml")}
    record(tmp_path / "first", steps=500, **options)
    record(tmp_path / "second", seed=2, steps=300, **options)
    assert replay_recording(tmp_path / "second").identical
    for field, cold in (("curve", None), ("histories", recording_lines(tmp_path / "first")[0]["histories"])):
        lines = recording_lines(tmp_path / "second")
        lines[0][field] = cold
        assert not replay_recording(write_lines(tmp_path / "edited", lines)).identical, field


def test_resets_are_reproduced(tmp_path):
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)

    def now_and_then(step: int) -> None:
        if step % 150 == 149:
            engine.scheduler.reset_prefix_cache()
            engine.run()
            assert engine.scheduler.reset_prefix_cache()
        if step % 100 == 99:
            engine.scheduler.sojourn.handle(CacheReset(device=step % 200 == 99), clock.now)

    Agents(engine, clock, seed=3).run(600, now_and_then)
    engine.scheduler.shutdown()
    report = replay_recording(tmp_path / "recording")
    assert report.identical
    assert {"CacheResetStarted", "CacheReset"} <= report.events_by_kind.keys()


def test_a_request_that_cannot_be_taken_in_is_reproduced(tmp_path, monkeypatch):
    """A hook of ours that fails half-way leaves what it did until then; so must the replay."""
    arrived = ProgramScheduler._arrived

    def fails_at_times(self: Any, fact: Any, now: float) -> Any:
        if fact.prompt_tokens % 7 == 0:
            self._programs.open(fact.identity.program_id or "nobody", now)
            raise RuntimeError("no")
        return arrived(self, fact, now)

    monkeypatch.setattr(ProgramScheduler, "_arrived", fails_at_times)
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock, strict=False)
    Agents(engine, clock, seed=3).run(300)
    engine.scheduler.shutdown()
    assert engine.scheduler.sojourn.failures > 5
    assert replay_recording(tmp_path / "recording").identical


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


# -- a difference is found ----------------------------------------------------------------------------


def test_the_last_bit_of_a_lease_is_compared(continuum_recording, monkeypatch):
    """One part in 2**52 more, where a tool's own history decides: found at the first such lease."""
    from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
    from sojourn_server.policies.retention_policies import ContinuumRetention

    path, _ = continuum_recording
    keep = ContinuumRetention.keep

    def a_bit_more(self: Any, turn: Any, now: float) -> RetentionDecision:
        choice = keep(self, turn, now)
        more = choice.reason is DecisionReason.THIS_TOOL and choice.ttl_s
        return RetentionDecision(choice.ttl_s * (1 + 2**-52), choice.reason) if more else choice

    monkeypatch.setattr(ContinuumRetention, "keep", a_bit_more)
    lines = recording_lines(path)
    first = next(n for n, (_, reason) in grants(lines).items() if reason == "this_tool")
    report = replay_recording(path)
    assert report.difference is not None
    assert report.difference.startswith(f"line {first + 1}, ")
    assert report.records == first  # the header is no record


@pytest.mark.parametrize("kind", ["tick", "action", "event"])
def test_a_changed_line_is_found(continuum_recording, tmp_path, kind):
    lines = recording_lines(continuum_recording[0])
    at = list(grants(lines))[100]
    if kind == "action":
        lines[at][2][0].pop()
    elif kind == "tick":
        lines[at][0] += 100.0
    else:
        events = [n for n, line in enumerate(lines[:-1]) if n and line[1][0] == "ClientEventReceived"]
        at = next(n for n in events if lines[n][1][2]["type"] == "program_end")
        del lines[at]
    edited = write_lines(tmp_path / "edited", lines)
    failed, said = parity("--json", str(tmp_path / "parity.json"), str(edited))
    assert failed is not None
    assert failed.exit_code == 1
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["identical"] is False
    assert report["records"] >= at
    assert f"line {report['records'] + 1}" in said


# -- what is in it ------------------------------------------------------------------------------------


def test_without_the_setting_there_is_no_recording_and_no_code_of_it():
    engine = make_engine(None, Clock())
    assert type(engine.scheduler.sojourn.program_scheduler) is ProgramScheduler


def test_no_word_of_a_client_that_nothing_depends_on_is_in_the_recording(tmp_path):
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)
    secret = "s3cr3t"
    engine.tell(
        {"type": "program_start", "program_id": "A", "seq": 1, "name": f"fix {secret}", "text": secret},
        {"type": "tool_start", "program_id": "A", "seq": 2, "call_id": "c", "tool": "bash", "args": secret},
        {"type": "tool_stop", "program_id": "A", "seq": 3, "call_id": "c", "duration_s": 1, "status": secret},
        {"type": "program_end", "program_id": "A", "seq": 4, "status": secret},
        {"type": secret, "program_id": secret, "seq": 5},
        {"type": "heartbeat", "program_id": "A", "seq": secret},
    )
    rider = {"type": "program_start", "program_id": "B", "seq": 1, "name": secret}
    context = {
        "step_id": secret,
        "prompt": secret,
        "sojourn": {"v": 1, "emitter": "e", "agent_type": "coder", "events": [rider]},
    }
    engine.add("r1", range(7_654_321, 7_654_421), program_id="A", context=context)
    engine.run()
    engine.scheduler.shutdown()
    text = gzip.decompress((tmp_path / "recording").read_bytes()).decode()
    assert secret not in text
    assert "76543" not in text  # nor a token of a prompt
    assert '"coder' in text
    assert replay_recording(tmp_path / "recording").identical


def test_a_context_is_written_once_not_with_every_turn(tmp_path):
    """Of a chain of block hashes only what is new since the program's last one."""
    engine = make_engine(tmp_path / "recording", Clock(), "observe")
    prompt: list[int] = []
    for turn in range(20):
        prompt += range(1000 * turn, 1000 * turn + 32)
        engine.add(f"r{turn}", prompt, program_id="A")
        engine.run()
    engine.scheduler.shutdown()
    chains = [
        part
        for line in recording_lines(tmp_path / "recording")[1:-1]
        if line[1][0] in ("RequestAdmitted", "TurnFinished")
        for part in line[1]
        if isinstance(part, list) and len(part) == 2 and isinstance(part[1], str)
    ]
    assert chains[-1][0] == 40
    assert sum(len(text) // 16 for _, text in chains) <= 40 + 20


# -- its end, and damage ------------------------------------------------------------------------------


def header() -> RecordingHeader:
    state = SchedulerState(load_preset("continuum"), KVPoolConfig(blocks=100, block_size=16))
    toml, source = preset_text("continuum"), "continuum.toml"
    return RecordingHeader.of(state, preset_toml=toml, preset_source=source, curve=None, versions={})


def test_a_recording_that_grows_too_long_is_cut_off_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sojourn_server.recording.recording_file.MAX_RECORDING_BYTES", 20_000)
    record(tmp_path / "recording", steps=400)
    assert (tmp_path / "recording").stat().st_size < 20_000 + 20_000
    report = replay_recording(tmp_path / "recording")
    assert report.identical
    assert report.ended is not None
    assert report.ended.startswith("cut off")


def test_a_full_disk_costs_one_warning_and_no_request():
    warnings: list[str] = []
    recording = RecordingFile("/dev/full", header(), warn=warnings.append)
    for _ in range(3 * FLUSH_RECORDS):
        recording.write((1.0, ["Tick"], [[], []]))
    recording.write((1.0, "end", {}), close=True)
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    engine = make_engine(Path("/dev/full"), Clock())
    engine.add("r1", range(100), program_id="A")
    engine.run()
    assert not engine.scheduler.requests
    assert engine.scheduler.sojourn.failures == 0


def test_a_recording_without_decisions_is_no_success(tmp_path):
    """An engine that was killed before it wrote any: identical, but to nothing."""
    record(tmp_path / "short", steps=0)
    failed, _ = parity(str(tmp_path / "short"))
    assert failed is not None
    assert "holds no decisions" in failed.message
    assert "--shutdown-timeout" in failed.next_step


def test_an_earlier_recording_is_kept_and_a_killed_engine_leaves_what_was_flushed(tmp_path):
    record(tmp_path / "recording", steps=20)
    engine = make_engine(tmp_path / "recording", (clock := Clock()))
    Agents(engine, clock, seed=1).run(200)
    assert replay_recording(tmp_path / "recording.previous").identical
    with pytest.raises(RecordingError, match=r"recording, after line \d+: the file stops in the middle"):
        replay_recording(tmp_path / "recording")
    report = replay_recording(tmp_path / "recording", allow_unfinished=True)
    engine.scheduler.shutdown()
    whole = replay_recording(tmp_path / "recording")
    assert report.identical
    assert report.ended is None
    assert whole.records - FLUSH_RECORDS <= report.records < whole.records


def edited(edit: Any) -> Any:
    def damage(path: Path, good: Path) -> None:
        lines = recording_lines(good)
        edit(lines)
        write_lines(path, lines)

    return damage


DAMAGES = {
    r"after line \d+: the file stops in the middle: the engine was killed": lambda path, good: (
        path.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    ),
    "after line 0: Not a gzipped file": lambda path, good: path.write_text("hello\n", encoding="utf-8"),
    "after line 0: No such file": lambda path, good: None,
    r"line 1: recording version 12, written by sojourn \S+; expected 17: run sojourn parity": edited(
        lambda lines: lines[0].update(sojourn_recording=12)
    ),
    "line 1: Object missing required field `pool`": edited(lambda lines: lines[0].pop("pool")),
    "line 11: Invalid value 'Tock'": edited(lambda lines: lines.__setitem__(10, [1.0, ["Tock"], [[], []]])),
    r"line \d+: no end record": edited(lambda lines: lines.pop()),
    r"line \d+: goes on after its end record": edited(lambda lines: lines.append(lines[-1])),
}


@pytest.fixture(scope="module")
def short_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "good.recording"
    record(path, steps=150)
    return path


@pytest.mark.parametrize("expected", DAMAGES)
def test_a_damaged_recording_is_one_clear_line(short_recording, tmp_path, expected):
    DAMAGES[expected](tmp_path / "bad.recording", short_recording)
    with pytest.raises(RecordingError, match=r"bad\.recording, " + expected) as error:
        replay_recording(tmp_path / "bad.recording")
    assert "\n" not in str(error.value)
