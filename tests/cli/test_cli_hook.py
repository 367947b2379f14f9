"""``sojourn hook``: coding agents that are no Python report their tools, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from sojourn.testing import FakeServer
from sojourn.testing.fake_server import refusing_url
from sojourn.wire_events import ProgramEnd, ToolStart, ToolStop
from sojourn_server.cli.coding_agents import hook_command

SECRET = "pytest -k the_secret_test"
START = {
    "hook_event_name": "PreToolUse",
    "session_id": "s",
    "tool_use_id": "t1",
    "tool_name": "Bash",
    "tool_input": {"command": f"cd /home/me && {SECRET}"},
    "cwd": "/home/me",
}
STOP = {**START, "hook_event_name": "PostToolUse", "tool_response": {"stdout": SECRET}, "duration_ms": 1250}


def sojourn_hook(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "COLUMNS": "200"}
    line = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "hook", *words]
    return subprocess.run(line, env=env, cwd=home, capture_output=True, text=True, timeout=60)


def run_hook(hook: object, url: str, client: str = "claude-code", **environment: str) -> None:
    text = hook if isinstance(hook, str) else json.dumps(hook)
    done = subprocess.run(
        hook_command(client, url), input=text, env=environment, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_tool_call_is_reported_without_a_word_of_its_arguments() -> None:
    with FakeServer(api_key="key") as server:
        run_hook(START, server.url + "/v1", SOJOURN_API_KEY="key")
        server.wait_for_events(1)
        run_hook(STOP, "http://127.0.0.1:9", SOJOURN_URL=server.host, SOJOURN_API_KEY="key")
        server.wait_for_events(2)
        failed = {**START, "hook_event_name": "PostToolUseFailure", "is_interrupt": True}
        run_hook(failed, server.url, SOJOURN_API_KEY="key")  # Codex and Qwen Code tell no duration
        events = server.wait_for_events(3)
    assert all(0 < event.age_s < 30 for event in events)
    start, stop, cancelled = [structs.replace(event, age_s=0.0) for event in events]
    assert start == ToolStart(program_id="s", seq=0, call_id="t1", tool="Bash", tool_class="pytest")
    assert stop == ToolStop(program_id="s", seq=0, call_id="t1", duration_s=1.25)
    assert cancelled == ToolStop(program_id="s", seq=0, call_id="t1", status="cancelled")
    sent = b"".join(bytes(raw) for batch in server.batches for raw in batch.events)
    assert b"secret" not in sent
    assert b"home" not in sent
    assert len({batch.emitter for batch in server.batches}) == 3


@pytest.mark.parametrize(
    ("client", "hook", "expected"),
    [
        ("claude-code", {**START, "agent_id": "a"}, ("s/a", "Bash")),
        ("codex", START, ("s", "exec_command")),  # the name that its model writes
        ("codex", {**START, "agent_id": "thread-2"}, ("thread-2", "exec_command")),
        ("qwen-code", {**START, "tool_name": "run_shell_command"}, ("run-7", "run_shell_command")),
        ("opencode", {**START, "tool_name": "bash"}, ("s", "bash")),
    ],
)
def test_programs_have_the_ids_of_the_clients_requests(
    client: str, hook: dict[str, Any], expected: tuple[str, str]
) -> None:
    with FakeServer() as server:
        run_hook(hook, server.url, client, SOJOURN_PROGRAM_ID="run-7")
        [event] = server.wait_for_events(1)
    assert isinstance(event, ToolStart)
    assert (event.program_id, event.tool) == expected


def test_sessions_and_sub_agents_end() -> None:
    with FakeServer() as server:
        run_hook({"hook_event_name": "SubagentStop", "session_id": "s", "agent_id": "a"}, server.url)
        server.wait_for_events(1)
        for kind in ("Stop", "SubagentStop"):  # the session goes on
            run_hook({"hook_event_name": kind, "session_id": "s"}, server.url)
        run_hook({"hook_event_name": "SessionEnd", "session_id": "t"}, server.url)
        ends = server.wait_for_events(2)
    assert [(type(end), end.program_id) for end in ends] == [(ProgramEnd, "s/a"), (ProgramEnd, "t")]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"hook_event_name": 7}', json.dumps({**STOP, "duration_ms": []})]
)
def test_a_hook_that_cannot_be_read_disturbs_no_agent(text: str) -> None:
    run_hook(text, refusing_url())


def test_nothing_waits_for_a_server_that_does_not_answer() -> None:
    with FakeServer(mode="hang") as server:
        run_hook(START, server.url)
    run_hook(START, refusing_url())
    run_hook(START, "no url")


@pytest.mark.parametrize("client", ["claude-code", "codex", "qwen-code"])
def test_the_printed_settings_run_the_hook(client: str, tmp_path: Path) -> None:
    with FakeServer() as server:
        result = sojourn_hook(client, "--url", server.host, home=tmp_path)
        assert result.returncode == 0, result.stderr
        hooks = json.loads(result.stdout)["hooks"]
        [[command]] = [[one["command"] for one in group["hooks"]] for group in hooks["PreToolUse"]]
        subprocess.run(["sh", "-c", command], input=json.dumps(START), text=True, env={}, check=True)
        assert [event.program_id for event in server.wait_for_events(1)] == ["s"]
    assert {"PreToolUse", "PostToolUse", "SubagentStop", "SessionEnd"} <= set(hooks)
    assert list(tmp_path.iterdir()) == [], "nothing is written without --install"


def test_install_keeps_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    mine = {"matcher": "Bash", "hooks": [{"type": "command", "command": "mine"}]}
    before = {"model": "opus", "hooks": {"PreToolUse": [mine], "Stop": [mine]}}
    file.write_text(json.dumps(before))
    file.chmod(0o600)
    for url in ("127.0.0.1:9", "http://127.0.0.1:8"):
        result = sojourn_hook("claude-code", "--install", "--url", url, home=tmp_path)
        assert result.returncode == 0, result.stderr
        assert str(file) in result.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    after = json.loads(file.read_text())
    assert (after["model"], after["hooks"]["Stop"]) == ("opus", [mine])
    first, ours = after["hooks"]["PreToolUse"]
    assert first == mine
    assert shlex.split(ours["hooks"][0]["command"])[-1] == "http://127.0.0.1:8", "the later call replaces"


def test_an_unknown_client_is_refused(tmp_path: Path) -> None:
    result = sojourn_hook("vim", home=tmp_path)
    assert result.returncode != 0
    assert "the hooks of 'vim' are unknown" in result.stderr


OPENCODE = """
const hooks = await (await import(process.argv[1])).default({})
await hooks["tool.execute.before"]({tool: "bash", sessionID: "s", callID: "t"}, {args: {command: "make -j2"}})
await hooks["tool.execute.after"]({tool: "bash", sessionID: "s", callID: "t", args: {}}, {output: "secret"})
"""
PI = """
const on = {}, providers = []
const host = { on: (name, f) => (on[name] = f), registerProvider: (_, one) => providers.push(one) }
await (await import(process.argv[1])).default(host)
await on.session_start({}, { sessionManager: { getSessionId: () => "s" } })
if (providers.at(-1).headers["X-Session-ID"] !== "s") throw new Error("no id")
await on.tool_call({ toolCallId: "t", toolName: "bash", input: { command: "make -j2" } })
await on.tool_result({ toolCallId: "t", isError: false })
"""


@pytest.mark.parametrize("code", [OPENCODE, PI], ids=["opencode", "pi"])
def test_the_plugin_reports_tools(code: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    with FakeServer() as server:
        text = sojourn_hook("opencode", "--url", server.url, home=tmp_path).stdout
        plugin = tmp_path / "plugin.mjs"
        plugin.write_text(text)
        environment = {"PATH": os.environ["PATH"], "SOJOURN_PI": "{}"}
        line = [node, "--input-type=module", "-e", code, str(plugin)]
        subprocess.run(line, env=environment, check=True, timeout=60)
        stop, start = sorted(server.wait_for_events(2), key=lambda event: isinstance(event, ToolStart))
    assert isinstance(start, ToolStart)
    assert (start.call_id, start.tool, start.tool_class) == ("t", "bash", "make")
    assert isinstance(stop, ToolStop)
    assert (stop.call_id, stop.status) == ("t", "ok")
