"""The gateway over HTTP: what arrives at engines, what comes back, and what happens when engines fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from fake_engine import engines
from gateway_harness import lines, until, world
from sojourn_server.gateway.http import proxy_request
from sojourn_server.gateway.http.generation_request import PromptSizeEstimator
from sojourn_server.gateway.http.routing_backend import RoutingBackend
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.routing_limits import RoutingLimits

IN_TURN = 'routing = "round-robin"'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
async def test_a_request_arrives_as_it_was_sent_but_for_encoding_and_headers(encoding: str) -> None:
    async with engines(1) as fakes, world(fakes, engine_key="engines") as it:
        body = '{"model": "tiny",  "messages": [], "ü": "\\u00fc"}'
        headers = {
            "Content-Type": "application/json",
            "Authorization": "Bearer mine",
            "X-Session-ID": "p",
            "X-Custom": "kept",
            "Connection": "X-Dropped",
            "X-Dropped": "1",
            "X-data-parallel-rank": "7",
            "TE": "trailers",
            "Expect": "100-continue",
            "Accept-Encoding": "gzip",
        }
        sent = body.encode(encoding)
        answer = await it.send("/v1/chat/completions?a=b%20c", data=sent, headers=headers)
        assert answer.status == 200
        got = dict(fakes[0].raw_headers[0])
        assert got[b"authorization"] == b"Bearer engines"
        assert got[b"x-session-id"] == b"p"
        assert got[b"x-custom"] == b"kept"
        assert got[b"accept-encoding"] == b"identity"
        for name in (b"x-dropped", b"te", b"x-data-parallel-rank", b"expect", b"transfer-encoding"):
            assert name not in got
        assert int(got[b"content-length"]) == len(body.encode())
        assert fakes[0].bodies == [body.encode()]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_is_passed_on_untouched(path: str) -> None:
    async with engines(1) as fakes, world(fakes) as it:
        body = {"model": "tiny", "stream": True, "messages": []}
        through = await it.send(path, json=body)
        assert through.content_type == "text/event-stream"
        told = await through.read()
        async with it.http.post(f"{fakes[0].url}{path}", json=body) as direct:
            assert told == await direct.read()


async def test_models_and_tokens_are_any_engines_answer() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        assert (await it.get("/v1/models"))["data"][0]["id"] == "tiny"
        await fakes[0].kill()
        answer = await it.send("/tokenize", json={"prompt": "x"})
        assert (await answer.json())["tokens"] == [1, 2, 3]
        body, session = {"messages": [1, 2]}, {"X-Claude-Code-Session-Id": "s"}
        answer = await it.send("/v1/messages/count_tokens?beta=true", json=body, headers=session)
        assert await answer.json() == {"input_tokens": 2}
        assert not it.core.programs, "it is no turn"
        assert "x-claude-code-session-id" not in fakes[1].headers[-1]
        assert (await it.send("/nowhere", method="GET")).status == 404


# -- faults -----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_breaks_off_ends_with_an_error_inside_it(path: str) -> None:
    async with engines(1) as fakes, world(fakes) as it:
        fakes[0].cut_after = 2
        answer = await it.send(path, json={"stream": True, "model": "tiny"})
        assert answer.status == 200
        found = await lines(answer)
        assert [json.loads(line)["number"] for line in found[:2]] == [0, 1]
        error = json.loads(found[2])  # whole JSON: half an event does not get through
        assert "half" not in json.dumps(found)
        assert "send the request again" in json.dumps(error)
        if path == "/v1/chat/completions":
            assert error["error"]["type"] == "replica_lost"
            assert found[3] == "[DONE]"
        else:
            assert error["type"] == "error"


async def test_an_openai_client_raises_for_a_stream_that_breaks_off() -> None:
    openai = pytest.importorskip("openai")
    async with engines(1) as fakes, world(fakes) as it:
        fakes[0].cut_after = 2
        async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(model="tiny", messages=[], stream=True)
            with pytest.raises(openai.APIError, match="send the request again"):
                async for _ in stream:
                    pass


async def test_when_no_engine_answers_the_request_says_so_and_when_to_come_back() -> None:
    limits = RoutingLimits(wait_s=0.3)
    async with engines(2) as fakes, world(fakes, limits=limits) as it:
        for fake in fakes:
            await fake.kill()
        answer = await it.chat("p")
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["X-Sojourn-Gateway"] == "1"
        assert (await answer.json())["error"]["code"] == "no_room"


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_conversation_is_a_program_where_its_engine_is_once_it_is_continued(restarts: bool) -> None:
    async with engines(3) as fakes, contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(world(fakes, preset=IN_TURN, poll_s=3600))

        async def respond(number: int, status: int = 200) -> str | None:
            body: dict[str, Any] = {"input": "x", "request_id": f"resp_{number}"}
            if number:
                body["previous_response_id"] = f"resp_{number - 1}"
            answer = await it.send("/v1/responses", json=body)
            assert answer.status == status, await answer.text()
            return answer.headers.get("X-Sojourn-Replica")

        home = await respond(0)
        assert not it.core.programs
        if restarts:
            it = await stack.enter_async_context(world(fakes, preset=IN_TURN, poll_s=3600))
        assert [await respond(number) for number in (1, 2, 3)] == [home] * 3
        assert it.core.home("default", "conversation-resp_0") == home
        [engine] = [fake for fake in fakes if fake.name == home]
        sent = [headers.get("x-session-id") for headers in engine.headers]
        assert sent == [None, *["conversation-resp_0"] * 3]
        await engine.kill()
        await respond(4, status=502)


async def test_a_stored_answer_is_read_and_cancelled_where_it_is() -> None:
    async with engines(3) as fakes, world(fakes) as it:
        body = {"input": "x", "request_id": "resp_1", "background": True}
        home = (await it.send("/v1/responses", json=body)).headers["X-Sojourn-Replica"]
        fakes[0].stored["resp_2"] = {"id": "resp_2", "at": fakes[0].name}  # of another gateway
        for name, at in (("resp_1", home), ("resp_2", fakes[0].name)):
            found = await it.get(f"/v1/responses/{name}")
            assert (found["id"], found["at"]) == (name, at)
            answer = await it.send(f"/v1/responses/{name}/cancel")
            assert (answer.status, answer.headers["X-Sojourn-Replica"]) == (200, at)
            assert name in next(fake for fake in fakes if fake.name == at).cancelled
        answer = await it.send("/v1/responses/resp_1?stream=true", method="GET")
        assert (await lines(answer))[-1] == "[DONE]"
        answer = await it.send("/v1/responses/resp_3", method="GET")
        assert (answer.status, "resp_3" in await answer.text()) == (404, True)


def test_events_reported_during_an_event_come_after_it() -> None:
    core = build_routing_core(
        parse_cluster_preset('routing = "round-robin"', source="x"), RoutingLimits(lease_s=1.0)
    )
    routing_backend = RoutingBackend(core, clock=lambda: 0.0)
    took: list[str] = []

    def act(action: Any) -> None:
        took.append(type(action).__name__)
        routing_backend.tell(routing_events.ReplicaGone("a", "1"))
        took.append(f"knows {len(core.fleet)} replicas")

    routing_backend.on_action = act
    for name in "ab":
        routing_backend.tell(routing_events.ReplicaRegistered(name, "1", 1000))
    routing_backend.open(routing_events.RequestReceived("r", "t", 10))
    assert not took
    routing_backend.tell(routing_events.RequestFailed("r", "a"))
    assert took == ["ProbeReplica", "knows 2 replicas"]
    assert len(core.fleet) == 1


# -- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "status", "told"),
    [
        (b"{", {}, 400, "not a request of /v1/chat/completions"),
        (b"[]", {}, 400, "Expected `object`"),
        (b'{"model": 3}', {}, 400, "$.model"),
        (b"\xff\xfe\x00\xd8", {}, 400, "can't decode"),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
        (b'{"x": "' + b"a" * 3000 + b'"}', {}, 413, "larger than 2000"),
    ],
)
async def test_bad_requests_are_refused_before_any_engine(
    body: bytes, headers: dict[str, str], status: int, told: str
) -> None:
    async with engines(1) as fakes, world(fakes, max_body_bytes=2000) as it:
        answer = await it.send("/v1/chat/completions", data=body, headers=headers, compress=None)
        assert answer.status == status
        assert told in (await answer.json())["error"]["message"]
        assert not fakes[0].requests
        assert not it.gateway.generation.bodies.held_bytes


async def test_an_offer_of_another_protocol_is_ignored() -> None:
    """Java's client offers HTTP/2 with each request. The body was lost, and taken for the next request."""
    body = b'{"model":"tiny","messages":[]}'
    lines = (
        b"POST /v1/chat/completions?a=1 HTTP/1.1",
        b"Connection: Upgrade, HTTP2-Settings",
        b"Content-Length: %d" % len(body),
        b"Host: a",
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        b"Upgrade: h2c",
    )
    request = b"\r\n".join((*lines, b"", body))
    async with engines(1) as [fake], world([fake]) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rpartition(":")[2]))
        writer.write(request * 2 + b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).count(b"HTTP/1.1 200") == 3
        assert fake.bodies == [body] * 2
        assert not {b"upgrade", b"http2-settings"} & dict(fake.raw_headers[-1]).keys()
        writer.close()


