"""What a gateway of pairs learns of engines by asking them, and whom it sends nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fake_pair_engine import PairEngine, gateway_of, pair_engines, pairs
from gateway_harness import World, until
from sojourn_server.gateway.http.engine_monitor import (
    EngineKind,
    incompatibility,
    nic_queue_event,
)
from sojourn_server.routing.routing_events import NicQueueReported, PairRole
from sojourn_server.routing.routing_records import LinkStats

# -- whom it sends nothing ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("role", PairRole.PREFILL, "is a prefill engine; expected a decode engine"),
        ("tells_paths", False, "expected an engine started with --role"),
        ("paths", {"block_bytes": 8192}, "Full Block in bytes is 8192; expected 4096"),
        ("model", "large", "its model is 'large'; expected 'tiny'"),
        ("paths", {"kv": "another"}, "its KV format is"),
    ],
    ids=["role", "no paths", "blocks", "model", "kv"],
)
async def test_an_engine_that_does_not_fit_is_named_once_and_sent_nothing(
    name: str, value: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with pair_engines(1, 2) as (prefill, decode):
        odd, good = decode
        usual = getattr(odd, name)
        setattr(odd, name, value)
        async with gateway_of(prefill, decode, taken=2, poll_s=0.01) as it:
            looked = odd.looked_at
            for _ in range(3):
                assert (await it.chat()).status == 200
            await until(lambda: odd.looked_at >= looked + 2)  # a look is for many polls
            assert not odd.requests
            assert len(good.requests) == 3
            assert [*it.gateway.monitor.refused()] == [odd.url]
            assert told in it.gateway.monitor.refused()[odd.url]
            assert caplog.text.count(f"{odd.url} gets no requests") == 1
            # Started as it should be, it is one of them.
            setattr(odd, name, usual)
            await odd.kill()
            await odd.restart()
            await until(lambda: odd.name in it.core.fleet)
            assert it.gateway.monitor.refused() == {}


@pytest.mark.parametrize("listed", [0, 1])
async def test_an_odd_engine_that_was_there_first_keeps_no_pair_out(listed: int) -> None:
    async with pair_engines(1, 2) as (prefill, decode):
        odd, good = decode[listed], decode[1 - listed]
        for engine in (prefill[0], good):
            await engine.kill()
        odd.paths = {"block_bytes": 8192}
        async with gateway_of(prefill, decode, taken=1, poll_s=3600.0) as it:
            assert {*it.core.fleet} == {odd.name}
            for engine in (good, prefill[0]):
                await engine.restart()
            await it.gateway.monitor.poll_all()
            assert {*it.core.fleet} == {prefill[0].name, good.name}
            assert [*it.gateway.monitor.refused()] == [odd.url]


# -- what becomes of engines --------------------------------------------------------------


async def test_engines_are_waited_for_and_may_come_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sojourn_server")
    async with pair_engines(1, 1) as (prefill, [engine]):
        await engine.kill()
        async with gateway_of(prefill, [engine], taken=1) as it:
            assert (await it.get("/sojourn/v1/replicas"))["missing"] == [engine.url]
            waits = asyncio.ensure_future(it.chat())
            await engine.restart()
            await until(lambda: engine.name in it.core.fleet)
            assert (await waits).status == 200
            await engine.kill()
            await until(lambda: f"{engine.url} is gone" in caplog.text)
        told = [line for line in caplog.messages if " engines: " in line]
        assert [line.rpartition("; ")[2] for line in told] == [
            f"prefill engines: 1, decode engines: {number}" for number in (0, 1, 0)
        ]
        assert told[1].startswith(f"{engine.url} takes requests")
        assert sum("no engine answers" in line for line in caplog.messages) == 1, "at the start alone"


async def test_an_engine_without_a_description_for_a_while_stays_what_it_was() -> None:
    async with pairs(1, 1) as (it, _, [decode]):
        decode.capabilities_fail = decode.no_metrics = True
        looked = decode.looked_at
        await until(lambda: decode.looked_at >= looked + 2)
        assert decode.name in it.core.fleet
        assert it.gateway.monitor.refused() == {}
        assert (await it.chat()).status == 200


# -- links --------------------------------------------------------------------------------


def queue_s(it: World, engine: PairEngine) -> float:
    """What the books have waiting for the NIC of its node."""
    now: float = asyncio.get_running_loop().time()  # the decider's clock
    return max(0.0, it.core.strategy.pairs.nics[engine.at_node].busy_until_s - now)


async def test_a_nodes_queue_is_that_of_all_its_engines() -> None:
    async with pair_engines(1, 3) as ([prefill], decode):
        decode[0].node = decode[1].node = "a"
        async with gateway_of([prefill], decode) as it:
            decode[0].queued_s, decode[1].queued_s = 40.0, 60.0
            await until(lambda: 95.0 < queue_s(it, decode[0]) <= 100.0)
            assert queue_s(it, decode[2]) <= 0.0
            assert queue_s(it, prefill) <= 0.0
            await decode[1].kill()
            await until(lambda: 35.0 < queue_s(it, decode[0]) <= 40.0)


async def test_the_side_with_the_shorter_reported_queue_reads() -> None:
    async with pairs(1, 1) as (it, [prefill], _):
        assert (await it.chat("p", text="x" * 4000)).status == 200
        prefill.queued_s = 50.0
        prefill.lost.append("p")  # it would read nothing else
        await until(lambda: queue_s(it, prefill) > 40.0)
        await until(lambda: all(program.home is None for program in it.core.programs.values()))
        assert (await it.chat("p", text="x" * 4000)).status == 200
        assert prefill.requests[1]["kv_transfer_params"]["decode_reads"] is True


# -- what is told -------------------------------------------------------------------------


def kind(kv: str, shape: str) -> EngineKind:
    return "tiny", shape, 4096, 64, kv


@pytest.mark.parametrize(("kv", "ours", "alike"), [("a", "a", True), ("a", "b", False), ("", "b", True),
                                                   ("a", "", True)])  # fmt: skip
def test_kv_is_compared_if_both_engines_report_it(kv: str, ours: str, alike: bool) -> None:
    why = incompatibility(kind(kv, ""), kind(ours, "tensor parallel 2"))
    assert (why == "") is alike
    assert alike or "start all with the same --block-size" in why


def test_an_unknown_queue_is_not_reported_as_a_short_one() -> None:
    links = [{"storage read": LinkStats(0, 2.0, 0)}, {"storage read": LinkStats(4096, None, 0)}]
    assert nic_queue_event("n", links[:1]) == NicQueueReported("n", 2.0)
    assert nic_queue_event("n", links) is None
    assert nic_queue_event("n", [{}]) is None
