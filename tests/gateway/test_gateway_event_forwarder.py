"""What programs say of themselves reaches the engines that serve them, and no other tenant's programs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import World, until, world
from hypothesis import given
from hypothesis import strategies as st
from sojourn.wire_codec import MAX_BATCH_BYTES, MAX_BATCH_EVENTS, EventBatch, EventOutcome, Outcome, encode
from sojourn.wire_events import AegGraph, AegNode, AegReport, Heartbeat, ProgramStart, ToolStart, ToolStop
from sojourn_server.core.client_event_decoder import MAX_ATTACHED_EVENTS
from sojourn_server.gateway.http import program_migrator
from sojourn_server.gateway.http.ordered_sender import OrderedSender, split_batch
from sojourn_server.gateway.http.program_event_records import (
    MAX_RUNNING_TOOLS,
    MAX_UNDELIVERED_EVENTS,
    ProgramEventRecords,
    TenantBoundedCache,
)
from sojourn_server.routing import routing_events
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

IN_TURN = 'routing = "round-robin"'
TENANTS = {"ka": "alice", "kb": "bob"}
START = {"type": "program_start", "seq": 0, "agent_type": "coder"}
TOOL = {"type": "tool_start", "seq": 1, "call_id": "c", "tool": "bash"}
STOP = {"type": "tool_stop", "seq": 2, "call_id": "c", "duration_s": 1.0}
END = {"type": "program_end", "seq": 3, "status": "cancelled"}


def riding(program: str, *events: dict[str, Any], **own: Any) -> dict[str, Any]:
    """A hint with events in it."""
    context = {"program_id": program, "sojourn": {"v": 1, "emitter": "em", "events": list(events), **own}}
    return {"vllm_xargs": {"agentic_context": json.dumps(context), "other": 1}}


def rode(fake: FakeEngine) -> list[tuple[str, str]]:
    """Types and programs of the events in the hint of an engine's last request."""
    context = json.loads(fake.requests[-1]["vllm_xargs"]["agentic_context"])
    return [(event["type"], event["program_id"]) for event in context["sojourn"]["events"]]


def of(fakes: list[FakeEngine], name: str | None) -> FakeEngine:
    """The engine of this replica."""
    return next(fake for fake in fakes if name is not None and name.split("/")[0] == fake.name)


async def drain(it: World, replica: str) -> None:
    """Its programs move at their next turns."""
    url = f"{it.url}/sojourn/v1/replicas/{replica.replace('/', '%2F')}/drain"
    async with it.http.post(url, headers={"Authorization": "Bearer root"}) as answer:
        assert answer.status == 200, await answer.text()


def graph(number: int, nodes: int = 1000) -> dict[str, Any]:
    """One of about 100 bytes a node."""
    return {"nodes": [{"id": f"{number}-{node}-" + "x" * 80} for node in range(nodes)], "edges": []}


# -- events that ride ----------------------------------------------------------------


async def test_another_tenants_program_is_not_ended_by_events_that_ride() -> None:
    hint = riding("mine", {**END, "program_id": "victim"}, {**TOOL, "program_id": "mine"})
    async with engines(1) as fakes, world(fakes, tenants=TENANTS) as it:
        await it.chat("victim", key="ka")
        assert (await it.chat(key="kb", temperature=0.5, **hint)).status == 200
        assert rode(fakes[0]) == [("tool_start", "bob/mine")]
        assert fakes[0].requests[-1]["vllm_xargs"]["other"] == 1
        assert fakes[0].requests[-1]["temperature"] == 0.5
        assert await it.home("victim") == fakes[0].name
        assert fakes[0].of("alice/victim") == []


async def test_nor_by_those_of_a_request_of_no_program() -> None:
    async with engines(1) as fakes, world(fakes, tenants=TENANTS) as it:
        await it.chat("victim", key="ka")
        hint = riding("victim", {**END, "program_id": "victim"}, implicit=True)
        assert (await it.chat(key="kb", **hint)).status == 200
        assert rode(fakes[0]) == [("program_end", "bob/victim")]
        assert await it.home("victim") == fakes[0].name
        assert fakes[0].of("alice/victim") == []


