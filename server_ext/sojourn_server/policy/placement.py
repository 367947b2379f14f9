"""In which tier each program's KV belongs: placement by relative idleness (MORI), and the labels it implies.

The theory of operation is in ``RelativeIdleness``; ``docs/mechanisms.md`` has the numbers M1 to M9.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile
from typing import NamedTuple, Protocol

from sojourn.ids import ProgramId

from ..program.idleness import WINDOW_CYCLES
from .placement_views import Activity, PlacedProgram, PlacementView, Tier

LOOKAHEAD = 64
"""Of the Waiting queue, so many that do not fit are gone past; then the rest is left for another time."""

WaitingKey = tuple[int, float, float, str]


class When(str, Enum):
    NOW = "now"
    AFTER_TURN = "after_turn"
    """Lazily: the turn that runs is finished first. The answer to the call at its end says whether and where
    the program goes; until then it is ``pending``."""


class MoveReason(str, Enum):
    """Why a program is moved."""

    OVER_CAPACITY = "over_capacity"
    """Its tier held more than it can."""
    FREE_CAPACITY = "free_capacity"
    """There was room for it on the device."""
    OVERDUE = "overdue"
    """One that ran before had waited for ``patience_s``: this one, or the one that this makes room for."""
    STANDSTILL = "standstill"
    """Nothing ran for ``standstill_s`` although somebody could have."""
    EXCHANGE = "exchange"
    """An acting program on the device was more idle than a ready one below."""
    HOST_FULL = "host_full"
    """A busier program needs its place in host memory."""
    KEPT = "kept"
    """It need no longer leave after its turn."""


class Move(NamedTuple):
    """One program's way to another queue. ``to`` DEVICE for one on the device: it is ``pending`` no more.

    With ``AFTER_TURN``, ``to`` is where it would go if it went now.
    """

    program_id: ProgramId
    to: Tier
    when: When
    reason: MoveReason


class PlacementPolicy(Protocol):
    """Who goes to which tier. ``places`` False: nobody is ever asked, and every program is on the device.

    Asked at events and every ``tick_s`` seconds. All moves of an answer together keep the
    tiers within what they can hold; what one move frees another may already have taken.
    """

    places: bool
    k: int
    """Cycles that programs' idleness is taken over."""
    tick_s: float

    def moves(self, view: PlacementView, now: float) -> Sequence[Move]: ...

    def waiting_key(self, program: PlacedProgram, now: float) -> WaitingKey:
        """Its place in the Waiting queue, ascending. Holds until ``overdue_s`` or the next fact about it."""
        ...

    def overdue_s(self, program: PlacedProgram) -> float:
        """When waiting alone gives it another place there; ``inf``: never."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Nothing is ever moved: the engine evicts what it must."""

    places: bool = False
    k: int = WINDOW_CYCLES
    tick_s: float = math.inf

    def moves(self, view: PlacementView, now: float) -> Sequence[Move]:
        return ()

    def waiting_key(self, program: PlacedProgram, now: float) -> WaitingKey:
        return (0, program.waiting_since_s, program.arrived_s, program.program_id)

    def overdue_s(self, program: PlacedProgram) -> float:
        return math.inf


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
    one of the rules 3 and 4 calls. An answer is complete: asked again with it applied, there is none.

    *Nobody starves*, for which the paper has no rule. Under the rules above alone a device full of acting
    programs would keep ready ones out for as long as the tools run, for ever if a tool is a sub-agent that is
    kept out itself; and large, idle and new programs could be gone past for ever.

    1. A ready program on the device is never told to leave, a reasoning one only after its turn. So each
       promotion is worth a turn, and programs cannot go round and round without getting anywhere.
    2. Into an empty device goes whoever is first, whatever its size.
    3. Where all on the device have acted for ``standstill_s`` while somebody is ready, as many of them leave
       as the first in line needs. With 2, something always runs where something can.
    4. A program that ran before and has waited for ``patience_s`` is overdue. The one that has waited longest
       is first in line, nobody goes past it, and as many leave as it needs, reasoning ones after their turn.
       It waits at most for the longest turn that runs, and for those that were overdue before it.
    5. A new program that has waited for ``patience_s`` is not gone past by other new ones. Nobody leaves for
       it: it would be let in only to push out others that have more to lose. It enters once those that
       entered before it have ended or left room, and they all get their turns by 4, so they do end.

    Waiting times that cannot be, as after a jump of the clock, count as too long: rather a move than a stop.

    Raises ``ValueError`` for settings that make no sense.
    """

    places: bool = True
    k: int = WINDOW_CYCLES
    """Cycles that idleness is taken over, for whoever keeps the clocks (§4.2)."""
    tick_s: float = 5.0
    """Seconds between two calls at which nothing happened (§5)."""
    size_by: str = "peak"
    """A program's size on the device: "peak", its predicted longest context, or "context", its present one,
    as in the paper. Contexts grow: by present ones too many enter, and then push each other out. Below the
    device nothing grows, and the context counts."""
    disk_idleness: float = 0.9
    """Idleness from which a program goes to disk first, where there is one: the second threshold of §7.1."""
    patience_s: float = 120.0
    """Seconds a ready program waits until it is overdue; ``inf``: for ever, as in the paper."""
    standstill_s: float = 2.0
    """Seconds for which nothing may run although somebody could; 87 % of tool calls are shorter (§3.3)."""
    exchange_margin: float = math.inf
    """A ready program takes the place of acting ones on the device that are more idle by more than this,
    where their KV can be kept below (§4.3, "the partition boundary"); ``inf``: never (§1, §4.3.1)."""

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k is {self.k}; expected a whole number of cycles ≥ 1")
        if not 0 < self.tick_s < math.inf:
            raise ValueError(f"tick_s is {self.tick_s}; expected a finite number of seconds > 0")
        if self.size_by not in ("peak", "context"):
            raise ValueError(f'size_by is {self.size_by!r}; expected "peak" or "context"')
        if not 0 <= self.disk_idleness <= 1:
            raise ValueError(f"disk_idleness is {self.disk_idleness}; expected 0 to 1")
        for field in ("patience_s", "standstill_s"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} is {getattr(self, field)}; expected seconds ≥ 0, or inf for never")
        if not self.exchange_margin >= 0:
            raise ValueError(f"exchange_margin is {self.exchange_margin}; expected ≥ 0, or inf for never")

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
        plan = _Plan(self, view, now, free, ready)
        if plan.serve_overdue():
            while plan.fill_device() or plan.end_standstill() or plan.exchange():
                pass
        plan.relieve(Tier.HOST)
        plan.relieve(Tier.DISK)
        return plan.answer()

    def device_blocks(self, program: PlacedProgram) -> int:
        """Blocks that it counts for on the device; at least 1."""
        blocks = max(program.context_blocks, program.wants_blocks, program.resident_blocks, 1)
        return max(blocks, program.peak_blocks) if self.size_by == "peak" else blocks

    def waiting_key(self, program: PlacedProgram, now: float) -> WaitingKey:
        """Overdue ones that ran before, the others that did, overdue new ones, other new ones."""
        since_s = program.waiting_since_s
        if program.activity is not Activity.READY:
            return (_NOT_READY, 0.0, since_s, program.program_id)
        due = self.is_overdue(program, now)
        if program.returning:
            level, number = (_OVERDUE, 0.0) if due else (_RETURNING, program.idleness.at(now))
        elif due:
            level, number = _NEW_OVERDUE, 0.0
        else:
            level, number = _NEW, float(max(program.context_blocks, program.wants_blocks))
        return (level, number, since_s, program.program_id)

    def overdue_s(self, program: PlacedProgram) -> float:
        return program.waiting_since_s + self.patience_s

    def is_overdue(self, program: PlacedProgram, now: float) -> bool:
        """Whether this ready program has waited for too long."""
        return _lasted(program.waiting_since_s, self.patience_s, now)


class Label(str, Enum):
    """What a program's queue says of its blocks and requests (M5; MORI §4.3.2)."""

    BUSY = "busy"
    IDLE = "idle"
    INACTIVE = "inactive"


