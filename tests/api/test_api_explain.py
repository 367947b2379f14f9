"""Explanations of turns: each cause is made on purpose, and the explanation names it."""

from __future__ import annotations

from typing import Any

import pytest
from api_contract import VirtualRpc
from api_test_engines import check_error, client_of
from sojourn.wire_codec import Outcome
from sojourn.wire_events import ToolStart, ToolStop
from sojourn_server.api.response_merging import merge_program
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.core.scheduler_state import SchedulerLimits
from sojourn_server.metrics.turn_explanation import Explanation, explain, move_in_words
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.policies.placement.placement_policy import MoveReason
from virtual_engine import BASH, TOOL, VirtualEngine, prompt

CURVE = PrefillCurve(0.0, 0.0, 0.01)


def asked(virtual: VirtualEngine, program: str, turn: int | None = None, status: int = 200) -> Any:
    more = f"?turn={turn}" if turn is not None else ""
    answer = client_of(VirtualRpc(virtual)).get(f"/sojourn/v1/programs/{program}/explain{more}")
    if status != 200:
        return check_error(answer, status)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_expired_lease_is_named_with_its_taker_and_the_hint_that_would_have_helped() -> None:
    virtual = VirtualEngine("static-ttl", curve=CURVE)
    lease = virtual.turn("a", prompt(40))
    assert lease is not None
    virtual.wait(lease.ttl_s + 5.0)
    virtual.evict(prompt(40), by="thief")
    request = virtual.arrive("a", prompt(60))
    virtual.wait(1.5)
    virtual.admit(request)
    virtual.wait(0.25)
    virtual.finish(request)
    found = asked(virtual, "a", 2)
    assert found["seconds"]["queued"] == 1.5
    assert sum(found["seconds"][phase] for phase in ("queued", "prefilling", "decoding")) == pytest.approx(
        found["seconds"]["wall"]
    )
    tokens = found["tokens"]
    total = sum(tokens[name] for name in ("device", "host", "new", "tail")) + sum(tokens["lost"].values())
    assert total == tokens["prompt"] == 60
    assert list(tokens["lost"]) == ["expired"]
    assert found["lost_to"] == "thief"
    assert found["before"]["tool"] == TOOL
    assert {one["kind"] for one in found["decisions"]} >= {"keep", "release"}
    (advice,) = found["advice"]
    assert advice["hint"] == "kv_retention_ttl_seconds"
    assert f"the lease was {lease.ttl_s:.2f} s" in advice["text"]
    assert advice["saves_s"] == found["recompute_s"] > 0
    assert "by program thief" in found["text"]
    assert (found["slowest_turn"], asked(virtual, "a", 1)["slowest_turn"]) == (None, 2)
    assert found["unknown"] == []


def test_a_turn_that_waits_is_explained_while_it_waits() -> None:
    virtual = VirtualEngine()
    virtual.turn("a", prompt(8))
    virtual.arrive("a", prompt(20))
    virtual.wait(3.0)
    found = asked(virtual, "a")
    assert (found["turn"], found["outcome"], found["seconds"]["queued"]) == (2, "running", 3.0)
    assert found["tokens"] is None
    assert "no token yet after 3.00 s" in found["text"]


def waited(*moves: dict[str, Any], queued_s: float = 6.5) -> Explanation:
    """A turn that waited before ``moves`` let it on."""
    virtual = VirtualEngine("sojourn")
    virtual.turn("a", prompt(40))
    request = virtual.arrive("a", prompt(60))
    virtual.wait(queued_s)
    virtual.admit(request)
    virtual.wait(0.25)
    virtual.finish(request)
    facts = merge_program([virtual.ask("program", program_id="a")])
    assert facts is not None
    arrived_s = facts["ledger"][-1]["arrived_s"]
    facts["decisions"] = [
        {"seq": number, "at_s": arrived_s + move.pop("after_s"), "program_id": "a", **move}
        for number, move in enumerate(moves)
    ]
    found = explain(facts, 2)
    assert found is not None
    return found


def test_a_turn_that_waited_for_memory_says_so_first_and_the_advice_is_about_that() -> None:
    full = {"kind": "to_waiting", "reason": "over_capacity", "after_s": 0.0}
    back = {"kind": "to_device", "reason": "exchange", "price": 0.5, "after_s": 6.4}
    found = waited(full, back)
    first, second, *_ = found.text.split(". ")
    assert first == "Turn 2: 6.75 s to the first token, in the program's other turns 0.00 s (median)"
    assert second == (
        "It waited 6.50 s in the queue: the policy had taken the program off the device: the KV memory was "
        "full; it went on by the move to_device (exchange; price 0.5)"
    )
    assert found.advice[0].text.startswith("No hint: it waited for KV memory.")
    exchanged = waited({"kind": "to_host", "reason": "exchange", "after_s": 0.0}, {**back, "after_s": 6.4})
    assert exchanged.advice[0].text.startswith("No hint: it waited for KV memory.")


