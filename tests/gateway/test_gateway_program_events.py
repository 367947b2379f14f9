"""What programs say of themselves reaches the engines that serve them, and no other tenant's programs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import World, hint, until, world
from sojourn.hints import AgenticContext, SojournContext
from sojourn.wire_codec import (
    EventBatch,
    EventOutcome,
    Outcome,
    OutcomeBatch,
    decode_batch,
    decode_event,
    encode,
)
from sojourn.wire_events import (
    AegGraph,
    AegNode,
    AegReport,
    AnyEvent,
    Heartbeat,
    ProgramEnd,
    ProgramStart,
    ToolStart,
    ToolStop,
)
from sojourn_server.core.event_limits import MAX_ATTACHED_EVENTS
from sojourn_server.gateway.http import program_events
from sojourn_server.gateway.http.engine_monitor import EngineDescription
from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.gateway.http.program_events import AttachedEvents, ProgramEvents
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper
from sojourn_server.gateway.http.replica_addresses import ReplicaAddress
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_limits import SILENT_PROGRAM_S, RoutingLimits
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

START = {"type": "program_start", "seq": 0, "agent_type": "coder"}
TOOL = {"type": "tool_start", "seq": 1, "call_id": "c", "tool": "bash"}
STOP = {"type": "tool_stop", "seq": 2, "call_id": "c", "duration_s": 1.0}
END = {"type": "program_end", "seq": 3, "status": "cancelled"}


# -- events that ride ----------------------------------------------------------------


async def test_events_that_may_ride_leave_the_body_as_it_came() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        await it.chat("q")
        events = {**START, "program_id": "p"}, {**TOOL, "program_id": "q"}, {"type": "nonsense"}
        body = json.dumps({"messages": [], **hint("p", *events)}, indent=3).encode()
        assert (await it.send("/v1/chat/completions", data=body)).status == 200
        assert dict(fakes[0].raw_headers[-1])[b"content-length"] == str(len(body)).encode()
        assert fakes[0].requests[-1] == json.loads(body)
        assert fakes[0].events == []


@pytest.mark.parametrize("is_known", [False, True])
async def test_events_beyond_those_that_an_engine_takes_of_a_request_go_there_apart(is_known: bool) -> None:
    async with engines(1) as fakes, world(fakes) as it:
        for name in ("p", "q") if is_known else ("q",):
            await it.chat(name)
        calls = [f"c{number}" for number in range(MAX_ATTACHED_EVENTS)]
        tools = [
            {**TOOL, "program_id": "p", "call_id": call, "seq": number} for number, call in enumerate(calls)
        ]
        stop = {**STOP, "program_id": "p", "call_id": "c0", "seq": 1000}
        end = {**END, "program_id": "q", "seq": 1001}
        await it.chat(**hint("p", *tools, stop, {"type": "nonsense"}, end))
        assert fakes[0].attached == []
        told = ["tool_start"] * MAX_ATTACHED_EVENTS + ["tool_stop"]
        await until(lambda: (fakes[0].of("p"), fakes[0].of("q")) == (told, ["program_end"]))
        await until(lambda: it.core.home("default", "q") is None)
        await it.chat("p")
        assert fakes[0].of("p") == told, "nothing is sent twice"


# -- who has been told -----------------------------------------------------------------


async def test_a_request_does_not_wait_long_for_an_engine_that_does_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeEngine, "_take_events", lambda self, request: asyncio.sleep(3600))
    async with engines(1) as fakes, world(fakes) as it:
        await it.events({**START, "program_id": "p"})
        assert (await asyncio.wait_for(it.chat("p"), 30)).status == 200


async def test_a_state_that_is_rejected_stops_no_event_of_the_same_post() -> None:
    fleet = Fleet()
    fleet.homes = {"bad": "a", "good": "a"}
    starts = [ProgramStart(program_id=name, seq=number) for number, name in enumerate(fleet.homes)]
    assert await fleet.post(*starts) == [Outcome.APPLIED, Outcome.APPLIED]
    fleet.instances["a"] += 1
    fleet.views["a"] = {}
    fleet.rejects = "bad"
    tools = [
        ToolStart(program_id=name, seq=2 + number, call_id="c", tool="sh")
        for number, name in enumerate(fleet.homes)
    ]
    assert await fleet.post(*tools) == [Outcome.REJECTED, Outcome.APPLIED]
    assert fleet.views["a"]["good"].started
    assert fleet.views["a"]["good"].running == {"c"}
    posts = fleet.posts
    await fleet.events.replay_before_request(("", "bad"), "a")
    assert fleet.posts == posts, "what was rejected is not sent again"
    stops = [
        ToolStop(program_id=name, seq=4 + number, call_id="c", duration_s=1.0)
        for number, name in enumerate(fleet.homes)
    ]
    assert await fleet.post(*stops) == [Outcome.REJECTED, Outcome.APPLIED], "in one request"


# -- who is left ------------------------------------------------------------------------


@asynccontextmanager
async def two_ranks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeEngine, World]]:
    async def two(self: FakeEngine, request: Request) -> Response:
        info = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1.0\n'
        return PlainTextResponse("process_start_time_seconds 1\n" + "".join(info % rank for rank in (0, 1)))

    monkeypatch.setattr(FakeEngine, "_metrics", two)
    async with engines(1) as fakes, world(fakes, admin_key="root") as it:
        await until(lambda: len(it.core.fleet) == 2)
        yield fakes[0], it


async def test_a_stored_answer_of_unknown_rank_goes_on_at_the_least_loaded_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_ranks(monkeypatch) as (fake, it):
        fake.stored["resp_1"], fake.hold = {"id": "resp_1"}, asyncio.Event()
        first = asyncio.ensure_future(it.chat("p"))
        await until(lambda: fake.requests)
        body = {"input": "x", "previous_response_id": "resp_1"}
        second = asyncio.ensure_future(it.send("/v1/responses", json=body))
        await until(lambda: len(fake.requests) == 2)
        fake.hold.set()
        assert {(await one).headers["X-Sojourn-Replica"][-2:] for one in (first, second)} == {"/0", "/1"}
        assert {headers["x-data-parallel-rank"] for headers in fake.headers} == {"0", "1"}


async def test_ranks_of_one_engine_get_no_release_for_a_move_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_ranks(monkeypatch) as (fake, it):
        home = (await it.chat("p")).headers["X-Sojourn-Replica"]
        await it.events({**START, "program_id": "p"})
        await it.drain(home)
        assert (await it.chat("p")).headers["X-Sojourn-Replica"] != home
        # Whatever is said of it now comes after what was said before.
        await it.events({**TOOL, "program_id": "p"})
        assert "program_end" not in fake.of("p")


# -- how much is kept and said ------------------------------------------------------------


async def test_the_end_of_a_program_whose_kv_is_gone_reaches_the_engine_that_served_it_last() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        await it.chat("p")
        [last] = [fake for fake in fakes if fake.requests]
        last.lost = ["p"]
        await until(lambda: it.core.home("default", "p") is None)
        [outcome] = await it.events({**END, "program_id": "p"})
        assert outcome["outcome"] == "applied"
        assert [fake.of("p") for fake in fakes] == [["program_end"] if fake is last else [] for fake in fakes]


async def test_an_event_that_is_not_known_or_not_taken_names_its_program() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        end = {"type": "program_end", "program_id": "nobody", "seq": 3}
        unread = [
            {"type": "nonsense", "program_id": "p", "seq": 1},
            {**TOOL, "program_id": "p", "call_id": 7},
        ]
        beat = {"type": "heartbeat", "program_id": "nobody", "seq": 2}
        unsupported, rejected, *missing = await it.events(*unread, beat, end)
        assert [one["outcome"] for one in (unsupported, rejected)] == ["unsupported", "rejected"]
        assert {(one["program_id"], one["seq"]) for one in (unsupported, rejected)} == {("p", 1)}
        assert missing == [
            {"outcome": "missing", "reason": "unknown program", "program_id": "nobody", "seq": seq}
            for seq in (2, 3)
        ]
        for name in ("p", "q"):
            await it.chat(name)
        fakes[0].key = "another"
        assert await it.events({**end, "program_id": "p"}) == [
            {"outcome": "rejected", "reason": "the engine refuses this key", "program_id": "p", "seq": 3}
        ]
        assert it.core.home("default", "p") is not None
        fakes[0].key, fakes[0].deaf = None, True
        assert await it.events({**end, "program_id": "q"}) == [
            {"outcome": "deferred", "reason": "its replica receives it later", "program_id": "q", "seq": 3}
        ]


# -- any order ----------------------------------------------------------------------------


GRAPH = AegGraph(nodes=[AegNode(id="n" * 100) for _ in range(10)], edges=[])
PERSISTED = {
    "program_id": "p", "state": "done", "reason": None, "turns": 1, "context_tokens": 16,
    "stored_tokens": 16, "pending_tokens": 0, "compute_s": None,
}  # fmt: skip


class Answer:
    """An answer as aiohttp gives it."""

    content_type = "application/json"

    def __init__(self, status: int, body: bytes = b"") -> None:
        self.status, self._body = status, body

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def read(self) -> bytes:
        return self._body


class View:
    """What an engine knows of one program."""

    def __init__(self) -> None:
        self.numbers: set[tuple[str, int]] = set()
        self.started = False
        self.running: set[str] = set()
        self.stopped: list[str] = []
        self.graph: AegGraph | None = None

    def apply(self, emitter: str, event: AnyEvent) -> None:
        if (emitter, event.seq) in self.numbers:
            return
        self.numbers.add((emitter, event.seq))
        if isinstance(event, ProgramStart):
            self.started = True
        elif isinstance(event, ToolStart):
            self.running.add(event.call_id)
        elif isinstance(event, ToolStop):
            self.running.discard(event.call_id)
            self.stopped.append(event.call_id)
        elif isinstance(event, AegReport):
            self.graph = event.graph


class Fleet:
    """Two engines, the homes of programs, and what is true of the programs. It stands for the session, the
    replicas and the routing core of ``ProgramEvents``."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.views: dict[str, dict[str, View]] = {"a": {}, "b": {}}
        self.instances = {"a": 1, "b": 1}
        self.deaf: dict[str, str] = {}
        """``drops`` or ``loses its answer``, by engine."""
        self.core = self
        self.limits = RoutingLimits()
        self.homes: dict[str, str] = {}
        self.rejects = ""
        """Program whose events engines reject."""
        self.posts = 0
        self.persisted: list[str] = []
        """Engines that have written KV to their common disk."""
        self.replicas = self.monitor = self
        self.engine_key, self.names = None, ProgramIdMapper(())
        mine: Any = self
        self.events = ProgramEvents(mine, mine, GatewayMetrics(), lambda: self.now_s)

    async def post(self, *events: AnyEvent) -> list[Outcome]:
        """Forward a batch of these events, and return their outcomes."""
        batch = EventBatch(v=1, emitter="e", events=[msgspec.Raw(encode(one)) for one in events])
        return [one.outcome for one in await self.events.forward_batch(batch, "", None)]

    def session(self) -> Fleet:
        return self

    def description_of(self, engine: str) -> EngineDescription:
        registered = routing_events.ReplicaRegistered("", str(self.instances[engine]), 100)
        return EngineDescription(registered, shares_disk=True, speaks_sojourn=True)

    def home(self, tenant: str, program_id: str) -> str | None:
        return self.homes.get(program_id)

    def last_engines(self, tenant: str, program_id: str) -> tuple[str | None, None]:
        return self.homes.get(program_id), None

    def tell(self, event: object) -> None:
        pass

    def is_waiting(self, tenant: str, program_id: str) -> bool:
        return False

    def get(self, name: str | None) -> ReplicaAddress | None:
        return ReplicaAddress(name, name) if name is not None else None

    def request(self, method: str, url: str, *, data: Any, **more: Any) -> Answer:
        engine, how = url[0], self.deaf.get(url[0])
        if url.endswith("/persist"):
            self.persisted.append(engine)
            return Answer(200, msgspec.json.encode(PERSISTED))
        batch = decode_batch(data if isinstance(data, bytes) else data.read())
        events = [decode_event(raw) for raw in batch.events]
        self.posts += 1
        for event in events if how != "drops" else ():
            if event.program_id == self.rejects:
                continue
            if isinstance(event, ProgramEnd):
                self.views[engine].pop(event.program_id, None)
            else:
                self.views[engine].setdefault(event.program_id, View()).apply(batch.emitter, event)
        if how is not None:
            return Answer(500)
        outcomes = [
            EventOutcome(outcome=Outcome.REJECTED if e.program_id == self.rejects else Outcome.APPLIED)
            for e in events
        ]
        return Answer(200, encode(OutcomeBatch(outcomes=outcomes)))


