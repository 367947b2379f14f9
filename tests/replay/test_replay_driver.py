"""A replay over real HTTP: what is sent, what is counted, and what is said when it cannot work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_completions_server import FakeServer
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.metrics.live_frame import PROBE_ID
from sojourn_server.replay.completions_client import CompletionsClient
from sojourn_server.replay.replay_driver import Replay, ReplayOptions
from sojourn_server.replay.replay_report import FORCING_IGNORED, ReplayTally
from sojourn_server.traces.trace_schema import TraceProgram, TraceToolRun, TraceTurn
from typer.testing import CliRunner


def append_only(name: str, turns: int = 3, **fields: Any) -> TraceProgram:
    made = [
        TraceTurn(
            prompt_tokens=100,
            output_tokens=8,
            gap_s=0.01,
            tools=(TraceToolRun(name="bash", cmd="ls", s=0.01),),
        )
    ]
    for _ in range(turns - 1):
        before = made[-1]
        prompt = before.prompt_tokens + before.output_tokens + 40
        made.append(
            TraceTurn(prompt_tokens=prompt, output_tokens=8, append_tokens=40, gap_s=0.0, tool="search")
        )
    return TraceProgram(program_id=name, turns=tuple(made), source="test", **fields)


async def run(server: FakeServer, programs: list[TraceProgram], **options: Any) -> ReplayTally:
    async with CompletionsClient(server.url) as client:
        served = await client.discover(None)
        return await Replay(programs, client, served, ReplayOptions(**options)).run()


async def test_a_server_with_a_perfect_cache_computes_nothing_again() -> None:
    with FakeServer() as server:
        tally = await run(server, [append_only("a"), append_only("b")])
    document = tally.document()
    assert (document["programs_finished"], document["programs_unfinished"], document["turns"]) == (2, 0, 6)
    assert document["prompt_tokens"] == 2 * (100 + 148 + 196)
    assert document["output_tokens"] == 48
    # Whole blocks of 16: of 107 and 155 tokens with KV, 96 and 144 are reusable.
    assert document["cached_tokens"] == 2 * (96 + 144)
    assert document["computed_tokens"] == document["prompt_tokens"] - document["cached_tokens"]
    assert document["regenerated_tokens"] == 0
    assert document["completion_s"]["count"] == 2
    assert document["ttft_s"]["count"] == document["tpot_s"]["count"] == 6
    assert document["completion_s"]["mean"] >= 0.01
    assert document["notes"] == []


async def test_a_server_that_forgets_computes_every_kept_prefix_again() -> None:
    with FakeServer(forgets=True) as server:
        tally = await run(server, [append_only("a")])
    assert tally.document()["regenerated_tokens"] == 96 + 144
    assert tally.document()["cached_tokens"] == 0


async def test_the_server_s_own_outputs_become_the_next_prefix() -> None:
    with FakeServer() as server:
        await run(server, [append_only("a", turns=2)])
        first, second = server.requests
        expected = [(sum(first["prompt"]) + i) % 90 + 5 for i in range(8)]
    assert second["prompt"][:108] == first["prompt"] + expected
    assert first["ignore_eos"] is True
    assert all(PROBE_ID in headers["X-Request-Id"] for headers in server.headers), "not counted as an agent's"
    assert first["max_tokens"] == 8


async def test_forced_tokens_become_the_next_prefix_and_a_server_that_ignores_them_is_told_of() -> None:
    with FakeServer() as server:
        tally = await run(server, [append_only("a", turns=2)], force_tokens=True)
        first, second = server.requests
    # The last token ends the output; its KV is never computed, so the next prompt may have another one there.
    assert second["prompt"][100:107] == first["vllm_xargs"]["replay_ids"][:7]
    assert tally.notes() == []
    with FakeServer(obeys_replay=False) as server:
        tally = await run(server, [append_only("a")], force_tokens=True)
    assert tally.notes() == [FORCING_IGNORED]


@pytest.mark.parametrize(
    ("tool_s", "tools_s", "tool_sleep_s", "rest_s"),
    [
        (0.5, None, 0.125, 0.375),
        (0.5, 1.0, 0.125, 0.375),
        (None, 1.0, 0.25, 0.25),
        (None, 9.0, 0.5, 0.0),
        (None, None, 0.5, 0.0),
        (9.0, None, 0.5, 0.0),
    ],
)
async def test_a_call_is_reported_as_long_as_it_ran_not_as_long_as_the_gap(
    tool_s: float | None,
    tools_s: float | None,
    tool_sleep_s: float,
    rest_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = (TraceToolRun(name="search", s=tool_s),)
    turn = TraceTurn(prompt_tokens=64, output_tokens=8, gap_s=2.0, tools=tools, tool_seconds=tools_s)
    then = TraceTurn(prompt_tokens=112, output_tokens=8, append_tokens=40)
    seen: list[str | float] = []
    really_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            seen.append(seconds)
        await really_sleep(0)

    @asynccontextmanager
    async def tool_call(name: str, tool_class: str | None) -> AsyncIterator[None]:
        seen.append(f"{name} starts")
        yield
        seen.append(f"{name} ends")

    monkeypatch.setattr("sojourn.tool_call", tool_call)
    monkeypatch.setattr("sojourn_server.replay.replay_driver.asyncio.sleep", sleep)
    with FakeServer() as server:
        await run(server, [TraceProgram(program_id="a", turns=(turn, then))], speed=4.0)
    assert seen == ["search starts", tool_sleep_s, "search ends", *([rest_s] if rest_s else [])]


async def test_concurrency_bounds_the_programs_at_once_which_start_one_after_the_other() -> None:
    programs = [append_only(str(i), turns=2) for i in range(6)]
    with FakeServer(seconds_per_token=2e-3) as server:
        tally = await run(server, programs, concurrency=2, stagger_s=0.1)
        assert server.most_live == 2
    sent = {(turn.program_id, turn.turn): turn.sent_s for turn in tally.turns}
    assert sorted(sent) == [(str(i), turn) for i in range(6) for turn in range(2)]
    assert sent["1", 0] >= 0.1
    assert 0 < sent["0", 0] < sent["0", 1] <= tally.wall_s


async def test_sub_agents_run_beside_their_parent_at_their_turn_or_offset() -> None:
    parent = append_only("parent", turns=3)
    after = append_only("after", turns=1, parent="parent", parent_turn=1)
    late = append_only("late", turns=1, parent="parent", start_offset_s=1.6)
    orphan = append_only("orphan", turns=1, parent="nobody")
    with FakeServer() as server:
        tally = await run(server, [after, late, parent, orphan], concurrency=1, speed=2.0)
        prompts = [len(request["prompt"]) for request in server.requests]
    assert len(tally.finished) == 4
    # after waits for turn 1 (148 tokens); late comes last but one; the orphan is a program of its own.
    assert prompts[:2] == [100, 148]
    assert sorted(prompts) == [100, 100, 100, 100, 148, 196]
    assert tally.programs[-1].program_id == "orphan"
    assert tally.programs[-2].program_id == "late"


async def test_a_context_that_is_too_long_is_skipped_or_cut_on_request() -> None:
    with FakeServer(max_model_len=160) as server:
        skipped = await run(server, [append_only("a"), append_only("b", turns=1)])
        cut = await run(server, [append_only("a")], max_context_tokens=160)
        none = await run(server, [append_only("a")], max_context_tokens=50)
    document = skipped.document()
    assert (document["programs_finished"], document["programs_unfinished"]) == (1, 1)
    assert document["unfinished_reasons"] == {"context too long for the server": 1}
    assert (cut.document()["programs_finished"], cut.document()["programs_clipped"]) == (1, 1)
    assert cut.document()["turns"] == 2
    assert none.document()["unfinished_reasons"] == {"first turn above --max-context": 1}


async def test_a_failing_request_ends_its_program_and_is_counted() -> None:
    with FakeServer(status=500) as server:
        tally = await run(server, [append_only("a"), append_only("b")])
        assert len(server.requests) == 2
    document = tally.document()
    assert document["errors"] == {"HTTP 500": 2}
    assert "broken on purpose" in document["first_error"]
    assert document["programs_unfinished"] == 2
    assert document["completion_s"]["mean"] is None


# --- the command --------------------------------------------------------------------------------


def trace_file(path: Path, *programs: dict[str, Any]) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in programs))
    return file


PROGRAM = {
    "program_id": "p",
    "turns": [
        {
            "prompt_tokens": 64,
            "output_tokens": 4,
            "gap_s": 0.01,
            "tools": [{"name": "bash", "cmd": "pytest"}],
        },
        {"prompt_tokens": 80, "output_tokens": 4, "append_tokens": 12},
    ],
}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["replay", *arguments])


def failure(*arguments: str) -> CliError:
    result = invoke(*arguments)
    assert isinstance(result.exception, CliError), result.output
    return result.exception


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with FakeServer() as server:
        trace = trace_file(tmp_path, PROGRAM)
        result = invoke(str(trace), "--url", f"{server.url}/v1", "--json", str(target))
        assert result.exception is None
        assert not any("X-Session-ID" in headers for headers in server.headers)
    document = json.loads(target.read_text())
    assert document["programs_finished"] == 1
    assert (document["model"], document["engine"], document["dialect"]) == ("fake", "fake 1.2", "vllm")
    assert document["cached_tokens"] == 64


def test_on_a_sojourn_server_programs_and_tools_are_reported(tmp_path: Path) -> None:
    with FakeServer(sojourn=True) as server:
        result = invoke(str(trace_file(tmp_path, PROGRAM)), "--url", server.url, "--force-tokens")
        assert result.exception is None
        events = list(server.events)
        carried = [json.loads(r["vllm_xargs"]["agentic_context"]) for r in server.requests]
        assert all("replay_ids" in r["vllm_xargs"] for r in server.requests)
    for context in carried:
        assert context["program_id"].startswith("p@")
        events += context.get("sojourn", {}).get("events", [])
    kinds = {event["type"] for event in events}
    assert kinds >= {"program_start", "tool_start", "tool_stop", "program_end"}
    (start,) = [event for event in events if event["type"] == "tool_start"]
    assert (start["tool"], start["tool_class"]) == ("bash", "pytest")


def test_each_failure_says_what_to_do_next(tmp_path: Path) -> None:
    trace = str(trace_file(tmp_path, PROGRAM))
    with FakeServer(api_key="k", max_model_len=50) as server:
        assert "--api-key" in failure(trace, "--url", server.url).next_step
        assert "fake" in failure(trace, "--url", server.url, "--api-key", "k", "--model", "gpt").next_step
        assert (
            "sojourn serve"
            in failure(trace, "--url", server.url, "--api-key", "k", "--dialect", "sojourn").next_step
        )
        failed = failure(trace, "--url", server.url, "--api-key", "k")
        assert failed.exit_code == 1
        assert "--max-context" in failed.next_step
        gone = server.url
    assert "sojourn serve" in failure(trace, "--url", gone).next_step
    assert "auto" in failure(trace, "--url", gone, "--dialect", "klingon").next_step
    assert "--help" in failure(trace, "--url", gone, "--speed", "0").next_step
    assert "trace.jsonl.not: No such file" in failure(f"{trace}.not", "--url", gone).message
    circle = trace_file(tmp_path, PROGRAM, {**PROGRAM, "program_id": "q", "parent": "q"})
    assert "trace.jsonl: program 'q' is among its own parents" in failure(str(circle), "--url", gone).message
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert "line 1" in failure(str(bad), "--url", gone).message
