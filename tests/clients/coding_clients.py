"""Coding agents that people run, installed by npm and pip into a folder, and how each is pointed at a server.

The nightly tests and ``benchmarks/coding_agents.py`` use this module.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".tox" / "clients"
"""Default folder for the clients. Together they take 2 GB."""
MODEL = "tiny"
FINISHED = "Everything is done."
"""The last answer of every script."""

_OPENCODE = """{"model": "sojourn/$model", "small_model": "sojourn/$model", "autoupdate": false,
"provider": {"sojourn": {"npm": "@ai-sdk/openai-compatible",
"options": {"baseURL": "$url/v1", "apiKey": "none"},
"models": {"$model": {"limit": {"context": 65536, "output": 2048}}}}}}"""
_PI = """{"providers": {"sojourn": {"baseUrl": "$url/v1", "api": "openai-completions", "apiKey": "none",
"compat": {"sendSessionAffinityHeaders": true, "supportsDeveloperRole": false},
"models": [{"id": "$model", "contextWindow": 65536, "maxTokens": 2048}]}}}"""
_CODEX = """model = "$model"
model_provider = "sojourn"
model_context_window = 65536
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.sojourn]
name = "sojourn"
base_url = "$url/v1"
wire_api = "responses"
"""
_CLAUDE = {
    "ANTHROPIC_BASE_URL": "$url",
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "$model",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
    "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
    "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1",
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
    session_in_url: bool = False
    """Whether the session stands in the base URL, because the client sends no id."""
    agents: bool = True
    """Whether the client has sub-agents."""

    @property
    def python(self) -> bool:
        return self.command[0] == "python"

    def install(self, folder: Path = INSTALLED) -> str:
        """Install the newest release below ``folder``, if there is none, and return its version. Raises
        ``CalledProcessError`` and ``OSError`` if npm, pip or the network is missing."""
        if self.python:
            return self._install_by_pip(folder / "venv")
        place = folder / "node_modules" / self.package
        if not place.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), self.package)
            if self.setup:
                _run("node", str(place / self.setup), cwd=place)
        return _run("node", "-p", f"require({str(place / 'package.json')!r}).version")

    def _install_by_pip(self, folder: Path) -> str:
        interpreter = str(folder / "bin" / "python")
        if not folder.exists():
            venv.create(folder, with_pip=True)
        asked = f"from importlib.metadata import version; print(version({self.package!r}))"
        try:
            return _run(interpreter, "-c", asked)
        except subprocess.CalledProcessError:
            _run(interpreter, "-m", "pip", "install", "--quiet", self.package)
            return _run(interpreter, "-c", asked)

    def start(
        self, url: str, home: Path, prompt: str, *, folder: Path = INSTALLED, model: str = MODEL
    ) -> subprocess.Popen[str]:
        """Start a session in ``home``, which is made. Its output is on the pipe ``stdout``."""
        base = f"{url}/sojourn/session/{home.name}" if self.session_in_url else url
        values = {"url": base, "model": model, "home": str(home), "session": home.name}
        work = home / "work"
        work.mkdir(parents=True)
        for path, text in self.files.items():
            file = home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(values))
        programs = folder / "venv" / "bin" if self.python else folder / "node_modules" / ".bin"
        program, *words = (Template(word).substitute(values) for word in self.command)
        return subprocess.Popen(
            [str(programs / program), *words, prompt],
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
        command=("codex", "exec", "--skip-git-repo-check"),
        env={"CODEX_HOME": "$home/.codex"}, files={".codex/config.toml": _CODEX},
    ),
    CodingClient(
        name="OpenCode", api="/v1/chat/completions", package="opencode-ai", setup="postinstall.mjs",
        command=("opencode", "run"), env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": _OPENCODE},
    ),
    CodingClient(
        name="Qwen Code", api="/v1/chat/completions", package="@qwen-code/qwen-code", session_in_url=True,
        command=("qwen", "--auth-type", "openai", "--yolo", "-p"),
        env={"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "$url/v1", "OPENAI_MODEL": "$model"},
    ),
    CodingClient(
        name="Pi", api="/v1/chat/completions", package="@mariozechner/pi-coding-agent", agents=False,
        command=("pi", "--provider", "sojourn", "--model", "$model", "-p"),
        env={"PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": "$home/.pi"}, files={".pi/models.json": _PI},
    ),
    CodingClient(
        name="Claude Agent SDK", api="/v1/messages", package="claude-agent-sdk",
        command=("python", "-c", _AGENT_SDK), env=_CLAUDE,
    ),
    CodingClient(
        name="Anthropic SDK", api="/v1/messages", package="anthropic", agents=False,
        command=("python", "-c", _ANTHROPIC),
        env={"ANTHROPIC_BASE_URL": "$url", "ANTHROPIC_API_KEY": "none"},
    ),
)  # fmt: skip


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=900)
    return done.stdout.strip()
