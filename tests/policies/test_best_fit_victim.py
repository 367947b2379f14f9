"""Whom best fit preempts: against the rule said naively, and in a small engine in which requests grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.policies import preemption_policies
from sojourn_server.policies.admission_policies import DemandForecastAdmission
from sojourn_server.policies.forecasting import STEP_POINTS, needed_blocks
from sojourn_server.policies.policy_views import (
    AdmissionView,
    BlockShortage,
    GrowthStatistics,
    RunningRequestView,
)
from sojourn_server.policies.preemption_policies import (
    HORIZON_STEPS,
    IMMUNE_TOKENS,
    MAX_CANDIDATES_COMPARED,
    MOST_PREEMPTIONS,
    BestFitVictim,
    VictimPolicy,
)
from sojourn_server.policies.preset import load_preset

NEED = BlockShortage(100, 16, 0.05)


def request(name: str, position: int, **facts: object) -> RunningRequestView:
    return RunningRequestView(name, position + 1, position, 10, of_program=True)._replace(**facts)


# -- the rule, said naively ------------------------------------------------------------------


def needs(running: list[RunningRequestView], size: int) -> list[Fraction]:
    """Exactly, and at each point anew."""
    needed = []
    for step in STEP_POINTS:
        tokens = Fraction(0)
        for view in running:
            present = view.context_tokens + Fraction(size, 2)
            if not view.remaining:
                tokens += present
            else:
                lives = [present + step for left in view.remaining if left > step]
                tokens += sum(lives, Fraction(0)) / len(view.remaining)
        needed.append(tokens / size)
    return needed


def candidates_of(running: list[RunningRequestView]) -> list[RunningRequestView]:
    """Those who may be preempted."""

    def may_go(view: RunningRequestView) -> bool:
        often = view.preemptions >= MOST_PREEMPTIONS
        lately = view.preemptions > 0 and view.stayed_tokens < IMMUNE_TOKENS
        return not often and not lately

    candidates = [view for view in running if may_go(view)]
    if not candidates:
        fewest = min(view.preemptions for view in running)
        candidates = [view for view in running if view.preemptions == fewest]
    return candidates


def naive(running: list[RunningRequestView], need: BlockShortage) -> tuple[list[RunningRequestView], bool]:
    """The candidates, best first, and whether the best one is unambiguous."""
    candidates = candidates_of(running)

    def worth(view: RunningRequestView) -> tuple[float, ...]:
        others = needs([other for other in running if other is not view], need.block_size)
        most = max(need for at, need in zip(STEP_POINTS, others, strict=True) if at <= HORIZON_STEPS)
        stays = 0 if view.freed_blocks is None else view.blocks - view.freed_blocks
        room = need.available_blocks - stays
        own = Fraction(2 * view.context_tokens + need.block_size, 2 * need.block_size)
        fits = [at for at, taken in zip(STEP_POINTS, others, strict=True) if taken + own <= room]
        away = fits[0] if fits else 2 * STEP_POINTS[-1]
        work = view.recover_s / need.step_s if need.step_s else 0.0
        left = sum(view.remaining) / len(view.remaining) if view.remaining else 0.0
        loss = (away + work) / max(1.0, view.output_tokens + left)
        return (max(0.0, float(most - room)), loss, -view.program_rank, -view.position)

    ordered = sorted(candidates, key=worth)
    if len(ordered) < 2:
        return ordered, True
    (lacking, loss, *_), (next_lacking, next_loss, *_) = worth(ordered[0]), worth(ordered[1])
    near = math.isclose(lacking, next_lacking, rel_tol=1e-9, abs_tol=1e-5)
    if near and lacking == next_lacking:
        return ordered, loss == next_loss or not math.isclose(loss, next_loss, rel_tol=1e-9)
    return ordered, not near


lives = st.lists(st.integers(1, 3000).map(float), min_size=1, max_size=8).map(sorted).map(tuple)
requests = st.builds(
    RunningRequestView, st.just(""), st.integers(1, 4), st.just(0), st.integers(0, 20),
    context_tokens=st.integers(1, 2000), output_tokens=st.integers(0, 2000), remaining=st.none() | lives,
    preemptions=st.integers(0, 4), stayed_tokens=st.integers(0, 130), recover_s=st.floats(0, 5),
    of_program=st.booleans(), freed_blocks=st.none() | st.integers(0, 20),
).map(lambda view: view._replace(blocks=max(view.blocks, view.freed_blocks or 0)))  # fmt: skip
sets = st.lists(requests, min_size=1, max_size=6).map(
    lambda views: [view._replace(request_id=f"r{at}", position=at) for at, view in enumerate(views)]
)
shortages = st.builds(
    BlockShortage,
    st.integers(0, 400),
    st.sampled_from([4, 16, 64]),
    step_s=st.sampled_from([0.0, 0.05]),
)


@settings(max_examples=150)
@given(running=sets, need=shortages)
def test_it_chooses_like_a_naive_implementation(
    running: list[RunningRequestView], need: BlockShortage
) -> None:
    chosen = BestFitVictim().victim(running, need, 0.0)
    if not any(view.of_program and view.remaining for view in running):
        candidates = candidates_of(running)
        if len(candidates) == len(running) or not any(view.of_program for view in running):
            assert chosen is None
        else:
            assert chosen == max(candidates, key=lambda view: (view.position, view.request_id)).request_id
        return
    ordered, clear = naive(running, need)
    if clear:
        assert chosen == ordered[0].request_id
    else:
        assert chosen in {view.request_id for view in ordered}


@given(running=sets, need=shortages, data=st.data())
def test_the_order_of_the_candidates_does_not_matter(
    running: list[RunningRequestView], need: BlockShortage, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(running))
    assert BestFitVictim().victim(shuffled, need, 0.0) == BestFitVictim().victim(running, need, 0.0)


# -- the rule, by example ---------------------------------------------------------------------------


def test_of_very_many_a_bounded_number_is_weighed_and_a_good_one_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = Random(5)
    running = [
        request(
            f"r{at}", at, blocks=(size := draw.randint(1, 400)), context_tokens=16 * size,
            output_tokens=draw.randint(0, 900), recover_s=size / 100,
            remaining=tuple(sorted(float(draw.randint(1, 3000)) for _ in range(8))),
        )
        for at in range(400)
    ]  # fmt: skip
    need = BlockShortage(sum(view.blocks for view in running) + 40, 16, step_s=0.05)
    weighed: list[int] = []
    original = preemption_policies.needed_blocks

    def counted(views: list[RunningRequestView], size: int) -> list[float]:
        weighed.append(len(views))
        return original(views, size)

    monkeypatch.setattr(preemption_policies, "needed_blocks", counted)
    BestFitVictim().victim(running, need, 0.0)
    assert sum(weighed) <= 400 + MAX_CANDIDATES_COMPARED
    # Where nobody by leaving makes room for the others, whoever frees most is among them.
    tight = need._replace(available_blocks=need.available_blocks // 2)
    monkeypatch.setattr(preemption_policies, "HORIZON_STEPS", 1.0)
    chosen = BestFitVictim().victim(running, tight, 0.0)
    monkeypatch.setattr(preemption_policies, "MAX_CANDIDATES_COMPARED", 1000)
    assert BestFitVictim().victim(running, tight, 0.0) == chosen


def test_a_program_that_holds_too_little_is_spared() -> None:
    """The cascade of the paper's Figure 1: the last admitted is small, and the others go on growing."""
    running = [
        request("long", 0, context_tokens=1000, remaining=(1000.0,)),
        request("longer", 1, context_tokens=400, remaining=(1000.0,)),
        request("small", 2, context_tokens=40, remaining=(30.0,)),
    ]
    # Of the first two, at 512 steps, either needs 95 or 57.5 blocks; the small one is gone by then.
    assert BestFitVictim().victim(running, NEED._replace(available_blocks=90), 0.0) == "long"
    assert VictimPolicy().victim(running, NEED, 0.0) is None, "the last, which is the small one"
    for least_tokens, chosen in ((1000, "long"), (1001, None)):
        policy = BestFitVictim(least_tokens=least_tokens)
        assert policy.victim(running, NEED._replace(available_blocks=90), 0.0) == chosen