async def test_events_that_may_ride_leave_the_body_as_it_came() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        await it.chat("q")
        hint = riding("p", {**START, "program_id": "p"}, {**TOOL, "program_id": "q"}, {"type": "nonsense"})
        body = json.dumps({"messages": [], **hint}, indent=3).encode()
        async with it.http.post(f"{it.url}/v1/chat/completions", data=body) as answer:
            assert answer.status == 200
        assert dict(fakes[0].raw_headers[-1])[b"content-length"] == str(len(body)).encode()
        assert fakes[0].requests[-1] == json.loads(body)
        assert fakes[0].events == []


async def test_events_that_ride_go_to_the_home_of_their_program() -> None:
    async with engines(2) as fakes, world(fakes, preset=IN_TURN) as it:
        homes = {name: (await it.chat(name)).headers["X-Sojourn-Replica"] for name in ("p", "q", "r")}
        assert homes["p"] != homes["q"]
        tool = {**TOOL, "program_id": "q"}
        answer = await it.chat(**riding("x", {**TOOL, "program_id": "p"}, tool, {**STOP, "program_id": "x"}))
        at = of(fakes, answer.headers["X-Sojourn-Replica"])
        other = next(fake for fake in fakes if fake is not at)
        here = [name for name in ("p", "q") if homes[name] == at.name]
        there = [name for name in ("p", "q") if homes[name] == other.name]
        assert rode(at) == [*(("tool_start", name) for name in here), ("tool_stop", "x")]
        await until(lambda: other.of(there[0]) == ["tool_start"])
        assert "em" in other.emitters
        assert at.events == []


async def test_what_rides_of_a_program_without_a_home_waits_for_one() -> None:
    async with engines(2) as fakes, world(fakes, preset=IN_TURN) as it:
        answer = await it.chat(**riding("parent", {**START, "program_id": "child"}))
        assert rode(of(fakes, answer.headers["X-Sojourn-Replica"])) == []
        home = (await it.chat("child")).headers["X-Sojourn-Replica"]
        assert of(fakes, home).of("child") == ["program_start"]


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
        await it.chat(**riding("p", *tools, stop, {"type": "nonsense"}, end))
        assert rode(fakes[0]) == [("tool_start", "p")] * MAX_ATTACHED_EVENTS
        await until(lambda: (fakes[0].of("p"), fakes[0].of("q")) == (["tool_stop"], ["program_end"]))
        await until(lambda: it.gateway.forwarder.home("default", "q") is None)
        record = it.gateway.forwarder.known.get(("default", "p"))
        assert record is not None
        assert set(record.tools) == {*calls[1:]}
        await it.chat("p")
        assert fakes[0].of("p") == ["tool_stop"], "nothing is sent twice"


async def test_the_end_of_another_program_that_rides_ends_that_one() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        for name in ("p", "q"):
            await it.chat(name)
            await it.events({**START, "program_id": name})
        await it.chat(**riding("p", {**END, "program_id": "q"}))
        assert rode(fakes[0]) == [("program_end", "q")]
        assert await it.home("q") is None
        assert it.gateway.forwarder.known.get(("default", "q")) is None
        assert it.gateway.forwarder.known.get(("default", "p")) is not None


# -- who has been told -----------------------------------------------------------------


async def test_the_replica_after_a_dead_one_gets_the_programs_events() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        old = of(fakes, (await it.chat("p")).headers["X-Sojourn-Replica"])
        new = next(fake for fake in fakes if fake is not old)
        small = graph(0, nodes=2)
        await it.events(
            {**START, "program_id": "p"},
            {**TOOL, "program_id": "p"},
            {"type": "aeg", "program_id": "p", "seq": 2, "graph_hash": "h", "graph": small},
        )
        await old.kill()
        assert (await it.chat("p")).headers["X-Sojourn-Replica"] == new.name
        # Its request waited for that.
        assert sorted(new.of("p")) == ["aeg", "program_start", "tool_start"]
        assert [event["graph"] for event in new.events if event["type"] == "aeg"] == [small]
        await it.chat("p")
        assert len(new.of("p")) == 3


async def test_a_restarted_engine_gets_its_programs_and_graphs_again() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        await it.chat("p")
        small = graph(0, nodes=2)
        report = {"type": "aeg", "program_id": "p", "graph_hash": "h"}
        await it.events({**START, "program_id": "p"}, {**report, "seq": 1, "graph": small})
        await fakes[0].kill()
        await until(lambda: it.gateway.monitor is not None and it.gateway.monitor.missing())
        fakes[0].events.clear()
        await fakes[0].restart()
        await until(lambda: it.gateway.monitor is not None and not it.gateway.monitor.missing())
        await it.chat("p")
        assert fakes[0].of("p") == ["program_start", "aeg"]
        fakes[0].events.clear()
        await it.chat("q")
        await it.events({**report, "program_id": "q", "seq": 2})
        assert [event.get("graph") for event in fakes[0].events] in ([None], [small])


