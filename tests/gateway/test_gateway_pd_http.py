"""Requests on two legs, over HTTP: what reaches the prefill engine, the decode engine, and the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine
from gateway_world import World, lines, served, until
from sojourn_server.gateway.core import facts
from sojourn_server.gateway.http.app import Gateway, GatewayOptions
from sojourn_server.gateway.http.books import Books
from sojourn_server.gateway.http.replicas import Replicas, addresses
from sojourn_server.gateway.http.tenants import Tenants
from sojourn_server.gateway.pd.core import PdCore
from sojourn_server.gateway.pd.decider import PdDecider
from sojourn_server.gateway.pd.facts import EngineSeen, Role
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


class PdEngine(FakeEngine):
    """Does what it is asked for: a prompt, of which it says where its KV is, or an answer."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role = role
        self.says_nothing = False
        self.refuses: int | None = None

    async def _generate(self, request: Request) -> Response:
        answer = await super()._generate(request)
        if self.refuses is not None:
            return JSONResponse({"error": {"message": "no", "code": self.refuses}}, self.refuses)
        asked = self.requests[-1].get("kv_transfer_params") or {}
        if not asked.get("do_remote_decode") or self.says_nothing or answer.status_code != 200:
            return answer
        document = json.loads(bytes(answer.body))
        told = {"do_remote_prefill": True, "transfer": asked["transfer"], "at": self.name}
        return JSONResponse({**document, "kv_transfer_params": told})

    def seen(self) -> EngineSeen:
        return EngineSeen(
            self.name, f"{self.started_s}", self.role, f"node-{self.port}", 100_000, 0.001, f"tcp:{self.port}"
        )


@asynccontextmanager
async def pairs(prefill: int, decode: int) -> AsyncIterator[tuple[World, list[PdEngine], list[PdEngine]]]:
    """A gateway before so many engines of each role."""
    engines = [PdEngine(Role.PREFILL) for _ in range(prefill)] + [
        PdEngine(Role.DECODE) for _ in range(decode)
    ]
    for engine in engines:
        await engine.start()
    replicas, books, tenants = Replicas(), Books(), Tenants()
    decider = PdDecider(PdCore(), tenants.names)
    decider.on_decided = books.decided
    gateway = Gateway(decider, replicas, tenants, GatewayOptions(policy="dualpath"), books)
    for engine in engines:
        for address in addresses(engine.url, 1):
            replicas.add(address)
        decider.tell(engine.seen())
    try:
        async with served(gateway, gateway.app(lambda: [decider.run()])) as world:
            yield world, engines[:prefill], engines[prefill:]
    finally:
        for engine in engines:
            await engine.kill()


def core_of(world: World) -> Any:
    return world.gateway.decider.core  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_goes_to_one_engine_and_its_answer_comes_from_another(stream: bool) -> None:
    async with pairs(1, 1) as (it, [prefill], [decode]):
        answer = await it.chat("p", max_tokens=50, stream=stream, seed=3)
        assert answer.status == 200
        assert answer.headers["X-Sojourn-Replica"] == decode.name
        if stream:
            assert (await lines(answer))[-1] == "[DONE]"
        [first], [second] = prefill.requests, decode.requests
        transfer = first.pop("kv_transfer_params")
        assert transfer == {
            "do_remote_decode": True,
            "transfer": transfer["transfer"],
            "peer": f"tcp:{decode.port}",
            "decode_share": 0.0,
        }
        assert (first["max_completion_tokens"], first["stream"], first["seed"]) == (1, False, 3)
        told = second.pop("kv_transfer_params")
        expected = {"do_remote_prefill": True, "transfer": transfer["transfer"], "at": prefill.name}
        assert told == expected
        assert (second["max_tokens"], second.get("stream", False)) == (50, stream)
        assert "x-session-id" not in prefill.headers[0]
        assert decode.headers[0]["x-session-id"] == "p"
        await until(lambda: not core_of(it).flights)


async def test_the_prefill_engine_is_free_while_the_answer_is_written() -> None:
    async with pairs(1, 1) as (it, [_], [decode]):
        decode.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat())
        await until(lambda: decode.requests)
        [view] = core_of(it).pairs.prefill.views()
        assert view.tokens == 0
        assert core_of(it).flights
        decode.hold.set()
        assert (await asking).status == 200


async def test_what_was_stored_of_a_program_is_read_by_either_side() -> None:
    async with pairs(1, 1) as (it, [prefill], [_]):
        for _ in range(3):
            assert (await it.chat("p", text="x" * 4000)).status == 200
        shares = [one["kv_transfer_params"]["decode_share"] for one in prefill.requests]
        assert shares[0] == 0.0
        assert set(shares[1:]) <= {0.0, 1.0}


@pytest.mark.parametrize("lost", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["gone", "no answer"])
async def test_an_engine_that_dies_costs_a_repetition_and_no_request(lost: str, how: str) -> None:
    async with pairs(2, 2) as (it, prefill, decode):
        victim = (prefill if lost == "prefill" else decode)[0]
        if how == "gone":
            await victim.kill()
        else:
            victim.break_before_first_byte = 1
        answers = await asyncio.gather(*(it.chat(f"p{number}") for number in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        await until(lambda: not core_of(it).flights)
        if how == "gone":
            assert core_of(it).engines[victim.name].suspect
            await victim.start()  # so that it can be ended again


async def test_what_the_prefill_engine_refuses_its_client_is_told() -> None:
    async with pairs(1, 1) as (it, [prefill], [decode]):
        prefill.refuses = 400
        answer = await it.chat()
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, 400)
        assert not decode.requests
        await until(lambda: not core_of(it).flights)


async def test_an_engine_that_says_nothing_of_kv_costs_time_and_no_answer() -> None:
    async with pairs(1, 1) as (it, [prefill], [decode]):
        prefill.says_nothing = True
        assert (await it.chat()).status == 200
        assert "kv_transfer_params" not in decode.requests[0]


async def test_a_client_that_leaves_in_the_first_leg_ends_it() -> None:
    async with pairs(1, 1) as (it, [prefill], [decode]):
        prefill.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat())
        await until(lambda: prefill.requests)
        asking.cancel()
        await until(lambda: not core_of(it).flights)
        await until(lambda: prefill.gave_up == 1)
        assert not decode.requests


async def test_an_engine_that_begins_anew_in_the_first_leg_is_asked_again() -> None:
    async with pairs(1, 2) as (it, [prefill], decode):
        prefill.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat())
        await until(lambda: prefill.requests)
        peer = prefill.requests[0]["kv_transfer_params"]["peer"]
        victim = next(one for one in decode if f"tcp:{one.port}" == peer)
        it.gateway.decider.tell(facts.ReplicaGone(victim.name, "1.0"))
        await until(lambda: len(prefill.requests) == 2)
        prefill.hold.set()
        answer = await asking
        assert answer.status == 200
        assert answer.headers["X-Sojourn-Replica"] != victim.name


async def test_all_engines_are_shown() -> None:
    async with pairs(1, 2) as (it, _, _decode):
        shown = (await it.get("/sojourn/v1/replicas"))["replicas"]
        assert [one["health"] for one in shown] == ["up"] * 3
        assert "sojourn_gateway_replica_load" in await (await it.http.get(f"{it.url}/metrics")).text()