def test_of_those_that_leave_enough_the_one_that_loses_least_goes() -> None:
    short = request("short", 0, context_tokens=800, output_tokens=50, remaining=(50.0,))
    long = request("long", 1, context_tokens=800, output_tokens=50, remaining=(400.0,))
    room = NEED._replace(available_blocks=80)
    # Either alone fits. The long one has to wait for fifty steps only, and for the short one that is much.
    assert BestFitVictim().victim([short, long], room, 0.0) == "long"
    assert (
        BestFitVictim().victim([long._replace(program_rank=1), short._replace(program_rank=2)], room, 0.0)
        == "long"
    )
    dear = long._replace(recover_s=1000.0)
    assert BestFitVictim().victim([short, dear], room, 0.0) == "short", (
        "nor is its KV to be had again for nothing"
    )


def test_shared_blocks_free_no_memory() -> None:
    """Of a pool of 100 blocks A and B share 60 and have ten each, C has twenty. All three go on growing."""
    shared = {"blocks": 70, "freed_blocks": 10, "context_tokens": 70 * 16 - 8, "remaining": (1000.0,)}
    # B's output is long: it would lose least.
    running = [
        request("A", 0, **shared),
        request("B", 1, output_tokens=100_000, **shared),
        request("C", 2, blocks=20, freed_blocks=20, context_tokens=312, remaining=(1000.0,)),
    ]
    need = NEED._replace(available_blocks=160)
    # In 512 steps any two need 64 blocks more: with A or B gone 154 of 100, with C gone 204 of 160.
    assert BestFitVictim().victim(running, need, 0.0) == "C"
    alone = [view._replace(freed_blocks=None) for view in running]
    assert BestFitVictim().victim(alone, need, 0.0) == "B"


