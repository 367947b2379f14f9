"""Requests on two legs, over HTTP: what reaches the prefill engine, the decode engine, and the client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_pair_engine import pairs
from gateway_harness import hint, lines, until
from sojourn_server.routing.routing_limits import RoutingLimits


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
            "peer": decode.peer,
            "decode_reads": False,
        }
        assert (first["max_completion_tokens"], first["stream"], first["seed"]) == (1, False, 3)
        told = second.pop("kv_transfer_params")
        assert told == {
            "do_remote_prefill": True,
            "transfer": transfer["transfer"],
            "at": prefill.name,
        }
        assert (second["max_tokens"], second.get("stream", False)) == (50, stream)
        assert prefill.headers[0]["x-session-id"] == "p"
        assert decode.headers[0]["x-session-id"] == "p"
        await until(lambda: not it.core.requests)
        # No usage is in a stream: the prefill engine has counted the prompt.
        [shown] = (await it.get("/sojourn/v1/programs"))["programs"]
        assert shown["context_tokens"] == shown["size_tokens"] == 105


async def test_a_request_that_has_no_one_context_is_all_the_decode_engines() -> None:
    forged = {"do_remote_prefill": True, "transfer": "another's", "context": "another's"}
    async with pairs(1, 1) as (it, [prefill], [decode]):
        decode.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat("p", max_tokens=7, kv_transfer_params=forged, n=2))
        await until(lambda: decode.requests)
        [view] = it.core.strategy.pairs.prefill.values()
        assert view.tokens == 0
        decode.hold.set()
        assert (await asking).status == 200
        assert prefill.requests == []
        [sent] = decode.requests
        assert "kv_transfer_params" not in sent
        assert (sent["max_tokens"], sent["n"]) == (7, 2)
        await until(lambda: not it.core.requests)
        [program] = it.core.programs.values()
        assert program.home is None


# -- faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        *((role, how) for role in ("prefill", "decode") for how in ("gone", "no answer", "500")),
        ("decode", "error event"),
        ("prefill", "no KV"),
    ],
)
async def test_an_engine_that_dies_costs_a_repetition_and_no_request(lost: str, how: str) -> None:
    async with pairs(2, 2) as (it, prefill, decode):
        victim = (prefill if lost == "prefill" else decode)[0]
        stream = how == "error event"
        victim.refuses = 500 if how == "500" else None
        victim.says_nothing = how == "no KV"
        # An idle connection that breaks is taken for one that the engine had closed before.
        victim.break_before_first_byte = 4 if how == "no answer" else 0
        if how == "gone":
            await victim.kill()
        elif stream:
            victim.first_event = 'data: {"error": {"message": "KV load failed", "code": 500}}\n\n'
        answers = await asyncio.gather(*(it.chat(f"p{number}", stream=stream) for number in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        if stream:
            for answer in answers:
                assert [json.loads(line).get("number") for line in (await lines(answer))[:-1]] == [*range(5)]
        await until(lambda: not it.core.requests)
        if how == "gone":
            await until(lambda: victim.name not in it.core.fleet)
        else:
            assert sum(it.core.counts.routes.values()) > 4
        pushed = [one["kv_transfer_params"] for engine in prefill for one in engine.requests]
        peers = {one["transfer"]: one["peer"] for one in pushed}
        for engine in decode:
            for one in engine.requests:
                assert peers[one["kv_transfer_params"]["transfer"]] == engine.peer, "its KV goes there"


async def test_a_prefill_engines_rejection_reaches_the_client() -> None:
    async with pairs(1, 1) as (it, [prefill], [decode]):
        prefill.refuses = 400
        answer = await it.chat("p")
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, 400)
        assert not decode.requests
        await until(lambda: not it.core.requests)
        assert not it.core.programs, "nothing of it is stored"


@pytest.mark.parametrize("leg", ["first", "second"])
async def test_a_client_that_leaves_in_a_leg_ends_it(leg: str) -> None:
    # No poll, in which the prefill engine would report the program's KV.
    async with pairs(1, 1, poll_s=3600) as (it, [prefill], [decode]):
        engine = prefill if leg == "first" else decode
        engine.hold = asyncio.Event()
        asking = asyncio.ensure_future(it.chat("p"))
        await until(lambda: engine.requests)
        asking.cancel()
        await until(lambda: not it.core.requests)
        await until(lambda: engine.gave_up == 1)
        assert bool(decode.requests) is (leg == "second")
        assert not it.core.programs, "it never had an answer"
        counted = it.gateway.metrics.registry.get_sample_value
        await until(lambda: counted("sojourn_gateway_client_disconnects_total") == 1)


# -- what an operator does and sees -----------------------------------------------------


@pytest.mark.parametrize(("role", "how"), [("prefill", "gone"), ("decode", "gone"), ("decode", "refused"),
                                           ("prefill", "drained"), ("decode", "suspect")])  # fmt: skip
async def test_the_health_route_reports_a_missing_role(role: str, how: str) -> None:
    limits = RoutingLimits(lease_s=0.3)
    async with pairs(1, 1, admin_key="root", limits=limits) as (it, [prefill], [decode]):
        engine = prefill if role == "prefill" else decode
        engine.tells_paths, engine.silent = how != "refused", how == "suspect"
        if how == "gone":
            await engine.kill()
        elif how == "drained":
            await it.drain(engine.name)
        counts = {"prefill": 1, "decode": 1, role: 0}

        async def told() -> bool:
            answer = await it.send("/health", method="GET")
            document = await answer.json()
            assert answer.status == (200 if document["prefill"] and document["decode"] else 503)
            return {name: document[name] for name in counts} == counts

        await until(told)
        refused = (await it.get("/sojourn/v1/replicas")).get("refused", {})
        assert refused.keys() == ({engine.url} if how == "refused" else set())


async def test_engines_are_shown_with_what_they_do_and_how_their_links_are() -> None:
    async with pairs(1, 2) as (it, [prefill], decode):
        prefill.queued_s = 2.5

        async def told() -> bool:
            shown = (await it.get("/sojourn/v1/replicas"))["replicas"]
            return any(of["links"].get("storage read", {}).get("queued_s") == 2.5 for of in shown)

        await until(told)
        assert (await it.chat()).status == 200
        shown = {of["replica"]: of for of in (await it.get("/sojourn/v1/replicas"))["replicas"]}
        assert {name: of["role"] for name, of in shown.items()} == {
            prefill.name: "prefill",
            **dict.fromkeys((engine.name for engine in decode), "decode"),
        }
        assert shown[prefill.name]["node"] == prefill.at_node
        assert [of["health"] for of in shown.values()] == ["up"] * 3
        page = await it.metrics()
        role = f'node="{prefill.at_node}",replica="{prefill.name}",role="prefill"'
        assert f"sojourn_gateway_replica_role{{{role}}} 1.0" in page
        queue = f'sojourn_gateway_link_queued_seconds{{link="storage read",replica="{prefill.name}"}} 2.5'
        assert queue in page
        assert 'sojourn_gateway_requests_total{reason="pair"} 1.0' in page
        await prefill.kill()
        await until(lambda: prefill.name not in it.core.fleet)
        page = await it.metrics()
        assert prefill.name not in page
        assert decode[0].name in page
        assert 'sojourn_gateway_role_replicas{role="prefill"} 0.0' in page
        assert 'sojourn_gateway_role_replicas{role="decode"} 2.0' in page
        for health, number in (("up", 2.0), ("missing", 1.0)):
            assert f'sojourn_gateway_replicas{{health="{health}"}} {number}' in page
        assert (await it.get("/sojourn/v1/replicas"))["missing"] == [prefill.url]


async def test_the_end_of_a_program_reaches_both_engines_that_know_it() -> None:
    end = {"type": "program_end", "seq": 9, "program_id": "p", "status": "cancelled"}
    start = {"type": "program_start", "seq": 0, "program_id": "p"}
    async with pairs(1, 2) as (it, [prefill], decode):
        answered = (await it.chat("p")).headers["X-Sojourn-Replica"]
        await until(lambda: not it.core.requests)
        await it.events(start)
        [outcome] = await it.events(end)
        assert outcome["outcome"] == "applied"
        [answering] = [engine for engine in decode if engine.name == answered]
        assert prefill.of("p") == ["program_start", "program_end"]
        await until(lambda: answering.of("p") == ["program_end"])
        assert [engine.of("p") for engine in decode if engine is not answering] == [[]]
        assert not it.core.programs
        [again] = await it.events({**end, "seq": 10})
        assert again["outcome"] == "missing"
        # A program without an answer is at no engine.
        await it.events({**start, "program_id": "q"})
        [outcome] = await it.events({**end, "program_id": "q"})
        assert outcome["outcome"] == "applied"
        ends = 'sojourn_gateway_programs_finished_total{outcome="cancelled"}'
        assert f"{ends} 2.0" in await it.metrics()


def tool(kind: str, seq: int) -> dict[str, Any]:
    return {"type": kind, "seq": seq, "program_id": "p", "call_id": "c", "tool": "bash"}


@pytest.mark.parametrize("whole", [False, True], ids=["both engines", "the decode engine alone"])
async def test_a_programs_events_and_turns_go_to_the_engine_that_has_its_context(whole: bool) -> None:
    async with pairs(2, 1) as (it, prefill, [decode]):
        await it.chat("q", text="x" * 4000)  # so that the two have not the same load
        await it.chat("p", text="x" * 2000)
        await until(lambda: not it.core.requests)
        [home_id] = [one.home for key, one in it.core.programs.items() if key[1] == "p"]
        [home] = [engine for engine in prefill if engine.name == home_id]
        [other] = [engine for engine in prefill if engine is not home]
        before = len(other.requests)
        await it.events(tool("tool_start", 1))
        assert home.of("p") == ["tool_start"]
        stop = tool("tool_stop", 2)
        answer = await it.chat("p", text="x" * 2100, **hint("p", stop), **({"n": 2} if whole else {}))
        assert answer.status == 200
        if whole:
            assert home.of("p") == ["tool_start", "tool_stop"]
        else:
            assert home.attached == [("tool_stop", "p")]
        assert decode.attached == []
        assert len(other.requests) == before
        assert decode.of("p") == other.of("p") == []


async def test_events_and_kv_follow_a_program_to_another_prefill_engine() -> None:
    async with pairs(2, 1, admin_key="root") as (it, prefill, _):
        await it.chat("p")
        await until(lambda: not it.core.requests)
        home, other = sorted(prefill, key=lambda engine: not engine.requests)
        await it.events({"type": "program_start", "seq": 0, "program_id": "p"}, tool("tool_start", 1))
        await it.drain(home.name)
        assert (await it.chat("p")).status == 200
        assert other.of("p") == ["program_start", "tool_start"]
        await until(lambda: home.of("p")[-1] == "program_end")
        [move] = (await it.get("/sojourn/v1/moves", "root"))["moves"]
        moved = {"moved_from": home.name, "moved_to": other.name, "kv": "shared", "left_because": "drain"}
        assert moved.items() <= move.items()


async def test_a_conversation_of_which_an_engine_has_the_beginning_is_refused() -> None:
    async with pairs(1, 1) as (it, [prefill], _):
        body = {"model": "tiny", "input": "hi"}
        answer = await it.send("/v1/responses", json={**body, "previous_response_id": "resp_abc"})
        assert answer.status == 400
        assert "previous_response_id" in (await answer.json())["error"]["message"]
        assert not prefill.requests
        assert (await it.send("/v1/responses", json=body)).status == 200
        assert prefill.requests[0]["store"] is False