@pytest.mark.parametrize("seed", range(60))
async def test_an_engine_that_listens_knows_a_programs_state_before_its_turn(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events are posted or ride, programs move, engines restart, do not answer, or lose their answers. Of a
    graph that both programs have, a client may send the hash alone once it has sent the whole."""
    monkeypatch.setattr(program_events, "ANSWER_TIMEOUT_S", 0.0)
    draw, fleet = random.Random(seed), Fleet()
    truth = {name: View() for name in ("p", "q")}
    seq = 0

    def event_of(name: str) -> AnyEvent:
        nonlocal seq
        seq += 1
        kind = draw.choice(["start", "tool", "tool", "stop", "stop", "beat", "graph"])
        running = sorted(truth[name].running)
        is_known = any(one.graph is not None for one in truth.values())
        event: AnyEvent = Heartbeat(program_id=name, seq=seq)
        if kind == "start":
            event = ProgramStart(program_id=name, seq=seq)
        elif kind == "tool":
            event = ToolStart(program_id=name, seq=seq, call_id=f"c{seq}", tool="bash")
        elif kind == "stop" and running:
            event = ToolStop(program_id=name, seq=seq, call_id=draw.choice(running), duration_s=1.0)
        elif kind == "graph":
            event = AegReport(program_id=name, seq=seq, graph_hash="h", graph=GRAPH)
        truth[name].apply("e", event)
        if kind == "graph" and is_known and draw.random() < 0.5:
            return msgspec.structs.replace(event, graph=None)
        return event

    async def turn(name: str, attached: AttachedEvents | None) -> None:
        home = fleet.homes.setdefault(name, draw.choice("ab"))
        if attached is not None and not fleet.events.may_attach(attached, "", home):
            await fleet.events.wait_for(fleet.events.forward_batch(attached.batch, "", None))
            attached = None
        await fleet.events.replay_before_request(("", name), home)
        view = fleet.views[home].setdefault(name, View())
        if attached is not None:
            for event in attached.events:
                fleet.views[home].setdefault(event.program_id, View()).apply("e", event)
            fleet.events.record_attached(attached, "", home)
        if home not in fleet.deaf:
            right = truth[name]
            assert (view.started, view.running, view.graph) == (right.started, right.running, right.graph)
            assert len(view.stopped) == len(set(view.stopped))

    for _ in range(80):
        fleet.now_s += draw.choice([0.1, 10.0])
        name = draw.choice("pq")
        step = draw.choice(
            ["post", "post", "post", "ride", "ride", "turn", "move", "restart", "deaf", "heal"]
        )
        if step == "post":
            events = [event_of(draw.choice("pq")) for _ in range(draw.randrange(1, 4))]
            assert len(await fleet.post(*events)) == len(events)
        elif step == "ride":
            raw = [msgspec.Raw(encode(event_of(draw.choice([name, name, "p"]))))]
            own = SojournContext(v=1, emitter="e", events=raw)
            context = AgenticContext(program_id=name, sojourn=own)
            fleet.now_s += 10.0
            await turn(name, AttachedEvents(name, context, None))
        elif step == "turn":
            fleet.now_s += 10.0
            await turn(name, None)
        elif step == "move" and name in fleet.homes:
            old = fleet.homes.pop(name)
            fleet.deaf.pop(old, None)
            fleet.events.release(("", name), old)
            await until(lambda name=name, old=old: name not in fleet.views[old])  # type: ignore[misc]
        elif step == "restart":
            engine = draw.choice("ab")
            fleet.instances[engine] += 1
            fleet.views[engine] = {}
        elif step == "deaf":
            fleet.deaf[draw.choice("ab")] = draw.choice(["drops", "loses its answer"])
        elif step == "heal":
            fleet.deaf.clear()
    fleet.deaf.clear()
    fleet.now_s += 10.0
    for name in truth:
        await turn(name, None)


async def test_of_programs_and_their_events_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_events, "MAX_PROGRAMS", 100)
    monkeypatch.setattr(program_events, "MAX_UNSENT_OF_PROGRAM", 100)
    monkeypatch.setattr(program_events, "MAX_UNSENT", 150)
    monkeypatch.setattr(program_events, "MAX_TOTAL_GRAPH_BYTES", 10_000)
    fleet = Fleet()
    for seq in range(1000):
        await fleet.post(ProgramStart(program_id=f"p{seq}", seq=seq))
        report = AegReport(program_id="q", seq=2 * seq, graph_hash=f"h{seq}", graph=GRAPH)
        await fleet.post(report, ToolStart(program_id="q", seq=2 * seq + 1, call_id=f"c{seq}", tool="sh"))
    assert len(fleet.events.programs) == 100
    assert 100 < sum(len(one.unsent) for one in fleet.events.programs.values()) <= 150
    fleet.homes = {"q": "a", "p0": "a", "p999": "a"}
    for name in fleet.homes:
        await fleet.events.replay_before_request(("", name), "a")
    assert len(fleet.views["a"]["q"].numbers) < 200
    assert "c999" in fleet.views["a"]["q"].running
    assert fleet.views["a"]["p999"].started
    assert "p0" not in fleet.views["a"], "it is forgotten"
    fleet.now_s += SILENT_PROGRAM_S + 1.0
    tool = ToolStart(program_id="r", seq=1, call_id="c", tool="sh")
    await fleet.post(Heartbeat(program_id="q", seq=9999), tool)
    assert len(fleet.events.programs) <= 2, "the others are silent"


# -- a former home is told that it may drop KV --------------------------------------------


async def test_a_program_that_is_back_is_not_ended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_events, "RELEASE_DELAY_S", 0.05)
    fleet = Fleet()
    for former, home in ("ab", "ba"):  # it came back before any request of it went
        fleet.views[former]["p"], fleet.homes["p"] = View(), home
        fleet.events.leave(("", "p"), former)
    await until(lambda: not fleet.events.leaving)
    await until(lambda: "p" not in fleet.views["b"])
    assert "p" in fleet.views["a"]


async def test_an_old_replica_keeps_kv_while_a_request_waits_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program_events, "RELEASE_DELAY_S", 0.02)
    fleet, looks = Fleet(), list[Any]()
    monkeypatch.setattr(fleet, "is_waiting", lambda *key: looks.append(key) or True)
    fleet.views["a"]["p"], fleet.homes["p"] = View(), "b"
    fleet.events.leave(("", "p"), "a")
    await until(lambda: len(looks) >= 3)
    assert "p" in fleet.views["a"]
    # It went to its second home only after the first was gone: the KV is where it was before both.
    await fleet.events.prepare(("", "p"), routing_events.SendRequest("r", "b", "lost"), None)
    assert fleet.persisted == ["a"]
    await until(lambda: "p" not in fleet.views["a"])
