"""What a request says, and how its program's unsent events ride along exactly once."""

from __future__ import annotations

import time

import pytest
import sojourn
from sdk_records import context_of
from sojourn import dialects
from sojourn.hints import AgenticContext, SojournContext
from sojourn.program import ResolvedContext, add_resolver, remove_resolver
from sojourn.request import Turn
from sojourn.wire_codec import MAX_CONTEXT_BYTES, decode_context, decode_event


@pytest.fixture
def slow(online):
    """A session whose sender lingers so long that every event is still there for the next request."""
    sojourn.runtime.session().event_sender._linger_s = 0.5
    return online


def test_every_hint_has_its_field(online):
    with (
        sojourn.program(
            "fix", id="child", agent_type="coder", parent="top", priority=3, deadline_s=60, blocks_parent=True
        ),
        sojourn.step("plan", step_id="s1", expected_output_length=200, kv_retention_ttl_s=7.5),
    ):
        body = sojourn.request_fields()
        headers = sojourn.headers()
    context = context_of(body)
    assert 59 < context.deadline_seconds <= 60
    assert context == AgenticContext(
        program_id="child",
        parent_program_id="top",
        root_program_id="top",
        blocks_parent=True,
        request_id=context.request_id,
        step_id="s1",
        priority=3,
        deadline_seconds=context.deadline_seconds,
        expected_output_length=200,
        kv_retention_ttl_seconds=7.5,
        sojourn=SojournContext(agent_type="coder", node="plan", heartbeat=True),
    )
    assert headers == {"X-Session-ID": "child"}
    with sojourn.program(), sojourn.step(final=True):
        last = context_of()
    assert (last.sojourn.final, last.expected_resume) == (True, False)


def test_a_deadline_runs_down_and_stops_at_nothing(online, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(sojourn.runtime, "clock", lambda: now[0])
    with sojourn.program(deadline_s=10):
        now[0] += 4
        assert context_of().deadline_seconds == 6.0
        now[0] += 60
        assert context_of().deadline_seconds == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expected_output_length", float("nan")),
        ("expected_output_length", -1),
        ("priority", "urgent"),
        ("deadline_s", float("inf")),
        ("kv_retention_ttl_s", -0.1),
        ("final", "maybe"),
        *(("expected_steps_left", value) for value in (-1, float("inf"), "few", True)),
    ],
)
def test_a_senseless_hint_at_run_time_is_dropped_alone(online, name, value):
    with sojourn.program(), sojourn.step("n", **{"priority": 4, name: value}):
        context = context_of()
    assert sojourn.stats()["hint_invalid"] == 1
    assert context.sojourn.node == "n"
    assert context.priority == (None if name == "priority" else 4)
    assert context.sojourn.expected_steps_left is None


def steps_left() -> float | None:
    return context_of(sojourn.request_parts()[0]).sojourn.expected_steps_left


@pytest.mark.parametrize("hints", [{}, {"priority": 1}])
def test_a_limit_of_steps_counts_down_with_the_turns_and_stops_at_nothing(online, hints):
    with sojourn.program(max_steps=4, **hints):
        sojourn.headers()
        assert steps_left() == 3
        assert context_of().sojourn.expected_steps_left == 2
        with sojourn.step(expected_steps_left=9.5), sojourn.step("inner"):
            assert steps_left() == 9.5
        with sojourn.step("without a number"):
            assert [steps_left(), steps_left()] == [0, 0]
    with sojourn.program(max_steps=1.5, **hints):
        assert [steps_left(), steps_left()] == [0.5, 0]


def test_a_request_takes_its_own_programs_events_only(slow):
    with sojourn.program() as outer, sojourn.program():
        context = context_of(sojourn.request_parts()[0])
        assert {decode_event(raw).program_id for raw in context.sojourn.events} == {context.program_id}
        other = context_of(sojourn.request_parts(outer)[0])
        assert other.program_id == outer.id
        assert {decode_event(raw).program_id for raw in other.sojourn.events} == {outer.id}


def test_at_most_64_events_and_16_kib_ride_the_rest_is_sent(slow):
    with sojourn.program(id="p" * 256):
        for n in range(60):
            with sojourn.tool_call("t" * 200, f"{n:0200}"):
                pass
        body, _ = sojourn.request_parts()
    text = body["vllm_xargs"]["agentic_context"]
    assert MAX_CONTEXT_BYTES * 0.4 < len(text.encode()) <= MAX_CONTEXT_BYTES
    riding = [decode_event(raw).seq for raw in decode_context(text).sojourn.events]
    assert sojourn.flush(60)
    sent = [e.seq for e in slow.events()]
    assert riding + sent == list(range(122))

    with sojourn.program():
        for _ in range(50):
            with sojourn.tool_call("t", "c"):
                pass
        assert len(context_of(sojourn.request_parts()[0]).sojourn.events) == 64
        assert len(context_of(sojourn.request_parts()[0]).sojourn.events) == 37


def attempt(turn):
    """Return the text of one attempt's context, and the sequence numbers of the events in it."""
    body, headers = turn.context_parts(take=True)
    assert headers["X-Session-ID"] == turn.program.id
    text = body["vllm_xargs"]["agentic_context"]
    return text, [decode_event(raw).seq for raw in decode_context(text).sojourn.events]


def test_a_retry_whose_events_have_grown_returns_the_newest(slow, monkeypatch):
    """Ages have more digits at each attempt."""
    with sojourn.program():
        for n in range(20):
            with sojourn.tool_call("search_code", f"call_{n:024}"):
                pass
        turn = Turn(sojourn.runtime.session())
        text, seqs = attempt(turn)
        assert seqs == list(range(41))
        monkeypatch.setattr(dialects, "MAX_CONTEXT_BYTES", len(text))
        monkeypatch.setattr(sojourn.runtime, "clock", lambda: time.monotonic() + 1000)
        shorter, again = attempt(turn)
        assert len(shorter) <= len(text)
        assert again == list(range(20))
        turn._taken = []  # as of an answered request
    assert sojourn.flush(60)
    assert [e.seq for e in slow.events()] == [*range(len(again), 41), 41]
    assert sojourn.stats()["events_returned"] == 41 - len(again)
    assert sojourn.stats()["inject_error"] == sojourn.stats()["internal_error"] == 0


@pytest.mark.parametrize(
    ("program_id", "header"),
    [("100%-sure", "100%-sure"), ("a/b:c?d", "a/b:c?d"), ("two words", "two%20words"), ("é%", "%C3%A9%25")],
)
def test_an_id_never_breaks_the_header_it_travels_in(online, program_id, header):
    with sojourn.program(id=program_id):
        assert sojourn.headers() == {"X-Session-ID": header}


def test_adapters_answer_where_our_own_context_cannot(online):
    inner = sojourn.program(id="by-framework").make()
    inner.depth = 1

    def resolver():
        return ResolvedContext(inner, "model")

    def broken():
        raise RuntimeError

    try:
        with sojourn.program(id="outer"), sojourn.step("outer-node"):
            add_resolver(resolver)
            add_resolver(broken)
            context = context_of()
            assert sojourn.current_program() is inner
            with sojourn.program() as deeper:  # deeper than what the framework knows
                assert sojourn.current_program() is deeper
                assert deeper.parent_id == "by-framework"
    finally:
        remove_resolver(resolver)
        remove_resolver(broken)
    assert (context.program_id, context.sojourn.node) == ("by-framework", "model")
    assert sojourn.stats()["resolver_error"] >= 1
