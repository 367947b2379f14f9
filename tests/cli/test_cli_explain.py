"""``sojourn explain`` prints what the route answers."""

from __future__ import annotations

import io
from typing import Any

import httpx
import msgspec
import pytest
from cli_process import invoke, refused
from live_frames import frame, row
from rich.console import Console
from sojourn_server.cli import build_app
from sojourn_server.cli import explain as command
from sojourn_server.cli.explain import explanation_view
from sojourn_server.cli.live_client import LiveClient
from sojourn_server.metrics.live_frame import ProgramRow
from sojourn_server.metrics.turn_explanation import Explanation, decision_lines
from typer.testing import CliRunner

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


def test_the_table_has_phases_tokens_losses_and_hints() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(explanation_view(msgspec.convert(FOUND, Explanation)))
    text = out.getvalue()
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


def test_the_decoding_of_a_pair_is_not_told_as_an_end() -> None:
    out = io.StringIO()
    view = explanation_view(msgspec.convert({**FOUND, "outcome": "prefilled"}, Explanation))
    Console(file=out, width=100).print(view)
    assert "at the decode engine, not measured here" in out.getvalue()


class Server:
    """A server that knows ``programs``; each has the explanation ``FOUND``."""

    def __init__(self, *programs: ProgramRow, **explanation: Any) -> None:
        self.programs = programs
        self.explanation = {**FOUND, **explanation}
        self.untracked_requests = 0
        self.detail: dict[str, Any] = {"placed": None, "ledger": []}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/sojourn/v1/stream":
            live = frame(*self.programs, untracked_requests=self.untracked_requests)
            return httpx.Response(200, content=msgspec.json.encode(live))
        program_id = path.removeprefix("/sojourn/v1/programs/").removesuffix("/explain")
        if all(program_id != one.program_id for one in self.programs):
            return httpx.Response(404, json={"error": {"message": "no program has this id"}})
        if not path.endswith("/explain"):
            return httpx.Response(200, json={**self.detail, "program_id": program_id})
        return httpx.Response(200, json={**self.explanation, "program_id": program_id})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the command ask this server."""

    def use(server: Server) -> None:
        transport = httpx.MockTransport(server)
        monkeypatch.setattr(command, "LiveClient", lambda url, key: LiveClient(url, key, transport=transport))

    return use


def test_of_several_programs_of_a_name_the_newest_is_explained_and_the_others_are_listed(serve: Any) -> None:
    programs = (
        row("first", name="agent.py", since_s=20.0, status="ended"),
        row("third", name="agent.py", since_s=92.0),
        row("untried", name="agent.py", since_s=99.0, turns=0),
        row("second", name="agent.py", since_s=60.0, status="expired"),
        row("agent.py-else", name="another", since_s=99.5),
    )
    serve(Server(*programs))
    result = invoke("explain", "agent.py")
    assert result.exit_code == 0, result.output
    told, explained = result.stdout.splitlines()[:2]
    assert told == (
        "newest of 4 programs named agent.py; "
        "others: second (40s ago), first (80s ago), untried (no turn yet)"
    )
    assert explained.startswith("third: Turn 2")


def test_an_unknown_name_is_said_with_the_names_that_are_known(serve: Any) -> None:
    serve(Server(row("p-1", name="first-agent"), row("p-2", name="first-agent"), row("p-3")))
    error = refused("explain", "first-agnt")
    assert error.message == "no program has the id or name 'first-agnt'; did you mean 'first-agent'?"
    assert error.next_step == "sojourn top shows the programs; known: first-agent, p-3"
    serve(Server())
    error = refused("explain", "x")
    assert error.next_step.endswith("known: none")
    server = Server()
    server.untracked_requests = 3
    serve(server)
    error = refused("explain", "x")
    assert error.message == "no program has the id or name 'x'; 3 requests came without a program"
    assert error.next_step == "start the agent with sojourn run, or open sojourn.program() in it; known: none"


PLACED = {"seq": 3, "at_s": 0.5, "kind": "to_device", "reason": "free_capacity", "need_blocks": 3.0}
OFF = {"seq": 7, "at_s": 0.9, "kind": "keep", "reason": "policy_off", "ttl_s": 0}


def test_a_policy_without_leases_shows_the_place_and_what_each_turn_reused(serve: Any) -> None:
    decisions = [{**PLACED, "worth": 1.0}, OFF]
    server = Server(row("a"), decisions=decisions, decision_lines=decision_lines(decisions))
    turns = [
        {"turn": 1, "tokens": {"prompt": 40, "device": 0, "host": 0}},
        {"turn": 2, "tokens": {"prompt": 60, "device": 30, "host": 15}},
        {"turn": 3, "tokens": None},
    ]
    server.detail = {
        "engine": {"placed": "host", "status": "acting", "ledger": turns}
    }  # as a gateway answers
    serve(server)
    text = CliRunner().invoke(build_app(), ["explain", "a"], env={"COLUMNS": "120"}).stdout
    assert "lease" not in text
    assert "policy_off" not in text
    assert "decision 3: entered the device: there was room (to_device, free_capacity) need_blocks=3" in text
    assert "\nterms: worth = weight of the program's progress" in text
    assert "price" not in text, "only the terms that occur"
    assert "place: host (its KV is in host memory)" in text
    assert "reused: turn 1: 0 of 40; turn 2: 45 of 60 (75%)\n" in text
    assert "state: acting (its tool runs, or it is idle)\n" in text
