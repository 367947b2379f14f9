"""Which requests yield to a tenant with more urgent work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.fairness_policies import (
    BlockedRequestView,
    PreemptibleRequestView,
    TenantPreemptionPolicy,
    TenantStanding,
    UrgencyPreemption,
)

URGENT = BlockedRequestView("u", "urgent", 0.6, 0.1, 100)
OTHERS = [
    PreemptibleRequestView("first", "calm", 100, 0.1, 1.0),
    PreemptibleRequestView("last", "calm", 100, 0.1, 2.0),
]
STANDINGS = {"urgent": TenantStanding(0.8, 0.0), "calm": TenantStanding(0.2, 0.5)}


def made(blocked: BlockedRequestView = URGENT, others: Any = OTHERS, standings: Any = STANDINGS) -> list[str]:
    return list(UrgencyPreemption().preempt_less_urgent(blocked, others, standings))


def test_unsent_requests_yield_first_then_the_last_sent() -> None:
    assert made() == ["last"]
    assert made(others=[*OTHERS, PreemptibleRequestView("queued", "calm", 100, 0.1, None)]) == ["queued"]
    assert made(URGENT._replace(missing_tokens=150)) == ["last", "first"]
    assert made(URGENT._replace(missing_requests=2)) == ["last", "first"]
    large = PreemptibleRequestView("large", "calm", 500, 0.1, 0.5)
    assert made(URGENT._replace(missing_tokens=300), [*OTHERS, large]) == ["large"], "the others in vain"


@pytest.mark.parametrize(
    ("blocked", "others", "standings"),
    [
        (URGENT._replace(waited_s=0.4), OTHERS, STANDINGS),
        (URGENT._replace(missing_tokens=201), OTHERS, STANDINGS),
        (URGENT, [], STANDINGS),
        (URGENT, OTHERS, {"urgent": TenantStanding(0.5, 0.0), "calm": TenantStanding(0.5, 0.5)}),
        (URGENT, OTHERS, {"urgent": TenantStanding(0.8, 0.7), "calm": TenantStanding(0.2, 0.2)}),
        (URGENT, OTHERS, {"calm": TenantStanding(0.2, 0.5)}),
        (URGENT, OTHERS, {"urgent": TenantStanding(0.0, 0.0), "calm": TenantStanding(0.0, 0.5)}),
    ],
    ids=["soon", "not-enough", "no-candidates", "equals", "has-its-share", "no-share-yet", "no-shares"],
)
def test_no_request_yields(blocked: BlockedRequestView, others: Any, standings: Any) -> None:
    assert made(blocked, others, standings) == []
    assert list(TenantPreemptionPolicy().preempt_less_urgent(blocked, others, standings)) == []


standings_of = st.fixed_dictionaries(
    {tenant: st.builds(TenantStanding, st.floats(0, 1), st.floats(0, 2)) for tenant in "abc"}
)


@given(
    standings=standings_of,
    others=st.lists(
        st.builds(
            PreemptibleRequestView,
            st.uuids().map(str),
            st.sampled_from("bc"),
            st.integers(1, 500),
            st.floats(0.01, 0.5),
            st.none() | st.floats(0, 9),
        ),
        max_size=8,
    ),
    tokens=st.integers(0, 1500),
    requests=st.integers(0, 4),
    used=st.floats(0.01, 1),
)
def test_a_preempted_tenant_is_less_urgent_better_off_and_frees_enough(
    standings: dict[str, TenantStanding],
    others: list[PreemptibleRequestView],
    tokens: int,
    requests: int,
    used: float,
) -> None:
    blocked = BlockedRequestView("u", "a", 1.0, used, tokens, requests)
    names = made(blocked, others, standings)
    chosen = [other for other in others if other.request_id in names]
    assert len(names) == len(set(names)) == len(chosen)
    if not chosen:
        return
    assert sum(other.tokens for other in chosen) >= tokens
    assert len(chosen) >= requests
    mine = standings["a"]
    for tenant in {other.tenant for other in chosen}:
        theirs = standings[tenant]
        assert theirs.share < mine.share
        left = theirs.used - sum(other.used for other in chosen if other.tenant == tenant)
        # So they do not take it back: what one has of its share is no less than what the other has.
        assert left * mine.share >= (mine.used + used) * theirs.share - 1e-9
    for other in chosen:
        rest = [one for one in chosen if one is not other]
        assert not rest or sum(o.tokens for o in rest) < tokens or len(rest) < requests, "one too many"
