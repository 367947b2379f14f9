"""Any order of events, legal or not, leaves a ``ProgramScheduler`` consistent and within its bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_driver import check_tables
from sojourn.ids import ProgramId
from sojourn.wire_codec import EventOutcome
from sojourn.wire_events import AegReport, AnyEvent, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_server.core import events_and_actions as ev
from sojourn_server.core.program_scheduler import ProgramScheduler
from sojourn_server.core.request_hints import CONTEXT_KEY, read_identity
from sojourn_server.core.request_table import QueueState
from sojourn_server.core.scheduler_state import KVPoolConfig, SchedulerLimits, SchedulerState
from sojourn_server.policies.policy_views import ReclaimRequest, RunningRequestView
from sojourn_server.policies.preset import load_preset
from sojourn_server.programs.program_status import OVER_STATUSES, ProgramStatus
from sojourn_server.programs.tool_call_parsers import ParsedToolCall

BLOCKS, BLOCK_TOKENS = 40, 4
LIMITS = SchedulerLimits(
    max_programs=4, max_held_s=30.0, hold_timeout_s=40.0,
    idle_program_s=60.0, silent_program_s=20.0,
)  # fmt: skip
REQUESTS = st.sampled_from([f"r{number}" for number in range(8)])
"""Few ids, so that events about requests that are not in the engine, or twice in it, are frequent."""
PROGRAMS = st.sampled_from([f"p{number}" for number in range(6)])
TOKENS = st.integers(1, BLOCKS * BLOCK_TOKENS // 2)
SMALL = st.integers(0, 12)
SECONDS = st.floats(0.0, 15.0)
BLOCK_IDS = st.lists(st.integers(1, BLOCKS), unique=True, max_size=BLOCKS // 2)


def hashes(seed: int, tokens: int) -> list[int]:
    return [seed * 1000 + number for number in range(tokens // BLOCK_TOKENS)]


class Life(RuleBasedStateMachine):
    preset = "continuum"

    @initialize()
    def begin(self) -> None:
        pool = KVPoolConfig(
            blocks=BLOCKS, block_size=BLOCK_TOKENS, block_bytes=64, host_blocks=20, disk_blocks=20
        )
        self.scheduler = ProgramScheduler(SchedulerState(load_preset(self.preset), pool, limits=LIMITS))
        self.scheduler.recorder.strict = True
        self.now = 1000.0
        self.seq = 0
        self.held: set[ProgramId] = set()
        """Programs whose blocks an engine would hold."""
        self.is_off = False
        self.most_live = 0
        """Largest number of programs with requests at a time so far."""

    def handle(self, event: ev.Event) -> list[ev.Action]:
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            if isinstance(action, ev.EngineAction):
                if action.kind in (ev.EngineActionKind.RELEASE, ev.EngineActionKind.DROP):
                    self.held.discard(action.program_id)
            elif isinstance(action, ev.LeaseGranted):
                self.held.add(action.program_id)
        return actions

    # -- requests ---------------------------------------------------------------

    @rule(request=REQUESTS, program=st.none() | PROGRAMS, tokens=TOKENS, seed=SMALL, hint=st.sampled_from([
        {}, {"expected_resume": False}, {"kv_retention_ttl_seconds": 1e9}, {"expected_output_length": 7},
        {"sojourn": {"final": True}}, {"sojourn": {"heartbeat": True, "expected_steps_left": 2.0}},
    ]))  # fmt: skip
    def arrive(self, request: str, program: str | None, tokens: int, seed: int, hint: dict[str, Any]) -> None:
        xargs = {CONTEXT_KEY: json.dumps({"program_id": program, **hint})} if program and hint else None
        blocks = hashes(seed, tokens) if xargs is None else None
        self.handle(ev.RequestArrived(request, read_identity(program, xargs), tokens, block_hashes=blocks))

    @rule(request=REQUESTS, seed=SMALL, tokens=TOKENS, hits=SMALL, resumed=st.booleans())
    def admit(self, request: str, seed: int, tokens: int, hits: int, resumed: bool) -> None:
        cached = min(hits * BLOCK_TOKENS, tokens - 1)
        self.handle(
            ev.RequestAdmitted(request, cached, tokens, hashes(seed, tokens), resumed, most_tokens=50)
        )

    @rule(request=REQUESTS)
    def first_token(self, request: str) -> None:
        self.handle(ev.FirstToken(request))

    @rule(request=REQUESTS, tokens=TOKENS, blocks=BLOCK_IDS)
    def preempt(self, request: str, tokens: int, blocks: list[int]) -> None:
        (*_, answer) = self.handle(ev.RequestPreempted(request, tokens=tokens, block_ids=blocks))
        assert isinstance(answer, ev.RecoveryChosen)

    @rule(
        request=REQUESTS,
        outcome=st.sampled_from(ev.TurnFinishReason),
        tool=st.sampled_from(["", "sh", "ls"]),
        blocks=BLOCK_IDS,
        seed=SMALL,
    )
    def finish(
        self, request: str, outcome: ev.TurnFinishReason, tool: str, blocks: list[int], seed: int
    ) -> None:
        calls, tokens = (ParsedToolCall(tool),) if tool else (), len(blocks) * BLOCK_TOKENS + 1
        self.handle(ev.TurnFinished(request, outcome, calls, tokens, 3, blocks, hashes(seed, tokens)))

    # -- clients and time --------------------------------------------------------

    @rule(program=PROGRAMS, kind=st.sampled_from([
        ProgramStart, ToolStart, ToolStop, Heartbeat, AegReport, ProgramEnd,
    ]), call=st.sampled_from(["c1", "c2"]), again=st.booleans())  # fmt: skip
    def client_event(self, program: str, kind: type, call: str, again: bool) -> None:
        self.seq += not again
        more: dict[str, Any] = {}
        if kind is ToolStart:
            more = {"call_id": call, "tool": "sh"}
        elif kind is ToolStop:
            more = {"call_id": call, "duration_s": 2.0}
        elif kind is AegReport:
            more = {"graph_hash": "0" * 64}
        elif kind is ProgramEnd:
            more = {"status": "ok"}
        event: AnyEvent = kind(program_id=program, seq=self.seq, **more)
        (*_, answer) = self.handle(ev.ClientEventReceived("e", event))
        assert isinstance(answer, EventOutcome)

    @rule(seconds=SECONDS)
    def tick(self, seconds: float) -> None:
        self.now += seconds
        leases = self.scheduler.state.leases
        due = [lease for lease in leases.values() if lease.deadline_s() <= self.now and not lease.waiting]
        before = len(leases)
        self.handle(ev.Tick())
        assert len(leases) <= before - len(due)

    @rule(seconds=SECONDS, tokens=SMALL)
    def complete_step(self, seconds: float, tokens: int) -> None:
        self.handle(ev.StepCompleted(tokens, seconds, 1))

    # -- memory -------------------------------------------------------------------

    @rule(request=REQUESTS, need=SMALL, free=SMALL, running=st.booleans())
    def ask_admission(self, request: str, need: int, free: int, running: bool) -> None:
        if self.scheduler.request(request) is not None:
            self.handle(ev.AdmissionRequested(request, need, free, running, most_tokens=20))

    @rule(request=REQUESTS, blocks=SMALL, running=st.booleans(), anything=st.booleans())
    def need_blocks(self, request: str, blocks: int, running: bool, anything: bool) -> None:
        known = self.scheduler.request(request)
        need = ReclaimRequest(
            program_id=known.program_id if known else None,
            program_rank=known.rank if known else 10**6,
            blocks=blocks + 1,
            running=running,
            anything_running=anything,
        )
        if self.scheduler.leases.may_reclaim(need):
            self.handle(ev.BlocksNeeded(need))

    @rule(requests=st.lists(REQUESTS, min_size=1, unique=True), used=SMALL, sample=st.booleans())
    def look_at_running(self, requests: list[str], used: int, sample: bool) -> None:
        views = [
            RunningRequestView(name, 1, place, 2, context_tokens=8, output_tokens=1, most_tokens=20)
            for place, name in enumerate(requests)
        ]
        event = ev.DemandSampled(used, views) if sample else ev.VictimNeeded(views, used)
        chosen = ev.answer_of(self.handle(event), ev.RequestChosen)
        assert chosen is None or chosen.request_id in requests

    @rule(request=REQUESTS, left=st.lists(st.floats(1.0, 1e6), min_size=1, max_size=3))
    def predict(self, request: str, left: list[float]) -> None:
        self.handle(ev.OutputLengthPredicted(request, 0, tuple(sorted(left))))

    @rule(blocks=BLOCK_IDS, taker=st.none() | REQUESTS)
    def evict(self, blocks: list[int], taker: str | None) -> None:
        self.handle(ev.BlocksEvicted(taker, [(block, block * 1000) for block in blocks]))
        assert not self.scheduler.owners.of.keys() & set(blocks)

    @rule(program=PROGRAMS, missing=SMALL, ready=SMALL, spare=SMALL)
    def start_prefetch(self, program: str, missing: int, ready: int, spare: int) -> None:
        self.handle(ev.PrefetchStarted(ProgramId(program), missing, 0, 0, min(ready, missing), spare))

    @rule(device=st.booleans())
    def reset_cache(self, device: bool) -> None:
        self.handle(ev.CacheReset(device))

    @rule()
    def start_reset(self) -> None:
        self.handle(ev.CacheResetStarted())

    @rule(on=st.booleans())
    def switch_policy(self, on: bool) -> None:
        self.handle(ev.PolicySwitched(on))
        self.is_off = not on

    # -- what holds after each -------------------------------------------------------

    @invariant()
    def tables_agree(self) -> None:
        check_tables(self.scheduler)
        state = self.scheduler.state
        assert self.held == state.leases.keys(), "the engine holds what is leased"
        assert not (self.is_off and self.held), "stock vLLM leases nothing"
        assert state.leases.held_blocks <= state.leases.budget_blocks
        for lease in state.leases.values():
            assert lease.expires_s <= max(lease.limit_s, lease.granted_s + lease.ttl_s)
            assert lease.limit_s <= lease.granted_s + max(lease.ttl_s, LIMITS.max_held_s)

    @invariant()
    def memory_is_bounded(self) -> None:
        state = self.scheduler.state
        live = sum(bool(program.live_requests) for program in state.programs)
        self.most_live = max(self.most_live, live)
        # The table makes room when a program comes, not when a request ends.
        assert len(state.programs) <= max(LIMITS.max_programs, self.most_live + 1)
        for program in state.programs:
            if program.status is ProgramStatus.ENDED and not program.live_requests:
                assert program.id not in state.leases
                assert self.scheduler.tiers.placed(program.id) is None

    @invariant()
    def questions_have_answers(self) -> None:
        for request_id in self.scheduler.state.requests.states:
            place = self.scheduler.queue_place(request_id)
            assert place.changes_s > self.now
            assert place.state is QueueState.OPEN or not self.is_off
        for program in self.scheduler.state.programs:
            assert self.scheduler.owner_standing(program.id) is not None

    def teardown(self) -> None:
        """Requests leave and time passes: nothing but ended programs remains."""
        if not hasattr(self, "scheduler"):
            return
        state = self.scheduler.state
        for request_id in list(state.requests.states):
            self.handle(ev.TurnFinished(request_id, ev.TurnFinishReason.STOPPED, (), 8, 1, [1, 2], [1, 2]))
        for _ in range(8):
            self.now += 500.0
            self.handle(ev.Tick())
            self.tables_agree()
        assert not self.held
        assert state.requests.states == {}
        assert not any(self.scheduler.tiers.counts().values())
        assert all(program.status in OVER_STATUSES for program in state.programs)


@pytest.mark.parametrize("preset", ["continuum", "mori", "saga", "tetris", "admit", "autellix"])
def test_any_order_of_events(preset: str) -> None:
    machine = type(f"Life_{preset}", (Life,), {"preset": preset})
    case = machine.TestCase
    case.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
    case("runTest").runTest()
