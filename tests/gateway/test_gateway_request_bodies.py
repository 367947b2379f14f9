"""What a gateway holds of requests is counted, and what it makes of them; what it refuses is counted too."""

from __future__ import annotations

import asyncio
import io
import json
import platform
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import engines
from fake_pair_engine import pairs
from gateway_harness import World, until, world
from sojourn_server.gateway.http import engine_routes, piggybacked_events, request_bodies
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.generation_request import parse_generation_request
from sojourn_server.gateway.http.piggybacked_events import with_events
from sojourn_server.gateway.http.request_bodies import (
    BODY_THREADS,
    LARGE_BODY_BYTES,
    process_body,
    trim_memory,
)
from waiting import wait_until_async

TENANTS = {"ka": "alice", "kb": "bob"}
EVENT = {"type": "tool_start", "program_id": "other", "seq": 1, "call_id": "c", "tool": "bash"}


def hint() -> dict[str, Any]:
    own = {"v": 1, "emitter": "e", "events": [EVENT]}
    return {"vllm_xargs": {"agentic_context": json.dumps({"program_id": "p", "sojourn": own})}}


class Watched(bytes):
    """Says when it is no longer there."""

    gone: Callable[[], None]

    def __del__(self) -> None:
        self.gone()


async def refused(it: World, code: str) -> float:
    async with it.http.get(f"{it.url}/metrics") as answer:
        page = await answer.text()
    series = f'sojourn_gateway_refused_total{{code="{code}"}} '
    return next(float(line.removeprefix(series)) for line in page.splitlines() if line.startswith(series))


async def test_only_what_goes_to_an_engine_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bool] = []
    read = request_bodies.RequestBody.read

    async def watched(self: request_bodies.RequestBody, *args: Any) -> bytes | None:
        body = await read(self, *args)
        assert body is not None
        found = Watched(body)
        found.gone = lambda: gone.append(True)
        return found

    monkeypatch.setattr(request_bodies.RequestBody, "read", watched)
    async with engines(1) as (fake,), world([fake], tenants=TENANTS) as it:
        fake.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat(key="ka", text="x" * 3000, **hint()))
        await until(lambda: fake.bodies)
        assert gone == [True]
        assert it.gateway.generation.bodies.held_bytes == len(fake.bodies[0])
        fake.hold.set()
        assert (await asking).status == 200
        await until(lambda: it.gateway.generation.bodies.held_bytes == 0)


async def test_a_large_body_is_changed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def change(body: bytes, events: list[Any]) -> bytes:
        threads.append(threading.current_thread())
        return with_events(body, events)

    monkeypatch.setattr(piggybacked_events, "with_events", change)
    async with engines(1) as (fake,), world([fake]) as it:
        for text in ("x", "x" * LARGE_BODY_BYTES):
            body = json.dumps({"messages": [{"role": "user", "content": text}], **hint()}).encode()
            async with it.http.post(f"{it.url}/v1/chat/completions", data=io.BytesIO(body)) as answer:
                assert answer.status == 200
            assert fake.requests[-1]["messages"][0]["content"] == text
            context = json.loads(fake.requests[-1]["vllm_xargs"]["agentic_context"])
            assert context["sojourn"]["events"] == []
        await until(lambda: it.gateway.generation.bodies.held_bytes == 0)
    small, large = threads
    assert small is threading.current_thread()
    assert large is not small


async def test_what_is_made_for_a_leg_is_counted_as_long_as_it_is_held() -> None:
    async with pairs(1, 1) as (it, [prefill], [decode]):
        decode.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat(text="x" * 3000))
        await until(lambda: decode.bodies)
        counted = it.gateway.generation.bodies
        assert counted.held_bytes > 2 * 3000
        decode.hold.set()
        assert (await asking).status == 200
        await until(lambda: counted.held_bytes == 0)
        assert prefill.bodies


