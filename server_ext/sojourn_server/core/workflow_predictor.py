"""Predicts each program's next workflow step with the workflow prediction policy, and plans prefetches.

Without such a policy (``workflow_prediction`` in presets) only the share of a context that prompts reuse is
learned, and nothing is predicted. This module also lists the programs whose eviction key may have changed.
The engine reads that list before each engine step if evictions are ordered by program.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import common_prefix_length
from ..policies.policy_protocols import DecisionReason, NextStepPrediction
from ..policies.policy_views import EvictionScoreScale, LoadAheadView, PrefetchView, WorkflowStepView
from ..policies.prefetch_policies import KEEP_S
from ..policies.workflow_prediction import hinted_continuation_probability
from ..programs.declared_graphs import steps_after
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES
from ..programs.statements import GRAPH, PLAN, STATED
from ..programs.windowed_history import KeyedHistory
from ..programs.workflow_history import agent_type_name, prompt_type, step_name
from .context_hashes import HashLists
from .events_and_actions import LoadAheadChosen, PrefetchStarted, TurnFinished
from .request_table import RequestState
from .scheduler_state import SchedulerState

REUSED_SHARE_WEIGHT = 0.5
"""Weight of the newest turn in ``ProgramState.reused_share``, a moving average: the share of a turn's context
that the next prompt reuses."""
MAX_TYPES = 256
"""Maximum number of agent types whose mean reused share is kept."""
MAX_PREFETCH_TRIES = 6
"""Maximum number of prefetches begun in one gap. A prefetch is repeated if blocks of the prefix were still on
disk, or could not be loaded into the device."""
FIRST_RETRY_S = 0.1
"""Seconds from the first prefetch of a gap to the second. The delay doubles for each further prefetch."""


class WorkflowPredictor:
    """Predicts the next workflow step of each program of one engine, and plans the prefetch of its prefix."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._preset = state, state.preset
        self._pool, self._contexts = state.pool, state.contexts
        self.prefixes: HashLists[tuple[str, str, ProgramId]] = HashLists()
        """Block hashes with which prompts begin: of each program's newest turn at each step of its agent
        type. A *step* is a graph node or a tool, as in predictions."""
        self._workflows, self._steps_left = state.histories.workflows, state.histories.steps_left
        self._predicts = self._preset.workflow_prediction.is_used
        self._evicts_by_program = self._preset.eviction.by_program
        self._reused_shares: KeyedHistory[str] = KeyedHistory(256, MAX_TYPES, max_all=1)
        """Shares of a context that the next prompt reused, by agent type."""
        self._step_shares: KeyedHistory[tuple[str, str]] = KeyedHistory(64, MAX_TYPES * 8, max_all=1)
        """The same by agent type and by the step of that next prompt's turn."""
        self._reusing: dict[ProgramId, float] = {}
        """Program whose request was admitted → share of its last context that this request reuses."""
        self._changed: dict[ProgramId, None] = {}
        """Programs whose eviction key may have changed, in the order of the changes."""
        self._begun: dict[ProgramId, float] = {}
        """Programs that began a turn → end of the previous turn, or else the program's arrival."""
        self._plans: dict[ProgramId, float] = {}
        """Program → start of its planned prefetch."""

    @property
    def scale_changes(self) -> int:
        """Number of changes of ``scale`` so far. After a change all eviction keys are out of date."""
        return self._workflows.gaps_s.changes + self._workflows.context_blocks.changes

    # -- what happens -----------------------------------------------------------

    def eviction_key_changed(self, program: ProgramState) -> None:
        """Record that the program's eviction key may have changed."""
        if self._evicts_by_program:
            self._changed[program.id] = None

    def arrived(self, program: ProgramState, request_state: RequestState) -> None:
        """Keep what a request says of the turns that its program has left: itself, or by its graph's node."""
        hint, before, source = request_state.hint, program.steps_left, STATED
        steps, graph = hint.steps_left, self._state.graphs.get(program.graph_hash or "")
        if steps is None and graph and hint.node and (before is None or before.source == GRAPH):
            steps, source = steps_after(graph).get(hint.node), GRAPH
        if self._predicts and steps is not None:
            self._steps_left.state(program, source, steps)

    def believes_final(self, program: ProgramState) -> bool:
        """Whether a turn counts as final if it was declared so: unless the program went on after such a turn,
        or hints about its agent type's next turns are mostly wrong."""
        return not program.went_on_after_final and self._workflows.hints_reliable(program)

    def came_back(self, program: ProgramState, tool: str | None, gap_s: float, prompt_tokens: int) -> None:
        """Learn from a program's first request after a turn: the tool, the length of the gap, and the length
        of the prompt."""
        self._plans.pop(program.id, None)
        if self._predicts:
            self._workflows.came_back(program, tool, gap_s, prompt_tokens)

    def admitted(
        self, program: ProgramState, block_hashes: Sequence[Any], before_blocks: int, shared: int | None
    ) -> None:
        """Learn how much of the last turn's context an admitted request reuses. ``before_blocks``: number of
        blocks of this context. ``shared``: number of these blocks that the prompt reuses; ``None``: unknown.
        """
        # With several requests the branch of each is unknown, so no branch is marked as abandoned.
        if self._evicts_by_program and len(program.live_requests) == 1:
            self._begun[program.id] = program.last_active_s
        # A side request, such as one for a title, has a short prompt and leaves a short context.
        context_blocks = max(len(block_hashes), program.peak_tokens // self._pool.block_size)
        if shared is not None and before_blocks and 2 * before_blocks >= context_blocks:
            share = shared / before_blocks
            program.reused_share += REUSED_SHARE_WEIGHT * (share - program.reused_share)
            program.kept_share = program.reused_share
            self._reused_shares.observe(agent_type_name(program), share)
            if self._predicts:
                self._reusing[program.id] = share
        if self._predicts and program.prompt_type is None and not program.turns:
            program.prompt_type = prompt_type(block_hashes, self._pool.block_size)

    def turn_finished(self, program: ProgramState, event: TurnFinished, now: float) -> None:
        """Predict a program's next workflow step after a turn. ``event``: of the turn's last request."""
        name, plan_items = agent_type_name(program), event.plan_items
        program.last_turn_s, program.cached_blocks = now, len(event.block_ids)
        if program.turns == 1:
            mean = self._reused_shares.mean(name, 1)
            program.kept_share = program.reused_share = program.reused_share if mean is None else mean
        self.eviction_key_changed(program)
        program.prefetch_tries = 0
        if self._predicts:
            # A plan says less than a client that states its turns, and more than a graph.
            if plan_items is not None and (program.steps_left is None or program.steps_left.source != STATED):
                self._steps_left.state(program, PLAN, plan_items)
            self._workflows.context_blocks.observe(float(program.cached_blocks))
            share = self._reusing.pop(program.id, None)
            # Predictions name a turn by its graph node or by its tool.
            tool, node = step_name(program.pending_tool), program.turn_hint.node
            for step in (tool,) if node in (None, tool) else (node, tool):
                if share is not None:
                    self._step_shares.observe((name, step), share)
                if self._preset.prefetch.is_used and event.block_hashes:
                    self.prefixes.put((name, step, program.id), event.block_hashes)
        self.plan_gap(program, now)

    def learn_ended_program(self, program: ProgramState, *, ended: bool) -> None:
        """Learn from a program that is over. ``ended``: false if the client cancelled the program."""
        self._plans.pop(program.id, None)
        self._reusing.pop(program.id, None)
        if self._predicts:
            self._workflows.learn_ended_program(
                program, ended=ended, turn_open=program.gap_started_s is not None
            )
            if ended:
                self._steps_left.learn_end(program, agent_type_name(program))

    # -- queries ------------------------------------------------------------------

    def scale(self, branch_reuse: float = 1.0) -> EvictionScoreScale:
        """Return the scale of eviction scores: statistics over all programs. ``branch_reuse``: share of the
        blocks of abandoned branches that was used again."""
        return EvictionScoreScale(
            self._workflows.gaps_s.value, self._workflows.context_blocks.value, branch_reuse
        )

    def take_changed(self) -> dict[ProgramId, None]:
        """Return and clear the programs whose eviction key may have changed."""
        taken, self._changed = self._changed, {}
        return taken

    def take_begun(self) -> dict[ProgramId, float]:
        """Return and clear the programs that began a turn, each with the time at which the program last used
        its earlier blocks. This time is the end of the previous turn or, for a first turn, the program's
        arrival."""
        taken, self._begun = self._begun, {}
        return taken

    def pop_due_prefetches(self, now: float) -> list[ProgramState]:
        """Return the programs whose prefetch is due, and remove these plans."""
        due = sorted((at_s, program_id) for program_id, at_s in self._plans.items() if at_s <= now)
        for _, program_id in due:
            del self._plans[program_id]
        programs = (self._state.programs.get(program_id) for _, program_id in due)
        return [each for each in programs if each is not None and each.status not in OVER_STATUSES]

    def expected_prefix(self, program: ProgramState) -> tuple[Sequence[Any], bool]:
        """Return the block hashes with which the program's next prompt is expected to begin, and whether they
        were learned for the predicted next workflow step.

        Hashes of the predicted step are returned only if their first block differs from the context's
        first block. Otherwise the hashes are those of the program's context. Those of a step are of the
        program's last prompt there, or else what the newest turns of two programs of the type share."""
        own = self._contexts.get(program.id) or ()
        if program.successor is not None:
            at = agent_type_name(program), program.successor
            prefix = self.prefixes.get((*at, program.id))
            if prefix is None:
                newest = [
                    *islice((each for key, each in reversed(self.prefixes.items()) if key[:2] == at), 2)
                ]
                prefix = newest[0][: common_prefix_length(*newest)] if len(newest) == 2 else ()
            if prefix and (not own or prefix[0] != own[0]):
                return prefix, True
        return own, False

    def prefetch_started(self, event: PrefetchStarted, now: float) -> LoadAheadChosen | None:
        """Record that a prefetch has begun, and plan another one if a lower tier has further blocks of the
        prefix that are not being loaded. Returns what to load into spare blocks; ``None`` for nothing."""
        program, state = self._state.programs.get(event.program_id), self._state
        missing = event.missing_blocks
        lost_blocks = missing if event.lost_blocks is None else event.lost_blocks
        blocks, is_first = 0, True
        if program is not None and not program.live_requests and program.status not in OVER_STATUSES:
            tries = program.prefetch_tries
            if event.host_blocks and event.spare_blocks:
                pool, link, compute_s = self._pool, state.host_link, state.reload.seconds
                token_s = link.load_s_per_token
                view = LoadAheadView(
                    host_blocks=event.host_blocks,
                    spare_blocks=event.spare_blocks,
                    reserve_blocks=self.reserve_blocks,
                    pool_blocks=pool.blocks,
                    compute_s_per_block=compute_s(int(missing * pool.tokens_per_block)) / missing,
                    load_s_per_block=None if token_s is None else token_s * pool.tokens_per_block,
                    queue_s=link.loads_queued_s,
                )
                blocks = self._preset.prefetch.load_ahead(view, now)
            is_first, program.prefetch_tries = not tries, tries + 1
            if missing - lost_blocks > blocks and program.prefetch_tries < MAX_PREFETCH_TRIES:
                self._plans[program.id] = now + FIRST_RETRY_S * 2**tries
        if is_first or blocks:
            reason = DecisionReason.NO_TIER if lost_blocks == missing else DecisionReason.IN_HOST
            if blocks:
                reason = DecisionReason.TO_DEVICE
            elif event.coming_blocks:
                reason = DecisionReason.FROM_DISK
            elif not missing:
                reason = DecisionReason.IN_PLACE
            state.decisions.add(now, "prefetch", event.program_id, reason.value, blocks=blocks or missing)
            state.recorder.count("sojourn_prefetches_total", outcome=reason.value)
        return LoadAheadChosen(blocks, KEEP_S) if blocks else None

    @property
    def reserve_blocks(self) -> int:
        """Number of blocks that requests may take in one engine step, at most the whole pool."""
        return min(self._pool.blocks_of(self._pool.step_tokens), self._pool.blocks)

    # -- inside -------------------------------------------------------------------

    def _p_reuse(self, program: ProgramState, expected: NextStepPrediction) -> float | None:
        """Return the probability that the cached context is reused, Σ P(u)·overlap(u) over the successors u
        (SAGA §4.1, eq. 4). overlap(u) is learned: the mean share of the context that prompts at the step u
        reused. For an unknown step it is the program's mean share."""
        goes_on, share = expected.continuation_probability, program.reused_share
        total = sum(p for _, p in expected.successors)
        if goes_on is not None and total > 0:
            name = agent_type_name(program)
            means = [(p, self._step_shares.mean((name, step), 1)) for step, p in expected.successors]
            share = sum(p * (share if mean is None else mean) for p, mean in means) / total
        program.kept_share = share
        return None if goes_on is None else goes_on * self._workflows.overlap(program, share)

    def plan_gap(self, program: ProgramState, now: float) -> None:
        """Predict the program's next workflow step, and plan a prefetch for it: after a turn, and again after
        the client's report of a tool that the turn's output did not show."""
        if self._predicts:
            name, node, steps_left = (
                agent_type_name(program),
                program.turn_hint.node,
                program.turn_hint.steps_left,
            )
            graph = self._state.graphs.get(program.graph_hash or "")
            # SAGA takes the client's number of turns as it is. Beside a placement by price, it counts as
            # corrected, and only if such numbers are right: a limit of turns says little of the next one.
            if self._preset.placement.reads_costs:
                left = self._steps_left.turns_left(program, name)
                steps_left = left[0] if left is not None and left[1] else None
            step = WorkflowStepView(
                final=program.turn_hint.final and self.believes_final(program),
                steps_left=steps_left,
                declared=tuple(graph.following(node).items()) if graph and node is not None else (),
                hints_reliable=self._workflows.hints_reliable(program),
                inferred=self._workflows.successors(program),
                tasks=self._workflows.finished_programs(program),
                calls_tool=program.pending_tool is not None,
                resumes=program.turn_hint.resumes,
            )
            expected = self._preset.workflow_prediction.expect(step, now)
            declared = 0.0 if program.turn_hint.final else hinted_continuation_probability(step)
            program.pending_declaration = None if declared is None else (name, declared)
            program.prediction_source = expected.source.value
            program.continuation_probability = expected.continuation_probability
            program.successor = expected.successor
            program.p_reuse = self._p_reuse(program, expected)
            self.eviction_key_changed(program)
        prefetch, tools = self._preset.prefetch, self._state.histories.tools
        self._plans.pop(program.id, None)
        if not prefetch.is_used or program.pending_tool is None or program.successor is None:
            return
        prefix, of_successor = self.expected_prefix(program)
        tokens = len(prefix) * self._pool.block_size if of_successor else program.context_tokens
        start_s = prefetch.plan(
            PrefetchView(
                continuation_probability=program.continuation_probability,
                tool_durations_s=tools.durations(program.pending_tool) or tools.durations(),
                reload_s=self._state.host_link.load_s(tokens) or 0.0,
            ),
            now,
        )
        if start_s is not None:
            self._plans[program.id] = start_s
