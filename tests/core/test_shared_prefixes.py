"""Contexts' hashes: their bound, and shared prefixes, against naive lists and sets."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sojourn.ids import ProgramId
from sojourn.wire_events import ProgramEnd, ProgramStart
from sojourn_server.core.context_hashes import HashLists, PlacedPrefixes, PrefixTree
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.policies.placement.placement_policy import MoveReason, MoveTiming, TierMove
from sojourn_server.policies.placement.placement_views import Tier
from virtual_engine import BLOCK_TOKENS, VirtualEngine, prompt
from virtual_engine import chain as chain_of

PROGRAMS = [f"p{number}" for number in range(4)]


def chain(*tokens: int) -> list[Any]:
    """Chained hashes: each stands for all tokens up to it."""
    return [tokens[: at + 1] for at in range(len(tokens))]


def common(one: list[Any], other: list[Any]) -> int:
    return len({*one} & {*other})


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8))), st.integers(0, 20))
def test_of_hash_lists_the_oldest_go_first_and_the_bound_is_exact(
    ops: list[tuple[str, int]], limit: int
) -> None:
    lists = HashLists[str](limit)
    model: list[tuple[str, list[int]]] = []
    for name, size in ops:
        lists.put(name, [*range(size)])
        model = [each for each in model if each[0] != name] + [(name, [*range(size)])]
        while sum(len(hashes) for _, hashes in model) > limit:
            del model[0]
        assert list(lists.items()) == model


@pytest.mark.parametrize("seed", range(20))
def test_each_distinct_hash_counts_once_and_common_prefixes_are_found(seed: int) -> None:
    draw = random.Random(seed)
    tree, known = PrefixTree(), list[list[Any]]()
    for _ in range(60):
        asked = chain(*(draw.randrange(3) for _ in range(draw.randrange(9))))
        expected = max((common(asked, other) for other in known), default=0)
        assert tree.common(asked) == expected
        if draw.random() < 0.5:
            assert tree.add(asked) == expected
            known.append(asked)


@pytest.mark.parametrize("seed", range(5))
def test_a_prefix_has_the_highest_rank_of_the_programs_that_share_it(seed: int) -> None:
    draw = random.Random(seed)
    placed, model = PlacedPrefixes(), dict[ProgramId, tuple[list[Any], int]]()
    for _ in range(500):
        name, rank = ProgramId(f"p{draw.randrange(12)}"), draw.randrange(4)
        model.pop(name, None)
        if draw.random() < 0.2:
            placed.forget(name)
        else:
            keys = chain(*(draw.randrange(2) for _ in range(draw.randrange(7))))
            higher = (common(keys, other) for other, at in model.values() if at > rank)
            assert placed.put(name, keys, rank) == max(higher, default=0)
            if keys:
                model[name] = keys, rank
        for program_id in map(ProgramId, (f"p{number}" for number in range(12))):
            assert list(placed.keys_of(program_id)) == model.get(program_id, ([], 0))[0]


SHARED = [10**9 + at for at in range(30 * BLOCK_TOKENS)]
"""A system prompt of 30 blocks."""


def test_new_programs_that_share_a_prefix_are_let_in_together() -> None:
    """Six beside two that run, each with three blocks of its own, on a device of 60 blocks."""
    engine = VirtualEngine("sojourn", blocks=60)

    def come(program: str, number: int) -> str:
        return engine.arrive(program, [*SHARED, *prompt(3 * BLOCK_TOKENS, number)])

    for number in (1, 2):  # so that it is known that new programs share the prompt
        request = come(f"first {number}", number)
        engine.step()
        engine.admit(request)
        engine.now += 1.0
        engine.finish(request)
    for number in (1, 2):
        engine.admit(come(f"runs {number}", number))
    requests = [come(f"new {number}", 200 + number) for number in range(6)]
    engine.wait(1.1)
    assert not any(map(engine.program_scheduler.is_parked, requests))


def test_a_program_that_returns_needs_no_blocks_for_a_prefix_that_is_there() -> None:
    """Of 33 blocks, 30 are another program's too. What its context had elsewhere does not count."""
    engine = VirtualEngine("sojourn", blocks=60)
    for name, number in (("away", 1), ("here", 2)):
        request = engine.arrive(name, [*SHARED, *prompt(3 * BLOCK_TOKENS, number)])
        engine.step()
        engine.admit(request)
        engine.now += 1.0
        engine.finish(request)
    tiers = engine.program_scheduler.tiers
    tiers._apply(TierMove(ProgramId("away"), Tier.WAITING, MoveTiming.NOW, MoveReason.EXCHANGE), engine.now)
    engine.arrive("away", [*SHARED, *prompt(4 * BLOCK_TOKENS, 1)])
    (waiting,) = tiers._view().waiting
    assert waiting.device_blocks == 4


