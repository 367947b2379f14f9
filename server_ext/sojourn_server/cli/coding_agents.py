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

NO_KEY = "none"
"""Key for a server without one, since clients ask for a key or use the user's key of a provider."""
DEFAULT_CONTEXT_TOKENS = 32768
"""Context length of a model whose server does not tell it."""
MAX_OUTPUT_TOKENS = 32_000
_PLUGIN = Path(__file__).with_name("agent_plugin.js")
_HOOK_EVENTS = ("PreToolUse", "PostToolUse", "PostToolUseFailure", "SubagentStop", "SessionEnd")


class Target(NamedTuple):
    """The server that a client is to use: its root, its key, the id for a client that sends none, what
    ``/v1/models`` lists, and the user's variables. Empty: not known."""

    url: str
    api_key: str
    program_id: str
    models: Sequence[Mapping[str, Any]]
    environment: Mapping[str, str]

    def model(self, variable: str = "") -> str:
        """Return the model that the user's ``variable`` names if the server has it, else the first one."""
        ids = [model["id"] for model in self.models]
        named = self.environment.get(variable, "")
        return named if named in ids or not ids else ids[0]

    def context_tokens(self) -> dict[str, int]:
        """Return model → maximum number of tokens of prompt and answer. An adapter has its base model's,
        which is listed first."""
        base = self.models[0].get("max_model_len") if self.models else None
        return {
            model["id"]: model.get("max_model_len") or base or DEFAULT_CONTEXT_TOKENS for model in self.models
        }


class ClientSettings(NamedTuple):
    """What ``sojourn run`` adds to a client's command, and what it tells the user.

    Arguments stand before the user's. Variables replace the user's, which are for another server; an empty
    one is removed. ``base_url`` is the variable that directs the client to a server: if the user has set it
    for another one, nothing is added."""

    said: str
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    base_url: str = ""


def output_tokens(context_tokens: int) -> int:
    """Return the maximum length of an answer, so that most of the context is left for the prompt."""
    return min(context_tokens // 4, MAX_OUTPUT_TOKENS)


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
    environment = {f"ANTHROPIC_{name}": target.model(f"ANTHROPIC_{name}") for name in names}
    environment |= {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.api_key or NO_KEY}
    environment |= dict.fromkeys(
        ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"), ""
    )
    if context_tokens := target.context_tokens().get(environment["ANTHROPIC_MODEL"]):
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context_tokens)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(output_tokens(context_tokens))
    hooks = json.dumps(hook_settings("claude-code", target.url))
    said = "Claude Code's sessions and sub-agents are programs, and its tools are reported"
    return ClientSettings(said, environment, ("--settings", hooks), "ANTHROPIC_BASE_URL")


def _codex(target: Target) -> ClientSettings:
    provider = f'name="sojourn",base_url={json.dumps(target.url + "/v1")},wire_api="responses"'
    provider += ',env_key="SOJOURN_API_KEY"' if target.api_key else ""
    options = [
        f"model_providers.sojourn={{{provider},supports_websockets=false}}",
        'model_provider="sojourn"',
    ]
    if model := target.model():
        options += [f"model={json.dumps(model)}", f"model_context_window={target.context_tokens()[model]}"]
    said = "Codex's threads are programs (for its tools: sojourn hook codex --install)"
    return ClientSettings(said, {}, [word for option in options for word in ("-c", option)])


def _opencode(target: Target) -> ClientSettings:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key or NO_KEY},
        "models": {
            name: {"limit": {"context": context_tokens, "output": output_tokens(context_tokens)}}
            for name, context_tokens in target.context_tokens().items()
        },
    }
    config: dict[str, Any] = {"plugin": [_PLUGIN.as_uri()], "provider": {"sojourn": provider}}
    if model := target.model():
        config |= dict.fromkeys(("model", "small_model"), f"sojourn/{model}")
    hook = json.dumps(hook_command("opencode", target.url))
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "SOJOURN_HOOK": hook}
    said = "OpenCode's sessions are programs, and its tools are reported"
    return ClientSettings(said, environment, (), "OPENCODE_CONFIG_CONTENT")


def _qwen(target: Target) -> ClientSettings:
    program_id = target.program_id or new_program_id()
    base_url = f"{target.url}/sojourn/session/{quote(program_id, safe='')}/v1"
    environment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": target.api_key or NO_KEY}
    environment |= {"OPENAI_MODEL": target.model("OPENAI_MODEL"), "SOJOURN_PROGRAM_ID": program_id}
    if context_tokens := target.context_tokens().get(environment["OPENAI_MODEL"]):
        environment["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(output_tokens(context_tokens))
    said = f"Qwen Code is the program {program_id} (for its tools: sojourn hook qwen-code --install)"
    return ClientSettings(said, environment, ("--auth-type", "openai"), "OPENAI_BASE_URL")


def _pi(target: Target) -> ClientSettings:
    models = [
        {"id": name, "name": name, "reasoning": False, "input": ["text"]}
        | {"cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)}
        | {"contextWindow": context_tokens, "maxTokens": output_tokens(context_tokens)}
        for name, context_tokens in target.context_tokens().items()
    ]
    provider = {"baseUrl": f"{target.url}/v1", "apiKey": target.api_key or NO_KEY, "models": models}
    hook = json.dumps(hook_command("pi", target.url))
    environment = {"SOJOURN_PI": json.dumps({**provider, "api": "openai-completions"}), "SOJOURN_HOOK": hook}
    model = target.model()
    words = ("--extension", str(_PLUGIN), *(("--model", f"sojourn/{model}") if model else ()))
    return ClientSettings("Pi's sessions are programs, and its tools are reported", environment, words)


CLIENTS: dict[str, Callable[[Target], ClientSettings]] = dict(
    claude=_claude, codex=_codex, opencode=_opencode, pi=_pi, qwen=_qwen
)
"""Name of a client's command → its settings."""
PROVIDER_KEYS = frozenset({"ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"})
"""Variables with the user's keys."""
TAKEN_ONCE = frozenset({"--settings", "--auth-type"})
"""Options that are not added if the user gives them."""
NOT_FOLLOWED = {
    "gemini": "it speaks Google's API only, which vLLM does not serve",
    "cursor-agent": "it sends its requests to Cursor's own servers",
}
"""Name of a client's command → why its programs cannot be followed."""
