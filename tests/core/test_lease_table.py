"""The lease book against a naive reference, and the rules of when a lease ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sojourn.ids import ProgramId
from sojourn_server.core.lease_table import SILENCE_EXTENSION_S, SILENCE_INITIAL_S, Lease, LeaseTable
from sojourn_server.policies.policy_protocols import DecisionReason

P = ProgramId("p")


def lease(
    program: str = "p", *, now: float = 0.0, ttl_s: float = 30.0, blocks: int = 5, beats: bool = False
) -> Lease:
    silent_s = now + SILENCE_INITIAL_S if beats else None
    return Lease(ProgramId(program), 1, now, ttl_s, now + ttl_s, silent_s, blocks, 1.0, DecisionReason.FIXED)


def expired(leases: dict[ProgramId, Lease], now: float) -> dict[ProgramId, DecisionReason]:
    """What the book promises, said slowly."""
    found = {}
    for name, held in leases.items():
        if held.deadline_s() <= now and not held.waiting:
            silent = held.silent_s is not None and held.silent_s < held.expires_s
            found[name] = DecisionReason.SILENT if silent else DecisionReason.TTL
    return found


class BookAgainstModel(RuleBasedStateMachine):
    """The same calls go to both; the model keeps its own leases."""

    names = st.sampled_from("abcde").map(ProgramId)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = LeaseTable(20)
        self.model: dict[ProgramId, Lease] = {}

    @rule(name=names, ttl_s=st.sampled_from([1.0, 15.0, 40.0]), blocks=st.integers(1, 9), beats=st.booleans())
    def grant(self, name: ProgramId, ttl_s: float, blocks: int, beats: bool) -> None:
        used = sum(held.blocks for held in self.model.values())
        assert self.book.blocks == used
        if name in self.model or used + blocks > self.book.budget_blocks:
            return
        fresh = lease(name, now=self.now, ttl_s=ttl_s, blocks=blocks, beats=beats)
        self.model[name] = replace(fresh)
        self.book.grant(fresh)

    @rule(name=names)
    def heard(self, name: ProgramId) -> None:
        self.book.heard(name, self.now)
        held = self.model.get(name)
        if held and held.silent_s is not None:
            held.silent_s = max(held.silent_s, self.now + SILENCE_EXTENSION_S)

    @rule(name=names)
    def promised(self, name: ProgramId) -> None:
        self.book.promised(name, self.now)
        held = self.model.get(name)
        if held and held.silent_s is None:
            held.silent_s = self.now + SILENCE_INITIAL_S

    @rule(name=names, seconds=st.sampled_from([-5.0, 0.0, 2.0, 50.0]))
    def extend(self, name: ProgramId, seconds: float) -> None:
        held = self.model.get(name)
        moved = held is not None and self.now + seconds > held.expires_s
        assert self.book.extend(name, self.now + seconds) is moved
        if held and moved:
            held.expires_s = self.now + seconds

    @rule(name=names, waiting=st.booleans())
    def set_waiting(self, name: ProgramId, waiting: bool) -> None:
        held = self.model.get(name)
        assert self.book.set_waiting(name, waiting) is (held is not None)
        if held:
            held.waiting = waiting

    @rule(name=names)
    def end(self, name: ProgramId) -> None:
        assert self.book.end(name) == self.model.pop(name, None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 7.0, 25.0]), limit=st.integers(1, 3))
    def pop_expired(self, seconds: float, limit: int) -> None:
        self.now += seconds
        expected = expired(self.model, self.now)
        ended = self.book.pop_expired(self.now, limit)
        assert len(ended) == min(limit, len(expected))
        for struck, reason in ended:
            assert expected[struck.program_id] is reason
            assert self.model.pop(struck.program_id) == struck
        rest = expired(self.model, self.now)
        if rest:
            assert self.book.next_deadline_s <= self.now, "the rest must follow in the next step"

    @invariant()
    def books_agree(self) -> None:
        assert {held.program_id: held for held in self.book} == self.model
        assert self.book.blocks == sum(held.blocks for held in self.model.values())
        active = [held.deadline_s() for held in self.model.values() if not held.waiting]
        assert self.book.next_deadline_s <= min(active, default=math.inf)


TestBookAgainstModel = BookAgainstModel.TestCase
TestBookAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("signs", "ends_s"),
    [([], 20.0), ([5.0], 20.0), ([3.0, 6.0, 9.0, 12.0], 22.0), ([24.0], 20.0), ([15.0, 24.0], 34.0)],
    ids=["never heard", "early sign", "beats", "too late", "within 35 s"],
)
def test_silence_ends_a_lease_20_s_after_the_grant_or_10_s_after_the_last_sign(
    signs: list[float], ends_s: float
) -> None:
    book = LeaseTable(100)
    book.grant(lease(ttl_s=300.0, beats=True))
    for tick in range(1, 400):
        now = tick / 4
        if now in signs:
            book.heard(P, now)
        if ended := book.pop_expired(now, 10):
            assert (now, ended[0][1]) == (ends_s, DecisionReason.SILENT)
            return
    pytest.fail("it never ended")


def test_a_client_without_heartbeats_may_be_silent() -> None:
    book = LeaseTable(100)
    book.grant(lease(ttl_s=300.0))
    book.heard(P, 1.0)
    assert book.pop_expired(299.9, 10) == []
    assert [reason for _, reason in book.pop_expired(300.0, 10)] == [DecisionReason.TTL]


def test_an_expired_lease_stays_while_its_program_waits() -> None:
    book = LeaseTable(100)
    book.grant(lease(ttl_s=1.0))
    book.set_waiting(P, True)
    assert book.pop_expired(500.0, 10) == []
    assert P in book
    book.set_waiting(P, False)
    assert [held.program_id for held, _ in book.pop_expired(500.0, 10)] == [P]


def test_ten_thousand_leases_that_end_at_once_end_in_batches() -> None:
    book = LeaseTable(10_000)
    for i in range(10_000):
        book.grant(lease(f"p{i}", blocks=1))
    sizes = []
    while len(book):
        sizes.append(len(book.pop_expired(1000.0, 1000)))
    assert sizes == [1000] * 10
    assert book.blocks == 0
    assert book.pop_expired(1000.0, 1000) == []
