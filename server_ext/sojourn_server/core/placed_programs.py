"""Programs with a request in the engine or with KV, and the placement policy's view of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sojourn.ids import ProgramId

from ..policies.forecasting import GrowthStatistics, expected_growth_tokens
from ..policies.placement.placement_policy import WaitingKey
from ..policies.placement.placement_views import ProgramActivity, ProgramTierView, Tier
from ..policies.policy_views import ProgramGrowthView
from ..programs.idleness import IdlenessTracker
from ..programs.program_state import ProgramState
from ..programs.windowed_history import estimated_durations
from .request_table import RequestState
from .scheduler_state import ANY_TYPE, SchedulerState

GAP_SAMPLES = 15
"""Number of quantiles of tool durations, and of service times, in a view."""
RETURN_S = 0.5
"""Expected seconds from the reported end of a program's last tool call to its next request."""
MAX_TOOL_REPORTS = 64
"""Maximum number of tool reports, since a program's last admission, that change the expected start and length
of the program's gap. Without this limit, endless reports could keep a program on the device: its tool would
always seem to have just begun, or to be about to end."""
MIN_PROGRAMS_SEEN = 8
"""Minimum number of ended programs, of one agent type or of all types, from which a program's service (the
seconds that its requests run) is predicted."""
MAX_WAITING_SEEN = 256
"""Maximum number of waiting requests that a program's view covers. It covers the oldest requests."""
MIN_CALLS_SEEN = 4
"""Minimum number of calls of a tool before the tool's own durations are used (see ``_gap_durations_s``)."""


@dataclass(slots=True, eq=False)
class PlacedProgram:
    """A program's tier, requests and idleness. The tier manager keeps them up to date."""

    program: ProgramState
    clock: IdlenessTracker
    arrived_s: float
    tier: Tier = Tier.WAITING
    waiting: dict[str, RequestState] = field(default_factory=dict)
    """The program's requests that were not admitted yet, oldest first."""
    running: dict[str, RequestState] = field(default_factory=dict)
    """The program's admitted requests, preempted ones included."""
    chains: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Block hashes of the prompt of each request in ``running``."""
    context_blocks: int = 0
    """Number of cached blocks that the program's last turn left; 0 if the KV was lost."""
    in_tier: int = 0
    """Number of leading block hashes of the program's context that are counted for another context of the
    same tier. The view ``seen`` leaves these blocks out of ``context_blocks``."""
    on_device: int = 0
    """Number of leading block hashes that the program need not bring to the device, because another context
    there has them. For a program on the device, the same as ``in_tier``."""
    last_active_s: float = 0.0
    """Time at which an admitted request last left the engine; before that, the program's arrival."""
    returning: bool = False
    """Whether a request of the program was admitted before."""
    exchanged: bool = False
    """Whether an exchange dropped the program's KV in this gap, or would have."""
    tools_ended_s: float | None = None
    """Time at which the client reported the end of the gap's last tool call; ``None``: not reported."""
    tool_reports: int = 0
    """Number of the client's reports of tool calls since a request last began to run."""
    gap_since_s: float = 0.0
    """Time of tool report number ``MAX_TOOL_REPORTS``. After further reports, the gap is counted from this
    time."""
    gap_durations_s: tuple[float, ...] = ()
    """Expected lengths of the gap as of tool report number ``MAX_TOOL_REPORTS``. Further reports do not
    change them."""
    leaves_after: int | None = None
    """Arrival number of the newest request at the time when the program was marked to leave the device. The
    program's requests with higher numbers are parked. ``None``: not marked."""
    seen: ProgramTierView | None = None
    """The policy's view of the program, as of the last event."""
    queue_entry: tuple[WaitingKey, ProgramId] | None = None
    """The program's entry in the Waiting queue, if any."""

    @property
    def activity(self) -> ProgramActivity:
        if self.running or self.turn_goes_on:
            return ProgramActivity.REASONING
        return ProgramActivity.READY if self.waiting else ProgramActivity.ACTING

    @property
    def turn_goes_on(self) -> bool:
        """Whether the program leaves the device after its turn, and a request of that turn still waits."""
        oldest = next(iter(self.waiting.values()), None)
        return self.leaves_after is not None and oldest is not None and oldest.arrival <= self.leaves_after


def _wait_order(request_state: RequestState) -> tuple[bool, int]:
    """Sort key of a program's waiting requests: retries of aborted requests first, then by arrival."""
    return (request_state.waits_since_s >= request_state.arrived_s, request_state.arrival)


