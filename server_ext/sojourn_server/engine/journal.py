"""The journal: what became of requests, programs and blocks, in the decision log and the counters.

Leases have theirs with the keeper, and turns with their records.
"""

from __future__ import annotations

from sojourn.ids import ProgramId
from sojourn.wire import Outcome

from ..metrics.cascades import Cascades
from ..metrics.decisions import DecisionLog
from ..metrics.ledger import Lost
from ..metrics.recorder import Recorder
from ..policy.base import Reason
from ..policy.placement import Move, When
from ..policy.recovery import Recovery
from ..program.record import Program
from .state import Pool, Ticket


class Journal:
    """Writes for one engine. Times are seconds on its monotonic clock."""

    def __init__(self, decisions: DecisionLog, recorder: Recorder, pool: Pool) -> None:
        self._decisions = decisions
        self._recorder = recorder
        self._pool = pool
        self._cascades = Cascades()

    def hint(self, outcome: Outcome) -> None:
        """A request came with a hint."""
        self._recorder.count("sojourn_hints_total", outcome=outcome.value)

    def preempted(
        self, ticket: Ticket | None, now: float, recovery: Recovery, tokens: int, step: int
    ) -> None:
        """A running request lost its blocks in engine step ``step``, with ``tokens`` tokens of KV; ``None``:
        one that nobody knows, which is only counted."""
        self._recorder.count("sojourn_preemptions_total", mode=recovery.value)
        self._cascade(self._cascades.preempted(step))
        if ticket is not None:
            self._decisions.add(
                now,
                "preempt",
                _program_of(ticket),
                recovery.value,
                tokens=tokens,
                times=ticket.preemptions,
                in_cascade=self._cascades.length,
            )

    def step(self, step: int) -> None:
        """Engine step ``step`` is over."""
        if self._cascades.length:
            self._cascade(self._cascades.over(step))

    def _cascade(self, length: int) -> None:
        if length:
            self._recorder.observe("sojourn_preemption_cascade_length", length)

    def refused(self, ticket: Ticket, now: float) -> None:
        """A request was kept out for too long."""
        self._recorder.count("sojourn_gate_timeouts_total")
        self._decisions.add(now, "refuse", _program_of(ticket), Reason.PLACED.value)

    def evicted(self, cause: Lost) -> None:
        """A cached block was reused."""
        self._recorder.count("sojourn_evictions_total", tier="device", cause=cause.value)
        self._recorder.count(
            "sojourn_evicted_bytes_total", self._pool.block_bytes, tier="device", cause=cause.value
        )

    def over(self, program: Program, outcome: str, now: float) -> None:
        """A program has ended, or was given up."""
        self._recorder.count("sojourn_programs_finished_total", outcome=outcome)
        self._recorder.observe("sojourn_program_duration_seconds", now - program.arrived_s)

    def moved(self, program_id: ProgramId, move: Move, now: float) -> None:
        """A program was moved to another queue, or told to leave after its turn."""
        kind = "to_" + move.to.value if move.when is When.NOW else "leaves_after_turn"
        self._decisions.add(now, kind, program_id, move.reason.value)
        self._recorder.count(
            "sojourn_placements_total", to=move.to.value, when=move.when.value, reason=move.reason.value
        )

    def prefetched(
        self, program_id: ProgramId, now: float, *, missing_blocks: int, coming_blocks: int, lost_blocks: int
    ) -> None:
        """A program's prefix is brought back: of ``missing_blocks`` that were not on the device,
        ``coming_blocks`` are read from disk and ``lost_blocks`` are in no tier."""
        if coming_blocks:
            reason = Reason.FROM_DISK
        elif not missing_blocks:
            reason = Reason.IN_PLACE
        else:
            reason = Reason.NO_TIER if lost_blocks == missing_blocks else Reason.IN_HOST
        self._decisions.add(now, "prefetch", program_id, reason.value, blocks=missing_blocks)
        self._recorder.count("sojourn_prefetches_total", outcome=reason.value)


def _program_of(ticket: Ticket) -> ProgramId | None:
    return ticket.program.id if ticket.program is not None else None
