"""Pollers, however many, leave the engine its time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from api_test_engines import BATCH, HungEngine, ScriptedEngine, app_of, check_error, client_of, engine_answers
from fastapi.testclient import TestClient
from waiting import wait_until_async


def http_of(engine: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app_of(engine))
    return httpx.AsyncClient(transport=transport, base_url="http://server/sojourn/v1")


async def release(engine: HungEngine, requests: list[asyncio.Task[httpx.Response]]) -> list[int]:
    engine.released.set()
    return [response.status_code for response in await asyncio.gather(*requests)]


# --- at once ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["decisions?since={}", "programs/p{}", "programs?limit=1{}"])
async def test_of_each_kind_of_question_two_wait_and_the_third_is_told_to_come_back(path: str) -> None:
    engine = HungEngine(program={"program_id": "p"})
    async with http_of(engine) as http:
        waiting = [asyncio.ensure_future(http.get(path.format(n))) for n in range(2)]
        await wait_until_async(lambda: len(engine.calls) == 2)
        refused = await asyncio.wait_for(http.get(path.format(2)), 60)
        check_error(refused, 429)
        assert int(refused.headers["retry-after"]) > 0
        assert len(engine.calls) == 2
        # Other kinds, and events above all, have room of their own.
        waiting += [
            asyncio.ensure_future(http.get("stats")),
            asyncio.ensure_future(http.post("events", json=BATCH)),
        ]
        await wait_until_async(lambda: len(engine.calls) == 4)
        assert await release(engine, waiting) == [200] * 4
        assert (await http.get(path.format(2))).status_code == 200


# --- again --------------------------------------------------------------------


@pytest.mark.parametrize("path", ["stats", "programs", "capabilities"])
def test_what_is_polled_reaches_the_engine_once_in_half_a_second(path: str) -> None:
    engine = ScriptedEngine(engine_answers())
    client: TestClient = client_of(engine)
    answers = {client.get(f"/sojourn/v1/{path}").text for _ in range(20)}
    assert len(engine.calls) < 5
    assert len(answers) == 1


async def test_who_asks_what_is_being_asked_waits_for_the_same_answer() -> None:
    engine = HungEngine()
    async with http_of(engine) as http:
        waiting = [asyncio.ensure_future(http.get("stats")) for _ in range(30)]
        await wait_until_async(lambda: engine.calls)
        await asyncio.sleep(0.02)
        assert await release(engine, waiting) == [200] * 30
    assert len(engine.calls) == 1
