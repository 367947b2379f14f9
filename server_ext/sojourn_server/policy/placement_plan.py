"""One answer of ``RelativeIdleness`` in the making: who leaves, who enters, who makes room for whom."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from sojourn.ids import ProgramId

from .placement import Move, MoveReason, When
from .placement_views import Activity, PlacedProgram, PlacementView, Tier

if TYPE_CHECKING:
    from .placement_idleness import RelativeIdleness

LOOKAHEAD = 64
"""Of the Waiting queue, so many that do not fit are gone past; and for so many at most room is made by one
answer. The rest is left for another time."""


class Plan:
    """One answer in the making. Lives for one call."""

    def __init__(
        self,
        policy: RelativeIdleness,
        view: PlacementView,
        now: float,
        free: dict[Tier, int],
        ready: list[PlacedProgram],
    ) -> None:
        self._policy = policy
        self._view = view
        self._now = now
        self._free = free
        """Blocks by tier, less than 0 where it holds too much."""
        self._staying = {program.program_id: program for program in view.on_device}
        """On the device and not moved by this answer."""
        self._entered = 0
        """Programs that this answer brings to the device."""
        self._exchanges = 0
        """Made by this answer."""
        self._leaving: dict[ProgramId, MoveReason] = {}
        """Of those staying, who is to leave after its turn."""
        self._moved: dict[ProgramId, Move] = {}
        self._below = sorted(ready, key=self._promotion_key)

    def answer(self) -> tuple[Move, ...]:
        answer = list(self._moved.values())
        for program in self._staying.values():
            reason = self._leaving.get(program.program_id)
            if reason is not None and not program.pending:
                to = self._tier_below(program, self._free)
                answer.append(Move(program.program_id, to, When.AFTER_TURN, reason))
            elif reason is None and program.pending:
                answer.append(Move(program.program_id, Tier.DEVICE, When.NOW, MoveReason.KEPT))
        return tuple(answer)

    # -- the device ---------------------------------------------------------------------------

    def serve_overdue(self) -> bool:
        """Rule 4, then demotion. False: somebody overdue waits for turns to end, and nobody goes past it."""
        gap_s = self._policy.overdue_gap_s
        if has_lasted(self._view.overdue_served_s, gap_s, self._now):
            for program in self._overdue()[: 1 if gap_s else LOOKAHEAD]:
                if not self._bring_in(program, MoveReason.OVERDUE):
                    return False
        self._demote_for(0, MoveReason.OVER_CAPACITY)
        return True

    def fill_device(self) -> bool:
        """Promotion. Whether anybody was promoted."""
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

    def end_absence(self) -> bool:
        """Rule 5. Whether anybody was promoted."""
        limit_s = self._policy.absent_s
        absent = [
            program for program in self._acting() if has_lasted(program.last_active_s, limit_s, self._now)
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

    def end_standstill(self) -> bool:
        """Rule 3. Whether anybody was promoted."""
        if self._is_empty() or self._entered:
            return False
        if any(program.activity is not Activity.ACTING for program in self._staying.values()):
            return False
        last_s = max(program.last_active_s for program in self._staying.values())
        first = next(self._candidates(), None)
        if first is None or not has_lasted(last_s, self._policy.standstill_s, self._now):
            return False
        return self._bring_in(first, MoveReason.STANDSTILL)

    def exchange(self) -> bool:
        """Ready programs for acting ones, while there is room to spare below. Whether any was promoted."""
        below = self._view.host.budget_blocks + self._view.disk.budget_blocks
        if self._policy.exchange_reserve == 1 or not below:
            return False
        acting = [victim for victim in self._acting() if victim.context_blocks]
        most = self._free[Tier.DEVICE] + sum(map(self._policy.device_blocks, acting))
        least = min((victim.context_blocks for victim in acting), default=0)
        before = self._entered
        for program in [*islice(self._candidates(), LOOKAHEAD - self._exchanges)]:
            wanted = self._policy.device_blocks(program)
            leaving = self._leaving_for(program, acting, least) if wanted <= most else None
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

    def _leaving_for(
        self, program: PlacedProgram, acting: list[PlacedProgram], least: int
    ) -> list[tuple[PlacedProgram, Tier]] | None:
        """Who leaves for it in an exchange, and where to; ``None``: not enough can. Contexts of ``acting``
        have ``least`` blocks or more."""
        wanted, room = self._policy.device_blocks(program), self._free[Tier.DEVICE]
        free = dict(self._free)
        if program.tier in free:
            free[program.tier] += program.context_blocks
        free[Tier.HOST] -= math.ceil(self._policy.exchange_reserve * self._view.host.budget_blocks)
        leaving: list[tuple[PlacedProgram, Tier]] = []
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
        for each in reversed(leaving[:-1]):  # small ones that the last, a larger one, makes needless
            size = self._policy.device_blocks(each[0])
            if wanted <= room - size:
                leaving.remove(each)
                room -= size
        return leaving

    def _bring_in(self, program: PlacedProgram, reason: MoveReason) -> bool:
        """Make room for it. Whether it is promoted at once, and does not wait for turns of others to end."""
        return self._demote_for(self._policy.device_blocks(program), reason, program)

    def _demote_for(self, blocks: int, reason: MoveReason, program: PlacedProgram | None = None) -> bool:
        """Demote as few as leave ``blocks`` free, in the order of M3; promote ``program`` if that is enough.

        Reasoning ones are noted as leaving, which replaces what was noted before.
        """
        over = -self._free[Tier.DEVICE]
        short = over + blocks
        left = len(self._staying) + self._entered
        now: list[tuple[PlacedProgram, MoveReason]] = []
        self._leaving = {}
        for victim in list(self._leavers()) if short > 0 else ():
            if short <= 0 or (left == 1 and program is None):
                break  # one that is alone may be larger than the device
            why = MoveReason.OVER_CAPACITY if over > 0 else reason
            if victim.activity is Activity.REASONING:
                self._leaving[victim.program_id] = why
            else:
                now.append((victim, why))
            gained = self._policy.device_blocks(victim)
            over, short, left = over - gained, short - gained, left - 1
        enters = program is not None and not self._leaving and (short <= 0 or not left)
        if program is not None and enters:
            self._promote(program, reason)  # before the others leave: it may leave them a place below
        for victim, why in now:
            self._send(victim, self._place_below(victim), why)
        return enters

    def _leavers(self) -> Iterator[PlacedProgram]:
        """Who may be told to leave the device, in that order: all but those yet to have a turn (rule 1)."""
        for program in self._by_demotion:
            if program.program_id in self._staying:
                yield program

    def _acting(self) -> list[PlacedProgram]:
        """Of these, those that act."""
        return [program for program in self._leavers() if program.activity is Activity.ACTING]

    @cached_property
    def _by_demotion(self) -> list[PlacedProgram]:
        # Once an answer: what it depends on does not change by the answer.
        leavers = [
            program
            for program in self._staying.values()
            if program.activity is not Activity.READY or program.pending
        ]
        return sorted(leavers, key=self._demotion_key)

    def _is_empty(self) -> bool:
        return not self._staying and not self._entered

    def _is_full(self) -> bool:
        """Nobody can enter: everybody takes at least one block."""
        return self._free[Tier.DEVICE] <= 0 and not self._is_empty()

    # -- the tiers below ----------------------------------------------------------------------

    def relieve(self, tier: Tier) -> bool:
        """Demotion from a tier below that holds too much. Whether anybody was moved."""
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

    def _tier_below(self, program: PlacedProgram, free: dict[Tier, int]) -> Tier:
        """Where it goes from the device, with so many blocks free."""
        to_disk = self._idleness(program) >= self._policy.disk_idleness
        for tier in (Tier.DISK, Tier.HOST) if to_disk else (Tier.HOST, Tier.DISK):
            if 0 < program.context_blocks <= free[tier]:
                return tier
        return Tier.WAITING

    def _place_below(self, program: PlacedProgram) -> Tier:
        """The same, and where host memory is full of more idle programs, they go down to disk for it."""
        threshold = self._policy.disk_idleness
        to = self._tier_below(program, self._free)
        if to is Tier.HOST or self._free[Tier.DISK] <= 0 or self._idleness(program) >= threshold:
            return to
        if not program.context_blocks:  # nothing to be kept
            return Tier.WAITING
        short = program.context_blocks - self._free[Tier.HOST]
        room = self._free[Tier.DISK]
        down = []
        idle = (
            p for p in self._view.on_host if p.activity is Activity.ACTING and p.program_id not in self._moved
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

    # -- who, in which order ------------------------------------------------------------------

    def _candidates(self) -> Iterator[PlacedProgram]:
        """Ready programs off the device in the order of promotion, but those that this answer has moved."""
        for program in self._below:
            if program.program_id not in self._moved:
                yield program
        for program in self._in_line():
            if program.activity is Activity.READY and program.program_id not in self._moved:
                yield program

    def _in_line(self) -> Iterator[PlacedProgram]:
        if self._view.waiting_ordered:
            yield from self._view.waiting
            return
        # Of thousands only the first few are looked at: a heap finds them without sorting the rest.
        keyed = [(self._policy.waiting_key(program, self._now), program) for program in self._view.waiting]
        heapq.heapify(keyed)
        while keyed:
            yield heapq.heappop(keyed)[1]

    def _overdue(self) -> list[PlacedProgram]:
        """Ready programs off the device that have waited too long, the longest-waiting first."""
        if self._view.waiting_ordered:
            return [*filter(self._is_overdue, self._view.longest_waiting)]
        overdue = [*filter(self._is_overdue, self._below), *filter(self._is_overdue, self._view.waiting)]
        return sorted(overdue, key=lambda program: (program.waiting_since_s, program.program_id))

    def _is_overdue(self, program: PlacedProgram) -> bool:
        ready = program.activity is Activity.READY
        return ready and has_lasted(program.waiting_since_s, self._policy.patience_s, self._now)

    def _promotion_key(self, program: PlacedProgram) -> tuple[bool, float, float, str]:
        """Of those below the device: host first, the least idle first."""
        on_disk = program.tier is Tier.DISK
        return (on_disk, self._idleness(program), program.waiting_since_s, program.program_id)

    def _demotion_key(self, program: PlacedProgram) -> tuple[int, float, float, str]:
        """Those whose last turn here is over, acting ones, the others; the most idle first.

        Among reasoning ones nothing is made of who was told to leave already: with that, whom an answer
        tells would change by its being applied.
        """
        if program.pending and program.activity is not Activity.REASONING:
            level = 0
        else:
            level = 1 if program.activity is Activity.ACTING else 2
        return (level, -self._idleness(program), program.last_active_s, program.program_id)

    def _idleness(self, program: PlacedProgram) -> float:
        return program.idleness.at(self._now)

    # -- keeping count ------------------------------------------------------------------------

    def _promote(self, program: PlacedProgram, reason: MoveReason) -> None:
        self._free[Tier.DEVICE] -= self._policy.device_blocks(program)
        if program.tier in self._free:
            self._free[program.tier] += program.context_blocks
        self._entered += 1
        self._moved[program.program_id] = Move(program.program_id, Tier.DEVICE, When.NOW, reason)

    def _send(self, program: PlacedProgram, to: Tier, reason: MoveReason) -> None:
        """Down, from the device or from a tier below it."""
        if program.tier is Tier.DEVICE:
            del self._staying[program.program_id]
            self._free[Tier.DEVICE] += self._policy.device_blocks(program)
        else:
            self._free[program.tier] += program.context_blocks
        if to is not Tier.WAITING:
            self._free[to] -= program.context_blocks
        self._moved[program.program_id] = Move(program.program_id, to, When.NOW, reason)


def has_lasted(since_s: float, limit_s: float, now: float) -> bool:
    """Whether ``limit_s`` have passed. A time that is ahead, or none, has lasted: the clock has jumped."""
    return limit_s < math.inf and not 0 <= now - since_s < limit_s
