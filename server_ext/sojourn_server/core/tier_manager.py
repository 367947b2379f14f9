"""Places programs: asks the placement policy for moves between tiers, and holds back requests of programs
that are not on the device.

Every program with a request in the engine or with KV has a place (``PlacedProgram``) with a tier. The
programs of the tier WAITING that have a request are the *Waiting queue*.

An event only marks its program's view as outdated. ``tick`` is called once per engine step. It asks the
policy if there was an event, or when the policy's interval has passed. So a burst of tool ends causes only
one question, and the policy moves no program while a step is being planned. For a question, the views of all
placed programs are collected in one pass, and only outdated ones are built anew.

A *parked* request is a waiting request that may not run, even if blocks are free: its program is not on the
device, or the request arrived after its program was marked to leave the device. No request is parked for
ever: after ``hold_timeout_s`` it is *released*. Its program is placed on the device, and the request is not
parked again. After an error of the policy, or while it is switched off, no request is parked, and the
engine's own order applies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..policies.placement.placement_policy import (
    MAX_EXCHANGES,
    MoveReason,
    MoveTiming,
    PlacementPolicy,
    TierMove,
)
from ..policies.placement.placement_views import PlacementView, ProgramActivity, Tier, TierCapacity
from ..policies.policy_protocols import DecisionReason
from ..programs.idleness import IdlenessTracker
from ..programs.program_state import ProgramState
from .context_hashes import PrefixTree
from .events_and_actions import EngineAction, EngineActionKind
from .placed_programs import PlacedProgram, PlacedProgramViews
from .request_table import RequestState
from .scheduler_state import SchedulerState

EXCHANGED_SHARE_WEIGHT = 1 / 8
"""Weight of the newest return in ``PlacementView.exchanged_share``, a moving average."""
RELEASE_GAP_S = 10.0
"""Seconds after a release when the next request may be released, even if the engine has not admitted the
first."""
RETRY_S = 60.0
"""A program's next request counts as the retry of an aborted waiting request if it arrives within this many
seconds of the abort. A retry continues the wait of the aborted request, so a client that gives up and tries
again keeps its place. OpenAI's clients retry after up to 8 s, or as ``Retry-After`` says."""

Moved = tuple[ProgramState, TierMove]


