"""``sojourn explain`` prints what the route answers."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from cli_process import invoke, refused
from live_frames import frame, row
from rich.console import Console, RenderableType
from sojourn_server.cli.explain import explanation_view
from sojourn_server.metrics.live_frame import ProgramRow
from sojourn_server.metrics.turn_explanation import Explanation, decision_lines

FOUND = {
    "program_id": "[red]a",
    "turn": 2,
    "text": "Turn 2: 1.50 s to the first token.",
    "before": {"gap_s": 9.0, "tool": "bash:\x1b[31mpytest", "leased_at_return": False},
    "seconds": {"queued": 0.5, "prefilling": 1.0, "decoding": 2.0, "wall": 3.5},
    "first_token_s": 1.5,
    "usual_first_token_s": None,
    "tokens": {"prompt": 60, "device": 8, "host": 0, "new": 20, "tail": 2, "lost": {"expired": 30}},
    "lost_to": "[b]thief",
    "recompute_s": 1.0,
    "saved_s": None,
    "outcome": "stopped",
    "decisions": [
        {"seq": 3, "at_s": 0.5, "kind": "keep", "reason": "not_worth_it", "ttl_s": 0},
        {"seq": 4, "at_s": 1.0, "kind": "keep", "reason": "ttl", "ttl_s": 2.5},
    ],
    "decision_lines": ["decision 3: no lease (not_worth_it) ttl_s=0"],
    "advice": [{"hint": "kv_retention_ttl_seconds", "text": "A hinted TTL of 9.0 s.", "saves_s": 0.8}],
    "unknown": ["which tool"],
    "turns": [1, 2],
}


def shown(view: RenderableType) -> str:
    """What a console of 100 columns prints of it."""
    out = io.StringIO()
    Console(file=out, width=100).print(view)
    return out.getvalue()


def explanation(**changes: Any) -> RenderableType:
    return explanation_view(msgspec.convert({**FOUND, **changes}, Explanation))


def test_the_table_has_phases_tokens_losses_and_hints() -> None:
    text = shown(explanation())
    for part in (
        "[red]a",
        "lost: expired",
        "computed again; taken by [b]thief",
        "20      computed for the first time",
        "ended: stopped",
        "decision 3: no lease (not_worth_it)",
        "about 0.80 s (estimate)",
        "unknown: which",
    ):
        assert part in text
    assert "\x1b" not in text
    assert "at the decode engine, not measured here" in shown(explanation(outcome="prefilled"))


def answers(*programs: ProgramRow, untracked_requests: int = 0, **explanation: Any) -> dict[str, Any]:
    """The answers of a server that knows ``programs``; each has the explanation ``FOUND``."""
    live = frame(*programs, untracked_requests=untracked_requests)
    found: dict[str, Any] = {"/sojourn/v1/stream": live}
    for program_id in (program.program_id for program in programs):
        path = f"/sojourn/v1/programs/{program_id}"
        found[path] = {"program_id": program_id, "placed": None, "ledger": []}
        found[f"{path}/explain"] = {**FOUND, **explanation, "program_id": program_id}
    return found


def test_of_several_programs_of_a_name_the_newest_is_explained_and_the_others_are_listed(serve: Any) -> None:
    programs = (
        row("first", name="agent.py", since_s=20.0, status="ended"),
        row("third", name="agent.py", since_s=92.0),
        row("untried", name="agent.py", since_s=99.0, turns=0),
        row("second", name="agent.py", since_s=60.0, status="expired"),
        row("agent.py-else", name="another", since_s=99.5),
    )
    serve(answers(*programs))
    result = invoke("explain", "agent.py")
    assert result.exit_code == 0, result.output
    told, explained = result.stdout.splitlines()[:2]
    assert told == (
        "newest of 4 programs named agent.py; "
        "others: second (40s ago), first (80s ago), untried (no turn yet)"
    )
    assert explained.startswith("third: Turn 2")


@pytest.mark.parametrize(
    ("meant", "found"),
    {
        "0f3a": "0f3a", "3a": "0f3a", "0f7": "0f77", "other": "b-end",
        "fix 0f3a": "0f3a", "ot… -end": "b-end", "b-e…": "b-end",  # as in the table of sojourn top
    }.items(),
)  # fmt: skip
def test_a_name_or_a_part_of_an_id_may_mean_one_program(serve: Any, meant: str, found: str) -> None:
    serve(answers(row("0f3a", name="fix"), row("0f77", name="fix"), row("b-end", name="other")))
    assert invoke("explain", meant).stdout.startswith(f"{found}: Turn 2")


@pytest.mark.parametrize(
    ("program", "untracked", "said", "next_step"),
    [
        ("0f", 0, "2 programs match '0f'", "name one by its id: 0f3a, 0f77"),
        (
            "first-agnt", 0, "no program has the id or name 'first-agnt'; did you mean 'first-agent'?",
            "sojourn top shows the programs; known: first-agent, b-end",
        ),
        ("x", None, "no program has the id or name 'x'", "sojourn top shows the programs; known: none"),
        (
            "x", 3, "no program has the id or name 'x'; 3 requests came without a program",
            "start the agent with sojourn run, or open sojourn.program() in it; known: none",
        ),
    ],
)  # fmt: skip
def test_an_unknown_name_is_said_with_the_names_that_are_known(
    serve: Any, program: str, untracked: int | None, said: str, next_step: str
) -> None:
    known = (row("0f3a", name="first-agent"), row("0f77", name="first-agent"), row("b-end"))
    serve(answers(*known) if untracked == 0 else answers(untracked_requests=untracked or 0))
    error = refused("explain", program)
    assert (error.message, error.next_step) == (said, next_step)


def test_a_turn_that_is_unknown_is_an_error_though_the_program_be_known(serve: Any) -> None:
    server = serve(answers(row("a")))
    server.answers["/sojourn/v1/programs/a/explain"] = (404, {"error": {"message": "no such turn"}})
    assert refused("explain", "a", "--turn", "9").message.endswith("404 no such turn")


def test_a_policy_without_leases_shows_the_place_and_what_each_turn_reused(serve: Any) -> None:
    placed = {"kind": "to_device", "reason": "free_capacity", "need_blocks": 3.0, "worth": 1.0}
    off = {"kind": "keep", "reason": "policy_off", "ttl_s": 0}
    decisions = [{"seq": 3, "at_s": 0.5, **placed}, {"seq": 7, "at_s": 0.9, **off}]
    server = serve(answers(row("a"), decisions=decisions, decision_lines=decision_lines(decisions)))
    turns = [
        {"turn": 1, "tokens": {"prompt": 40, "device": 0, "host": 0}},
        {"turn": 2, "tokens": {"prompt": 60, "device": 30, "host": 15}},
        {"turn": 3, "tokens": None},
    ]
    engine = {"placed": "host", "status": "acting", "ledger": turns}
    server.answers["/sojourn/v1/programs/a"] = {"program_id": "a", "engine": engine}  # as a gateway answers
    text = invoke("explain", "a", COLUMNS="120").stdout
    assert "lease" not in text
    assert "policy_off" not in text
    assert "decision 3: entered the device: there was room (to_device, free_capacity) need_blocks=3" in text
    assert "\nterms: worth = weight of the program's progress" in text
    assert "price" not in text, "only the terms that occur"
    assert "place: host (its KV is in host memory)" in text
    assert "reused: turn 1: 0 of 40; turn 2: 45 of 60 (75%)\n" in text
    assert "state: acting (its tool runs, or it is idle)\n" in text
