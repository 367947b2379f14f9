"""The placer on examples worked out by hand: who is parked, what the policy is shown, that nobody strands."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from sojourn.aeg import END, START, Aeg
from sojourn.ids import ProgramId
from sojourn.wire_events import AegReport, ProgramEnd, ProgramStart, ToolStart
from sojourn_server.core.events_and_actions import (
    EngineAction,
    EngineActionKind,
    StepCompleted,
    TurnFinishReason,
)
from sojourn_server.core.scheduler_state import SchedulerLimits
from sojourn_server.core.tier_manager import RETRY_S
from sojourn_server.policies.costs.reload_estimate import LinkCosts
from sojourn_server.policies.placement.placement_policy import (
    MAX_EXCHANGES,
    MoveReason,
    MoveTiming,
    TierMove,
)
from sojourn_server.policies.placement.placement_views import PlacementView, ProgramTierView, Tier
from sojourn_server.policies.placement.relative_idleness import RelativeIdlenessPlacement
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement
from sojourn_server.policies.policy_protocols import DecisionReason
from sojourn_server.policies.preset import Preset, load_preset
from sojourn_server.policies.retention_policies import FixedRetention
from sojourn_server.policies.workflow_prediction import ThreeTierPrediction
from sojourn_server.programs.program_status import ProgramStatus
from sojourn_server.programs.statements import STATED, StepsLeft
from virtual_engine import BASH, VirtualEngine, prompt

DEVICE, HOST, DISK, WAITING = Tier
TICK_S = 5.0


class Watched:
    """A policy that writes down what it is shown, and answers from a script where there is one."""

    is_used = True
    needs_tiers = True
    reads_costs = False
    k = 5
    tick_s = TICK_S
    idle_tick_s = 0.5

    def __init__(self, policy: RelativeIdlenessPlacement | None = None) -> None:
        self.policy = policy
        self.rules = policy or RelativeIdlenessPlacement()
        self.views: list[PlacementView] = []
        self.answer: list[TierMove] = []
        self.fails = False

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        if self.fails:
            raise RuntimeError("broken on purpose")
        self.views.append(view)
        if self.policy is not None:
            return self.policy.moves(view, now)
        answer, self.answer = self.answer, []
        return answer


def by_present_size(**settings: Any) -> Watched:
    usual = {"patience_s": 120.0, "standstill_s": 2.0}
    return Watched(RelativeIdlenessPlacement(**{**usual, **settings}))


class Engine(VirtualEngine):
    """A device of ``blocks`` blocks of four tokens, and what is below it."""

    def __init__(
        self,
        policy: Any,
        *,
        blocks: int = 20,
        host: int = 0,
        disk: int = 0,
        limits: SchedulerLimits | None = None,
        **questions: Any,
    ) -> None:
        preset: Preset = dataclasses.replace(load_preset("mori"), placement=policy, **questions)
        super().__init__(preset, blocks=blocks, limits=limits)
        self.program_scheduler.pool.host_blocks, self.program_scheduler.pool.disk_blocks = host, disk
        self.seeds: dict[str, int] = {}
        self.asked_again: set[str] = set()
        """Programs whose requests the engine has been told to look at again."""

    def come(self, program: str | None, blocks: int) -> str:
        """A request of so many blocks; one program's have a common beginning."""
        seed = self.seeds.setdefault(program or f"stranger {len(self.seeds)}", len(self.seeds) + 1)
        return self.arrive(program, prompt(4 * blocks, seed))

    def run(self, program: str | None, blocks: int) -> str:
        request = self.come(program, blocks)
        self.step()
        self.admit(request)
        return request

    def a_turn(self, program: str, blocks: int, seconds: float = 1.0) -> None:
        request = self.run(program, blocks)
        self.now += seconds
        self.finish(request)

    def end(self, program: str) -> None:
        self.send(ProgramEnd(program_id=program, seq=-1))

    def carry_out(self) -> None:
        before = len(self.done)
        super().carry_out()
        self.asked_again.update(action.program_id for action in self.done[before:])

    def parked(self, request: str) -> bool:
        return self.program_scheduler.is_parked(request)

    def tier(self, program: str) -> Tier:
        return self.program_scheduler.tiers.tier(ProgramId(program))

    def placed(self) -> list[EngineAction]:
        """Orders to bring KV somewhere, but for those of programs that are over."""
        orders = [action for action in self.done if action.kind is EngineActionKind.PLACE]
        return [action for action in orders if action.reason is DecisionReason.PLACED]

    def spend(self, seconds: float) -> None:
        """Let time pass in steps, as an engine does that has work left."""
        while seconds > 0:
            self.wait(min(10.0, seconds))
            seconds -= 10.0


