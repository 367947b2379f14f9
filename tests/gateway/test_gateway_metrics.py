"""The documents name metrics that there are, and all of them; counters begin at 0."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import sojourn_server.gateway
import sojourn_server.routing
from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.policies.cluster_preset import (
    POLICY_CLASSES,
    cluster_preset_names,
    load_cluster_preset,
    parse_cluster_preset,
)
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_from_preset import routing_reasons
from sojourn_server.routing.routing_records import PairEngineStatus, ReplicaStatus


@pytest.mark.parametrize("name", cluster_preset_names())
def test_a_first_increment_can_be_seen(name: str) -> None:
    """``rate()`` sees none of a series that appears with it."""
    preset = load_cluster_preset(name)
    shown = GatewayMetrics(routing_reasons(preset)).exposition((), {}).decode()
    reasons = routing_reasons(preset)
    assert reasons
    for reason in reasons:
        assert f'sojourn_gateway_requests_total{{reason="{reason}"}} 0.0' in shown
        assert f'sojourn_gateway_moves_total{{reason="{reason}"}} 0.0' in shown
    assert "stolen_idle" in reasons or not preset.stealing.is_used
    assert ("made_way" in reasons) is preset.tenant_preemption.is_used
    for code in routing_events.REJECTION_CODES:
        assert f'sojourn_gateway_refused_total{{code="{code}"}} 0.0' in shown
    for bare in ("recalls", "cut_streams"):
        assert f"sojourn_gateway_{bare}_total 0.0" in shown


@pytest.mark.parametrize("question", ["routing", "stealing"])
def test_policies_list_the_reasons_that_they_give(question: str) -> None:
    for name in POLICY_CLASSES[question]:
        policy = getattr(parse_cluster_preset(_preset(question, name), source="x"), question)
        body = ast.parse(inspect.getsource(type(policy)))
        given = {
            word
            for call in _calls(body, "RoutingDecision", "StealDecision", "Steal")
            for word in _words(call.args[-1 if question == "stealing" else 1])
            if not (isinstance(call.args[0], ast.Constant) and call.args[0].value is None)
        }
        assert given == {*getattr(policy, "reasons", ())}, name


def test_all_codes_of_refusals_are_listed() -> None:
    folders = [Path(package.__file__).parent for package in (sojourn_server.gateway, sojourn_server.routing)]
    given = {
        word
        for folder in folders
        for path in folder.rglob("*.py")
        for call in _calls(ast.parse(path.read_text("utf-8")), "RejectRequest", "reject")
        if len(call.args) > 2
        for word in _words(call.args[2])
    }
    assert given == {*routing_events.REJECTION_CODES}


def _pair_engine(name: str, role: str, load: float) -> PairEngineStatus:
    return PairEngineStatus(
        name, "i", "up", load, 1, 0, 0, 100, 0, 50, role=role, node="n", epoch="", links={}
    )


def _replica(name: str, health: str, load: float) -> ReplicaStatus:
    return ReplicaStatus(name, "i", health, load, 0, 0, 0, 100, 0, 50)


def test_the_spread_of_loads_is_that_of_replicas_that_share_the_work() -> None:
    def spread(*states: ReplicaStatus) -> float | None:
        metrics = GatewayMetrics()
        metrics.exposition(states, {})
        return metrics.registry.get_sample_value("sojourn_gateway_load_spread")

    assert spread() == 0.0
    assert spread(_replica("a", "up", 0.8), _replica("b", "draining", 0.0)) == 0.0
    assert spread(_replica("a", "up", 0.8), _replica("b", "up", 0.25)) == pytest.approx(0.55)
    prefill, decode = _pair_engine("p", "prefill", 0.1), _pair_engine("d", "decode", 0.8)
    assert spread(prefill, decode) == 0.0
    assert spread(prefill, decode, _pair_engine("e", "decode", 0.3)) == pytest.approx(0.5)


def _preset(question: str, name: str) -> str:
    return f'routing = "{name}"' if question == "routing" else f'routing = "random"\n{question} = "{name}"'


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)
        if isinstance(node, ast.Call) and name in names:
            yield node


def _words(node: ast.AST) -> Iterator[str]:
    """Texts that an expression may come to; of ``a if b == "c" else d`` not what is asked."""
    if isinstance(node, ast.IfExp):
        yield from _words(node.body)
        yield from _words(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
