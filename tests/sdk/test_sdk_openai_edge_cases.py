"""The openai client at its edges: bodies of their own, Azure, other people's patches, failed requests."""

from __future__ import annotations

import asyncio
import functools
import json
import threading

import openai
import pytest
import sojourn
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI, _base_client
from sojourn.testing import FakeServer, refusing_url
from sojourn.wire_events import ToolStop
from waiting import wait_until_async

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(online):
    with OpenAI(api_key="k", base_url=online.base_url, max_retries=0) as client:
        yield client


@pytest.fixture
def lingering(online):
    """A sender that leaves time for a request to take events along."""
    sojourn.runtime.session().event_sender._linger_s = 30
    return online


def delivered(server):
    """Numbers of all events that arrived by either door."""
    return [(e.program_id, e.seq) for e in server.events() + server.events(piggybacked=True)]


# ---- bodies that have no place for us


def test_a_body_of_raw_bytes_goes_out_as_it_is(lingering, client):
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    with sojourn.program() as p:
        client.post("/chat/completions", content=body, cast_to=object)
    request = lingering.requests[-1]
    assert request.body == json.loads(body)
    assert request.headers["x-session-id"] == p.id
    assert sojourn.flush(60)
    assert len(lingering.events()) == 2  # none was taken by a request without a place for it


@pytest.mark.parametrize("body", [[1, 2], b'{"model":"m"}', "text"])
def test_a_body_that_is_no_object_goes_out_as_it_is(lingering, client, body, monkeypatch):
    from sojourn.testing.fake_server import _Handler

    seen = []

    def llm(self, data):
        seen.append((data, self.headers["x-session-id"]))
        self._json(200, {})

    monkeypatch.setattr(_Handler, "_llm", llm)
    with sojourn.program() as p:
        client.post("/chat/completions", body=body, cast_to=object)
        sojourn.uninstrument()
        client.post("/chat/completions", body=body, cast_to=object)
    assert [data for data, _ in seen] == [seen[1][0]] * 2
    assert [told for _, told in seen] == [p.id, None]
    assert sojourn.flush(60)
    assert len(lingering.events()) == 2


# ---- Azure


def azure(kind, server, **settings):
    return kind(
        azure_endpoint=server.url, api_version="2024-06-01", api_key="k", **{"max_retries": 2, **settings}
    )


@pytest.mark.parametrize("settings", [{}, {"azure_deployment": "d"}, {"max_retries": 0}])
def test_azure_clients_are_tagged(online, settings):
    with sojourn.program() as p, azure(AzureOpenAI, online, **settings) as client:
        online.fail_next = min(1, client.max_retries)
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert online.requests
    for request in online.requests:
        assert "/deployments/" in request.path
        assert request.context.program_id == p.id
        assert request.headers["x-session-id"] == p.id
        assert request.headers["api-key"] == "k"
    assert sojourn.stats()["request_attempts"] == len(online.requests)
    assert sojourn.stats()["requests_ended"] == 1


def test_azure_clients_are_tagged_async_and_wrapped(online):
    async def ask():
        async with azure(AsyncAzureOpenAI, online) as client, sojourn.program() as p:
            await client.chat.completions.create(model="m", messages=MESSAGES)
            sojourn.uninstrument()
            await sojourn.wrap(client).chat.completions.create(model="m", messages=MESSAGES)
            return p

    p = asyncio.run(ask())
    with azure(AzureOpenAI, online) as client, sojourn.program(id=p.id):
        sojourn.wrap(client).chat.completions.create(model="m", messages=MESSAGES)
    assert [r.context.program_id for r in online.requests] == [p.id] * 3


# ---- patches of other people


def traced(function):
    """As a tracer does it: ``functools.wraps`` copies every attribute of what it wraps."""

    @functools.wraps(function)
    def tracer(*args, **kwargs):
        tracer.calls += 1
        return function(*args, **kwargs)

    tracer.calls = 0
    return tracer


def test_a_tracer_that_copies_our_attributes_is_not_removed(online):
    places = [(kind, name) for kind in _base_client.SyncAPIClient.__mro__[:2] for name in vars(kind)]
    places = [(k, n) for k, n in places if n in ("request", "_build_request", "_prepare_options")]
    tracers = {}
    for kind, name in places:
        tracers[kind, name] = traced(vars(kind)[name])
        setattr(kind, name, tracers[kind, name])  # ``pristine`` undoes it; ``monkeypatch`` would be too late
    sojourn.uninstrument()
    assert all(vars(kind)[name] is tracer for (kind, name), tracer in tracers.items())
    with sojourn.program(), OpenAI(api_key="k", base_url=online.base_url) as client:
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert tracers[_base_client.SyncAPIClient, "request"].calls == 1
    sojourn.instrument()
    with sojourn.program() as p, OpenAI(api_key="k", base_url=online.base_url) as client:
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert tracers[_base_client.SyncAPIClient, "request"].calls == 2
    assert online.requests[-1].context.program_id == p.id
    before = sojourn.stats()["request_attempts"]
    with sojourn.program(), OpenAI(api_key="k", base_url=online.base_url) as client:
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert sojourn.stats()["request_attempts"] == before + 1


@pytest.fixture(autouse=True)
def pristine():
    """Restore the client's classes after each test."""
    kinds = (_base_client.BaseClient, _base_client.SyncAPIClient, _base_client.AsyncAPIClient)
    before = [(k, n, f) for k in kinds for n, f in vars(k).items() if callable(f)]
    yield
    sojourn.shutdown()
    for kind, name, function in before:
        if vars(kind)[name] is not function:
            setattr(kind, name, function)


