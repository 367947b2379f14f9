"""Random life of programs under placement: who is parked is who should be, and nobody is for ever."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from scheduler_driver import SchedulerDriver
from sojourn.ids import ProgramId
from sojourn.wire_events import ProgramEnd
from sojourn_server.core.events_and_actions import (
    ClientEventReceived,
    RequestAdmitted,
    RequestArrived,
    TurnFinished,
    TurnFinishReason,
)
from sojourn_server.core.request_hints import read_identity
from sojourn_server.core.request_table import RequestState
from sojourn_server.core.scheduler_state import KVPoolConfig, SchedulerLimits, SchedulerState
from sojourn_server.core.tier_manager import MAX_HOLDS, RELEASE_GAP_S
from sojourn_server.policies.placement.placement_policy import MoveReason, MoveTiming, TierMove
from sojourn_server.policies.placement.placement_views import (
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
)
from sojourn_server.policies.placement.relative_idleness import RelativeIdlenessPlacement
from sojourn_server.policies.preset import load_preset
from sojourn_server.programs.program_status import OVER_STATUSES

DEVICE, HOST, DISK, WAITING = Tier
BLOCK = 4
DEVICE_BLOCKS = 40
LIMITS = SchedulerLimits(max_programs=8, hold_timeout_s=150.0, idle_program_s=300.0)
PATIENT = dataclasses.replace(LIMITS, hold_timeout_s=math.inf, idle_program_s=math.inf)
MAX_LIVE = 24


@dataclass
class Request:
    """One request, as its engine knows it."""

    name: str
    program: str | None
    number: int
    tokens: int
    arrived_s: float
    parked: bool = False
    """In the engine's queue: asked when it came, and again whenever an order names its program."""
    running: bool = False
    ran: bool = False
    runs_since_s: float = 0.0
    turn_began: int = 0
    """Step at which it was admitted."""
    since_s: float = 0.0
    """When it came, and how long the engine stood still since."""
    released: bool = False
    """It has waited for too long to be parked again."""
    outlived: bool = False
    """Its program has ended, and another one has its id."""

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK)


@dataclass
class Place:
    """What the docstrings say of a program's place, kept the simple way."""

    tier: Tier = WAITING
    told: int | None = None
    returning: bool = False
    context: int = 0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def parks(self, request: Request) -> bool:
        if request.released or request not in self.waiting:
            return False
        return self.tier is not DEVICE or (self.told is not None and request.number > self.told)

    @property
    def activity(self) -> ProgramActivity:
        its_turn = [each for each in self.waiting if self.told is not None and each.number <= self.told]
        if self.running or its_turn:
            return ProgramActivity.REASONING
        return ProgramActivity.READY if self.waiting else ProgramActivity.ACTING


class Checked:
    """The policy, with an eye on what it is shown."""

    is_used = needs_tiers = True
    reads_costs = False

    def __init__(self, policy: RelativeIdlenessPlacement, life: PlacedLife) -> None:
        self.policy, self.life = policy, life
        self.tick_s, self.idle_tick_s = policy.tick_s, policy.idle_tick_s

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        self.life.is_as_shown(view)
        answer = self.policy.moves(view, now)
        for move in answer:
            self.life.moved(move)
        return answer


