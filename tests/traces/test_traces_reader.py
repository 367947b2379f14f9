"""Good traces come through whole; bad ones are named by file, line and reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.traces.trace_file import read_trace, write_trace
from sojourn_server.traces.trace_schema import ASSUMED_DECODE_S, TraceError, TraceToolRun, TraceTurn


def turn(**fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": 100, "output_tokens": 10, **fields}


def program(program_id: str = "p", **fields: Any) -> dict[str, Any]:
    return {"program_id": program_id, "turns": [turn(), turn(prompt_tokens=150)], **fields}


def with_blocks(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A program whose turns have five full blocks and the first of a sixth."""
    made = [turn(prompt_tokens=83, **one) for one in turns]
    return program(**{"block_size": 16, "hash_scope": "global", "turns": made, **fields})


def write(path: Path, *programs: Any) -> Path:
    path.write_text("".join(json.dumps(p) + "\n" for p in programs))
    return path


def test_plain_and_gzipped_are_the_same_also_written_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    tools = [{"name": "bash", "cmd": "ls", "s": 0.5, "res_chars": 7, "err": 1}]
    lines = [program("a", provider="x", estimated=[]), program("b", turns=[turn(tools=tools, hash_lcp=3)])]
    plain = write(tmp_path / "t.jsonl", *lines)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    misnamed = tmp_path / "t.txt"
    misnamed.write_bytes(packed.read_bytes())
    programs = list(read_trace(plain))
    assert [p.program_id for p in programs] == ["a", "b"]
    assert programs[1].turns[0].tools == (TraceToolRun(name="bash", cmd="ls", s=0.5),)
    assert programs[0].max_context_tokens == 160
    assert list(read_trace(packed)) == list(read_trace(misnamed)) == programs
    for path in (plain, packed):
        assert write_trace(path, programs) == 2
        written = path.read_bytes()
        assert list(read_trace(path)) == programs
        write_trace(path, programs)
        assert path.read_bytes() == written, "the same bytes again"
        assert (written[:2] == b"\x1f\x8b") == (path == packed)


def test_lines_are_read_when_they_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", program("a"), program("b"))
    path.write_text(path.read_text() + "\nnot json\n")
    programs = read_trace(path)
    assert [next(programs).program_id for _ in range(2)] == ["a", "b"]
    with pytest.raises(TraceError, match=r"line 4: not JSON"):
        next(programs)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"turns": [turn()]}, "missing required field `program_id`"),
        (program(turns=[{"prompt_tokens": 3}]), r"missing required field `output_tokens` - at `\$.turns"),
        (program(turns=[]), r"length >= 1 - at `\$.turns`"),
        (program(""), r"length >= 1 - at `\$.program_id`"),
        (program(turns=[turn(), turn(gap_s=-0.5)]), r"`float` >= 0.0 - at `\$.turns\[1\].gap_s`"),
        (program(turns=[turn(prompt_tokens=0)]), r"`int` >= 1 - at `\$.turns\[0\].prompt_tokens`"),
        (program(turns=[turn(output_tokens=-3)]), r"`int` >= 0 - at `\$.turns\[0\].output_tokens`"),
        (program(turns=[turn(tools=[{"name": "x", "s": -2}])]), r"at `\$.turns\[0\].tools\[0\].s`"),
        (program(arrival_s=1e30), r"`float` <= 1000000000.0 - at `\$.arrival_s`"),
        ([1], "Expected `object`, got `array`"),
        (program("good"), "'good' is already on line 1"),
        (with_blocks({"hash_runs": [[1, 5]]}, block_size=None), "hash_runs without block_size"),
        (with_blocks({"hash_runs": [[1, 5]]}, block_size=0), r"`int` >= 1 - at `\$.block_size`"),
        (with_blocks({"hash_runs": [[1, 5]]}, hash_scope="galaxy"), "Invalid enum value 'galaxy'"),
        (with_blocks({"hash_runs": [[1, 5]]}, {}), "turn 1: hash_runs is missing"),
        (with_blocks({"hash_runs": [[1, 5]], "hash_lcp": 1}), "turn 0: hash_lcp is 1; expected 0 to 0"),
        (with_blocks({"hash_runs": [[1, 4]]}), "make 4 blocks; expected 5 full ones in 83 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", program("good"), bad)
    with pytest.raises(TraceError, match=reason) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_a_truncated_gzip_is_named(tmp_path: Path) -> None:
    packed = tmp_path / "t.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps(program(str(i))).encode() + b"\n" for i in range(50)))
    packed.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz: the gzip data is cut off"):
        list(read_trace(packed))
    packed.write_bytes(whole[:20] + bytes([whole[20] ^ 0xFF]) + whole[21:])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz"):
        list(read_trace(packed))


def test_a_program_over_several_lines_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(program(), indent=2) + "\n")
    with pytest.raises(
        TraceError, match=r"line 1: not JSON: .*truncated; expected one whole program per line$"
    ):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("fields", "idle_s"),
    [
        ({"gap_s": 0.0, "tool_seconds": 4.0}, 0.0),
        ({"tool_seconds": 4.0, "dt_s": 9.0}, 4.0),
        ({"dt_s": 9.0, "llm_s": 2.0}, 7.0),
        ({"dt_s": 9.0}, 9.0 - 10 * ASSUMED_DECODE_S),
        ({"dt_s": 0.1}, 0.0),
        ({"tools": (TraceToolRun(s=1.0), TraceToolRun(s=3.0), TraceToolRun(s=60.0, bg=True))}, 3.0),
        ({}, 0.0),
    ],
)
def test_the_gap_is_the_first_that_is_recorded(fields: dict[str, Any], idle_s: float) -> None:
    assert TraceTurn(prompt_tokens=1, output_tokens=10, **fields).idle_s == pytest.approx(idle_s)


def test_the_tool_of_a_gap_is_the_longest_waited_for() -> None:
    runs = (TraceToolRun(name="a", s=1.0), TraceToolRun(name="b", s=2.0), TraceToolRun(name="c", s=9.0, bg=1))
    assert TraceTurn(prompt_tokens=1, output_tokens=1, tools=runs).tool_run == runs[1]
    unknown = (runs[0], TraceToolRun(name="d"))  # it may have lasted for the whole gap
    assert TraceTurn(prompt_tokens=1, output_tokens=1, tools=unknown).tool_run == unknown[1]
    assert TraceTurn(prompt_tokens=1, output_tokens=1, tool="x+y").tool_run == TraceToolRun(name="x")
    assert TraceTurn(prompt_tokens=1, output_tokens=1).tool_run is None
    assert TraceTurn(prompt_tokens=1, output_tokens=1, tools=runs[2:]).tool_run == runs[2]
