"""Pollers, however many, leave the engine its time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from api_test_engines import BATCH, HungEngine, ScriptedEngine, check_error, client_of, engine_answers
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sojourn_server.api.api_errors import ApiError
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.engine_rpc import (
    CACHE_TTL_S,
    MAX_CACHED_ANSWERS,
    EngineError,
    EngineQueryLimiter,
    EngineUnavailableError,
)
from sojourn_server.api.routes import build_router


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def http_of(engine: Any) -> httpx.AsyncClient:
    keys = ApiKeys()
    keys.configure([])
    app = FastAPI()
    app.include_router(build_router(engine, keys))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server/sojourn/v1")


async def until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


async def release(engine: HungEngine, requests: list[asyncio.Task[httpx.Response]]) -> list[int]:
    engine.released.set()
    return [response.status_code for response in await asyncio.gather(*requests)]


# --- at once ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["decisions?since={}", "programs/p{}", "programs?limit=1{}"])
async def test_of_each_kind_of_question_two_wait_and_the_third_is_told_to_come_back(path: str) -> None:
    engine = HungEngine(program={"program_id": "p"})
    async with http_of(engine) as http:
        waiting = [asyncio.ensure_future(http.get(path.format(n))) for n in range(2)]
        await until(lambda: len(engine.calls) == 2)
        refused = await asyncio.wait_for(http.get(path.format(2)), 60)
        check_error(refused, 429)
        assert int(refused.headers["retry-after"]) > 0
        assert len(engine.calls) == 2
        # Other kinds, and events above all, have room of their own.
        waiting += [
            asyncio.ensure_future(http.get("stats")),
            asyncio.ensure_future(http.post("events", json=BATCH)),
        ]
        await until(lambda: len(engine.calls) == 4)
        assert await release(engine, waiting) == [200] * 4
        assert (await http.get(path.format(2))).status_code == 200


async def test_a_gateway_may_move_sixteen_programs_at_once() -> None:
    engine = HungEngine(persist={"program_id": "p"})
    async with http_of(engine) as http:
        waiting = [asyncio.ensure_future(http.post(f"programs/p{n}/persist")) for n in range(16)]
        await until(lambda: len(engine.calls) == 16)
        check_error(await asyncio.wait_for(http.post("programs/p16/persist"), 60), 429)
        assert await release(engine, waiting) == [200] * 16


async def test_a_call_given_up_keeps_its_place_until_it_is_answered() -> None:
    engine = HungEngine()
    ask = EngineQueryLimiter(engine)
    for n in range(2):
        with pytest.raises(EngineUnavailableError, match="no answer within"):
            await ask("decisions", f'{{"since":{n}}}', 0.02)
    with pytest.raises(ApiError) as failure:
        await ask("decisions", '{"since":2}', 60)
    assert failure.value.status == 429
    engine.released.set()
    await asyncio.sleep(0.01)
    assert len(engine.calls) == 2
    assert len(await ask("decisions", '{"since":2}', 1)) == 1


# --- again --------------------------------------------------------------------


@pytest.mark.parametrize("path", ["stats", "programs", "capabilities"])
def test_what_is_polled_reaches_the_engine_once_in_half_a_second(path: str) -> None:
    engine = ScriptedEngine(engine_answers())
    client: TestClient = client_of(engine)
    answers = {client.get(f"/sojourn/v1/{path}").text for _ in range(20)}
    assert len(engine.calls) < 5
    assert len(answers) == 1


@pytest.mark.parametrize("path", ["decisions", "programs/p"])
def test_what_is_not_polled_is_always_asked(path: str) -> None:
    engine = ScriptedEngine(engine_answers())
    client: TestClient = client_of(engine)
    for _ in range(3):
        client.get(f"/sojourn/v1/{path}")
    client.post("/sojourn/v1/events", json=BATCH)
    client.post("/sojourn/v1/events", json=BATCH)
    assert len(engine.calls) == 5


async def test_an_answer_is_given_again_until_it_is_old() -> None:
    counted = iter(range(10))
    engine, clock = ScriptedEngine(engine_answers(stats=lambda _: next(counted))), Clock()
    ask = EngineQueryLimiter(engine, clock)
    seen = []
    for elapsed_s in (0.0, CACHE_TTL_S * 0.9, CACHE_TTL_S * 0.2, CACHE_TTL_S * 0.9, CACHE_TTL_S * 2):
        clock.now += elapsed_s
        seen.append(json.loads((await ask("stats", "{}", 1))[0]))
    assert seen == [0, 0, 1, 1, 2]


async def test_who_asks_what_is_being_asked_waits_for_the_same_answer() -> None:
    engine = HungEngine()
    async with http_of(engine) as http:
        waiting = [asyncio.ensure_future(http.get("stats")) for _ in range(30)]
        await until(lambda: engine.calls)
        await asyncio.sleep(0.02)
        assert await release(engine, waiting) == [200] * 30
    assert len(engine.calls) == 1


async def test_a_failure_is_not_remembered() -> None:
    engine = ScriptedEngine(engine_answers(stats=EngineError("step failed")))
    ask = EngineQueryLimiter(engine)
    with pytest.raises(EngineError):
        await ask("stats", "{}", 1)
    engine.per_engine[0]["stats"] = {"policy": "continuum"}
    assert json.loads((await ask("stats", "{}", 1))[0]) == {"policy": "continuum"}


async def test_other_questions_have_other_answers_and_few_are_remembered() -> None:
    engine = ScriptedEngine(engine_answers(programs=lambda payload: payload["limit"]))
    ask = EngineQueryLimiter(engine)
    for limit in range(10 * MAX_CACHED_ANSWERS):
        assert json.loads((await ask("programs", f'{{"limit":{limit}}}', 1))[0]) == limit
    assert len(ask._cached_answers) == MAX_CACHED_ANSWERS