def test_shared_blocks_do_not_count_for_the_return() -> None:
    """No shortage in either case. The one that shares waits for the other's end: over ten seconds."""
    facts = {"context_tokens": 40 * 16 - 8, "remaining": (500.0,), "output_tokens": 100}
    sharing = request("sharing", 0, blocks=40, freed_blocks=5, **facts)
    alone = request("alone", 1, blocks=40, freed_blocks=40, recover_s=10.0, **facts)
    need = NEED._replace(available_blocks=110)
    assert BestFitVictim().victim([sharing, alone], need, 0.0) == "alone"
    assert BestFitVictim().victim([sharing._replace(freed_blocks=40), alone], need, 0.0) == "sharing"


def test_the_same_pause_hurts_a_short_answer_more() -> None:
    """Both would be back after ten seconds of work; of the longer one, that is less for each token."""
    facts = {"context_tokens": 400, "output_tokens": 100, "recover_s": 10.0}
    longer = request("longer", 0, remaining=(600.0,), **facts)
    shorter = request("shorter", 1, remaining=(500.0,), **facts)
    assert BestFitVictim().victim([longer, shorter], NEED._replace(available_blocks=1000), 0.0) == "longer"
    older = longer._replace(output_tokens=0, remaining=(500.0,))
    assert BestFitVictim().victim([older, shorter], NEED._replace(available_blocks=1000), 0.0) == "shorter"


def test_what_fits_to_the_block_fits() -> None:
    """Three equally likely lives do not add up to the last digit: no trillionth of a block decides."""
    lives = ((2000.0,), (2000.0,) * 3, (2000.0,) * 7)
    for blocks in range(60, 400):
        for cheap_lives, dear_lives in permutations(lives, 2):
            # Without either, the other fills the memory exactly in 1024 steps.
            context = 16 * blocks - 8
            cheap = request("cheap", 0, context_tokens=context, remaining=cheap_lives, output_tokens=10_000)
            dear = request("dear", 1, context_tokens=context, remaining=dear_lives, recover_s=50.0)
            assert (
                BestFitVictim().victim([cheap, dear], NEED._replace(available_blocks=blocks + 64), 0.0)
                == "cheap"
            )


def test_ties_go_to_the_latest_request() -> None:
    running = [request(f"r{at}", at, context_tokens=800, remaining=(500.0,)) for at in range(4)]
    assert BestFitVictim().victim(running, NEED, 0.0) == "r3"
    same_program = [view._replace(program_rank=1) for view in running]
    assert BestFitVictim().victim(same_program, NEED, 0.0) == "r3"


# -- left to the engine, and immune requests ------------------------------------------------------


@pytest.mark.parametrize("unknown", [{"remaining": None}, {"remaining": ()}, {"of_program": False}])
def test_without_any_prediction_the_engine_chooses(unknown: dict[str, object]) -> None:
    known = [request(f"r{at}", at, context_tokens=800, remaining=(500.0,)) for at in range(3)]
    assert BestFitVictim().victim([view._replace(**unknown) for view in known], NEED, 0.0) is None
    assert (
        BestFitVictim().victim([known[0], *[view._replace(**unknown) for view in known[1:]]], NEED, 0.0)
        is not None
    )


