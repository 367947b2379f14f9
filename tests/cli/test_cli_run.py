"""``sojourn run``: the command stays the user's own."""

from __future__ import annotations

import ast
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from sojourn.testing import FakeServer
from sojourn_server.cli import agent_process
from sojourn_server.cli.agent_process import autostart_directory, base_url_root

SOJOURN = [sys.executable, "-c", "from sojourn_server.cli import main; main()"]
UNUSED = "http://127.0.0.1:9"


def sojourn_run(
    *command: str, url: str = UNUSED, options: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with ``options``, and with ``--url`` unless ``url`` is empty."""
    others = ("PYTHONPATH", "SOJOURN_", "ANTHROPIC_", "CLAUDE", "OPENAI_", "OPENCODE_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    line = [*SOJOURN, "run", *(("--url", url) if url else ()), *options, "--", *command]
    return subprocess.run(line, env=env | environment, capture_output=True, text=True, timeout=60)


def test_exit_code_output_and_arguments_are_the_commands_own() -> None:
    result = sojourn_run("sh", "-c", 'echo "$1" "$SOJOURN_URL"; exit 7', "-", "--url")
    assert (result.returncode, result.stdout) == (7, f"--url {UNUSED}\n")


def test_a_server_that_does_not_answer_is_told_of_once() -> None:
    code = "import sojourn; sojourn.init(probe_timeout_s=5)"
    said = sojourn_run(sys.executable, "-c", code).stderr.splitlines()
    assert said == [
        f"note: no sojourn server answers at {UNUSED} (ConnectionRefusedError); the command runs without it, "
        "and the SDK tries again when it sends events"
    ]


PRINT_URL = ("sh", "-c", 'echo "$SOJOURN_URL"')


@pytest.mark.parametrize("ending", ["/v1", "/v1/", ""])
def test_the_agents_own_server_is_used_if_it_is_a_sojourn_server(ending: str) -> None:
    with FakeServer() as server:
        result = sojourn_run(*PRINT_URL, url="", OPENAI_BASE_URL=server.url + ending)
    assert (result.returncode, result.stdout) == (0, f"{server.url}\n")
    note = f"note: OPENAI_BASE_URL lacks /v1, so OpenAI's clients get 404; set it to {server.url}/v1\n"
    assert result.stderr == ("" if ending else note)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b'{"name": "other"}'), "HTTP 200"),
        ((200, b"[]"), "HTTP 200"),
        ((200, b"<html>"), "no JSON, or no URL"),
        ((401, b'{"name": "sojourn"}'), "HTTP 401"),
        ((404, b""), "HTTP 404"),
        # It is an OSError and a ValueError, and the URL is not bad.
        (ssl.SSLCertVerificationError("self-signed certificate"), "SSLCertVerificationError"),
    ],
)
def test_a_providers_server_is_not_taken_for_a_sojourn_server(
    answer: tuple[int, bytes] | Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Mock(side_effect=[answer])
    monkeypatch.setattr(agent_process, "get_page", get)
    environment = {"OPENAI_BASE_URL": "https://provider.example/v1", "OPENAI_API_KEY": "secret"}
    notes: list[str] = []
    assert base_url_root(environment, notes.append) is None
    get.assert_called_once_with("https://provider.example")
    [note] = notes
    assert f"OPENAI_BASE_URL is not used: no sojourn server answers there without a key ({said})" in note
    assert "--url" in note


def test_a_signal_ends_it_as_it_would_end_the_command() -> None:
    result = sojourn_run("sh", "-c", "kill -TERM $$")
    assert result.returncode == -signal.SIGTERM


def test_unknown_commands_name_a_next_step(tmp_path: Path) -> None:
    result = sojourn_run("no-such-command-here")
    assert result.returncode == 127
    assert "there is no command 'no-such-command-here'" in result.stderr
    assert "next:" in result.stderr
    script = tmp_path / "agent.py"
    script.write_text("")
    assert f"sojourn run -- python {script}" in sojourn_run(str(script)).stderr.replace("\n", "")


ATTACHED = (
    "import sys, openai; print('sojourn' in sys.modules and sys.modules['sojourn'].stats().instrumented)"
)
SHELL = ("sh", "-c", f'"{sys.executable}" -c "{ATTACHED}"; true')
TOOL = (sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ATTACHED!r}])")


@pytest.mark.parametrize(
    ("command", "options", "is_instrumented"),
    [
        ((sys.executable, "-c", ATTACHED), (), True),
        (SHELL, (), True),  # a Python behind a shell script is the agent too
        (TOOL, (), False),  # a Python that a tool starts is left alone unless asked for
        (TOOL, ("--children",), True),
    ],
)
def test_the_agents_own_python_is_instrumented(
    command: tuple[str, ...], options: tuple[str, ...], is_instrumented: bool
) -> None:
    pytest.importorskip("openai")
    result = sojourn_run(*command, options=options)
    assert result.returncode == 0, result.stderr
    assert ("openai" in result.stdout) is is_instrumented


CLIENTS = {
    "openai": """
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="x", max_retries=0)
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
""",
    "litellm": """
