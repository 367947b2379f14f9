"""No tenant speaks as another's program, sees its names, or is taken for it; and no key goes where it need
not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import engines
from gateway_harness import World, hint, until, world
from hypothesis import given
from hypothesis import strategies as st
from sojourn.ids import MAX_ID_BYTES
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper

TENANTS = {"ka": "alice", "kb": "bob"}


# -- whose request it is ----------------------------------------------------------


@pytest.mark.parametrize("of_body", [True, False])
@pytest.mark.parametrize("header", [None, "bobs"])
async def test_a_session_in_the_body_names_no_other_tenants_program(
    of_body: bool, header: str | None
) -> None:
    forged = {"session_id": "alice/p"}
    more = forged if of_body else {"vllm_xargs": forged}
    async with engines(1) as (fake,), world([fake], tenants=TENANTS) as it:
        assert (await it.chat(header, key="kb", **more)).status == 200
        sent = fake.requests[-1] if of_body else fake.requests[-1]["vllm_xargs"]
        assert sent["session_id"] == "bob/alice/p"
        # The engine reads the body's, then the header's, then that of vllm_xargs.
        known = "alice/p" if of_body or header is None else header
        assert fake.headers[-1]["x-session-id"] == f"bob/{known}"
        shown = (await it.get("/sojourn/v1/programs", "kb"))["programs"]
        assert [one["program_id"] for one in shown] == [known]


# -- what is told of programs -----------------------------------------------------


async def test_evictions_do_not_name_another_tenants_program() -> None:
    turns = [
        {"program_id": "bob/p", "evictor": "alice/merger", "seconds": {"wall": 1.0}},
        {"program_id": "bob/p", "evictor": "bob/q"},
        {"program_id": "bob/p", "evictor": None},
        {"program_id": "bob/p", "evictor": "strangers"},
    ]
    about = {"program_id": "bob/p", "parent_program_id": "bob/q", "ledger": turns, "status": "acting"}
    async with engines(1) as [fake], world([fake], tenants=TENANTS, admin_key="root") as it:
        fake.about = about
        await it.chat("p", key="kb")
        engine = (await it.get("/sojourn/v1/programs/p", "kb"))["engine"]
        assert (engine["program_id"], engine["parent_program_id"], engine["status"]) == ("p", "q", "acting")
        assert {turn["program_id"] for turn in engine["ledger"]} == {"p"}
        assert [turn["evictor"] for turn in engine["ledger"]] == ["another", "q", None, "another"]
        assert engine["ledger"][0]["seconds"] == {"wall": 1.0}
        all_of_it = (await it.get("/sojourn/v1/programs/p", "root"))["engine"]["ledger"]
        assert [turn["evictor"] for turn in all_of_it] == ["alice/merger", "q", None, "strangers"]


# -- keys and conversations -------------------------------------------------------


async def test_the_operators_key_reaches_no_engine() -> None:
    async with engines(1) as [fake], world([fake], tenants=TENANTS, admin_key="root", poll_s=3600) as it:
        await it.chat("p", key="kb")
        fake.asked.clear()
        for path in ("/sojourn/v1/stats", "/v1/models", "/sojourn/v1/programs/p"):
            await it.get(path, "root")
        answer = await it.send("/tokenize", "root", json={"prompt": "x"}, headers={"X-API-Key": "root"})
        assert answer.status == 200
        assert len(fake.asked) >= 4
        assert {(key, other) for _, key, other in fake.asked} == {(None, None)}
        await it.get("/v1/models", "kb")
        assert fake.asked[-1] == ("/v1/models", "Bearer kb", None)


async def test_a_conversation_is_its_tenants() -> None:
    async with engines(1) as (fake,), world([fake], tenants=TENANTS, admin_key="root") as it:
        first = (await responded(it, "ka", input="x", request_id="job-17"))["id"]
        # The second one as after a restart, or at another gateway; the last two of no tenant here.
        fake.stored[first + "0"] = fake.stored["resp_1"] = fake.stored["job-17"] = {"id": "old"}
        assert first != "job-17", "another tenant could choose the same id"
        for name in (first, first + "0", "resp_1", "job-17"):
            assert "error" in await responded(it, "kb", input="x", previous_response_id=name)
            for method, path in (("GET", f"/v1/responses/{name}"), ("POST", f"/v1/responses/{name}/cancel")):
                answer = await it.send(path, "kb", method=method)
                assert (answer.status, ".;" in await answer.text()) == (404, False)
            assert await it.get(f"/v1/responses/{name}", "root")
        assert len(fake.requests) == 1
        for name in (first, first + "0"):
            assert (await it.get(f"/v1/responses/{name}", "ka"))["id"]
            assert "error" not in await responded(it, "ka", input="x", previous_response_id=name)
            assert fake.headers[-1]["x-session-id"] == f"alice/conversation-{name}"


async def responded(it: World, key: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = await (await it.send("/v1/responses", key, json=body)).json()
    return found


# -- two tenants may call their programs the same: engines hear of two, and each tenant of its own


TOOL = {"type": "tool_start", "program_id": "p", "seq": 1, "call_id": "c", "tool": "bash"}


# -- names ------------------------------------------------------------------------

TEXTS = st.text(min_size=1, max_size=120)


@given(tenants=st.sets(TEXTS, min_size=2, max_size=4), ids=st.sets(TEXTS, min_size=1, max_size=4))
def test_no_two_programs_have_the_same_name_and_each_is_an_id(tenants: set[str], ids: set[str]) -> None:
    names = ProgramIdMapper(sorted(tenants))
    keys = [(tenant, one) for tenant in tenants for one in ids]
    found = [names.engine_name(*key) for key in keys]
    assert len({*found}) == len(keys)
    for key, name in zip(keys, found, strict=True):
        assert 0 < len(name.encode()) <= MAX_ID_BYTES
        name.split("/")[0].encode("ascii")
        read = names.key(name)
        assert read == key or (read is not None and read[0] == key[0] and read[1].startswith("#"))


def test_names_can_be_read() -> None:
    names = ProgramIdMapper(["research", "a/b", "a"])
    assert names.engine_name("research", "agent-1") == "research/agent-1"
    assert names.engine_name("a", "b/c") == "a/b/c"
    assert names.engine_name("a/b", "c") == "a%2Fb/c"
    assert names.key("research/agent/1") == ("research", "agent/1")
    for nobodys in ("agent-1", "stranger/agent-1", "research/", ""):
        assert names.key(nobodys) is None


# -- requests ---------------------------------------------------------------------


async def test_every_id_of_a_hint_is_named_and_nothing_else_changed() -> None:
    more = {"parent_program_id": "q", "root_program_id": "r", "step_id": "p", "request_id": "p"}
    async with engines(1) as fakes, world(fakes, tenants=TENANTS) as it:
        child = {"type": "program_start", "program_id": "p", "seq": 0, "parent_program_id": "q"}
        sent = hint("p", child, {**TOOL, "call_id": "p"}, **more)  # its tenant is that of the key
        await it.chat("s", key="kb", temperature=0.5, **sent)
        assert fakes[0].requests[-1]["temperature"] == 0.5
        assert fakes[0].requests[-1]["vllm_xargs"]["other"] == 1
        named = {"program_id": "bob/p", "parent_program_id": "bob/q"}
        assert fakes[0].hint == {
            **json.loads(sent["vllm_xargs"]["agentic_context"]),
            **named,
            "root_program_id": "bob/r",
            "sojourn": {
                "v": 1,
                "tenant": "bob",
                "emitter": "em",
                "events": [
                    {**child, **named, "tenant": "bob"},
                    {**TOOL, "program_id": "bob/p", "call_id": "p"},
                ],
            },
        }
        assert fakes[0].headers[-1]["x-session-id"] == "bob/p"


@pytest.mark.parametrize("bad", ["{", json.dumps({"program_id": ""}), 7])
async def test_an_unreadable_hint_names_no_program(bad: Any) -> None:
    async with engines(1) as fakes, world(fakes, tenants=TENANTS) as it:
        more = {"vllm_xargs": {"agentic_context": bad, "other": 1}}
        assert (await it.chat("p", key="ka", **more)).status == 200
        assert fakes[0].requests[-1]["vllm_xargs"] == {"other": 1}
        assert fakes[0].headers[-1]["x-session-id"] == "alice/p"


# -- events and moves -------------------------------------------------------------


async def test_a_program_that_moves_takes_its_state_and_kv_along_and_no_other_tenants() -> None:
    options = {"preset": 'routing = "round-robin"', "tenants": TENANTS, "admin_key": "root"}
    async with engines(2, shared_disk=True) as fakes, world(fakes, **options) as it:
        at = {key: (await it.chat("p", key=key)).headers["X-Sojourn-Replica"] for key in TENANTS}
        old, new = sorted(fakes, key=lambda fake: fake.name == at["kb"])
        assert [old.name, new.name] == [at["ka"], at["kb"]], "both programs of the same id"
        old.persist_looks = 2
        ended = {**TOOL, "type": "tool_stop", "seq": 2, "duration_s": 1.0}
        start = {"type": "program_start", "program_id": "p", "seq": 0, "agent_type": "coder"}
        await it.events(start, TOOL, ended, {**TOOL, "seq": 3, "call_id": "d"}, key="ka")
        await it.events(TOOL, key="kb")
        await it.drain(old.name)
        assert (await it.chat("p", key="ka")).headers["X-Sojourn-Replica"] == new.name
        await until(lambda: new.of("alice/p") == ["program_start", "tool_start"])
        begun, running = (event for event in new.events if event["program_id"] == "alice/p")
        assert (begun["age_s"] >= 0, running["call_id"]) == (True, "d")
        await until(lambda: old.of("alice/p")[-1] == "program_end")
        assert old.persisted == ["alice/p"] * 3
        assert new.of("bob/p") == ["tool_start"], "the other's goes on as it was"
        for tenant, key in (("alice", "ka"), ("bob", "kb")):
            assert it.core.home(tenant, "p") == new.name
            shown = (await it.get("/sojourn/v1/programs", key))["programs"]
            assert [(one["program_id"], one["tenant"]) for one in shown] == [("p", tenant)]
            about = await it.get("/sojourn/v1/programs/p", key)
            assert (about["replica"], about["engine"]["program_id"]) == (new.name, "p")
        [move] = (await it.get("/sojourn/v1/moves", "ka"))["moves"]
        moved = {"program_id": "p", "moved_from": old.name, "moved_to": new.name}
        assert (
            moved | {"kv": "shared", "reason": "in_turn", "left_because": "drain"}
        ).items() <= move.items()
        assert (await it.get("/sojourn/v1/moves", "kb"))["moves"] == []
        # Later events find it where it is.
        await it.events({**ended, "seq": 4, "call_id": "d"}, key="ka")
        assert new.of("alice/p")[-1] == "tool_stop"
        await it.events({"type": "program_end", "program_id": "p", "seq": 2}, key="kb")
        assert new.of("bob/p")[-1] == "program_end"
        assert [it.core.home(tenant, "p") for tenant in ("alice", "bob")] == [new.name, None]
