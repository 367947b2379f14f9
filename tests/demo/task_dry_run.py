"""A scripted task without an engine, with mini's own agent and shell, and the scripted answers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from sojourn_server.demo.demo_agent import INSTANCE, SYSTEM, prepare_environment
from sojourn_server.demo.demo_tasks import DemoTask, shell_environment
from sojourn_server.demo.scripted_tokens import Tokenizer
from sojourn_server.models import CHAT_TEMPLATE


class CountingTokenizer(Tokenizer):
    """Also counts the tokens of a conversation as the server renders it."""

    def count(self, messages: list[Any], tools: list[Any]) -> int:
        # The same settings as transformers uses for chat templates.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        template = environment.from_string(CHAT_TEMPLATE.read_text())
        return len(self.encode(template.render(messages=messages, tools=tools)))


@dataclass(frozen=True)
class DryRun:
    before: bool
    after: bool
    exit_status: str
    seconds: list[float]
    returncodes: list[int]
    prompt_tokens: list[int]
    context_tokens: int


def dry_run_task(task: DemoTask, directory: Path, tokenizer: CountingTokenizer) -> DryRun:
    prepare_environment(directory)
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.test_models import DeterministicToolcallModel, make_toolcall_output
    from minisweagent.models.utils.actions_toolcall import BASH_TOOL

    outputs = []
    for number, turn in enumerate(task.turns):
        call = {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": "bash", "arguments": {"command": turn.command}},
        }
        action = {"command": turn.command, "tool_call_id": f"call-{number}"}
        outputs.append(make_toolcall_output(turn.thought, [call], [action]))
    repository = task.copy_to(directory)
    before = task.is_fixed(repository)
    environment = LocalEnvironment(cwd=str(repository), timeout=60, env=shell_environment())
    execute, seconds = environment.execute, []

    def timed(action: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        start_s = time.monotonic()
        try:
            return execute(action, *args, **kwargs)
        finally:
            seconds.append(time.monotonic() - start_s)

    environment.execute = timed  # type: ignore[method-assign]
    agent = DefaultAgent(
        DeterministicToolcallModel(outputs=outputs),
        environment,
        system_template=SYSTEM,
        instance_template=INSTANCE,
        cost_limit=0.0,
    )
    status = agent.run(task.issue)["exit_status"]
    spoken = [message for message in agent.messages if message["role"] != "exit"]
    turns = [index for index, message in enumerate(spoken) if message["role"] == "assistant"]
    return DryRun(
        before=before,
        after=task.is_fixed(repository),
        exit_status=status,
        seconds=seconds,
        returncodes=[m["extra"]["returncode"] for m in spoken if m["role"] == "tool"],
        prompt_tokens=[tokenizer.count(spoken[:index], [BASH_TOOL]) + 3 for index in turns],
        context_tokens=tokenizer.count(spoken, [BASH_TOOL]),
    )
