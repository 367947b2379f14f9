"""The table of leases against a naive model."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sojourn.ids import ProgramId
from sojourn_server.core.leases import SILENCE_S, Lease, LeaseTable
from sojourn_server.policies.policy_protocols import DecisionReason


class TableAgainstModel(RuleBasedStateMachine):
    """The same calls go to both; the model keeps its own leases. A program's rank is its letter."""

    names = st.sampled_from("abcde").map(ProgramId)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = LeaseTable(20)
        self.model: dict[ProgramId, Lease] = {}

    @rule(
        name=names, ttl_s=st.sampled_from([1.0, 15.0, 40.0]), beats=st.booleans(),
        block_ids=st.sets(st.integers(0, 9)).map(tuple),
    )  # fmt: skip
    def grant(self, name: ProgramId, ttl_s: float, block_ids: tuple[int, ...], beats: bool) -> None:
        if name not in self.model:
            fresh = Lease(
                program_id=name, rank=ord(name), granted_s=self.now, ttl_s=ttl_s, expires_s=self.now + ttl_s,
                silent_s=self.now + SILENCE_S if beats else math.inf, block_ids=block_ids, reload_s=1.0,
                reason=DecisionReason.FIXED,
            )  # fmt: skip
            self.model[name] = replace(fresh)
            self.table.grant(fresh)

    @rule(name=names, promised=st.booleans())
    def heard(self, name: ProgramId, promised: bool) -> None:
        self.table.heard(name, self.now, promised=promised)
        held = self.model.get(name)
        if held and (promised or held.silent_s < math.inf):
            held.silent_s = self.now + SILENCE_S

    @rule(name=names, seconds=st.sampled_from([-5.0, 0.0, 2.0, 50.0]))
    def extend(self, name: ProgramId, seconds: float) -> None:
        self.table.extend(name, self.now + seconds)
        held = self.model.get(name)
        if held:
            held.expires_s = max(held.expires_s, self.now + seconds)

    @rule(name=names, waiting=st.booleans())
    def set_waiting(self, name: ProgramId, waiting: bool) -> None:
        held = self.model.get(name)
        assert self.table.set_waiting(name, waiting) is (held is not None)
        if held:
            held.waiting = waiting

    @rule(name=names)
    def end(self, name: ProgramId) -> None:
        ended, expected = self.table.end(name), self.model.pop(name, None)
        assert (ended is None) == (expected is None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 7.0, 25.0]))
    def expire(self, seconds: float) -> None:
        """The lease of a program that waits stays, however late it is (Continuum §5.2)."""
        self.now += seconds
        expected = {}
        for name, held in list(self.model.items()):
            if held.deadline_s() <= self.now and not held.waiting:
                silent = held.silent_s < held.expires_s
                expected[name] = DecisionReason.SILENT if silent else DecisionReason.TTL
                del self.model[name]
        expired = self.table.expired(self.now)
        assert dict(expired) == expected
        for name, _ in expired:
            self.table.end(name)

    @invariant()
    def they_agree(self) -> None:
        assert self.table.keys() == self.model.keys()
        first: dict[int, str] = {}
        for held in self.table.values():
            model = self.model[held.program_id]
            assert (held.expires_s, held.silent_s) == (model.expires_s, model.silent_s)
            for block_id in held.block_ids:
                first[block_id] = min(first.get(block_id, "z"), held.program_id)
        assert self.table.held_blocks == len(first)
        assert self.table.count_unheld(range(10)) == 10 - len(first)
        for held in self.table.values():
            assert held.freed_blocks == list(first.values()).count(held.program_id)


TestTableAgainstModel = TableAgainstModel.TestCase
TestTableAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
