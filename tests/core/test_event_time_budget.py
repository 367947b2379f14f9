"""Client events take 4 % of an engine's time, however many API servers send them."""

from __future__ import annotations

import heapq

import pytest
from sojourn.config import Config
from sojourn_server.api.routes import EVENTS_TIMEOUT_S
from sojourn_server.core.event_limits import EVENT_SHARE, MAX_WAIT_S, EventTimeBudget


@pytest.mark.parametrize("servers", [1, 2, 8, 32])
def test_servers_that_flood_share_one_engines_budget(servers: int) -> None:
    cost_s, now, busy_s = 0.0017, 0.0, 0.0
    budget = EventTimeBudget(now)
    due = [(0.0, server) for server in range(servers)]
    while now < 60.0:
        due_s, server = heapq.heappop(due)
        now = max(now, due_s) + cost_s  # the engine takes one call after the other
        busy_s += cost_s
        heapq.heappush(due, (now + budget.spend(cost_s, now), server))
    assert 0.8 * EVENT_SHARE <= busy_s / now <= 1.2 * EVENT_SHARE


def test_a_client_waits_longer_than_the_engine_pauses() -> None:
    assert MAX_WAIT_S < Config(url="http://e").send_timeout_s < EVENTS_TIMEOUT_S


def test_few_events_do_not_wait() -> None:
    budget = EventTimeBudget(0.0)
    assert all(budget.spend(0.001, now) == 0.0 for now in range(1, 100))


def test_one_slow_call_keeps_events_out_for_a_bounded_time() -> None:
    budget = EventTimeBudget(0.0)
    assert budget.spend(5.0, 5.0) == pytest.approx(MAX_WAIT_S)
    assert budget.spend(0.0, 5.0 + MAX_WAIT_S) == pytest.approx(0.0)
    assert budget.spend(0.0, 1.0) == pytest.approx(0.0)  # the clock was set back
