"""Keeps one queue of programs per tier, and asks the placement policy for moves.

Every program with a request in the engine or with KV is in the queue of one tier, its *place*. The *Waiting
queue* has those programs of the tier WAITING that have a waiting request.

An event only marks its program as changed. When the policy is called, the policy's view of each changed
program is built once, whatever the number of events since the last call. ``tick`` is called once per engine
step. It calls the policy if there was an event, or when the policy's interval has passed. So a burst of tool
ends causes only one call, and the policy moves no program while a step is being planned.

Requests of programs that are not on the device are parked (``parked_requests``). After an error of the policy
no request is parked, and the engine's own order applies.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from sojourn.ids import ProgramId

from ..policies.placement.placement_policy import (
    LOOKAHEAD,
    MoveReason,
    MoveTiming,
    PlacementPolicy,
    TierMove,
    WaitingKey,
)
from ..policies.placement.placement_views import (
    PlacementTrigger,
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
    TierCapacity,
)
from ..programs.idleness import IdlenessTracker
from ..programs.program_state import ProgramState
from .parked_requests import ParkedRequests, RequestWait
from .placed_programs import MAX_TOOL_REPORTS, PlacedProgram, PlacedProgramViews
from .request_table import RequestState
from .scheduler_state import SchedulerState
from .shared_block_accounting import SharedBlockAccounting

MAX_LONGEST_WAITING_IN_VIEW = 16
"""Maximum number of longest-waiting programs in one view of the policy."""

MAX_WAITING_IN_VIEW = 256
"""Maximum number of programs from the front of the Waiting queue in one view of the policy."""

MAX_FURTHER_WAITING_IN_VIEW = 32
"""Maximum number of programs behind the first ``LOOKAHEAD`` of the Waiting queue in one view of the policy.
The next view continues behind them, so the policy sees the whole queue in turn."""

MAX_REFRESHED = 64
"""Number of programs at the front of the Waiting queue whose views are rebuilt when the expected prefix of
their kind changes."""
UNTHROTTLED_PROGRAMS = 200
MIN_INTERVAL_S_PER_PROGRAM = 50e-6
"""Minimum interval between two calls of the policy, in seconds per program beyond ``UNTHROTTLED_PROGRAMS``.
Programs in the tier WAITING do not count. A call takes about 1 µs per program, and 5 µs while programs wait,
so calls take 2 % to 10 % of the time."""

EXCHANGED_SHARE_WEIGHT = 1 / 8
"""Weight of the newest return in ``PlacementView.exchanged_share``, a moving average."""

MoveListener = Callable[[ProgramState, TierMove, float], None]
"""Callback for each move; gets the program, the move and ``now``."""


class TierManager:
    """Tracks the tier in which each program of one engine is placed, and the queue of waiting programs.

    The manager asks the placement policy for moves. Times are seconds on the engine's monotonic clock.
    """

    def __init__(self, state: SchedulerState, moved: MoveListener) -> None:
        """``moved`` is called after each move."""
        self.policy: PlacementPolicy = state.preset.placement
        """A simulation may set a policy that knows the programs' futures."""
        self._pool = state.pool
        self._reload = state.reload
        self._views = PlacedProgramViews(state)
        self._host_link = state.host_link
        self._moved = moved
        self.places = self.policy.is_used
        """Whether programs are placed; False after the policy has failed."""
        self._by_id: dict[ProgramId, PlacedProgram] = {}
        self._by_tier: dict[Tier, dict[ProgramId, PlacedProgram]] = {tier: {} for tier in Tier}
        self._waiting_queue: list[tuple[WaitingKey, ProgramId]] = []
        """The Waiting queue: programs of that tier with a waiting request, sorted by the policy's key."""
        self._further_shown = 0
        """Number of programs behind the first ``LOOKAHEAD`` of the Waiting queue that the policy has seen in
        this round."""
        self.parked_requests = ParkedRequests(self._by_id, places=self.places)
        self._waits = self.parked_requests.waits
        self._arrivals = 0
        """Arrival number of the newest request."""
        self._contexts = SharedBlockAccounting(state.pool, state.contexts, self._by_tier[Tier.DEVICE])
        self._trigger: PlacementTrigger | None = None
        """The latest event since the last call to the policy; ``None``: no event."""
        self._last_overdue_admission_s = -math.inf
        """Time at which the policy last moved a program to the device because it had waited for too long."""
        self._last_shortage_s = -math.inf
        """Time at which a program last lost its KV because the tiers were over capacity."""
        self._exchanged_share = 0.0
        self._asked_s = self._ask_at_s = -math.inf
        """``_asked_s``: time of the last call to the policy. ``_ask_at_s``: time of the next call if no event
        comes before."""
        self._changed: dict[ProgramId, float] = {}
        """Programs with events since their views were built, each with the time of its last event. The
        program whose first event is the oldest comes first."""

    # -- events ----------------------------------------------------------------

    def arrived(self, request_state: RequestState, now: float) -> None:
        """Handle a program's request that has reached the engine."""
        program = request_state.program
        if not self.places or program is None:
            return
        place = self._by_id.get(program.id)
        since_s = self._waits.begin(request_state, program.id, now)
        if place is None:
            place = PlacedProgram(program, IdlenessTracker(self.policy.k), since_s, last_active_s=now)
            place.returning = program.turns > 0
            self._by_id[program.id] = self._by_tier[Tier.WAITING][program.id] = place
        self._arrivals = request_state.arrival
        place.clock.arrived(request_state.request_id, now)
        place.waiting.pop(request_state.request_id, None)  # so that the newest request stands last
        place.waiting[request_state.request_id] = request_state
        place.tools_ended_s = None
        self._mark(place, now, PlacementTrigger.TOOL_ENDED if place.returning else PlacementTrigger.ARRIVAL)

    def admitted(self, request_state: RequestState, now: float, chain: Sequence[Any] = ()) -> None:
        """Handle the admission of a request, which has its blocks now. ``chain``: hashes of its blocks."""
        if not self.places:
            return
        place = self._place_of(request_state)
        if place is None:
            self._contexts.add_other(request_state.request_id, request_state.prompt_tokens, chain)
            return
        self._contexts.remove_other(request_state.request_id)
        place.clock.admitted(request_state.request_id, now)
        place.waiting.pop(request_state.request_id, None)
        self._waits.end(request_state.arrival, now)
        self._waits.forget(place.program.id)
        place.running[request_state.request_id] = request_state
        place.tool_reports = 0  # not at the arrival, since a client may abort a request that never ran
        if not place.returning:
            self._contexts.first_admitted(place, chain)
        elif len(place.running) == 1:
            self._exchanged_share += EXCHANGED_SHARE_WEIGHT * (place.exchanged - self._exchanged_share)
            place.exchanged = False
        place.returning = True
        moves = place.tier is not Tier.DEVICE  # the program runs, so it is on the device
        if moves:
            self._move_to_tier(place, Tier.DEVICE)
        self._contexts.begin(place, request_state, chain)
        self._mark(place, now, PlacementTrigger.CAPACITY if moves else None)
        if moves:
            # Reported as a move, since other requests of the program may be parked and must be released.
            move = TierMove(place.program.id, Tier.DEVICE, MoveTiming.NOW, MoveReason.FREE_CAPACITY)
            self._moved(place.program, move, now)

    def preempted(self, request_state: RequestState, now: float) -> None:
        """Handle a running request that has lost its blocks and will run again."""
        if not self.places:
            return
        self._contexts.remove_other(request_state.request_id)
        place = self._place_of(request_state)
        if place is not None:
            place.clock.preempted(request_state.request_id, now)
            self._mark(place, now, None)

    def finished(self, request_state: RequestState, now: float, *, failed: bool = False) -> None:
        """Handle a request that has left the engine. ``failed``: the request adds nothing to the context."""
        if not self.places:
            return
        waited_since_s = self._waits.end(request_state.arrival, now)
        was_other = self._contexts.remove_other(request_state.request_id)
        if was_other and any(self._waiting_off_device(self._waits)):
            self._trigger = PlacementTrigger.TURN_ENDED  # programs may use the request's blocks now
        place = self._place_of(request_state)
        if place is None:
            return
        place.clock.finished(request_state.request_id, now)
        waited = place.waiting.pop(request_state.request_id, None) is not None
        if place.running.pop(request_state.request_id, None) is not None:
            place.last_active_s = now
            self._contexts.end(place, request_state.request_id)
        self._mark(place, now, PlacementTrigger.TURN_ENDED)
        if failed and not (place.waiting or place.running or place.context_blocks):
            self._remove(place.program.id, now)  # the program has neither KV nor requests
        if failed and waited and not (place.running or self.policy.refuses):
            newest = next(reversed(place.waiting.values()), None)
            if newest is not None and self._waits.hand_over(waited_since_s, now, newest):
                self._mark(place, now, None)
            else:
                self._waits.remember(place.program.id, waited_since_s, now)

    def take_out(self, request_state: RequestState, now: float) -> None:
        """Count a program's request as a request without a program from now on."""
        place = self._place_of(request_state)
        if place is not None:
            runs, chain = (
                request_state.request_id in place.running,
                place.chains.get(request_state.request_id, ()),
            )
            self.finished(request_state, now)
            if runs:
                self._contexts.add_other(request_state.request_id, request_state.prompt_tokens, chain)

    def turn_finished(
        self, program: ProgramState, cached_blocks: int, now: float, chain: Sequence[Any] = ()
    ) -> None:
        """Handle the end of a program's turn, which left ``cached_blocks`` blocks in the cache. ``chain``:
        hashes of these blocks."""
        place = self._by_id.get(program.id)
        if place is not None:
            place.context_blocks = cached_blocks
            self._contexts.store(place, chain if cached_blocks else ())
            self._mark(place, now, PlacementTrigger.TURN_ENDED)

    def tool_known(self, program: ProgramState, now: float) -> None:
        """Handle a client's report that a tool of the program began or ended."""
        place = self._by_id.get(program.id)
        if place is not None and self.policy.reads_costs and place.activity is ProgramActivity.ACTING:
            place.tool_reports += 1
            place.tools_ended_s = now if program.tools_ended() else None
            if place.tool_reports == MAX_TOOL_REPORTS:
                self._views.fix_gap(place, now)
            self._mark(place, now, None)

    def forget(self, program_id: ProgramId, now: float) -> None:
        """Remove a program that has ended or was removed from the program table."""
        self._waits.forget(program_id)
        self._remove(program_id, now)

    def _remove(self, program_id: ProgramId, now: float) -> None:
        place = self._by_id.pop(program_id, None)
        if place is not None:
            self._changed.pop(program_id, None)
            self._dequeue(place)
            del self._by_tier[place.tier][program_id]
            for request_state in place.waiting.values():
                self._waits.end(request_state.arrival, now)
            self._contexts.removed(place)
            self._trigger = PlacementTrigger.TURN_ENDED
            # The program's requests are no longer parked, and its KV in lower tiers is not needed any more.
            self._moved(
                place.program, TierMove(program_id, Tier.WAITING, MoveTiming.NOW, MoveReason.OVER), now
            )

    def cache_reset(self, now: float, *, device: bool = True) -> None:
        """Handle the loss of all KV except that of running requests. If ``device`` is false, programs on the
        device keep their KV. In both cases placement no longer uses the disk."""
        self._pool.disk_blocks = 0
        for place in list(self._by_id.values()):
            if place.tier is Tier.DEVICE and not device:
                continue
            place.context_blocks = 0
            if not place.running:
                self._contexts.take(place)
            if place.tier in (Tier.HOST, Tier.DISK):
                self._move_to_tier(place, Tier.WAITING)
            self._mark(place, now, PlacementTrigger.CAPACITY)

    # -- queries ----------------------------------------------------------------

    def tier(self, program_id: ProgramId) -> Tier:
        """The tier in whose queue the program is; WAITING for an unknown program. If placement is off, always
        DEVICE."""
        if not self.places:
            return Tier.DEVICE
        place = self._by_id.get(program_id)
        return place.tier if place is not None else Tier.WAITING

    def placed(self, program_id: ProgramId) -> Tier | None:
        """The tier in whose queue the program is; ``None``: in no queue."""
        place = self._by_id.get(program_id)
        return place.tier if place is not None else None

    def take_overdue(self, limit_s: float, now: float) -> Iterable[RequestState]:
        """Return the requests to refuse: parked requests that have waited for ``limit_s`` seconds, each once.

        If ``policy.refuses`` is false, nothing is returned. Instead, at most one such request is released per
        call: its program is placed on the device. Call this method in every tick."""
        parked_requests = self.parked_requests
        parked_requests.exclude_pause(now)
        if self.policy.refuses:
            return parked_requests.take_overdue(limit_s, now)
        program_id = parked_requests.release_next(limit_s, now)
        if program_id is not None:
            move = TierMove(program_id, Tier.DEVICE, MoveTiming.NOW, MoveReason.OVERDUE)
            self._apply(move, now)
        return ()

    def counts(self) -> dict[Tier, int]:
        """Number of programs in each queue."""
        return {tier: len(places) for tier, places in self._by_tier.items()}

    # -- asking -------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Call the policy and apply its moves, after an event or when the policy's interval has passed.

        With many programs, a minimum time passes between calls. Raises errors of the policy. After an error,
        placement is off."""
        # A clock that was set back must not delay the next call to the policy.
        if not self.places or (self._trigger is None and self._asked_s <= now < self._ask_at_s):
            return
        shown = len(self._by_id) - len(self._by_tier[Tier.WAITING])
        if 0 <= now - self._asked_s < (shown - UNTHROTTLED_PROGRAMS) * MIN_INTERVAL_S_PER_PROGRAM:
            return
        try:
            self._ask(now)
        except Exception:
            self._turn_off(now)
            raise

    def _ask(self, now: float) -> None:
        self._update_stale(now)
        why, self._trigger = self._trigger or PlacementTrigger.TICK, None
        exchanges = 0
        for move in self.policy.moves(self._view(why), now):
            exchanges += move.to is Tier.DEVICE and move.reason in (MoveReason.EXCHANGE, MoveReason.ABSENT)
            if move.reason is MoveReason.OVERDUE and move.to is Tier.DEVICE:
                self._last_overdue_admission_s = now
            self._apply(move, now)
        is_idle = any(self._waiting_off_device(self._waits)) and not any(
            place.running for place in self._by_tier[Tier.DEVICE].values()
        )
        wait_s = self.policy.idle_tick_s if is_idle else self.policy.tick_s
        if exchanges >= LOOKAHEAD:
            wait_s = 0.0  # the policy stops at this number, so more exchanges may follow
        self._asked_s, self._ask_at_s = now, now + wait_s

    def _waiting_off_device(self, waits: Iterable[RequestWait]) -> Iterator[PlacedProgram]:
        """Yield the program of each of these waits, if it still waits and is not on the device."""
        for wait in waits:
            place = self._by_id.get(wait.program_id)
            if place is not None and place.waiting and place.tier is not Tier.DEVICE:
                yield place

    def _view(self, why: PlacementTrigger) -> PlacementView:
        def seen(tier: Tier) -> tuple[ProgramTierView, ...]:
            return tuple(place.seen for place in self._by_tier[tier].values() if place.seen is not None)

        pool = self._pool
        load_s = self._host_link.load_s_per_token
        first = (
            self._by_id[program_id].seen for _, program_id in islice(self._waiting_queue, MAX_WAITING_IN_VIEW)
        )
        return PlacementView(
            why=why,
            device=TierCapacity(
                capacity_blocks=pool.blocks, untracked_blocks=self._contexts.untracked_blocks()
            ),
            host=TierCapacity(
                capacity_blocks=pool.host_blocks,
                load_s_per_block=None if load_s is None else load_s * pool.tokens_per_block,
                load_queue_s=self._host_link.loads_queued_s,
            ),
            disk=TierCapacity(capacity_blocks=pool.disk_blocks),
            on_device=seen(Tier.DEVICE),
            on_host=seen(Tier.HOST),
            on_disk=seen(Tier.DISK),
            waiting=tuple(place for place in first if place is not None),
            mean_running=self._reload.mean_running,
            prefill_share=self._reload.prefill_share,
            kv_read_share=self._reload.kv_read_share,
            growth_observed=self._views.growth_observed,
            exchanged_share=self._exchanged_share,
            last_shortage_s=self._last_shortage_s,
            last_overdue_promotion_s=self._last_overdue_admission_s,
            waiting_sorted=True,
            further_waiting=self._further_waiting(),
            longest_waiting=self._longest_waiting(),
        )

    def _further_waiting(self) -> tuple[ProgramTierView, ...]:
        """Return the next ``MAX_FURTHER_WAITING_IN_VIEW`` programs behind the first ``LOOKAHEAD`` of the
        Waiting queue. After the end of the queue, a new round begins."""
        behind = len(self._waiting_queue) - LOOKAHEAD
        if behind <= 0:
            return ()
        count = min(behind, MAX_FURTHER_WAITING_IN_VIEW)
        places = [(self._further_shown + number) % behind for number in range(count)]
        self._further_shown = places[-1] + 1
        found = (self._by_id[self._waiting_queue[LOOKAHEAD + place][1]].seen for place in places)
        return tuple(program for program in found if program is not None)

    def _longest_waiting(self) -> tuple[ProgramTierView, ...]:
        places = self._waiting_off_device(self._waits.longest())
        return tuple(islice((place.seen for place in places if place.seen), MAX_LONGEST_WAITING_IN_VIEW))

    def _apply(self, move: TierMove, now: float) -> None:
        place = self._by_id[move.program_id]
        if move.when is MoveTiming.AFTER_TURN:
            place.leaves_after = self._arrivals
        else:
            place.leaves_after = None
            if move.reason is MoveReason.OVER_CAPACITY and move.to is Tier.WAITING and place.context_blocks:
                self._last_shortage_s = now
            if move.reason is MoveReason.FUTILE and place.tier is Tier.DEVICE:
                place.exchanged = place.context_blocks > 0
                return
            if move.reason is MoveReason.EXCHANGE and move.to is Tier.WAITING:
                place.exchanged = place.context_blocks > 0
            if move.to is not place.tier:
                self._move_to_tier(place, move.to)
        self._update_view(place, now)
        self._moved(place.program, move, now)

    def _turn_off(self, now: float) -> None:
        """Turn placement off and unpark all requests. From then on the engine's own order applies."""
        self.places = False
        waiting = [place.program for place in self._by_id.values() if place.waiting]
        self._by_id.clear()
        for places in self._by_tier.values():
            places.clear()
        self._waiting_queue.clear()
        self._changed.clear()
        self.parked_requests.turn_off()
        self._contexts.clear()
        for program in waiting:
            with contextlib.suppress(Exception):  # an error for one program must not affect the others
                self._moved(
                    program, TierMove(program.id, Tier.DEVICE, MoveTiming.NOW, MoveReason.GIVEN_UP), now
                )

    # -- keeping order --------------------------------------------------------------

    def _place_of(self, request_state: RequestState) -> PlacedProgram | None:
        return self._by_id.get(request_state.program.id) if request_state.program is not None else None

    def _update_stale(self, now: float) -> None:
        """Rebuild the views of programs that had events or whose sizes changed. A program's sizes change with
        the prefix that the program shares, or is expected to share, with other contexts."""
        while self._changed:
            program_id, changed_s = next(iter(self._changed.items()))
            self._update_view(self._by_id[program_id], changed_s)
        for key in self._contexts.take_stale():
            place = self._by_id.get(ProgramId(key)) if isinstance(key, str) else None
            if place is not None:
                self._update_view(place, now)
        if not self._contexts.expectations_changed:
            return
        first = [self._by_id[program_id] for _, program_id in islice(self._waiting_queue, MAX_REFRESHED)]
        for place in self._contexts.take_changed([*first, *self._by_tier[Tier.DEVICE].values()]):
            self._update_view(place, now)

    def _move_to_tier(self, place: PlacedProgram, tier: Tier) -> None:
        self._dequeue(place)
        chain = self._contexts.take(place)
        del self._by_tier[place.tier][place.program.id]
        place.tier = tier
        self._by_tier[tier][place.program.id] = place
        self._contexts.store(place, chain)

    def _mark(self, place: PlacedProgram, now: float, why: PlacementTrigger | None) -> None:
        """Record an event of a program. ``why``: the event, if the policy must be called after it; else
        ``None``."""
        self._changed[place.program.id] = now
        if why is not None:
            self._trigger = why

    def _update_view(self, place: PlacedProgram, now: float) -> None:
        """Rebuild the policy's view of a program. ``now``: the time of the program's last event."""
        self._changed.pop(place.program.id, None)
        place.in_tier, place.on_device = self._contexts.shared_hashes(place)
        view = place.seen = self._views.view(place, costs=self.policy.reads_costs)
        self._dequeue(place)
        if place.tier is Tier.WAITING and place.waiting:
            place.queue_entry = (self.policy.waiting_key(view, now), place.program.id)
            bisect.insort(self._waiting_queue, place.queue_entry)

    def _dequeue(self, place: PlacedProgram) -> None:
        if place.queue_entry is not None:
            del self._waiting_queue[bisect.bisect_left(self._waiting_queue, place.queue_entry)]
            place.queue_entry = None