async def test_bodies_for_any_engine_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_routes, "ANY_ENGINE_TIMEOUT_S", 2.0)
    options: dict[str, Any] = {"tenants": TENANTS, "max_body_bytes": 3000, "max_held_bytes": 8000}
    async with engines(1) as (fake,), world([fake], **options) as it:
        fake.tokenizes_never = True

        async def tokenize(text: str, key: str = "ka") -> tuple[int, Any]:
            shown = {"Authorization": f"Bearer {key}"}
            async with it.http.post(f"{it.url}/tokenize", json={"prompt": text}, headers=shown) as answer:
                return answer.status, (await answer.json())["error"]["message"]

        counted = it.gateway.generation.bodies
        first = asyncio.ensure_future(tokenize("x" * 2500))
        await until(lambda: counted.held_bytes > 2500)
        status, message = await tokenize("x" * 2500)
        assert status == 503
        assert "too many request bodies" in message
        assert (await tokenize("x" * 4000, "kb"))[0] == 413
        assert await refused(it, "gateway_full") == await refused(it, "body_too_large") == 1
        first.cancel()
        await until(lambda: counted.held_bytes == 0)


@pytest.mark.parametrize(
    ("prompt", "tokens", "is_exact"),
    [
        ([1, 2, 3], 3, True),
        ([[1, 2], [3]], 3, False),
        ("[[1]]", None, False),
        ([], 0, True),
    ],
)
def test_the_sum_of_several_prompts_is_no_prompts_size(prompt: Any, tokens: int, is_exact: bool) -> None:
    for indent in (None, 2):
        body = json.dumps({"prompt": prompt}, indent=indent).encode()
        question = parse_generation_request(ClientApi.COMPLETIONS, body, None)
        assert (question.prompt_tokens, question.is_exact) == (tokens, is_exact)


async def test_several_prompts_that_each_have_room_are_passed_on() -> None:
    async with engines(1) as (fake,), world([fake]) as it:
        for prompt, status in (([[1] * 3000, [2] * 3000], 200), ([1] * 6000, 400)):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
            async with it.http.post(f"{it.url}{ClientApi.COMPLETIONS.value}", json=body) as answer:
                assert answer.status == status
        assert len(fake.requests) == 1


async def test_every_refusal_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs(1, 1) as (it, _, _):
        body = {"model": "tiny", "input": "x", "previous_response_id": "resp_1"}
        async with it.http.post(f"{it.url}{ClientApi.RESPONSES.value}", json=body) as answer:
            assert answer.status == 400
        assert await refused(it, "bad_request") == 1
        assert await refused(it, "replica_lost") == 0
        monkeypatch.setattr(it.gateway.generation, "_read", None)
        assert (await it.chat()).status == 500
        assert await refused(it, "gateway_failed") == 1


async def test_many_large_bodies_at_once_are_processed_in_few_threads() -> None:
    """The allocator keeps memory for each thread that ever was."""
    large, small = bytes(LARGE_BODY_BYTES), b"{}"
    barrier = threading.Barrier(BODY_THREADS, timeout=30)

    def in_thread() -> str:
        barrier.wait()  # as many as there may be work at the same time
        return threading.current_thread().name

    ran = await asyncio.gather(*(process_body(large, in_thread) for _ in range(20)))
    assert len(set(ran)) == BODY_THREADS
    assert await process_body(small, threading.current_thread) is threading.main_thread()


async def test_free_memory_goes_back_once_after_many_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[str] = []
    monkeypatch.setattr(request_bodies, "TRIM_AFTER_S", 0.05)
    monkeypatch.setattr(request_bodies, "_trims_in", None)
    monkeypatch.setattr(request_bodies, "trim_memory", lambda: trims.append(threading.current_thread().name))
    await process_body(b"x", lambda: None)
    assert request_bodies._trims_in is None, "a small body leaves nothing"
    large = b"x" * LARGE_BODY_BYTES
    await asyncio.gather(*(process_body(large, lambda: None) for _ in range(20)))
    await wait_until_async(lambda: trims)
    await process_body(large, lambda: None)
    await wait_until_async(lambda: len(trims) == 2)
    assert all(name.startswith("sojourn-body") for name in trims), "the event loop does not wait for it"
    assert request_bodies._trims_in is None


def test_free_memory_can_be_returned_with_glibc() -> None:
    assert trim_memory() is (platform.libc_ver()[0] == "glibc")
