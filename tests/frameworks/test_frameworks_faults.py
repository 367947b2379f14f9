"""Faults inside an adapter: the framework returns and raises what it does without us, and each is counted."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import sojourn
from scenario_modules import Model, outcome, runnable_scenarios
from scenario_types import Scenario
from sojourn.testing import FakeServer

pytestmark = [
    pytest.mark.timeout(120),  # AutoGen waits for ever where an exception of ours gets out
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),  # litellm's own, streaming
]

BROKEN = {
    "autogen": (
        "autogen.run_scopes.begin_team", "autogen.run_scopes.begin_turn", "autogen.run_scopes.begin_call",
        "autogen.run_scopes.end_call", "autogen.run_scopes.call_under_way", "autogen.run_scopes.graph_of",
        "autogen._patch_user_classes", "autogen.tool_calls.ToolCall.__enter__",
    ),
    "langchain": (
        "langchain.run_tree.RunTree.chain_started", "langchain.run_tree.RunTree.chain_ended",
        "langchain.run_tree.RunTree.tool_started", "langchain.run_tree.RunTree.tool_ended",
        "langchain.run_tree.RunTree.resolve",
    ),
    "langgraph": (
        "langgraph.graph_runs.GraphStart", "langgraph.graph_runs.graph_of",
        "langchain.callback_handler.current_run_id",
    ),
    "litellm": ("litellm._body",),
    "openai_agents": (
        "openai_agents.run_programs.graph_of", "openai_agents.run_programs._keep_interrupted",
        "openai_agents.run_hooks.Run.enter_node", "openai_agents.run_hooks.ToolCall",
        "openai_agents.run_hooks.Call.stop", "openai_agents.run_hooks.Run.enter",
        "openai_agents._stream_status", "openai_agents._kinds",
    ),
}  # fmt: skip
"""What raises, by framework."""
ROWS = ("sync", "async", "stream", "error", "sub_agent")
"""Runs, a stream, an exception and a run inside a run. The other rows take the same ways."""
SCENARIOS = list(
    {(one.framework, one.row): one for one in reversed(runnable_scenarios()) if one.row in ROWS}.values()
)
"""Each framework's first scenario of each of these rows."""
COUNTED = ("internal_error", "resolver_error", "inject_error")


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """LangChain's runs that a fault left open are closed."""
    yield
    handler = sys.modules.get("sojourn_integrations.langchain.callback_handler")
    for run in list(handler.tree._runs.values()) if handler is not None else ():
        handler.tree._close(run)


@cache
def without_us(scenario: Scenario) -> tuple[str, Any]:
    with FakeServer(Model(scenario)) as server:
        return outcome(scenario, server.base_url, "tiny")


@pytest.mark.parametrize(
    ("framework", "broken"),
    [
        (name, broken)
        for name in dict.fromkeys(one.framework for one in SCENARIOS)
        for broken in BROKEN.get(name, ())
    ],
)
def test_a_fault_of_ours_never_reaches_the_user(
    monkeypatch: pytest.MonkeyPatch, framework: str, broken: str
) -> None:
    def fault(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ours")

    counted = 0
    for scenario in (one for one in SCENARIOS if one.framework == framework):
        plain = without_us(scenario)
        with FakeServer(Model(scenario)) as server, monkeypatch.context() as patched:
            sojourn.init(server.url, probe_timeout_s=5)
            patched.setattr(f"sojourn_integrations.{broken}", fault)
            assert outcome(scenario, server.base_url, "tiny") == plain, scenario.id
            gc.collect()
            assert sojourn.current_program() is None
            counted += sum(sojourn.stats()[name] for name in COUNTED)
        sojourn.shutdown()
    assert counted > 0
