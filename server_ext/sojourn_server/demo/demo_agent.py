"""One agent of the demo: mini-swe-agent's own loop and shell, with a model whose output tokens are forced.

Every request carries the forced tokens in ``vllm_xargs.replay_ids``. The run ends with an error if an answer
differs from the script, or if the agent needs more turns than the script has. The demo runs its programs once
in each arm: ``stock`` is plain vLLM, ``sojourn`` adds the SDK and the plugin.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .demo_tasks import DemoTask, shell_environment
from .scripted_tokens import Tokenizer

# mini and litellm read these on import. They turn off a banner, a set-up dialogue and the download of a price
# list.
SETTINGS = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

SYSTEM = "You are a software engineer. You work in a shell, one command at a time."
INSTANCE = """Please solve this issue: {{task}}

You are in the root of the repository. Every response has a short thought and one call of the bash tool.
Work step by step:

1. Read the files that matter.
2. Run the tests to see the failure.
3. Edit the source, never the tests.
4. Run the tests again.
5. Finish with `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`, alone in its command. You cannot go on after it.

Every command runs in a new subshell; a change of directory or of variables does not last."""

LOCAL_HOSTS = ("127.0.0.1", "localhost")
REQUEST_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 60


class ScriptDeviationError(RuntimeError):
    """Raised if the agent leaves its script, or the engine does not emit the forced tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTurnRecord:
    """One LLM request and the command in its answer. Times are seconds since the arm began."""

    start_s: float
    first_tool_s: float
    """Time at which the answer had arrived and the command began."""
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoProgramRecord:
    """Record of one agent's run. Times are seconds since the arm began."""

    task: str
    arrived_s: float
    ended_s: float
    turns: tuple[DemoTurnRecord, ...]
    error: str | None = None
    fixed: bool = False
    """Whether the repository's tests pass. Set after all programs have ended, so that tests do not slow other
    programs."""

    @property
    def completion_s(self) -> float:
        """Seconds from the arrival to the agent's end."""
        return self.ended_s - self.arrived_s


TurnCallback = Callable[[str, int, str], None]
"""Called with the state (``thinking``, ``tool``, ``done`` or ``failed``), the turn's number from 1, and a
text: the thought, the command, ``submitted`` or the error."""


def prepare_environment(settings_directory: Path, url: str | None = None) -> None:
    """Set the environment variables for mini-swe-agent and litellm. Call this before importing them.

    ``settings_directory`` replaces the user's folder of mini-swe-agent. The import of mini-swe-agent makes
    that folder and loads the ``.env`` in it. The user's folder may be read-only, and its ``.env`` would
    change the demo.

    ``url`` is the server's URL; ``None`` means a server that the demo starts. Requests to a server on this
    machine bypass the user's proxy. For another server the proxy settings stay.
    """
    os.environ.update(SETTINGS, MSWEA_GLOBAL_CONFIG_DIR=str(settings_directory))
    host = LOCAL_HOSTS[0] if url is None else _loopback_host(url)
    if host is not None:  # libraries differ in which of the two variables they read first
        given = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
        hosts = ",".join(dict.fromkeys(filter(None, (*given.split(","), *LOCAL_HOSTS, host))))
        os.environ.update(NO_PROXY=hosts, no_proxy=hosts)


def _loopback_host(url: str) -> str | None:
    """Return the host of ``url`` if it always means this machine, else ``None``."""
    try:
        host = urlsplit(url).hostname or ""
        return host if host == "localhost" or ip_address(host).is_loopback else None
    except ValueError:  # another name, or no URL, which the first request reports
        return None


def connection(base_url: str) -> dict[str, Any]:
    """Return litellm's settings for requests to the server. Retries are off, because they would hide
    faults."""
    return {
        "api_base": base_url,
        # litellm would replace an empty key by the user's OPENAI_API_KEY.
        "api_key": os.environ.get("VLLM_API_KEY") or "none",
        "timeout": REQUEST_TIMEOUT_S,
        "max_retries": 0,
        "temperature": 0.0,
    }


def silence_litellm() -> None:
    """Turn off litellm's prints about errors. They would spoil the live view and JSON on stdout. The demo
    reports errors itself."""
    import litellm

    litellm.suppress_debug_info = True


