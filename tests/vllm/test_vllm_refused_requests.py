"""A refused request at vLLM's own routes, with serving classes that fail as vLLM's do."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sojourn_server.api.prometheus_bridge import PrometheusBridge
from sojourn_server.api.refusal_middleware import refusal_message
from sojourn_server.core.engine_service import RefusedRequests
from sojourn_server.vllm import endpoint

pytestmark = pytest.mark.filterwarnings("default")

TOLD = refusal_message(600.0)
OPENAI_TOLD = {"error": {"message": TOLD, "type": "ServiceUnavailableError", "param": None, "code": 503}}
MESSAGES = [{"role": "user", "content": "x"}]
ROUTES = {
    "/v1/chat/completions": ({"messages": MESSAGES}, OPENAI_TOLD),
    "/v1/completions": ({"prompt": "x"}, OPENAI_TOLD),
    "/v1/responses": ({"input": "x"}, OPENAI_TOLD),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 1},
        {"type": "error", "error": {"type": "ServiceUnavailableError", "message": TOLD}},
    ),
}


class Core:
    """Answers as an engine does that has refused what ``refusals`` knows."""

    def __init__(self) -> None:
        self.refusals = RefusedRequests()
        self.asked: list[str] = []
        self.stock = False

    async def call_utility_all_async(self, method: str, op: str, payload: str) -> list[str]:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.stock:
            return ['{"error": "stock"}']
        if op != "refusal":  # the metrics, which are not looked at here
            raise EngineDeadError
        self.asked.append(json.loads(payload)["request_id"])
        waited_s = self.refusals.take(self.asked[-1])
        return [json.dumps(None if waited_s is None else {"waited_s": waited_s})]


class Client:
    """An engine client: something weakly referable that has an ``engine_core``."""

    def __init__(self, core: Core) -> None:
        self.engine_core = core

    def shutdown(self) -> None: ...


class Serving:
    """Every request fails in the engine; where it was refused, the engine has noted it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.refuses = True

    async def _fail(self, request: Any, raw_request: Any) -> Any:
        from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

        request_id = f"cmpl-{raw_request.headers['x-request-id']}"
        raw_request.state.request_metadata = RequestResponseMetadata(request_id=request_id)
        if self.refuses:
            self.core.refusals.record_refusal(f"{request_id}-0-0a1b2c3d", 600.0)
        fail = GenerateBaseServing._raise_if_error
        if not request.stream:
            fail(self, "error", request_id)  # type: ignore[arg-type]

        async def stream() -> AsyncIterator[str]:
            yield 'data: {"id":"c"}\n\n'
            try:
                fail(self, "error", request_id)  # type: ignore[arg-type]
            except Exception as error:
                yield f"data: {json.dumps(create_error_response(error).model_dump())}\n\n"
            yield "data: [DONE]\n\n"

        return stream()

    create_chat_completion = create_completion = create_responses = create_messages = _fail


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SimpleNamespace]:
    from prometheus_client import CollectorRegistry
    from vllm.entrypoints.launchers.app import build_app

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # since vLLM 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.plugins.endpoint_plugins.interface import init_endpoint_plugins_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("VLLM_PLUGINS", "sojourn")
    monkeypatch.setattr(endpoint, "bridge_for", lambda: PrometheusBridge(CollectorRegistry()))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--enable-request-id-headers", "--api-key", "k"]
    )
    app: FastAPI = build_app(args, ("generate",))
    core = Core()
    client = Client(core)
    await init_endpoint_plugins_state(client, app.state, Namespace(api_key=["k"]))  # type: ignore[arg-type]
    serving = Serving(core)
    for name in ("openai_serving_chat", "openai_serving_completion", "openai_serving_responses"):
        setattr(app.state, name, serving)
    app.state.anthropic_serving_messages = serving
    headers = {"authorization": "Bearer k", "x-request-id": "r1"}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as http:
        yield SimpleNamespace(http=http, serving=serving, core=core, client=client)
    [plugin] = app.state.endpoint_plugins
    plugin._poller.cancel()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_refused_request_gets_a_503_with_the_reason(rig: SimpleNamespace, path: str) -> None:
    body, told = ROUTES[path]
    answer = await rig.http.post(path, json={"model": "m", **body})
    assert answer.status_code == 503
    assert answer.json() == told
    assert int(answer.headers["retry-after"]) > 0
    # Of vLLM's own middleware, which lies around ours.
    assert answer.headers["x-request-id"] == "r1"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_has_the_reason_in_it(rig: SimpleNamespace, path: str) -> None:
    answer = await rig.http.post(path, json={"model": "m", "stream": True, **ROUTES[path][0]})
    assert answer.status_code == 200
    first, error, last, rest = answer.text.split("\n\n")
    assert (first, last, rest) == ('data: {"id":"c"}', "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: ")) == OPENAI_TOLD


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stock", [False, True])
async def test_what_failed_otherwise_is_answered_by_vllm(
    rig: SimpleNamespace, path: str, stock: bool
) -> None:
    rig.serving.refuses, rig.core.stock = False, stock
    for _ in range(2):
        answer = await rig.http.post(path, json={"model": "m", **ROUTES[path][0]})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "Internal server error"
        assert "retry-after" not in answer.headers
    assert rig.core.asked == ([] if stock else ["cmpl-r1"] * 2)


async def test_a_request_without_a_key_gets_no_explanation(rig: SimpleNamespace) -> None:
    answer = await rig.http.post(
        "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"authorization": "Bearer no"}
    )
    assert answer.status_code == 401
    assert rig.core.asked == []


async def test_a_refusal_is_explained_once(rig: SimpleNamespace) -> None:
    body = {"model": "m", "prompt": "x"}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 503
    rig.serving.refuses = False
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 500