async def test_an_error_of_ours_is_answered_as_one_and_its_request_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(1) as fakes, world(fakes) as it:
        for place, name in (
            (proxy_request, "engine_request_headers"),
            (PromptSizeEstimator, "tokens"),
            (RoutingCore, "take"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(place, name, lambda *args, **more: 1 / 0)
                answer = await it.chat("p")
            assert (answer.status, (await answer.json())["error"]["code"]) == (500, "gateway_failed")
            assert answer.headers["X-Sojourn-Gateway"] == "1"
            await until(lambda: not it.core.requests)
        assert "ZeroDivisionError" in caplog.text
        caplog.clear()
        assert (await it.chat("p")).status == 200


async def test_only_an_operator_drains_and_switches_the_policy() -> None:
    async with engines(1) as fakes, world(fakes, admin_key="root") as it:
        for path in ("replicas/nowhere/stay", f"replicas/{fakes[0].name}/drain", "policy?on=false"):
            assert (await it.send(f"/sojourn/v1/{path}")).status == 403
        for word, health in (("drain", "draining"), ("stay", "up")):
            assert (await it.drain(fakes[0].name, word))["health"] == health
        answer = await it.send("/sojourn/v1/replicas/nowhere/drain", "root")
        assert answer.status == 404
        assert fakes[0].name in (await answer.json())["error"]["next"]


async def test_a_gateway_with_shares_uses_deadlines_that_its_engines_do_not() -> None:
    shares = 'routing = "session-affinity"\nsharing = "agent-fair-share"'
    async with engines(1) as fakes, world(fakes, preset=shares) as it:
        assert (await it.get("/sojourn/v1/capabilities"))["unused_hints"] == ["priority"]
