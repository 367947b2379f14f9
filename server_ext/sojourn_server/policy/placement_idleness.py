"""Placement by relative idleness (MORI): the theory of operation, the settings, the Waiting queue's order.

How an answer is made is in ``placement_plan``; ``docs/mechanisms.md`` has the numbers M1 to M9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..program.idleness import WINDOW_CYCLES
from .placement import Move, WaitingKey
from .placement_plan import LOOKAHEAD, Plan
from .placement_views import Activity, PlacedProgram, PlacementView, Tier

# Levels of the Waiting queue.
_RETURNING, _NEW, _NOT_READY = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeIdleness:
    """The busiest programs on the device, the most idle below, as many as fit (M2–M4, M6, M8, M9; §4, §7.1).

    *Queues.* Each program stands in one of four; what the programs of a tier hold is never more than the tier
    can. On the device a program may be larger that is alone, and what requests grew by stays for their turn.

    *Demotion.* Where the device holds too much, programs leave it until it does not: acting ones first, the
    most idle first; then reasoning ones, after their turn. They go to host memory if they fit, else to disk,
    else they lose their KV. Those of idleness ``disk_idleness`` or more go to disk first, and leave host
    memory for it when a busier one needs their place.

    *Promotion.* Where the device has room: ready programs of the host queue; of the disk queue; ready ones of
    the Waiting queue that ran before; each the least idle first; then new ones, the smallest first. Who does
    not fit is gone past.

    *Stickiness.* Nothing moves unless a tier holds too much, or there is room for somebody who is ready, or
    one of the rules 3 to 5 calls, or by exchange. An answer is complete: asked again with it applied, there
    is none, but after so many moves that the rest was left for then, and where one that was told to leave and
    is ready again had to go and now finds room.

    *Exchange*, which is not in the paper, and off unless ``exchange_reserve`` is less than 1: where host
    memory has room to spare, acting programs, the most idle first, leave the device to whoever is ready, for
    disk if they belong there. It ends where less than that share of host memory would be left for who is
    placed there later: with nothing to spare, a device whose programs come and go computes most of it again.

    *Nobody starves*, for which the paper has no rule. Under the rules above alone a device full of acting
    programs would keep ready ones out for as long as the tools run, for ever if a tool is a sub-agent that is
    kept out itself; and large, idle and new programs could be gone past for ever.

    1. A ready program on the device is never told to leave, a reasoning one only after its turn. So each
       promotion is worth a turn, and programs cannot go round and round without getting anywhere.
    2. Into an empty device goes whoever is first, whatever its size.
    3. Where all on the device have acted for ``standstill_s`` while somebody is ready, as many of them leave
       as the first in line needs. With 2, something always runs where something can.
    4. A program that has waited for ``patience_s`` is overdue. The one that has waited longest is first in
       line, nobody goes past it, and as many leave as it needs, reasoning ones after their turn. So it waits
       at most for the longest turn that runs. But one at a time, and ``overdue_gap_s`` between two: what it
       lost is computed again, and those who leave may lose theirs, so where many wait, a device that served
       all who are overdue would do little else.
    5. Not all end: clients crash, and not every client says that it is done. Who has acted for ``absent_s``
       makes room for any that is ready.

    Waiting times that cannot be, as after a jump of the clock, count as too long: rather a move than a stop.

    Raises ``ValueError`` for settings that make no sense.
    """

    places: bool = True
    k: int = WINDOW_CYCLES
    """Cycles that idleness is taken over, for whoever keeps the clocks (§4.2)."""
    tick_s: float = 5.0
    """Seconds between two calls at which nothing happened (§5)."""
    idle_tick_s: float = 0.5
    """The same while nothing runs although somebody is kept out: how late ``standstill_s`` may end."""
    size_by: str = "peak"
    """A program's size on the device: "peak", its predicted longest context, "turn", the one predicted for
    the end of its turn, or "context", its present one, as in the paper. Contexts grow: by present ones too
    many enter, and then push each other out. Below the device nothing grows, and the context counts."""
    disk_idleness: float = 0.9
    """Idleness from which a program goes to disk first, where there is one: the second threshold of §7.1."""
    patience_s: float = 300.0
    """Seconds a ready program waits until it is overdue; ``inf``: for ever, as in the paper."""
    overdue_gap_s: float = 60.0
    """Seconds between two programs that are let in since they are overdue; 0: none."""
    standstill_s: float = 0.5
    """Seconds for which nothing may run although somebody could."""
    absent_s: float = 60.0
    """Seconds that a program acts on the device until it makes room for whoever is ready; ``inf``: never, as
    in the paper. Most tools take less, and nobody should wait for longer for somebody who has crashed."""
    exchange_reserve: float = 1.0
    """Share of host memory that is left to others where acting programs leave the device to ready ones; 1:
    they never do, as in the paper (§1, §4.3.1)."""

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

    def moves(self, view: PlacementView, now: float) -> Sequence[Move]:
        """What to move now; empty where all stays. The order of the view's groups does not matter."""
        free = {
            Tier.DEVICE: view.device.budget_blocks - sum(map(self.device_blocks, view.on_device)),
            Tier.HOST: view.host.budget_blocks - sum(program.context_blocks for program in view.on_host),
            Tier.DISK: view.disk.budget_blocks - sum(program.context_blocks for program in view.on_disk),
        }
        ready = [
            program
            for group in (view.on_host, view.on_disk)
            for program in group
            if program.activity is Activity.READY
        ]
        told = any(program.pending for program in view.on_device)
        if not ready and not view.waiting and not told and min(free.values()) >= 0:
            return ()
        plan = Plan(self, view, now, free, ready)
        may_fill = plan.serve_overdue()
        while True:
            if may_fill:
                self._fill(plan)
            relieved = plan.relieve(Tier.HOST)
            if not (plan.relieve(Tier.DISK) or relieved):
                return plan.answer()
            # With more room below than before, more can be exchanged.

    def _fill(self, plan: Plan) -> None:
        for _ in range(LOOKAHEAD):
            if not (plan.fill_device() or plan.end_absence() or plan.end_standstill() or plan.exchange()):
                return

    def device_blocks(self, program: PlacedProgram) -> int:
        """Blocks that it counts for on the device; at least 1."""
        blocks = max(program.context_blocks, program.wants_blocks, program.resident_blocks, 1)
        if self.size_by == "context":
            return blocks
        return max(blocks, program.peak_blocks if self.size_by == "peak" else program.turn_blocks)

    def waiting_key(self, program: PlacedProgram, now: float) -> WaitingKey:
        """Those that ran before by their idleness, then new ones by their size."""
        since_s = program.waiting_since_s
        if program.activity is not Activity.READY:
            return (_NOT_READY, 0.0, since_s, program.program_id)
        if program.returning:
            return (_RETURNING, program.idleness.at(now), since_s, program.program_id)
        size = float(max(program.context_blocks, program.wants_blocks))
        return (_NEW, size, since_s, program.program_id)
