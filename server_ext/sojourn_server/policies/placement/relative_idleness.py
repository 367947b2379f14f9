"""Placement by relative idleness (MORI): the theory of operation, the settings, the Waiting queue's order.

``PlacementPlan`` builds an answer; ``docs/mechanisms.md`` explains the numbers M1 to M9.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from sojourn.ids import ProgramId

from ...programs.idleness import WINDOW_CYCLES
from .placement_policy import MoveReason, MoveTiming, TierMove, WaitingKey
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier

LOOKAHEAD = 64
"""Maximum number of waiting programs that an answer skips because they do not fit, and of programs for which
it frees blocks. The next answer handles the rest."""


class PlacementPlan:
    """Builds one answer: the moves of all programs at one time."""

    def __init__(
        self,
        policy: RelativeIdlenessPlacement,
        view: PlacementView,
        now: float,
        free: dict[Tier, int],
        ready: list[ProgramTierView],
    ) -> None:
        self._policy = policy
        self._view = view
        self._now = now
        self._free = free
        """Free blocks by tier; negative if over capacity."""
        self._staying = {program.program_id: program for program in view.on_device}
        """Programs on the device that no move of this answer concerns."""
        self._entered = 0
        """Number of programs that this answer promotes to the device."""
        self._exchanges = 0
        """Number of exchanges in this answer."""
        self._leaving: dict[ProgramId, MoveReason] = {}
        """Programs in ``_staying`` that leave after their turn."""
        self._moved: dict[ProgramId, TierMove] = {}
        self._below = sorted(ready, key=self._promotion_key)

    def answer(self) -> tuple[TierMove, ...]:
        """All moves of this answer."""
        answer = list(self._moved.values())
        for program in self._staying.values():
            reason = self._leaving.get(program.program_id)
            if reason is not None and not program.pending:
                to = self._tier_below(program, self._free)
                answer.append(TierMove(program.program_id, to, MoveTiming.AFTER_TURN, reason))
            elif reason is None and program.pending:
                answer.append(TierMove(program.program_id, Tier.DEVICE, MoveTiming.NOW, MoveReason.KEPT))
        return tuple(answer)

    # -- the device ---------------------------------------------------------------------------

    def promote_overdue(self) -> bool:
        """Apply rule 4, then demote. Returns false if an overdue program waits for turns to end: it must be
        promoted next."""
        gap_s = self._policy.overdue_gap_s
        if has_elapsed(self._view.last_overdue_promotion_s, gap_s, self._now):
            for program in self._overdue_programs()[: 1 if gap_s else LOOKAHEAD]:
                if not self._promote_with_demotions(program, MoveReason.OVERDUE):
                    return False
        self._demote_until_free(0, MoveReason.OVER_CAPACITY)
        return True

    def fill_device(self) -> bool:
        """Promote programs that fit. Returns whether any program was promoted."""
        if self._is_full():
            return False
        before = self._entered
        misses = 0
        for program in self._candidates():
            if self._policy.device_blocks(program) <= self._free[Tier.DEVICE] or self._is_empty():
                self._promote(program, MoveReason.FREE_CAPACITY)
                if self._is_full():
                    break
            elif program.tier is Tier.WAITING:
                misses += 1
                if misses == LOOKAHEAD:
                    break
        return self._entered > before

    def promote_after_absence(self) -> bool:
        """Apply rule 5. Returns whether a program was promoted."""
        limit_s = self._policy.absent_s
        absent = [
            program for program in self._acting() if has_elapsed(program.last_active_s, limit_s, self._now)
        ]
        if not absent:
            return False
        for program in islice(self._candidates(), LOOKAHEAD):
            room = self._free[Tier.DEVICE]
            leaving = []
            for victim in absent:
                if self._policy.device_blocks(program) <= room:
                    break
                leaving.append(victim)
                room += self._policy.device_blocks(victim)
            if self._policy.device_blocks(program) <= room:
                self._promote(program, MoveReason.ABSENT)
                for victim in leaving:
                    self._send(victim, self._place_below(victim), MoveReason.ABSENT)
                return True
        return False

    def promote_at_standstill(self) -> bool:
        """Apply rule 3. Returns whether a program was promoted."""
        if self._is_empty() or self._entered:
            return False
        if any(program.activity is not ProgramActivity.ACTING for program in self._staying.values()):
            return False
        last_s = max(program.last_active_s for program in self._staying.values())
        first = next(self._candidates(), None)
        if first is None or not has_elapsed(last_s, self._policy.standstill_s, self._now):
            return False
        return self._promote_with_demotions(first, MoveReason.STANDSTILL)

    def exchange(self) -> bool:
        """Exchange acting programs for ready ones while the tiers below have free blocks. Returns whether any
        program was promoted."""
        below = self._view.host.budget_blocks + self._view.disk.budget_blocks
        if self._policy.exchange_reserve == 1 or not below:
            return False
        acting = [victim for victim in self._acting() if victim.context_blocks]
        most = self._free[Tier.DEVICE] + sum(map(self._policy.device_blocks, acting))
        least = min((victim.context_blocks for victim in acting), default=0)
        before = self._entered
        for program in [*islice(self._candidates(), LOOKAHEAD - self._exchanges)]:
            wanted = self._policy.device_blocks(program)
            leaving = self._exchange_demotions(program, acting, least) if wanted <= most else None
            if leaving is None:
                continue
            reason = MoveReason.EXCHANGE if leaving else MoveReason.FREE_CAPACITY
            self._promote(program, reason)
            self._exchanges += 1
            for victim, to in leaving:
                self._send(victim, to, reason)
            acting = [victim for victim in acting if victim.program_id in self._staying]
            most -= wanted
        return self._entered > before

    def _exchange_demotions(
        self, program: ProgramTierView, acting: list[ProgramTierView], least: int
    ) -> list[tuple[ProgramTierView, Tier]] | None:
        """The acting programs that leave for ``program``, with their tiers; ``None``: too few can leave.
        ``least``: blocks of the smallest context of ``acting``."""
        wanted, room = self._policy.device_blocks(program), self._free[Tier.DEVICE]
        free = dict(self._free)
        if program.tier in free:
            free[program.tier] += program.context_blocks
        free[Tier.HOST] -= math.ceil(self._policy.exchange_reserve * self._view.host.budget_blocks)
        leaving: list[tuple[ProgramTierView, Tier]] = []
        for victim in acting:
            if wanted <= room or max(free[Tier.HOST], free[Tier.DISK]) < least:
                break
            to = self._tier_below(victim, free)
            busy = self._idleness(victim) < self._policy.disk_idleness
            if to is Tier.WAITING or (to is Tier.DISK and busy):
                continue
            leaving.append((victim, to))
            free[to] -= victim.context_blocks
            room += self._policy.device_blocks(victim)
        if wanted > room:
            return None
        for each in reversed(leaving[:-1]):  # drop small ones that the last, larger one makes unnecessary
            size = self._policy.device_blocks(each[0])
            if wanted <= room - size:
                leaving.remove(each)
                room -= size
        return leaving

    def _promote_with_demotions(self, program: ProgramTierView, reason: MoveReason) -> bool:
        """Free blocks for a program. Returns whether it is promoted now, without waiting for turns to end."""
        return self._demote_until_free(self._policy.device_blocks(program), reason, program)

    def _demote_until_free(
        self, blocks: int, reason: MoveReason, program: ProgramTierView | None = None
    ) -> bool:
        """Demote as few programs as free ``blocks``, in the order of M3; promote ``program`` if possible.

        Reasoning programs are marked to leave after their turn; this replaces earlier marks.
        """
        over = -self._free[Tier.DEVICE]
        short = over + blocks
        left = len(self._staying) + self._entered
        now: list[tuple[ProgramTierView, MoveReason]] = []
        self._leaving = {}
        for victim in list(self._demotion_candidates()) if short > 0 else ():
            if short <= 0 or (left == 1 and program is None):
                break  # a program that is alone may exceed the device
            why = MoveReason.OVER_CAPACITY if over > 0 else reason
            if victim.activity is ProgramActivity.REASONING:
                self._leaving[victim.program_id] = why
            else:
                now.append((victim, why))
            gained = self._policy.device_blocks(victim)
            over, short, left = over - gained, short - gained, left - 1
        enters = program is not None and not self._leaving and (short <= 0 or not left)
        if program is not None and enters:
            self._promote(program, reason)  # before the demotions: it may free their place below
        for victim, why in now:
            self._send(victim, self._place_below(victim), why)
        return enters

    def _demotion_candidates(self) -> Iterator[ProgramTierView]:
        """Programs that may leave the device, in order: all but those whose turn has not begun (rule 1)."""
        for program in self._in_demotion_order:
            if program.program_id in self._staying:
                yield program

    def _acting(self) -> list[ProgramTierView]:
        """Demotion candidates that run a tool."""
        return [
            program for program in self._demotion_candidates() if program.activity is ProgramActivity.ACTING
        ]

    @cached_property
    def _in_demotion_order(self) -> list[ProgramTierView]:
        # Cached: nothing it depends on changes while the answer is built.
        leavers = [
            program
            for program in self._staying.values()
            if program.activity is not ProgramActivity.READY or program.pending
        ]
        return sorted(leavers, key=self._demotion_key)

    def _is_empty(self) -> bool:
        return not self._staying and not self._entered

    def _is_full(self) -> bool:
        """Whether no program can enter the device: each takes at least one block."""
        return self._free[Tier.DEVICE] <= 0 and not self._is_empty()

    # -- the tiers below ----------------------------------------------------------------------

    def demote_overflow(self, tier: Tier) -> bool:
        """Demote from a lower tier that is over capacity. Returns whether any program was moved."""
        if self._free[tier] >= 0:
            return False
        before = len(self._moved)
        group = self._view.on_host if tier is Tier.HOST else self._view.on_disk
        for program in sorted(group, key=self._demotion_key):
            if self._free[tier] >= 0:
                break
            if program.program_id not in self._moved:
                fits = tier is Tier.HOST and 0 < program.context_blocks <= self._free[Tier.DISK]
                self._send(program, Tier.DISK if fits else Tier.WAITING, MoveReason.OVER_CAPACITY)
        return len(self._moved) > before

    def _tier_below(self, program: ProgramTierView, free: dict[Tier, int]) -> Tier:
        """The tier to which a program that leaves the device moves, given the free blocks by tier."""
        to_disk = self._idleness(program) >= self._policy.disk_idleness
        for tier in (Tier.DISK, Tier.HOST) if to_disk else (Tier.HOST, Tier.DISK):
            if 0 < program.context_blocks <= free[tier]:
                return tier
        return Tier.WAITING

    def _place_below(self, program: ProgramTierView) -> Tier:
        """Like ``_tier_below``; but if more idle programs fill host memory, move them to disk first."""
        threshold = self._policy.disk_idleness
        to = self._tier_below(program, self._free)
        if to is Tier.HOST or self._free[Tier.DISK] <= 0 or self._idleness(program) >= threshold:
            return to
        if not program.context_blocks:  # there is no KV to keep
            return Tier.WAITING
        short = program.context_blocks - self._free[Tier.HOST]
        room = self._free[Tier.DISK]
        down = []
        idle = (
            p
            for p in self._view.on_host
            if p.activity is ProgramActivity.ACTING and p.program_id not in self._moved
        )
        for other in sorted(idle, key=self._demotion_key):
            if short <= 0 or self._idleness(other) < threshold:
                break
            if other.context_blocks <= room:
                down.append(other)
                room -= other.context_blocks
                short -= other.context_blocks
        if short > 0:
            return to
        for other in down:
            self._send(other, Tier.DISK, MoveReason.HOST_FULL)
        return Tier.HOST

    # -- candidates and their order ------------------------------------------------------------

    def _candidates(self) -> Iterator[ProgramTierView]:
        """Ready programs off the device in promotion order, without programs that this answer has moved."""
        for program in self._below:
            if program.program_id not in self._moved:
                yield program
        for program in self._in_line():
            if program.activity is ProgramActivity.READY and program.program_id not in self._moved:
                yield program

    def _in_line(self) -> Iterator[ProgramTierView]:
        if self._view.waiting_sorted:
            yield from self._view.waiting
            return
        # A heap finds the first few of thousands without sorting the rest.
        keyed = [(self._policy.waiting_key(program, self._now), program) for program in self._view.waiting]
        heapq.heapify(keyed)
        while keyed:
            yield heapq.heappop(keyed)[1]

    def _overdue_programs(self) -> list[ProgramTierView]:
        """Ready programs off the device that have waited for too long, the longest-waiting first."""
        if self._view.waiting_sorted:
            return [*filter(self._is_overdue, self._view.longest_waiting)]
        overdue = [*filter(self._is_overdue, self._below), *filter(self._is_overdue, self._view.waiting)]
        return sorted(overdue, key=lambda program: (program.waiting_since_s, program.program_id))

    def _is_overdue(self, program: ProgramTierView) -> bool:
        ready = program.activity is ProgramActivity.READY
        return ready and has_elapsed(program.waiting_since_s, self._policy.patience_s, self._now)

    def _promotion_key(self, program: ProgramTierView) -> tuple[bool, float, float, str]:
        """Promotion order of programs in lower tiers: host before disk, the least idle first."""
        on_disk = program.tier is Tier.DISK
        return (on_disk, self._idleness(program), program.waiting_since_s, program.program_id)

    def _demotion_key(self, program: ProgramTierView) -> tuple[int, float, float, str]:
        """Demotion order: first programs that leave after their turn, then acting ones, then others; the most
        idle first.

        Whether a reasoning program is already pending must not matter: otherwise applying an answer would
        change the next one.
        """
        if program.pending and program.activity is not ProgramActivity.REASONING:
            level = 0
        else:
            level = 1 if program.activity is ProgramActivity.ACTING else 2
        return (level, -self._idleness(program), program.last_active_s, program.program_id)

    def _idleness(self, program: ProgramTierView) -> float:
        return program.idleness.at(self._now)

    # -- bookkeeping --------------------------------------------------------------------------

    def _promote(self, program: ProgramTierView, reason: MoveReason) -> None:
        self._free[Tier.DEVICE] -= self._policy.device_blocks(program)
        if program.tier in self._free:
            self._free[program.tier] += program.context_blocks
        self._entered += 1
        self._moved[program.program_id] = TierMove(program.program_id, Tier.DEVICE, MoveTiming.NOW, reason)

    def _send(self, program: ProgramTierView, to: Tier, reason: MoveReason) -> None:
        """Move a program to a lower tier, from the device or from a tier below the device."""
        if program.tier is Tier.DEVICE:
            del self._staying[program.program_id]
            self._free[Tier.DEVICE] += self._policy.device_blocks(program)
        else:
            self._free[program.tier] += program.context_blocks
        if to is not Tier.WAITING:
            self._free[to] -= program.context_blocks
        self._moved[program.program_id] = TierMove(program.program_id, to, MoveTiming.NOW, reason)


def has_elapsed(since_s: float, limit_s: float, now: float) -> bool:
    """Whether ``limit_s`` have passed since ``since_s``; always true for a ``since_s`` after ``now`` (a clock
    jump)."""
    return limit_s < math.inf and not 0 <= now - since_s < limit_s


# Levels of the Waiting queue.
_RETURNING, _NEW, _NOT_READY = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeIdlenessPlacement:
    """Places the busiest programs on the device and more idle ones below (M2–M4, M6, M8, M9; §4, §7.1).

    *Queues.* Each program is in one of four queues, and the programs of a tier never exceed its capacity. On
    the device there are two exceptions: a single program may be larger than the device, and running requests
    that grow stay until their turn ends.

    *Demotion.* If the device is over capacity, programs leave it: acting ones first, the most idle first;
    then reasoning ones, after their turn. They move to host memory if they fit, else to disk; if neither has
    space, their KV is dropped. Programs with at least ``disk_idleness`` move to disk first; if they are in
    host memory, they move to disk when a busier program needs their blocks.

    *Promotion.* If the device has free blocks, ready programs enter it: first those of the host queue, then
    of the disk queue, then those of the Waiting queue that ran before, in each the least idle first; then new
    programs, the smallest first. A program that does not fit is skipped.

    *Stickiness.* Programs move only if a tier is over capacity, if a ready program fits the device, by rules
    3 to 5, or by exchange. An answer is complete: after it is applied, the next answer is empty. There are
    two exceptions: an answer has a maximum number of moves, and a pending program that became ready and left
    the device comes back if it then fits.

    *Exchange* is our addition, off unless ``exchange_reserve`` is below 1. While host memory has spare
    blocks, acting programs make way for ready ones, the most idle first; they move to host memory, or to disk
    if they belong there. The reserve stays free for later demotions: without it, a device with high turnover
    recomputes most contexts.

    *No starvation.* The paper has no rule against it. Under the rules above alone, a device full of acting
    programs would exclude ready ones as long as the tools run, for ever if such a tool is an excluded
    sub-agent; and large, idle and new programs could be skipped for ever.

    1. A ready program on the device is never demoted, a reasoning one only after its turn. So each promotion
       is worth a turn, and programs do not cycle without progress.
    2. The first candidate enters an empty device, whatever its size.
    3. If all programs on the device have run tools for ``standstill_s`` while another program is ready,
       enough of them leave for the first candidate. With rule 2, the device never idles while a program could
       run.
    4. A program that has waited for ``patience_s`` is overdue. The longest-waiting one is promoted next, no
       other program before it, and enough programs leave for it, reasoning ones after their turn. So it waits
       at most for the longest running turn. Overdue programs enter one at a time, ``overdue_gap_s`` apart:
       promotions and demotions both cause recomputation, so a device that served many overdue programs at
       once would do little else.
    5. Clients crash, and some do not report the end of a program. A program that has run a tool for
       ``absent_s`` makes way for any ready program.

    Impossible waiting times, as after a clock jump, count as too long, so that programs move on.

    Raises ``ValueError`` for settings out of range.
    """

    places: bool = True
    k: int = WINDOW_CYCLES
    """Number of cycles over which idleness is measured (§4.2)."""
    tick_s: float = 5.0
    """Seconds between two questions to the policy without an event (§5)."""
    idle_tick_s: float = 0.5
    """Replaces ``tick_s`` while nothing runs although a program waits; it bounds the delay of rule 3."""
    size_by: str = "peak"
    """A program's size on the device: "peak", its predicted longest context; "turn", the predicted context at
    the end of its turn; "context", the present context, as in the paper. Contexts grow, so with "context" too
    many programs enter and displace each other. In lower tiers contexts do not grow, and the present context
    counts."""
    disk_idleness: float = 0.9
    """Idleness from which a program goes to disk first, if there is one: the second threshold of §7.1."""
    patience_s: float = 300.0
    """Seconds until a waiting ready program is overdue; ``inf``: never, as in the paper."""
    overdue_gap_s: float = 60.0
    """Seconds between promotions of two overdue programs; 0: none."""
    standstill_s: float = 0.5
    """Seconds after which an idle device with a ready program makes space for it (rule 3)."""
    absent_s: float = 60.0
    """Seconds after which a program that runs a tool makes way for a ready one; ``inf``: never, as in the
    paper. Most tools take less; after a longer time the client may have crashed."""
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

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        """The moves to make now, possibly none. The order within the view's groups does not matter."""
        free = {
            Tier.DEVICE: view.device.budget_blocks - sum(map(self.device_blocks, view.on_device)),
            Tier.HOST: view.host.budget_blocks - sum(program.context_blocks for program in view.on_host),
            Tier.DISK: view.disk.budget_blocks - sum(program.context_blocks for program in view.on_disk),
        }
        ready = [
            program
            for group in (view.on_host, view.on_disk)
            for program in group
            if program.activity is ProgramActivity.READY
        ]
        told = any(program.pending for program in view.on_device)
        if not ready and not view.waiting and not told and min(free.values()) >= 0:
            return ()
        plan = PlacementPlan(self, view, now, free, ready)
        may_fill = plan.promote_overdue()
        while True:
            if may_fill:
                self._fill(plan)
            relieved = plan.demote_overflow(Tier.HOST)
            if not (plan.demote_overflow(Tier.DISK) or relieved):
                return plan.answer()
            # Demotions made room below, so more exchanges may be possible.

    def _fill(self, plan: PlacementPlan) -> None:
        for _ in range(LOOKAHEAD):
            if not (
                plan.fill_device()
                or plan.promote_after_absence()
                or plan.promote_at_standstill()
                or plan.exchange()
            ):
                return

    def device_blocks(self, program: ProgramTierView) -> int:
        """Size of a program on the device; at least 1."""
        blocks = max(program.context_blocks, program.required_blocks, program.resident_blocks, 1)
        if self.size_by == "context":
            return blocks
        return max(blocks, program.peak_blocks if self.size_by == "peak" else program.turn_blocks)

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        """Sort key: first programs that ran before, by idleness; then new programs, by size."""
        since_s = program.waiting_since_s
        if program.activity is not ProgramActivity.READY:
            return (_NOT_READY, 0.0, since_s, program.program_id)
        if program.returning:
            return (_RETURNING, program.idleness.at(now), since_s, program.program_id)
        size = float(max(program.context_blocks, program.required_blocks))
        return (_NEW, size, since_s, program.program_id)
