"""What a gateway says of all its engines at once, where one of them is silent or talks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, engines, running
from fake_pair_engine import engines_of, pairs
from gateway_harness import until, world
from sojourn_server.cli import doctor
from sojourn_server.gateway.http import multi_engine_queries
from starlette.requests import Request
from starlette.responses import Response

PATH = "/sojourn/v1/capabilities"


class Odd(FakeEngine):
    """Told to, it answers in its own way when asked what it speaks, or not at all."""

    says: bytes | None = None
    status = 200
    mute = False
    lists_models = True
    """Whether it answers when asked for its models; if not, with an error."""

    async def _models(self, request: Request) -> Response:
        if self.mute:
            await asyncio.sleep(3600)
        return await super()._models(request) if self.lists_models else Response(status_code=500)

    async def _capabilities(self, request: Request) -> Response:
        if self.mute:
            await asyncio.sleep(3600)
        if self.says is not None:
            return Response(self.says, self.status, media_type="application/json")
        return await super()._capabilities(request)


@asynccontextmanager
async def beside_odd(others: int) -> AsyncIterator[tuple[Odd, Any]]:
    """A gateway in front of an odd engine and so many others."""
    async with engines(others) as fakes, running(Odd()) as [odd], world([odd, *fakes]) as it:
        yield odd, it


async def test_an_engine_that_does_not_answer_holds_up_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_engine_queries, "STRAGGLER_WAIT_S", 0.05)
    monkeypatch.setattr(multi_engine_queries, "QUERY_TIMEOUT_S", 3600.0)
    async with beside_odd(1) as (odd, it):
        odd.mute = True
        told = await it.get(PATH)
        assert (told["name"], told["engines"], told["gateway"]) == ("sojourn", 1, True)
        assert told["silent"] == [odd.url]
        assert (await it.get("/sojourn/v1/stats"))["silent"] == [], "of numbers each engine's are wanted"


@pytest.mark.parametrize(
    "says",
    [b"\xff", b'"\xff"', b'{"a":' * 5000, b"[]", b"{}", b'{"ok": true}', b'{"name": "other", "engines": 4}'],
)
async def test_an_engine_that_answers_nonsense_is_left_out(says: bytes) -> None:
    async with beside_odd(1) as (odd, it):
        odd.says = says
        told = await it.get(PATH)
        assert (told["name"], told["engines"], told["silent"]) == ("sojourn", 1, [odd.url])


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_client_whose_key_the_engines_refuse_hears_that(key: str | None) -> None:
    """It was told that no engine answers, and to try again."""
    async with engines(2, key="right") as fakes, world(fakes) as it:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        for path in ("/v1/models", PATH):
            async with it.http.get(it.url + path, headers=headers) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "Retry-After" not in answer.headers
            async with it.http.get(it.url + path, headers={"Authorization": "Bearer right"}) as answer:
                assert answer.status == 200


# -- sojourn doctor ---------------------------------------------------------------


async def examined(url: str, key: str | None = None) -> dict[str, doctor.Check]:
    """What the doctor reports of a gateway, by name."""

    def ask() -> dict[str, doctor.Check]:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            return {check.name: check for check in doctor.server_checks(client)}

    return await asyncio.to_thread(ask)


async def test_the_doctor_knows_a_gateway() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        checks = await examined(it.url)
        assert list(checks)[:2] == ["server", "gateway"]
        assert checks["gateway"].ok is True
        assert checks["gateway"].detail == (
            "policy test, 2 of 2 replicas up; its replicas answer the following checks"
        )
        assert checks["plugin"].ok is checks["events"].ok is checks["models"].ok is True
        await fakes[0].kill()
        await until(lambda: it.gateway.replicas.get(fakes[0].name) is None)
        check = (await examined(it.url))["gateway"]
        assert check.ok is False
        assert f"1 of 2 replicas up; no answer from: {fakes[0].url}; " in check.detail
        assert "logs" in check.next_step
        await fakes[1].kill()
        await until(lambda: it.gateway.replicas.get(fakes[1].name) is None)
        checks = await examined(it.url)
        assert list(checks) == ["server", "gateway"]
        assert "policy test, 0 of 2 replicas up" in checks["gateway"].detail


async def test_the_doctor_knows_a_gateway_for_pairs() -> None:
    async with pairs(1, 2, read_side="prefill") as (it, [prefill], decode):
        checks = await examined(it.url)
        assert not [name for name, check in checks.items() if check.ok is False and name != "cached tokens"]
        assert checks["gateway"].detail.startswith("policy dualpath, 3 of 3 replicas up")
        nodes = sorted(engine.at_node for engine in (prefill, *decode))
        told = f"1 prefill, 2 decode; nodes {', '.join(nodes)}; read side prefill"
        assert checks["pairs"].detail == told
        tiers = checks["tiers"]
        assert tiers.ok is True
        assert "engines of pairs store and read KV" in tiers.detail
        assert "computed again" not in tiers.detail


async def test_the_doctor_says_which_role_is_missing_and_why() -> None:
    async with pairs(1, 1) as (it, _, [decode]):
        decode.paths = {"block_bytes": 8192}
        await until(lambda: decode.name not in engines_of(it))
        checks = await examined(it.url)
        assert checks["server"].ok is True
        assert [name for name in checks][:3] == ["server", "gateway", "pairs"]
        assert "1 of 2 replicas up" in checks["gateway"].detail
        pairs_check = checks["pairs"]
        assert pairs_check.ok is False
        assert pairs_check.detail.startswith("1 prefill, 0 decode; ")
        assert f"{decode.url} is rejected: its Full Block in bytes is 8192" in pairs_check.detail
        assert "--prefill" in pairs_check.next_step