async def test_a_graph_is_sent_in_full_until_an_engine_has_accepted_it() -> None:
    small = graph(0, nodes=2)
    report = {"type": "aeg", "graph_hash": "h"}
    async with engines(2) as fakes, world(fakes, preset=IN_TURN) as it:
        homes = [of(fakes, (await it.chat(name)).headers["X-Sojourn-Replica"]) for name in ("p", "q")]
        await it.events({**report, "program_id": "p", "seq": 1, "graph": small})
        homes[1].key = "it takes nothing"
        refused = await it.events({**report, "program_id": "q", "seq": 2})
        assert [one["outcome"] for one in refused] == ["rejected"]
        homes[1].key = None
        await it.events({**report, "program_id": "q", "seq": 3})
        assert homes[1].events[-1]["graph"] == small


async def test_a_graph_of_a_program_that_the_engine_did_not_know_is_sent_in_full_again() -> None:
    small = graph(0, nodes=2)
    report = {"type": "aeg", "graph_hash": "h"}

    async def take(self: FakeEngine, request: Request) -> Response:
        self.events += (found := (await request.json())["events"])
        outcome = "missing" if found[0]["program_id"] == "p" else "applied"
        labels = [{"outcome": outcome, "program_id": one["program_id"], "seq": one["seq"]} for one in found]
        return JSONResponse({"v": 1, "outcomes": labels})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "_take_events", take)
        async with engines(1) as fakes, world(fakes) as it:
            await it.events({**report, "program_id": "p", "seq": 0, "graph": small})
            await it.chat("p")
            assert fakes[0].of("p") == ["aeg"]
            await it.chat("q")
            for seq, shown in enumerate((small, None)):
                await it.events({**report, "program_id": "q", "seq": seq})
                assert fakes[0].events[-1].get("graph") == shown


async def test_a_tool_whose_stop_is_in_the_request_is_not_started_afterwards() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        await it.events({**START, "program_id": "p"}, {**TOOL, "program_id": "p"})
        await it.chat(**riding("p", {**STOP, "program_id": "p"}))
        await it.chat("p")
        assert fakes[0].of("p") == ["program_start"]


async def test_the_stop_of_a_tool_that_got_no_answer_is_sent_before_the_next_request() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        await it.chat("p")
        await it.events({**TOOL, "program_id": "p"})
        fakes[0].deaf = True
        assert [one["outcome"] for one in await it.events({**STOP, "program_id": "p"})] == ["missing"]
        fakes[0].deaf = False
        for _ in range(2):
            await it.chat("p")
            assert fakes[0].of("p") == ["tool_start", "tool_stop"]


async def test_a_tool_that_the_engine_may_have_handled_is_not_counted_twice() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        await it.chat("p")
        fakes[0].deaf = True
        await it.events({**TOOL, "program_id": "p"}, {**STOP, "program_id": "p"})
        fakes[0].deaf = False
        await it.chat("p")
        assert "tool_start" not in fakes[0].of("p")


async def test_events_in_a_request_are_not_sent_again() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        for _ in range(2):
            await it.chat(**riding("p", {**START, "program_id": "p"}, {**TOOL, "program_id": "p"}))
        assert fakes[0].events + fakes[1].events == []


async def test_a_request_does_not_wait_long_for_an_engine_that_does_not_listen() -> None:
    async def deaf(self: FakeEngine, request: Request) -> Response:
        await asyncio.sleep(3600)
        return Response()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "_take_events", deaf)
        async with engines(1) as fakes, world(fakes) as it:
            await it.events({**START, "program_id": "p"})
            assert (await asyncio.wait_for(it.chat("p"), 30)).status == 200


# -- who is left ------------------------------------------------------------------------


async def test_ranks_of_one_engine_get_no_release_for_a_move_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def two(self: FakeEngine, request: Request) -> Response:
        info = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1.0\n'
        return PlainTextResponse("process_start_time_seconds 1\n" + "".join(info % rank for rank in (0, 1)))

    monkeypatch.setattr(FakeEngine, "_metrics", two)
    async with engines(1) as fakes, world(fakes, admin_key="root") as it:

        async def both() -> bool:
            return len(await it.gateway.routing_backend.replicas()) == 2

        await until(both)
        home = (await it.chat("p")).headers["X-Sojourn-Replica"]
        await it.events({**START, "program_id": "p"})
        await drain(it, home)
        assert (await it.chat("p")).headers["X-Sojourn-Replica"] != home
        # Whatever is said of it now comes after what was said before.
        await it.events({**TOOL, "program_id": "p"})
        assert "program_end" not in fakes[0].of("p")


