"""Logits processor that answers coding agents by a script in their prompt, so that real clients run on a real
engine with a small model.

A user's message names the script, for example ``SCRIPT-main-7``; 7 is the seed. Each answer is the script's
next step, as a call of the tool that the client offers for it. The last answer is a sentence. Nothing else
is scripted: prompts, KV, scheduling and tool parsing are real.

    sojourn serve tiny --logits-processors scripted_answers:ScriptedAnswers
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from coding_clients import FINISHED
from sojourn_server.models.chat_format import END_OF_MESSAGE, assistant_text
from sojourn_server.vllm.forced_tokens import ARGUMENT, ForcedTokens
from tokenizers import Tokenizer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

MARK = re.compile(r"SCRIPT-([a-z]+)-(\d+)")
AGENT_ID = re.compile(r'"agent_id": ?"([^"]+)"')
"""Where Codex says how it calls a sub-agent that it has started."""
Step = tuple[str, str]
"""Kind of a tool, and its command or prompt, in which ``{seed}`` is the script's seed."""
SCRIPTS: dict[str, tuple[Step, ...]] = {
    "main": (
        ("plan", ""),
        ("shell", "echo one {seed}"),
        ("agent", "Look at the folder. SCRIPT-helper-{seed}"),
        ("wait", ""),
        ("shell", "echo two {seed}"),
    ),
    "helper": (("shell", "echo helper {seed}"),),
    # Commands that stand for builds and tests: two to five seconds, 40 lines.
    "build": tuple(
        ("shell", f"sleep {2 + turn % 4}; seq {{seed}}{turn}00 {{seed}}{turn}39") for turn in range(5)
    ),
}
TOOLS: dict[str, tuple[str, ...]] = {
    "shell": ("bash", "run_shell_command", "exec_command", "shell_command", "shell"),
    "agent": ("agent", "task", "spawn_agent"),
    "wait": ("wait_agent",),
    "plan": ("taskcreate", "todowrite", "todo_write", "update_plan"),
}
"""Step → tools for it, in lower case, without their namespaces. A client without them skips the step."""


class ScriptedAnswers(ForcedTokens):
    """Forces the answers that the prompts' scripts ask for."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._tokenizer = Tokenizer.from_file(f"{vllm_config.model_config.tokenizer}/tokenizer.json")

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, prompt, _ in batch_update.added if batch_update is not None else ():
            text = answer(self._tokenizer.decode(prompt, skip_special_tokens=False))
            forced = self._tokenizer.encode(text + END_OF_MESSAGE, add_special_tokens=False).ids
            params.extra_args = {**(params.extra_args or {}), ARGUMENT: forced}
        super().update_state(batch_update)


def answer(prompt: str) -> str:
    """Return the next answer for a prompt in the format of ``chat_template.jinja``."""
    steps: tuple[Step, ...] = ()
    seed, done = "0", 0
    for message in prompt.split("<|im_start|>")[1:-1]:
        script = MARK.search(message) if message.startswith("user\n") else None
        if script and "<tool_response>" not in message:
            steps, seed, done = SCRIPTS[script[1]], script[2], 0
        elif message.startswith("assistant\n"):
            done += 1
    tools = offered_tools(prompt)
    possible = [(step, tools[name]) for step in steps for name in TOOLS[step[0]] if name in tools]
    if done >= len(possible):
        return FINISHED
    (kind, text), tool = possible[done]
    given = arguments(kind, text.format(seed=seed), tool, AGENT_ID.findall(prompt)[-1:])
    return assistant_text("", [{"name": tool["name"], "arguments": given}])


def offered_tools(prompt: str) -> dict[str, dict[str, Any]]:
    """Return the prompt's functions, by their names in lower case without namespaces."""
    found = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    lines = found.group(1).splitlines() if found else []
    functions = [each.get("function", each) for each in map(json.loads, lines)]
    return {each["name"].lower().rpartition("__")[2]: each for each in functions}


def arguments(kind: str, text: str, tool: dict[str, Any], started: list[str]) -> dict[str, Any]:
    """Return the arguments of a step's call: those that the tool has. ``started``: ids of sub-agents."""
    possible: dict[str, Any] = {"description": "a step of the script"}
    if kind == "shell":
        possible |= {"command": text, "cmd": text, "is_background": False}
    elif kind == "agent":
        possible |= {"prompt": text, "message": text, "task_name": "helper"}
        possible["subagent_type"] = "general" if tool["name"] == "task" else "general-purpose"
    elif kind == "plan":
        todo = {
            "content": "look",
            "status": "pending",
            "activeForm": "looking",
            "priority": "high",
            "id": "1",
        }
        possible |= {"todos": [todo], "plan": [{"step": "look", "status": "pending"}], "subject": "look"}
    elif kind == "wait":
        possible |= {"targets": started, "timeout_ms": 30_000}
    known = tool["parameters"]["properties"]
    return {name: value for name, value in possible.items() if name in known}