class PlacedProgramViews:
    """Builds the placement policy's views of programs, from their state and from what the scheduler has
    learned (``Histories``). Times are seconds on the engine's monotonic clock."""

    def __init__(self, state: SchedulerState) -> None:
        self._pool = state.pool
        self._histories = state.histories
        self._reload = state.reload

    def view(self, place: PlacedProgram, *, costs: bool) -> ProgramTierView:
        """Return the policy's view of a program. ``costs``: whether the view has the fields that only
        policies with ``reads_costs`` read: expected gap, rebuild time and service.

        The sizes leave out shared blocks that count for other contexts (``place.in_tier``,
        ``place.on_device``)."""
        program, blocks_of = place.program, self._pool.blocks_of
        waiting = list(islice(place.waiting.values(), MAX_WAITING_SEEN))
        wants_tokens = max((request_state.prompt_tokens for request_state in waiting), default=0)
        runs_tokens = [request_state.prompt_tokens for request_state in place.running.values()]
        context_tokens = max(
            [program.context_tokens if place.context_blocks else 0, wants_tokens, *runs_tokens]
        )
        oldest = min(waiting, key=_wait_order, default=None)
        first_tokens = program.first_prompt_tokens or context_tokens
        growing = ProgramGrowthView(program.turns, first_tokens, context_tokens, program.peak_tokens)
        known, longest = self._growth_stats(), self._pool.max_context_tokens
        to_the_end = expected_growth_tokens(growing, known, longest)
        this_turn = expected_growth_tokens(growing, known, longest, turns_ahead=1.0)
        below, there = map(self._pool.blocks_of_hashes, (place.in_tier, place.on_device))

        def own(blocks: int, shared: int = there) -> int:
            return max(1, blocks - shared) if blocks else 0

        return ProgramTierView(
            program_id=program.id,
            tier=place.tier,
            activity=place.activity,
            idleness=place.clock.reading(),
            context_blocks=own(place.context_blocks, below),
            required_blocks=own(blocks_of(wants_tokens)),
            resident_blocks=own(sum(map(blocks_of, runs_tokens))),
            turn_blocks=own(blocks_of(context_tokens + this_turn)),
            peak_blocks=own(blocks_of(context_tokens + to_the_end)),
            arrived_s=place.arrived_s,
            waiting_since_s=oldest.waits_since_s if oldest is not None else 0.0,
            last_active_s=place.last_active_s,
            running_since_s=min(
                (state.since_s for state in place.running.values() if state.running), default=math.inf
            ),
            returning=place.returning,
            pending=place.leaves_after is not None,
            **(self._costs(place) if costs else {}),
        )

    def _costs(self, place: PlacedProgram) -> dict[str, Any]:
        """Fields of a program's view for policies that read costs."""
        program = place.program
        return {
            "gap_durations_s": self._gap_durations_s(place),
            "gap_since_s": self._gap_since_s(place),
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
        shared_tokens = min(tokens - 1, place.on_device * self._pool.block_size)
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

    def fix_gap(self, place: PlacedProgram, now: float) -> None:
        """Freeze the expected durations of a program's gap as of ``now``, and count them from ``now``.
        Further tool reports do not change them."""
        place.gap_durations_s, place.gap_since_s = self._gap_durations_s(place), now

    def _gap_since_s(self, place: PlacedProgram) -> float:
        """Time from which the durations of ``_gap_durations_s`` are counted."""
        if place.tool_reports > MAX_TOOL_REPORTS:
            return place.gap_since_s
        if place.tools_ended_s is not None:
            return place.tools_ended_s
        started_s = (tool.started_s for tool in place.program.tools.values())
        return max(place.last_active_s, min(started_s, default=place.last_active_s))

    def _gap_durations_s(self, place: PlacedProgram) -> tuple[float, ...]:
        """Return equally likely lengths in seconds of a program's gap from ``_gap_since_s`` on; empty if the
        program is not acting.

        After the end of the last tool call, the length is ``RETURN_S``. Until then, earlier durations of the
        running tool are used. If there are fewer than ``MIN_CALLS_SEEN``, the client's estimate is used. If
        there is no estimate, the durations of all tools are used."""
        if place.activity is not ProgramActivity.ACTING:
            return ()
        if place.tool_reports > MAX_TOOL_REPORTS:
            return place.gap_durations_s
        tools, tool = self._histories.tools, place.program.tool_now()
        if place.tools_ended_s is not None:
            return (RETURN_S,)
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
        return self._growth_stats().growth_observed

    def _growth_stats(self) -> GrowthStatistics:
        growth, turns = self._histories.growth_tokens, self._histories.turns
        return GrowthStatistics(growth.count(), growth.mean(), turns.count(), turns.mean())
