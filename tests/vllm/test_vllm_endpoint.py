"""The endpoint plugin inside vLLM's own plugin machinery, over an engine client that is a script."""

from __future__ import annotations

import asyncio
import gc
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.engine_rpc import EngineError, EngineUnavailableError
from sojourn_server.api.prometheus_bridge import PrometheusBridge
from sojourn_server.gateway.http.engine_client import ENGINE_DEAD_MESSAGE
from sojourn_server.launch.serve_command import SCHEDULER_CLS
from sojourn_server.metrics.metrics_recorder import MetricsRecorder
from sojourn_server.vllm import endpoint
from sojourn_server.vllm.endpoint import SojournEndpoint, VllmEngine
from sojourn_server.vllm.plugin import _sojourn_call
from sojourn_server.vllm.plugin_settings import SettingsError
from starlette.datastructures import Headers
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import (
    EndpointPlugin,
    attach_endpoint_plugins,
    init_endpoint_plugins_state,
)
from vllm.v1.engine.exceptions import EngineDeadError


class FakeCore:
    """The part of vLLM's ``AsyncMPClient`` we use: one answer from each engine."""

    def __init__(self, *engines: int) -> None:
        self.core_engines = [rank.to_bytes(2, "little") for rank in engines or (0,)]
        self.recorder = MetricsRecorder(strict=True)
        self.failure: Exception | None = None
        self.answer: Any = None
        self.calls: list[tuple[str, ...]] = []

    async def call_utility_all_async(self, method: str, *args: str) -> list[Any]:
        return [await self.answer_one(method, *args) for _ in self.core_engines]

    async def answer_one(self, method: str, *args: str) -> Any:
        assert method == "sojourn_call"
        self.calls.append(args)
        if self.failure is not None:
            raise self.failure
        if self.answer is not None:
            return self.answer
        if args[0] == "drain_metrics":
            return json.dumps(self.recorder.drain())
        return json.dumps({"op": args[0]})


class FakeClient:
    """An engine client: something weakly referable that has an ``engine_core``."""

    def __init__(self, core: Any) -> None:
        self.engine_core = core
        self.shutdowns: list[dict[str, Any]] = []
        self.fails: Exception | None = None
        self.errors: list[Exception] = []
        self.output_processor = SimpleNamespace(propagate_error=self.errors.append)

    def shutdown(self, **options: Any) -> None:
        self.shutdowns.append(options)
        if self.fails is not None:
            raise self.fails


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Builds the app as ``vllm serve`` does: routes first, then state."""
    monkeypatch.setenv("VLLM_PLUGINS", "sojourn")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    registry = CollectorRegistry()
    bridge = PrometheusBridge(registry)
    monkeypatch.setattr(endpoint, "bridge_for", lambda: bridge)
    started: list[SojournEndpoint] = []

    async def start(client: Any, api_key: list[str] | None = None, **args: Any) -> httpx.AsyncClient:
        app = FastAPI()
        attach_endpoint_plugins(app, ("generate",))
        await init_endpoint_plugins_state(client, app.state, Namespace(api_key=api_key, **args))
        started.extend(app.state.endpoint_plugins)
        start.app = app  # type: ignore[attr-defined]
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://server/sojourn/v1")

    start.registry = registry  # type: ignore[attr-defined]
    yield start
    for plugin in started:
        for task in (plugin._poller, plugin._announcer):
            if task is not None:
                task.cancel()


async def test_vllm_finds_and_loads_the_plugin_whose_poll_of_metrics_starts(server: Any) -> None:
    assert isinstance(SojournEndpoint(), EndpointPlugin)
    client = FakeClient(FakeCore())
    client.engine_core.recorder.count("sojourn_client_silent_total", 3)
    http = await server(client)
    assert (await http.get("/stats")).json() == {"op": "stats"}
    assert (await http.get("/capabilities")).json() == {"op": "capabilities", "engines": 1}
    for _ in range(20):
        await asyncio.sleep(0)
    exposition = generate_latest(server.registry).decode()
    assert 'sojourn_client_silent_total{engine="0"} 3.0' in exposition


@pytest.mark.parametrize(
    ("extra", "step"),
    [
        ({"store": "kv"}, "run an agent with: sojourn run --url http://h:1 -- python agent.py"),
        ({"role": "prefill"}, "sojourn gateway --prefill http://h:1 --decode http://HOST:PORT"),
        ({"role": "decode"}, "sojourn gateway --prefill http://HOST:PORT --decode http://h:1"),
    ],
)
def test_the_line_of_a_ready_engine_of_a_pair_names_the_gateway(extra: Any, step: str) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    text = endpoint.ready_text("http://h:1", SimpleNamespace(kv_transfer_config=transfer))
    assert text.startswith("sojourn: ready at http://h:1, live page http://h:1/sojourn; ")
    assert text.endswith(step)


@pytest.mark.parametrize(
    ("args", "url"),
    [
        ({"host": None, "port": 8000}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 8001, "uds": None}, "http://127.0.0.1:8001"),
        ({"host": "gpu1", "port": 443, "ssl_certfile": "cert.pem"}, "https://gpu1:443"),
        ({"host": "fd00::1", "port": 8000}, "http://[fd00::1]:8000"),
        ({"host": None, "port": 8000, "uds": "/run/vllm.sock"}, None),
        ({}, None),
    ],
)
def test_the_servers_url_is_one_that_this_machine_reaches(args: dict[str, Any], url: str | None) -> None:
    assert endpoint.server_url(Namespace(**args)) == url


async def test_the_last_line_of_the_start_says_what_to_do_next(
    server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "READY_POLL_S", 0.0)
    with caplog.at_level("INFO", logger="vllm.sojourn"):
        client = FakeClient(FakeCore())
        await server(client, host=None, port=8000)
        http_server = server.app.state.server = SimpleNamespace(started=False)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not caplog.records
        http_server.started = True
        for _ in range(10):
            await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.getMessage().endswith("sojourn run --url http://127.0.0.1:8000 -- python agent.py")


async def test_an_engine_with_another_scheduler_than_the_one_asked_for_does_not_start(server: Any) -> None:
    """Another plugin may set its own in vLLM's configuration. The server would answer without sojourn."""
    core = FakeCore()
    client = FakeClient(core)
    client.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls="other.Scheduler"))
    await server(client, scheduler_cls=SCHEDULER_CLS)
    core.answer = json.dumps({"error": "stock"})
    await server(client, scheduler_cls=None)
    with pytest.raises(SettingsError, match=r"runs the scheduler other\.Scheduler, .*VLLM_PLUGINS"):
        await server(client, scheduler_cls=SCHEDULER_CLS)


