"""Programs with a request in the engine or with KV, and the placement policy's view of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..policies.forecasting import MIN_TURNS_SEEN, expected_growth_tokens
from ..policies.placement.placement_views import ProgramActivity, ProgramTierView, Tier
from ..policies.policy_views import GrowthStatistics, ProgramGrowthView
from ..programs.idleness import IdlenessTracker
from ..programs.program_state import ProgramState
from ..programs.windowed_history import estimated_durations
from .request_table import RequestState
from .scheduler_state import ANY_TYPE, SchedulerState

GAP_SAMPLES = 15
"""Number of quantiles of tool durations, and of service times, in a view."""
RETURN_S = 0.5
"""Expected seconds from the reported end of a program's last tool call to its next request."""
MIN_PROGRAMS_SEEN = 8
"""Minimum number of ended programs, of one agent type or of all types, from which a program's service (the
seconds that its requests run) is predicted."""
MIN_CALLS_SEEN = 4
"""Minimum number of calls of a tool before the tool's own durations are used (see ``_gap_durations_s``)."""


@dataclass(slots=True, eq=False)
class PlacedProgram:
    """A program's tier, requests and idleness. The tier manager keeps them up to date."""

    program: ProgramState
    clock: IdlenessTracker
    arrived_s: float
    last_active_s: float
    """Time at which an admitted request last left the engine; before that, the program's arrival."""
    returning: bool
    """Whether a request of the program was admitted before."""
    tier: Tier = Tier.WAITING
    waiting: dict[str, RequestState] = field(default_factory=dict)
    """The program's requests that were not admitted yet, oldest first."""
    running: dict[str, RequestState] = field(default_factory=dict)
    """The program's admitted requests, preempted ones included."""
    prompts: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Block hashes of the prompt of each request; empty for a waiting request whose hashes are unknown."""
    context_blocks: int = 0
    """Number of cached blocks that the program's last turn left; 0 if the KV was lost."""
    exchanged: bool = False
    """Whether an exchange dropped the program's KV in this gap, or would have."""
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
        if self.running or self._turn_goes_on:
            return ProgramActivity.REASONING
        return ProgramActivity.READY if self.waiting else ProgramActivity.ACTING

    @property
    def _turn_goes_on(self) -> bool:
        """Whether the program leaves the device after its turn, and a request of that turn still waits."""
        oldest = next(iter(self.waiting.values()), None)
        return self.leaves_after is not None and oldest is not None and oldest.arrival <= self.leaves_after

    def parks(self, request_state: RequestState) -> bool:
        """Whether a request of the program may not run, because the program is not on the device, or will
        leave it."""
        if request_state.request_id not in self.waiting:
            return False
        leaves_after = self.leaves_after
        return self.tier is not Tier.DEVICE or (
            leaves_after is not None and request_state.arrival > leaves_after
        )


