"""The live stream: frames of a virtual engine, and what happens to slow and to many viewers."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import msgspec
import pytest
from api_contract import VirtualRpc
from api_test_engines import BATCH, HungEngine, ScriptedEngine, app_of, check_error, client_of, engine_answers
from sojourn_server.api.api_errors import ApiError
from sojourn_server.api.engine_rpc import EngineUnavailableError
from sojourn_server.api.live_stream import MAX_DELTA_S, MAX_VIEWERS, Audience, LiveHub, SourceFrame
from sojourn_server.metrics.live_frame import EngineRow, LiveFrame, ProgramRow
from virtual_engine import VirtualEngine, prompt
from waiting import wait_until_async

BLANK = ProgramRow(
    "p", None, "acting", None, None, 1, 9, 0, "bash", 1.0, False, None, 2, 0, None, None, 8, 1, 0.5
)


def test_one_frame_has_programs_pool_and_totals() -> None:
    virtual = VirtualEngine()
    virtual.turn("a", prompt(40))
    virtual.arrive("b", prompt(12, seed=1))
    virtual.wait(2.0)
    answer = client_of(VirtualRpc(virtual)).get("/sojourn/v1/stream?once=1")
    frame = msgspec.json.decode(answer.content, type=LiveFrame)
    rows = {row.program_id: row for row in frame.programs}
    assert frame.full
    assert frame.total == 2
    assert (rows["a"].status, rows["a"].turns, rows["a"].requests) == ("acting", 1, 0)
    assert rows["a"].ttft_s is not None
    assert rows["b"].ttft_s is None
    assert rows["a"].lease_blocks > 0
    assert rows["a"].lease_until_s is not None
    assert (rows["b"].status, rows["b"].requests, rows["b"].running) == ("reasoning", 1, False)
    (one,) = frame.engines
    assert one.programs["acting"] == 1
    assert sum(one.blocks.values()) == 1000
    assert one.prompt_tokens == 40


def test_a_delta_has_what_changed_and_what_is_held() -> None:
    virtual = VirtualEngine()
    client = client_of(VirtualRpc(virtual))
    virtual.turn("leased", prompt(40))
    virtual.turn("plain", prompt(40, seed=2), text="done")
    virtual.wait(5.0)
    virtual.turn("new", prompt(8, seed=3), text="done")
    answer = client.get("/sojourn/v1/stream?once=1&changed_within_s=2").json()
    assert {row[0] for row in answer["programs"]} == {"leased", "new"}
    assert not answer["full"]
    check_error(client.get("/sojourn/v1/stream?once=1&changed_within_s=x"), 400)


class Source:
    """Says at each call that one more program has changed, or fails with ``error``. A frame takes ``spent_s``
    of an engine's CPU."""

    def __init__(self, spent_s: float = 0.0, error: Exception | None = None) -> None:
        self.spent_s, self.error = spent_s, error
        self.asked: list[float | None] = []

    async def take(self, changed_within_s: float | None) -> SourceFrame:
        self.asked.append(changed_within_s)
        if self.error is not None:
            raise self.error
        row = msgspec.structs.replace(BLANK, program_id=f"p{len(self.asked)}", tenant="t")
        other = msgspec.structs.replace(BLANK, program_id="other", tenant="u", turns=len(self.asked))
        engine = EngineRow(engine="0", now_s=1.0, turns=7, spent_s=self.spent_s)
        return SourceFrame([engine], [row, other], len(self.asked) + 1)


async def read(stream: Any) -> Any:
    data = await asyncio.wait_for(anext(stream), 60)
    assert data.startswith(b"data: ")
    return json.loads(data[6:])


async def test_a_slow_viewer_misses_nothing_and_nobody_is_asked_without_viewers() -> None:
    source, now = Source(), [0.0]
    hub = LiveHub(source, interval_s=0.0, clock=lambda: now[0])
    viewer = hub.stream(Audience()).body_iterator
    assert (await read(viewer))["full"]
    for idle_s, within_s in ((2.0, 3.0), (9.0, 10.0), (0.5, 1.5)):
        now[0] += idle_s
        assert not (await read(viewer))["full"]
        assert source.asked[-1] == within_s, "back to its last frame, and a second more"
    now[0] += 15.0
    assert (await read(viewer))["full"], "a delta lacks no expired programs"
    await viewer.aclose()
    number = len(source.asked)
    await asyncio.sleep(0.01)
    assert (len(source.asked), source.asked.count(None)) == (number, 2)


async def test_programs_of_an_engine_that_falls_silent_stay_as_its_last_frame_had_them() -> None:
    class Silent(Source):
        async def take(self, changed_within_s: float | None) -> SourceFrame:
            found = await super().take(changed_within_s)
            return found if len(self.asked) < 3 else SourceFrame([], [], 0, frozenset({"0"}))

    now = [0.0]
    hub = LiveHub(Silent(), clock=lambda: now[0])
    for changed_within_s in (None, 5.0, None, None):
        answer = await hub.once(Audience(), changed_within_s)
        now[0] += 10.0
    rows = json.loads(answer.body)["programs"]
    assert [(row[0], row[5]) for row in rows] == [("p1", 1), ("other", 2), ("p2", 1)]
    assert {(row[7], row[13]) for row in rows} == {(0, 0)}, "without requests and leases"


