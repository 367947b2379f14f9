"""The recording: what is in it and what is not, and recordings that are damaged, cut or too long."""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import sojourn_server
from hypothesis import given
from hypothesis import strategies as st
from simulator_parity_workload import Agents, Clock, make_engine, record, recording_lines, write_lines
from sojourn_server.core.events_and_actions import Event, RequestAdmitted, RequestArrived, TurnFinished
from sojourn_server.core.program_scheduler import ProgramScheduler
from sojourn_server.core.request_hints import NO_IDENTITY
from sojourn_server.core.scheduler_limits import SchedulerLimits
from sojourn_server.core.scheduler_state import Histories, KVPoolConfig
from sojourn_server.policies.policy_views import RunningRequestView
from sojourn_server.policies.preset import preset_text
from sojourn_server.programs.tool_call_parsers import ParsedToolCall
from sojourn_server.recording import (
    RECORD_SHAPES,
    RecordingError,
    RecordingFile,
    RecordingHeader,
    RecordingReader,
    RecordingScheduler,
    encode_record,
)
from sojourn_server.recording.record_format import (
    arrival_facts,
    read_arrival,
    read_running,
    running_facts,
)
from sojourn_server.recording.recording_file import FLUSH_RECORDS
from sojourn_server.simulator.parity_replay import replay_recording
from sojourn_server.simulator.recording_player import RecordingPlayer


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "good.recording"
    record(path, steps=150)
    return path


def header(**changes: Any) -> RecordingHeader:
    given = {
        "preset_toml": preset_text("continuum"),
        "preset_source": "continuum.toml",
        "pool": KVPoolConfig(blocks=100, block_size=16),
        "limits": SchedulerLimits(),
        "curve": None,
        "histories": Histories(),
        "versions": {"vllm": "0"},
    }
    return RecordingHeader.of(**{**given, **changes})


# -- nothing is forgotten -----------------------------------------------------------------------

NOT_RECORDED = {
    "arrival", "awaiting_first_token", "check", "context", "continuation_probability", "demand_changes",
    "dropped_programs", "placement",
    "has_yielded",
    "is_overdue", "label", "leased_programs", "live_requests", "may_reclaim", "output_length_errors",
    "output_predictor", "owner_score", "passes", "placed_counts", "placed_tier", "predicts_outputs",
    "prefetch_keys", "prefetch_reserve_blocks", "request", "score_scale_changes", "take_begun_turns",
    "take_changed_programs", "turns_of",
}  # fmt: skip
"""Questions that no policy answers, or whose answer follows from what is recorded: each standing is recorded
with its score, and each label follows from the placement orders."""


def test_every_event_and_question_is_recorded():
    public = {name for name in vars(ProgramScheduler) if not name.startswith("_")}
    overridden = {name for name in vars(RecordingScheduler) if not name.startswith("_")}
    assert public - NOT_RECORDED <= overridden
    assert not overridden & NOT_RECORDED
    tags = {event.__struct_config__.tag for event in get_args(Event)}
    assert len(tags) == len(get_args(Event))
    assert tags <= RECORD_SHAPES.keys()


READ = {"recorder.count", "recorder.observe"}
"""Other calls that the adapter may make: nothing that a decision depends on changes."""
SET = {"recorder.strict"}
"""Attributes that it may set."""


def test_the_adapter_changes_a_scheduler_only_by_events():
    """Calls on and assignments to the scheduler and its requests, in the package that imports the engine."""
    folder = Path(sojourn_server.__file__).parent / "vllm"
    called, assigned = set(), set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found = re.fullmatch(r"(?:self\.)?_?program_scheduler\.([\w.]+)", ast.unparse(node.func))
                called |= {found.group(1)} if found else set()
            for target in node.targets if isinstance(node, ast.Assign) else ():
                found = re.fullmatch(
                    r"(?:self\.)?_?program_scheduler\.([\w.]+)|(request_state\.\w+)", ast.unparse(target)
                )
                assigned |= {found.group(1) or found.group(2)} if found else set()
    recorded = {name for name in vars(RecordingScheduler) if not name.startswith("_")}
    assert len(called) > 10
    assert called <= recorded | NOT_RECORDED | READ
    assert assigned <= SET


