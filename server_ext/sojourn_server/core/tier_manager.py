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
ever: after ``hold_timeout_s``, or at most ``MAX_HOLDS`` times that, it is *released*. Its program is placed
on the device, and the request is not parked again. After an error of the policy, or while it is switched off,
no request is parked, and the engine's own order applies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from sojourn.ids import ProgramId

from ..policies.forecasting import MIN_TURNS_SEEN, expected_growth_tokens
from ..policies.placement.placement_policy import MAX_EXCHANGES, MoveReason, MoveTiming, TierMove
from ..policies.placement.placement_views import (
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
    TierCapacity,
)
from ..policies.policy_protocols import DecisionReason
from ..policies.policy_views import ProgramGrowthView
from ..programs.idleness import IdlenessTracker
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES
from ..programs.statements import SURE_SPREAD, TTL, within
from ..programs.windowed_history import estimated_durations
from ..programs.workflow_history import agent_type_name
from .context_hashes import PrefixTree
from .events_and_actions import EngineAction, EngineActionKind
from .leases import LeaseTable
from .request_table import RequestState
from .scheduler_state import SchedulerState
from .workflow_predictor import WorkflowPredictor

RELEASE_GAP_S = 10.0
"""Seconds after which the next request may be released, even if the engine has not admitted the first."""
RELEASED_SHARE = 0.25
"""Share of the device's blocks that released requests may have together, if the next one's context must be
computed again, for one turn. Where many programs wait, they would take the device from all others."""
MAX_HOLDS = 4.0
"""Number of ``hold_timeout_s`` after which a request is released whatever the others have."""
RETRY_S = 60.0
"""A program's next request counts as the retry of an aborted waiting request if it arrives within this many
seconds of the abort. A retry continues the wait of the aborted request, so a client that gives up and tries
again keeps its place. OpenAI's clients retry after up to 8 s, or as ``Retry-After`` says."""

GAP_SAMPLES = 15
"""Number of quantiles of tool durations, and of service times, in a view."""
RETURN_S = 0.5
"""Expected seconds from the reported end of a program's last tool call to its next request."""
MIN_PROGRAMS_SEEN = 8
"""Minimum number of ended programs, of one agent type or of all types, from which a program's service (the
seconds that its requests run) is predicted."""
TURN_WEIGHT = 1 / 32
"""Weight of the newest turn in the mean service of a turn."""
TURNS_ASSUMED = 2
"""Number of mean turns that a program's own turns are averaged with."""
MIN_CALLS_SEEN = 4
"""Minimum number of calls of a tool before the tool's own durations are used (see ``_gap_durations_s``)."""


@dataclass(slots=True, eq=False)
class PlacedProgram:
    """A program's tier, requests and idleness. The tier manager keeps them up to date."""

    program: ProgramState
    arrived_s: float
    last_active_s: float
    """Time at which an admitted request last left the engine; before that, the program's arrival."""
    returning: bool
    """Whether a request of the program was admitted before."""
    clock: IdlenessTracker = field(default_factory=IdlenessTracker)
    tier: Tier = Tier.WAITING
    waiting: dict[str, RequestState] = field(default_factory=dict)
    """The program's requests that were not admitted yet, oldest first."""
    running: dict[str, RequestState] = field(default_factory=dict)
    """The program's admitted requests, preempted ones included."""
    context_blocks: int = 0
    """Number of cached blocks that the program's last turn left; 0 if the KV was lost."""
    attained_s: float = 0.0
    """Seconds of service at the end of the program's last turn."""
    tools_ended_s: float | None = None
    """Time at which the client reported the end of the gap's last tool call; ``None``: not reported."""
    leaves_after: int | None = None
    """Arrival number of the newest request at the time when the program was marked to leave the device. The
    program's requests with higher numbers are parked. ``None``: not marked."""
    shared: tuple[int, int] = (0, 0)
    """Numbers of leading block hashes of the program's context that are counted for another context of its
    tier, and that another context has on the device. ``view`` leaves these blocks out."""
    view: ProgramTierView | None = None
    """The policy's view of the program; ``None`` after an event of the program."""

    @property
    def activity(self) -> ProgramActivity:
        if self.running:
            return ProgramActivity.REASONING
        oldest = next(iter(self.waiting.values()), None)
        if oldest is None:
            return ProgramActivity.ACTING
        # The program may leave the device after its turn, while a request of that turn still waits.
        turn_goes_on = self.leaves_after is not None and oldest.arrival <= self.leaves_after
        return ProgramActivity.REASONING if turn_goes_on else ProgramActivity.READY

    def pass_time(self, now: float) -> None:
        """Measure the idleness after an event of a request."""
        runs = any(request.running for request in self.running.values())
        self.clock.update(now, running=runs, live=bool(self.waiting or self.running))

    def parks(self, request_state: RequestState) -> bool:
        """Whether a request of the program may not run, because the program is not on the device, or will
        leave it."""
        if request_state.released or request_state.request_id not in self.waiting:
            return False
        most = math.inf if self.leaves_after is None else self.leaves_after
        return self.tier is not Tier.DEVICE or request_state.arrival > most


