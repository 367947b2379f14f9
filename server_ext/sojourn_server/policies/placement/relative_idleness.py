"""Placement by relative idleness (MORI): its rules, its settings, and the order of the Waiting queue.

``relative_idleness_plan`` builds an answer; ``docs/mechanisms.md`` explains the numbers M1 to M9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...programs.idleness import WINDOW_CYCLES
from ..forecasting.context_growth import growth_reserve
from .placement_policy import LOOKAHEAD, TierMove, WaitingKey
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier
from .relative_idleness_plan import RelativeIdlenessPlan

# Levels of the Waiting queue.
_RETURNING, _NEW, _NOT_READY = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeIdlenessPlacement:
    """Places the busiest programs on the device, more idle programs below (MORI §4, §7.1; M2–M4, M6, M8, M9).

    A program is *reasoning* during a turn, *acting* while its tool runs, and *ready* while its next request
    waits. It is *pending* if it will leave the device when its turn ends.

    *Queues.* Each program is in one of four queues: one for each tier, and the Waiting queue. The programs of
    a tier never exceed its capacity. On the device there are two exceptions: a single program may be larger
    than the device, and running requests that grow stay until their turn ends.

    *Demotion.* If the device is over capacity, programs leave it: first pending programs whose turn has
    ended, then acting programs, then reasoning programs after their turn. In each group the most idle program
    leaves first. It moves to host memory if it fits, else to disk. If neither has space, its KV is dropped.
    For a program with an idleness of at least ``disk_idleness``, disk comes first. If such a program is in
    host memory, it moves to disk when a busier program needs its blocks.

    *Promotion.* If the device has free blocks, ready programs enter it: first those of the host queue, then
    of the disk queue, then those of the Waiting queue that ran before. In each of these groups the least idle
    program goes first. New programs come last, the smallest first. A program that does not fit is skipped.

    *Stickiness.* Programs move only if a tier is over capacity, if a ready program fits the device, by rules
    3 to 5, or by exchange. An answer is complete: after it is applied, the next answer is empty. There are
    two exceptions: an answer has a maximum number of moves, and a pending program that became ready and left
    the device comes back if it then fits.

    *Exchange* is our addition, off unless ``exchange_reserve`` is below 1. While host memory has spare
    blocks, acting programs make way for ready programs, the most idle first. The acting programs move to host
    memory, or to disk if they are idle enough. The share ``exchange_reserve`` of host memory stays free for
    later demotions. Without this reserve, a device with high turnover recomputes most contexts.

    *No starvation.* The paper has no rule against starvation. With the rules above alone, a device full of
    acting programs would exclude ready programs while the tools run. If such a tool is a sub-agent that
    cannot enter the device, this would last for ever. Large, idle and new programs could also be skipped for
    ever.

    1. A ready program on the device is never demoted, unless it is pending. A reasoning program is demoted
       only after its turn. So each promoted program completes at least one turn, and programs do not cycle
       without progress.
    2. The first candidate enters an empty device, whatever its size.
    3. If all programs on the device have run tools for ``standstill_s`` while another program is ready,
       enough of them leave for the first candidate. With rule 2, the device never idles while a program could
       run.
    4. A program that has waited for ``patience_s`` is overdue. The longest-waiting overdue program is
       promoted before all other programs, and enough programs leave for it, reasoning programs after their
       turn. So it waits at most for the longest running turn. Overdue programs enter one at a time,
       ``overdue_gap_s`` apart. Promotions and demotions cause recomputation, so a device that promoted many
       overdue programs at once would do little else.
    5. A program that has run a tool for ``absent_s`` makes way for any ready program. Its client may have
       crashed, or may not report the end of programs.

    A negative waiting time, after a clock jump, counts as too long, so that programs still move.

    Raises ``ValueError`` for settings out of range.
    """

    is_used: bool = True
    needs_tiers: bool = True
    reads_costs: bool = False
    refuses: bool = True
    k: int = WINDOW_CYCLES
    """Number of cycles over which idleness is measured (§4.2)."""
    tick_s: float = 5.0
    """Seconds without an event after which the policy is asked again (§5)."""
    idle_tick_s: float = 0.5
    """Replaces ``tick_s`` while nothing runs although a program waits. It bounds the delay of rule 3."""
    size_by: str = "peak"
    """Which size of a program counts on the device. "peak": its predicted longest context. "turn": the
    predicted context at the end of its turn. "context": its present context, as in the paper. But contexts
    grow, so with "context" too many programs enter and displace each other. In lower tiers, the present
    context always counts."""
    reserve: float = 1.0
    """Share of the predicted growth that counts as part of a program's size on the device, 0 to 1."""
    relax_s: float = math.inf
    """Seconds after the last loss of KV within which the share shrinks from ``reserve`` to 0. The share is
    also 0 before the first loss. ``inf``: the share is always ``reserve``."""
    disk_idleness: float = 0.9
    """Idleness from which a program goes to disk rather than host memory: the second threshold of §7.1."""
    patience_s: float = 300.0
    """Seconds until a waiting ready program is overdue; ``inf``: never, as in the paper."""
    overdue_gap_s: float = 60.0
    """Seconds between promotions of two overdue programs; 0: none."""
    standstill_s: float = 0.5
    """Seconds with nothing running after which programs on the device make way for a ready program (rule
    3)."""
    absent_s: float = 60.0
    """Seconds after which a program that runs a tool makes way for a ready program; ``inf``: never, as in the
    paper. Most tools take less. If a tool takes longer, the client may have crashed."""
    exchange_reserve: float = 1.0
    """Share of host memory that exchanges leave free; 1: no exchanges, as in the paper (§1, §4.3.1)."""

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k is {self.k}; expected a whole number of cycles ≥ 1")
        for field in ("tick_s", "idle_tick_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(
                    f"{field} is {getattr(self, field)}; expected a finite number of seconds > 0"
                )
        if self.size_by not in ("peak", "turn", "context"):
            raise ValueError(f'size_by is {self.size_by!r}; expected "peak", "turn" or "context"')
        if not 0 <= self.disk_idleness <= 1:
            raise ValueError(f"disk_idleness is {self.disk_idleness}; expected 0 to 1")
        for field in ("patience_s", "overdue_gap_s", "standstill_s", "absent_s"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} is {getattr(self, field)}; expected seconds ≥ 0, or inf for never")
        if not 0 <= self.exchange_reserve <= 1:
            raise ValueError(f"exchange_reserve is {self.exchange_reserve}; expected 0 to 1, 1 for never")
        if not (0 <= self.reserve <= 1 and self.relax_s > 0):
            raise ValueError(
                f"reserve is {self.reserve}, relax_s is {self.relax_s}; expected 0 to 1, and seconds > 0"
            )

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        """The moves to make now, possibly none. The order of programs in the view does not matter, except in
        ``waiting`` if ``waiting_sorted`` is true."""
        reserve = growth_reserve(self.reserve, now - view.last_shortage_s, self.relax_s)
        if reserve != self.reserve:
            return replace(self, reserve=reserve, relax_s=math.inf).moves(view, now)
        plan = RelativeIdlenessPlan(self, view, now)
        if plan.is_settled:
            return ()
        may_fill = plan.promote_overdue()
        while True:
            if may_fill:
                self._fill(plan)
            relieved = plan.demote_overflow(Tier.HOST)
            if not (plan.demote_overflow(Tier.DISK) or relieved):
                return plan.answer()
            # Demotions have freed blocks in lower tiers, so more exchanges may be possible.

    def _fill(self, plan: RelativeIdlenessPlan) -> None:
        for _ in range(LOOKAHEAD):
            if not (
                plan.fill_device()
                or plan.promote_after_absence()
                or plan.promote_at_standstill()
                or plan.exchange()
            ):
                return

    def device_blocks(self, program: ProgramTierView) -> int:
        """Size of a program on the device, in blocks; at least 1."""
        blocks = max(program.context_blocks, program.required_blocks, program.resident_blocks, 1)
        if self.size_by == "context":
            return blocks
        predicted = program.peak_blocks if self.size_by == "peak" else program.turn_blocks
        return blocks + math.ceil(self.reserve * max(0, predicted - blocks))

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        """Sort key: first ready programs that ran before, by idleness; then ready new programs, by size; then
        programs that are not ready."""
        since_s = program.waiting_since_s
        if program.activity is not ProgramActivity.READY:
            return (_NOT_READY, 0.0, since_s, program.program_id)
        if program.returning:
            return (_RETURNING, program.idleness.at(now), since_s, program.program_id)
        size = float(max(program.context_blocks, program.required_blocks))
        return (_NEW, size, since_s, program.program_id)
