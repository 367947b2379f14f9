"""What the steward foresees of programs, and what hangs on it: scores, leases, prefetches, the ledger."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from sojourn import Aeg
from sojourn.aeg import END, START
from sojourn.ids import ProgramId
from sojourn.wire_events import AegReport, ProgramEnd, ToolStart, ToolStop
from sojourn_server.core.events_and_actions import BlocksEvicted, EngineActionKind, Tick, TurnFinishReason
from sojourn_server.core.workflow_predictor import MAX_PREFETCH_TRIES
from sojourn_server.metrics.turn_ledger import LossCause
from sojourn_server.policies.policy_views import AbandonedBranch
from sojourn_server.policies.preset import Preset
from sojourn_server.programs.program_state import ProgramState
from virtual_engine import BASH, BLOCK_TOKENS, VirtualEngine

PROMPT = list(range(1, 101))


class Agents:
    """Programs that take turns on one engine, each turn's prompt the one before and a little more."""

    def __init__(self, policy: str | Preset = "saga-paper", **options: Any) -> None:
        self.engine = VirtualEngine(policy, **options)
        self.contexts: dict[str, list[int]] = {}
        self.made = 0

    def turn(self, name: str, text: str = BASH, **hint: Any) -> ProgramState:
        """One turn; ``hint`` are fields of our part of the context."""
        self.made += 1
        before = self.contexts.get(name)
        tokens = [*before, 7, 7, *(10_000 + self.made * 8 + n for n in range(8))] if before else PROMPT
        self.contexts[name] = tokens
        self.engine.turn(name, tokens, text, **({"sojourn": hint} if hint else {}))
        return self.program(name)

    def end(self, name: str) -> None:
        self.engine.send(ProgramEnd(program_id=name, seq=-1))
        del self.contexts[name]

    def program(self, name: str) -> ProgramState:
        return self.engine.program(name)

    def score(self, name: str) -> tuple[float, ...]:
        program_scheduler = self.engine.program_scheduler
        return program_scheduler.owner_score(program_scheduler.owner_standing(ProgramId(name)))


def test_without_hints_a_type_is_cold_until_thirty_of_it_have_ended() -> None:
    agents = Agents()
    for number in range(31):  # the first of them makes it a type
        program = agents.turn(f"a{number}")
        assert (program.prediction_source, program.continuation_probability, program.p_reuse) == (
            "cold",
            None,
            None,
        )
        agents.engine.wait(1.0)
        agents.turn(f"a{number}")
        agents.end(f"a{number}")
    first = agents.turn("late")
    assert first.prediction_source == "inferred"
    assert first.continuation_probability == pytest.approx(1.0, abs=0.05)
    agents.engine.wait(1.0)
    second = agents.turn("late")
    assert second.continuation_probability < 0.2, "all of its kind ended there"
    assert second.p_reuse <= second.continuation_probability


def test_steps_left_are_believed_at_once_and_none_left_goes_first() -> None:
    agents = Agents()
    near, far = agents.turn("near", expected_steps_left=0.0), agents.turn("far", expected_steps_left=9.0)
    assert (near.continuation_probability, near.prediction_source) == (0.0, "hints")
    assert far.continuation_probability == pytest.approx(0.9)
    assert agents.score("near") < agents.score("far")
    assert ProgramId("near") not in agents.engine.program_scheduler.state.leases


def test_memory_pressure_ends_leases_before_their_time() -> None:
    agents = Agents(blocks=100)
    scheduler = agents.engine.program_scheduler
    for _ in range(30):
        scheduler.state.histories.tools.observe("bash:pytest", 100.0)
    agents.turn("p", expected_steps_left=9.0)
    leases = scheduler.state.leases
    agents.engine.wait(60.0)
    scheduler.handle(Tick(used_blocks=70), agents.engine.now)
    assert ProgramId("p") in leases
    scheduler.handle(Tick(used_blocks=90), agents.engine.now)
    assert ProgramId("p") not in leases, "half of its hundred seconds are over"


