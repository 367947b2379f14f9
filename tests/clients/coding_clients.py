"""Coding agents that people run, installed by npm and pip into a folder, and how each is started: by
``sojourn run``, or pointed at a server by settings of its own.

The nightly tests and ``benchmarks/coding_agents.py`` use this module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".tox" / "clients"
"""Default folder for the clients. Together they take 2 GB."""
MODEL = "tiny"
SOJOURN_RUN = (sys.executable, "-c", "from sojourn_server.cli import main; main()", "run")
FINISHED = "Everything is done."
"""The last answer of every script."""

_PI = """{"providers": {"sojourn": {"baseUrl": "$url/v1", "api": "openai-completions", "apiKey": "none",
"compat": {"sendSessionAffinityHeaders": true, "supportsDeveloperRole": false},
"models": [{"id": "$model", "contextWindow": 65536, "maxTokens": 2048}]}}}"""
_CLAUDE = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
_CLAUDE_MODELS = {
    f"ANTHROPIC_{name}": "$model"
    for name in ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
}
_AGENT_SDK = """
import asyncio, sys
from claude_agent_sdk import ClaudeAgentOptions, query
async def main():
    options = ClaudeAgentOptions(permission_mode="bypassPermissions")
    async for message in query(prompt=sys.argv[1], options=options):
        print(getattr(message, "result", None) or "")
asyncio.run(main())
"""
_ANTHROPIC = """
import subprocess, sys
import anthropic
client = anthropic.Anthropic(default_headers={"X-Session-ID": "$session"})
text = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"name": "bash", "description": "Run a command.", "input_schema": text}]
messages = [{"role": "user", "content": sys.argv[1]}]
common = {"model": "$model", "max_tokens": 512, "tools": tools, "system": "You are a careful agent. " * 200}
while True:
    with client.messages.stream(**common, messages=messages) as stream:
        answer = stream.get_final_message()
    calls = [part for part in answer.content if part.type == "tool_use"]
    if not calls:
        print(answer.content[0].text)
        break
    messages.append({"role": "assistant", "content": answer.content})
    messages.append({"role": "user", "content": [
        dict(type="tool_result", tool_use_id=call.id, content=subprocess.getoutput(call.input["command"]))
        for call in calls
    ]})
"""


@dataclass(frozen=True, kw_only=True)
class CodingClient:
    """A client, and how it is started. In its texts, ``$url`` is the server, ``$model`` the model, ``$home``
    the client's home, a new folder for each session, and ``$session`` the folder's name."""

    name: str
    api: str
    """Path of the API that it speaks."""
    package: str
    """Name in the registry of npm, or in that of pip if ``command`` starts with ``python``."""
    command: tuple[str, ...]
    """Program, and its arguments before the prompt."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the home → text."""
    setup: str = ""
    """Script of the npm package that fetches nothing and makes its program ready."""
    sojourn_run: bool = True
    """Whether ``sojourn run`` starts it. Else ``env`` and ``files`` point it at the server."""
    session_in_url: bool = False
    """Whether ``sojourn run`` writes the session into the base URL, because the client sends no id."""
    agents: bool = True
    """Whether the client has sub-agents."""

    @property
    def python(self) -> bool:
        return self.command[0] == "python"

    def install(self, folder: Path = INSTALLED) -> str:
        """Install the newest release below ``folder`` and return its version. Raises ``CalledProcessError``
        and ``OSError`` if npm, pip or the network is missing."""
        if self.python:
            interpreter = str(folder / "venv" / "bin" / "python")
            if not Path(interpreter).exists():
                venv.create(folder / "venv", with_pip=True)
            _run(interpreter, "-m", "pip", "install", "--quiet", "--upgrade", self.package)
            asked = f"from importlib.metadata import version; print(version({self.package!r}))"
            return _run(interpreter, "-c", asked)
        place = folder / "node_modules" / self.package
        folder.mkdir(parents=True, exist_ok=True)
        _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{self.package}@latest")
        if self.setup:
            _run("node", str(place / self.setup), cwd=place)
        return _run("node", "-p", f"require({str(place / 'package.json')!r}).version")

    def start(
        self, url: str, home: Path, prompt: str, *, folder: Path = INSTALLED, model: str = MODEL
    ) -> subprocess.Popen[str]:
        """Start a session in ``home``, which is made. Its output is on the pipe ``stdout``."""
        values = {"url": url, "model": model, "home": str(home), "session": home.name}
        work = home / "work"
        work.mkdir(parents=True)
        for path, text in self.files.items():
            file = home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(values))
        programs = folder / "venv" / "bin" if self.python else folder / "node_modules" / ".bin"
        program, *words = (Template(word).substitute(values) for word in self.command)
        runner = [*SOJOURN_RUN, "--url", url, "--program", home.name, "--"] if self.sojourn_run else []
        return subprocess.Popen(
            [*runner, str(programs / program), *words, prompt],
            cwd=work,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "NO_PROXY": "127.0.0.1",
                **{name: Template(value).substitute(values) for name, value in self.env.items()},
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


CLIENTS = (
    CodingClient(
        name="Claude Code", api="/v1/messages", package="@anthropic-ai/claude-code", setup="install.cjs",
        command=("claude", "--dangerously-skip-permissions", "-p"), env=_CLAUDE,
    ),
    CodingClient(
        name="Codex", api="/v1/responses", package="@openai/codex",
        command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    ),
    CodingClient(
        name="OpenCode", api="/v1/chat/completions", package="opencode-ai", setup="postinstall.mjs",
        command=("opencode", "run"),
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    CodingClient(
        name="Qwen Code", api="/v1/chat/completions", package="@qwen-code/qwen-code", session_in_url=True,
        command=("qwen", "--yolo", "-p"),
    ),
    CodingClient(
        name="Pi", api="/v1/chat/completions", package="@mariozechner/pi-coding-agent", agents=False,
        sojourn_run=False,
        command=("pi", "--provider", "sojourn", "--model", "$model", "-p"),
        env={"PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": "$home/.pi"}, files={".pi/models.json": _PI},
    ),
    CodingClient(
        name="Claude Agent SDK", api="/v1/messages", package="claude-agent-sdk",
        sojourn_run=False, command=("python", "-c", _AGENT_SDK),
        env={
            **_CLAUDE, **_CLAUDE_MODELS, "ANTHROPIC_BASE_URL": "$url", "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
        },
    ),
    CodingClient(
        name="Anthropic SDK", api="/v1/messages", package="anthropic", agents=False,
        sojourn_run=False, command=("python", "-c", _ANTHROPIC),
        env={"ANTHROPIC_BASE_URL": "$url", "ANTHROPIC_API_KEY": "none"},
    ),
)  # fmt: skip


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=900)
    return done.stdout.strip()
