"""The openai client against a real HTTP server: every way to ask, to stream, to fail and to give up."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import openai
import pytest
import sojourn
from openai import AsyncOpenAI, AzureOpenAI, DefaultAsyncHttpxClient, InternalServerError, OpenAI
from sdk_records import MESSAGES
from sojourn.testing import FakeServer
from waiting import wait_until_async

SAID = "hello from the fake"


@pytest.fixture
def client(online):
    with OpenAI(api_key="k", base_url=online.base_url, max_retries=2) as client:
        yield client


def async_client(server, **settings):
    return AsyncOpenAI(api_key="k", base_url=server.base_url, **{"max_retries": 0, **settings})


def requests():
    """Counts of logical requests: started, and how they ended."""
    stats = sojourn.stats()
    names = ("started", "ended", "failed", "cancelled", "closed_early", "abandoned")
    return {name: stats[f"requests_{name}"] for name in names if stats[f"requests_{name}"]}


def all_tagged(server, program):
    assert server.requests
    for request in server.requests:
        assert request.context.program_id == program.id
        assert request.headers["x-session-id"] == program.id
    assert not program.open_requests


def test_every_way_to_ask_says_whose_turn_it_is(online, client):
    chat = {"model": "m", "messages": MESSAGES}
    create = client.chat.completions.create
    with_raw, streaming = (
        getattr(client.chat.completions, f"with_{kind}_response").create for kind in ("raw", "streaming")
    )
    with sojourn.program("p") as p, sojourn.step("plan", expected_output_length=9):
        assert create(**chat).choices[0].message.content == SAID
        assert client.completions.create(model="m", prompt="hi").choices[0].text == SAID
        assert with_raw(**chat).parse().choices[0].message.content == SAID
        assert requests() == {"started": 3, "ended": 3}
        assert len(list(with_raw(**chat, stream=True).parse())) == 5
        assert requests() == {"started": 4, "ended": 4}
        with streaming(**chat) as response:
            assert requests() == {"started": 5, "ended": 4}
            assert SAID in response.read().decode()
        assert requests() == {"started": 5, "ended": 5}
        with streaming(**chat, stream=True) as response:
            assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]
        with streaming(**chat):
            pass  # never read
    all_tagged(online, p)
    assert {request.path for request in online.requests} == {"/v1/chat/completions", "/v1/completions"}
    assert all(r.context.sojourn.node == "plan" for r in online.requests)
    assert requests() == {"started": 7, "ended": 6, "closed_early": 1}
    assert sojourn.stats()["request_attempts"] == 7


def test_a_retried_request_is_one_request_and_says_the_same_twice(online, client):
    online.fail_next = 2
    sojourn.runtime.session().event_sender._linger_s = 0.5
    with sojourn.program(max_steps=9) as p:
        with sojourn.tool_call("bash", "c1"):
            pass
        assert client.chat.completions.create(model="m", messages=MESSAGES).choices
    all_tagged(online, p)
    assert [r.context.sojourn.expected_steps_left for r in online.requests] == [8, 8, 8]
    assert requests() == {"started": 1, "ended": 1}
    assert sojourn.stats()["request_attempts"] == 3
    assert len(online.requests) == 3
    # An attempt may not have arrived, so each carries the events; their numbers tell that they are the same.
    numbered = [[(e.program_id, e.seq) for e in r.events] for r in online.requests]
    assert numbered[0] == numbered[1] == numbered[2]
    assert len(numbered[0]) == sojourn.stats()["events_piggybacked"] == 3
    assert {r.context.sojourn.emitter for r in online.requests} == {sojourn.runtime.session().event_sender.id}
    assert sojourn.flush(60)
    assert [e.seq for e in online.events()] == [3]


def test_failures_are_the_users_to_see(online):
    with sojourn.program() as p, OpenAI(api_key="k", base_url=online.base_url, max_retries=0) as client:
        online.fail_next = 1
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=MESSAGES)
        online.reply_delay_s = 0.5
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="m", messages=MESSAGES, timeout=0.05)
        with pytest.raises(TypeError):
            client.chat.completions.create(model="m", messages=MESSAGES, extra_body=7)
    assert requests() == {"started": 3, "failed": 3}
    assert not p.open_requests


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_in_the_request_or_in_the_stream(online, stream):
    online.reply_delay_s, online.chunk_delay_s = (0, 1) if stream else (5, 0)

    async def main():
        async with async_client(online) as client, sojourn.program() as p:
            consuming = asyncio.Event()

            async def consume():
                answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
                async for _ in answer:
                    consuming.set()

            task = asyncio.create_task(consume())
            await (consuming.wait() if stream else wait_until_async(lambda: online.requests))
            assert len(p.open_requests) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gc.collect()
            await asyncio.sleep(0)
            return p

    assert not asyncio.run(main()).open_requests
    counts = requests()
    assert counts.pop("started") == sum(counts.values()) == 1
    assert counts.keys() <= ({"cancelled", "closed_early"} if stream else {"cancelled"})


def test_what_the_user_set_wins_and_is_merged(online, client):
    def ask(**extra):
        client.chat.completions.create(model="m", messages=MESSAGES, **extra)
        return online.requests[-1]

    with sojourn.program() as p:
        extra = {"top_k": 5, "vllm_xargs": {"mine": 1}}
        merged = ask(extra_body=extra)
        assert merged.body["top_k"] == 5
        assert merged.body["vllm_xargs"]["mine"] == 1
        assert merged.context.program_id == p.id
        assert extra == {"top_k": 5, "vllm_xargs": {"mine": 1}}  # theirs, untouched

        own = ask(extra_body={"vllm_xargs": {"agentic_context": '{"program_id":"own"}'}})
        assert own.context.program_id == "own"
        assert own.events == []
        assert own.body["vllm_xargs"] == {"agentic_context": '{"program_id":"own"}'}
        assert "x-session-id" not in own.headers, "another program's name beside theirs"

        assert ask(extra_body={"vllm_xargs": "strange"}).body["vllm_xargs"] == "strange"

        mine = ask(extra_headers={"x-session-id": "own", "X-Other": "1"})
        assert (mine.headers["x-session-id"], mine.headers["x-other"]) == ("own", "1")
        assert mine.context.program_id == p.id
    assert sojourn.flush(60)
    everything = [(e.program_id, e.seq) for e in online.events() + online.events(piggybacked=True)]
    assert len(everything) == len(set(everything)) == 2  # none was lost to a request that had no place for it


def test_requests_to_other_hosts_are_unchanged(client):
    """Also those of a client of our host, by an absolute URL."""
    with FakeServer() as stranger, sojourn.program():
        client.post(f"{stranger.url}/v1/chat/completions", body={"model": "m"}, cast_to=object)
    (request,) = stranger.requests
    assert "vllm_xargs" not in request.body
    assert "x-session-id" not in request.headers
    assert requests() == {}


def test_wrap_is_about_one_object(online):
    sojourn.uninstrument()
    with (
        OpenAI(api_key="k", base_url=online.base_url) as mine,
        OpenAI(api_key="k", base_url=online.base_url) as other,
    ):
        assert sojourn.wrap(mine) is mine
        assert sojourn.wrap(mine) is mine
        assert isinstance(mine, OpenAI)
        assert type(mine).__name__ == "OpenAI"
        assert type(other) is OpenAI
        with sojourn.program() as p:
            other.chat.completions.create(model="m", messages=MESSAGES)
            assert online.requests[-1].context is None
            mine.chat.completions.create(model="m", messages=MESSAGES)
            mine.with_options(timeout=9).chat.completions.create(model="m", messages=MESSAGES)
            del online.requests[0]
        all_tagged(online, p)
        assert len(online.requests) == 2


def test_our_own_faults_leave_the_request_bare(online, client, monkeypatch):
    from sojourn.outgoing_request import OutgoingRequest
    from sojourn.request import RequestContext

    monkeypatch.setattr(RequestContext, "context_parts", lambda *a, **k: 1 / 0)
    with sojourn.program():
        assert client.chat.completions.create(model="m", messages=MESSAGES).choices
    assert "vllm_xargs" not in online.requests[-1].body
    assert sojourn.stats()["inject_error"] == 1
    monkeypatch.setattr(OutgoingRequest, "begin", lambda *a, **k: 1 / 0)
    with sojourn.program():
        assert client.chat.completions.create(model="m", messages=MESSAGES).choices
    assert sojourn.stats()["internal_error"] == 1


def test_imported_after_init(python, server):
    code = f"""
    import sys, sojourn
    sojourn.init({server.url!r})
    assert sojourn.stats().instrumented == ()
    from openai import OpenAI
    assert sojourn.stats().instrumented == ("openai",)
    assert type(sys.modules["openai"].__spec__.loader).__name__ == "SourceFileLoader"
    with sojourn.program(id="late"):
        OpenAI(api_key="k", base_url={server.base_url!r}).chat.completions.create(model="m", messages=[])
    for change in (sojourn.uninstrument, sojourn.instrument, sojourn.uninstrument):
        change()  # of the frameworks still waited for
    ours = [f for f in sys.meta_path if "sojourn" in type(f).__module__]
    assert [f.find_spec("litellm") for f in ours] == [None]  # it stays, and finds nothing
    """
    python(code)
    assert server.requests[-1].context.program_id == "late"
    assert server.requests[-1].headers["x-session-id"] == "late"


# -- bodies of their own, Azure, and failed requests


@pytest.mark.parametrize("body", [[1, 2], b'{"model":"m"}', "text"])
def test_a_body_that_is_no_object_goes_out_as_it_is(online, client, body, monkeypatch):
    from sojourn.testing.fake_server import _Handler

    sojourn.runtime.session().event_sender._linger_s = 30  # time for a request to take events along
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
    assert len(online.events()) == 2


@pytest.mark.parametrize("settings", [{}, {"azure_deployment": "d"}, {"max_retries": 0}])
def test_azure_clients_are_tagged(online, settings):
    endpoint = {"azure_endpoint": online.url, "api_version": "2024-06-01", "api_key": "k"}
    with sojourn.program() as p, AzureOpenAI(**endpoint, **settings) as client:
        online.fail_next = min(1, client.max_retries)
        client.chat.completions.create(model="m", messages=MESSAGES)
    all_tagged(online, p)
    for request in online.requests:
        assert "/deployments/" in request.path
        assert request.headers["api-key"] == "k"
    assert sojourn.stats()["request_attempts"] == len(online.requests)
    assert sojourn.stats()["requests_ended"] == 1


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
    assert [(e.program_id, e.seq) for e in server.program_events()] == [(p.id, seq) for seq in range(4)]
    assert sojourn.stats()["events_returned"] == 3
    assert server.requests == []


# -- requests of tasks that began in another request


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
def test_a_task_that_outlives_the_request_it_began_in_sends_requests_of_its_own(online, fails):
    online.fail_next = int(fails)

    async def main(elsewhere):
        begun, over = [], asyncio.Event()

        async def worker():
            await over.wait()
            async with async_client(elsewhere) as other:
                await other.chat.completions.create(model="m", messages=MESSAGES)
            await client.chat.completions.create(model="m", messages=MESSAGES)  # that of the request before

        async def start(_):
            if not begun:
                begun.append(asyncio.create_task(worker()))

        http = DefaultAsyncHttpxClient(event_hooks={"request": [start]})
        async with async_client(online, http_client=http) as client:
            with contextlib.suppress(InternalServerError):
                async with sojourn.program():
                    await client.chat.completions.create(model="m", messages=MESSAGES)
            over.set()
            await begun[0]

    with FakeServer() as elsewhere:  # which ``init()`` does not name
        asyncio.run(main(elsewhere))
    (bare,) = elsewhere.requests
    assert bare.body.keys() == {"model", "messages"}
    assert "x-session-id" not in bare.headers
    assert len({request.context.request_id for request in online.requests}) == len(online.requests) == 2
    stats = sojourn.stats()
    assert (stats["requests_started"], stats["request_attempts"], stats["requests_failed"]) == (2, 2, fails)