def test_only_core_and_recording_read_the_tables():
    server = Path(sojourn_server.__file__).parent
    reads = re.compile(r"program_scheduler\.(_|state\b)")
    found = [
        path.relative_to(server).as_posix()
        for path in server.rglob("*.py")
        if path.relative_to(server).parts[0] not in ("core", "recording") and reads.search(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("priority", [0, 7, -1])
def test_an_arrival_with_a_priority_is_read_as_it_was(priority):
    arrival = RequestArrived("a", NO_IDENTITY, 8, priority)
    facts = arrival_facts(arrival)
    assert read_arrival(facts) == arrival
    assert len(RECORD_SHAPES["arrive"].facts) - len(facts) in (0, RECORD_SHAPES["arrive"].optional)


def test_every_kind_of_record_can_be_played():
    assert {op for op in RECORD_SHAPES if not callable(getattr(RecordingPlayer, op, None))} == set()


def test_every_field_of_a_fact_is_in_the_recording():
    """A new field of a fact must be written down too, or no recording could be replayed."""
    assert list(RequestArrived.__struct_fields__) == ["request_id", "identity", "prompt_tokens", "priority"]
    assert set(RequestAdmitted.__struct_fields__) == {
        "request_id", "cached_tokens", "host_tokens", "tokens", "block_hashes", "resumed", "most_tokens",
    }  # fmt: skip
    assert set(TurnFinished.__struct_fields__) == {
        "request_id", "outcome", "tool_calls", "prompt_tokens", "output_tokens", "cached_blocks",
        "held_blocks", "unheld_blocks", "used_blocks", "block_hashes",
    }  # fmt: skip
    assert [field.name for field in fields(ParsedToolCall)] == ["name", "command"]


@pytest.mark.parametrize("freed_blocks", [None, 0, 10])
def test_what_an_engine_says_of_a_running_request_comes_back(freed_blocks):
    view = RunningRequestView(
        "r", 3, 1, 70, context_tokens=1100, output_tokens=80, most_tokens=900, freed_blocks=freed_blocks
    )
    number, *facts = json.loads(encode_record(running_facts(5, view)))
    assert number == 5
    assert read_running("r", facts) == view


def test_without_the_setting_there_is_no_recording_and_no_code_of_it():
    engine = make_engine(None, Clock())
    assert type(engine.scheduler.sojourn.program_scheduler) is ProgramScheduler


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_floats_come_back_bit_for_bit(values):
    back = json.loads(encode_record(values))
    assert [struct.pack("d", value) for value in back] == [struct.pack("d", value) for value in values]


# -- what is in it ------------------------------------------------------------------------------


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
        "sojourn": {"v": 1, "emitter": "e", "agent_type": "coder" + "x" * 300 + secret, "events": [rider]},
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
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock, "observe")
    prompt: list[int] = []
    for turn in range(20):
        prompt += range(1000 * turn, 1000 * turn + 32)
        engine.add(f"r{turn}", prompt, program_id="A")
        engine.run()
    engine.scheduler.shutdown()
    chains = [
        line[2][-1] for line in recording_lines(tmp_path / "recording")[1:] if line[0] in ("admit", "end")
    ]
    new = sum(len(text) * 3 // 4 // 8 for _, text in chains)
    assert [shared for shared, _ in chains][-1] == 40
    assert new <= 40 + 20
    assert replay_recording(tmp_path / "recording").identical


def test_an_earlier_recording_is_kept(tmp_path):
    for seed in (1, 2):
        record(tmp_path / "recording", seed=seed, steps=20)
    first, second = (RecordingReader(tmp_path / name) for name in ("recording.previous", "recording"))
    assert first.lines != second.lines
    assert replay_recording(tmp_path / "recording.previous").identical


# -- the end ------------------------------------------------------------------------------------


def test_a_recording_that_grows_too_long_is_cut_off_and_says_so(tmp_path):
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)
    is_recording = engine.scheduler.sojourn.program_scheduler
    is_recording._call_recorder._sink._max_bytes = 20_000
    Agents(engine, clock, seed=1).run(400)
    assert not is_recording.is_recording
    assert (tmp_path / "recording").stat().st_size < 20_000 + 20_000
    engine.scheduler.shutdown()
    report = replay_recording(tmp_path / "recording")
    assert report.identical
    assert report.ended is not None
    assert report.ended.startswith("cut off")
    logged = engine.scheduler.sojourn.program_scheduler.decisions.since(0, 10**6)[0]
    assert 0 < report.total_decisions < len(logged)


def test_a_full_disk_costs_one_warning_and_no_request(tmp_path):
    warnings: list[str] = []
    recording = RecordingFile("/dev/full", header(), warn=warnings.append)
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert not recording.is_open
    for _ in range(3 * FLUSH_RECORDS):
        recording.write(("tick", 1.0))
    recording.close()
    assert len(warnings) == 1
    engine = make_engine(Path("/dev/full"), Clock())
    engine.add("r1", range(100), program_id="A")
    engine.run()
    assert not engine.scheduler.requests
    assert engine.scheduler.sojourn.failures == 0


def test_a_disk_that_fills_up_leaves_a_recording_that_can_be_read_so_far(tmp_path):
    warnings: list[str] = []
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)
    sink = engine.scheduler.sojourn.program_scheduler._call_recorder._sink
    sink._warn = warnings.append

    def fill_up(step: int) -> None:
        if step == 100:

            def full(data: bytes) -> int:
                raise OSError(28, "No space left on device")

            real = sink._file
            sink._file = type("Full", (), {"write": staticmethod(full), "close": real.close})()

    Agents(engine, clock, seed=1).run(300, fill_up)
    engine.scheduler.shutdown()
    assert warnings == [warnings[0]]
    assert "No space left on device" in warnings[0]
    assert engine.scheduler.sojourn.failures == 0
    with pytest.raises(RecordingError, match=r"recording, after line \d+: the file stops in the middle"):
        replay_recording(tmp_path / "recording")
    report = replay_recording(tmp_path / "recording", allow_unfinished=True)
    assert report.identical
    assert report.ended is None
    assert report.records > 500