class PlacedLife:
    """Programs that come, return, branch, end and vanish, and an engine that does what it is told."""

    def __init__(self, policy: RelativeIdlenessPlacement, host: int, disk: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 1000.0
        self.policy = policy
        preset = dataclasses.replace(load_preset("mori"), placement=Checked(policy, self))
        pool = KVPoolConfig(blocks=DEVICE_BLOCKS, block_size=BLOCK, host_blocks=host, disk_blocks=disk)
        self._seq = 0
        self.program_scheduler = SchedulerDriver(SchedulerState(preset, pool, limits=LIMITS))
        self.below = host, disk
        self.requests: dict[str, Request] = {}
        """In the engine, oldest first."""
        self.places: dict[str, Place] = {}
        self.others: dict[str, Request] = {}
        """Running, of nobody who has a place."""
        self.ended: list[str] = []
        self.overdue_s = -math.inf
        """When an overdue program was promoted last."""
        self.last_released: RequestState | None = None
        self.numbers = self.newest = self.programs = 0
        self.done: Counter[str] = Counter()

    # -- what happens -----------------------------------------------------------------

    def new_program(self) -> None:
        if len(self.requests) < MAX_LIVE:
            self.programs += 1
            self._arrive(f"p{self.programs:05}", self.draw.choice([4, 20, 60, 110, 150]))

    def come_back(self) -> None:
        idle = [
            program.id
            for program in self.program_scheduler.state.programs
            if not program.live_requests and program.status not in OVER_STATUSES
        ]
        if idle and len(self.requests) < MAX_LIVE:
            name = self.draw.choice(idle)
            place = self.places.get(name)
            context = BLOCK * place.context if place is not None else 0
            self._arrive(name, min(150, context + self.draw.randint(1, 30)))

    def branch(self) -> None:
        """A second request while another is in the engine, or a later one while its program is to leave."""
        busy = sorted({each.program for each in self.requests.values() if each.program is not None})
        if busy and len(self.requests) < MAX_LIVE:
            self._arrive(self.draw.choice(busy), self.draw.randint(1, 60))
            self.done["branched"] += 1

    def come_again_after_the_end(self) -> None:
        if self.ended and len(self.requests) < MAX_LIVE:
            name = self.ended.pop(self.draw.randrange(len(self.ended)))
            self._arrive(name, self.draw.randint(1, 80))
            self.done["begun again"] += 1

    def stranger(self) -> None:
        if len(self.requests) < MAX_LIVE:
            self._arrive(None, self.draw.randint(1, 60))

    def step(self) -> None:
        """Time passes, and an engine step begins."""
        self.now += self.draw.choice([0.0, 0.1, 0.1, 0.5, 2.0, 5.0, 20.0])
        self._tick()

    def admit(self) -> None:
        """The engine lets in whom it may, in its own order, as long as there is room."""
        for request in list(self.requests.values()):
            if not request.running and not request.parked and self._fits(request):
                self._admit(request)
                if self.draw.random() < 0.5:
                    return

    def preempt(self) -> None:
        running = [each for each in self.requests.values() if each.running]
        if running:
            request = self.draw.choice(running)
            request.running = False
            self.others.pop(request.name, None)
            self.program_scheduler.preempted(request.name, self.now)
            self._file(request)
            assert not request.parked
            self.done["preempted"] += 1
            self._carry_out()

    def finish(self) -> None:
        running = [each for each in self.requests.values() if each.running]
        if running:
            self._finish(self.draw.choice(running), TurnFinishReason.STOPPED)

    def abort(self) -> None:
        if self.requests:
            request = self.draw.choice(list(self.requests.values()))
            self.done["parked and aborted"] += request.parked
            self._finish(request, self.draw.choice([TurnFinishReason.ABORTED, TurnFinishReason.ERROR]))

    def end_program(self) -> None:
        known = [
            program
            for program in self.program_scheduler.state.programs
            if program.status not in OVER_STATUSES
        ]
        if known:
            program = self.draw.choice(known)
            place = self.places.pop(program.id, None)
            if place is not None:
                self.done["parked and ended"] += any(each.parked for each in place.waiting)
                self.others.update((each.name, each) for each in place.running)
            self._end(program.id)
            self.ended.append(program.id)
            self._carry_out()

    def _end(self, program_id: ProgramId) -> None:
        self._seq += 1
        event = ProgramEnd(program_id=program_id, seq=self._seq)
        self.program_scheduler.handle(ClientEventReceived("e", event), self.now)

    def reset_cache(self) -> None:
        device = self.draw.random() < 0.5
        self.program_scheduler.cache_reset(self.now, device=device)
        self.below = self.below[0], 0
        for place in self.places.values():
            if place.tier is DEVICE and not device:
                continue
            place.context = 0
            if place.tier in (HOST, DISK):
                place.tier = WAITING
        self._carry_out()

    def long_silence(self) -> None:
        self.now += self.draw.choice([70.0, 310.0, 700.0])
        self._tick()

    # -- how it happens ---------------------------------------------------------------

    def _arrive(self, program: str | None, tokens: int) -> None:
        self.numbers += 1
        request = Request(f"r{self.numbers}", program, self.numbers, tokens, self.now, since_s=self.now)
        before = (
            self.program_scheduler.state.programs.get(ProgramId(program)) if program is not None else None
        )
        if before is not None and before.status in OVER_STATUSES:
            for each in (each for each in self.requests.values() if each.program == program):
                each.program, each.outlived = None, True
        self.program_scheduler.arrived(
            RequestArrived(
                request_id=request.name, identity=read_identity(program, None), prompt_tokens=tokens
            ),
            self.now,
        )
        if program is not None:
            self._forget_as_the_table_did()
            known = self.program_scheduler.state.programs.get(ProgramId(program))
            self.newest = self.numbers
            place = self.places.setdefault(program, Place(returning=known.turns > 0))
            place.waiting.append(request)
            self.ended = [name for name in self.ended if name != program]
        self._carry_out()
        self.requests[request.name] = request
        self._file(request)
        self.done["parked"] += request.parked

    def _file(self, request: Request) -> None:
        """As the engine's queue does with a request that is new, preempted or filed anew."""
        request.parked = self.program_scheduler.is_parked(request.name)

    def _carry_out(self) -> None:
        for action in self.program_scheduler.take_actions():
            program = self.program_scheduler.state.programs.get(action.program_id)
            for name in program.live_requests if program is not None else ():
                if name in self.requests and not self.requests[name].running:
                    self._file(self.requests[name])

    def _tick(self) -> None:
        self.program_scheduler.tick(self.now)
        self._forget_as_the_table_did()
        self._see_who_is_released()

    def _see_who_is_released(self) -> None:
        """Of those who have waited for too long, one is released at a time, and the next soon after, if those
        released leave room for it."""
        tiers, before = self.program_scheduler.tiers, self.last_released
        self.last_released = tiers._released
        for request in self.requests.values():
            state = self.program_scheduler.request(request.name)
            request.released = state.released
            if state is tiers._released is not before:
                assert request.parked
                assert request.program is not None
                self.places[request.program].tier = DEVICE
                self.places[request.program].told = None
                self.done["released"] += 1
        self._carry_out()
        if self.now - tiers._released_s >= RELEASE_GAP_S:
            limit_s = self.program_scheduler.limits.hold_timeout_s
            if any(each.ran and each.released for each in self.requests.values()):
                limit_s *= MAX_HOLDS  # they may have their share of the device
            assert not any(
                each.parked and self.now - each.since_s > limit_s for each in self.requests.values()
            )

    def _forget_as_the_table_did(self) -> None:
        for name in list(self.places):
            program = self.program_scheduler.state.programs.get(ProgramId(name))
            if program is None or program.status in OVER_STATUSES:
                assert not self.places.pop(name).running, "with a request in the engine nobody is forgotten"
                self.done["forgotten"] += 1

    def _fits(self, request: Request) -> bool:
        used = sum(each.blocks for each in self.requests.values() if each.running)
        return not used or used + request.blocks <= DEVICE_BLOCKS

    def _admit(self, request: Request) -> None:
        self.program_scheduler.handle(
            RequestAdmitted(
                request_id=request.name,
                cached_tokens=0,
                tokens=request.tokens,
                block_hashes=(),
                resumed=request.ran,
            ),
            self.now,
        )
        request.running = request.ran = True
        request.runs_since_s = self.now
        place = self.places.get(request.program) if request.program is not None else None
        if place is None:
            self.others[request.name] = request
        else:
            self.others.pop(request.name, None)
            place.waiting = [each for each in place.waiting if each is not request]
            if request not in place.running:
                place.running.append(request)
            place.tier, place.returning = DEVICE, True
        self._carry_out()

    def _finish(self, request: Request, outcome: TurnFinishReason) -> None:
        del self.requests[request.name]
        self.others.pop(request.name, None)
        if request.program is None and not request.outlived:
            left = TurnFinished(request.name, TurnFinishReason.STOPPED, (), 0, 0, (), ())
            self.program_scheduler.handle(left, self.now)
            return
        output = self.draw.randint(1, 25)
        cached = (request.tokens + output) // BLOCK
        place = self.places.get(request.program) if request.program is not None else None
        if place is not None and request.program is not None:
            place.waiting = [each for each in place.waiting if each is not request]
            place.running = [each for each in place.running if each is not request]
            alone = not any(each.program == request.program for each in self.requests.values())
            if alone and outcome is TurnFinishReason.STOPPED:
                place.context = cached
            failed = outcome is not TurnFinishReason.STOPPED
            if failed and not (place.waiting or place.running or place.context):
                del self.places[request.program]  # a place for nothing
                self.done["left with nothing"] += 1
        self.program_scheduler.finished(
            TurnFinished(
                request_id=request.name,
                outcome=outcome,
                tool_calls=(),
                prompt_tokens=request.tokens,
                output_tokens=output,
                block_ids=range(cached),
                block_hashes=(),
            ),
            self.now,
        )
        self._carry_out()

    # -- what the policy is shown, and what it answers -------------------------------------

    def is_as_shown(self, view: PlacementView) -> None:
        self._forget_as_the_table_did()
        groups = {DEVICE: view.on_device, HOST: view.on_host, DISK: view.on_disk, WAITING: view.waiting}
        for tier, group in groups.items():
            expected = {
                name
                for name, place in self.places.items()
                if place.tier is tier and (tier is not WAITING or place.waiting)
            }
            assert {each.program_id for each in group} == expected
            assert len(group) == len(expected)
            for each in group:
                self._is_seen_as_it_is(each, tier)
        assert (view.host.capacity_blocks, view.disk.capacity_blocks) == self.below
        untracked = sum(each.tokens for each in self.others.values() if each.running)
        assert view.device.untracked_blocks == -(-untracked // BLOCK)

    def _is_seen_as_it_is(self, shown: ProgramTierView, tier: Tier) -> None:
        place = self.places[shown.program_id]
        assert (shown.tier, shown.activity, shown.pending) == (tier, place.activity, place.told is not None)
        assert (shown.returning, shown.context_blocks) == (place.returning, place.context)
        context = 0 if tier is DEVICE or not place.waiting else place.context
        assert shown.required_blocks == max((context, *(each.blocks for each in place.waiting)))
        assert shown.resident_blocks == sum(each.blocks for each in place.running)
        began_s = [each.runs_since_s for each in place.running if each.running]
        assert shown.running_since_s == min(began_s, default=math.inf)
        if place.waiting:
            earliest_s = min(each.since_s for each in place.waiting)
            assert shown.waiting_since_s <= earliest_s + 1e-6, "earlier where it repeats an aborted one"
        assert 0.0 <= shown.idleness.at(self.now) <= 1.0
        assert shown.peak_blocks >= shown.turn_blocks >= max(shown.context_blocks, shown.required_blocks)

    def moved(self, move: TierMove) -> None:
        place = self.places[move.program_id]
        if move.reason is MoveReason.OVERDUE and move.to is DEVICE:
            assert self.now - self.overdue_s >= self.policy.overdue_gap_s, "one at a time"
            self.overdue_s = self.now
        if move.when is MoveTiming.AFTER_TURN:
            place.told = self.newest
        else:
            place.told, place.tier = None, move.to
        self.done[move.reason.value] += 1
        self.done[f"to {move.to.value} {move.when.value}"] += 1

    # -- what must hold after each ---------------------------------------------------------------

    def each_program_is_in_exactly_one_queue(self) -> None:
        tiers = self.program_scheduler.tiers
        assert tiers._places.keys() == self.places.keys()
        assert Counter(tiers.counts()) == Counter(place.tier for place in self.places.values())
        for name, place in self.places.items():
            assert tiers.tier(ProgramId(name)) is place.tier
            assert place.told is None or place.tier is DEVICE
            assert not place.running or place.tier is DEVICE

    def those_are_parked_who_should_be(self) -> None:
        for request in self.requests.values():
            place = self.places.get(request.program) if request.program is not None else None
            expected = place is not None and place.parks(request)
            assert self.program_scheduler.is_parked(request.name) == expected
            assert request.parked == (expected and not request.running), "the engine was not told to look"

    def everybody_gets_in(self) -> None:
        """Nobody new comes and turns end. Nobody's tool ends unless there is no other hope for the others."""
        self._limit(PATIENT)
        hopeless = math.inf in (self.policy.standstill_s, self.policy.patience_s)
        owed = {name for name, request in self.requests.items() if request.parked}
        steps = 8 * len(self.requests) + 80
        for step in range(steps):
            self.now += 1.0
            self._tick()
            for request in list(self.requests.values()):
                if request.running and request.turn_began < step:
                    self._finish(request, TurnFinishReason.STOPPED)
            for request in list(self.requests.values()):
                if not request.running and not request.parked and self._fits(request):
                    request.turn_began = step
                    self._admit(request)
                    owed.discard(request.name)
            if hopeless:
                self._who_acts_ends()
            if not owed:
                break
        else:
            raise AssertionError(f"in {steps} s nobody let {sorted(owed)} in")
        self.done["let in at last"] += 1
        for request in list(self.requests.values()):
            request.turn_began = 0
        self._limit(LIMITS)

    def _limit(self, limits: SchedulerLimits) -> None:
        tiers = self.program_scheduler.tiers
        self.program_scheduler.limits = tiers.limits = limits

    def _who_acts_ends(self) -> None:
        for name in [name for name, place in self.places.items() if place.activity is ProgramActivity.ACTING]:
            program = self.program_scheduler.state.programs.get(ProgramId(name))
            del self.places[name]
            self._end(program.id)
            self._carry_out()


OFTEN = {
    PlacedLife.step: 30,
    PlacedLife.admit: 22,
    PlacedLife.finish: 22,
    PlacedLife.come_back: 18,
    PlacedLife.new_program: 5,
    PlacedLife.branch: 4,
    PlacedLife.stranger: 3,
    PlacedLife.preempt: 3,
    PlacedLife.abort: 2,
    PlacedLife.end_program: 2,
    PlacedLife.come_again_after_the_end: 1,
    PlacedLife.reset_cache: 0.3,
    PlacedLife.long_silence: 0.3,
}
"""How often each operation is drawn."""

USUAL = {"patience_s": 60.0, "standstill_s": 2.0, "overdue_gap_s": 5.0}
PAPERS = {"patience_s": math.inf, "absent_s": math.inf}
SETTINGS = [
    (USUAL, 40, 0),
    (USUAL, 30, 60),
    ({**PAPERS, "standstill_s": 2.0, "disk_idleness": 1.0}, 20, 20),
    ({**PAPERS, "standstill_s": math.inf}, 40, 40),
    ({"patience_s": 0.0, "standstill_s": 0.0}, 15, 15),
    ({"patience_s": 10.0, "standstill_s": math.inf}, 0, 0),
    ({"disk_idleness": 0.7, **USUAL}, 30, 60),
]
ALWAYS = (
    "parked", "branched", "preempted", "begun again", "parked and aborted", "parked and ended",
    MoveReason.FREE_CAPACITY.value, "let in at last",
)  # fmt: skip
STEPS, BETWEEN_DRAINS = 2000, 250


@pytest.mark.parametrize("seed", range(2 * len(SETTINGS)))
def test_whatever_happens_those_are_parked_who_should_be_and_nobody_for_ever(seed: int) -> None:
    rules, host, disk = SETTINGS[seed % len(SETTINGS)]
    life = PlacedLife(RelativeIdlenessPlacement(**rules), host, disk, seed)  # type: ignore[arg-type]
    for number in range(1, STEPS + 1):
        (operation,) = life.draw.choices(list(OFTEN), list(OFTEN.values()))
        operation(life)
        life.each_program_is_in_exactly_one_queue()
        life.those_are_parked_who_should_be()
        if number % BETWEEN_DRAINS == 0:
            life.everybody_gets_in()
    for what in ALWAYS:
        assert life.done[what], f"nobody was ever {what}: the life is too quiet to tell anything"
    TOLD.update(life.done)


TOLD: Counter[str] = Counter()


def test_the_lives_were_lively_enough() -> None:
    """Between them everything has happened that can."""
    if sum(TOLD.values()) < 1000:
        pytest.skip("the lives were not lived in this process")
    by_others = {MoveReason.GIVEN_UP, MoveReason.EXCHANGE}
    assert {reason.value for reason in set(MoveReason) - by_others} <= set(TOLD)
    assert TOLD["released"]
    assert TOLD["forgotten"]
    assert TOLD["left with nothing"]
    for tier in Tier:
        assert TOLD[f"to {tier.value} now"]
    assert TOLD["to host after_turn"]