class _Late:
    """A world whose old replicas are told early, and a program's home as the test says."""

    def __init__(self, it: World, patch: pytest.MonkeyPatch) -> None:
        self.home: str | None = None
        patch.setattr(it.gateway.routing_backend, "home", lambda tenant, program_id: self.home)
        self.migrator = it.gateway._migrator
        self.key = ("default", "p")

    def left(self, fake: FakeEngine, home: FakeEngine | None) -> None:
        self.home = home.name if home is not None else None
        self.migrator.release(routing_events.ReleaseProgramKv("p", fake.name, "default"))


async def test_a_program_that_is_back_is_not_ended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_migrator, "RELEASE_DELAY_S", 0.05)
    async with engines(2) as fakes, world(fakes) as it:
        late = _Late(it, monkeypatch)
        late.left(fakes[0], fakes[1])
        late.left(fakes[1], fakes[0])  # it came back before any request of it went
        await until(lambda: not late.migrator._leaving)
        await until(lambda: fakes[1].of("p") == ["program_end"])
        assert fakes[0].of("p") == []


async def test_a_home_that_died_meanwhile_does_not_end_a_program_where_it_goes_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program_migrator, "RELEASE_DELAY_S", 0.05)
    monkeypatch.setattr(program_migrator, "MAX_RELEASE_ATTEMPTS", 1_000_000)
    async with engines(2) as fakes, world(fakes) as it:
        late = _Late(it, monkeypatch)
        late.left(fakes[0], None)
        one = late.migrator._leaving[late.key][0]
        await until(lambda: one.times >= 2)
        late.home = fakes[0].name
        await late.migrator.prepare(late.key, fakes[0].name, None, "moved", None)
        assert not late.migrator._leaving
        assert fakes[0].of("p") == []


async def test_an_old_replica_keeps_kv_while_a_request_waits_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program_migrator, "RELEASE_DELAY_S", 0.02)
    async with engines(2, shared_disk=True) as fakes, world(fakes) as it:
        late = _Late(it, monkeypatch)
        with late.migrator.while_waiting(late.key):
            late.left(fakes[0], fakes[1])
            one = late.migrator._leaving[late.key][0]
            await until(lambda: one.times >= 3)
            assert fakes[0].of("p") == []
        # It went to its second home only after the first was gone: the KV is where it was before both.
        await late.migrator.prepare(late.key, fakes[1].name, None, "lost", None)
        assert fakes[0].persisted == ["p"]
        await until(lambda: fakes[0].of("p") == ["program_end"])


# -- how much is kept and said ------------------------------------------------------------


def test_of_a_program_only_the_newest_is_kept_and_graphs_are_shared() -> None:
    known = ProgramEventRecords()
    text = AegGraph(nodes=[AegNode(id="n" * 100) for _ in range(10)], edges=[])
    for number in range(1000):
        key = ("alice", f"p{number % 2}")
        report = AegReport(program_id=key[1], seq=number, graph_hash="h", graph=text)
        known.record_event(key, report, None, 0.0, delivered=False)
        start = ToolStart(program_id=key[1], seq=number, call_id=f"c{number}", tool="bash")
        known.record_event(key, start, None, 0.0, delivered=False)
    for name in ("p0", "p1"):
        told = known.get(("alice", name))
        assert told is not None
        assert len(told.tools) == MAX_RUNNING_TOOLS
        assert len(told.undelivered) == MAX_UNDELIVERED_EVENTS
        assert all(isinstance(one.event, ToolStart) for one in told.undelivered)
        assert told.graph is not None
        assert isinstance(told.graph.event, AegReport)
        assert told.graph.event.graph is None
    assert known.graph("alice", "h") == msgspec.Raw(encode(text))
    assert known.graph("bob", "h") is None
    assert known.forget(("alice", "p0"))
    assert known.get(("alice", "p0")) is None