def scripted_model(task: DemoTask, tokenizer: Tokenizer, watch: TurnCallback) -> Any:
    """Return a subclass of mini-swe-agent's ``LitellmModel`` that follows the script of ``task``."""
    from minisweagent.models.litellm_model import LitellmModel

    silence_litellm()

    class ScriptedModel(LitellmModel):
        """A model that forces each answer, checks it, and records its times and token counts."""

        abort_exceptions = [*LitellmModel.abort_exceptions, Exception]  # noqa: RUF012

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.turns: list[DemoTurnRecord] = []
            """Answered turns. Their times are of the monotonic clock, and their commands have not ended."""

        def _query(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            number = len(self.turns)
            if number >= len(task.turns):
                raise ScriptDeviationError(
                    f"{task.name}: the agent asks for turn {number + 1}; the script has {number}"
                )
            turn = task.turns[number]
            ids = tokenizer.forced_ids(turn)
            body = dict(kwargs.pop("extra_body", None) or {})
            body["vllm_xargs"] = {**body.get("vllm_xargs", {}), "replay_ids": ids}
            watch("thinking", number + 1, turn.thought)
            start_s = time.monotonic()
            response = super()._query(messages, extra_body=body, **kwargs)
            end_s = time.monotonic()
            calls = response.choices[0].message.tool_calls or []
            commands = [json.loads(call.function.arguments).get("command") for call in calls]
            if commands != [turn.command]:
                raise ScriptDeviationError(
                    f"{task.name}, turn {number + 1}: forced {turn.command!r}, got {commands!r}"
                )
            usage = response.usage
            details = getattr(usage, "prompt_tokens_details", None)
            self.turns.append(
                DemoTurnRecord(
                    start_s=start_s,
                    first_tool_s=end_s,
                    end_s=end_s,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=getattr(details, "cached_tokens", None) or 0,
                    output_tokens=usage.completion_tokens,
                    command=turn.command,
                )
            )
            watch("tool", number + 1, turn.command)
            return response

    return ScriptedModel


def run_program(
    task: DemoTask,
    repository: Path,
    base_url: str,
    model: str,
    tokenizer: Tokenizer,
    *,
    origin_s: float,
    prepare: Callable[[Any], Any],
    watch: TurnCallback,
) -> DemoProgramRecord:
    """Run mini-swe-agent's ``DefaultAgent`` with the scripted model in ``repository``, and return the record
    of the run. Times are seconds after ``origin_s``. ``base_url`` must end in ``/v1``.

    ``prepare`` gets the agent before the run and returns the agent to run. In the sojourn arm it attaches the
    sojourn integration; in the stock arm it does nothing. An exception during the run becomes the record's
    ``error``.
    """
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment

    scripted = scripted_model(task, tokenizer, watch)
    agent = prepare(
        DefaultAgent(
            scripted(model_name=f"openai/{model}", model_kwargs=connection(base_url)),
            LocalEnvironment(cwd=str(repository), timeout=COMMAND_TIMEOUT_S, env=shell_environment()),
            system_template=SYSTEM,
            instance_template=INSTANCE,
            cost_limit=0.0,
            step_limit=len(task.turns) + 1,
        )
    )
    arrived_s = time.monotonic() - origin_s
    error: str | None = None
    turns: list[DemoTurnRecord] = agent.model.turns
    try:
        status = agent.run(task.issue).get("exit_status")
        if status != "Submitted":
            error = f"the agent ended with {status}"
        elif len(turns) != len(task.turns):
            error = f"the agent ended after {len(turns)} of {len(task.turns)} turns"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    ended_s = time.monotonic() - origin_s
    watch("failed" if error else "done", len(turns), error or "submitted")
    starts = [turn.start_s - origin_s for turn in turns]
    # A turn's command ends when the next request begins, the last one's when the agent ends.
    timed = (
        replace(turn, start_s=start_s, first_tool_s=turn.first_tool_s - origin_s, end_s=end_s)
        for turn, start_s, end_s in zip(turns, starts, [*starts[1:], ended_s], strict=True)
    )
    return DemoProgramRecord(
        task=task.name, arrived_s=arrived_s, ended_s=ended_s, turns=tuple(timed), error=error
    )
