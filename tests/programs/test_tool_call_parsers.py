"""Every dialect a model may call its tools in, and everything that only looks like one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.shell_command import main_head
from sojourn_server.programs import tool_call_parsers
from sojourn_server.programs.tool_call_parsers import (
    ParsedToolCall,
    named_tool_call,
    parse_tool_calls,
    plan_items,
)


def keys(text: str) -> list[str]:
    return [call.key for call in parse_tool_calls(text)]


OPENAI = {
    "id": "fc_0",
    "call_id": "call_0",
    "type": "function_call",
    "name": "get_weather",
    "arguments": {"location": "Paris"},
}
TERMINAL_BENCH = {
    "state_analysis": "The tests fail.",
    "commands": [
        {"keystrokes": "vim src/app/main.py\n", "is_blocking": False, "timeout_sec": 2.0},
        {"keystrokes": "cd app && pytest -q\n", "is_blocking": True, "timeout_sec": 30.0},
    ],
    "is_task_complete": False,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(OPENAI), ["get_weather"]),
        (f"I'll look it up.\n{json.dumps(OPENAI)}", ["get_weather"]),
        (json.dumps([OPENAI, {**OPENAI, "name": "get_time"}]), ["get_weather", "get_time"]),
        (
            '{"tool_calls": [{"type": "function", "function": '
            '{"name": "bash", "arguments": "{\\"command\\": \\"cd /x && pytest -q\\"}"}}]}',
            ["bash:pytest"],
        ),
        ('{"type": "tool_use", "name": "Bash", "input": {"command": "git status"}}', ["Bash:git"]),
        ('{"function_call": {"name": "search", "arguments": "{}"}}', ["search"]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ["f"]),
        (
            'Both.<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "execute_bash", "arguments": {"cmd": "make"}}</tool_call>',
            ["f", "execute_bash:make"],
        ),
        (
            "<tool_call>\n<function=bash>\n<parameter=command>\nCI=1 npm test 2>&1 | tail -5\n</parameter>\n"
            "</function>\n</tool_call>",
            ["bash:npm"],
        ),
        ('<function=get_weather>{"city": "Paris"}</function>', ["get_weather"]),
        ('<function=shell>{"command": ["bash", "-lc", "pytest -q"]}</function>', ["shell:pytest"]),
        (
            '<minimax:tool_call><invoke name="bash"><parameter name="command">du -sh</parameter></invoke>',
            ["bash:du"],
        ),
        (
            '<|channel|>commentary to=functions.exec <|constrain|>json<|message|>{"cmd":["go"]}<|call|>',
            ["exec:go"],
        ),
        ('{"name": "sh", "parameters": {"command": "ls"}}', ["sh:ls"]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', ["f", "g"]),
        ('<think><tool_call>{"name": "g", "arguments": {}}</think>{"name": "f", "arguments": {}}', ["f"]),
        ("Let me see.\n\n```bash\npytest -q\n```\n", ["bash:pytest"]),
        ("```bash\nls\n```<|im_end|>", ["bash:ls"]),
        ("```bash\nls\n```\n</s></s>\n", ["bash:ls"]),
        ("THOUGHT: go\n\n```mswea_bash_command\ncd /testbed && git diff\n```", ["bash:git"]),
        ("Unlike\n```bash\nrm x\n```\nI do\n```mswea_bash_command\nls\n```\n", ["bash:ls"]),
        (json.dumps(TERMINAL_BENCH), ["bash:vim", "bash:pytest"]),
        (f"```json\n{json.dumps(TERMINAL_BENCH, indent=2)}\n```", ["bash:vim", "bash:pytest"]),
    ],
)
def test_each_dialect_is_read(text: str, expected: list[str]) -> None:
    assert keys(text) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "key"),
    [
        ("Bash", {"command": "cd /x && npm test 2>&1 | tail -20", "description": "Run tests"}, "Bash:npm"),
        ("Bash", {"command": "npm run dev", "run_in_background": True}, "Bash"),
        ("Agent", {"prompt": "look at bash", "subagent_type": "Explore"}, "Agent"),
        ("exec_command", {"cmd": "sed -n 1,9p a.py", "yield_time_ms": 1000}, "exec_command:sed"),
        ("shell", {"command": ["bash", "-lc", "cd x && pytest -q"], "workdir": "/x"}, "shell:pytest"),
        ("shell", {"command": ["/usr/bin/git", "status"]}, "shell:git"),
        ("update_plan", {"plan": [{"step": "bash", "status": "pending"}]}, "update_plan"),
        ("run_shell_command", {"command": "go test ./...", "is_background": False}, "run_shell_command:go"),
        ("run_shell_command", {"command": "go run .", "is_background": "true"}, "run_shell_command"),
        ("developer__shell", {"command": "cargo build"}, "developer__shell:cargo"),
        ("execute_command", {"command": "ls", "requires_approval": "false"}, "execute_command:ls"),
    ],
)
def test_calls_of_coding_agents(name: str, arguments: dict[str, object], key: str) -> None:
    """Claude Code, Codex, OpenCode and Pi, Qwen Code, Goose, Cline."""
    assert named_tool_call(name, json.dumps(arguments)).key == key  # type: ignore[union-attr]
    assert keys(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>") == [key]


TODOS = [
    {"content": "Read", "status": "completed", "activeForm": "Reading"},
    {"content": "Fix", "status": "in_progress", "activeForm": "Fixing"},
    {"content": "Test", "status": "pending", "activeForm": "Testing"},
]


@pytest.mark.parametrize(
    ("name", "arguments", "items"),
    [
        ("TodoWrite", {"todos": TODOS}, 2),
        ("TodoWrite", {"todos": TODOS[:1]}, 0),
        (
            "update_plan",
            {
                "explanation": "Read.",
                "plan": [{"step": "Read", "status": "completed"}, {"step": "Fix", "status": "pending"}],
            },
            1,
        ),
        (
            "todowrite",
            {"todos": [{"content": "Fix", "status": "cancelled", "priority": "high", "id": "1"}, TODOS[1]]},
            1,
        ),
        ("todo_write", {"todos": [{"id": "1", "content": "Fix", "status": "pending"}]}, 1),
        ("write_todos", {"todos": [{"description": "Fix", "status": "in_progress"}]}, 1),
        ("functions.update_plan", {"plan": [{"step": "Fix", "status": "pending"}]}, 1),
        ("TodoWrite", {"todos": json.dumps(TODOS)}, 2),
        ("TodoWrite", {"todos": "- [ ] Fix\n- [x] Read"}, None),
        ("TodoWrite", {"todos": ["Fix"]}, None),
        ("TodoWrite", {"todos": {"status": "pending"}}, None),
        ("TodoWrite", {}, None),
        ("TodoWrite", [], None),
        ("TaskCreate", {"subject": "Fix", "description": "Fix"}, None),
        ("save_notes", {"todos": TODOS}, None),
    ],
)
def test_the_open_items_of_a_to_do_list_are_counted(name: str, arguments: object, items: int | None) -> None:
    """Claude Code, Codex, OpenCode, Qwen Code, Gemini CLI."""
    call = named_tool_call(name, json.dumps(arguments))
    assert call == ParsedToolCall(name, plan_items=items)
    assert plan_items([call]) == items


def test_the_last_to_do_list_of_an_output_counts() -> None:
    calls = [named_tool_call("TodoWrite", json.dumps({"todos": todos})) for todos in (TODOS, TODOS[:2])]
    assert plan_items([*calls, ParsedToolCall("bash", "ls")]) == 1  # type: ignore[list-item]
    assert plan_items([]) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.sampled_from(["todos", "plan", "status"]), one),
    )
)
def test_whatever_a_to_do_list_holds_nothing_is_raised(arguments: object) -> None:
    for text in (json.dumps(arguments), json.dumps({"todos": arguments}), json.dumps({"plan": [arguments]})):
        assert named_tool_call("TodoWrite", text) is not None
    for text in ("9" * 5000, "[" * 5000, '{"todos": "' + "[" * 5000 + '"}', '{"todos": [{'):
        assert named_tool_call("TodoWrite", text) == ParsedToolCall("TodoWrite")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The weather is fine.",
        "[TOOL_CALLS] are how Mistral marks them",
        "call:bash{command:ls}",
        "```bash\nls\n```\nor\n```bash\npwd\n```",  # two blocks: which one?
        "```bash\nls",  # cut off before it closed
        "```bash\n\n```",
        "```python\nprint(1)\n```",
        "done :)",
        '{"name": "Ada", "age": 36}',
        '{"type": "function_call", "name": 7}',
        '{"name": "", "arguments": {}}',
        '<tool_call>{"name": "f", "argu',
        "<tool_call></tool_call>",
        '<think>maybe <tool_call>{"name": "f", "arguments": {}}</tool_call></think>No need.',
        '{"commands": [{"timeout_sec": 3}, 4], "is_task_complete": true}',
        json.dumps({"name": "x" * 5000, "arguments": {}}),
    ],
)
def test_what_only_looks_like_a_call_is_none(text: str) -> None:
    assert parse_tool_calls(text) == ()


@pytest.mark.parametrize(
    ("line", "main"),
    [
        ("make \\\n  -j4", "make"),
        ("cat a > out 2>&1; (cd a && make) || exit 1", "make"),
        ("sudo -E env X=1 nice -n 5 apt-get update", "apt-get"),
        ('bash -lc "cargo test && cd x"', "cargo"),
        ("pytest $(git diff --name-only; true) `ls`", "pytest"),
        ("# note\nls # list; all", "ls"),
        ("cd /tmp", "cd"),
        ("diff <(sort a) b >& log", "b"),
        ("&& ; |", None),
    ],
)
def test_command_lines(line: str, main: str | None) -> None:
    """As those in ``tests/sdk/test_sdk_shell_command.py``, but with syntax that agents seldom write."""
    assert main_head(line) == main


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 200_000,
        '{"a":[' * 100_000 + "1" * 10_000,
        ('{"a":[' + "1," * 300) * 200,
        '{"a": ' + "9" * 10_000 + "}",
    ],
    ids=["deep objects", "deep lists", "lists that do not end", "a long number"],
)
def test_hostile_output_is_read_with_bounded_work(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted, not timed: of each of these texts, the JSON decoder reads all that is left of it. That
    no other text takes long is shown by ``tests/fuzz``."""
    decoded: list[int] = []
    decode = tool_call_parsers._decode

    def counting_decode(value: str, start: int = 0) -> object:
        decoded.append(len(value) - start)
        return decode(value, start)

    monkeypatch.setattr(tool_call_parsers, "_decode", counting_decode)
    assert parse_tool_calls(text) == ()
    assert 0 < sum(decoded) <= 2 * tool_call_parsers._JSON_SCAN_BUDGET


def test_only_the_tail_is_read() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert keys("x" * 1_000_000 + call) == ["f"]
    assert keys(call + "x" * 1_000_000) == []