_LABELS = {
    Tier.DEVICE: Label.BUSY,
    Tier.HOST: Label.IDLE,
    Tier.DISK: Label.IDLE,
    Tier.WAITING: Label.INACTIVE,
}
_DEVICE_ORDER = {Label.INACTIVE: 0, Label.IDLE: 1, Label.BUSY: 2}
_HOST_ORDER = {Label.INACTIVE: 0, Label.BUSY: 1, Label.IDLE: 2}
_SERVICE_ORDER = {Label.BUSY: 0, Label.IDLE: 1, Label.INACTIVE: 2}


def label(program: PlacedProgram) -> Label:
    """The label of a program's blocks; those of programs that are over or unknown are INACTIVE."""
    return _LABELS[program.tier]


def device_eviction_key(marked: Label, last_used_s: float) -> tuple[int, float]:
    """Ascending, the order in which the device's cached blocks go: inactive, idle, busy; in each the LRU."""
    return (_DEVICE_ORDER[marked], last_used_s)


def host_eviction_key(marked: Label, last_used_s: float) -> tuple[int, float]:
    """The same for the tiers below: inactive, busy, idle. Each tier keeps those that were placed in it."""
    return (_HOST_ORDER[marked], last_used_s)


def service_rank(marked: Label) -> int:
    """Ascending, which waiting requests the engine admits first: busy, idle, inactive."""
    return _SERVICE_ORDER[marked]


