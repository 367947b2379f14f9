"""Every framework with an events endpoint that is down, hangs, fails or is missing: results are unchanged.

The same scenarios as in the table, one of each row: the results are those of a run without us, nothing
waits for the sink, and every event is accounted for.
"""

from __future__ import annotations

import gc
import time
from functools import cache
from typing import Any

import pytest
import sojourn
from scenario_modules import Model, outcome, runnable_scenarios
from scenario_types import Scenario
from sdk_settings import resolve_with
from sojourn.config import Config
from sojourn.program import NO_CONTEXT, current_context
from sojourn.testing import FakeServer, refusing_url
from waiting import wait_until

pytestmark = [
    pytest.mark.slow,  # all together
    pytest.mark.timeout(60),  # AutoGen waits for ever where an exception of ours gets out
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),  # litellm's own, streaming
]

EVERY_ROW = ("refused", "hang")
ONE_ROW = ("500", "404")
"""What these do, they do to the sender alone: one row of each framework is enough."""
OURS = ("internal_error", "inject_error", "resolver_error", "listener_error", "encode_error")


def chosen() -> list[Any]:
    """The first scenario of each framework and row, with the sinks it is to meet."""
    first: dict[tuple[str, str], Scenario] = {}
    seen: set[str] = set()
    for scenario in runnable_scenarios():
        first.setdefault((scenario.framework, scenario.row), scenario)
    pairs = []
    for scenario in first.values():
        sinks = EVERY_ROW if scenario.framework in seen else (*EVERY_ROW, *ONE_ROW)
        seen.add(scenario.framework)
        pairs += [pytest.param(scenario, sink, id=f"{scenario.id}-{sink}") for sink in sinks]
    return pairs


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender waits for a hanging sink longer than a test may take; the exit waits a moment."""
    monkeypatch.setattr(Config, "resolve", resolve_with(send_timeout_s=3600.0, close_timeout_s=0.05))


def play(scenario: Scenario, sink: str | None) -> tuple[Any, FakeServer, sojourn.Stats]:
    """Run it; ``None`` is without us."""
    model = Model(scenario)
    with FakeServer(model) as server:
        if sink == "refused":
            sojourn.init(refusing_url(), hosts=[server.host], dialect="sojourn")
        elif sink is not None:
            server.mode = sink
            sojourn.init(server.url, probe_timeout_s=5)
        result = outcome(scenario, server.base_url, "tiny")
        gc.collect()
        assert current_context.get() is NO_CONTEXT
        if sink is not None:
            sojourn.flush(0.1)
        stats = settled() if sink is not None else sojourn.stats()
        sojourn.shutdown()
    assert model.ran_out == 0
    return result, server, stats


@cache
def without_us(scenario: Scenario) -> Any:
    """What comes out."""
    return play(scenario, None)[0]


def settled() -> sojourn.Stats:
    """Counts once every event that was queued is accounted for."""

    def accounted() -> bool:
        stats = sojourn.stats()
        gone = (
            stats["events_sent"] + stats["events_piggybacked"] - stats["events_returned"]
            + stats["dropped_send"] + stats.events_pending
        )  # fmt: skip
        # Events refused at once were not queued; events dropped with the queue were.
        return gone <= stats["events_queued"] <= gone + stats["dropped_unsupported"]

    wait_until(accounted, sojourn.stats)
    return sojourn.stats()


@pytest.mark.parametrize(("scenario", "sink"), chosen())
def test_a_faulty_sink_changes_nothing(scenario: Scenario, sink: str) -> None:
    plain = without_us(scenario)
    started = time.monotonic()
    ours, server, stats = play(scenario, sink)
    took_s = time.monotonic() - started
    assert ours == plain
    assert took_s < 45, "the agent waited for the sink, which hangs for a minute"
    assert not {name: stats[name] for name in OURS if stats[name]}
    requests = [request for request in server.requests if request.headers.get("x-session-id")]
    assert len(requests) == len(server.requests), "requests say whose they are, sink or no sink"
    if scenario.row != "cancel":
        assert stats["request_attempts"] == len(server.requests)
    assert stats["dropped_full"] == 0
    assert not server.batches
