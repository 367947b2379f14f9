"""Placement against a world of programs that arrive, act, return, grow and end as they like.

After each event the policy is asked and its answer applied, and the rules that must hold for any answer are
checked; at the end every ready program must get to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sojourn.ids import ProgramId
from sojourn_server.policies.placement import residency_price
from sojourn_server.policies.placement.placement_plan import has_elapsed
from sojourn_server.policies.placement.placement_policy import MoveReason, MoveTiming, TierMove
from sojourn_server.policies.placement.placement_views import (
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
    TierCapacity,
)
from sojourn_server.policies.placement.relative_idleness import RelativeIdlenessPlacement
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement
from sojourn_server.programs.idleness import IdlenessTracker

pytestmark = pytest.mark.slow

DEVICE, HOST, DISK, WAITING = Tier
REASONING, READY, ACTING = ProgramActivity
PATIENCE_S, STANDSTILL_S = 20.0, 2.0  # seconds that the end of each example spends one by one
POLICIES = [
    RelativeIdlenessPlacement(patience_s=PATIENCE_S, standstill_s=STANDSTILL_S, overdue_gap_s=gap_s)
    for gap_s in (0.0, 3.0)
]
POLICIES += [RelativeIdlenessPlacement(patience_s=math.inf, standstill_s=math.inf)]
BY_PRICE = [
    ResidencyPricePlacement(patience_s=PATIENCE_S, reserve=reserve, overdue_gap_s=gap_s)
    for reserve in (0.0, 0.7)
    for gap_s in (0.0, 3.0)
]


@dataclass
class Agent:
    """A program as its engine knows it."""

    name: ProgramId
    since_s: float
    prompt: int
    peak: int
    tier: Tier = WAITING
    activity: ProgramActivity = READY
    context: int = 0
    last_active_s: float = 0.0
    returning: bool = False
    pending: bool = False
    had_a_turn: bool = False
    """Since it was last promoted."""
    tool_s: tuple[float, ...] = ()
    """How long its tools have taken."""
    turns: int = 0
    clock: IdlenessTracker = field(default_factory=lambda: IdlenessTracker(3))

    def seen(self) -> ProgramTierView:
        return ProgramTierView(
            program_id=self.name,
            tier=self.tier,
            activity=self.activity,
            idleness=self.clock.reading(),
            context_blocks=self.context,
            required_blocks=self.prompt if self.activity is READY else 0,
            resident_blocks=self.context if self.tier is DEVICE else 0,
            peak_blocks=self.peak,
            arrived_s=self.since_s,
            gap_durations_s=self.tool_s,
            gap_since_s=self.last_active_s,
            rebuild_s=0.2 * self.context if self.turns % 5 else 0.0,
            turn_blocks=self.context + 1,
            service_s=(1.0, 5.0, 5.0, 100.0),
            attained_s=float(self.turns),
            waiting_since_s=self.since_s,
            last_active_s=self.last_active_s,
            returning=self.returning,
            pending=self.pending,
        )


class World(RuleBasedStateMachine):
    """What happens to programs, and what the policy makes of it."""

    @initialize(
        policy=st.sampled_from(POLICIES) | st.sampled_from(BY_PRICE),
        load_s=st.sampled_from([None, 0.0, 0.01, 0.1, 1.0]),
        busy=st.sampled_from([(0.0, 0.0), (20.0, 0.5), (3.0, 1.0)]),
        hold_cost=st.sampled_from([0.0, 0.0, 0.9]),
        device=st.integers(10, 40),
        host=st.integers(0, 40),
        disk=st.sampled_from([0, 10, 60]),
        crowd=st.lists(
            st.tuples(
                st.integers(1, 12),
                st.integers(0, 6),
                st.sampled_from([1.0, 5.0]),
                st.sampled_from([0.0, 2.0, 10.0, 100.0]),
                st.sampled_from([REASONING, READY, ACTING, ACTING]),
            ),
            max_size=14,
        ),
    )
    def begin(
        self,
        policy: RelativeIdlenessPlacement | ResidencyPricePlacement,
        load_s: float | None,
        busy: tuple[float, float],
        hold_cost: float,
        device: int,
        host: int,
        disk: int,
        crowd: list[tuple[int, int, float, float, ProgramActivity]],
    ) -> None:
        self.policy, self.load_s = policy, load_s
        self.mean_running, self.prefill_share = busy
        self.hold_cost = hold_cost
        # Then programs without a saved context are kept out by others, and are overdue later.
        self.by_price = isinstance(policy, ResidencyPricePlacement)
        self.capacity = {DEVICE: device, HOST: host, DISK: disk}
        self.now = 1000.0
        self.agents: dict[ProgramId, Agent] = {}
        self.last_overdue_promotion_s = -math.inf
        self.born = 0
        for blocks, growth, reasoning_s, acting_s, activity in crowd:
            self.settle(blocks, growth, reasoning_s, acting_s, activity)
        self.now += 100.0
        self.ask()

    def settle(
        self, blocks: int, growth: int, reasoning_s: float, acting_s: float, activity: ProgramActivity
    ) -> None:
        """A program that ran before and stands in the first queue where it fits."""
        self.born += 1
        name = ProgramId(f"p{self.born:03}")
        began_s = self.now
        agent = Agent(name, began_s, blocks, blocks + growth, context=blocks, returning=True)
        for tier in (DEVICE, HOST, DISK):
            held = [one.seen() for one in (*self.agents.values(), agent) if one.tier is tier or one is agent]
            sizes = [self.size(one) if tier is DEVICE else one.context_blocks for one in held]
            if sum(sizes) <= self.capacity[tier]:
                agent.tier = tier
                break
        self.agents[name] = agent
        agent.clock.update(began_s, running=True, live=True)
        agent.last_active_s = began_s + reasoning_s
        agent.clock.update(agent.last_active_s, running=False, live=False)
        agent.had_a_turn = True
        agent.activity = ACTING
        if activity is not ACTING:
            agent.since_s = agent.last_active_s + acting_s
            agent.clock.update(agent.since_s, running=False, live=True)
            agent.activity = READY
        if activity is REASONING and agent.tier is DEVICE:
            agent.clock.update(agent.since_s, running=True, live=True)
            agent.activity = REASONING

    # -- what happens -------------------------------------------------------------------------

    @rule(prompt=st.integers(1, 15), growth=st.integers(0, 20), seconds=st.sampled_from([0.0, 1.0]))
    def arrive(self, prompt: int, growth: int, seconds: float) -> None:
        self.now += seconds
        self.born += 1
        name = ProgramId(f"p{self.born:03}")
        agent = Agent(name, self.now, prompt, prompt + growth, last_active_s=self.now)
        agent.clock.update(self.now, running=False, live=True)
        self.agents[name] = agent
        self.ask()

    @rule(pick=st.integers(0, 99), seconds=st.sampled_from([0.0, 0.5]))
    def run(self, pick: int, seconds: float) -> None:
        if agent := self.any_of(pick, lambda a: a.tier is DEVICE and a.activity is READY and not a.pending):
            self.now += seconds
            self.start(agent)
            self.ask()

    @rule(pick=st.integers(0, 99), blocks=st.integers(0, 6), seconds=st.sampled_from([0.1, 3.0, 20.0]))
    def end_turn(self, pick: int, blocks: int, seconds: float) -> None:
        if agent := self.any_of(pick, lambda a: a.activity is REASONING):
            self.now += seconds
            agent.context += blocks
            agent.tool_s = tuple(sorted((*agent.tool_s, seconds)))
            self.stop(agent)
            self.ask()

    @rule(pick=st.integers(0, 99), blocks=st.integers(1, 9))
    def grow(self, pick: int, blocks: int) -> None:
        if agent := self.any_of(pick, lambda a: a.activity is REASONING):
            agent.context += blocks
            self.ask()

    @rule(pick=st.integers(0, 99), blocks=st.integers(0, 5), seconds=st.sampled_from([0.0, 0.5, 30.0]))
    def end_tool(self, pick: int, blocks: int, seconds: float) -> None:
        if agent := self.any_of(pick, lambda a: a.activity is ACTING):
            self.now += seconds
            self.come_back(agent, blocks)
            self.ask()

    @rule(pick=st.integers(0, 99))
    def come_back_before_the_policy_knows(self, pick: int) -> None:
        """The next request comes in the same moment as the turn ends."""
        if agent := self.any_of(pick, lambda a: a.activity is REASONING):
            self.stop(agent)
            self.come_back(agent, 1)
            self.ask()

    @rule(pick=st.integers(0, 99))
    def give_up(self, pick: int) -> None:
        if agent := self.any_of(pick, lambda a: a.activity is READY and a.returning):
            agent.activity, agent.had_a_turn = ACTING, True
            agent.clock.update(self.now, running=False, live=False)
            self.ask()

    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        if agent := self.any_of(pick, lambda a: True):
            del self.agents[agent.name]
            self.ask()

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 61.0, -30.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.ask()

    @precondition(lambda self: self.capacity[HOST] > 0)
    @rule(tier=st.sampled_from([DEVICE, HOST, DISK]), blocks=st.integers(1, 4))
    def shrink(self, tier: Tier, blocks: int) -> None:
        self.capacity[tier] = max(1, self.capacity[tier] - blocks)
        self.ask()

    # -- how it happens -----------------------------------------------------------------------

    def any_of(self, pick: int, which: object) -> Agent | None:
        found = [agent for agent in self.agents.values() if which(agent)]  # type: ignore[operator]
        return found[pick % len(found)] if found else None

    def start(self, agent: Agent) -> None:
        assert agent.tier is DEVICE
        agent.clock.update(self.now, running=True, live=True)
        agent.activity, agent.returning = REASONING, True
        agent.context = max(agent.context, agent.prompt)

    def stop(self, agent: Agent) -> None:
        agent.clock.update(self.now, running=False, live=False)
        agent.activity, agent.had_a_turn, agent.last_active_s = ACTING, True, self.now
        agent.turns += 1

    def come_back(self, agent: Agent, blocks: int) -> None:
        agent.clock.update(self.now, running=False, live=True)
        agent.activity, agent.prompt, agent.since_s = READY, agent.context + blocks, self.now

    # -- the question and its answer ----------------------------------------------------------

    def view(self) -> PlacementView:
        groups = {tier: [one.seen() for one in self.agents.values() if one.tier is tier] for tier in Tier}
        states = {
            tier: TierCapacity(
                capacity_blocks=blocks, load_s_per_block=None if tier is DEVICE else self.load_s
            )
            for tier, blocks in self.capacity.items()
        }
        return PlacementView(
            device=states[DEVICE],
            host=states[HOST],
            disk=states[DISK],
            on_device=groups[DEVICE],
            on_host=groups[HOST],
            on_disk=groups[DISK],
            waiting=groups[WAITING],
            mean_running=self.mean_running,
            prefill_share=self.prefill_share,
            hold_cost=self.hold_cost,
            last_overdue_promotion_s=self.last_overdue_promotion_s,
        )

    def ask(self) -> None:
        view = self.view()
        answer = self.policy.moves(view, self.now)
        self.same_however_it_is_asked(view, answer)
        self.moves_are_allowed(view, answer)
        self.nothing_moves_without_cause(view, answer)
        self.demotion_is_in_order(view, answer)
        self.promotion_is_in_order(view, answer)
        for move in answer:
            self.apply(move)
        self.tiers_hold_what_they_can(answer)
        again = self.policy.moves(self.view(), self.now)
        if self.by_price and any(
            move.to is WAITING and self.agents[move.program_id].activity is READY for move in answer
        ):
            # A program that was overdue with its context is not overdue without it: those that were to make
            # way for it may stay.
            assert all(move.reason is MoveReason.KEPT for move in again)
            for move in again:
                self.apply(move)
            again = self.policy.moves(self.view(), self.now)
        assert again == (), "an answer is complete"

    def apply(self, move: TierMove) -> None:
        agent = self.agents[move.program_id]
        if move.reason is MoveReason.OVERDUE and move.to is DEVICE:
            gap_s = self.policy.overdue_gap_s
            assert gap_s == 0 or not 0 <= self.now - self.last_overdue_promotion_s < gap_s, "one at a time"
            self.last_overdue_promotion_s = self.now
        if move.when is MoveTiming.AFTER_TURN:
            agent.pending = True
        elif move.reason is MoveReason.KEPT:
            agent.pending = False
        elif move.to is DEVICE:
            agent.tier, agent.had_a_turn = DEVICE, False
        else:
            if agent.tier is DEVICE:
                assert agent.had_a_turn, "a promotion is worth a turn: no ping-pong"
            agent.tier, agent.pending = move.to, False

    def same_however_it_is_asked(self, view: PlacementView, answer: object) -> None:
        assert self.policy.moves(view, self.now) == answer
        other = replace(
            view,
            on_device=view.on_device[::-1],
            on_host=view.on_host[::-1],
            on_disk=view.on_disk[::-1],
            waiting=view.waiting[::-1],
        )
        assert set(self.policy.moves(other, self.now)) == set(answer)  # type: ignore[call-overload]

    def moves_are_allowed(self, view: PlacementView, answer: tuple[TierMove, ...]) -> None:
        names = [move.program_id for move in answer]
        assert len(set(names)) == len(names), "no program moves twice"
        for move in answer:
            agent = self.agents[move.program_id]
            if move.when is MoveTiming.AFTER_TURN:
                assert (agent.tier, agent.activity, agent.pending) == (DEVICE, REASONING, False)
                assert move.to is not DEVICE
            elif move.reason is MoveReason.KEPT:
                assert (agent.tier, agent.pending, move.to) == (DEVICE, True, DEVICE)
            elif move.to is DEVICE:
                assert agent.tier is not DEVICE
                assert agent.activity is READY, "only ready programs are promoted"
            else:
                assert list(Tier).index(move.to) > list(Tier).index(agent.tier), "down"
                assert agent.activity is not REASONING
                assert agent.tier is not DEVICE or agent.activity is ACTING or agent.pending

    def size(self, program: ProgramTierView) -> int:
        return program.device_blocks

    def room(self, view: PlacementView) -> int:
        return view.device.budget_blocks - sum(map(self.size, view.on_device))

    def nothing_moves_without_cause(self, view: PlacementView, answer: tuple[TierMove, ...]) -> None:
        """Stickiness (M8): a violation, room for a ready program, or one of our own rules."""
        ready = [
            program
            for group in (view.on_host, view.on_disk, view.waiting)
            for program in group
            if program.activity is READY
        ]
        over = any(
            sum(program.context_blocks for program in group) > state.budget_blocks
            for group, state in ((view.on_host, view.host), (view.on_disk, view.disk))
        )
        room = self.room(view)
        if self.by_price:
            if room >= 0 and not over and not ready:
                assert all(move.reason is MoveReason.KEPT for move in answer)
            return
        fits = any(self.size(program) <= room or not view.on_device for program in ready)
        due = any(map(self.is_overdue, ready))
        still = all(program.activity is ACTING for program in view.on_device) and ready
        absent = ready and any(
            each.activity is ACTING and has_elapsed(each.last_active_s, self.policy.absent_s, self.now)
            for each in view.on_device
        )
        if room >= 0 and not over and not fits and not due and not still and not absent:
            assert all(move.reason is MoveReason.KEPT for move in answer)

    def demotion_is_in_order(self, view: PlacementView, answer: tuple[TierMove, ...]) -> None:
        if self.by_price:
            return
        by_name = {program.program_id: program for program in view.on_device}
        chosen = [
            by_name[move.program_id]
            for move in answer
            if move.program_id in by_name and move.to is not DEVICE and move.reason is not MoveReason.ABSENT
        ]
        names = {program.program_id for program in chosen}
        names |= {move.program_id for move in answer if move.reason is MoveReason.ABSENT}
        stays = [program for name, program in by_name.items() if name not in names]
        for gone in chosen:
            for other in stays:
                marked = other.pending and other.activity is REASONING
                if not marked and (other.pending or other.activity is not READY):
                    assert self.place_to_leave(gone) < self.place_to_leave(other)
        over = all(move.reason is MoveReason.OVER_CAPACITY for move in answer if move.to is not DEVICE)
        if chosen and over and not any(program.pending for program in view.on_device):
            total = sum(map(self.size, stays)) + self.size(max(chosen, key=self.place_to_leave))
            assert total > view.device.budget_blocks, "no more than have to"

    def place_to_leave(self, program: ProgramTierView) -> tuple[object, ...]:
        """Pending programs whose turn is over, then those that act, then those that reason, and of each the
        most idle first; of equal ones the least recently active."""
        is_over = program.pending and program.activity is not REASONING
        level = 0 if is_over else 1 if program.activity is ACTING else 2
        return (level, -program.idleness.at(self.now), program.last_active_s, program.program_id)

    def promotion_is_in_order(self, view: PlacementView, answer: tuple[TierMove, ...]) -> None:
        promoted = [move.program_id for move in answer if move.reason is MoveReason.FREE_CAPACITY]
        if (
            self.by_price
            or not promoted
            or any(move.reason not in (MoveReason.FREE_CAPACITY, MoveReason.KEPT) for move in answer)
        ):
            return
        levels = [
            *sorted(view.on_host, key=lambda p: (p.idleness.at(self.now), p.waiting_since_s, p.program_id)),
            *sorted(view.on_disk, key=lambda p: (p.idleness.at(self.now), p.waiting_since_s, p.program_id)),
            *sorted(view.waiting, key=self.place_in_line),
        ]
        line = [program for program in levels if program.activity is READY]
        order = [program.program_id for program in line]
        assert promoted == sorted(promoted, key=order.index)
        room = self.room(view)
        empty = not view.on_device
        for program in line:
            if program.program_id in promoted:
                assert self.size(program) <= room or empty
                room, empty = room - self.size(program), False
            elif any(order.index(name) > order.index(program.program_id) for name in promoted):
                assert self.size(program) > room, "no program that fits is skipped"

    def place_in_line(self, program: ProgramTierView) -> tuple[object, ...]:
        """Programs that ran before by idleness, then new ones by size."""
        if program.returning:
            place = (0, program.idleness.at(self.now))
        else:
            place = (1, float(program.required_blocks))
        return (*place, program.waiting_since_s, program.program_id)

    def is_overdue(self, program: ProgramTierView) -> bool:
        waited_s = self.now - program.waiting_since_s
        patience_s = self.policy.patience_s
        return patience_s < math.inf and not 0 <= waited_s < patience_s

    def tiers_hold_what_they_can(self, answer: tuple[TierMove, ...]) -> None:
        view = self.view()
        for group, state in ((view.on_host, view.host), (view.on_disk, view.disk)):
            assert sum(program.context_blocks for program in group) <= state.budget_blocks
        stay = [program for program in view.on_device if not program.pending]
        if sum(map(self.size, stay)) > view.device.budget_blocks:
            # A program whose turn is yet to come is not demoted.
            assert len(stay) == 1 or all(program.activity is READY for program in stay)
        ready = [p for p in (*view.on_host, *view.on_disk, *view.waiting) if p.activity is READY]
        if self.room(view) >= 0 and not any(map(self.is_overdue, ready)):
            assert len(stay) == len(view.on_device), "marked to leave without need"
        if any(move.to is DEVICE and move.reason is not MoveReason.KEPT for move in answer):
            assert self.room(view) >= 0 or len(view.on_device) == 1, "admitted beyond the capacity"

    @invariant()
    def each_is_in_one_queue(self) -> None:
        for agent in getattr(self, "agents", {}).values():
            assert agent.activity is not REASONING or agent.tier is DEVICE
            assert not agent.pending or agent.tier is DEVICE

    # -- no starvation ------------------------------------------------------------------------

    def teardown(self) -> None:
        if not getattr(self, "agents", None) or self.policy.patience_s == math.inf:
            return
        # No program returns: its tool may be a sub-agent that is kept out.
        ready = {name: agent.turns for name, agent in self.agents.items() if agent.activity is READY}
        self.turn_after_turn(ready, ends=False, returns=False)
        # The opposite: every program returns at once, and none ends.
        for agent in list(self.agents.values()):
            if agent.activity is ACTING:
                self.come_back(agent, 0)
                self.ask()
        owed = {name: a.turns for name, a in self.agents.items() if a.activity is READY and a.returning}
        self.turn_after_turn(owed, ends=False, returns=True)
        # And now that programs end, new ones get their turns too.
        self.turn_after_turn(
            {name: agent.turns for name, agent in self.agents.items()}, ends=True, returns=True
        )

    def turn_after_turn(self, owed: dict[ProgramId, int], *, ends: bool, returns: bool) -> None:
        patience_s = residency_price.BEGIN_PATIENCE * PATIENCE_S if self.by_price else PATIENCE_S
        limit = int(patience_s) + int(8 + self.policy.overdue_gap_s) * len(self.agents) + 8
        for _ in range(limit):
            if not owed:
                return
            for agent in list(self.agents.values()):
                if agent.tier is DEVICE and agent.activity is READY and not agent.pending:
                    self.start(agent)
            self.now += 1.0
            self.ask()
            for agent in list(self.agents.values()):
                if agent.activity is REASONING:
                    self.stop(agent)
                    if ends:
                        del self.agents[agent.name]
                    self.ask()
                    if returns and not ends:
                        self.come_back(agent, 0)
                        self.ask()
                elif ends and agent.activity is ACTING:
                    self.come_back(agent, 0)
                    self.ask()
            gone = [
                name
                for name, turns in owed.items()
                if name not in self.agents or self.agents[name].turns > turns
            ]
            for name in gone:
                del owed[name]
        raise AssertionError(f"in {limit} s there was no turn for {sorted(owed)}")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until a program is overdue is spent in steps of a second."""
    monkeypatch.setattr(residency_price, "BEGIN_PATIENCE", 2.0)


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