def test_what_cannot_be_put_into_words_ends_the_recording_not_the_call(tmp_path):
    warnings: list[str] = []
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)
    engine.scheduler.sojourn.program_scheduler._call_recorder._sink._warn = warnings.append
    engine.scheduler.sojourn.program_scheduler._call_recorder.record(
        "tick", None, (object(),), None, lambda: None
    )
    engine.add("r1", range(100), program_id="A")
    engine.run()
    assert not engine.scheduler.requests
    assert len(warnings) == 1
    assert "given up" in warnings[0]


def test_a_recording_that_cannot_be_made_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    warnings: list[str] = []
    recording = RecordingFile(tmp_path / "file" / "recording", header(), warn=warnings.append)
    recording.write(("tick", 1.0))
    assert len(warnings) == 1
    assert str(tmp_path / "file" / "recording") in warnings[0]


# -- damage -------------------------------------------------------------------------------------


def damaged(recording: Path, tmp_path: Path, how: str) -> Path:
    path = tmp_path / "bad.recording"
    data = recording.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])
    elif how == "checksum":
        path.write_bytes(data[:-8] + b"\0" * 8)
    elif how == "text":
        path.write_text("hello\n", encoding="utf-8")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "more":
        path.write_bytes(data + data)
    elif how == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", r"bad\.recording, after line \d+: the file stops in the middle: the engine was killed"),
        ("flipped", r"bad\.recording, (after )?line \d+: "),
        ("checksum", r"bad\.recording, after line \d+: damaged \(.*incorrect data check"),
        ("text", r"bad\.recording: not gzipped; expected a recording"),
        ("empty", r"bad\.recording: empty; expected a recording"),
        ("more", r"bad\.recording: goes on after its end"),
        ("folder", r"bad\.recording: Is a directory"),
        ("missing", r"bad\.recording: No such file or directory"),
    ],
)
def test_a_damaged_file_is_one_clear_line(recording, tmp_path, how, expected):
    with pytest.raises(RecordingError, match=expected) as error:
        replay_recording(damaged(recording, tmp_path, how))
    assert "\n" not in str(error.value)