class TierManager:
    """The places of the programs of one engine. Times are seconds on the engine's monotonic clock."""

    def __init__(self, state: SchedulerState) -> None:
        self.policy: PlacementPolicy = state.preset.placement
        """A simulation may set a policy that knows the programs' futures."""
        self.places = self.policy.is_used
        """Whether programs are placed; False after the policy has failed or was switched off."""
        self.limits = state.limits
        self._pool = state.pool
        self._reload = state.reload
        self._host_link = state.host_link
        self._contexts = state.contexts
        self._actions = state.actions
        self._views = PlacedProgramViews(state)
        self._places: dict[ProgramId, PlacedProgram] = {}
        self._requests = state.requests.states
        self._arrivals = 0
        """Arrival number of the newest request."""
        self._event = False
        """Whether there was an event since the policy was asked last."""
        self._ask_at_s = -math.inf
        """Time at which the policy is asked if no event comes before."""
        self._last_overdue_promotion_s = self._last_shortage_s = -math.inf
        self._exchanged_share = 0.0
        self._released: RequestState | None = None
        """The request that was released last, at ``_released_s``."""
        self._released_s = -math.inf

    # -- events ----------------------------------------------------------------

    def arrived(self, request_state: RequestState, now: float) -> None:
        """Handle a program's request that has reached the engine."""
        program = request_state.program
        if not self.places or program is None:
            return
        request_state.waits_since_s = self._continued_wait_s(program, now)
        place = self._places.get(program.id)
        if place is None:
            since_s, returning = request_state.waits_since_s, program.turns > 0
            place = PlacedProgram(program, IdlenessTracker(self.policy.k), since_s, now, returning)
            place.attained_s = program.attained_s
            self._places[program.id] = place
            parent = self._parent(program)
            if parent is not None and program.blocks_parent:
                parent.children[program.id] = place
                parent.tools_ended_s, parent.view = None, None
        self._arrivals = request_state.arrival
        place.waiting.pop(request_state.request_id, None)  # so that the newest request stands last
        place.waiting[request_state.request_id] = request_state
        place.tools_ended_s = None
        place.pass_time(now)
        self._changed(place)

    def admitted(self, request_state: RequestState, now: float, chain: Sequence[Any] = ()) -> TierMove | None:
        """Handle the admission of a request, which has its blocks now. ``chain``: hashes of its blocks.

        Returns a move if the program was not on the device, since its other requests are no longer parked."""
        if not self.places:
            return None
        # A copy of what the prompt covers: the engine appends to its list while the request runs.
        request_state.prompt = chain[: request_state.prompt_tokens // self._pool.block_size]
        place = self._place_of(request_state)
        if place is None:
            return None
        place.waiting.pop(request_state.request_id, None)
        place.program.aborted_wait = None
        place.running[request_state.request_id] = request_state
        place.pass_time(now)
        if place.returning and len(place.running) == 1:
            self._exchanged_share += EXCHANGED_SHARE_WEIGHT * (place.exchanged - self._exchanged_share)
            place.exchanged = False
        place.returning, place.view = True, None
        if place.tier is Tier.DEVICE:
            return None
        place.tier, self._event = Tier.DEVICE, True
        return TierMove(place.program.id, Tier.DEVICE, MoveTiming.NOW, MoveReason.FREE_CAPACITY)

    def preempted(self, request_state: RequestState, now: float) -> None:
        """Handle a running request that has lost its blocks and will run again."""
        place = self._place_of(request_state)
        if place is not None:
            place.pass_time(now)
            place.view = None

    def finished(self, request_state: RequestState, now: float, *, failed: bool = False) -> None:
        """Handle a request that has left the engine. ``failed``: the request adds nothing to the context."""
        request_id, place = request_state.request_id, self._place_of(request_state)
        self._event = True  # programs may use the request's blocks now
        if place is None:
            return
        waited = place.waiting.pop(request_id, None) is not None
        if place.running.pop(request_id, None) is not None:
            place.last_active_s = now
        place.pass_time(now)
        self._changed(place)
        if failed and waited and not place.running:
            # For the retry, if the client tries again.
            since_s = min(request_state.waits_since_s, self._continued_wait_s(place.program, now))
            place.program.aborted_wait = since_s, now
        if failed and not (place.waiting or place.running or place.context_blocks):
            self.forget(place.program.id, now)  # the program has neither KV nor requests

    def turn_finished(self, program: ProgramState, cached_blocks: int) -> None:
        """Handle the end of a program's turn, which left ``cached_blocks`` blocks in the cache."""
        place = self._places.get(program.id)
        if place is not None:
            place.context_blocks = cached_blocks
            self._views.turn_finished(place)
            self._changed(place)

    def tool_known(self, program: ProgramState, now: float) -> None:
        """Handle a client's report that a tool of the program began or ended."""
        place = self._places.get(program.id)
        if place is not None and place.activity is ProgramActivity.ACTING:
            place.tools_ended_s = now if program.gap_reported and not program.tools else None
            place.view = None

    def forget(self, program_id: ProgramId, now: float) -> None:
        """Remove a program that has ended or was removed from the program table. Its requests are no longer
        parked, and its KV in lower tiers is not needed any more."""
        place = self._places.pop(program_id, None)
        if place is not None:
            parent = self._parent(place.program)
            if parent is not None and parent.children.pop(program_id, None) is not None:
                parent.view = None
                if not parent.children:
                    parent.tools_ended_s = now
            self._event = True
            self._actions.append(
                EngineAction(EngineActionKind.PLACE, program_id, DecisionReason.END, Tier.WAITING)
            )

    def cache_reset(self, *, device: bool = True) -> None:
        """Handle the loss of all KV except that of running requests. If ``device`` is false, programs on the
        device keep their KV. In both cases placement no longer uses the disk."""
        self._pool.disk_blocks = 0
        for place in self._places.values():
            if device or place.tier is not Tier.DEVICE:
                place.context_blocks = 0
                if place.tier in (Tier.HOST, Tier.DISK):
                    place.tier = Tier.WAITING
                self._changed(place)

    # -- queries ----------------------------------------------------------------

    def tier(self, program_id: ProgramId) -> Tier:
        """The program's tier; WAITING for an unknown program. If placement is off, always DEVICE."""
        return self.placed(program_id) or Tier.WAITING if self.places else Tier.DEVICE

    def placed(self, program_id: ProgramId) -> Tier | None:
        """The program's tier; ``None``: the program has no place."""
        place = self._places.get(program_id)
        return place.tier if place is not None else None

    def counts(self) -> dict[Tier, int]:
        """Number of programs in each tier."""
        tiers = [place.tier for place in self._places.values()]
        return {tier: tiers.count(tier) for tier in Tier}

    def is_parked(self, request_state: RequestState) -> bool:
        """Whether a waiting request may not run, because of its program's place."""
        place = self._place_of(request_state)
        return place is not None and place.parks(request_state)

    def any_parked(self, program_id: ProgramId) -> bool:
        """Whether any waiting request of the program is parked."""
        place = self._places.get(program_id)
        return place is not None and any(map(place.parks, place.waiting.values()))

    # -- moves --------------------------------------------------------------------

    def tick(self, now: float) -> Iterator[Moved]:
        """Ask the policy if there was an event, or if its interval has passed. Then release a request whose
        wait has reached the limit. Yields each move after it was made.

        Raises errors of the policy, after moves that give all programs up. Then placement is off."""
        if self._event or now >= self._ask_at_s:
            try:
                yield from self._ask(now)
            except Exception:
                yield from self.give_up()
                raise
        if (released := self._next_released(now)) is not None:
            yield from self._apply(TierMove(released, Tier.DEVICE, MoveTiming.NOW, MoveReason.OVERDUE), now)

    def give_up(self) -> Iterator[Moved]:
        """Turn placement off. Yields a move to the device for each program with a waiting request."""
        waiting = [place.program for place in self._places.values() if place.waiting]
        self.places = False
        self._places.clear()
        for program in waiting:
            yield program, TierMove(program.id, Tier.DEVICE, MoveTiming.NOW, MoveReason.GIVEN_UP)

    def begin_again(self, requests: Iterable[RequestState], now: float) -> Iterator[Moved]:
        """Turn placement on again, if the preset has one. ``requests``: those in the engine. Yields a move to
        the device for each program with an admitted request."""
        self.places = self.policy.is_used
        for request_state in requests:
            self.arrived(request_state, now)
            request_state.waits_since_s = request_state.arrived_s
            if request_state.admitted:
                move = self.admitted(request_state, now, request_state.prompt)
                if move is not None and request_state.program is not None:
                    yield request_state.program, move

    def _ask(self, now: float) -> Iterator[Moved]:
        self._event = False
        exchanges = 0
        for move in self.policy.moves(self._view(), now):
            to_device = move.to is Tier.DEVICE
            exchanges += to_device and move.reason in (MoveReason.EXCHANGE, MoveReason.ABSENT)
            if to_device and move.reason is MoveReason.OVERDUE:
                self._last_overdue_promotion_s = now
            yield from self._apply(move, now)
        waits = any(place.waiting and place.tier is not Tier.DEVICE for place in self._places.values())
        is_idle = waits and not any(place.running for place in self._places.values())
        wait_s = self.policy.idle_tick_s if is_idle else self.policy.tick_s
        # After the most exchanges of one answer, the policy may have more.
        self._ask_at_s = now + (wait_s if exchanges < MAX_EXCHANGES else 0.0)

    def _view(self) -> PlacementView:
        pool, load_s = self._pool, self._host_link.load_s_per_token
        trees = {tier: PrefixTree() for tier in Tier}
        on_device = trees[Tier.DEVICE]
        untracked_tokens = sum(
            max(0, request.prompt_tokens - on_device.add(request.prompt) * pool.block_size)
            for request in self._requests.values()
            if request.running and not self._is_placed(request)
        )
        shown = [place for place in self._places.values() if place.tier is not Tier.WAITING or place.waiting]
        contexts = [self._context(place) for place in shown]
        # First all contexts, since any of them may share its prefix with a program whose KV is not there.
        in_tier = [trees[place.tier].add(context) for place, context in zip(shown, contexts, strict=True)]
        groups: dict[Tier, list[Any]] = {tier: [] for tier in Tier}
        for place, context, below in zip(shown, contexts, in_tier, strict=True):
            there = below
            if place.tier is not Tier.DEVICE or not context:
                there = on_device.common(context or self._next_prompt(place))
            view = self._views.view(place, (below, there), costs=self.policy.reads_costs)
            groups[place.tier].append(view)
        return PlacementView(
            device=TierCapacity(
                capacity_blocks=pool.blocks,
                untracked_blocks=math.ceil(untracked_tokens / pool.tokens_per_block),
            ),
            host=TierCapacity(
                capacity_blocks=pool.host_blocks,
                load_s_per_block=None if load_s is None else load_s * pool.tokens_per_block,
                load_queue_s=self._host_link.loads_queued_s,
            ),
            disk=TierCapacity(capacity_blocks=pool.disk_blocks),
            on_device=groups[Tier.DEVICE],
            on_host=groups[Tier.HOST],
            on_disk=groups[Tier.DISK],
            waiting=groups[Tier.WAITING],
            mean_running=self._reload.mean_running,
            prefill_share=self._reload.prefill_share,
            kv_read_share=self._reload.kv_read_share,
            growth_observed=self._views.growth_observed,
            exchanged_share=self._exchanged_share,
            last_shortage_s=self._last_shortage_s,
            last_overdue_promotion_s=self._last_overdue_promotion_s,
        )

    def _context(self, place: PlacedProgram) -> Sequence[Any]:
        """Hashes of the blocks that the program has in its tier: of the longest prompt of its running
        requests, or else of its last turn. Empty in the tier WAITING."""
        if place.running:
            return max((request.prompt for request in place.running.values()), key=len)
        has_kv = place.context_blocks and place.tier is not Tier.WAITING
        return self._contexts.get(place.program.id) or () if has_kv else ()

    def _next_prompt(self, place: PlacedProgram) -> Sequence[Any]:
        """Hashes of the blocks that a program without KV in a tier needs on the device."""
        longest = max((request.prompt for request in place.waiting.values()), key=len, default=())
        return longest or self._contexts.get(place.program.id) or ()

    def _apply(self, move: TierMove, now: float) -> Iterator[Moved]:
        place = self._places[move.program_id]
        has_kv = place.context_blocks > 0
        place.view = None
        if move.when is MoveTiming.AFTER_TURN:
            place.leaves_after = self._arrivals
        else:
            place.leaves_after = None
            if move.reason is MoveReason.FUTILE and place.tier is Tier.DEVICE:
                place.exchanged = has_kv
                return
            if move.reason is MoveReason.EXCHANGE and move.to is Tier.WAITING:
                place.exchanged = has_kv
            if move.reason is MoveReason.OVER_CAPACITY and move.to is Tier.WAITING and has_kv:
                self._last_shortage_s = now
            place.tier = move.to
        yield place.program, move

    # -- how long requests wait -----------------------------------------------------

    def _continued_wait_s(self, program: ProgramState, now: float) -> float:
        """Return the start of the wait of a request that arrives now: of its program's aborted request, if
        this is a retry."""
        since_s, aborted_s = program.aborted_wait or (now, now)
        program.aborted_wait = None
        return since_s if now - aborted_s <= RETRY_S else now

    def _next_released(self, now: float) -> ProgramId | None:
        """Release the parked request with the longest wait, if its wait has reached the limit, and return its
        program. ``None``: no request is released now.

        The next request is released after the released request was admitted or has ended, or after
        ``RELEASE_GAP_S``."""
        released = self._released
        if released is not None and now - self._released_s < RELEASE_GAP_S:
            place = self._place_of(released)
            if place is not None and place.waiting.get(released.request_id) is released:
                return None  # the engine has not admitted the released request yet
        hold_s = self.limits.hold_timeout_s
        overdue = [
            each
            for place in self._places.values()
            for each in place.waiting.values()
            if now >= each.waits_since_s + hold_s and not each.released
        ]
        for request_state in sorted(overdue, key=lambda each: (each.waits_since_s, each.arrival)):
            parked, request_state.released = self.is_parked(request_state), True
            if parked:
                self._released, self._released_s = request_state, now
                return request_state.program_id
        return None

    # -- inside -----------------------------------------------------------------------

    def _place_of(self, request_state: RequestState) -> PlacedProgram | None:
        return self._places.get(request_state.program.id) if request_state.program is not None else None

    def _is_placed(self, running: RequestState) -> bool:
        place = self._place_of(running)
        return place is not None and running.request_id in place.running

    def _parent(self, program: ProgramState) -> PlacedProgram | None:
        return self._places.get(program.parent_id) if program.parent_id not in (None, program.id) else None

    def _changed(self, place: PlacedProgram) -> None:
        """Record an event of a program after which the policy must be asked."""
        place.view, self._event = None, True
        parent = self._parent(place.program)
        if parent is not None and place.program.id in parent.children:
            parent.view = None