def counted(engine: VirtualEngine) -> int:
    """Blocks that count on the device: those of all programs there, and those of other requests."""
    tiers = engine.program_scheduler.tiers
    view = tiers._view()
    return sum(each.device_blocks for each in view.on_device) + view.device.untracked_blocks


class Contexts(RuleBasedStateMachine):
    """Programs and requests that come, run, branch and go in any order. All begin with one of few prompts."""

    @initialize(host=st.sampled_from([0, 30]))
    def begin(self, host: int) -> None:
        self.engine = VirtualEngine("sojourn", blocks=60)
        self.engine.program_scheduler.pool.host_blocks = host
        self.prompts: dict[str, tuple[str | None, list[int]]] = {}
        """Program and prompt of each request in the engine."""
        self.running: set[str] = set()
        self.last_turns: dict[str, list[int]] = {}
        """Tokens of each program's last turn, while their KV may be on the device."""

    @rule(program=st.sampled_from(PROGRAMS), kind=st.sampled_from(["x", "y"]))
    def name_type(self, program: str, kind: str) -> None:
        self.engine.send(ProgramStart(program_id=program, seq=-1, agent_type=kind))

    @rule(
        program=st.sampled_from([*PROGRAMS, None]),
        head=st.integers(1, 2),
        tokens=st.integers(1, 60),
        waits=st.booleans(),
    )
    def arrive(self, program: str | None, head: int, tokens: int, waits: bool) -> None:
        request, asked = self.engine.arrive(program, prompt(tokens, head)), prompt(tokens, head)
        self.prompts[request] = program, asked
        if not waits:
            self.step(0.0)
            self.admit(request, resumed=False)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), resumed=st.booleans())
    def admit_any(self, data: st.DataObject, resumed: bool) -> None:
        self.admit(data.draw(st.sampled_from(sorted(self.prompts))), resumed=resumed)

    def admit(self, request: str, *, resumed: bool) -> None:
        if self.engine.program_scheduler.is_parked(request):
            return
        if resumed and request in self.running:
            self.engine.program_scheduler.preempted(request, self.engine.now)
            self.engine._prompts[request] = [*self.prompts[request][1], *prompt(9)]  # it has an output now
        if resumed or request not in self.running:
            self.engine.admit(request, resumed=request in self.running)
            self.running.add(request)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), aborted=st.booleans())
    def leave(self, data: st.DataObject, aborted: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.prompts)))
        program = self.program_of(request)
        del self.prompts[request]
        aborted = aborted or request not in self.running
        self.running.discard(request)
        asked = self.engine._prompts[request]
        self.engine.finish(request, outcome=TurnFinishReason.ABORTED if aborted else TurnFinishReason.STOPPED)
        if program is not None and not aborted and program not in self.busy() and self.tier(program):
            self.last_turns[program] = [*asked, 7, 7]

    def busy(self) -> set[str | None]:
        return {self.program_of(request) for request in self.prompts}

    def program_of(self, request: str) -> str | None:
        """The request's program; ``None`` for a side request."""
        known = self.engine.program_scheduler.request(request)
        return None if known is None else known.program_id

    def tier(self, program: str) -> Tier | None:
        return self.engine.program_scheduler.tiers.placed(ProgramId(program))

    @rule(program=st.sampled_from(PROGRAMS))
    def end(self, program: str) -> None:
        self.engine.send(ProgramEnd(program_id=program, seq=-1))
        self.last_turns.pop(program, None)

    @rule()
    def reset_cache(self) -> None:
        self.engine.program_scheduler.cache_reset(self.engine.now)
        self.last_turns.clear()

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 400.0]))
    def step(self, seconds: float) -> None:
        self.engine.wait(seconds)
        for program in list(self.last_turns):
            if self.tier(program) is not Tier.DEVICE:
                del self.last_turns[program]

    @invariant()
    def every_block_counts(self) -> None:
        if not hasattr(self, "engine"):
            return
        running = [(self.program_of(request), self.prompts[request][1]) for request in self.running]
        held = {block for _, asked in running for block in chain_of(asked)}
        at_work = {program for program, _ in running}
        idle = (tokens for program, tokens in self.last_turns.items() if program not in at_work)
        held.update(block for tokens in idle for block in chain_of(tokens))
        assert counted(self.engine) >= len(held)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request in list(self.prompts):
            self.engine.finish(request, outcome=TurnFinishReason.ABORTED)
        for program in PROGRAMS:
            self.engine.send(ProgramEnd(program_id=program, seq=-1))
        assert counted(self.engine) == 0


Contexts.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestContexts = Contexts.TestCase