def with_header(**changes: Any) -> Any:
    return lambda lines: lines[0].update(changes)


def at(index: int, line: Any) -> Any:
    return lambda lines: lines.__setitem__(index, line)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            with_header(sojourn_recording=99),
            r"line 1: recording version 99, written by sojourn \S+; expected 12: run sojourn parity",
        ),
        (
            lambda lines: lines[0].pop("sojourn_recording"),
            "line 1: not the header of a recording: no field sojourn_recording",
        ),
        (lambda lines: lines[0].pop("pool"), "line 1: not the header of a recording: .*`pool`"),
        (with_header(pool={"blocks": 3}), "line 1: no scheduler can be built from this: .*block_size"),
        (with_header(limits={"patience": 3}), "line 1: no scheduler can be built from this: .*patience"),
        (
            with_header(preset_toml='lease_reclaim = "nonsense"'),
            "line 1: no scheduler can be built from this: .*retention",
        ),
        (with_header(tools={"version": 99}), "line 1: no scheduler can be built from this: .*version 99"),
        (at(10, ["tock", 1.0]), r"line 11: op is 'tock'; expected tick, step"),
        (at(10, {"a": 1}), "line 11: expected .op, now, facts, answer, decisions, orders"),
        (at(10, ["tick"]), "line 11: expected .op, now, facts, answer, decisions, orders"),
        (at(10, ["step", None, [1, 2]]), "line 11: facts of 'step' are .1, 2.; expected tokens, seconds"),
        (at(10, ["tick", "noon"]), "line 11: now is 'noon'; expected seconds"),
        (at(10, ["tick", 1.0, None, None, 3]), "line 11: decisions are 3; expected a list"),
        (at(10, ["key", None, [99_999, {}]]), "line 11: the facts of 'key' are invalid: KeyError"),
        (at(10, ["event", 1.0, ["e", {"type": "x"}]]), "line 11: the facts of 'event' are invalid"),
        (at(10, ["evict", None, ["A", None, "AAAA", []]]), "line 11: .*3 bytes of block hashes; expected"),
        (lambda lines: lines.pop(), "no end record"),
        (lambda lines: lines.append(["tick", 1.0]), r"line \d+: no end record"),
        (lambda lines: lines.append(lines[-1]), r"line \d+: goes on after its end record"),
    ],
)
def test_a_recording_that_makes_no_sense_is_one_clear_line(recording, tmp_path, edit, expected):
    lines = recording_lines(recording)
    edit(lines)
    with pytest.raises(RecordingError, match=expected) as error:
        replay_recording(write_lines(tmp_path / "bad.recording", lines))
    assert "bad.recording" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_engine_that_was_killed_leaves_what_was_flushed(tmp_path):
    clock = Clock()
    engine = make_engine(tmp_path / "recording", clock)
    Agents(engine, clock, seed=1).run(200)
    killed = tmp_path / "killed"
    killed.write_bytes((tmp_path / "recording").read_bytes())
    report = replay_recording(killed, allow_unfinished=True)
    engine.scheduler.shutdown()
    whole = replay_recording(tmp_path / "recording")
    assert report.identical
    assert whole.records - FLUSH_RECORDS <= report.records < whole.records


def test_infinite_numbers_are_no_fact(recording):
    """What JSON cannot say would be compared as null: only an answer may, and that says so."""
    for line in recording_lines(recording)[1:]:
        for part in line[1:2]:
            assert part is None or math.isfinite(part)