import litellm  # which imports openai itself
settings = dict(api_base=sys.argv[1] + "/v1", messages=[{"role": "user", "content": "hi"}])
litellm.completion(model="hosted_vllm/m", **settings)
""",
}
PROBE = "import importlib.util; assert importlib.util.find_spec('openai')"
INIT = "import sojourn; sojourn.init(sys.argv[1])"


@pytest.mark.parametrize(
    ("client", "before"),
    [
        ("openai", ""),
        ("openai", PROBE),
        ("openai", INIT),
        ("openai", f"{INIT}; {PROBE}"),
        pytest.param("litellm", "", marks=pytest.mark.slow),
    ],
    ids=["plain", "probed", "init", "init and probed", "litellm"],
)
def test_clients_are_instrumented_as_they_are_imported(tmp_path: Path, client: str, before: str) -> None:
    pytest.importorskip(client)
    script = tmp_path / "agent.py"
    told = "print(*sys.modules['sojourn'].stats().instrumented)"
    script.write_text(f"import sys\n{before}\n{CLIENTS[client]}\n{told}\n")
    with FakeServer() as server:
        offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        result = sojourn_run(sys.executable, str(script), server.url, url=server.url, **offline)
        assert result.returncode == 0, result.stderr
        (request,) = server.requests
    assert {client, "openai"} <= set(result.stdout.split())
    assert request.context is not None
    assert request.headers["x-session-id"] == request.context.program_id


def test_an_id_that_no_server_takes_is_refused() -> None:
    result = sojourn_run("true", options=("--program", ""))
    assert result.returncode == 2
    assert "--program has 0 bytes; expected 1 to" in result.stderr


def test_the_hook_reads_as_old_python() -> None:
    source = (Path(autostart_directory()) / "sitecustomize.py").read_bytes()
    source.decode("ascii")  # Python 2 takes nothing else without a declaration
    tree = ast.parse(source, feature_version=(3, 4))
    for node in ast.walk(tree):
        assert not isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal))
        if isinstance(node, ast.FunctionDef):
            assert not node.args.kwonlyargs
            assert node.returns is None
        if isinstance(node, ast.Call):
            assert not (isinstance(node.func, ast.Name) and node.func.id == "print")
        if isinstance(node, ast.Raise):
            assert node.cause is None


def test_the_probe_carries_no_key_and_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", UNUSED)
    with FakeServer(api_key="secret") as server:
        assert agent_process.get_page(server.url)[0] == 401
    with FakeServer() as server:
        assert agent_process.get_page(server.url)[0] == 200
        assert server.probes == 1


CLIENT = """#!/bin/sh
for word in "$@"; do echo "word $word"; done
env | grep -e ^QWEN -e ^ANTHROPIC -e ^CLAUDE -e ^OPENAI -e ^OPENCODE -e ^SOJOURN -e ^PYTHONPATH
"""


@pytest.fixture
def clients(tmp_path: Path) -> str:
    """A PATH with coding agents that print their words and variables."""
    for name in ("claude", "codex", "opencode", "qwen", "pi", "gemini"):
        (tmp_path / name).write_text(CLIENT)
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("client", "told", "said"),
    [
        (
            "claude",
            [
                "ANTHROPIC_BASE_URL=URL", "ANTHROPIC_MODEL=org/m", "ANTHROPIC_DEFAULT_HAIKU_MODEL=org/m",
                "ANTHROPIC_AUTH_TOKEN=key", "word --settings", '"PostToolUseFailure"',
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS=40000", "CLAUDE_CODE_MAX_OUTPUT_TOKENS=10000",
            ],
            "sub-agents are programs, and its tools are reported; --program is not used; server URL",
        ),
        (
            "codex",
            [
                'base_url="URL/v1"', 'word model_provider="sojourn"', 'word model="org/m"',
                'env_key="SOJOURN_', "word model_context_window=40000",
            ],
            "Codex's threads are programs",
        ),
        (
            "opencode",
            [
                '"baseURL": "URL/v1"', '"model": "sojourn/org/m"', '"apiKey": "key"', "agent_plugin.js",
                '"lora": {"limit": {"context": 40000, "output": 10000}}',
            ],
            "OpenCode's sessions are programs, and its tools are reported",
        ),
        (
            "qwen",
            [
                "OPENAI_BASE_URL=URL/sojourn/session/run%207/v1", "OPENAI_MODEL=org/m", "OPENAI_API_KEY=key",
                "SOJOURN_PROGRAM_ID=run 7", "QWEN_CODE_MAX_OUTPUT_TOKENS=10000",
            ],
            "Qwen Code is the program run 7",
        ),
        (
            "pi",
            ['"baseUrl": "URL/v1"', "word --extension", "word sojourn/org/m", '"contextWindow": 40000'],
            "Pi's sessions are programs, and its tools are reported",
        ),
    ],
)  # fmt: skip
def test_coding_agents_are_directed_to_the_server(
    client: str, told: list[str], said: str, clients: str, model_server: str
) -> None:
    result = sojourn_run(
        client, "-p", "hi", url=model_server, options=("--program", "run 7"),
        PATH=clients, SOJOURN_API_KEY="key",
    )  # fmt: skip
    printed = result.stdout.replace(model_server, "URL")
    assert [one for one in (*told, "SOJOURN_URL=URL") if one not in printed] == [], printed
    assert printed.index("word -p\nword hi\n") >= 0, "the user's words come last"
    assert said in result.stderr.replace(model_server, "URL")
    assert "PYTHONPATH" not in printed, "a Python that its tools start is not the agent"


PROVIDERS = {
    "ANTHROPIC_API_KEY": "secret", "ANTHROPIC_AUTH_TOKEN": "secret", "OPENAI_API_KEY": "secret",
    "ANTHROPIC_MODEL": "opus", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "lora", "OPENAI_MODEL": "gpt",
    "SOJOURN_PROGRAM_ID": "old",
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "told"),
    [
        ("claude", {"AUTH_TOKEN=none", "ANTHROPIC_MODEL=org/m", "DEFAULT_HAIKU_MODEL=lora"}),
        ("qwen", {"OPENAI_API_KEY=none", "OPENAI_MODEL=org/m", "session/new/v1", "SOJOURN_PROGRAM_ID=new"}),
    ],
)
def test_keys_and_models_of_the_users_provider_stay_with_it(
    client: str, told: set[str], clients: str, model_server: str
) -> None:
    others = "OPENAI" if client == "claude" else "ANTHROPIC"
    result = sojourn_run(client, url=model_server, options=("--program", "new"), PATH=clients, **PROVIDERS)
    seen = [line for line in result.stdout.splitlines() if not line.startswith(others)]
    assert [one for one in told if not any(line.endswith(one) for line in seen)] == [], seen
    assert "secret" not in "".join(seen)


def test_what_the_user_has_set_for_this_server_stays(clients: str, model_server: str) -> None:
    own = {"ANTHROPIC_BASE_URL": f"{model_server}/", "ANTHROPIC_MODEL": "lora", "ANTHROPIC_AUTH_TOKEN": "my"}
    for url in (model_server, ""):
        result = sojourn_run("claude", "--settings", "x.json", url=url, PATH=clients, **own)
        assert "ANTHROPIC_MODEL=lora\n" in result.stdout
        assert "ANTHROPIC_AUTH_TOKEN=my\n" in result.stdout
        assert result.stdout.count("--settings") == 1
        assert "but for --settings, which stays yours" in result.stderr


@pytest.mark.parametrize(
    ("client", "own"),
    [
        ("claude", "ANTHROPIC_BASE_URL=https://u:secret@provider.example"),
        ("opencode", 'OPENCODE_CONFIG_CONTENT={"model": "x/y"}'),
    ],
)
def test_a_client_that_the_user_directs_elsewhere_runs_unchanged(
    client: str, own: str, clients: str, model_server: str
) -> None:
    name, _, value = own.partition("=")
    result = sojourn_run(client, url=model_server, PATH=clients, **{name: value})
    assert result.stdout == own + "\n"
    assert f"{client} runs unchanged, since {name} is set; unset it to use {model_server}" in result.stderr


def test_a_coding_agent_that_cannot_be_followed_runs_unchanged(clients: str, model_server: str) -> None:
    result = sojourn_run("gemini", url=model_server, PATH=clients)
    assert result.stdout == ""
    assert "gemini cannot be followed, since it speaks Google's API only" in result.stderr
    with FakeServer(api_key="secret") as server:
        result = sojourn_run("claude", url=server.url, PATH=clients)
    assert "it lists no models (SOJOURN_API_KEY gives its key)" in result.stderr
    result = sojourn_run("claude", PATH=clients)
    assert result.stdout == "", "no server answers, so its own provider serves it"
    assert result.stderr.endswith("(ConnectionRefusedError); the command runs without it\n")