# Levels of the Waiting queue.
_OVERDUE, _RETURNING, _NEW_OVERDUE, _NEW, _NOT_READY = range(5)


class _Plan:
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
        for program in self._overdue():
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
                overdue_new = not program.returning and self._policy.is_overdue(program, self._now)
                if overdue_new or misses == LOOKAHEAD:
                    break
        return self._entered > before

    def end_standstill(self) -> bool:
        """Rule 3. Whether anybody was promoted."""
        if self._is_empty() or self._entered:
            return False
        if any(program.activity is not Activity.ACTING for program in self._staying.values()):
            return False
        last_s = max(program.last_active_s for program in self._staying.values())
        first = next(self._candidates(), None)
        if first is None or not _lasted(last_s, self._policy.standstill_s, self._now):
            return False
        return self._bring_in(first, MoveReason.STANDSTILL)

    def exchange(self) -> bool:
        """One ready program for acting ones that are more idle, if their KV can be kept. Whether any was."""
        margin = self._policy.exchange_margin
        if margin >= 1:  # idleness is at most 1
            return False
        acting = [program for program in self._staying.values() if program.activity is Activity.ACTING]
        acting.sort(key=self._demotion_key)
        returning = (program for program in self._candidates() if program.returning)
        for program in islice(returning, len(self._below) + LOOKAHEAD):
            least = self._idleness(program) + margin
            free = dict(self._free)
            if program.tier in free:
                free[program.tier] += program.context_blocks
            victims = []
            for victim in (each for each in acting if self._idleness(each) > least):
                if self._policy.device_blocks(program) <= free[Tier.DEVICE]:
                    break
                to = self._tier_below(victim, free)
                if to is Tier.WAITING:
                    continue
                victims.append((victim, to))
                free[to] -= victim.context_blocks
                free[Tier.DEVICE] += self._policy.device_blocks(victim)
            if self._policy.device_blocks(program) <= free[Tier.DEVICE]:
                self._promote(program, MoveReason.EXCHANGE)
                for victim, to in victims:
                    self._send(victim, to, MoveReason.EXCHANGE)
                return True
        return False

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
        for victim in self._leavers() if short > 0 else ():
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

    def _leavers(self) -> list[PlacedProgram]:
        """Who may be told to leave the device, in that order: all but those yet to have a turn (rule 1)."""
        leavers = [
            program
            for program in self._staying.values()
            if program.activity is not Activity.READY or program.pending
        ]
        leavers.sort(key=self._demotion_key)
        return leavers

    def _is_empty(self) -> bool:
        return not self._staying and not self._entered

    def _is_full(self) -> bool:
        """Nobody can enter: everybody takes at least one block."""
        return self._free[Tier.DEVICE] <= 0 and not self._is_empty()

    # -- the tiers below ----------------------------------------------------------------------

    def relieve(self, tier: Tier) -> None:
        """Demotion from a tier below that holds too much."""
        if self._free[tier] >= 0:
            return
        group = self._view.on_host if tier is Tier.HOST else self._view.on_disk
        for program in sorted(group, key=self._demotion_key):
            if self._free[tier] >= 0:
                break
            if program.program_id not in self._moved:
                fits = tier is Tier.HOST and 0 < program.context_blocks <= self._free[Tier.DISK]
                self._send(program, Tier.DISK if fits else Tier.WAITING, MoveReason.OVER_CAPACITY)

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
        """Ready programs that ran before and have waited too long, the longest-waiting first."""
        waiting: Iterable[PlacedProgram] = self._view.waiting
        if self._view.waiting_ordered:
            waiting = islice(takewhile(self._is_overdue, waiting), LOOKAHEAD)
        overdue = [*filter(self._is_overdue, self._below), *filter(self._is_overdue, waiting)]
        overdue.sort(key=lambda program: (program.waiting_since_s, program.program_id))
        return overdue

    def _is_overdue(self, program: PlacedProgram) -> bool:
        ready = program.returning and program.activity is Activity.READY
        return ready and self._policy.is_overdue(program, self._now)

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


def _lasted(since_s: float, limit_s: float, now: float) -> bool:
    """Whether ``limit_s`` have passed. A time that is ahead, or none, has lasted: the clock has jumped."""
    return limit_s < math.inf and not 0 <= now - since_s < limit_s
