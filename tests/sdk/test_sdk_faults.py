"""Faults of the events endpoint, nesting and exceptions.

The agent's results are those of a run without the SDK, nothing hangs, and counters account for every event.
No heartbeat is due here, since a test on a busy machine may take longer than the heartbeat interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sojourn
from openai import OpenAI
from sdk_settings import resolve_with
from sojourn import runtime
from sojourn.config import Config
from sojourn.event_sender import EventSender
from sojourn.testing import FakeServer, ToolUse, refusing_url
from waiting import wait_until

SINKS = ("refused", "hang", "500", "404", "ok")
A, *OTHERS = (ToolUse("upper", {"text": text}, text) for text in "abcd")
SCRIPT = ["thinking", A, OTHERS, "done"]


UNTIL_THE_TEST_ENDS_S = 3600.0
"""Timeouts of the sender so long that a test fails on its own time limit if the agent waits for one."""


@pytest.fixture(autouse=True)
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "resolve", resolve_with(heartbeat_s=UNTIL_THE_TEST_ENDS_S))


@pytest.fixture(scope="module", autouse=True)
def threads_before() -> set[threading.Thread]:
    """Those of other files in this process, as of a gateway whose pool of threads stays."""
    return set(threading.enumerate())


@contextlib.contextmanager
def faulty(sink: str, script: Any = SCRIPT) -> Iterator[FakeServer]:
    """A model that answers, and a place for events that does what ``sink`` says."""
    with FakeServer(script) as server:
        if sink == "refused":
            sojourn.init(refusing_url(), hosts=[server.host], dialect="sojourn")
        else:
            server.mode = sink
            sojourn.init(server.url, probe_timeout_s=5)
        try:
            yield server
        finally:
            server.mode = "ok"
            sojourn.shutdown()


def accounted(told: int) -> sojourn.Stats:
    """Wait until every one of ``told`` events is counted, once, as sent, dropped or pending."""

    def total() -> int:
        stats = sojourn.stats()
        return (
            stats["events_sent"] + stats["events_piggybacked"] - stats["events_returned"]
            + stats["dropped_full"] + stats["dropped_send"] + stats["dropped_unsupported"]
            + stats.events_pending
        )  # fmt: skip

    wait_until(lambda: total() == told, lambda: f"{total()} of {told} events counted: {sojourn.stats()}")
    return sojourn.stats()


# -- an agent's loop --------------------------------------------------------------------


def loop(base_url: str) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with OpenAI(api_key="k", base_url=base_url) as client, sojourn.program("loop"):
        while messages[-1].get("content") != "done":
            answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls or ():
                with sojourn.tool_call(call.function.name, call.id):
                    result = json.loads(call.function.arguments)["text"].upper()
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


@pytest.mark.parametrize("sink", SINKS)
def test_an_agents_results_do_not_depend_on_the_sink(sink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = resolve_with(send_timeout_s=UNTIL_THE_TEST_ENDS_S, heartbeat_s=UNTIL_THE_TEST_ENDS_S)
    monkeypatch.setattr(Config, "resolve", patient)
    with FakeServer(SCRIPT) as server:
        plain = loop(server.base_url)
    with faulty(sink) as server:
        started = time.monotonic()
        ours = loop(server.base_url)
        took_s = time.monotonic() - started
        assert ours == plain
        assert took_s < 45, "the agent waited for the sender, whose server hangs for a minute"
        stats = accounted(10)
        assert stats["requests_started"] == stats["requests_ended"] == len(server.requests) == 4
        assert stats["internal_error"] == stats["inject_error"] == 0
        headers = {request.headers.get("x-session-id") for request in server.requests}
        assert len(headers) == 1
        assert headers != {None}, "whose turn it is rides on the request itself, sink or no sink"
        started = time.monotonic()
    assert time.monotonic() - started < 45, "shutdown() waits at most a second, not for the sender"


# -- what the user raises ---------------------------------------------------------------


class Odd(BaseException):
    """Of no known family."""


@pytest.fixture(params=["ok", "hang", "broken"])
def session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session that works, one whose server hangs, and one in which everything of ours raises."""
    with faulty("hang" if request.param == "hang" else "ok"):
        if request.param == "broken":

            def broken(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("ours")

            monkeypatch.setattr(EventSender, "put", broken)
            monkeypatch.setattr(runtime.session().heartbeats, "opened", broken)
        yield
        monkeypatch.undo()


RAISED = [
    ValueError("x"),
    KeyboardInterrupt(),
    SystemExit(3),
    asyncio.CancelledError(),
    Odd(),
    StopIteration(),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_the_user_raises_comes_out_as_it_went_in(session: None, error: BaseException) -> None:
    @sojourn.tool
    def tool() -> None:
        raise error

    @sojourn.program("decorated")
    def agent() -> None:
        with sojourn.program("block"), sojourn.step("s"), sojourn.tool_call("t"):
            tool()

    with pytest.raises(type(error)) as caught:
        agent()
    assert caught.value is error
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert sojourn.current_program() is None


# -- forks and signals ------------------------------------------------------------------


def test_no_thread_is_left(threads_before: set[threading.Thread]) -> None:
    def left() -> list[str]:
        return [t.name for t in set(threading.enumerate()) - threads_before if t.name.startswith("sojourn")]

    gc.collect()
    wait_until(lambda: not left(), left)