def test_a_tenant_that_invents_programs_forgets_its_own() -> None:
    known = ProgramEventRecords(most_programs=100)
    known.record_event(("bob", "b"), ProgramStart(program_id="b", seq=0), None, 0.0, delivered=False)
    for number in range(1000):
        start = ProgramStart(program_id=f"a{number}", seq=0)
        known.record_event(("alice", f"a{number}"), start, None, 0.0, delivered=False)
    assert len(known) == 100
    assert known.get(("bob", "b")) is not None
    assert known.get(("alice", "a900")) is None
    assert known.get(("alice", "a999")) is not None


def test_programs_whose_clients_were_killed_are_forgotten() -> None:
    known = ProgramEventRecords(silent_s=100)
    for number in range(1000):
        name = f"p{number}"
        known.record_event(
            ("alice", name), ProgramStart(program_id=name, seq=0), None, float(number), delivered=True
        )
        if number:
            known.record_event(
                ("alice", "p0"), Heartbeat(program_id="p0", seq=number), None, float(number), delivered=True
            )
    assert len(known) <= 103, "those of the last 100 s"
    assert known.get(("alice", "p0")) is not None, "its heartbeats go on"
    assert known.get(("alice", "p800")) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(1, 5)), max_size=80))
def test_shared_memory_is_bounded_for_any_mix_of_tenants(
    puts: list[tuple[str, int, int]],
) -> None:
    shared: TenantBoundedCache[int] = TenantBoundedCache(20)
    for tenant, name, weight in puts:
        shared.put((tenant, str(name)), name, weight)
        held = {key: weight for key, (_, weight) in _items(shared)}
        assert sum(held.values()) <= 20
        assert shared._weight == sum(held.values())
        assert len(shared) == len(held)
        assert shared.get((tenant, str(name))) in (name, None)


def _items(shared: TenantBoundedCache[int]) -> list[tuple[tuple[str, str], tuple[int, int]]]:
    return [((tenant, name), value) for tenant, of in shared._values.items() for name, value in of.items()]


def test_a_tool_that_ran_without_a_home_is_sent_as_start_and_stop() -> None:
    known = ProgramEventRecords()
    key = ("default", "p")
    known.record_event(
        key, ToolStart(program_id="p", seq=0, call_id="c", tool="sh"), None, 0.0, delivered=False
    )
    known.record_event(
        key, ToolStop(program_id="p", seq=1, call_id="c", duration_s=1.0), None, 0.0, delivered=False
    )
    told = known.get(key)
    assert told is not None
    assert [type(one.event) for one in told.events_to_send()] == [ToolStart, ToolStop]


