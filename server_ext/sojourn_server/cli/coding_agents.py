"""Coding agents that are no Python: their hooks, and what ``sojourn run`` sets so that they reach the server.

Needs only the SDK and the standard library.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from sojourn import hook_process
from sojourn.valid_ids_and_names import new_program_id

DEFAULT_CONTEXT_TOKENS = 32768
"""Context length that is assumed of a model whose server does not tell it."""
_PLUGIN = Path(__file__).with_name("agent_plugin.js")
_HOOK_EVENTS = ("PreToolUse", "PostToolUse", "PostToolUseFailure", "SubagentStop", "SessionEnd")


class Target(NamedTuple):
    """The server that a client is to use: its root, the value of ``SOJOURN_API_KEY``, the id for a client
    that sends none, what ``/v1/models`` lists, and the name of the first of them. Empty: not known."""

    url: str
    api_key: str
    program_id: str
    models: Sequence[Mapping[str, Any]]
    model: str


class ClientSettings(NamedTuple):
    """What ``sojourn run`` adds to a client's command, and what it tells the user. Arguments stand before the
    user's; variables of the user's own stay. ``base_url`` is the variable that directs the client to a
    server: if the user has set it for another one, nothing is added."""

    said: str
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    base_url: str = ""


def hook_command(client: str, url: str) -> list[str]:
    """Return the command of a hook: a Python without site packages that runs ``sojourn.hook_process``."""
    return [sys.executable, "-I", "-S", str(Path(hook_process.__file__).resolve()), client, url]


def hook_settings(client: str, url: str) -> dict[str, Any]:
    """Return the settings that make a client run the hook at each event that is reported."""
    hook = {"type": "command", "command": shlex.join(hook_command(client, url))}
    return {"hooks": {event: [{"hooks": [hook]}] for event in _HOOK_EVENTS}}


def plugin_text(url: str) -> str:
    """Return the text of OpenCode's plugin."""
    command = json.dumps(hook_command("opencode", url))
    return _PLUGIN.read_text("utf-8").replace("JSON.parse(process.env.SOJOURN_HOOK)", command)


def _claude(target: Target) -> ClientSettings:
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    environment = {f"ANTHROPIC_{name}": target.model for name in names}
    environment |= {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.api_key or "none"}
    hooks = json.dumps(hook_settings("claude-code", target.url))
    said = "Claude Code's sessions and sub-agents are programs, and its tools are reported"
    return ClientSettings(said, environment, ("--settings", hooks), "ANTHROPIC_BASE_URL")


def _codex(target: Target) -> ClientSettings:
    provider = f'name="sojourn",base_url={json.dumps(target.url + "/v1")},wire_api="responses"'
    provider += ',env_key="SOJOURN_API_KEY"' if target.api_key else ""
    options = [f"model_providers.sojourn={{{provider},supports_websockets=false}}"]
    options += ['model_provider="sojourn"', *([f"model={json.dumps(target.model)}"] if target.model else [])]
    said = "Codex's threads are programs (for its tools: sojourn hook codex --install)"
    return ClientSettings(said, {}, [word for option in options for word in ("-c", option)])


def _opencode(target: Target) -> ClientSettings:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key or "none"},
        "models": {model["id"]: {} for model in target.models},
    }
    config: dict[str, Any] = {"plugin": [_PLUGIN.as_uri()], "provider": {"sojourn": provider}}
    if target.model:
        config |= dict.fromkeys(("model", "small_model"), f"sojourn/{target.model}")
    hook = json.dumps(hook_command("opencode", target.url))
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "SOJOURN_HOOK": hook}
    said = "OpenCode's sessions are programs, and its tools are reported"
    return ClientSettings(said, environment, (), "OPENCODE_CONFIG_CONTENT")


def _qwen(target: Target) -> ClientSettings:
    program_id = target.program_id or new_program_id()
    base_url = f"{target.url}/sojourn/session/{quote(program_id, safe='')}/v1"
    environment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": target.api_key or "none"}
    environment |= {"OPENAI_MODEL": target.model, "SOJOURN_PROGRAM_ID": program_id}
    said = f"Qwen Code is the program {program_id} (for its tools: sojourn hook qwen-code --install)"
    return ClientSettings(said, environment, ("--auth-type", "openai"), "OPENAI_BASE_URL")


def _pi(target: Target) -> ClientSettings:
    tokens = [model.get("max_model_len") or DEFAULT_CONTEXT_TOKENS for model in target.models]
    models = [
        {"id": model["id"], "name": model["id"], "reasoning": False, "input": ["text"]}
        | {"cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)}
        | {"contextWindow": context_tokens, "maxTokens": context_tokens // 4}
        for model, context_tokens in zip(target.models, tokens, strict=True)
    ]
    provider = {"baseUrl": f"{target.url}/v1", "apiKey": target.api_key or "none", "models": models}
    hook = json.dumps(hook_command("pi", target.url))
    environment = {"SOJOURN_PI": json.dumps({**provider, "api": "openai-completions"}), "SOJOURN_HOOK": hook}
    words = ("--extension", str(_PLUGIN), *(("--model", f"sojourn/{target.model}") if target.model else ()))
    return ClientSettings("Pi's sessions are programs, and its tools are reported", environment, words)


CLIENTS: dict[str, Callable[[Target], ClientSettings]] = dict(
    claude=_claude, codex=_codex, opencode=_opencode, pi=_pi, qwen=_qwen
)
"""Name of a client's command → its settings."""
TAKEN_ONCE = ("--settings", "--auth-type")
"""Options that are not added if the user gives them."""
NOT_FOLLOWED = {
    "gemini": "it speaks Google's API only, which vLLM does not serve",
    "cursor-agent": "it sends its requests to Cursor's own servers",
}
"""Name of a client's command → why its programs cannot be followed."""
