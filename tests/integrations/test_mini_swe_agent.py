"""A real mini agent with real bash against a server that plays back answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Read by mini at import time: without them it prints, asks for a setup and downloads a price list.
os.environ.update(
    MSWEA_SILENT_STARTUP="1",
    MSWEA_CONFIGURED="true",
    MSWEA_COST_TRACKING="ignore_errors",
    MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)
pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

import sojourn
from mini_server import MiniServer, calls

SUBMIT = calls("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done")


@pytest.fixture(autouse=True)
def offline_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from sojourn_integrations import mini_swe_agent

    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "mswea"))
    yield
    mini_swe_agent.uninstrument()
    sojourn.shutdown()


def make_agent(
    server: MiniServer, cwd: Path, *, kind: Any = None, model: str = "openai/m", **options: Any
) -> Any:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    settings = {"api_base": server.url + "/v1", "api_key": "x", "num_retries": 0, "max_retries": 0}
    return (kind or DefaultAgent)(
        options.pop("model_class", LitellmModel)(
            model_name=model, model_kwargs=settings | options.pop("model_kwargs", {})
        ),
        LocalEnvironment(cwd=str(cwd), timeout=1),
        system_template="You are an agent.",
        instance_template="Do {{task}}.",
        **options,
    )


def attached(agent: Any) -> Any:
    from sojourn_integrations.mini_swe_agent import attach

    return attach(agent)


def contexts(server: MiniServer) -> list[dict[str, Any]]:
    return [json.loads(body["vllm_xargs"]["agentic_context"]) for _, body, _ in server.requests]


def test_one_run_is_one_program_with_its_tool_calls(tmp_path: Path) -> None:
    script = [
        calls("echo hi", "cd . && test -f nothing"),  # two calls of one message run one after the other
        calls("sleep 3"),  # longer than the environment's limit
        calls("touch made"),
        SUBMIT,
    ]
    with MiniServer(script) as server:
        sojourn.init(server.url)
        result = attached(make_agent(server, tmp_path)).run("it")
        assert sojourn.flush(2)
    assert result["exit_status"] == "Submitted"
    assert (tmp_path / "made").exists()
    (start,) = server.told("program_start")
    assert (start["name"], start["agent_type"]) == ("DefaultAgent", "DefaultAgent")
    (end,) = server.told("program_end")
    assert (end["program_id"], end.get("status", "ok")) == (start["program_id"], "ok")
    starts, stops = server.told("tool_start"), server.told("tool_stop")
    assert [event["tool_class"] for event in starts] == ["echo", "test", "sleep", "touch", "echo"]
    assert {event["tool"] for event in starts} == {"bash"}
    ids = ["call-0-0", "call-0-1", "call-1-0", "call-2-0", "call-3-0"]
    assert [event["call_id"] for event in starts] == [event["call_id"] for event in stops] == ids
    statuses = [event.get("status", "ok") for event in stops]
    assert statuses == ["ok", "nonzero", "timeout", "ok", "ok"]
    assert stops[2]["duration_s"] == pytest.approx(1.0, abs=0.5)
    assert {context["program_id"] for context in contexts(server)} == {start["program_id"]}
    assert {headers["x-session-id"] for _, _, headers in server.requests} == {start["program_id"]}
    numbered = sorted(
        (e["seq"], e["type"]) for kind in ("tool_start", "tool_stop") for e in server.told(kind)
    )
    assert [kind for _, kind in numbered] == ["tool_start", "tool_stop"] * 5


def test_commands_and_outputs_are_never_sent_as_events(tmp_path: Path) -> None:
    with MiniServer([calls("echo s3cret-word"), SUBMIT]) as server:
        sojourn.init(server.url)
        attached(make_agent(server, tmp_path)).run("it")
        assert sojourn.flush(2)
        assert server.events
        assert "s3cret" not in json.dumps(server.events)


def test_a_failing_run_ends_its_program_with_error(tmp_path: Path) -> None:
    with MiniServer([{"status": 400}]) as server:
        sojourn.init(server.url)
        agent = attached(make_agent(server, tmp_path))
        with pytest.raises(Exception, match="scripted failure"):
            agent.run("it")
        assert sojourn.flush(2)
        assert [event["status"] for event in server.told("program_end")] == ["error"]


def test_the_users_exception_passes_unchanged(tmp_path: Path) -> None:
    class Odd(BaseException):
        pass

    raised = Odd("mine")

    with MiniServer([calls("true")]) as server:
        sojourn.init(server.url)
        agent = make_agent(server, tmp_path)

        def execute(action: Any, cwd: str = "") -> Any:
            raise raised

        agent.env.execute = execute
        with pytest.raises(Odd) as caught:
            attached(agent).run("it")
        assert caught.value is raised
        assert sojourn.flush(2)
        assert [event["status"] for event in server.told("tool_stop")] == ["error"]


def test_a_format_error_is_a_turn_without_a_tool(tmp_path: Path) -> None:
    with MiniServer([{"content": "no call at all"}, SUBMIT]) as server:
        sojourn.init(server.url)
        result = attached(make_agent(server, tmp_path)).run("it")
        assert sojourn.flush(2)
    assert result["exit_status"] == "Submitted"
    assert len(server.requests) == 2
    assert len(server.told("tool_start")) == 1
    assert len(server.told("program_end")) == 1


@pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m"])
def test_the_users_own_fields_win_and_stay(tmp_path: Path, model: str) -> None:
    own = {
        "extra_body": {"mine": 1, "vllm_xargs": {"replay_ids": [1, 2, 3]}},
        "extra_headers": {"x-mine": "yes"},
        "temperature": 0.5,
    }
    with MiniServer([SUBMIT]) as server:
        sojourn.init(server.url)
        agent = attached(make_agent(server, tmp_path, model=model, model_kwargs=own))
        agent.run("it")
        ((_, body, headers),) = server.requests
    assert (body["mine"], body["temperature"], headers["x-mine"]) == (1, 0.5, "yes")
    assert body["vllm_xargs"]["replay_ids"] == [1, 2, 3]
    assert "agentic_context" in body["vllm_xargs"]
    assert own["extra_body"] == {
        "mine": 1,
        "vllm_xargs": {"replay_ids": [1, 2, 3]},
    }  # the settings are not touched


def test_keyword_arguments_of_a_query_are_merged_too(tmp_path: Path) -> None:
    with MiniServer([SUBMIT]) as server:
        sojourn.init(server.url)
        agent = attached(make_agent(server, tmp_path, model_kwargs={"extra_body": {"a": 1, "b": 1}}))
        with sojourn.program("by-hand"):
            agent.model.query([{"role": "user", "content": "x"}], extra_body={"b": 2}, max_tokens=9)
        ((_, body, _),) = server.requests
    assert (body["a"], body["b"], body["max_tokens"]) == (1, 2, 9)
    assert "agentic_context" in body["vllm_xargs"]


def test_the_responses_api(tmp_path: Path) -> None:
    from minisweagent.models.litellm_response_model import LitellmResponseModel

    with MiniServer([calls("echo hi"), SUBMIT]) as server:
        sojourn.init(server.url)
        attached(make_agent(server, tmp_path, model_class=LitellmResponseModel)).run("it")
        assert sojourn.flush(2)
    assert [path for path, _, _ in server.requests] == ["/v1/responses"] * 2
    assert [event["call_id"] for event in server.told("tool_start")] == ["call-0-0", "call-1-0"]
    assert len({context["program_id"] for context in contexts(server)}) == 1


def test_no_ids_for_other_servers(tmp_path: Path) -> None:
    with MiniServer([SUBMIT]) as elsewhere, MiniServer([]) as ours:
        sojourn.init(ours.url)
        attached(make_agent(elsewhere, tmp_path)).run("it")
        assert sojourn.flush(2)
        ((_, body, headers),) = elsewhere.requests
        assert "vllm_xargs" not in body
        assert "x-session-id" not in headers
        assert len(ours.told("program_end")) == 1  # tools and program are still worth telling


def test_instrument_reaches_every_agent_once(tmp_path: Path) -> None:
    from minisweagent.agents.default import DefaultAgent
    from sojourn_integrations import mini_swe_agent

    class Custom(DefaultAgent):
        pass

    before = DefaultAgent.__init__, DefaultAgent.run
    mini_swe_agent.instrument()
    mini_swe_agent.instrument()
    with MiniServer([calls("true"), SUBMIT]) as server:
        sojourn.init(server.url)
        attached(make_agent(server, tmp_path, kind=Custom)).run("it")  # attaching on top changes nothing
        assert sojourn.flush(2)
    assert [event["agent_type"] for event in server.told("program_start")] == ["Custom"]
    assert len(server.told("tool_start")) == 2
    mini_swe_agent.uninstrument()
    assert (DefaultAgent.__init__, DefaultAgent.run) == before


def test_it_can_be_registered_with_the_sdk(tmp_path: Path) -> None:
    from minisweagent.agents.default import DefaultAgent
    from sojourn import instruments

    before = DefaultAgent.run
    instruments.register("mini_swe_agent", "minisweagent", "sojourn_integrations.mini_swe_agent")
    try:
        with MiniServer([SUBMIT]) as server:
            sojourn.init(server.url)
            assert "mini_swe_agent" in sojourn.stats().instrumented
            make_agent(server, tmp_path).run("it")
            assert sojourn.flush(2)
            assert len(server.told("tool_start")) == 1
        sojourn.shutdown()
        assert DefaultAgent.run is before
    finally:
        instruments._PATCHES.pop("mini_swe_agent")


def test_uninstrument_reaches_agents_that_exist(tmp_path: Path) -> None:
    from sojourn_integrations import mini_swe_agent

    mini_swe_agent.instrument()
    with MiniServer([SUBMIT]) as server:
        sojourn.init(server.url)
        agent = make_agent(server, tmp_path)
        mini_swe_agent.uninstrument()
        agent.run("it")
        assert sojourn.flush(2)
        assert server.told("tool_start") == []
        # The patched openai client still speaks for the process as a whole.
        assert {event.get("agent_type") for event in server.told("program_start")} <= {None}
        assert not {"execute", "query", "run"} & {*vars(agent), *vars(agent.env), *vars(agent.model)}


def test_an_attached_agent_does_exactly_what_a_plain_one_does(tmp_path: Path) -> None:
    script = [calls("echo hi", "false"), {"content": "no call"}, calls("sleep 2"), SUBMIT]
    with MiniServer(script) as server:
        plain = make_agent(server, tmp_path)
        plain.run("it")
        unchanged = plain.serialize()
    with MiniServer(script) as server:
        sojourn.init(server.url)
        agent = attached(make_agent(server, tmp_path))
        agent.run("it")
    assert _comparable(agent.serialize()) == _comparable(unchanged)


def _comparable(document: Any) -> Any:
    if isinstance(document, dict):
        volatile = ("timestamp", "api_base", "created", "id")
        return {key: _comparable(value) for key, value in document.items() if key not in volatile}
    if isinstance(document, list):
        return [_comparable(item) for item in document]
    return document


def test_our_own_faults_stay_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with MiniServer([calls("true"), SUBMIT]) as server:
        sojourn.init(server.url)
        agent = attached(make_agent(server, tmp_path))
        for name in ("program", "tool_call", "request_parts"):
            monkeypatch.setattr(sojourn, name, broken)
        assert agent.run("it")["exit_status"] == "Submitted"
        assert sojourn.stats()["internal_error"] == 3  # the program and two tool calls
        assert sojourn.stats()["inject_error"] == 2


def test_models_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    from minisweagent.models.test_models import DeterministicModel

    with MiniServer([]) as server:
        sojourn.init(server.url)
        agent = make_agent(server, tmp_path)
        message = {
            "role": "assistant",
            "content": "",
            "extra": {"actions": [{"command": SUBMIT["commands"][0]}]},
        }
        agent.model = DeterministicModel(outputs=[message])
        assert attached(agent).run("it")["exit_status"] == "Submitted"
        assert sojourn.flush(2)
        assert "query" not in vars(agent.model)
        (call,) = server.told("tool_start")
        assert call["call_id"]  # made up, since the model gave none


def test_agent_classes_for_the_command_line() -> None:
    from minisweagent.agents import get_agent_class
    from minisweagent.agents.interactive import InteractiveAgent

    made = get_agent_class("sojourn_integrations.mini_swe_agent.InteractiveAgent")
    assert issubclass(made, InteractiveAgent)
    assert get_agent_class("sojourn_integrations.mini_swe_agent.InteractiveAgent") is made
    from sojourn_integrations import mini_swe_agent

    with pytest.raises(AttributeError):
        mini_swe_agent.NoSuchAgent  # noqa: B018


def test_importing_does_not_import_mini() -> None:
    code = "import sys, sojourn_integrations.mini_swe_agent; print('minisweagent' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    )


@pytest.mark.slow
def test_the_oldest_supported_mini(tmp_path: Path) -> None:
    """All of the above again, in a process of its own, with mini 2.0.0 before the installed one."""
    fetched = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(tmp_path),
            "mini-swe-agent==2.0.0",
        ],
        capture_output=True,
        text=True,
    )
    if fetched.returncode:
        pytest.skip(f"mini-swe-agent 2.0.0 is not to be had here: {fetched.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(tests, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
    code = "import minisweagent; print(minisweagent.__version__)"
    version = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert version.stdout.strip() == "2.0.0"