def test_predictions_for_untracked_requests_alone_leave_the_choice_to_the_engine() -> None:
    untracked = request("s", 0, context_tokens=800, remaining=(500.0,), of_program=False)
    silent = request("p", 1, context_tokens=800, remaining=None)
    assert BestFitVictim().victim([untracked, silent], NEED, 0.0) is None


BIG = request("big", 0, context_tokens=1400, remaining=(900.0,))
SMALL = request("small", 1, context_tokens=300, remaining=(900.0,))


@pytest.mark.parametrize(
    ("history", "chosen"),
    [
        ({}, "big"),
        ({"stayed_tokens": 0}, "big"),  # it was never preempted: it may be new
        ({"preemptions": 1, "stayed_tokens": 63}, "small"),
        ({"preemptions": 1, "stayed_tokens": 64}, "big"),
        ({"preemptions": 2, "stayed_tokens": 64}, "big"),
        ({"preemptions": 3, "stayed_tokens": 10**6}, "small"),
    ],
)
def test_no_request_is_preempted_again_at_once_nor_too_often(history: dict[str, int], chosen: str) -> None:
    assert BestFitVictim().victim([BIG._replace(**history), SMALL], NEED, 0.0) == chosen


def test_where_all_are_immune_those_go_that_went_least_often() -> None:
    def both(big: int, small: int) -> str | None:
        running = [BIG._replace(preemptions=big), SMALL._replace(preemptions=small)]
        return BestFitVictim().victim(running, NEED, 0.0)

    assert both(1, 1) == "big"
    assert both(2, 1) == "small"
    assert both(7, 8) == "big"


def test_the_preset_of_the_paper_chooses_so() -> None:
    assert load_preset("tetris").victim == BestFitVictim()


# -- in an engine ----------------------------------------------------------------------------------------

SIZE = 16
Foresee = Callable[["Life", Random], tuple[float, ...] | None]


@dataclass
class Life:
    """A request and how its life goes on, which only the engine knows."""

    name: str
    rank: int
    prompt: int
    output: int
    written: int = 0
    held: int = 0
    """Blocks."""
    when_in: int = 0
    preemptions: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.written

    @property
    def blocks(self) -> int:
        """That it needs to write another token."""
        return math.ceil((self.context + 1) / SIZE)


def exactly(life: Life, random: Random) -> tuple[float, ...]:
    return (float(life.output - life.written),)


def roughly(life: Life, random: Random) -> tuple[float, ...]:
    left = life.output - life.written
    return tuple(sorted(max(1.0, left * random.lognormvariate(0, 1.0)) for _ in range(8)))


def sometimes(life: Life, random: Random) -> tuple[float, ...] | None:
    return roughly(life, random) if life.rank % 3 else None