class TierManager:
    """The places of the programs of one engine. Times are seconds on the engine's monotonic clock."""

    def __init__(self, state: SchedulerState, leases: LeaseTable, predictor: WorkflowPredictor) -> None:
        self._leases, self._predictor = leases, predictor
        self.policy = state.preset.placement
        """A simulation may set a policy that knows the programs' futures."""
        self.places = self.policy.is_used
        """Whether programs are placed; False after the policy has failed or was switched off."""
        self.limits, self._state = state.limits, state
        self._pool, self._reload, self._histories = state.pool, state.reload, state.histories
        self._places: dict[ProgramId, PlacedProgram] = {}
        self._event = False
        """Whether there was an event since the policy was asked last."""
        self._ask_at_s = -math.inf
        """Time at which the policy is asked if no event comes before."""
        self._last_overdue_promotion_s = self._last_shortage_s = -math.inf
        self._turn_s = 0.0
        """Moving average of the seconds of service of a turn; 0.0 before the first."""
        self._released: RequestState | None = None
        """The request that was released last, at ``_released_s``."""
        self._released_s = -math.inf
        self._first_wait_s = math.inf  # no request began to wait before; so most steps need not look at all

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
            place = PlacedProgram(program, since_s, now, returning, attained_s=program.attained_s)
            self._places[program.id] = place
        if place.returning and place.activity is ProgramActivity.ACTING and self.policy.reads_costs:
            self._reload.observe_gap(now - place.last_active_s, self._rebuild_s(place))
        place.waiting.pop(request_state.request_id, None)  # so that the newest request stands last
        place.waiting[request_state.request_id] = request_state
        self._first_wait_s = min(self._first_wait_s, request_state.waits_since_s)
        place.tools_ended_s = None
        place.pass_time(now)
        self._changed(place)

    def admitted(self, request_state: RequestState, now: float, chain: Sequence[Any] = ()) -> None:
        """Handle the admission of a request, which has its blocks now. ``chain``: hashes of its blocks.
        A program that was not on the device moves there, since its other requests are no longer parked."""
        if not self.places:
            return
        # A copy of what the prompt covers: the engine appends to its list while the request runs.
        request_state.prompt = chain[: request_state.prompt_tokens // self._pool.block_size]
        place = self._place_of(request_state)
        if place is None:
            return
        place.waiting.pop(request_state.request_id, None)
        place.program.aborted_wait = None
        place.running[request_state.request_id] = request_state
        place.pass_time(now)
        place.returning, place.view = True, None
        if place.tier is not Tier.DEVICE:
            place.tier, self._event = Tier.DEVICE, True
            self._to_device(place.program, MoveReason.FREE_CAPACITY, now)

    def preempted(self, request_state: RequestState, now: float) -> None:
        """Handle a running request that has lost its blocks and will run again."""
        place = self._place_of(request_state)
        if place is not None:
            place.pass_time(now)
            place.view = None

    def finished(self, request_state: RequestState, now: float, *, failed: bool = False) -> None:
        """Handle a request that has left the engine. ``failed``: the request adds nothing to the context."""
        request_id, place = request_state.request_id, self._place_of(request_state)
        self._event, self._first_wait_s = True, -math.inf  # programs may use the request's blocks now
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
            turn_s, place.attained_s = program.attained_s - place.attained_s, program.attained_s
            if turn_s > 0:
                self._turn_s += (turn_s - self._turn_s) * (TURN_WEIGHT if self._turn_s else 1.0)
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
            self._event, self._first_wait_s = True, -math.inf
            self._state.actions.append(
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

    # -- moves --------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ask the policy if there was an event, or if its interval has passed. Then release a request.

        Raises errors of the policy, after moves that give all programs up. Then placement is off."""
        if self._event or now >= self._ask_at_s:
            try:
                self._ask(now)
            except Exception:
                self.give_up(now)
                raise
        if (released := self._next_released(now)) is not None:
            self._apply(TierMove(released, Tier.DEVICE, MoveTiming.NOW, MoveReason.OVERDUE), now)

    def _to_device(self, program: ProgramState, reason: MoveReason, now: float) -> None:
        self._moved(program, TierMove(program.id, Tier.DEVICE, MoveTiming.NOW, reason), now)

    def give_up(self, now: float) -> None:
        """Turn placement off. Each program with a waiting request moves to the device."""
        waiting = [place.program for place in self._places.values() if place.waiting]
        self.places = False
        self._places.clear()
        for program in waiting:
            self._to_device(program, MoveReason.GIVEN_UP, now)

    def begin_again(self, requests: Iterable[RequestState], now: float) -> None:
        """Turn placement on again, if the preset has one. ``requests``: those in the engine. Each program
        with an admitted request moves to the device."""
        self.places, self._first_wait_s = self.policy.is_used, -math.inf
        for request_state in requests:
            program = request_state.program
            if program is None or program.status in OVER_STATUSES:
                continue
            self.arrived(request_state, now)
            request_state.waits_since_s = request_state.arrived_s
            if request_state.admitted:
                self.admitted(request_state, now, request_state.prompt)

    def _ask(self, now: float) -> None:
        self._event = False
        exchanges = 0
        for move in self.policy.moves(self._view(), now):
            to_device = move.to is Tier.DEVICE
            exchanges += to_device and move.reason in (MoveReason.EXCHANGE, MoveReason.ABSENT)
            if to_device and move.reason is MoveReason.OVERDUE:
                self._last_overdue_promotion_s = now
            self._apply(move, now)
        waits = any(place.waiting and place.tier is not Tier.DEVICE for place in self._places.values())
        is_idle = waits and not any(place.running for place in self._places.values())
        wait_s = self.policy.idle_tick_s if is_idle else self.policy.tick_s
        # After the most exchanges of one answer, the policy may have more.
        self._ask_at_s = now + (wait_s if exchanges < MAX_EXCHANGES else 0.0)

    def _view(self) -> PlacementView:
        pool, load_s = self._pool, self._state.host_link.load_s_per_token
        trees = {tier: PrefixTree() for tier in Tier}
        on_device = trees[Tier.DEVICE]
        untracked_tokens = sum(
            max(0, request.prompt_tokens - on_device.add(request.prompt) * pool.block_size)
            for request in self._state.requests.states.values()
            if request.running
            and ((place := self._place_of(request)) is None or request.request_id not in place.running)
        )
        shown = [place for place in self._places.values() if place.tier is not Tier.WAITING or place.waiting]
        contexts = [self._context(place) for place in shown]
        # First all contexts, since any of them may share its prefix with a program whose KV is not there.
        in_tier = [trees[place.tier].add(context) for place, context in zip(shown, contexts, strict=True)]
        groups: dict[Tier, list[Any]] = {tier: [] for tier in Tier}
        for place, context, below in zip(shown, contexts, in_tier, strict=True):
            there = below
            if place.tier is not Tier.DEVICE or not context:
                # A program without KV in a tier needs the blocks of its next prompt on the device.
                prompts = [request.prompt for request in place.waiting.values()]
                last = self._state.contexts.get(place.program.id) or ()
                there = on_device.common(context or max(prompts, key=len, default=()) or last)
            if place.view is None or place.shared != (below, there):
                place.shared = below, there
                place.view = self._program_view(place)
            groups[place.tier].append(place.view)
        return PlacementView(
            device=TierCapacity(
                capacity_blocks=pool.blocks,
                untracked_blocks=math.ceil(untracked_tokens / pool.tokens_per_block),
            ),
            host=TierCapacity(
                capacity_blocks=pool.host_blocks,
                load_s_per_block=None if load_s is None else load_s * pool.tokens_per_block,
                load_queue_s=self._state.host_link.loads_queued_s,
            ),
            disk=TierCapacity(capacity_blocks=pool.disk_blocks),
            on_device=groups[Tier.DEVICE],
            on_host=groups[Tier.HOST],
            on_disk=groups[Tier.DISK],
            waiting=groups[Tier.WAITING],
            mean_running=self._reload.mean_running,
            prefill_share=self._reload.prefill_share,
            kv_read_share=self._reload.kv_read_share,
            growth_observed=self._histories.growth.observed_turns >= MIN_TURNS_SEEN,
            hold_cost=self._reload.hold_cost,
            last_shortage_s=self._last_shortage_s,
            last_overdue_promotion_s=self._last_overdue_promotion_s,
        )

    def _context(self, place: PlacedProgram) -> Sequence[Any]:
        """Hashes of the blocks that the program has in its tier: of the longest prompt of its running
        requests, or else of its last turn. Empty in the tier WAITING."""
        if place.running:
            return max((request.prompt for request in place.running.values()), key=len)
        has_kv = place.context_blocks and place.tier is not Tier.WAITING
        return self._state.contexts.get(place.program.id) or () if has_kv else ()

    def _apply(self, move: TierMove, now: float) -> None:
        place = self._places[move.program_id]
        has_kv = place.context_blocks > 0
        place.view = None
        if move.when is MoveTiming.AFTER_TURN:
            place.leaves_after = self._state.requests.arrivals
        else:
            place.leaves_after = None
            if move.reason is MoveReason.OVER_CAPACITY and move.to is Tier.WAITING and has_kv:
                self._last_shortage_s = now
            place.tier = move.to
        self._moved(place.program, move, now)

    def _moved(self, program: ProgramState, move: TierMove, now: float) -> None:
        """Log a move, end the program's lease if it leaves the device, and add the action for the engine."""
        state, when = self._state, move.when
        what = "to_" + move.to.value if when is MoveTiming.NOW else "leaves_after_turn"
        state.decisions.add(now, what, program.id, move.reason.value, **dict(move.terms))
        state.recorder.count(
            "sojourn_placements_total", to=move.to.value, when=when.value, reason=move.reason.value
        )
        if when is MoveTiming.AFTER_TURN:
            return
        self._predictor.eviction_key_changed(program)
        if move.to is not Tier.DEVICE:
            self._leases.end(program.id, DecisionReason.PLACED, now)
        place = EngineActionKind.PLACE
        state.actions.append(EngineAction(place, program.id, DecisionReason.PLACED, move.to))

    # -- how long requests wait -----------------------------------------------------

    def _continued_wait_s(self, program: ProgramState, now: float) -> float:
        """Return the start of the wait of a request that arrives now: of its program's aborted request, if
        this is a retry."""
        since_s, aborted_s = program.aborted_wait or (now, now)
        program.aborted_wait = None
        return since_s if now - aborted_s <= RETRY_S else now

    def _next_released(self, now: float) -> ProgramId | None:
        """Release the parked request with the longest wait that has reached its limit; return its program.

        The next one is released after the released request was admitted or has ended, or after
        ``RELEASE_GAP_S``. One whose context was lost waits for its part of ``RELEASED_SHARE``."""
        released = self._released
        if released is not None and now - self._released_s < RELEASE_GAP_S:
            place = self._place_of(released)
            if place is not None and place.waiting.get(released.request_id) is released:
                return None  # the engine has not admitted the released request yet
        hold_s, blocks_of, overdue = self.limits.hold_timeout_s, self._pool.blocks_of, list[RequestState]()
        if self._first_wait_s > now - hold_s:
            return None
        runs = [each for place in self._places.values() for each in place.running.values() if each.released]
        left_blocks = RELEASED_SHARE * self._pool.blocks - sum(blocks_of(each.prompt_tokens) for each in runs)
        self._first_wait_s = math.inf
        waiting = [(place, each) for place in self._places.values() for each in place.waiting.values()]
        for place, each in waiting:
            since_s, is_lost = each.waits_since_s, place.returning and place.tier is Tier.WAITING
            if since_s <= now - hold_s and place.parks(each):
                has_room = not runs or not is_lost or blocks_of(each.prompt_tokens) <= left_blocks
                if has_room or since_s <= now - MAX_HOLDS * hold_s:
                    overdue.append(each)
                else:  # looked at again when a request has ended, not in each step
                    since_s += (MAX_HOLDS - 1.0) * hold_s
            self._first_wait_s = min(self._first_wait_s, since_s)
        first = min(overdue, key=lambda each: (each.waits_since_s, each.arrival), default=None)
        if first is not None:
            first.released, self._released, self._released_s = True, first, now
        return first.program_id if first is not None else None

    # -- inside -----------------------------------------------------------------------

    def _place_of(self, request_state: RequestState) -> PlacedProgram | None:
        return self._places.get(request_state.program.id) if request_state.program is not None else None

    def _changed(self, place: PlacedProgram) -> None:
        """Record an event of a program after which the policy must be asked."""
        place.view, self._event = None, True

    # -- views of programs --------------------------------------------------------------

    def _program_view(self, place: PlacedProgram) -> ProgramTierView:
        program, pool = place.program, self._pool
        wants_tokens = max((request.prompt_tokens for request in place.waiting.values()), default=0)
        runs_tokens = [request.prompt_tokens for request in place.running.values()]
        context_tokens = max(
            [program.context_tokens if place.context_blocks else 0, wants_tokens, *runs_tokens]
        )
        first_tokens = program.first_prompt_tokens or context_tokens
        growing = ProgramGrowthView(program.turns, first_tokens, context_tokens, program.peak_tokens)
        known, longest = self._histories.growth, pool.max_context_tokens
        left = self._histories.steps_left.turns_left(program, agent_type_name(program))
        sure = max(1.0, left[0]) if left is not None and left[1] else None
        to_the_end = expected_growth_tokens(growing, known, longest, turns_ahead=sure)
        this_turn = expected_growth_tokens(growing, known, longest, turns_ahead=1.0)
        in_tier, on_device = (int(each * pool.block_size / pool.tokens_per_block) for each in place.shared)

        def own(blocks: int, shared: int = on_device) -> int:
            return max(1, blocks - shared) if blocks else 0

        wants_blocks = pool.blocks_of(wants_tokens)
        if wants_blocks and place.tier is not Tier.DEVICE:
            wants_blocks = max(wants_blocks, place.context_blocks)

        return ProgramTierView(
            program_id=program.id,
            tier=place.tier,
            activity=place.activity,
            idleness=place.clock.reading(),
            context_blocks=own(place.context_blocks, in_tier),
            required_blocks=own(wants_blocks),
            resident_blocks=own(sum(map(pool.blocks_of, runs_tokens))),
            turn_blocks=own(pool.blocks_of(context_tokens + this_turn)),
            peak_blocks=own(pool.blocks_of(context_tokens + to_the_end)),
            arrived_s=place.arrived_s,
            waiting_since_s=min((request.waits_since_s for request in place.waiting.values()), default=0.0),
            last_active_s=place.last_active_s,
            running_since_s=min(
                (request.since_s for request in place.running.values() if request.running), default=math.inf
            ),
            returning=place.returning,
            importance=program.importance,
            due_s=program.due_s,
            pending=place.leaves_after is not None,
            **(self._costs(place) if self.policy.reads_costs else {}),
        )

    def _costs(self, place: PlacedProgram) -> dict[str, Any]:
        """Fields of a program's view for policies that read costs."""
        program, returns = place.program, place.program.continuation_probability
        started_s = (tool.started_s for tool in program.tools.values())
        began_s = max(place.last_active_s, min(started_s, default=place.last_active_s))
        return {
            "gap_durations_s": self._gap_durations_s(place),
            "gap_since_s": place.tools_ended_s if place.tools_ended_s is not None else began_s,
            "rebuild_s": self._rebuild_s(place),
            "return_chance": 1.0 if returns is None else returns,
            **self._work(program),
        }

    def _rebuild_s(self, place: PlacedProgram) -> float:
        """Return the seconds to compute again what the program's next prompt is expected to reuse, without
        the prefix that another context on the device has; 0.0 if unknown."""
        # Not of 0 tokens, since 0 seconds mean that the time is unknown.
        tokens = max(1, int(place.program.context_tokens * place.program.kept_share))
        shared_tokens = min(tokens - 1, place.shared[1] * self._pool.block_size)
        rebuild_s = self._reload.seconds(tokens) if place.context_blocks else 0.0
        if rebuild_s and shared_tokens > 0:
            rebuild_s -= self._reload.seconds(shared_tokens)
        return rebuild_s

    def _work(self, program: ProgramState) -> dict[str, Any]:
        """Fields about the service that a program needs, in seconds that its requests run.

        There are two predictions: by the service of ended programs of the agent type (of all types while
        fewer than ``MIN_PROGRAMS_SEEN`` of the type have ended), and by what is stated of the turns left.
        Each is as wide as it was wrong, so the one with the smaller spread counts. A turn takes as long as
        the program's turns so far, which count as much as ``TURNS_ASSUMED`` mean ones."""
        service, agent_type = self._histories.service, program.agent_type or ""
        all_s = service.quantiles(None, GAP_SAMPLES) if service.count() >= MIN_PROGRAMS_SEEN else ()
        known = service.count(agent_type) >= MIN_PROGRAMS_SEEN
        service_s = service.quantiles(agent_type, GAP_SAMPLES) if known else all_s
        found = {"service_s": service_s, "attained_s": program.attained_s, "new_service_s": service_s}
        if (stated := program.steps_left) is None or not service_s:
            return found
        mean_s = self._turn_s or 1.0
        turn_s = (TURNS_ASSUMED * mean_s + program.attained_s) / (TURNS_ASSUMED + program.turns)
        steps_left = self._histories.steps_left
        stated_s = tuple(turn_s * one for one in steps_left.total_turns(agent_type_name(program), stated))
        since_s = turn_s * (program.turns - stated.after)
        spread = _spread(_left(stated_s, since_s))
        if spread >= _spread(_left(service_s, program.attained_s)):
            return found
        return {**found, "service_s": stated_s, "attained_s": since_s, "work_stated": spread < SURE_SPREAD}

    def _gap_durations_s(self, place: PlacedProgram) -> tuple[float, ...]:
        """Return equally likely lengths in seconds of a program's gap from ``gap_since_s`` on; empty if the
        program is not acting.

        After the end of the last tool call, the length is ``RETURN_S``. Until then, the client's estimate is
        used, or else the time for which it asks to keep the KV. Both are corrected by earlier ones. Without
        them, earlier durations of the running tool are used, or of all tools if there are fewer than
        ``MIN_CALLS_SEEN``."""
        if place.activity is not ProgramActivity.ACTING:
            return ()
        if place.tools_ended_s is not None:
            return (RETURN_S,)
        tools, tool = self._histories.tools, place.program.tool_now()
        running = place.program.running_tool()
        if running is not None and running.expected_s is not None and 0 < running.expected_s < math.inf:
            assumed = estimated_durations(running.expected_s, running.expected_p95_s, GAP_SAMPLES)
            return self._histories.tool_estimates.expected(running.key, running.expected_s, assumed)
        if ttl_s := place.program.turn_hint.ttl_s:
            return self._histories.tool_estimates.expected(f"{TTL}/{tool}", ttl_s, within(ttl_s))
        known = tool if tool is not None and tools.count(tool) >= MIN_CALLS_SEEN else None
        return tools.quantiles(known, GAP_SAMPLES)


def _left(totals: Sequence[float], so_far: float) -> list[float]:
    """Return what is left of totals that are equally likely."""
    return [total - so_far for total in totals if total > so_far]


def _spread(left: Sequence[float]) -> float:
    """Return the standard deviation of what is left, ÷ its mean; ``inf``: nothing is known."""
    return pstdev(left) / fmean(left) if left else math.inf