@pytest.mark.parametrize("text", ["done", BASH], ids=["no call in the output", "another call in the output"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_tool_whose_start_was_deferred_is_named_with_its_time(text: str, ends: bool) -> None:
    virtual = VirtualEngine()
    request = virtual.arrive("a", prompt(40))
    virtual.admit(request)
    virtual.wait(1.0)
    [told] = virtual.send(ToolStart(program_id="a", seq=-1, call_id="1", tool="half"))
    assert told.outcome is Outcome.DEFERRED
    virtual.finish(request, text)
    virtual.wait(0.5)
    if ends:
        virtual.send(ToolStop(program_id="a", seq=-1, call_id="1", duration_s=0.5))
    virtual.wait(3.0)
    virtual.turn("a", prompt(60))
    found = asked(virtual, "a", 2)
    assert (found["before"]["tool"], found["before"]["tool_s"]) == ("half", 0.5 if ends else None)
    told = "3.50 s passed: 0.50 s with a tool (half) and 3.00 s without"
    assert (told if ends else "3.50 s passed, in which the tool half ran") in found["text"]
    assert not any("whether a tool ran" in one for one in found["unknown"])


def test_a_turn_of_a_pair_is_told_as_its_prompt_and_the_gap_has_the_decoding() -> None:
    virtual = VirtualEngine()
    for number in (1, 2):
        request = virtual.arrive("a", prompt(20 * number))
        virtual.wait(0.5)
        virtual.admit(request)
        virtual.wait(0.25)
        virtual.finish(request, "", output=(), outcome=TurnFinishReason.PREFILLED)
        virtual.wait(4.0)
    found = asked(virtual, "a", 2)
    assert found["outcome"] == "prefilled"
    assert found["text"].startswith(
        "Turn 2: its prompt was computed after 0.75 s, and a decode engine wrote the answer. It waited "
        "0.50 s in the queue: the policy did not keep it out, it waited for running requests, for blocks or "
        "for KV from storage. 4.00 s passed between the turns, the decoding of the last answer included, and"
    )


def test_the_decision_at_the_turns_end_is_one_of_the_turn_however_its_times_are_rounded() -> None:
    virtual = VirtualEngine("static-ttl")
    virtual.now = 79740.57861840239
    request = virtual.arrive("a", prompt(40))
    virtual.admit(request)
    virtual.now = 79749.41006959886
    virtual.finish(request)
    assert [one["kind"] for one in asked(virtual, "a")["decisions"]] == ["keep"]


def test_nothing_lost_is_said_and_an_unknown_turn_or_program_is_an_error() -> None:
    virtual = VirtualEngine()
    virtual.turn("a", prompt(8))
    found = asked(virtual, "a")
    assert found["advice"][0]["hint"] is None
    assert found["usual_first_token_s"] is None
    assert "1" in asked(virtual, "a", 7, status=404)["next"]
    asked(virtual, "x", status=404)


def test_tokens_lost_to_a_changed_beginning_are_no_fault_of_the_cache() -> None:
    virtual = VirtualEngine(curve=PrefillCurve(0.0, 1e-5, 0.0))
    virtual.turn("a", prompt(40))
    virtual.turn("a", [*prompt(20), *prompt(30, seed=7)])
    found = asked(virtual, "a", 2)
    assert list(found["tokens"]["lost"]) == ["changed"]
    n = found["tokens"]["lost"]["changed"]
    differ = f"{n} tokens differ from the previous context, counted from the block of the first changed token"
    assert differ in found["text"]
    assert "had been lost" not in found["text"]
    assert [one["text"] for one in found["advice"]] == [
        "Nothing was lost that a hint could have kept. The changed tokens are no fault of the cache: the "
        "client sent a different beginning (a re-tokenised answer or an edited history)."
    ]


def advice_after(virtual: VirtualEngine, gap_s: float, **hint: Any) -> Any:
    """The one advice about a turn whose context was evicted during the ``gap_s`` before it. ``hint``: fields
    of the turn before."""
    virtual.turn("a", prompt(40), **hint)
    virtual.wait(gap_s)
    virtual.evict(prompt(40), by="thief")
    virtual.turn("a", prompt(60))
    found = asked(virtual, "a", 2)
    assert found["recompute_s"] > 0
    (advice,) = found["advice"]
    return advice


def test_no_longer_hint_is_advised_than_the_engine_grants() -> None:
    limits = SchedulerLimits(max_hinted_ttl_s=30.0)
    advice = advice_after(VirtualEngine("static-ttl", curve=CURVE, limits=limits), 40.0)
    assert (advice["hint"], advice["saves_s"]) == (None, None)
    assert advice["text"].startswith(
        "No hint: the gap of 40.00 s is longer than any hinted TTL of this server (30 s; --sojourn-max-ttl-s)"
    )
    advice = advice_after(VirtualEngine("static-ttl", curve=CURVE, limits=limits), 29.42)
    assert advice["hint"] == "kv_retention_ttl_seconds"
    assert "A hinted TTL of 29.5 s or more" in advice["text"]
    assert advice["saves_s"] > 0


@pytest.mark.parametrize("reason", [reason.value for reason in MoveReason])
def test_each_reason_of_a_move_is_told_in_words(reason: str) -> None:
    kinds = ("to_device", "to_host", "to_disk", "to_waiting", "leaves_after_turn")
    words = [why for kind in kinds if (why := move_in_words(kind, reason).partition(": ")[2])]
    assert words
    assert not any(reason in why.split() for why in words)
