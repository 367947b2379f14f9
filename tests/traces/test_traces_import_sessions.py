"""Session files of coding agents become programs, without a word of their texts."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.traces.imports import IMPORT_FORMATS
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_file import write_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun

SECRET = "the launch code is 1234"


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(1_800_000_000 + at_s, UTC).isoformat().replace("+00:00", "Z")


def rows(program: TraceProgram, fields: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(turn, name) for name in fields.split()) for turn in program.turns]


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def pack(path: Path) -> None:
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def imported(source: str, path: Path, *notes: str) -> list[TraceProgram]:
    result = IMPORT_FORMATS[source]([path])
    assert result.notes == list(notes)
    write_trace(path.parent / "trace.jsonl", result.programs)
    assert "launch" not in (path.parent / "trace.jsonl").read_text()
    return result.programs


class Claude:
    """Writes lines as Claude Code does."""

    def __init__(self, session: str = "s1", **common: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._common = {"sessionId": session, "isSidechain": False, **common}
        self._name = "".join(map(str, self._common.values()))
        self.last: str | None = None

    def add(self, at_s: float, **fields: Any) -> str:
        uuid = f"{self._name}-{len(self.lines)}"
        line = {"uuid": uuid, "parentUuid": self.last, "timestamp": iso(at_s), **self._common, **fields}
        self.lines.append(line)
        self.last = uuid
        return uuid

    def user(self, at_s: float, **fields: Any) -> str:
        return self.add(at_s, type="user", message={"role": "user", "content": SECRET}, **fields)

    def answer(
        self, at_s: float, message: str, prompt: int, output: int, block: Any = None, cached: int = 0
    ) -> str:
        usage = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": output}
        blocks = [block or {"type": "text", "text": SECRET}]
        told = {"id": message, "model": "m", "content": blocks, "usage": usage, "stop_reason": "x"}
        return self.add(at_s, type="assistant", message=told)

    def result(self, at_s: float, tool: str, told: Any = None, **fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": tool, "content": SECRET}
        return self.add(at_s, type="user", message={"content": [block]}, toolUseResult=told, **fields)


def use(tool: str, name: str = "Bash", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool, "name": name, "input": arguments}


def test_a_session_of_claude_code(tmp_path: Path) -> None:
    log = Claude()
    log.user(0)
    log.answer(2, "m1", 1000, 1, cached=400)
    log.answer(3, "m1", 1000, 50, use("t1", command=f"cd x && pytest -k '{SECRET}'"), cached=400)
    log.result(8, "t1", {"stdout": SECRET})
    end = log.answer(9, "m2", 1200, 30, cached=1000)
    log.user(100)
    log.answer(104, "m3", 1300, 20, use("t2", "Edit", file=SECRET), cached=1200)
    log.result(134, "t2", {"filePath": SECRET})
    log.answer(135, "m4", 1400, 20, use("t3", "Bash", command=f"'{SECRET}'"))
    log.result(140, "t3", "User rejected tool use")
    log.user(141)
    log.answer(142, "m5", 1500, 20)
    log.last = end
    log.user(200)
    log.answer(203, "m6", 1450, 10, cached=300)
    log.add(210, type="system", subtype="compact_boundary")
    log.user(210, isCompactSummary=True)
    log.answer(212, "m7", 1440, 10, cached=64)
    log.add(300, type="assistant", isApiErrorMessage=True, message={"model": "<synthetic>", "content": []})
    log.lines += [log.lines[1], {"type": "summary", "summary": SECRET}]
    path = write(tmp_path / "projects/p/s1.jsonl", log.lines)
    (program,) = imported(
        "claude-code", path.parent,
        "1 compactions: the call that wrote the summary is not in the file",
        "1 error messages in place of an answer left out",
    )  # fmt: skip
    assert (program.program_id, program.source, program.group) == ("s1", "claude-code", "claude-code")
    turns = program.turns
    assert rows(program, "prompt_tokens output_tokens gap_s gap_kind interactive") == [
        (1000, 50, 5, "tool", False), (1200, 30, 91, "human", False), (1300, 20, 30, "tool", True),
        (1400, 20, 6, "human", True), (1500, 20, 58, "human", False), (1450, 10, 7, None, False),
        (1440, 10, None, None, False),
    ]  # fmt: skip
    assert turns[0].tools == (TraceToolRun(name="Bash", cmd="pytest", s=5.0),)
    assert turns[2].tools == (TraceToolRun(name="Edit", s=0.0),), "a person took the rest"
    assert [t.llm_s for t in turns[:3]] == [3, 1, 4]
    assert [(t.reset, t.prefix_tokens) for t in turns[5:]] == [(True, 1230), (True, 64)]
    assert plan_turns(program)[5].reused_tokens == 1230, "a rewind to the end of turn 1"
    assert program.shared_prefix_tokens == 400


def test_sub_agents_of_claude_code_are_in_either_file_or_in_both(tmp_path: Path) -> None:
    main = Claude()
    main.user(0)
    main.answer(2, "m1", 1000, 50, use("t1", "Task", prompt=SECRET))
    agent = Claude(agentId="a1", isSidechain=True)
    agent.user(1.5)  # before the last line of the call that asked for it
    agent.answer(4, "x1", 700, 10, use("u1", command="ls"), cached=600)
    agent.result(5, "u1")
    agent.answer(6, "x2", 800, 10)
    old = Claude(isSidechain=True)
    old.user(7)
    old.answer(8, "y1", 300, 10)
    main.result(9, "t1", {"agentId": "a1", "agentType": "explore", "content": SECRET})
    main.answer(10, "m2", 1100, 5)
    other = Claude("s2", agentId="a1", isSidechain=True)  # ids of agents are unique within a session only
    other.user(50)
    other.answer(51, "z1", 200, 10)
    write(tmp_path / "p/s1.jsonl", main.lines + agent.lines[:2] + old.lines)
    write(tmp_path / "p/s1/subagents/agent-a1.jsonl", agent.lines)
    write(tmp_path / "p/s2/subagents/agent-a1.jsonl", other.lines)
    programs = imported("claude-code", tmp_path / "p", "1 programs without any model call left out")
    by_id = {program.program_id: program for program in programs}
    sub = by_id["s1/a1"]
    assert (sub.parent, sub.parent_turn, sub.agent_type, sub.group) == (
        "s1", 0, "explore", "claude-code/explore",
    )  # fmt: skip
    assert [t.prompt_tokens for t in sub.turns] == [700, 800]
    (side,) = [program for program in programs if program.agent_type == "sidechain"]
    assert (side.parent, side.parent_turn, len(side.turns)) == ("s1", 0, 1)
    assert [t.tool for t in by_id["s1"].turns] == ["Task", None]
    assert (by_id["s2/a1"].parent, by_id["s2/a1"].turns[0].prompt_tokens) == (None, 200)


def test_a_resumed_session_repeats_lines_and_a_cut_off_answer_is_estimated(tmp_path: Path) -> None:
    first = Claude()
    first.user(0)
    first.answer(2, "m1", 1000, 50)
    resumed = Claude("s2")
    resumed.lines, resumed.last = list(first.lines), first.last
    resumed.user(60)
    resumed.answer(62, "m2", 1100, 1, {"type": "text", "text": "x" * 400})
    resumed.lines[-1]["message"]["stop_reason"] = None
    write(tmp_path / "p/s1.jsonl", first.lines)
    bad = write(tmp_path / "p/s2.jsonl", [*resumed.lines, {"uuid": "u", "type": "user"}, 7])
    bad.write_text(bad.read_text() + '\n{"uuid": "cut o')
    (program,) = imported(
        "claude-code", tmp_path / "p", f"3 entries left out, the first is {bad}, line 5: has no 'sessionId'"
    )
    assert [(t.prompt_tokens, t.output_tokens) for t in program.turns] == [(1000, 50), (1100, 100)]
    with pytest.raises(TraceError, match="no model call with token counts"):
        IMPORT_FORMATS["claude-code"]([write(tmp_path / "none.jsonl", first.lines[:1])])


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_fork_of_a_session_that_goes_on_is_a_program_of_its_own(
    names: tuple[str, str], tmp_path: Path
) -> None:
    first = Claude()
    first.user(0)
    first.answer(2, "m1", 1000, 50)
    fork = Claude("s2")
    fork.lines, fork.last = list(first.lines), first.last
    for log, prompt in ((first, 1100), (fork, 1200)):
        log.user(10)
        log.answer(12, f"m{prompt}", prompt, 50)
        log.user(20)
        log.answer(22, f"n{prompt}", prompt + 100, 50)
    for log, name in zip((first, fork), names, strict=True):
        write(tmp_path / f"p/{name}.jsonl", log.lines)
    programs = imported("claude-code", tmp_path / "p")
    lengths = sorted([t.prompt_tokens for t in program.turns] for program in programs)
    assert lengths in ([[1000, 1100, 1200], [1200, 1300]], [[1000, 1200, 1300], [1100, 1200]])
    assert not any(turn.reset for program in programs for turn in program.turns)


def codex(at_s: float, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": iso(at_s), "type": kind, "payload": payload}


def counts(prompt: int, output: int, cached: int = 0) -> dict[str, int]:
    return {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": output}


def test_threads_of_codex_old_and_new(tmp_path: Path) -> None:
    words = [{"type": "input_text", "text": SECRET}]

    def item(at_s: float, kind: str, **fields: Any) -> dict[str, Any]:
        return codex(at_s, "response_item", type=kind, **fields)

    def shell(at_s: float, call: str) -> dict[str, Any]:
        arguments = json.dumps({"command": ["bash", "-lc", f"make test # {SECRET}"]})
        return item(at_s, "function_call", call_id=call, name="shell", arguments=arguments)

    def usage(at_s: float, name: str, prompt: int) -> dict[str, Any]:
        used = counts(prompt, 20, 64)
        return codex(at_s, "token_usage_record", thread_id="t1", response_id=name, usage=used)

    def count(at_s: float, prompt: int) -> dict[str, Any]:
        info = {"total_token_usage": counts(prompt * 2, 9), "last_token_usage": counts(prompt, 20)}
        return codex(at_s, "event_msg", type="token_count", info=info)

    new = [
        codex(0, "session_meta", id="t1", source="cli"),
        codex(0, "turn_context", model="gpt"),
        item(1, "message", role="user", content=words),
        shell(4, "c1"),
        usage(4.1, "r1", 1000),
        codex(
            29, "event_msg", type="item_completed", item={"id": "c1"}, started_at_ms=8, completed_at_ms=1008
        ),
        item(29, "function_call_output", call_id="c1", output=SECRET),
        count(29, 1000),
        item(30, "message", role="assistant", content=words),
        usage(30, "r2", 1100),
        codex(40, "compacted", message=SECRET),
        item(90, "message", role="user", content=words),
        item(92, "message", role="assistant", content=words),
        usage(92, "r3", 1090),
    ]
    spawn = {"subagent": {"thread_spawn": {"parent_thread_id": "t1", "agent_role": "explorer"}}}
    old = [
        codex(5, "session_meta", id="t2", source=spawn),
        codex(5, "session_meta", id="t1", source="cli"),
        usage(5, "r1", 1000),
        item(5, "message", role="user", content=words),
        item(6, "reasoning", summary=words),
        shell(7, "c2"),
        item(10, "function_call_output", call_id="c2", output=SECRET),
        count(10.1, 500),
        count(10.2, 500),
        item(12, "message", role="assistant", content=words),
        count(12, 600),
    ]
    write(tmp_path / "s/2026/rollout-1.jsonl", new)
    pack(write(tmp_path / "s/2026/rollout-2.jsonl", old))
    main, sub = imported("codex", tmp_path / "s")
    assert rows(main, "prompt_tokens cached_tokens gap_s gap_kind interactive reset") == [
        (1000, 64, 25, "tool", True, False), (1100, 64, 60, "human", False, False),
        (1090, 64, None, None, False, True),
    ]  # fmt: skip
    assert main.turns[0].tools == (TraceToolRun(name="shell", cmd="make", s=1.0),)
    assert (sub.parent, sub.parent_turn, sub.group) == ("t1", 0, "codex/explorer")
    assert rows(sub, "prompt_tokens llm_s gap_s") == [(500, 2, 3), (600, 2, None)]
    assert sub.turns[0].tools == (TraceToolRun(name="shell", cmd="make", s=3.0),)


def test_a_session_of_pi_with_a_rewind(tmp_path: Path) -> None:
    def entry(at_s: float, number: int, parent: int, role: str, **message: Any) -> dict[str, Any]:
        told = {"role": role, "content": [{"type": "text", "text": SECRET}], **message}
        return {
            "type": "message", "id": str(number), "parentId": str(parent), "timestamp": iso(at_s),
            "message": told,
        }  # fmt: skip

    def answer(at_s: float, number: int, parent: int, prompt: int, **message: Any) -> dict[str, Any]:
        usage = {"input": prompt - 100, "output": 20, "cacheRead": 60, "cacheWrite": 40}
        start_ms = (1_800_000_000 + at_s - 2) * 1000
        return entry(at_s, number, parent, "assistant", usage=usage, timestamp=start_ms, **message)

    call = {"type": "toolCall", "id": "c", "name": "bash", "arguments": {"command": "ls"}}
    lines = [
        {"type": "session", "id": "s", "timestamp": iso(0)},
        entry(0, 1, 0, "user"),
        answer(3, 2, 1, 1000, content=[call]),
        entry(7, 3, 2, "toolResult", toolCallId="c"),
        answer(9, 4, 3, 1200),
        entry(50, 5, 2, "user"),
        answer(52, 6, 5, 1190),
        entry(60, 7, 6, "assistant", usage={"input": 0, "output": 0}),
    ]
    path = write(tmp_path / "s/x.jsonl", lines)
    (program,) = imported("pi", path, "1 model calls without token counts left out")
    assert rows(program, "prompt_tokens gap_s tool prefix_tokens") == [
        (1000, 4, "bash", None), (1200, 41, None, None), (1190, None, None, 1020),
    ]  # fmt: skip


def test_the_database_of_opencode(tmp_path: Path) -> None:
    def message(role: str, at_s: float, **fields: Any) -> str:
        return json.dumps({"role": role, "time": {"created": at_s, "completed": at_s + 9}, **fields})

    def tokens(prompt: int) -> dict[str, Any]:
        return {"input": prompt - 64, "output": 15, "reasoning": 5, "cache": {"read": 64, "write": 0}}

    def tool(call: str, name: str, start_s: float, end_s: float, **metadata: Any) -> str:
        state = {"time": {"start": start_s, "end": end_s}, "metadata": metadata, "input": {"command": "ls"}}
        return json.dumps({"type": "tool", "tool": name, "callID": call, "state": state})

    path = tmp_path / "opencode.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE session (id, parent_id, title)")
        database.execute("CREATE TABLE message (id, session_id, time_created, data)")
        database.execute("CREATE TABLE part (message_id, time_created, data)")
        sessions = [("s", None, SECRET), ("k", "s", SECRET)]
        messages = [
            ("1", "s", 1, message("user", 0)),
            ("2", "s", 2, message("assistant", 1, tokens=tokens(1000), modelID="m")),
            ("3", "k", 3, message("assistant", 5, tokens=tokens(300), agent="general")),
            ("4", "s", 4, message("assistant", 20, tokens=tokens(1200))),
        ]
        parts = [
            ("1", 1, json.dumps({"type": "text", "text": SECRET})),
            ("2", 2, tool("a", "bash", 3, 4)),
            ("2", 3, tool("b", "task", 3.5, 19, sessionId="k")),
        ]
        database.executemany("INSERT INTO session VALUES (?, ?, ?)", sessions)
        database.executemany("INSERT INTO message VALUES (?, ?, ?, ?)", messages)
        database.executemany("INSERT INTO part VALUES (?, ?, ?)", parts)
    database.close()
    main, sub = imported("opencode", tmp_path)
    assert rows(main, "prompt_tokens output_tokens llm_s gap_s") == [(1000, 20, 2, 17), (1200, 20, 9, None)]
    assert [(run.name, run.cmd, run.s) for run in main.turns[0].tools or ()] == [
        ("bash", "ls", 1), ("task", None, 15.5),
    ]  # fmt: skip
    assert (sub.program_id, sub.parent, sub.parent_turn, sub.agent_type) == ("k", "s", 0, "general")
    with pytest.raises(TraceError, match="expected OpenCode's database"):
        IMPORT_FORMATS["opencode"]([write(tmp_path / "bad.db", ["text"])])


def request(at_s: float, messages: list[Any], prompt: int, **fields: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": 10}
    return {"start_time": at_s, "end_time": at_s + 1, "messages": messages, "usage": usage, **fields}


def test_logs_of_openai_requests_are_joined_by_their_messages(tmp_path: Path) -> None:
    call = {"id": "c", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    asked = [{"role": "system", "content": SECRET}, {"role": "user", "content": "a"}]
    worked = [*asked, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": SECRET}]
    talked = [*worked, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    rewound = [*asked, {"role": "assistant", "content": "y"}, {"role": "user", "content": "other"}]
    other = [asked[0], {"role": "user", "content": "b"}]
    lines = [
        request(0, asked, 100, model="m"), request(3, other, 90), request(5, worked, 150),
        request(20, talked, 200), request(40, rewound, 205), request(50, other, 95, session_id="named"),
    ]  # fmt: skip
    first, second, named = imported("openai", write(tmp_path / "l/log.jsonl", lines))
    assert rows(first, "prompt_tokens gap_s gap_kind tool prefix_tokens") == [
        (100, 4, "tool", "bash", None), (150, 14, "human", None, None), (200, 19, "human", None, None),
        (205, None, None, None, 110),
    ]  # fmt: skip
    assert (len(second.turns), named.program_id) == (1, "named")


def test_parallel_and_repeated_runs_of_one_task_are_programs_of_their_own(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": SECRET}, {"role": "user", "content": "a"}]
    same = [*asked, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    differs = [*asked, {"role": "assistant", "content": "y"}, {"role": "user", "content": "more"}]
    lines = [
        request(0, asked, 100), request(0.5, asked, 100, end_time=9), request(3, same, 150),
        request(10, differs, 160), request(20, asked, 100), request(30, same, 150), request(32, same, 150),
    ]  # fmt: skip
    programs = imported("openai", write(tmp_path / "l/log.jsonl", lines))
    assert [[t.prompt_tokens for t in program.turns] for program in programs] == [
        [100, 150], [100, 160], [100, 150, 150],
    ]  # fmt: skip


def test_exports_of_langfuse(tmp_path: Path) -> None:
    def seen(name: str, kind: str, start_s: float, end_s: float, above: str = "", **fields: Any) -> Any:
        return {
            "id": name, "traceId": "t", "type": kind, "name": name, "startTime": iso(start_s),
            "endTime": iso(end_s), "parentObservationId": above or None, "input": SECRET, **fields,
        }  # fmt: skip

    usage = {"input": 60, "input_cached_tokens": 40, "output": 10, "total": 110}
    observations = [
        seen("coder", "AGENT", 0, 20),
        seen("whole", "GENERATION", 0, 20, "coder", usageDetails={"input": 260, "output": 20}),
        seen("g1", "GENERATION", 1, 2, "whole", usageDetails=usage, model="m"),
        seen("ls", "TOOL", 2, 5, "coder"),
        seen("g2", "GENERATION", 6, 7, "whole", usage={"input": 160, "output": 10, "total": 170}),
    ]
    document = {"id": "t", "sessionId": "s", "observations": observations}
    path = write(tmp_path / "x" / "t.json", [document])
    held = "1 model spans left out, since they hold the calls that they sum up"
    (program,) = imported("langfuse", path, held)
    assert (program.program_id, program.source, program.group) == ("s", "langfuse", "coder")
    assert rows(program, "prompt_tokens output_tokens cached_tokens tool") == [
        (100, 10, 40, "ls"), (160, 10, 0, None),
    ]  # fmt: skip


def test_exports_of_langsmith(tmp_path: Path) -> None:
    def run(name: str, kind: str, start_s: float, above: str | None, **fields: Any) -> Any:
        return {
            "id": name, "trace_id": "t", "run_type": kind, "name": name, "start_time": iso(start_s)[:-1],
            "end_time": iso(start_s + 1)[:-1], "parent_run_id": above, "inputs": SECRET, **fields,
        }  # fmt: skip

    metadata, cache = {"metadata": {"thread_id": "talk", "ls_model_name": "m"}}, {"cache_read": 96}
    runs = [
        run("graph", "chain", 0, None, extra=metadata),
        run("a", "llm", 1, "graph", prompt_tokens=100, completion_tokens=10, extra=metadata),
        run("search", "tool", 2.5, "graph"),
        run("b", "llm", 4, "graph", prompt_tokens=150, completion_tokens=5, prompt_token_details=cache),
    ]
    (program,) = imported("langsmith", write(tmp_path / "x" / "runs.jsonl", runs))
    assert (program.program_id, program.model) == ("talk", "m")
    assert rows(program, "prompt_tokens gap_s tool cached_tokens") == [
        (100, 2, "search", None), (150, None, None, 96),
    ]  # fmt: skip
