"""LLM requests that begin during another LLM request: in its hooks, and in tasks that its hooks start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import sojourn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, InternalServerError, OpenAI
from sojourn.testing import FakeServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def elsewhere() -> Iterator[FakeServer]:
    """A server that ``init()`` does not name."""
    with FakeServer() as fake:
        yield fake


def ask(client: OpenAI) -> None:
    client.chat.completions.create(model="m", messages=MESSAGES)


async def ask_async(client: AsyncOpenAI) -> None:
    await client.chat.completions.create(model="m", messages=MESSAGES)


def hooked(server: FakeServer, hook: Any) -> OpenAI:
    """A client of ``server`` that calls ``hook`` once, before its first request leaves."""
    left = [hook]

    def before(_: Any) -> None:
        if left:
            left.pop()()

    http = DefaultHttpxClient(event_hooks={"request": [before]})
    return OpenAI(base_url=server.base_url, api_key="k", max_retries=0, http_client=http)


def hooked_async(server: FakeServer, hook: Any) -> AsyncOpenAI:
    left = [hook]

    async def before(_: Any) -> None:
        if left:
            await left.pop()()

    http = DefaultAsyncHttpxClient(event_hooks={"request": [before]})
    return AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0, http_client=http)


def assert_bare(server: FakeServer) -> None:
    (request,) = server.requests
    assert request.body.keys() == {"model", "messages"}
    assert "x-session-id" not in request.headers


def request_ids(server: FakeServer) -> list[str]:
    return [request.context.request_id for request in server.requests if request.context is not None]


@pytest.mark.parametrize("wrapped", [False, True], ids=["patched", "wrapped"])
def test_a_hook_asks_another_host_without_our_fields(
    online: FakeServer, elsewhere: FakeServer, wrapped: bool
) -> None:
    if wrapped:
        sojourn.uninstrument()
    with (
        OpenAI(base_url=elsewhere.base_url, api_key="k") as other,
        hooked(online, lambda: ask(other)) as client,
        sojourn.program() as p,
    ):
        if wrapped:
            sojourn.wrap(client)
            sojourn.wrap(other)
        with sojourn.tool_call("bash"):
            pass
        ask(client)
    assert_bare(elsewhere)
    assert [request.context.program_id for request in online.requests if request.context] == [p.id]
    assert sojourn.flush(60)
    recorded = [type(event).__name__ for event in online.program_events()]
    assert sorted(recorded) == ["ProgramEnd", "ProgramStart", "ToolStart", "ToolStop"]
    assert sojourn.stats()["requests_started"] == sojourn.stats()["request_attempts"] == 1


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
def test_a_task_that_outlives_the_request_it_began_in_sends_requests_of_its_own(
    online: FakeServer, elsewhere: FakeServer, fails: bool
) -> None:
    online.fail_next = int(fails)

    async def main() -> None:
        begun: list[asyncio.Task[None]] = []
        over = asyncio.Event()

        async def worker() -> None:
            await over.wait()
            async with AsyncOpenAI(base_url=elsewhere.base_url, api_key="k") as other:
                await ask_async(other)
            await ask_async(client)  # the client of the request that is over

        async def start() -> None:
            begun.append(asyncio.create_task(worker()))

        async with hooked_async(online, start) as client:
            async with sojourn.program():
                try:
                    await ask_async(client)
                except InternalServerError:
                    assert fails
            over.set()
            await begun[0]

    asyncio.run(main())
    assert_bare(elsewhere)
    assert len(set(request_ids(online))) == len(online.requests) == 2
    stats = sojourn.stats()
    assert stats["requests_started"] == stats["request_attempts"] == 2
    assert stats["requests_failed"] == int(fails)
