"""The adapter of mini-swe-agent: what it patches, attaches to and puts back. ``scenarios_mini`` has runs."""

from __future__ import annotations

import copy
import os
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
from impatient_environment import ImpatientEnvironment
from minisweagent.agents.default import DefaultAgent
from old_release import run_with_release
from sojourn.testing import FakeServer, ToolUse
from sojourn.wire_events import ProgramStart, ToolStart
from sojourn_integrations import mini_swe_agent

TRUE, SUBMIT = (
    ToolUse("bash", {"command": command})
    for command in ("true", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done")
)


@pytest.fixture(autouse=True)
def offline_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "mswea"))
    yield
    mini_swe_agent.uninstrument()
    sojourn.shutdown()


def make_agent(server: FakeServer, cwd: Path, *, kind: type = DefaultAgent) -> Any:
    from minisweagent.models.litellm_model import LitellmModel  # it takes four seconds

    settings = {"api_base": server.base_url, "api_key": "x", "num_retries": 0, "max_retries": 0}
    return kind(
        LitellmModel(model_name="openai/m", model_kwargs=settings),
        ImpatientEnvironment(cwd=str(cwd)),
        system_template="You are an agent.",
        instance_template="Do {{task}}.",
    )


def only_attached(url: str) -> None:
    """A session that attaches to no agent by itself: what a test attaches to is attached to once."""
    sojourn.init(url)
    sojourn.uninstrument("mini_swe_agent")


def told(server: FakeServer, kind: type) -> list[Any]:
    return [event for event in server.program_events() if isinstance(event, kind)]


def test_instrument_reaches_every_agent_once(tmp_path: Path) -> None:
    class Custom(DefaultAgent):
        def step(self) -> Any:
            sojourn.init(server.url, dialect="sojourn")  # again, in the middle of the run
            return super().step()

    with FakeServer([TRUE, SUBMIT]) as server:
        sojourn.init(server.url)
        mini_swe_agent.instrument()
        mini_swe_agent.attach(make_agent(server, tmp_path, kind=Custom)).run("it")  # attached twice
        assert sojourn.flush(60)
    assert [event.agent_type for event in told(server, ProgramStart)] == ["Custom"] * 2  # to each session
    assert len(told(server, ToolStart)) == 2


def test_uninstrument_reaches_agents_that_exist(tmp_path: Path) -> None:
    mini_swe_agent.instrument()
    with FakeServer([SUBMIT]) as server:
        only_attached(server.url)
        agent = make_agent(server, tmp_path)
        kinds = [DefaultAgent, ImpatientEnvironment, type(agent.model)]
        copied = copy.deepcopy(mini_swe_agent.attach(agent))
        mini_swe_agent.uninstrument()
        agent.run("it")
        copied.env.execute({"command": "true"})  # known to nobody, but silent
        assert sojourn.flush(60)
        assert told(server, ToolStart) == []
        # The patched openai client still speaks for the process as a whole.
        assert {event.agent_type for event in told(server, ProgramStart)} <= {None}
        assert [type(part) for part in (agent, agent.env, agent.model)] == kinds


def test_internal_errors_stay_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with FakeServer([TRUE, SUBMIT]) as server:
        only_attached(server.url)
        agent = mini_swe_agent.attach(make_agent(server, tmp_path))
        for name in ("program", "tool_call"):
            monkeypatch.setattr(sojourn, name, broken)
        monkeypatch.setattr("sojourn.outgoing_request.OutgoingRequest.begin", broken)
        assert agent.run("it")["exit_status"] == "Submitted"
        assert sojourn.stats()["internal_error"] == 5  # the program, two requests and two tool calls


def test_attaching_changes_neither_kind_nor_name_and_can_be_undone(tmp_path: Path) -> None:
    with FakeServer() as server:
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
    with pytest.raises(AttributeError):
        mini_swe_agent.NoSuchAgent  # noqa: B018


@pytest.mark.nightly
def test_the_oldest_supported_mini(tmp_path: Path) -> None:
    """All of the above again, in a process of its own, with mini 2.0.0 before the installed one."""
    run_with_release("mini-swe-agent==2.0.0", "minisweagent", tmp_path, "-m", "not nightly", __file__)
