"""The OpenAPI document of an engine: it has every route, and every answer is as it says."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from api_contract import Contract, VirtualRpc
from api_test_engines import client_of
from fastapi.testclient import TestClient
from openapi_spec_validator import validate
from script_modules import load_script
from sojourn.aeg import END, START, Aeg
from sojourn.wire_events import AegReport, ProgramEnd, ProgramStart, ToolStart
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.openapi import PREFIX
from sojourn_server.api.routes import build_router
from sojourn_server.core.engine_answers import MissingTiers, TierCapabilities, TierCapacity
from sojourn_server.core.engine_service import stock_answer
from sojourn_server.metrics.metrics_recorder import MetricsRecorder
from virtual_engine import VirtualEngine, prompt


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = client_of(VirtualRpc(VirtualEngine())).get(f"{PREFIX}/openapi.json").json()
    return found


def busy_engine() -> VirtualEngine:
    """One program leased and running a tool, one waiting, one ended, one with a loss; a graph."""
    engine = VirtualEngine()
    engine.send(ProgramStart(program_id="a", seq=-1, name="fixer", parent_program_id="b", tenant="t"))
    aeg = Aeg({"plan": (), "act": ("bash",)}, [(START, "plan"), ("plan", "act"), ("act", END, 0.5)])
    engine.send(AegReport(program_id="a", seq=-1, graph_hash=aeg.hash, graph=aeg.wire()))
    engine.turn("a", prompt(40))
    engine.wait(20.0)
    engine.evict(prompt(40), by="c")
    engine.turn("a", prompt(60))
    engine.send(ToolStart(program_id="a", seq=-1, call_id="c1", tool="bash", tool_class="pytest"))
    engine.arrive("b", prompt(8, seed=1))
    engine.turn("c", prompt(8, seed=2), "done")
    engine.send(ProgramEnd(program_id="c", seq=-1))
    engine.wait(1.0)
    return engine


def ask(contract: Contract, client: TestClient, url: str, status: int = 200, **more: Any) -> Any:
    method = "POST" if "json" in more or url.endswith("/persist") or "/policy" in url else "GET"
    answer = client.request(method, PREFIX + url, **more)
    assert answer.status_code == status, answer.text
    return contract.check(method, PREFIX + url, status, answer.headers["content-type"], answer.content)


def test_the_document_is_valid_and_the_files_are_what_the_code_says(document: dict[str, Any]) -> None:
    validate(document)
    for path, text in load_script("docs/generate.py").api_documents().items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/generate.py"


def test_query_parameters_are_those_of_the_routes(document: dict[str, Any]) -> None:
    for route in build_router(VirtualRpc(VirtualEngine()), ApiKeys()).routes:
        if not route.include_in_schema:  # the web page
            continue
        [method] = route.methods
        path = route.path.replace(":path", "")
        named = document["paths"][path][method.lower()]["parameters"]
        told = {one["name"]: one["schema"] for one in named if one["in"] == "query"}
        required = {one["name"] for one in named if one["required"] and one["in"] == "query"}
        assert {one.alias for one in route.dependant.query_params if one.field_info.is_required()} == required
        assert {
            one.alias: one.default for one in route.dependant.query_params if one.alias not in required
        } == {name: schema.get("default") for name, schema in told.items() if name not in required}, path


def test_every_answer_is_as_the_document_says(document: dict[str, Any]) -> None:
    contract, engine = Contract(document), busy_engine()
    rpc = VirtualRpc(engine)
    client = client_of(rpc)
    batch = {"v": 1, "emitter": "e9", "events": [{"type": "heartbeat", "program_id": "a", "seq": 1}]}
    ask(contract, client, "/events", json=batch)
    ask(contract, client, "/events", 400, json=[])
    ask(contract, client, "/programs?limit=9&status=acting")
    ask(contract, client, "/programs?limit=0", 400)
    for name in "abc":
        ask(contract, client, f"/programs/{name}")
        ask(contract, client, f"/programs/{name}/explain")
    ask(contract, client, "/programs/nobody", 404)
    ask(contract, client, "/programs/a/persist")
    ask(contract, client, "/policy?on=false")
    ask(contract, client, "/policy?on=maybe", 400)
    for url in (
        "/programs",
        "/capabilities",
        "/load",
        "/stats",
        "/decisions",
        "/stream?once=1",
        "/openapi.json",
    ):
        ask(contract, client, url)
    lines = ask(contract, client, "/decisions?format=ndjson").splitlines()
    assert json.loads(lines[0])["seq"] == 0
    ask(contract, client_of(rpc, ["key"]), "/stats", 401)
    assert contract.seen == contract.operations

    service = engine.service
    service._below_device = lambda: TierCapabilities(
        connector="SojournConnector", on=True, off_because=None,
        host=TierCapacity(blocks=1, bytes=2), disk=TierCapacity(blocks=3, bytes=4, shared=True),
    )  # fmt: skip
    service._missing = MissingTiers(["prefetch"], "x")
    ask(contract, client_of(rpc), "/capabilities")
    both = client_of(VirtualRpc(engine, VirtualEngine()))
    for url in ("/programs", "/programs/a", "/programs/a/explain", "/stats", "/decisions?engine=1"):
        ask(contract, both, url)
    paths: Any = SimpleNamespace(capabilities=lambda: {"role": "prefill"}, stats=lambda: None)
    for name in ("capabilities", "stats"):
        rpc.instead[name] = json.loads(stock_answer(name, paths, {"vllm": "0"}, MetricsRecorder()))
    ask(contract, client_of(rpc), "/capabilities")
    ask(contract, client_of(rpc), "/stats")