def test_a_declared_graph_says_what_follows_its_node() -> None:
    agents = Agents()
    graph = Aeg(
        {"plan": (), "act": ("bash",)},
        [(START, "plan"), ("plan", "act", 1.0), ("act", "plan", 0.25), ("act", END, 0.75)],
    )
    agents.engine.turn("p", PROMPT)
    agents.contexts["p"] = PROMPT
    agents.engine.send(AegReport(program_id="p", seq=-1, graph_hash=graph.hash, graph=graph.wire()))
    assert agents.turn("p", node="plan").continuation_probability == pytest.approx(1.0)
    assert agents.turn("p", node="act").continuation_probability == pytest.approx(0.25)
    for undeclared in ("nobody", END, "x" * 5000):
        assert agents.turn("p", node=undeclared).prediction_source == "cold"


def test_each_successor_counts_with_the_share_of_the_context_that_its_prompts_reused() -> None:
    """Prompts at the step "whole" begin with all of the context, those at "part" with half of it."""
    graph = Aeg(
        ("plan", "split", "whole", "part"),
        [(START, "plan"), (START, "split"), ("plan", "whole", 0.75), ("plan", "part", 0.25),
         ("split", "part"), ("whole", END), ("part", END)],
    )  # fmt: skip
    agents = Agents(blocks=4000)

    def at(name: str, node: str) -> ProgramState:
        agents.turn(name, agent_type="planner")
        agents.engine.send(AegReport(program_id=name, seq=-1, graph_hash=graph.hash, graph=graph.wire()))
        return agents.turn(name, agent_type="planner", node=node)

    for number in range(6):
        at(name := f"p{number}", "plan")
        if number % 2:
            agents.contexts[name] = agents.contexts[name][: len(PROMPT) // 2]
        agents.turn(name, agent_type="planner", node="part" if number % 2 else "whole")
        agents.end(name)
    to_either, to_part = at("x", "plan").p_reuse, at("y", "split").p_reuse
    half = to_part / (1 - 0.1)  # the tool's output is a tenth of the next prompt
    assert half == pytest.approx(0.5, abs=0.1)
    assert to_either == pytest.approx(0.75 * 0.9 + 0.25 * to_part, abs=0.05)


def test_a_request_in_the_engine_keeps_its_programs_blocks_from_going_first() -> None:
    agents = Agents()
    agents.turn("a", expected_steps_left=0.5)
    agents.turn("b", expected_steps_left=20.0)
    assert agents.score("a") < agents.score("b")
    agents.engine.arrive("a", [*agents.contexts["a"], 7, 7, 1])
    assert agents.score("a") > agents.score("b")


def test_what_a_turn_left_behind_has_an_age_a_size_and_a_chance_of_its_own() -> None:
    agents = Agents()
    agents.turn("a", expected_steps_left=9.0)
    agents.engine.wait(50.0)
    agents.turn("a", expected_steps_left=9.0)
    blocks, now = agents.program("a").cached_blocks, agents.engine.now

    def left(reuse: float = 1.0, used_s: float = now, size: int = blocks) -> tuple[float, ...]:
        program_scheduler = agents.engine.program_scheduler
        return program_scheduler.owner_score(
            program_scheduler.owner_standing(ProgramId("a"), AbandonedBranch(used_s, size)), reuse
        )

    assert left() == agents.score("a")
    assert left(reuse=0.0) < left(reuse=0.5) < left(), "less likely to be used"
    assert left(used_s=now - 50.0) < left(), "older"
    assert left(size=blocks + 1) < left(), "larger"


def test_a_tool_that_only_an_event_tells_is_a_step_all_the_same() -> None:
    """The output shows no call; what is learned and what is asked for go by the same name."""
    agents = Agents()
    start = {"call_id": "c", "seq": -1, "tool": "browser"}
    for number in range(32):
        for _ in range(3):
            program = agents.turn(f"a{number}", "no call")
            agents.engine.send(ToolStart(program_id=f"a{number}", **start))
            agents.engine.wait(1.0)
        if number < 31:
            agents.end(f"a{number}")
    assert program.prediction_source == "inferred"
    assert program.continuation_probability < 0.2


def test_everything_that_changes_a_score_says_so() -> None:
    agents = Agents()
    workflow_predictor = agents.engine.program_scheduler.predictor

    def scored() -> dict[str, tuple[float, ...]]:
        return {name: agents.score(name) for name in agents.contexts}

    random = Random(3)
    for name in "abcdef":
        agents.turn(name)
    before, scale = scored(), workflow_predictor.scale_changes
    workflow_predictor._changed.clear()
    for _ in range(400):
        name = random.choice("abcdef")
        match random.randrange(6):
            case 0:
                agents.turn(name, expected_steps_left=random.choice((0.0, 3.0)))
            case 1:
                agents.engine.arrive(name, [*agents.contexts[name], 7, 7, random.randrange(9)])
            case 2:
                for request in list(agents.program(name).live_requests):
                    agents.engine.finish(request, outcome=random.choice(list(TurnFinishReason)))
            case 3:
                call = {"program_id": name, "call_id": "c", "seq": -1}
                agents.engine.send(ToolStart(**call, tool="bash", tool_class="pytest"))
                agents.engine.wait(0.1)
                agents.engine.send(ToolStop(**call, duration_s=0.1))
            case 4:
                agents.engine.wait(random.choice((0.1, 1.0, 1900.0)))
            case 5:
                agents.engine.send(ProgramEnd(program_id=name, seq=-1))
        now = scored()
        if workflow_predictor.scale_changes == scale:
            assert {ProgramId(n) for n in now if now[n] != before[n]} <= workflow_predictor._changed.keys()
        before, scale = now, workflow_predictor.scale_changes
        workflow_predictor._changed.clear()


# -- prefetch ---------------------------------------------------------------------------


def prefetches(agents: Agents) -> list[tuple[str, float]]:
    decisions, _ = agents.engine.program_scheduler.decisions.since(0, 10_000)
    return [(d.reason, d.numbers["blocks"]) for d in decisions if d.kind == "prefetch"]


def in_its_tool(*, in_host: bool) -> Agents:
    """The program "p" runs its tool. 15 blocks of its context were evicted and may be in host memory. Forty
    other programs have ended after three turns each."""
    before = Agents()
    for number in range(40):
        for _ in range(3):
            before.turn(f"a{number}")
            before.engine.wait(1.0)
        before.end(f"a{number}")
    agents = Agents(histories=before.engine.program_scheduler.histories)
    agents.turn("p")
    assert prefetches(agents) == []
    if in_host:
        agents.engine.in_host.update(agents.engine.program_scheduler.context(ProgramId("p")) or ())
    agents.engine.evict(agents.contexts["p"], keep=10)
    return agents


def test_a_prefix_is_asked_for_before_the_tool_may_end_and_said_to_be_nowhere() -> None:
    agents = in_its_tool(in_host=False)
    agents.engine.wait(1.1)
    agents.engine.wait(50.0)
    assert prefetches(agents) == [("no_tier", 15.0)], "told once"


def test_a_context_below_is_on_the_device_before_its_tool_ends() -> None:
    agents = in_its_tool(in_host=True)
    agents.engine.spare_blocks = 1000
    agents.engine.wait(1.1)
    assert prefetches(agents) == [("to_device", 15.0)]
    assert agents.engine.loaded_ahead == [("p", 15)]
    agents.turn("p")
    shown = agents.engine.ask("program", program_id="p")["ledger"][-1]["tokens"]
    assert shown["lost"] == {}
    agents.engine.wait(50.0)
    assert len(agents.engine.loaded_ahead) == 1


def test_without_spare_blocks_it_is_tried_again_a_bounded_number_of_times() -> None:
    agents = in_its_tool(in_host=True)
    agents.engine.wait(1.1)
    assert prefetches(agents) == [("in_host", 15.0)]
    agents.engine.spare_blocks = 55  # of which 50 are left for requests
    agents.engine.wait(0.2)
    assert prefetches(agents)[1:] == [("to_device", 5.0)], "the rest when it fits"
    agents.engine.spare_blocks = 0
    for _ in range(100):
        agents.engine.wait(1.0)
    started = [action for action in agents.engine.done if action.kind is EngineActionKind.PREFETCH]
    assert len(started) == MAX_PREFETCH_TRIES
    assert len(prefetches(agents)) == 2, "only what came of it is told"


def test_where_the_next_step_begins_otherwise_its_prefix_is_loaded() -> None:
    """The coder's prompts begin alike in all programs, and not as the planner's do."""
    agents = Agents()
    agents.engine.spare_blocks = 1000
    coder = list(range(5000, 5080))
    graph = Aeg({"plan": ("bash",), "code": ("bash",)}, [("plan", "code", 1.0), ("code", "plan", 1.0)])

    def turn(name: str, node: str, tokens: list[int]) -> list[int]:
        agents.engine.turn(name, tokens, BASH, sojourn={"node": node, "agent_type": "team"})
        agents.engine.send(AegReport(program_id=name, seq=-1, graph_hash=graph.hash, graph=graph.wire()))
        return list(agents.engine.program_scheduler.context(ProgramId(name)) or ())

    first = turn("a", "code", [*coder, *range(6000, 6040)])
    agents.engine.in_host.update(first)
    agents.engine.cached.clear()
    turn("b", "plan", PROMPT)
    turn("b", "plan", PROMPT)
    agents.engine.wait(1.0)
    assert agents.engine.loaded_ahead == [], "one program's turn shows no common prefix"
    turn("c", "code", [*coder, *range(7000, 7040)])
    agents.engine.cached.clear()
    turn("d", "plan", PROMPT)
    turn("d", "plan", PROMPT)
    agents.engine.wait(1.0)
    assert agents.engine.loaded_ahead == [("d", len(coder) // BLOCK_TOKENS)]
    # The program's own turn at the step says more than other programs' turns.
    own = turn("d", "code", [*coder, *range(8000, 8100)])
    turn("d", "plan", PROMPT)
    agents.engine.in_host.update(own)
    agents.engine.cached.clear()
    turn("d", "plan", PROMPT)
    agents.engine.loaded_ahead.clear()
    agents.engine.wait(1.0)
    assert agents.engine.loaded_ahead == [("d", len(own))]
    agents.engine.program_scheduler.cache_reset(agents.engine.now)
    assert agents.engine.program_scheduler.prefetch_keys(ProgramId("d")) == ()


def test_the_ledger_says_what_was_foreseen_and_at_what_score_it_was_evicted() -> None:
    agents = Agents()
    agents.turn("p", expected_steps_left=1.0)
    taker = agents.engine.arrive("q", PROMPT)
    agents.engine.admit(taker)
    program_scheduler = agents.engine.program_scheduler
    score = agents.score("p")
    for block in list(program_scheduler.state.contexts.get(ProgramId("p")) or ()):
        agents.engine.handle(BlocksEvicted(taker, [(block, block)], score), agents.engine.now)
        agents.engine.cached.discard(block)
    agents.turn("p", expected_steps_left=1.0)
    shown = agents.engine.ask("program", program_id="p")
    first, second = shown["ledger"]
    assert second["tier"] == "hints"
    assert first["goes_on"] == second["goes_on"] == pytest.approx(0.5)
    assert second["evictor"] == "q"
    assert second["evicted_score"] == [bool(score[0]), pytest.approx(score[1])]
    assert second["tokens"]["lost"] == {LossCause.EVICTED.value: 100}