def order(
    engine: Engine,
    policy: Watched,
    program: str,
    to: Tier,
    when: MoveTiming = MoveTiming.NOW,
    reason: MoveReason = MoveReason.OVER_CAPACITY,
) -> None:
    """Have the scripted policy make one move at the next step."""
    policy.answer = [TierMove(ProgramId(program), to, when, reason)]
    engine.program_scheduler.tiers._event = True
    engine.step()
    assert not policy.answer


def seen(view: PlacementView, program: str) -> ProgramTierView:
    groups = (view.on_device, view.on_host, view.on_disk, view.waiting)
    (found,) = [each for group in groups for each in group if each.program_id == program]
    return found


# -- what a summary says -----------------------------------------------------------------


def test_a_summary_says_where_a_program_is_placed_and_nothing_of_one_that_has_ended() -> None:
    def placed(program: str) -> Any:
        (listed,) = [each for each in engine.ask("programs")["programs"] if each["program_id"] == program]
        assert engine.ask("program", program_id=program)["placed"] == listed["placed"]
        return listed["placed"]

    engine = Engine(by_present_size())
    engine.a_turn("a", 15)
    engine.come("b", 10)
    engine.send(ProgramStart(program_id="c", seq=-1))
    assert (placed("a"), placed("b"), placed("c")) == ("device", "waiting", None)
    engine.end("a")
    assert placed("a") is None
    engine.come("a", 16)
    assert placed("a") == "waiting", "its id is used again"
    assert sum(engine.ask("stats")["placed"].values()) == 2
    assert VirtualEngine("fixed-ttl").program_scheduler.tiers.placed(ProgramId("a")) is None


# -- who is parked ---------------------------------------------------------------------


def test_a_report_of_load_names_the_programs_that_wait_without_kv() -> None:
    policy = Watched()
    engine = Engine(policy)
    for name in "abc":
        engine.come(name, 1)
    order(engine, policy, "b", DEVICE)
    told = engine.ask("load")
    assert (told["waiting"], told["requests"]) == (["a", "c"], 3)
    nowhere = VirtualEngine("continuum")
    nowhere.arrive("p", prompt(8))
    assert nowhere.ask("load")["waiting"] == [], "it places no programs"


def test_a_move_is_told_to_the_engine_and_to_all_who_go_by_it() -> None:
    policy = Watched()
    engine = Engine(policy, host=50, retention=FixedRetention(ttl_s=60.0))
    request = engine.come("a", 5)
    order(engine, policy, "a", DEVICE)
    engine.admit(request)
    engine.finish(request)
    assert ProgramId("a") in engine.program_scheduler.state.leases
    order(engine, policy, "a", HOST, MoveTiming.AFTER_TURN)
    assert len(engine.placed()) == 1, "its KV stays where it is until its turn is over"
    assert engine.program_scheduler.label(ProgramId("a")) is Tier.DEVICE
    waiting = engine.come("a", 6)
    engine.program_scheduler.predictor._changed.clear()
    order(engine, policy, "a", HOST)
    assert engine.placed()[-1] == EngineAction(
        EngineActionKind.PLACE, ProgramId("a"), DecisionReason.PLACED, HOST
    )
    assert ProgramId("a") not in engine.program_scheduler.state.leases
    assert engine.reasons("release") == ["placed"]
    assert ProgramId("a") in engine.program_scheduler.predictor._changed, (
        "its blocks stand elsewhere in the order of reuse"
    )
    assert engine.program_scheduler.label(ProgramId("a")) is Tier.HOST
    assert engine.status("a") is ProgramStatus.GATED
    order(engine, policy, "a", DEVICE)
    assert not engine.parked(waiting)
    assert engine.status("a") is ProgramStatus.REASONING