async def test_a_stream_ends_with_its_server_and_after_three_failures() -> None:
    hub = LiveHub(Source(), interval_s=60.0)
    viewer = hub.stream(Audience()).body_iterator
    await read(viewer)
    hub.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(viewer), 60)
    source = Source(error=EngineUnavailableError("it starts"))
    once = LiveHub(source).once
    found = await asyncio.gather(*[once(Audience()) for _ in range(9)], return_exceptions=True)
    assert {type(one) for one in found} == {EngineUnavailableError}
    assert len(source.asked) == 1, "who waits does not wait for nine polls"
    source.asked.clear()
    with pytest.raises(StopAsyncIteration):
        await anext(LiveHub(source, interval_s=0.001).stream(Audience()).body_iterator)
    assert len(source.asked) == 3


async def test_who_asks_once_in_a_loop_shares_frames_and_costs_at_most_a_hundredth_of_a_core() -> None:
    now, source = [0.0], Source(spent_s=0.02)
    hub = LiveHub(source, interval_s=0.02, clock=lambda: now[0])
    answers = {bytes((await hub.once(Audience())).body) for _ in range(100)}
    assert (len(answers), source.asked) == (1, [None])
    assert json.loads((await hub.once(Audience("t", pools=False))).body)["total"] == 1, "each its own part"
    now[0] = 3.9
    assert bytes((await hub.once(Audience())).body) in answers
    now[0] = 4.1
    assert bytes((await hub.once(Audience())).body) not in answers, "a pause of 200 times 0.02 s is over"
    assert source.asked == [None, None]
    deltas = await asyncio.gather(*[hub.once(Audience(), 19.0 - n) for n in range(20)])
    assert source.asked[2:] == [19.0], "one poll that reaches back far enough for all"
    assert {json.loads(one.body)["full"] for one in deltas} == {False}
    assert (await hub.once(Audience(), 19.0)).body == deltas[0].body
    now[0] += 4.1
    await hub.once(Audience(), 1.0)
    assert source.asked[3:] == [1.0], "a delta of four seconds ago answers nobody"


async def test_a_delta_of_the_longest_time_asks_engines_for_no_longer_one() -> None:
    source = Source()
    await LiveHub(source, clock=itertools.count().__next__).once(Audience(), MAX_DELTA_S)
    assert source.asked == [MAX_DELTA_S], "engines refuse more"


async def test_viewers_are_limited_and_tenants_see_their_own() -> None:
    hub = LiveHub(Source(), interval_s=0.001)
    viewers = [hub.stream(Audience()).body_iterator for _ in range(MAX_VIEWERS - 1)]
    tenant = hub.stream(Audience("t", pools=False)).body_iterator
    for viewer in viewers:
        assert (await read(viewer))["engines"][0]["turns"] == 7
    frame = await read(tenant)
    assert {row[1] for row in frame["programs"]} == {"t"}
    assert frame["engines"][0].get("turns", 0) == 0
    with pytest.raises(ApiError) as refused:
        hub.stream(Audience())
    assert refused.value.status == 429
    for viewer in [*viewers, tenant]:
        await viewer.aclose()


# -- Pollers, however many, leave the engine its time


@pytest.mark.parametrize("path", ["decisions?since={}", "programs/p{}", "programs?limit=1{}"])
async def test_of_each_kind_of_question_two_wait_and_the_third_is_told_to_come_back(path: str) -> None:
    engine = HungEngine(program={"program_id": "p"})
    transport = httpx.ASGITransport(app=app_of(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/sojourn/v1") as http:
        waiting = [asyncio.ensure_future(http.get(path.format(n))) for n in range(2)]
        await wait_until_async(lambda: len(engine.calls) == 2)
        refused = await asyncio.wait_for(http.get(path.format(2)), 60)
        check_error(refused, 429)
        assert int(refused.headers["retry-after"]) > 0
        assert len(engine.calls) == 2
        # Other kinds, and events above all, have room of their own.
        waiting += map(asyncio.ensure_future, [http.get("stats"), http.post("events", json=BATCH)])
        await wait_until_async(lambda: len(engine.calls) == 4)
        engine.released.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4
        assert (await http.get(path.format(2))).status_code == 200


@pytest.mark.parametrize("path", ["stats", "programs", "capabilities"])
def test_what_is_polled_reaches_the_engine_once_in_half_a_second(path: str) -> None:
    engine = ScriptedEngine(engine_answers())
    client = client_of(engine)
    answers = {client.get(f"/sojourn/v1/{path}").text for _ in range(20)}
    assert len(engine.calls) < 5
    assert len(answers) == 1