async def test_a_shutdown_ends_open_requests_with_an_error_and_bounds_the_servers_end(server: Any) -> None:
    """vLLM stops the task that delivers outputs and tells no request: clients sat silent after SIGTERM."""
    client = FakeClient(FakeCore())
    client.fails = OSError("no such process")
    await server(client)
    config = SimpleNamespace(timeout_graceful_shutdown=None)
    server.app.state.server = SimpleNamespace(config=config)
    # As vLLM calls it: in a thread.
    with pytest.raises(OSError, match="no such process"):
        await asyncio.get_running_loop().run_in_executor(None, partial(client.shutdown, timeout=0))
    client.fails = None
    await asyncio.sleep(0)
    assert client.shutdowns == [{"timeout": 0}]
    (error,) = client.errors
    assert isinstance(error, EngineDeadError)
    assert config.timeout_graceful_shutdown == endpoint.STREAMS_END_S
    config.timeout_graceful_shutdown = 3
    client.shutdown(timeout=0)
    await asyncio.sleep(0)
    assert config.timeout_graceful_shutdown == 3, "an operator's own bound stays"


async def test_keys_of_the_command_line_win_over_the_environment(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(FakeCore())

    async def statuses(api_key: list[str] | None) -> list[int]:
        http = await server(client, api_key)
        headers = [{}, {"authorization": "Bearer a"}, {"authorization": "Bearer env"}]
        return [(await http.get("/stats", headers=h)).status_code for h in headers]

    assert await statuses(None) == [200, 200, 200]
    assert await statuses(["a"]) == [401, 200, 401]
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert await statuses(None) == [401, 401, 200]
    assert await statuses(["a"]) == [401, 200, 401]


HEADERS = """
Bearer
Bearer a
bearer a
BEARER b
Bearer  a
Basic a
a
Bearer c
Bearer ä
Bearer a b
""".splitlines()


@pytest.mark.parametrize("header", [None, "Bearer ", "Bearer a ", *HEADERS])
@pytest.mark.parametrize("tokens", [["a"], ["a", "b"], ["ä"]])
def test_our_key_check_agrees_with_vllms(header: str | None, tokens: list[str]) -> None:
    ours = ApiKeys()
    ours.configure(tokens)
    theirs = AuthenticationMiddleware(FastAPI(), tokens)
    headers = Headers({} if header is None else {"authorization": header})
    assert ours.allow(headers.get("authorization")) == theirs.verify_token(headers)


async def test_before_the_engine_is_there_the_routes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    plugin = SojournEndpoint()
    plugin.attach_router(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        assert (await http.get("/sojourn/v1/stats")).status_code == 401
        await plugin.init_state(None, app.state, Namespace(api_key=["k"]))
        opened = await http.get("/sojourn/v1/stats", headers={"authorization": "Bearer k"})
        assert opened.status_code == 503


async def test_a_plain_vllm_scheduler_gets_501_and_is_asked_once(server: Any) -> None:
    client = FakeClient(FakeCore())
    client.engine_core.answer = _sojourn_call(Namespace(scheduler=None), "stats", "{}")
    http = await server(client)
    for _ in range(3):
        response = await http.post("/events", json={"v": 1, "emitter": "e", "events": []})
        assert response.status_code == 501
        assert "sojourn serve" in response.json()["error"]["next"]
    assert len(client.engine_core.calls) == 1


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (EngineDeadError(), EngineUnavailableError),
        (Exception("Server shutting down"), EngineUnavailableError),
        (Exception("Call to sojourn_call method failed: list index out of range"), EngineError),
    ],
)
async def test_engine_failures_map_to_different_errors(failure: Exception, expected: type[Exception]) -> None:
    engine, client = VllmEngine(), FakeClient(FakeCore())
    engine.connect(client)  # type: ignore[arg-type]
    client.engine_core.failure = failure
    with pytest.raises(EngineError) as raised:
        await engine.call("stats", "{}")
    assert type(raised.value) is expected
    client.engine_core.failure = None
    assert await engine.call("stats", "{}") == ['{"op": "stats"}']