def test_the_view_has_the_measured_link_and_its_queue() -> None:
    policy = Watched()
    engine = Engine(policy, host=20)
    engine.come("p", 2)
    link = LinkCosts(None, 0.25, loads_queued_s=3.0)
    engine.program_scheduler.handle(StepCompleted(1, 0.1, 1, link), engine.now)
    order(engine, policy, "p", DEVICE)
    assert (policy.views[-1].host.load_s_per_block, policy.views[-1].host.load_queue_s) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("seen_s", "expected", "median_s", "longest_s"),
    [
        ((), {"expected_s": 40.0, "expected_p95_s": 400.0}, 40.0, 300.0),
        ((), {"expected_s": 40.0}, 40.0, 80.0),
        ((), {"expected_s": 0.0}, 2.0, 2.0),  # no estimate
        ((), {}, 2.0, 2.0),  # those of other tools
        ((5.0,) * 4, {"expected_s": 40.0}, 40.0, 80.0),  # the client knows this call
        ((5.0,) * 4, {}, 5.0, 5.0),
        ((5.0,) * 8, {"expected_s": 40.0}, 5.0, 5.0),  # where 40 was stated, calls took 5
    ],
)
def test_a_tool_takes_as_long_as_the_client_expects_if_such_estimates_were_right(
    seen_s: tuple[float, ...], expected: dict[str, float], median_s: float, longest_s: float
) -> None:
    policy = Watched()
    policy.reads_costs = True
    engine = Engine(policy)
    for duration_s, tool in [*((one, "deploy") for one in seen_s), (2.0, "other")]:
        histories = engine.program_scheduler.state.histories
        histories.tools.observe(tool, duration_s)
        if len(seen_s) == 8:
            histories.tool_estimates.learn(tool, 40.0, duration_s)
    request = engine.come("p", 2)
    order(engine, policy, "p", DEVICE)
    engine.admit(request)
    engine.now += 1.0
    engine.finish(request)
    engine.send(ToolStart(program_id="p", seq=-1, call_id="c", tool="deploy", **expected))
    engine.now += TICK_S
    engine.step()
    durations_s = seen(policy.views[-1], "p").gap_durations_s
    assert durations_s[len(durations_s) // 2] == pytest.approx(median_s)
    assert durations_s[-1] >= longest_s
    assert list(durations_s) == sorted(durations_s)


def test_the_cost_of_holding_is_the_mean_over_gaps_by_what_computing_again_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(ResidencyPricePlacement(), blocks=200)
    tiers = engine.program_scheduler.tiers
    known: dict[str, Any] = {"prefill_share": 0.5, "kv_read_share": 0.0, "mean_running": 4.0}
    for name, value in known.items():
        monkeypatch.setattr(type(tiers._reload), name, value)
    monkeypatch.setattr(type(tiers._reload), "seconds", lambda _, tokens: 5.0 * (tokens > 0))
    costs = []
    for gap_s in (4.0, 12.0, 1000.0, 0.0):  # of 20 program-seconds to compute the context again
        engine.a_turn("a", 5)
        costs.append(tiers._view().hold_cost)
        engine.wait(gap_s)
    engine.a_turn("a", 5)
    assert [*costs, tiers._view().hold_cost] == pytest.approx([0.0, 0.1, 0.2, 1.4 / 3, 0.35])
    for _ in range(100):
        engine.a_turn("a", 5)
    assert 0.0 <= tiers._view().hold_cost < 0.02, "recent returns count"


@pytest.mark.parametrize("kept_blocks", [0, 1])
def test_a_context_is_worth_what_the_next_prompt_finds_of_it(
    kept_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rebuild_s(program: str) -> float:
        return seen(engine.program_scheduler.tiers._view(), program).rebuild_s

    engine = Engine(ResidencyPricePlacement(), blocks=200)
    reload = engine.program_scheduler.tiers._reload
    monkeypatch.setattr(type(reload), "seconds", lambda _, tokens: 0.01 * tokens)
    for turn in range(8):  # Each prompt has ten blocks. Only the first block may repeat.
        engine.turn("a", [*prompt(4, 99 if kept_blocks else 10 + turn), *prompt(36, 100 + turn)])
        engine.wait(1.0)
        if turn == 5:
            engine.turn("a", prompt(4, 50))  # a side request says nothing about the context
            engine.wait(1.0)
    engine.turn("b", prompt(40, 200))
    engine.wait(1.0)
    for name in "ab":  # "b" is a new program of that type
        whole_s = 0.01 * engine.program(name).context_tokens
        assert rebuild_s(name) > 0, "0 means unknown"
        assert rebuild_s(name) == pytest.approx(0.1 * kept_blocks * whole_s, rel=0.2, abs=0.02)


# -- how often it is asked, and how much ----------------------------------------------------------


def test_where_nothing_happens_it_is_asked_now_and_then() -> None:
    policy = by_present_size(standstill_s=math.inf, patience_s=math.inf)
    engine = Engine(policy)
    request = engine.run("a", 15)
    engine.come("b", 10)
    engine.step()
    asked = len(policy.views)
    engine.wait(TICK_S - 0.1)
    assert len(policy.views) == asked
    engine.wait(0.1)
    assert len(policy.views) == asked + 1
    engine.finish(request)
    engine.step()
    asked = len(policy.views)
    engine.wait(0.5)
    assert len(policy.views) == asked + 1, "nothing runs, although somebody is kept out"
    engine.end("b")
    engine.step()
    asked = len(policy.views)
    engine.wait(0.5)
    assert len(policy.views) == asked, "nothing runs, but nobody waits either"


@pytest.mark.parametrize("reason", [MoveReason.EXCHANGE, MoveReason.ABSENT])
@pytest.mark.parametrize(("exchanges", "asked_again"), [(MAX_EXCHANGES - 1, False), (MAX_EXCHANGES, True)])
def test_after_as_many_exchanges_as_an_answer_may_have_it_is_asked_in_the_next_step(
    exchanges: int, asked_again: bool, reason: MoveReason
) -> None:
    policy = Watched()
    engine = Engine(policy, blocks=1000)
    names = [f"p{number}" for number in range(exchanges)]
    for name in names:
        engine.come(name, 2)
    policy.answer = [TierMove(ProgramId(name), DEVICE, MoveTiming.NOW, reason) for name in names]
    engine.step()
    asked = len(policy.views)
    engine.wait(0.01)
    assert len(policy.views) - asked == asked_again
    engine.wait(0.01)
    assert len(policy.views) - asked == asked_again, "not for ever"


# -- time --------------------------------------------------------------------------------------------


def test_long_parked_requests_are_released_one_after_the_other() -> None:
    """Released at once they would fill the device several times over."""
    policy = Watched()
    engine = Engine(policy, limits=SchedulerLimits(hold_timeout_s=60.0))
    for returning in "de":
        engine.a_turn(returning, 2)
        order(engine, policy, returning, Tier.WAITING)
    waits = [engine.come(name, blocks) for name, blocks in (("b", 10), ("c", 10), ("d", 6), ("e", 6))]
    engine.spend(65.0)
    assert [engine.parked(request) for request in waits] == [False, True, True, True]
    engine.admit(waits[0])
    engine.spend(1.0)
    assert [engine.parked(request) for request in waits[1:]] == [False, True, True]
    engine.finish(waits[1], outcome=TurnFinishReason.ABORTED)
    engine.spend(1.0)
    assert engine.parked(waits[2]), "lost, and with the running one more than a quarter of the device"
    engine.finish(waits[0])
    engine.spend(1.0)
    assert [engine.parked(request) for request in waits[2:]] == [False, True]
    engine.admit(waits[2])
    engine.spend(170.0)
    assert engine.parked(waits[3])
    engine.spend(10.0)
    assert not engine.parked(waits[3]), "four times the limit"
    assert engine.program_scheduler.tiers._last_overdue_promotion_s == -math.inf, "no turn of the policy's"


def holding(limit_s: float = 100.0) -> Engine:
    """An engine with a full device, whose policy releases parked requests after ``limit_s``."""
    engine = Engine(
        ResidencyPricePlacement(patience_s=math.inf), limits=SchedulerLimits(hold_timeout_s=limit_s)
    )
    engine.run("a", 15)
    return engine


def test_a_client_that_gives_up_and_tries_again_keeps_its_place() -> None:
    engine = holding()
    first = engine.come("b", 10)
    engine.spend(60.0)
    engine.finish(first, outcome=TurnFinishReason.ABORTED)
    engine.spend(1.0)
    other = engine.come("c", 10)
    again = engine.come("b", 10)
    engine.step()
    (shown,) = [each for each in engine.program_scheduler.tiers._view().waiting if each.program_id == "b"]
    assert (shown.waiting_since_s, shown.arrived_s) == (1000.0, 1000.0)
    engine.spend(38.9)
    assert engine.parked(again)
    engine.spend(0.2)
    assert not engine.parked(again)
    engine.admit(again)
    engine.spend(60.0)
    assert engine.parked(other), "it waits from its own arrival"
    engine.finish(again)
    engine.spend(1.0)
    assert not engine.parked(other)


@pytest.mark.parametrize("what", ["late", "another program", "ended between", "it ran", "a sibling runs"])
def test_only_a_repetition_keeps_the_place(what: str) -> None:
    engine = holding()
    first = engine.come("b", 10)
    engine.spend(60.0)
    if what in ("it ran", "a sibling runs"):
        engine.end("a")
        engine.step()
    if what == "it ran":
        engine.admit(first)
    elif what == "a sibling runs":
        sibling = engine.come("b", 10)
        engine.admit(sibling)
    engine.finish(first, outcome=TurnFinishReason.ABORTED)
    if what == "late":
        engine.spend(RETRY_S + 0.1)
    elif what == "ended between":
        engine.end("b")
    elif what == "a sibling runs":
        engine.finish(sibling, outcome=TurnFinishReason.ABORTED)
    if what in ("it ran", "a sibling runs"):
        engine.run("d", 15)
    again = engine.come("d" if what == "another program" else "b", 10)
    engine.spend(99.0)
    assert engine.parked(again)


# -- failures ------------------------------------------------------------------------------------------


def test_where_the_policy_fails_everybody_is_let_in_and_the_caller_hears_of_it_once() -> None:
    policy = by_present_size()
    engine = Engine(policy, host=50)
    running = engine.run("a", 15)
    early = engine.come("b", 10)
    engine.step()
    policy.fails = True
    engine.asked_again.clear()
    late = engine.come("c", 10)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        engine.step()
    engine.step()  # the actions that were due before the failure come with the next event
    requests = [running, early, late]
    assert not any(engine.parked(each) for each in requests)
    assert engine.asked_again == {"b", "c"}
    assert engine.reasons("to_device").count("given_up") == 2
    assert engine.program("b").status is engine.status("c") is ProgramStatus.REASONING
    placed, asked = len(engine.placed()), len(policy.views)
    policy.fails = False
    after = engine.come("d", 100)
    assert not engine.parked(after)
    for request in [early, late, after]:
        engine.admit(request)
    engine.program_scheduler.preempted(after, engine.now)
    engine.program_scheduler.cache_reset(engine.now)
    for request in [*requests, after]:
        engine.wait(TICK_S)
        engine.finish(request)
    engine.end("a")
    engine.wait(TICK_S)
    assert len(engine.placed()) == placed
    assert len(policy.views) == asked
    assert engine.tier("b") is DEVICE
    label = engine.program_scheduler.label
    assert (label(ProgramId("b")), label(ProgramId("a")), label(None)) == (DEVICE, WAITING, WAITING)
    tier_manager = engine.program_scheduler.tiers
    assert sum(tier_manager.counts().values()) == 0
    assert not tier_manager._places, "no table holds a request"


# -- the cache is cleared ------------------------------------------------------------------------------------


def test_a_reset_of_what_is_below_keeps_the_contexts_of_the_device() -> None:
    policy = Watched()
    engine = Engine(policy, host=50, disk=50)
    for name, tier in (("host", HOST), ("disk", DISK), ("device", DEVICE)):
        request = engine.come(name, 5)
        order(engine, policy, name, DEVICE)
        engine.admit(request)
        engine.finish(request)
        order(engine, policy, name, tier)
    engine.program_scheduler.cache_reset(engine.now, device=False)
    known = {name: engine.program_scheduler.context(ProgramId(name)) for name in ("host", "disk", "device")}
    assert [name for name, hashes in known.items() if hashes] == ["device"]


def hinted(engine: Engine, program: str, blocks: int, **hint: Any) -> str:
    request = engine.arrive(program, prompt(4 * blocks, len(program)), **hint)
    engine.step()
    engine.admit(request)
    return request


def shown(policy: Watched, engine: Engine, program: str) -> ProgramTierView:
    engine.now += TICK_S
    engine.step()
    return seen(policy.views[-1], program)


def costs_watched(**questions: Any) -> tuple[Watched, Engine]:
    policy = Watched()
    policy.reads_costs = True
    return policy, Engine(policy, workflow_prediction=ThreeTierPrediction(), **questions)


def test_a_policy_sees_what_clients_state() -> None:
    policy, engine = costs_watched()
    hint = {"priority": 3, "deadline_seconds": 40.0, "kv_retention_ttl_seconds": 7.0, "expected_resume": True}
    arrived_s = engine.now
    engine.finish(hinted(engine, "p", 2, **hint))
    view = shown(policy, engine, "p")
    assert (view.importance, view.return_chance) == (3, 1.0)
    assert view.due_s == arrived_s + 40.0
    assert view.gap_durations_s == pytest.approx([7.0 * (2 * n + 1) / 16 for n in range(8)])
    assert not view.work_stated
    for _ in range(8):
        engine.now += 14.0 - TICK_S
        engine.finish(hinted(engine, "p", 2, **hint))
        last = shown(policy, engine, "p").gap_durations_s
    assert last == pytest.approx([14.0] * 8, rel=0.1), "it asks for half of the time that it needs"
    for number, chance in enumerate([1.0] * 8 + [0.0]):  # believed when it was right eight times
        engine.finish(hinted(engine, f"q{number}", 2, sojourn={"expected_steps_left": 0}))
        assert shown(policy, engine, f"q{number}").return_chance == chance
        engine.end(f"q{number}")


@pytest.mark.parametrize("says", ["plan", "graph"])
def test_a_program_is_worth_more_near_the_end_of_its_plan_or_graph(says: str) -> None:
    policy, engine = costs_watched()

    def turn(program: str, steps: int, done: int, **ours: Any) -> ProgramTierView:
        """A turn of a program that says that so many of its steps are done."""
        output = BASH
        if steps and says == "plan":
            plan = [{"step": "do", "status": "pending"}] * (steps - 1 - done)
            output = json.dumps({"name": "update_plan", "arguments": {"plan": plan}})
        elif steps:
            chain = [f"node {number}" for number in range(steps)]
            ours["node"] = chain[done]
            graph = Aeg(chain, [(START, chain[0]), *pairwise(chain), (chain[-1], END)])
            engine.send(ProgramStart(program_id=program, seq=-1, agent_type=f"type of {program}"))
            engine.send(AegReport(program_id=program, seq=-1, graph_hash=graph.hash, graph=graph.wire()))
        request = hinted(engine, program, 2, **({"sojourn": ours} if ours else {}))
        engine.now += 1.0
        engine.finish(request, output)
        return shown(policy, engine, program)

    for number in range(8):
        steps = (2, 20)[number % 2]
        for done in range(steps):
            view = turn(f"ended {number}", steps, done)
        assert not view.work_stated, "believed once eight programs have ended as they said"
        engine.end(f"ended {number}")
    near, far, without = turn("near", 20, 18), turn("far", 20, 0), turn("without", 0, 0)
    assert [view.work_stated for view in (near, far, without)] == [True, True, False]
    worth = ResidencyPricePlacement().worth
    assert worth(near) > worth(without) > worth(far)
    turn("far", 20, 18, expected_steps_left=20)
    steps_left = engine.program_scheduler.state.programs.get(ProgramId("far")).steps_left
    assert steps_left == StepsLeft(STATED, 21.0, after=1), "the client says more than its plan or graph"