# ---- sync or async


def test_a_class_is_judged_by_what_it_is_not_by_its_name(online):
    sojourn.uninstrument()

    class AsyncToolsClient(OpenAI):
        pass

    class Plain(AsyncOpenAI):
        pass

    with sojourn.program() as p, AsyncToolsClient(api_key="k", base_url=online.base_url) as client:
        assert sojourn.wrap(client).chat.completions.create(model="m", messages=MESSAGES).choices

    async def ask():
        async with Plain(api_key="k", base_url=online.base_url) as client:
            with sojourn.program(id=p.id):
                await sojourn.wrap(client).chat.completions.create(model="m", messages=MESSAGES)

    asyncio.run(ask())
    assert [r.context.program_id for r in online.requests] == [p.id, p.id]


# ---- events on a request that failed


def test_events_of_a_failed_request_are_sent_again(server):
    """The LLM port is dead, the events' own connection is not."""
    sojourn.init(server.url)
    sojourn.runtime.session().event_sender._linger_s = 30
    # Newer releases of openai retry the errors of httpx2 alone.
    http_library = getattr(openai._base_client, "httpx2", None) or openai._base_client.httpx

    class Refusing(openai._base_client.SyncHttpxClientWrapper):
        def send(self, *args, **kwargs):
            raise http_library.ConnectError("refused")

    with (
        sojourn.program() as p,
        OpenAI(api_key="k", base_url=server.base_url, max_retries=1, http_client=Refusing()) as client,
    ):
        with sojourn.tool_call("bash", "c1"):
            pass
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="m", messages=MESSAGES)
        assert sojourn.stats()["events_piggybacked"] == 3
    assert sojourn.flush(60)
    assert delivered(server) == [(p.id, seq) for seq in range(4)]
    assert sojourn.stats()["events_returned"] == 3
    assert server.requests == []


def test_events_of_a_refused_request_are_sent_in_their_order(lingering, client):
    lingering.fail_next = 1
    with sojourn.program():
        with sojourn.tool_call("bash", "c1"):
            pass
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=MESSAGES)
    assert sojourn.flush(60)
    assert [e.seq for e in lingering.events()] == [0, 1, 2, 3]  # the server knows doubles by their numbers


def test_events_of_a_cancelled_request_are_sent(lingering):
    async def main():
        lingering.reply_delay_s = 5
        async with AsyncOpenAI(api_key="k", base_url=lingering.base_url, max_retries=0) as client:
            with sojourn.program():
                with sojourn.tool_call("bash", "c1"):
                    pass
                task = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
                await wait_until_async(lambda: lingering.requests)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    asyncio.run(main())
    assert sojourn.flush(60)
    assert any(isinstance(e, ToolStop) for e in lingering.events())


def test_what_a_request_delivered_does_not_come_back(lingering, client):
    with sojourn.program():
        with sojourn.tool_call("bash", "c1"):
            pass
        client.chat.completions.create(model="m", messages=MESSAGES)
    assert sojourn.flush(60)
    assert [e.seq for e in lingering.events()] == [3]
    assert sojourn.stats()["events_returned"] == 0


def test_a_replica_gets_the_program_id_but_no_events(server):
    with FakeServer() as replica:
        sojourn.init(server.url, hosts=[replica.host])
        sojourn.runtime.session().event_sender._linger_s = 30
        with sojourn.program() as p, OpenAI(api_key="k", base_url=replica.base_url) as client:
            client.chat.completions.create(model="m", messages=MESSAGES)
            with OpenAI(api_key="k", base_url=server.base_url) as ours:
                ours.chat.completions.create(model="m", messages=MESSAGES)
        assert replica.requests[-1].context.program_id == p.id
        assert replica.requests[-1].events == []
        assert len(server.requests[-1].events) == 1


def test_returned_events_respect_the_queue_and_never_cross_a_fork():
    from sojourn.event_sender import EventSender
    from sojourn.http_transport import HttpTransport
    from sojourn.stats import Counters
    from sojourn.wire_events import Heartbeat

    class Source:
        id = "p"
        implicit = False

    sender = EventSender(
        HttpTransport(refusing_url(), api_key=None, timeout_s=0.2), Counters(), queue_events=4, linger_s=30
    )
    try:
        for _ in range(4):
            sender.put(Source(), Heartbeat)
        taken = sender.take("p", max_events=64, max_bytes=10**6)
        for _ in range(3):
            sender.put(Source(), Heartbeat)
        sender.put_back(sender.id, taken)
        again = sender.take("p", max_events=64, max_bytes=10**6)
        assert [p.seq for p in again] == [3, 4, 5, 6]  # the newest of the returned ones still had room
        assert sender.counters["dropped_full"] == 3
        sender.put_back("another emitter", again)
        assert sender.take("p", max_events=64, max_bytes=10**6) == []
    finally:
        sender.close(0)


def test_an_answered_request_wakes_a_sender_that_had_given_up(online, client, monkeypatch):
    from sojourn import event_sender as event_sender_module

    monkeypatch.setattr(event_sender_module, "FIRST_BACKOFF_S", 30.0)
    monkeypatch.setattr(event_sender_module, "MAX_BEATING_BACKOFF_S", 30.0)
    online.mode = "500"
    with sojourn.program() as p:
        while not sojourn.stats()["http_500"]:
            threading.Event().wait(0.005)
        online.mode = "ok"
        sojourn.tool_call("elsewhere").start()
        with sojourn.program():
            client.chat.completions.create(model="m", messages=MESSAGES)
        online.wait_for_events(1)
    assert p
