"""The foreseer: notes what programs do, asks the foresight policy what they will do, and plans prefetches.

Without a foresight policy nothing here is noted or asked. ``changed`` collects the
programs whose place in the eviction order may be another one now; an engine with
an order by program takes them before each step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..policy.foresight import declared_to_go_on
from ..policy.preset import Preset
from ..policy.views import LeftBehind, OwnerView, PrefetchView, Scale, StepView
from ..program.graphs import GraphStore
from ..program.record import Program
from ..program.status import OVER
from ..program.table import ProgramTable
from ..program.workflows import prompt_type, type_of
from .state import Histories, Pool, Ticket

KEPT_WEIGHT = 0.5
"""Of the newest turn in the share of its context that a program keeps."""
FARTHEST_S = 300.0
"""No prefetch is planned for later: nobody's lease lasts longer either."""


class Foreseer:
    """What each program of one engine is expected to do next."""

    def __init__(
        self, preset: Preset, pool: Pool, *, histories: Histories, graphs: GraphStore, table: ProgramTable
    ) -> None:
        self._preset = preset
        self._pool = pool
        self._known = histories.workflows
        self._tools = histories.tools
        self._graphs = graphs
        self._table = table
        self._looks = preset.foresight.looks
        self._ordered = preset.eviction.by_program
        self.changed: dict[ProgramId, None] = {}
        """Programs whose score may have changed, oldest news first; whoever takes them clears it."""
        self.begun: dict[ProgramId, float] = {}
        """Programs whose turn has got its blocks, and when they last used what they had; whoever takes them
        clears it."""
        self._plans: list[tuple[float, ProgramId]] = []
        """A heap of when to begin, for whom. What a program's own ``prefetch_at_s`` does not say is stale."""

    @property
    def scale_changes(self) -> int:
        """Grows whenever ``scale`` has moved, and the scores of all programs with it."""
        return self._known.gaps_s.changes + self._known.context_blocks.changes

    # -- what happens -----------------------------------------------------------

    def touched(self, program: Program) -> None:
        """Something happened that an eviction order may look at."""
        if self._ordered:
            self.changed[program.id] = None

    def came_back(self, program: Program, tool: str | None, gap_s: float, prompt_tokens: int) -> None:
        """The first request after a turn has arrived."""
        program.prefetch_at_s = None
        if self._looks:
            self._known.came_back(program, tool, gap_s, prompt_tokens)

    def admitted(
        self, program: Program, block_hashes: Sequence[Any], before_blocks: int, shared_blocks: int | None
    ) -> None:
        """A request got its blocks; so many of the last turn's are the first of its prompt."""
        # Of several requests at a time it is not known which branch is whose: none leaves anything behind.
        if self._ordered and len(program.live_requests) == 1:
            self.begun[program.id] = (
                program.last_turn_s if program.last_turn_s is not None else program.arrived_s
            )
        if not self._looks:
            return
        if program.prompt_type is None and not program.turns:
            program.prompt_type = prompt_type(block_hashes, self._pool.block_size)
        if shared_blocks is not None and before_blocks:
            share = shared_blocks / before_blocks
            program.kept_share += KEPT_WEIGHT * (share - program.kept_share)

    def turn_over(self, program: Program, ticket: Ticket, blocks: int, now: float) -> None:
        """All of the program's requests have ended, ``ticket``'s the last: what follows?"""
        program.last_turn_s = now
        program.cached_blocks = blocks
        self.touched(program)
        if not self._looks:
            return
        program.turn_node, program.turn_steps_left = ticket.node, ticket.steps_left
        program.turn_final = ticket.final
        self._known.context_blocks.observe(float(blocks))
        self._foresee(program, now)

    def tool_known(self, program: Program, now: float) -> None:
        """A client says which tool its last turn called: the output had shown none, or another one."""
        if self._looks and program.turn_over_s is not None:
            self._foresee(program, now)

    def over(self, program: Program, *, ended: bool) -> None:
        """The program is over. ``ended``: this is where it would have ended; it was not broken off."""
        program.prefetch_at_s = None
        if self._looks:
            self._known.over(program, ended=ended, turn_open=program.turn_over_s is not None)

    def idle(self, now: float) -> None:
        """Time passes: whoever has been idle for longest says how long that can be."""
        if self._looks:
            idle_s = self._table.longest_idle_s(now)
            if idle_s > self._known.gaps_s.value:
                self._known.gaps_s.observe(idle_s)

    # -- what is asked ------------------------------------------------------------

    def owner_view(self, program: Program, left: LeftBehind | None = None) -> OwnerView:
        """What the eviction order sees of a program, or of what its newest turn left behind."""
        view = OwnerView(
            program.rank,
            program.status in OVER,
            program.last_turn_s if program.last_turn_s is not None else program.arrived_s,
            blocks=program.cached_blocks,
            wanted=bool(program.live_requests),
            p_reuse=program.p_reuse,
        )
        if left is None:
            return view
        return view._replace(last_turn_s=left.used_s, blocks=left.blocks, left_behind=True)

    def scale(self, branch_reuse: float = 1.0) -> Scale:
        """What scores are measured in; ``branch_reuse`` is seen by whoever has the blocks."""
        return Scale(self._known.gaps_s.value, self._known.context_blocks.value, branch_reuse)

    def due(self, now: float) -> Program | None:
        """A program whose prefix is to be brought back from now on, if there is one; each is told once."""
        while self._plans and self._plans[0][0] <= now:
            at_s, program_id = heapq.heappop(self._plans)
            program = self._table.get(program_id)
            if program is not None and program.prefetch_at_s == at_s and program.status not in OVER:
                program.prefetch_at_s = None
                return program
        return None

    # -- inside -------------------------------------------------------------------

    def _foresee(self, program: Program, now: float) -> None:
        step = StepView(
            final=program.turn_final,
            steps_left=program.turn_steps_left,
            declared=self._declared(program),
            hints_believed=self._known.believed(program),
            inferred=self._known.successors(program),
            tasks=self._known.tasks(program),
            calls_tool=program.pending_tool is not None,
        )
        expected = self._preset.foresight.expect(step, now)
        declared = declared_to_go_on(step)
        program.foretold = None if declared is None else (type_of(program), declared)
        program.tier = expected.tier.value
        program.goes_on = expected.goes_on
        program.p_reuse = None
        if expected.goes_on is not None:
            program.p_reuse = expected.goes_on * self._known.overlap(program)
        self.touched(program)
        program.prefetch_at_s = None
        if (
            self._preset.prefetch.plans
            and expected.successor is not None
            and program.pending_tool is not None
        ):
            self._plan(program, expected.successor, now)

    def _declared(self, program: Program) -> tuple[tuple[str, float], ...]:
        if program.graph_hash is None or program.turn_node is None:
            return ()
        graph = self._graphs.use(program.graph_hash)
        return graph.following(program.turn_node) if graph is not None else ()

    def _plan(self, program: Program, successor: str, now: float) -> None:
        plan = self._preset.prefetch.plan(
            PrefetchView(
                successor=successor,
                goes_on=program.goes_on or 0.0,
                tool_durations_s=self._tools.durations(program.pending_tool) or self._tools.durations(),
                reload_s=(self._pool.host_s_per_token or 0.0) * program.context_tokens,
            ),
            now,
        )
        if plan is None or plan.at_s > now + FARTHEST_S:
            return
        program.prefetch_at_s = plan.at_s
        heapq.heappush(self._plans, (plan.at_s, program.id))
        if len(self._plans) > 4 * len(self._table) + 64:
            self._plans = sorted(
                (at_s, program_id)
                for at_s, program_id in set(self._plans)
                if (known := self._table.get(program_id)) is not None and known.prefetch_at_s == at_s
            )
