"""Ledgers of the server become programs; other input is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.metrics.turn_ledger import LossCause, TokenSplit, TurnRecord
from sojourn_server.traces.imports.ledger_import import read_ledgers
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_schema import TraceError, TraceToolRun


def record(
    turn: int, at_s: float, tokens: TokenSplit | None, *, output: int = 20, program: str = "p", **fields: Any
) -> dict[str, Any]:
    """As the server writes it."""
    made = TurnRecord(program, turn, f"r{turn}", at_s, tokens=tokens, output_tokens=output)
    made.admitted_s = made.first_token_s = at_s + 0.5
    made.finished_s, made.outcome = at_s + 2.0, "stopped"
    for name, value in fields.items():
        setattr(made, name, value)
    return made.as_dict()


def split(prompt: int, device: int, new: int, **lost: int) -> TokenSplit:
    causes = {LossCause(cause): count for cause, count in lost.items()}
    return TokenSplit(prompt, device, new, prompt - device - new - sum(lost.values()), causes)


def answer(*ledger: dict[str, Any], program: str = "p", **fields: Any) -> dict[str, Any]:
    """As the server answers it: with the program's last decisions."""
    decision = {"seq": 1, "at_s": 100.0, "kind": "keep", "program_id": program, "reason": "ttl"}
    return {
        "program_id": program, "status": "ended", "agent_type": "coder", "ledger": list(ledger),
        "decisions": [decision], **fields,
    }  # fmt: skip


def write(path: Path, *documents: Any) -> Path:
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


RUN = (
    record(1, 100.0, split(339, 160, 179)),
    record(2, 102.5, split(507, 352, 148), gap_s=0.5, tool_before="bash:cat"),
    record(3, 110.0, split(900, 0, 373, evicted=512), gap_s=5.5, tool_before="search"),
    record(4, 112.0, split(800, 320, 100, changed=380), gap_s=None),
)


def test_a_ledger_becomes_a_program(tmp_path: Path) -> None:
    result = read_ledgers([write(tmp_path / "p.json", answer(*RUN, tenant="t"))])
    (program,) = result.programs
    assert result.notes == []
    assert (program.program_id, program.source, program.group, program.tenant) == (
        "p",
        "sojourn",
        "coder",
        "t",
    )
    assert program.agent_type == "coder"
    assert [t.prompt_tokens for t in program.turns] == [339, 507, 900, 800]
    assert [t.append_tokens for t in program.turns] == [339, 148, 373, 0]
    assert [t.gap_s for t in program.turns] == [0.5, 5.5, 0.0, None]
    assert [t.tool_run for t in program.turns] == [
        TraceToolRun(name="bash", cmd="cat", s=0.5), TraceToolRun(name="search", s=5.5), None, None,
    ]  # fmt: skip
    assert [t.llm_s for t in program.turns] == [2.0] * 4
    assert program.shared_prefix_tokens == 160
    plans = plan_turns(program)
    assert [plan.prompt_tokens for plan in plans] == [339, 507, 900, 800]
    assert [plan.reused_tokens for plan in plans] == [0, 359, 527, 320]
    assert [plan.new_tokens for plan in plans[1:3]] == [148, 373], "as the ledger says"


@pytest.mark.parametrize(("tool_s", "duration_s"), [(0.4, 0.4), (0.0, 0.0), (None, 1.5), (1.500001, 1.5)])
def test_a_call_lasts_as_long_as_tools_ran_in_the_gap(
    tmp_path: Path, tool_s: float | None, duration_s: float
) -> None:
    turns = (
        record(1, 100.0, split(339, 160, 179)),
        record(2, 103.5, split(507, 352, 148), gap_s=1.5, tool_before="bash:cat", tool_s=tool_s),
    )
    (program,) = read_ledgers([write(tmp_path / "p.json", answer(*turns))]).programs
    assert program.turns[0].gap_s == 1.5
    assert program.turns[0].tool_run == TraceToolRun(name="bash", cmd="cat", s=duration_s)


def test_families_lines_and_arrays_are_read(tmp_path: Path) -> None:
    child = answer(
        record(1, 103.0, split(50, 0, 50), program="c"),
        program="c",
        parent_program_id="p",
        agent_type="helper",
    )
    stranger = answer(record(1, 150.0, split(50, 48, 2), program="s"), program="s", parent_program_id="gone")
    shapes = [
        [answer(*RUN), child, stranger],
        [[answer(*RUN), child, stranger]],
    ]
    found = [read_ledgers([write(tmp_path / "x.jsonl", *documents)]).programs for documents in shapes]
    separate = [write(tmp_path / f"{i}.json", document) for i, document in enumerate(shapes[0])]
    found.append(read_ledgers(separate).programs)
    assert all(programs == found[0] for programs in found)
    _, sub, other = found[0]
    assert (sub.parent, sub.parent_turn, sub.start_offset_s, sub.arrival_s) == ("p", 0, 3.0, 3.0)
    assert (other.parent, other.arrival_s) == (None, 50.0)
    assert sub.shared_prefix_tokens is None
    assert found[0][0].shared_prefix_tokens == other.shared_prefix_tokens == 48


def test_omissions_are_noted(tmp_path: Path) -> None:
    failed = record(6, 120.0, split(90, 0, 90), outcome="aborted")
    untold = record(7, 130.0, None)
    late = [record(number, 140.0 + number * 9, split(100 * number, 0, 100)) for number in (8, 9)]
    result = read_ledgers([write(tmp_path / "x", answer(failed, untold, *late), answer(program="empty"))])
    assert [t.prompt_tokens for t in result.programs[0].turns] == [800, 900]
    assert result.notes == [
        "1 programs without any finished turn left out",
        "1 turns that were aborted or failed left out",
        "1 turns without token counts in the ledger left out",
        "1 programs begin with a later turn: the ledger has forgotten their first ones",
    ]


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        ([{"decisions": []}], "line 1: Object missing required field `program_id`; expected what GET"),
        ([answer(*RUN), answer(*RUN)], "line 2: program 'p' occurs twice"),
        ([answer()], "no model call with token counts: 1 programs without any finished turn left out"),
        ([answer({"turn": 1})], "missing required field `outcome`"),
        ([answer({**RUN[0], "tokens": {"prompt": "many"}})], r"Expected `int`, got `str`"),
        (
            [answer({**RUN[0], "output_tokens": -4})],
            r"program 'p': Expected `int` >= 0 - at `\$.turns\[0\].output_tokens`",
        ),
        ([7], "Expected `object`, got `int`"),
    ],
)
def test_what_is_no_ledger_is_named_in_one_line(tmp_path: Path, documents: list[Any], reason: str) -> None:
    path = write(tmp_path / "bad.json", *documents)
    with pytest.raises(TraceError, match=reason) as caught:
        read_ledgers([path])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