class Engine:
    """As vLLM: requests take blocks as needed, preempted ones go to the head of the queue, and no request is
    admitted in a step with a preemption."""

    def __init__(self, lives: list[Life], room: int, policy: BestFitVictim | VictimPolicy, foresee: Foresee,
                 random: Random, entry: DemandForecastAdmission | None = None) -> None:  # fmt: skip
        self.waiting, self.running = list(lives), list[Life]()
        self.room, self.policy, self.foresee, self.random, self.entry = room, policy, foresee, random, entry
        self.steps = 0
        self.preempted_at: list[int] = []
        self.foreseen: dict[tuple[str, int], tuple[float, ...] | None] = {}

    @property
    def free(self) -> int:
        return self.room - sum(life.held for life in self.running)

    def run(self) -> None:
        while self.waiting or self.running:
            self.steps += 1
            assert self.steps < 200_000, "every request ends"
            before = len(self.preempted_at)
            for life in list(self.running):
                if life in self.running:
                    self.allocate(life)
            if len(self.preempted_at) == before:
                self.admit()
            for life in self.running:
                life.written += 1
            self.running = [life for life in self.running if life.written < life.output]

    def allocate(self, life: Life) -> None:
        """Its next token may need a block of another request."""
        while life.blocks - life.held > self.free:
            victim = self.victim()
            self.running.remove(victim)
            self.waiting.insert(0, victim)
            victim.held = 0
            victim.preemptions += 1
            self.preempted_at.append(self.steps)
            if victim is life:
                return
        life.held = life.blocks

    def left(self, life: Life) -> tuple[float, ...] | None:
        """Asked again every 32 tokens."""
        asked_at = life.written // 32 * 32
        key = (life.name, asked_at)
        if key not in self.foreseen:
            self.foreseen[key] = self.foresee(life, self.random)
        foreseen = self.foreseen[key]
        return foreseen and tuple(max(1.0, left - (life.written - asked_at)) for left in foreseen)

    def views(self, lives: list[Life]) -> list[RunningRequestView]:
        return [
            RunningRequestView(
                life.name,
                life.rank,
                position,
                life.held,
                context_tokens=life.context,
                output_tokens=life.written,
                most_tokens=10**6,
                remaining=self.left(life),
                preemptions=life.preemptions,
                stayed_tokens=life.written - life.when_in,
                recover_s=1e-3 * life.context,
                of_program=True,
            )
            for position, life in enumerate(lives)
        ]

    def victim(self) -> Life:
        views = self.views(self.running)
        chosen = self.policy.victim(views, BlockShortage(self.room, SIZE, 0.05), 0.0)
        if chosen is None:
            return self.running[-1]
        by_name = {life.name: life for life in self.running}
        if isinstance(self.policy, BestFitVictim):
            may_go = [life for life in self.running if self.may_go(life)]
            fewest = min(life.preemptions for life in self.running)
            assert by_name[chosen] in may_go if may_go else by_name[chosen].preemptions == fewest
        return by_name[chosen]

    @staticmethod
    def may_go(life: Life) -> bool:
        stayed = life.written - life.when_in
        often = life.preemptions >= MOST_PREEMPTIONS
        return life.preemptions == 0 or (not often and stayed >= IMMUNE_TOKENS)

    def admit(self) -> None:
        while self.waiting and self.waiting[0].blocks <= self.free and self.may_admit(self.waiting[0]):
            life = self.waiting.pop(0)
            life.when_in, life.held = life.written, life.blocks
            self.running.append(life)

    def may_admit(self, life: Life) -> bool:
        if self.entry is None:
            return True
        return self.entry.may_admit(
            AdmissionView(
                need_blocks=life.blocks, free_blocks=self.free, pool_blocks=self.room, block_size=SIZE,
                max_context_tokens=10**6, anything_running=bool(self.running), earlier=(),
                growth=GrowthStatistics(), own=self.views([life])[0],
                needed_blocks=tuple(needed_blocks(self.views(self.running), SIZE)), 
                available_blocks=self.room,
            ),
            0.0,
        )  # fmt: skip


def crowd(random: Random, number: int, room: int) -> list[Life]:
    """Requests of which each alone fits."""
    lives = []
    for rank in range(number):
        prompt = random.randint(1, room * SIZE // 4)
        output = min(math.ceil(random.lognormvariate(5, 1.2)), (room - 1) * SIZE - prompt)
        lives.append(Life(f"r{rank}", rank, prompt, output))
    return lives


@pytest.mark.parametrize("foresee", [exactly, roughly, sometimes])
@pytest.mark.parametrize("gated", [False, True], ids=["no admission control", "forecast admission"])
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), number=st.integers(2, 20), room=st.integers(20, 120))
def test_every_request_ends_and_no_single_one_pays_for_all(
    foresee: Foresee, gated: bool, seed: int, number: int, room: int
) -> None:
    random = Random(seed)
    lives = crowd(random, number, room)
    engine = Engine(
        lives, room, BestFitVictim(), foresee, random, DemandForecastAdmission() if gated else None
    )
    engine.run()
    assert all(life.written == life.output for life in lives)


def cascades(policy: BestFitVictim | VictimPolicy, foresee: Foresee, gated: bool = False) -> tuple[int, int]:
    """Preemptions in all, and those within sixteen steps of one before."""
    total = close = 0
    for seed in range(12):
        random = Random(seed)
        lives = crowd(random, 30, 100)
        engine = Engine(lives, 100, policy, foresee, random, DemandForecastAdmission() if gated else None)
        engine.run()
        at = engine.preempted_at
        total += len(at)
        close += sum(later - before <= 16 for before, later in pairwise(at))
    return total, close


def test_one_preemption_is_enough_more_often_than_by_chance() -> None:
    """What the paper is about (§1): a victim chosen in ignorance is followed by others."""
    total, close = cascades(VictimPolicy(), exactly)
    for foresee in (exactly, roughly):
        fitted_total, fitted_close = cascades(BestFitVictim(), foresee)
        assert fitted_total < total
        assert fitted_close < close


def test_with_forecast_admission_preemptions_are_rare() -> None:
    ungated, _ = cascades(BestFitVictim(), exactly)
    gated, _ = cascades(BestFitVictim(), exactly, gated=True)
    assert gated < ungated / 3