class PlacedProgramViews:
    """Builds the placement policy's views of programs, from their state and from what the scheduler has
    learned (``Histories``). Times are seconds on the engine's monotonic clock."""

    def __init__(self, state: SchedulerState) -> None:
        self._pool = state.pool
        self._histories = state.histories
        self._reload = state.reload

    def view(self, place: PlacedProgram, shared: tuple[int, int], *, costs: bool) -> ProgramTierView:
        """Return the policy's view of a program. The view is built anew if the program had an event, or if
        ``shared`` (``PlacedProgram.shared``) has changed. ``costs``: whether the view has the fields that
        only policies with ``reads_costs`` read: expected gap, rebuild time and service."""
        if place.view is None or shared != place.shared:
            place.shared = shared
            place.view = self._build(place, costs)
        return place.view

    def _build(self, place: PlacedProgram, costs: bool) -> ProgramTierView:
        program, pool = place.program, self._pool
        wants_tokens = max((request.prompt_tokens for request in place.waiting.values()), default=0)
        runs_tokens = [request.prompt_tokens for request in place.running.values()]
        context_tokens = max(
            [program.context_tokens if place.context_blocks else 0, wants_tokens, *runs_tokens]
        )
        first_tokens = program.first_prompt_tokens or context_tokens
        growing = ProgramGrowthView(program.turns, first_tokens, context_tokens, program.peak_tokens)
        known, longest = self._growth_stats(), pool.max_context_tokens
        to_the_end = expected_growth_tokens(growing, known, longest)
        this_turn = expected_growth_tokens(growing, known, longest, turns_ahead=1.0)
        in_tier, on_device = map(pool.blocks_of_hashes, place.shared)

        def own(blocks: int, shared: int = on_device) -> int:
            return max(1, blocks - shared) if blocks else 0

        return ProgramTierView(
            program_id=program.id,
            tier=place.tier,
            activity=place.activity,
            idleness=place.clock.reading(),
            context_blocks=own(place.context_blocks, in_tier),
            required_blocks=own(pool.blocks_of(wants_tokens)),
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
            pending=place.leaves_after is not None,
            **(self._costs(place) if costs else {}),
        )

    def _costs(self, place: PlacedProgram) -> dict[str, Any]:
        """Fields of a program's view for policies that read costs."""
        program = place.program
        started_s = (tool.started_s for tool in program.tools.values())
        began_s = max(place.last_active_s, min(started_s, default=place.last_active_s))
        return {
            "gap_durations_s": self._gap_durations_s(place),
            "gap_since_s": place.tools_ended_s if place.tools_ended_s is not None else began_s,
            "rebuild_s": self._rebuild_s(place),
            "service_s": self._service_s(program),
            "attained_s": program.attained_s,
        }

    def _rebuild_s(self, place: PlacedProgram) -> float:
        """Seconds to compute again what the next prompt is expected to reuse of the context, without the
        prefix that another context on the device has; 0.0 without a cached context."""
        if not place.context_blocks:
            return 0.0
        # Not 0 tokens, since 0 seconds mean that the time is unknown.
        tokens = max(1, int(place.program.context_tokens * place.program.reused_share))
        shared_tokens = min(tokens - 1, place.shared[1] * self._pool.block_size)
        whole_s = self._reload.seconds(tokens)
        return whole_s - self._reload.seconds(shared_tokens) if shared_tokens > 0 else whole_s

    def _service_s(self, program: ProgramState) -> tuple[float, ...]:
        """Return quantiles of the service of ended programs of this program's agent type. *Service* is the
        number of seconds that a program's requests ran. If fewer than ``MIN_PROGRAMS_SEEN`` programs of the
        type have ended, programs of all types count. Empty if fewer than ``MIN_PROGRAMS_SEEN`` programs of
        all types have ended."""
        service, agent_type = self._histories.service, program.agent_type or ANY_TYPE
        known = agent_type if service.count(agent_type) >= MIN_PROGRAMS_SEEN else None
        return service.quantiles(known, GAP_SAMPLES) if service.count(known) >= MIN_PROGRAMS_SEEN else ()

    def _gap_durations_s(self, place: PlacedProgram) -> tuple[float, ...]:
        """Return equally likely lengths in seconds of a program's gap from ``gap_since_s`` on; empty if the
        program is not acting.

        After the end of the last tool call, the length is ``RETURN_S``. Until then, earlier durations of the
        running tool are used. If there are fewer than ``MIN_CALLS_SEEN``, the client's estimate is used. If
        there is no estimate, the durations of all tools are used."""
        if place.activity is not ProgramActivity.ACTING:
            return ()
        if place.tools_ended_s is not None:
            return (RETURN_S,)
        tools, tool = self._histories.tools, place.program.tool_now()
        if tool is not None and tools.count(tool) >= MIN_CALLS_SEEN:
            return tools.quantiles(tool, GAP_SAMPLES)
        running = place.program.running_tool()
        if running is not None and running.expected_s is not None:
            estimated = estimated_durations(running.expected_s, running.expected_p95_s, GAP_SAMPLES)
            if estimated:
                return estimated
        return tools.quantiles(None, GAP_SAMPLES)

    @property
    def growth_observed(self) -> bool:
        """Whether enough turns were observed to predict how contexts grow."""
        return self._growth_stats().observed_turns >= MIN_TURNS_SEEN

    def _growth_stats(self) -> GrowthStatistics:
        growth, turns = self._histories.growth_tokens, self._histories.turns
        return GrowthStatistics(growth.count(), growth.mean(), turns.count(), turns.mean())
