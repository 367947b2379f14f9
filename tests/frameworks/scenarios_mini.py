"""mini-swe-agent with real bash."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scenario_types import ToolFact, fact, scenarios_of
from sojourn.testing import ToolUse

ABSENT = {
    "async": "mini-swe-agent 2.x is synchronous from end to end",
    "stream": "its models only read whole answers",
    "sub_agent": "its agents cannot call agents",
}


def agent(
    base_url: str, model: str, *, provider: str = "openai", responses: bool = False, **config: Any
) -> Any:
    from impatient_environment import ImpatientEnvironment
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel
    from minisweagent.models.litellm_response_model import LitellmResponseModel

    settings = {"api_base": base_url, "api_key": "none"}
    return DefaultAgent(
        (LitellmResponseModel if responses else LitellmModel)(
            model_name=f"{provider}/{model}", model_kwargs=settings
        ),
        ImpatientEnvironment(),
        system_template="You are an agent.",
        instance_template="Do {{task}}.",
        **config,
    )


def outputs(agent: Any, result: dict[str, Any]) -> Any:
    """How the agent ended, and what its commands printed."""
    recorded = [message.get("content") or message.get("output") for message in agent.messages[2:]]
    return (
        result["exit_status"],
        result["submission"],
        [text for text in recorded if "returncode" in str(text)],
    )


def run(base_url: str, model: str, **options: Any) -> Any:
    made = agent(base_url, model, **options)
    return outputs(made, made.run("it"))


def run_on_hosted_vllm(base_url: str, model: str) -> Any:
    return run(base_url, model, provider="hosted_vllm")


def run_twice_within_a_limit(base_url: str, model: str) -> Any:
    """The second run may take what the first one has left."""
    made = agent(base_url, model, step_limit=4)
    return [outputs(made, made.run("it")) for _ in range(2)]


def run_with_responses(base_url: str, model: str) -> Any:
    return run(base_url, model, responses=True)


class EnvironmentBroke(Exception):
    """Error that a command of ``broken_environment`` raises."""


def broken_environment(base_url: str, model: str, error: type[BaseException] = EnvironmentBroke) -> Any:
    from impatient_environment import ImpatientEnvironment

    class Broken(ImpatientEnvironment):
        def execute(self, *_: Any, **__: Any) -> Any:
            raise error

    made = agent(base_url, model)
    made.env = Broken()
    return made.run("it")


def interrupted(base_url: str, model: str) -> Any:
    """Ctrl-C while the agent's command runs."""
    return broken_environment(base_url, model, KeyboardInterrupt)


def two_at_once(base_url: str, model: str) -> Any:
    """Two agents in threads, as ``mini-extra swebench`` runs its instances."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: run(base_url, model), range(2)))


def bash(command: str) -> ToolUse:
    return ToolUse("bash", {"command": command})


scenario = scenarios_of("mini_swe_agent", "minisweagent")
SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done")
WORK = [bash("echo hi"), [bash("false"), bash("sleep 60")], SUBMIT]
ECHO = ToolFact("bash", "ok", "echo")
NONZERO, LATE = ToolFact("bash", "nonzero", "false"), ToolFact("bash", "timeout", "sleep")
WORKED = fact("agent", "- - -", ECHO, ECHO, NONZERO, LATE)
LIMITED = [fact("first", "- -", ECHO, ECHO, limit=4), fact("second", "-", ECHO, limit=2)]
BROKE = fact("agent", "-", ECHO._replace(status="error"), status="error")
INTERRUPTED = fact("agent", "-", ECHO._replace(status="cancelled"), status="cancelled")
TWO = [bash("echo one"), bash("echo two")]
BOTH = [fact(key, "-", ECHO) for key in ("first", "second")]
IN_TURN = fact("agent", "- -", ECHO, ECHO, ECHO)

SCENARIOS = [
    scenario("sync", run, WORK, WORKED),
    scenario("sync", run_on_hosted_vllm, WORK, WORKED, name="hosted_vllm"),
    scenario("sync", run_with_responses, WORK, WORKED, name="responses"),
    scenario("sync", run_twice_within_a_limit, [bash("echo hi"), SUBMIT, SUBMIT], *LIMITED, name="limit"),
    scenario("error", broken_environment, [bash("echo hi")], BROKE, raises="EnvironmentBroke"),
    scenario("cancel", interrupted, [bash("echo hi")], INTERRUPTED, raises="KeyboardInterrupt"),
    scenario("parallel", run, [TWO, SUBMIT], IN_TURN, name="calls, run one after the other"),
    scenario("parallel", two_at_once, [SUBMIT, SUBMIT], *BOTH, name="instances in threads"),
]
