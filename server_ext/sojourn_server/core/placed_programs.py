"""Programs with a request in the engine or with KV, and the placement policy's view of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from sojourn.ids import ProgramId

from ..policies.forecasting import MIN_TURNS_SEEN, expected_growth_tokens
from ..policies.placement.placement_views import ProgramActivity, ProgramTierView, Tier
from ..policies.policy_views import GrowthStatistics, ProgramGrowthView
from ..programs.idleness import IdlenessTracker
from ..programs.program_state import ProgramState
from ..programs.statements import SURE_SPREAD, TTL, within
from ..programs.windowed_history import estimated_durations
from ..programs.workflow_history import agent_type_name
from .request_table import RequestState
from .scheduler_state import ANY_TYPE, SchedulerState

GAP_SAMPLES = 15
"""Number of quantiles of tool durations, and of service times, in a view."""
RETURN_S = 0.5
"""Expected seconds from the reported end of a program's last tool call to its next request."""
MIN_PROGRAMS_SEEN = 8
"""Minimum number of ended programs, of one agent type or of all types, from which a program's service (the
seconds that its requests run) is predicted."""
MIN_RUN_SHARE = 0.05
"""Minimum share of a sub-agent's time in which it runs, so that its end is finite."""
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
    context_blocks: int = 0
    """Number of cached blocks that the program's last turn left; 0 if the KV was lost."""
    attained_s: float = 0.0
    """Seconds of service at the end of the program's last turn."""
    exchanged: bool = False
    """Whether an exchange dropped the program's KV in this gap, or would have."""
    tools_ended_s: float | None = None
    """Time at which the client reported the end of the gap's last tool call; ``None``: not reported."""
    children: dict[ProgramId, PlacedProgram] = field(default_factory=dict)
    """The programs for which this one waits, as their clients say."""
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

    def pass_time(self, now: float) -> None:
        """Measure the idleness after an event of a request."""
        runs = any(request.running for request in self.running.values())
        self.clock.update(now, running=runs, live=bool(self.waiting or self.running))

    def parks(self, request_state: RequestState) -> bool:
        """Whether a request of the program may not run, because the program is not on the device, or will
        leave it."""
        if request_state.released or request_state.request_id not in self.waiting:
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
        self._turn_s = 0.0
        """Moving average of the seconds of service of a turn; 0.0 before the first."""

    def turn_finished(self, place: PlacedProgram) -> None:
        """Learn the service of a turn."""
        turn_s, place.attained_s = place.program.attained_s - place.attained_s, place.program.attained_s
        if turn_s > 0:
            self._turn_s += (turn_s - self._turn_s) * (TURN_WEIGHT if self._turn_s else 1.0)

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
        to_the_end = expected_growth_tokens(growing, known, longest, turns_ahead=self._turns_left(program))
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
            importance=program.importance,
            due_s=program.due_s,
            pending=place.leaves_after is not None,
            **(self._costs(place) if costs else {}),
        )

    def _costs(self, place: PlacedProgram) -> dict[str, Any]:
        """Fields of a program's view for policies that read costs."""
        program, returns = place.program, place.program.continuation_probability
        started_s = (tool.started_s for tool in program.tools.values())
        began_s = max(place.last_active_s, min(started_s, default=place.last_active_s))
        began_s = max([began_s, *(child.last_active_s for child in place.children.values())])
        return {
            "gap_durations_s": self._gap_durations_s(place),
            "gap_since_s": place.tools_ended_s if place.tools_ended_s is not None else began_s,
            "rebuild_s": self._rebuild_s(place),
            "return_chance": 1.0 if returns is None else returns,
            **self._work(program),
        }

    def _turns_left(self, program: ProgramState) -> float | None:
        """Number of turns that the program has left, at least 1; ``None``: it is not known for sure."""
        left = self._histories.steps_left.turns_left(program, agent_type_name(program))
        return max(1.0, left[0]) if left is not None and left[1] else None

    def _rebuild_s(self, place: PlacedProgram) -> float:
        """Seconds to compute again what the next prompt is expected to reuse of the context, without the
        prefix that another context on the device has; 0.0 without a cached context."""
        if not place.context_blocks:
            return 0.0
        # Not 0 tokens, since 0 seconds mean that the time is unknown.
        tokens = max(1, int(place.program.context_tokens * place.program.kept_share))
        shared_tokens = min(tokens - 1, place.shared[1] * self._pool.block_size)
        whole_s = self._reload.seconds(tokens)
        return whole_s - self._reload.seconds(shared_tokens) if shared_tokens > 0 else whole_s

    def _work(self, program: ProgramState) -> dict[str, Any]:
        """Fields about the service that a program needs, in seconds that its requests run.

        There are two predictions: by the service of ended programs of the agent type (of all types while
        fewer than ``MIN_PROGRAMS_SEEN`` of the type have ended), and by what is stated of the turns left.
        Each is as wide as it was wrong, so the one with the smaller spread counts. A turn takes as long as
        the program's turns so far, which count as much as ``TURNS_ASSUMED`` mean ones."""
        service, agent_type = self._histories.service, program.agent_type or ANY_TYPE
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
        spread = _spread(stated_s, since_s)
        if spread >= _spread(service_s, program.attained_s):
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
        if place.children:
            return self._children_s(place.children.values())
        if place.tools_ended_s is not None:
            return (RETURN_S,)
        tools, tool = self._histories.tools, place.program.tool_now()
        running = place.program.running_tool()
        if running is not None and running.expected_s is not None and 0 < running.expected_s < math.inf:
            assumed = estimated_durations(running.expected_s, running.expected_p95_s, GAP_SAMPLES)
            return self._histories.tool_estimates.expected(running.key, running.expected_s, assumed)
        if ttl_s := place.program.hinted_ttl_s:
            return self._histories.tool_estimates.expected(f"{TTL}/{tool}", ttl_s, within(ttl_s))
        known = tool if tool is not None and tools.count(tool) >= MIN_CALLS_SEEN else None
        return tools.quantiles(known, GAP_SAMPLES)

    def _children_s(self, children: Iterable[PlacedProgram]) -> tuple[float, ...]:
        """Return equally likely seconds until the last of these programs ends, from the end of their newest
        turn on. Of each, the mean service that it has left counts, with its share of time in tools."""
        longest_s = RETURN_S
        for child in children:
            work = self._work(child.program)
            service_s, attained_s = work["service_s"], work["attained_s"]
            runs = max(MIN_RUN_SHARE, 1.0 - child.clock.reading().at(child.last_active_s))
            longest_s = max(longest_s, _mean_left(service_s, attained_s) / runs)
        return estimated_durations(longest_s, None, GAP_SAMPLES)

    @property
    def growth_observed(self) -> bool:
        """Whether enough turns were observed to predict how contexts grow."""
        return self._growth_stats().observed_turns >= MIN_TURNS_SEEN

    def _growth_stats(self) -> GrowthStatistics:
        growth, turns = self._histories.growth_tokens, self._histories.turns
        return GrowthStatistics(growth.count(), growth.mean(), turns.count(), turns.mean())


def _mean_left(totals: Sequence[float], so_far: float) -> float:
    """Return the mean of what is left of totals that are equally likely."""
    return fmean([total - so_far for total in totals if total > so_far] or [so_far])


def _spread(totals: Sequence[float], so_far: float) -> float:
    """Return the standard deviation of what is left, ÷ its mean; ``inf``: nothing is known."""
    left = [total - so_far for total in totals if total > so_far]
    return pstdev(left) / fmean(left) if left else math.inf
