"""A real mini agent with real bash against a server that plays back answers."""

from __future__ import annotations

import copy
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
from fake_openai_server import MiniServer, calls

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
    from impatient_environment import ImpatientEnvironment
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    settings = {"api_base": server.url + "/v1", "api_key": "x", "num_retries": 0, "max_retries": 0}
    return (kind or DefaultAgent)(
        options.pop("model_class", LitellmModel)(
            model_name=model, model_kwargs=settings | options.pop("model_kwargs", {})
        ),
        ImpatientEnvironment(cwd=str(cwd)),
        system_template="You are an agent.",
        instance_template="Do {{task}}.",
        **options,
    )


def only_attached(url: str, **options: Any) -> None:
    """A session that attaches to no agent by itself: what a test attaches to is attached to once."""
    sojourn.init(url, **options)
    sojourn.uninstrument("mini_swe_agent")


def attached(agent: Any) -> Any:
    from sojourn_integrations.mini_swe_agent import attach

    return attach(agent)


def contexts(server: MiniServer) -> list[dict[str, Any]]:
    return [json.loads(body["vllm_xargs"]["agentic_context"]) for _, body, _ in server.requests]


def test_one_run_is_one_program_with_its_tool_calls(tmp_path: Path) -> None:
    script = [
        calls("echo hi", "cd . && test -f nothing"),  # two calls of one message run one after the other
        calls("sleep 60"),  # longer than the environment's limit
        calls("touch made"),
        SUBMIT,
    ]
    with MiniServer(script) as server:
        only_attached(server.url)
        result = attached(make_agent(server, tmp_path)).run("it")
        assert sojourn.flush(60)
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
    assert 0.1 <= stops[2]["duration_s"] < 60
    assert {context["program_id"] for context in contexts(server)} == {start["program_id"]}
    assert {headers["x-session-id"] for _, _, headers in server.requests} == {start["program_id"]}
    numbered = sorted(
        (e["seq"], e["type"]) for kind in ("tool_start", "tool_stop") for e in server.told(kind)
    )
    assert [kind for _, kind in numbered] == ["tool_start", "tool_stop"] * 5


def test_the_users_exception_passes_unchanged(tmp_path: Path) -> None:
    class Odd(BaseException):
        pass

    raised = Odd("mine")

    with MiniServer([calls("true")]) as server:
        only_attached(server.url)
        agent = make_agent(server, tmp_path)

        def execute(action: Any, cwd: str = "") -> Any:
            raise raised

        agent.env.execute = execute
        with pytest.raises(Odd) as caught:
            attached(agent).run("it")
        assert caught.value is raised
        assert sojourn.flush(60)
        assert [event["status"] for event in server.told("tool_stop")] == ["error"]


@pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m"])
def test_the_users_own_fields_win_and_stay(tmp_path: Path, model: str) -> None:
    own = {
        "extra_body": {"mine": 1, "vllm_xargs": {"replay_ids": [1, 2, 3]}},
        "extra_headers": {"x-mine": "yes"},
        "temperature": 0.5,
    }
    with MiniServer([SUBMIT]) as server:
        only_attached(server.url)
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


def test_instrument_reaches_every_agent_once(tmp_path: Path) -> None:
    from minisweagent.agents.default import DefaultAgent
    from sojourn_integrations import mini_swe_agent

    class Custom(DefaultAgent):
        pass

    before = DefaultAgent.__init__, DefaultAgent.run
    with MiniServer([calls("true"), SUBMIT]) as server:
        only_attached(server.url)
        mini_swe_agent.instrument()
        mini_swe_agent.instrument()
        attached(make_agent(server, tmp_path, kind=Custom)).run("it")  # attaching on top changes nothing
        assert sojourn.flush(60)
    assert [event["agent_type"] for event in server.told("program_start")] == ["Custom"]
    assert len(server.told("tool_start")) == 2
    mini_swe_agent.uninstrument()
    assert (DefaultAgent.__init__, DefaultAgent.run) == before


def test_uninstrument_reaches_agents_that_exist(tmp_path: Path) -> None:
    from impatient_environment import ImpatientEnvironment
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel
    from sojourn_integrations import mini_swe_agent

    kinds = [DefaultAgent, ImpatientEnvironment, LitellmModel]
    mini_swe_agent.instrument()
    with MiniServer([SUBMIT]) as server:
        only_attached(server.url)
        agent = mini_swe_agent.attach(make_agent(server, tmp_path))
        copied = copy.deepcopy(agent)
        mini_swe_agent.uninstrument()
        agent.run("it")
        copied.env.execute({"command": "true"})  # known to nobody, but silent
        assert sojourn.flush(60)
        assert server.told("tool_start") == []
        # The patched openai client still speaks for the process as a whole.
        assert {event.get("agent_type") for event in server.told("program_start")} <= {None}
        assert [type(part) for part in (agent, agent.env, agent.model)] == kinds


def test_an_attached_agent_does_exactly_what_a_plain_one_does(tmp_path: Path) -> None:
    script = [calls("echo hi", "false"), {"content": "no call"}, calls("sleep 60"), SUBMIT]
    with MiniServer(script) as server:
        plain = make_agent(server, tmp_path)
        plain.run("it")
        unchanged = plain.serialize()
    with MiniServer(script) as server:
        only_attached(server.url)
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


def test_internal_errors_stay_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with MiniServer([calls("true"), SUBMIT]) as server:
        only_attached(server.url)
        agent = attached(make_agent(server, tmp_path))
        for name in ("program", "tool_call"):
            monkeypatch.setattr(sojourn, name, broken)
        monkeypatch.setattr("sojourn.outgoing_request.OutgoingRequest.begin", broken)
        assert agent.run("it")["exit_status"] == "Submitted"
        assert sojourn.stats()["internal_error"] == 5  # the program, two requests and two tool calls


def test_attaching_changes_neither_kind_nor_name_and_can_be_undone(tmp_path: Path) -> None:
    from sojourn_integrations import mini_swe_agent

    with MiniServer([]) as server:
        agent, plain = make_agent(server, tmp_path), make_agent(server, tmp_path)
        parts = lambda of: (of, of.env, of.model)  # noqa: E731
        mini_swe_agent.attach(mini_swe_agent.attach(agent))
        for part, other in zip(parts(agent), parts(plain), strict=True):
            assert isinstance(part, type(other))
            assert repr(type(part)) == repr(type(other))
            assert type(part).__doc__ == type(other).__doc__
        assert agent.serialize() == plain.serialize()
        assert agent.run == agent.run
        assert mini_swe_agent.detach(agent) is agent
        assert [type(part) for part in parts(agent)] == [type(part) for part in parts(plain)]


def test_agent_classes_for_the_command_line() -> None:
    from minisweagent.agents import get_agent_class
    from minisweagent.agents.interactive import InteractiveAgent

    made = get_agent_class("sojourn_integrations.mini_swe_agent.InteractiveAgent")
    assert issubclass(made, InteractiveAgent)
    assert get_agent_class("sojourn_integrations.mini_swe_agent.InteractiveAgent") is made
    from sojourn_integrations import mini_swe_agent

    with pytest.raises(AttributeError):
        mini_swe_agent.NoSuchAgent  # noqa: B018


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
