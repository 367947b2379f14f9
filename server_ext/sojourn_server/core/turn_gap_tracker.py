"""Tells turns from side requests, and records turns in progress and the gaps between a program's turns.

A gap lasts from the end of a turn until the program's next request. The tool history learns the durations
that clients report. Without a report, the tool history learns the gap as the tool's duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import LossCause, TokenSplit, TurnRecord, common_prefix_length, split_tokens
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES
from .events_and_actions import FirstToken, RequestAdmitted, RequestArrived, TurnFinished
from .lease_manager import LeaseManager
from .request_hints import clipped
from .scheduler_state import SchedulerState

_EVICTED = frozenset({LossCause.EVICTED, LossCause.EXPIRED, LossCause.SILENT, LossCause.PRESSURE})
"""Causes of loss that count as evictions for Continuum's T̄, the mean wait after an eviction."""


class TurnGapTracker:
    """Records the turns of one engine, and the gaps between them. Times are seconds on the engine's monotonic
    clock."""

    def __init__(self, state: SchedulerState, lease_manager: LeaseManager) -> None:
        self._state = state
        self._lease_manager = lease_manager
        self.awaiting_first_token: dict[str, TurnRecord] = {}
        """Records of admitted requests without an output token, by request id."""

    def join_turn(self, program: ProgramState, event: RequestArrived, now: float) -> list[str]:
        """Return the ids of the requests that are *side requests* from now on: that of ``event`` if it is no
        turn of its program, or else those that it takes out of the running turn.

        A side request, such as one for a title, a count of tokens or a sub-agent without an id, has its
        program's place in the queue. Else it is served like a request without a program.

        The program's *main context* is the longest prompt of its running turn, or else the context that its
        last turn left. The main context *waits* while the program is in a tool and has a lease or reported
        the tool (at most ``max_held_s``). A request is a turn in four cases:

        1. There is no main context: the program is new or over, or the hashes were dropped.
        2. It continues the main context: it begins with the last prompt, since clients rewrite outputs, or
           with at least half of it, if no turn runs (a rewind, an edited history).
        3. A turn runs, and the request is longer. The turn's requests become side requests.
        4. No turn runs, the main context does not wait, and the request is at least half as long, or it
           continues the *branch*, the newest side request since the last turn. The conversation has moved
           on, for example after a compaction.

        A turn's context replaces the main context when the turn ends, and drops the branch.
        """
        hashes, before = event.block_hashes, None
        found = (self._state.requests.states[request_id] for request_id in program.live_requests)
        # Not those of an earlier program of this id. Sorted, since the order of a set differs by process.
        live = sorted((one for one in found if one.rank == program.rank), key=lambda one: one.arrival)
        if live:
            longest = max(live, key=lambda request: request.prompt_tokens)
            before, prompt_tokens = longest.block_hashes, longest.prompt_tokens
        elif program.turns and program.status not in OVER_STATUSES:
            before, prompt_tokens = self._state.contexts.get(program.id), program.prompt_tokens
        if hashes is None or before is None or any(request.block_hashes is None for request in live):
            return []
        prompt_blocks = min(len(before), prompt_tokens // self._state.pool.block_size)
        shared = common_prefix_length(before, hashes)
        # The last block of a prompt may hold tokens that only begin an answer.
        if shared >= prompt_blocks - 1 or (not live and 2 * shared >= prompt_blocks):
            return []
        if live:
            is_longer = event.prompt_tokens > prompt_tokens
            return [request.request_id for request in live] if is_longer else [event.request_id]
        if not self._waits(program, now):
            branch = self._state.contexts.branch(program.id)
            is_branch = 0 < len(branch) < len(hashes) and branch[-1] == hashes[len(branch) - 1]
            if is_branch or 2 * event.prompt_tokens >= program.context_tokens:
                return []
        self._state.contexts.put_branch(program.id, list(hashes))
        return [event.request_id]

    def _waits(self, program: ProgramState, now: float) -> bool:
        """Return whether the main context of a program without a running turn waits (see ``join_turn``)."""
        if program.gap_started_s is None or program.tool_now() is None:
            return False
        is_reported = bool(program.tools) and now - program.gap_started_s < self._state.limits.max_held_s
        return is_reported or program.id in self._state.leases

    def open(
        self,
        event: RequestArrived,
        program: ProgramState,
        *,
        tool: str | None,
        gap_s: float | None,
        tool_s: float | None,
        leased: bool,
        now: float,
    ) -> TurnRecord:
        """Return a new record for a request that has arrived. ``gap_s``: length of the gap that the request
        ended, in seconds; ``None``: no gap. ``tool``: the tool that ran in that gap, if known. ``tool_s``:
        seconds in which tools ran in that gap, if known. ``leased``: whether the program had a lease."""
        context = event.identity.context
        client_request_id = clipped(context.request_id) if context is not None else None
        return TurnRecord(
            program.id,
            program.turns + (client_request_id is None or client_request_id != program.client_request_id),
            event.request_id,
            now,
            tool_before=tool,
            gap_s=gap_s,
            tool_s=tool_s,
            leased=leased,
            client_request_id=client_request_id,
        )

    def admitted(
        self,
        record: TurnRecord,
        program: ProgramState,
        event: RequestAdmitted,
        before: Sequence[Any] | None,
        shared: int | None,
        now: float,
    ) -> None:
        """Record a request's first admission, and where the KV of its prompt tokens came from.

        ``before``: block hashes of the program's context after its last turn. ``shared``: how many of these
        blocks the prompt begins with. Both are ``None`` if the hashes are unknown.
        """
        record.admitted_s = now
        self.awaiting_first_token[event.request_id] = record
        cause, evicted_block = self._lease_manager.loss_cause(program, before, event)
        if evicted_block is not None:
            record.evictor, record.evicted_score = evicted_block.evictor, evicted_block.score
        split = split_tokens(
            prompt=event.tokens,
            device=event.cached_tokens,
            block_size=self._state.pool.block_size,
            before_tokens=program.context_tokens,
            before_full_blocks=len(before) if before is not None else 0,
            shared_blocks=shared,
            cause=cause,
            dropped_hit_blocks=self._state.pool.dropped_hit_blocks,
        )
        record.tokens = replace(split, device=split.device - event.host_tokens, host=event.host_tokens)
        reused = split.device  # on the device and in host memory
        program.reused_tokens += reused
        program.lost_tokens += sum(split.lost.values())
        program.saved_s += self._state.reload.seconds(reused)
        if program.turns and any(cause in _EVICTED for cause in record.tokens.lost):
            self._state.histories.evicted_waits.observe(now - record.arrived_s)

    def first_token(self, event: FirstToken, now: float) -> None:
        """Record that a request has its first output token."""
        record = self.awaiting_first_token.pop(event.request_id, None)
        if record is not None:
            record.first_token_s = now
            program = self._state.programs.get(ProgramId(record.program_id))
            if program is not None:
                program.ttft_s = now - record.arrived_s

    def close(self, record: TurnRecord, event: TurnFinished, now: float) -> None:
        """Complete the record of a request that has left the engine, and add it to the ledger and to the
        metrics."""
        self.awaiting_first_token.pop(event.request_id, None)
        record.finished_s = now
        record.output_tokens = event.output_tokens
        record.outcome = event.outcome.value
        self._state.ledger.close(record)
        self._state.recorder.count("sojourn_program_turns_total", outcome=event.outcome.value)
        if record.recomputed_after_preemption:
            self._state.recorder.count(
                "sojourn_lost_tokens_total",
                record.recomputed_after_preemption,
                cause=LossCause.PREEMPTED.value,
            )
        if record.tokens is not None:
            self._count_tokens(record.tokens)

    def _count_tokens(self, split: TokenSplit) -> None:
        for result in ("device", "host", "new", "tail"):
            self._state.recorder.count("sojourn_prompt_tokens_total", getattr(split, result), result=result)
        for cause, tokens in split.lost.items():
            self._state.recorder.count("sojourn_prompt_tokens_total", tokens, result="lost")
            self._state.recorder.count("sojourn_lost_tokens_total", tokens, cause=cause.value)
            if cause is not LossCause.CHANGED:
                regretted = int(tokens // self._state.pool.tokens_per_block)
                self._state.recorder.count("sojourn_evictions_regretted_total", regretted, tier="device")

    def open_gap(self, program: ProgramState, event: TurnFinished, now: float) -> None:
        """Start the gap after a program's turn: store the context length and the tool that now runs."""
        context_tokens = event.prompt_tokens + event.output_tokens
        program.prompt_tokens = event.prompt_tokens
        # The first turn may have had several requests, and each of them counts in ``turns``.
        if program.peak_tokens:
            self._state.histories.growth_tokens.observe(max(0, context_tokens - program.peak_tokens))
        else:
            program.first_prompt_tokens = event.prompt_tokens
        program.context_tokens = context_tokens
        program.peak_tokens = max(program.peak_tokens, context_tokens)
        program.gap_started_s = now
        program.gap_tool_time = None
        program.gap_reported = False
        program.gap_leased = False
        # Calls whose start was reported late, and their end lost, do not run in this gap.
        program.tools = {
            call: tool for call, tool in program.tools.items() if tool.started_s >= program.tools_ended_s
        }
        # The gap lasts until the slowest of the calls has ended.
        program.pending_tool = self._state.histories.tools.slowest([call.key for call in event.tool_calls])

    def tools_of_gap_s(self, program: ProgramState, now: float) -> float | None:
        """Return the seconds in which tools ran in the gap that a request now ends, at most the gap's length.
        ``None``: there is no gap, the client reported no call in it, or not all calls have ended."""
        if program.gap_started_s is None or program.live_requests or program.tools:
            return None
        return None if program.gap_tool_time is None else program.gap_tool_time.seconds

    def close_gap(self, program: ProgramState, now: float) -> float | None:
        """End the gap of a program whose next request has arrived. Returns the length of the gap in seconds.

        Returns ``None`` if there is no gap, or if another request has already ended it. If the client
        reported no tool duration, the tool history learns the gap.
        """
        program.tools.clear()
        program.tools_ended_s = now
        if program.gap_started_s is None or program.live_requests:
            return None
        gap_s = max(0.0, now - program.gap_started_s)
        if program.pending_tool is not None:
            source = "reported" if program.gap_reported else "inferred"
            self._state.recorder.count("sojourn_tool_gap_source_total", source=source)
            self._state.recorder.observe("sojourn_tool_gap_seconds", gap_s, tool=program.pending_tool)
            if not program.gap_reported:
                self._state.histories.tools.observe(program.pending_tool, gap_s)
                program.gap_inferred_s = now
        program.gap_started_s = program.gap_tool_time = None
        return gap_s