@given(st.lists(st.integers(2, MAX_BATCH_BYTES // 2), max_size=20), st.integers(0, 3000))
def test_batches_are_as_long_as_an_engine_takes(sizes: list[int], small: int) -> None:
    events = [msgspec.Raw(b'"' + b"x" * (size - 2) + b'"') for size in sizes] + [msgspec.Raw(b"{}")] * small
    batch = EventBatch(v=1, emitter='e"' * 100, events=events, dropped=2**40)
    parts = list(split_batch(batch))
    assert [raw for part in parts for raw in part.events] == events
    assert all(
        len(part.events) <= MAX_BATCH_EVENTS and len(encode(part)) <= MAX_BATCH_BYTES for part in parts
    )


async def test_graphs_that_are_spelt_out_come_in_batches_that_engines_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes = FakeEngine._take_events

    async def bounded(self: FakeEngine, request: Request) -> Response:
        if len(await request.body()) > MAX_BATCH_BYTES:
            return JSONResponse({"error": "too long"}, 413)
        return await takes(self, request)

    monkeypatch.setattr(FakeEngine, "_take_events", bounded)
    async with engines(2) as fakes, world(fakes, preset=IN_TURN) as it:
        for name in ("p", "q"):
            await it.chat(name)
        report = {"type": "aeg", "program_id": "p"}
        for number in range(4):
            told = {**report, "seq": number, "graph_hash": f"h{number}", "graph": graph(number)}
            assert [one["outcome"] for one in await it.events(told)] == ["applied"]
        short = [{**report, "program_id": "q", "seq": n, "graph_hash": f"h{n}"} for n in range(4)]
        outcomes = await it.events(*short)
        assert [(one["outcome"], one["seq"]) for one in outcomes] == [("applied", n) for n in range(4)]
        other = of(fakes, await it.home("q"))
        assert [event["graph"] for event in other.events] == [graph(n) for n in range(4)]


async def test_an_end_that_an_engine_does_not_know_or_take_names_its_program() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        end = {"type": "program_end", "program_id": "nobody", "seq": 3}
        assert await it.events(end) == [
            {"outcome": "missing", "reason": "unknown program", "program_id": "nobody", "seq": 3}
        ]
        for name in ("p", "q"):
            await it.chat(name)
        fakes[0].key = "another"
        assert await it.events({**end, "program_id": "p"}) == [
            {"outcome": "rejected", "reason": "the engine refuses this key", "program_id": "p", "seq": 3}
        ]
        fakes[0].key, fakes[0].deaf = None, True
        assert await it.events({**end, "program_id": "q"}) == [
            {"outcome": "missing", "reason": "its replica did not answer", "program_id": "q", "seq": 3}
        ]


async def test_the_gateways_events_arrive_in_order_at_a_slow_engine() -> None:
    heard: list[bytes] = []
    first = asyncio.Event()

    async def post(url: str, batch: EventBatch, authorization: str | None) -> list[EventOutcome]:
        if not heard:
            await first.wait()
        heard.extend(bytes(raw) for raw in batch.events)
        return [EventOutcome(outcome=Outcome.APPLIED)] * len(batch.events)

    speaker = OrderedSender("http://e", "g", post)
    said = [speaker.send([msgspec.Raw(b"%d" % number)], None) for number in range(5)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert heard == []
    first.set()
    assert await asyncio.gather(*said) == [[EventOutcome(outcome=Outcome.APPLIED)]] * 5
    assert heard == [b"0", b"1", b"2", b"3", b"4"]
    await until(lambda: speaker.idle)


async def test_an_engine_that_does_not_listen_is_not_talked_to_for_ever() -> None:
    now = [0.0]
    asked = []

    async def post(url: str, batch: EventBatch, authorization: str | None) -> None:
        asked.append(batch)
        now[0] += 6.0

    speaker = OrderedSender("http://e", "g", post, lambda: now[0])
    said = [speaker.send([msgspec.Raw(b"1")], None) for _ in range(50)]
    assert await asyncio.gather(*said) == [[]] * 50
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("outcomes", "yielding", "understood"),
    [
        (["applied"], (("bob", "p"), ("bob", "q")), True),
        (["missing", "applied"], (("bob", "q"),), True),
        (["rejected"], (), True),
        ([], (), False),
        (None, (), False),
    ],
    ids=["all", "one", "none", "no outcomes", "stock"],
)
async def test_an_engine_is_ordered_to_let_requests_yield_and_only_those_that_do_count(
    outcomes: list[str] | None,
    yielding: tuple[tuple[str, str], ...],
    understood: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engines(2) as fakes, world(fakes, tenants=TENANTS) as it:
        fakes[0].yield_outcomes = outcomes
        backend, told = it.gateway.routing_backend, []
        order = routing_events.YieldPrograms(fakes[0].name, "alice", "p", (("bob", "p"), ("bob", "q")), "u")
        before, backend.tell = backend.tell, lambda event: (told.append(event), before(event))
        backend.on_control_action(order)
        answer = routing_events.YieldAnswered(fakes[0].name, "u", yielding, understood)
        await until(lambda: answer in told)
        assert fakes[0].yields == [{"to": "alice/p", "programs": ["bob/p", "bob/q"]}]
        assert fakes[1].yields == []
        async with it.http.get(f"{it.url}/metrics") as page:
            text = await page.text()
        assert f"sojourn_gateway_yields_total {len(yielding)}.0" in text
        assert f"sojourn_gateway_refused_yields_total {2 - len(yielding)}.0" in text
        assert ("did not accept a yield order" in caplog.text) == (not understood)


async def test_an_order_to_an_engine_that_is_not_there_is_answered() -> None:
    async with engines(1) as fakes, world(fakes, tenants=TENANTS) as it:
        await fakes[0].kill()
        answers: list[routing_events.YieldAnswered] = []
        it.gateway.routing_backend.tell = lambda event: (
            answers.append(event) if isinstance(event, routing_events.YieldAnswered) else None
        )
        for replica in (fakes[0].name, "unknown"):
            it.gateway.routing_backend.on_control_action(
                routing_events.YieldPrograms(replica, "alice", "p", (("bob", "p"),), "u")
            )
        await until(lambda: len(answers) == 2)
        assert {one.replica_id for one in answers} == {fakes[0].name, "unknown"}
        assert all((one.to_request_id, one.programs) == ("u", ()) for one in answers)