async def test_engines_carry_their_ranks() -> None:
    engine, client = VllmEngine(), FakeClient(FakeCore(2, 3, 300))
    engine.connect(client)  # type: ignore[arg-type]
    assert engine.engine_ids() == ["2", "3", "300"]
    assert len(await engine.call("stats", "{}")) == 3


async def test_the_routes_do_not_keep_the_engine_alive() -> None:
    engine, client = VllmEngine(), FakeClient(FakeCore())
    engine.connect(client)  # type: ignore[arg-type]
    del client
    gc.collect()
    with pytest.raises(EngineUnavailableError):
        await engine.call("stats", "{}")


async def test_vllms_own_routes_see_the_program_of_a_coding_agent_behind_the_servers_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's application with all its middleware, over a model that answers with the session it is told."""
    # Releases differ in where they have these: elsewhere this test fails alone.
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    async def told(request: Any, raw_request: Any) -> AsyncIterator[str]:
        async def stream() -> AsyncIterator[str]:
            yield str(GenerateBaseServing._get_session_id_from_headers(raw_request))

        return stream()

    monkeypatch.setenv("VLLM_PLUGINS", "sojourn")
    monkeypatch.setattr(endpoint, "bridge_for", lambda: PrometheusBridge(CollectorRegistry()))
    settings = json.dumps({"sojourn": {"session_header": "X-Run"}})
    flags = ["--api-key", "k", "--root-path", "/behind", "--additional-config", settings]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    app = build_app(args, ("generate",))
    client = FakeClient(FakeCore())
    await init_endpoint_plugins_state(client, app.state, args)  # type: ignore[arg-type]
    app.state.anthropic_serving_messages = SimpleNamespace(create_messages=told)
    app.state.enable_server_load_tracking = False
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    claude = {"X-Claude-Code-Session-Id": "c-1", "x-claude-code-agent-id": "a7"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        for path, headers, session in (
            ("/v1/messages", claude, "c-1/a7"),
            ("/behind/v1/messages", claude, "c-1/a7"),
            ("/v1/messages", {**claude, "x-run": "r"}, "r"),
            ("/v1/messages", {}, "None"),
            ("/sojourn/session/run%2F1/v1/messages", {}, "run/1"),
            ("/behind/sojourn/session/run%2F1/v1/messages", {}, "run/1"),
        ):
            assert (await http.post(path, headers=headers, json=body)).status_code == 401
            answer = await http.post(path, headers={"authorization": "Bearer k", **headers}, json=body)
            assert (answer.status_code, answer.text) == (200, session)
    for plugin in app.state.endpoint_plugins:
        plugin._poller.cancel()


def test_the_gateway_knows_a_dead_engine_core_by_vllms_message() -> None:
    assert str(EngineDeadError()) == ENGINE_DEAD_MESSAGE
