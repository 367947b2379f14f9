"""A ``ProgramScheduler`` for tests, with one method for each event. All methods go through ``handle``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sojourn_server.core import events_and_actions as ev
from sojourn_server.core.leases import Lease
from sojourn_server.core.program_scheduler import ProgramScheduler
from sojourn_server.core.request_table import QueueState, RequestState
from sojourn_server.policies.policy_views import ReclaimRequest, WaitingRequestView
from sojourn_server.policies.preemption_policies import RecoveryMethod


def check_tables(program_scheduler: ProgramScheduler) -> None:
    """Assert the invariants that hold in and between the scheduler's tables after every event."""
    state = program_scheduler.state
    programs, requests, leases = state.programs, state.requests.states, state.leases
    assert not state.actions, "actions of a handled event are left"
    earliest = sorted(leases.values(), key=lambda lease: (-lease.program.rank, lease.program.id))
    holder = {block_id: lease.program.id for lease in earliest for block_id in lease.block_ids}
    assert leases.held_blocks == len(holder), "leased blocks"
    freed = {program_id: lease.freed_blocks for program_id, lease in leases.items()}
    assert freed == {program_id: list(holder.values()).count(program_id) for program_id in freed}
    owners = state.owners
    for block_id, owner in owners.of.items():
        for program_id in (owner,) if isinstance(owner, str) else owner:
            assert block_id in owners.blocks[program_id], "a block of a program without it"
    for program_id, owned in owners.blocks.items():
        assert all(program_id in owners.owners_of(each) for each in owned), "a program's block without it"
    assert not owners.orphans.keys() & owners.of.keys(), "an owned orphan"
    assert all(programs.get(name) is lease.program for name, lease in leases.items()), (
        "a lease of an unknown program"
    )
    assert program_scheduler.awaiting_first_token.keys() <= requests.keys(), (
        "a first token of an unknown request"
    )
    assert program_scheduler.forecaster.holding.keys() <= requests.keys(), "an unknown request holds KV"
    assert all(program_id in programs for program_id in state.release_reasons), "unknown program let go"
    totals = state.ledger.totals
    sources = (totals.device_tokens, totals.host_tokens, totals.new_tokens, totals.tail_tokens)
    assert sum(sources) + sum(totals.lost_tokens.values()) == totals.prompt_tokens, (
        "the ledger does not add up"
    )
    assert min(*sources, *totals.lost_tokens.values()) >= 0
    for program in programs:
        for request_id in program.live_requests:
            assert requests[request_id].program is program, f"request {request_id} of another program"


class SchedulerDriver(ProgramScheduler):
    """A ``ProgramScheduler`` that collects its engine actions in ``actions``.

    After each event it checks that the tables are consistent (``check_tables``). With more than 100
    programs, it checks only after every 256th event.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.actions: list[ev.EngineAction | ev.LeaseGranted] = []
        self._events = 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().handle(event, now)
        self.actions += [each for each in actions if isinstance(each, ev.EngineAction | ev.LeaseGranted)]
        self._events += 1
        # The check visits all programs, so with many of them it runs only at every 256th event.
        if len(self.state.programs) <= 100 or self._events % 256 == 0:
            check_tables(self)
        return actions

    def take_actions(self) -> list[ev.EngineAction | ev.LeaseGranted]:
        actions, self.actions = self.actions, []
        return actions

    def is_parked(self, request_id: str) -> bool:
        """Whether a waiting request may not run even if blocks are free."""
        place = self.queue_place(request_id)
        return place is not None and place.state is QueueState.PARKED

    def tick(self, now: float) -> None:
        self.handle(ev.Tick(), now)

    def arrived(self, event: ev.RequestArrived, now: float) -> RequestState:
        self.handle(event, now)
        return self.state.requests.states[event.request_id]

    def first_token(self, request_id: str, now: float) -> None:
        self.handle(ev.FirstToken(request_id), now)

    def preempted(self, request_id: str, now: float, **more: Any) -> RecoveryMethod:
        (answer,) = self.handle(ev.RequestPreempted(request_id, **more), now)[-1:]
        assert isinstance(answer, ev.RecoveryChosen)
        return answer.method

    def finished(self, event: ev.TurnFinished, now: float) -> Lease | None:
        actions = self.handle(event, now)
        granted = next((action for action in actions if isinstance(action, ev.LeaseGranted)), None)
        return self.state.leases.get(granted.program_id) if granted is not None else None

    def waiting_view(self, request_id: str) -> WaitingRequestView:
        """Return the view of a waiting request that the queue-order policy gets."""
        return self._waiting_view(self._requests.states[request_id])

    def make_room(self, need: ReclaimRequest, now: float) -> int:
        """Ask for blocks. Return the number of leases that ended."""
        return len(self.handle(ev.BlocksNeeded(need), now))

    def may_admit(
        self, request_state: RequestState, need_blocks: int, free_blocks: int, now: float, **more: Any
    ) -> bool:
        event = ev.AdmissionRequested(request_state.request_id, need_blocks, free_blocks, **more)
        return ev.answer_of(self.handle(event, now), ev.RequestChosen) is not None

    def victim(self, running: Sequence[Any], now: float) -> str | None:
        return self._chosen(ev.VictimNeeded(running), now)

    def plan_proactive_offload(
        self, running: Sequence[Any], used_blocks: int, now: float, **more: Any
    ) -> str | None:
        return self._chosen(ev.DemandSampled(used_blocks, running, **more), now)

    def _chosen(self, event: ev.Event, now: float) -> str | None:
        chosen = ev.answer_of(self.handle(event, now), ev.RequestChosen)
        return chosen.request_id if chosen is not None else None

    def cache_reset(self, now: float, *, device: bool = True) -> None:
        self.handle(ev.CacheReset(device), now)
