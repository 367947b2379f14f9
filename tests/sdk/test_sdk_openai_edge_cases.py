"""The openai client at its edges: bodies of their own, Azure, other people's patches, failed requests."""

from __future__ import annotations

import openai
import pytest
import sojourn
from openai import AzureOpenAI, OpenAI
from sojourn.testing import refusing_url

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
