"""Placement by price: KV stays on the device while holding it is worth more than another program's use of the
blocks.

``ResidencyPricePlacement`` states the rules, and ``ResidencyPricePlan`` applies them to one view;
``docs/policy.md`` derives them with an example.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice
from typing import Annotated

from msgspec import Meta
from sojourn.ids import ProgramId

from ...programs.idleness import WINDOW_CYCLES
from ..costs.reload_estimate import restore_s
from ..forecasting import growth_reserve
from . import gittins_index as gittins
from .placement_plan import PlacementPlan, SortKey, has_elapsed
from .placement_policy import MAX_EXCHANGES, MoveReason, MoveTiming, PlacementPolicy, TierMove
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier

# Levels of the Waiting queue.
_SAVED, _RETURNING, _NEW = range(3)
MIN_HEADROOM = 0.05
"""Minimum of the headroom (see ``ResidencyPricePlacement``)."""
BEGIN_PATIENCE = 12.0
"""A program without a saved context is overdue after this many times ``patience_s``. An early start would not
save computing its context, but would drop other contexts and take time from other programs. In an engine, the
program's request is released earlier by default, after ``hold_timeout_s``."""
BEGIN_WORTH = 0.9
"""On a fully used device, a program without a saved context waits only for programs with at least this share
of its worth. The share is below 1 so that programs of similar worth wait for each other."""
URGENT_S = 120.0
"""A program is urgent from this many seconds before its deadline until as long after it."""
URGENT_WORTH = 4.0
"""An urgent program is worth this many times as much as another one."""
FUTILE_SHARE = 0.4
"""Keeping contexts is futile if more than this share of them is exchanged before the program returns. On
simulated loads where keeping pays, the share was 0 to 0.1; where computing again is cheap, above 0.9
(``benchmarks/results/session_replay.md``)."""
SMALL_SHARE = 0.25
SMALL_PATIENCE_S = 5.0
"""A program whose predicted peak takes at most ``SMALL_SHARE`` of the free blocks waits at most
``SMALL_PATIENCE_S`` for the growth of other programs. It would end before they need its blocks."""
MAX_WORTH = 16.0
"""Maximum worth of a program. The minimum is 1 ÷ ``MAX_WORTH``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPricePlacement(PlacementPolicy):
    """Gives the device's blocks to the programs for which these blocks have the highest value.

    A program is *reasoning* during a turn, *acting* while its tool runs, and *ready* while its next request
    waits. It is *pending* if it will leave the device when its turn ends.

    *Value of holding.* An acting program that leaves the device will need C seconds to get its context back:
    by copying it from the tier below or by computing it, whichever costs less. Computing delays all N running
    programs. A copy delays only the program itself, and the other programs run faster meanwhile. So for a
    copy, the headroom (below) takes the place of N. P(τ) is the probability that the tool call ends within τ
    more seconds. The value per second of keeping the context is N · C times the Gittins index of the call:

        hold = N · C · max over τ of  P(τ) / E[min(remaining, τ)]      (per block: hold ÷ size)

    *Worth.* A program's worth is the Gittins index of its service (its chance to end, per second that it
    runs), divided by the Gittins index of a new program of the same agent type. Worth is 1 if unknown.

    *Headroom* is the progress that one more running program adds, relative to the progress of a program that
    already runs. It is the share of the device's time that prompts do not take, times the share of a decode
    step's time that does not grow with the contexts. If nothing runs, headroom is 1.

    *Exchange.* A waiting program would gain worth · headroom per second. It replaces the acting programs with
    the least value per block if their values together are below this gain. So a program stays during a short
    tool call. During a long tool call, a program leaves if restoring its context costs less than its blocks
    are worth to the waiting program. While no program waits, nothing is exchanged.

    *Room to grow on the device.* After any program lost its KV for lack of memory, a program enters only if
    its context, its next turn and a share of its further predicted growth fit. The share falls linearly from
    ``reserve`` to 0 within ``relax_s`` after the last loss. If the share is 0, only the context must fit. The
    share is also 0 before the first loss (unless ``relax_s`` is ``inf``), and while a lower tier has room for
    the largest context on the device.

    *Full device.* A program without a saved context (none in host memory or on disk) waits while programs
    that are worth about as much, or more, use the whole device. If it entered, it would only take time from
    these programs. A program's use of the device is its mean context until its end (midway between its
    present size and its predicted peak), times the share of its time in which it reasons. For the waiting
    program, the mean share of the other programs is assumed. Programs that are worth less than
    ``BEGIN_WORTH`` times the waiting program do not keep it out. The waiting program enters anyway while
    sizes are unknown, or while all programs on the device run tools. So if all programs take about equally
    long, a new program waits until another ends.

    *A small program that has waited* for ``SMALL_PATIENCE_S`` enters without a reserve if its predicted peak
    takes at most ``SMALL_SHARE`` of the free blocks.

    *Futile keeping.* If exchanges drop more than ``FUTILE_SHARE`` of the contexts before their programs
    return, and there is no tier below, all ready programs enter at once. Then the engine's own order applies.

    *Room in all tiers.* With a tier below the device, a program without a saved context must also fit all
    tiers together: size ≤ free blocks − share · growth.

    - size: the program's size after its next turn, plus the share of its further predicted growth.
    - growth: the predicted growth of each program with KV, times the share of its time in which it reasons.
      A program's growth counts at most up to the growth of the program that enters: both grow at the same
      time, and a short program ends early.
    - share: ``reserve`` if the lower tiers together are at least as large as the device. Smaller tiers give a
      proportionally smaller share. The share is never below the one that falls after a loss of KV (above).
      Until enough turns were observed to predict growth, only the share that falls after a loss applies.

    A program that does not fit enters anyway if the contexts dropped for it are worth less than its gain.

    *Bounds.* A reasoning program leaves only after its turn. A ready program on the device leaves only if it
    is pending. A program that has waited for ``patience_s`` (``BEGIN_PATIENCE`` times as long without a saved
    context) enters first, whatever the cost. While it waits for a turn that has run for ``patience_s``, other
    programs may enter. The first program enters an empty device, whatever its size.
    """

    is_used = True
    reads_costs = True
    k: Annotated[int, Meta(ge=1)] = WINDOW_CYCLES
    """Number of cycles over which idleness (the share of time in tools) is measured, for the rule on a full
    device."""
    tick_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    idle_tick_s: Annotated[float, Meta(gt=0, le=3600)] = 0.25
    reserve: Annotated[float, Meta(ge=0, le=1)] = 0.7
    """Maximum share of the predicted growth that is reserved. On the device, this maximum applies right after
    a loss of KV. In all tiers together, it applies if the lower tiers are at least as large as the device."""
    relax_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds after the last loss of KV within which the share reserved on the device shrinks evenly to 0;
    ``inf``: it does not shrink."""
    patience_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds until a waiting ready program is overdue; ``inf``: never."""
    overdue_gap_s: Annotated[float, Meta(ge=0)] = 60.0
    """Seconds between promotions of two overdue programs; 0: none."""

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        """Return the moves to make now, possibly none. The order of programs in the view does not matter."""
        return ResidencyPricePlan(self, view, now).decide()

    def device_blocks(self, program: ProgramTierView) -> int:
        """Return the blocks that a program needs on the device now; at least 1."""
        return max(program.context_blocks, program.required_blocks, program.resident_blocks, 1)

    def promotion_order(self, ready: Sequence[ProgramTierView]) -> list[ProgramTierView]:
        """Return ready programs, the first to enter first, but for urgent ones: those with their context in
        host memory or on disk, then others that ran before, then new programs.

        Contexts in lower tiers are first because their promotion frees blocks in these tiers. So the KV of
        the next program that leaves the device can move to a lower tier, and is not dropped. A program whose
        KV was dropped does not wait for ever: after a time it is overdue and enters first.

        Within a level, those with the most worth per block are first if the work left is stated for most of
        ``ready``. Else the earliest is, and of new programs the smallest: of contexts of one ``size_class``,
        the earliest."""
        by_work = 2 * sum(program.work_stated for program in ready) > len(ready)
        return sorted(ready, key=lambda program: self._promotion_key(program, by_work))

    def _promotion_key(self, program: ProgramTierView, by_work: bool) -> SortKey:
        saved, blocks = program.tier in (Tier.HOST, Tier.DISK), self.device_blocks(program)
        level = _SAVED if saved else _RETURNING if program.returning else _NEW
        if by_work:
            return (level, blocks / self.worth(program), program.waiting_since_s, program.program_id)
        if level != _NEW:
            return (level, program.arrived_s, program.waiting_since_s, program.program_id)
        return (level, float(size_class(blocks)), program.arrived_s, program.program_id)

    def worth(self, program: ProgramTierView) -> float:
        """Return the Gittins index of a program's service, relative to a new program of its type; 1 if
        unknown."""
        if not program.service_s or not program.new_service_s:
            return 1.0
        return _relative_worth(program.service_s, program.attained_s, program.new_service_s)


class WeightedValues:
    """Pairs (value, weight) in ascending order. The first use after a change adds them up."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        self._pairs = sorted(pairs)

    def change(self, pair: tuple[float, float], by: int) -> None:
        """Add the pair if ``by`` is 1; remove it if ``by`` is -1."""
        if by > 0:
            insort(self._pairs, pair)
        else:
            del self._pairs[bisect_left(self._pairs, pair)]
        vars(self).pop("_sums", None)

    def split(self, value: float) -> tuple[float, float]:
        """Return the sum of value · weight over the values below ``value``, and the sum of the other values'
        weights."""
        products, weights = self._sums
        at = bisect_left(self._pairs, (value, -math.inf))
        return products[at], weights[-1] - weights[at]

    @cached_property
    def _sums(self) -> tuple[list[float], list[float]]:
        """Cumulative sums over the pairs, from 0: of value · weight, and of weight."""
        products = accumulate((value * weight for value, weight in self._pairs), initial=0.0)
        return [*products], [*accumulate((weight for _, weight in self._pairs), initial=0.0)]


class ProgramsWithKv:
    """The programs with KV after the moves so far, each with its tier, and sums over these programs. A sum is
    computed at its first use, because most answers use none. Afterwards, each move updates it."""

    def __init__(self, policy: ResidencyPricePlacement, view: PlacementView, now: float) -> None:
        self._policy, self._view, self._now = policy, view, now

    def __iter__(self) -> Iterator[tuple[Tier, ProgramTierView]]:
        return iter(self._of.values())

    @cached_property
    def _of(self) -> dict[ProgramId, tuple[Tier, ProgramTierView]]:
        view = self._view
        groups = ((Tier.DEVICE, view.on_device), (Tier.HOST, view.on_host), (Tier.DISK, view.on_disk))
        return {program.program_id: (tier, program) for tier, group in groups for program in group}

    @cached_property
    def sums(self) -> list[float]:
        """Two sums over all programs, in blocks: demand, and mean context. A program's demand is its mean
        context times the share of its time in which it reasons: the device blocks that it uses on average
        until its end."""
        sums = [0.0, 0.0]
        for _, program in self:
            self._add(sums, program, 1)
        return sums

    def _add(self, sums: list[float], program: ProgramTierView, sign: int) -> None:
        sums[0] += sign * self._demand_of(program)
        sums[1] += sign * self.mean_blocks_of(program)

    def _reasoning_share(self, program: ProgramTierView) -> float:
        """Return the share of the program's time in which it reasons."""
        return 1.0 - program.idleness.at(self._now)

    def _demand_of(self, program: ProgramTierView) -> float:
        return self._reasoning_share(program) * self.mean_blocks_of(program)

    def mean_blocks_of(self, program: ProgramTierView) -> float:
        """Return the predicted mean size of the program's context until the program ends, in blocks."""
        now_blocks = self._policy.device_blocks(program)
        return (now_blocks + max(now_blocks, program.peak_blocks)) / 2

    def growth_of(self, program: ProgramTierView) -> int:
        """Return the blocks by which the program's context is predicted to grow."""
        return max(0, program.peak_blocks - self._policy.device_blocks(program))

    def growth_within(self, most_blocks: int) -> float:
        """Return a sum over all programs, in blocks: min(predicted growth, ``most_blocks``) times the share
        of the program's time in which it reasons. A context grows only while its program reasons."""
        grown_blocks, share_above = self._growths.split(most_blocks)
        return grown_blocks + most_blocks * share_above

    @cached_property
    def _growths(self) -> WeightedValues:
        """Each program's predicted growth in blocks, with the share of its time in which it reasons."""
        return WeightedValues(self._growth(program) for _, program in self)

    def _growth(self, program: ProgramTierView) -> tuple[float, float]:
        return self.growth_of(program), self._reasoning_share(program)

    def demand_above(self, worth: float) -> float:
        """Return the demand of the programs with at least this worth."""
        return self._worths.split(worth)[1]

    @cached_property
    def _worths(self) -> WeightedValues:
        """Each program's worth, with its demand."""
        return WeightedValues(self._worth(program) for _, program in self)

    def _worth(self, program: ProgramTierView) -> tuple[float, float]:
        return self._policy.worth(program), self._demand_of(program)

    def move(self, program: ProgramTierView, to: Tier) -> None:
        """Record that a program moves to tier ``to``."""
        change = (to is not Tier.WAITING) - (self._of.pop(program.program_id, None) is not None)
        if to is not Tier.WAITING:
            self._of[program.program_id] = (to, program)
        if change and "sums" in vars(self):
            self._add(self.sums, program, change)
        for name, pair in (("_worths", self._worth), ("_growths", self._growth)) if change else ():
            if name in vars(self):
                vars(self)[name].change(pair(program), change)


class ResidencyPricePlan(PlacementPlan):
    """Builds one answer of ``ResidencyPricePlacement``."""

    _policy: ResidencyPricePlacement

    def __init__(self, policy: ResidencyPricePlacement, view: PlacementView, now: float) -> None:
        super().__init__(policy, view, now)
        self._rates: dict[ProgramId, float] = {}
        """Gittins index per second of each acting program's gap; the same for the whole answer."""
        self._exchanges = 0
        """Number of exchanges in this answer, at most ``MAX_EXCHANGES``."""
        self._acting: list[tuple[float, float, ProgramId]] = []
        """Programs that were acting on the device, by the value of holding their KV, the lowest first."""
        self._acting_room: tuple[int, int] | None = None
        """Free blocks in host memory and on disk when ``_acting`` was computed, whose values depend on
        them; ``None``: not computed yet."""
        self._with_kv = ProgramsWithKv(policy, view, now)
        self._small_growth_blocks = 0
        """Predicted growth of the small programs that enter without a reserve."""

    def decide(self) -> tuple[TierMove, ...]:
        """Choose all moves, and return them."""
        if self._keeping_is_futile:
            self._enter_at_once()
        elif self.is_settled:
            return ()
        elif self._promote_overdue():
            self._demote_until_free(0, MoveReason.OVER_CAPACITY)
            while self._fill() or self._demote_overflow():
                pass
        else:
            self._demote_overflow()
        return self.answer()

    # -- entering the device --------------------------------------------------------------------

    @property
    def _keeping_is_futile(self) -> bool:
        """Whether the engine's own order serves programs better than places on the device. With a tier below,
        an exchange is only a copy, and contexts are kept there."""
        return self._view.exchanged_share > FUTILE_SHARE and not self._below_blocks

    def _enter_at_once(self) -> None:
        """Promote all ready programs, also those that do not fit: the engine lets them run in the order of
        their arrival. Acting programs that exchanges would drop stay, and are marked, so that it shows when
        keeping pays again."""
        for program in self._candidates():
            self._promote(program, MoveReason.FUTILE)
        reserve = self._reserve()
        room = self._room(reserve)
        if room >= 0:
            return
        here = (*self._staying.values(), *self._entered.values())
        active = [self._policy.device_blocks(p) for p in here if p.activity is not ProgramActivity.ACTING]
        price = self._headroom * len(active) / sum(active) if active else 0.0
        for hold, _, program_id in self._acting_by_hold_value():
            if room >= 0 or hold >= price:
                break
            room += self._reserved_blocks(self._staying[program_id], reserve)
            self._moved[program_id] = TierMove(program_id, Tier.DEVICE, MoveTiming.NOW, MoveReason.FUTILE)

    def _candidates(self) -> list[ProgramTierView]:
        """Return the ready programs off the device in promotion order, without those that this answer has
        moved."""
        return [p for p in self._in_promotion_order if p.program_id not in self._moved]

    @cached_property
    def _in_promotion_order(self) -> list[ProgramTierView]:
        in_order = self._policy.promotion_order(self.ready)
        return sorted(in_order, key=lambda program: not self._is_urgent(program))

    def _is_urgent(self, program: ProgramTierView) -> bool:
        """Whether a program is more important than programs are in the mean, or due soon."""
        is_due = abs(program.due_s - self._now) < URGENT_S
        return is_due or program.importance > max(0.0, self._mean_importance)

    @cached_property
    def _mean_importance(self) -> float:
        view = self._view
        groups = (view.on_device, view.on_host, view.on_disk, view.waiting)
        present = [program.importance for group in groups for program in group]
        return math.fsum(present) / len(present) if present else 0.0

    def _promote_overdue(self) -> bool:
        """Promote overdue programs. Returns whether other programs may be promoted now: false if an overdue
        program must first wait until running turns end."""
        policy, view = self._policy, self._view
        if not has_elapsed(view.last_overdue_promotion_s, policy.overdue_gap_s, self._now):
            return True
        overdue = [
            program
            for program in self.ready
            if has_elapsed(
                program.waiting_since_s,
                policy.patience_s * (1.0 if _has_saved_context(program) else BEGIN_PATIENCE),
                self._now,
            )
        ]
        overdue.sort(key=lambda program: (program.waiting_since_s, program.program_id))
        for program in overdue[:1] if policy.overdue_gap_s else overdue:
            if self._waits_for_long_turn(program):
                continue
            if not self._demote_until_free(policy.device_blocks(program), MoveReason.OVERDUE, program):
                return False
        return True

    def _waits_for_long_turn(self, program: ProgramTierView) -> bool:
        """Return whether an overdue program can enter only after the end of a turn that has run for
        ``patience_s``. If so, other programs may enter meanwhile. Without this exception, one long answer
        would make all programs wait."""
        short = self._policy.device_blocks(program) - self._free[Tier.DEVICE]
        for victim in self._demotion_candidates() if short > 0 else ():
            if has_elapsed(min(victim.running_since_s, self._now), self._policy.patience_s, self._now):
                return True
            short -= self._policy.device_blocks(victim)
            if short <= 0:
                break
        return False

    def _fill(self) -> bool:
        """Promote programs that fit. Promote a program that does not fit in exchange for acting programs
        whose values add up to less than the gain. Returns whether a program was promoted."""
        reserve = self._reserve()
        room = self._room(reserve)
        before = len(self._entered)
        misses = {True: 0, False: 0}  # whether a program's context is saved → programs so far that do not fit
        for program in self._candidates():
            # At least 1, since the budget is 0 or less while untracked requests use the whole device.
            wanted = max(1, min(self._reserved_blocks(program, reserve), self._view.device.budget_blocks))
            fits = wanted <= room or not (self._staying or self._entered) or self._is_small_and_late(program)
            saved = _has_saved_context(program)
            misses[saved] += not fits
            if not fits and (misses[saved] > MAX_EXCHANGES or self._exchanges == MAX_EXCHANGES):
                continue
            if not self._may_begin(program):
                continue
            worth = self._worth(program)
            gain = worth * self._headroom
            if fits:
                self._promote(program, MoveReason.FREE_CAPACITY, worth=worth)
            elif not (victims := self._victims_for(wanted - room, gain, reserve)):
                continue
            else:
                price = gain / self._policy.device_blocks(program)
                self._exchanges += 1
                self._promote(program, MoveReason.EXCHANGE, worth=worth, price=price)
                for hold, victim in victims:
                    room += self._reserved_blocks(victim, reserve)
                    self._send(
                        victim, self._tier_below(victim), MoveReason.EXCHANGE, hold_value=hold, price=price
                    )
            room -= wanted
        return len(self._entered) > before

    def _is_small_and_late(self, program: ProgramTierView) -> bool:
        """Return whether a program need not wait any longer for the growth of others."""
        blocks = max(self._policy.device_blocks(program), program.turn_blocks, program.peak_blocks)
        free_blocks = self._free[Tier.DEVICE] - self._small_growth_blocks
        if blocks > SMALL_SHARE * free_blocks:
            return False
        is_late = has_elapsed(program.waiting_since_s, SMALL_PATIENCE_S, self._now)
        self._small_growth_blocks += is_late * (blocks - self._policy.device_blocks(program))
        return is_late

    def _room(self, reserve: float) -> float:
        """Return the blocks of the device minus the ``_reserved_blocks`` of all programs on the device."""
        if not reserve:
            return self._free[Tier.DEVICE]
        here = chain(self._staying.values(), self._entered.values())
        return self._view.device.budget_blocks - math.fsum(self._reserved_blocks(p, reserve) for p in here)

    def _worth(self, program: ProgramTierView) -> float:
        return self._policy.worth(program) * (URGENT_WORTH if self._is_urgent(program) else 1.0)

    def _may_begin(self, program: ProgramTierView) -> bool:
        """Return whether the rules on a full device and on room in all tiers let a program enter."""
        if _has_saved_context(program) or not (self._staying or self._entered):
            return True
        idle = self._stands_still and not self._entered
        if not (idle or self._device_has_spare_share(program)):
            return False
        if not self._below_blocks:
            return True
        free = sum(max(0, blocks) for blocks in self._free.values())
        share = self._share_in_all_tiers
        # While this program is there, the others grow about as much as it does.
        growth_blocks = self._with_kv.growth_within(self._with_kv.growth_of(program))
        short = self._reserved_blocks(program, share) - (free - share * growth_blocks)
        if short <= 0:
            return True
        gain = self._worth(program) * self._headroom
        for hold, _, blocks in self._droppable:
            gain -= hold * blocks
            if gain <= 0:
                break
            short -= blocks
            if short <= 0:
                return True
        return False

    def _device_has_spare_share(self, program: ProgramTierView) -> bool:
        """Return whether the programs with KV that are worth about as much as ``program``, or more, leave a
        part of the device unused. True if sizes are unknown."""
        if not program.service_s:
            return True
        demand, mean = self._with_kv.sums
        own = demand / max(1.0, mean) * self._with_kv.mean_blocks_of(program)
        room = self._view.device.budget_blocks - own
        # The first condition implies the second one, and is cheaper to check.
        return demand <= room or self._with_kv.demand_above(self._worth(program) * BEGIN_WORTH) <= room

    @cached_property
    def _share(self) -> float:
        """Share of the predicted growth that is reserved on the device after a loss of KV."""
        calm_s = self._now - self._view.last_shortage_s
        return growth_reserve(self._policy.reserve, calm_s, self._policy.relax_s)

    @cached_property
    def _share_in_all_tiers(self) -> float:
        """Share of the predicted growth that is reserved in all tiers together, also before any loss.

        Proportional to the size of the tiers below while they are smaller than the device, so that a small
        tier changes little. At least ``_share``. Until growth was observed, the share is ``_share``: a prior
        that is too high must not keep programs out where memory suffices."""
        if not self._view.growth_observed:
            return self._share
        below = self._below_blocks / max(1, self._view.device.budget_blocks)
        return max(self._share, self._policy.reserve * min(1.0, below))

    @cached_property
    def _below_blocks(self) -> int:
        """Blocks of host memory and disk."""
        return self._view.host.budget_blocks + self._view.disk.budget_blocks

    @cached_property
    def _droppable(self) -> list[tuple[float, ProgramId, int]]:
        """The acting programs of all tiers, by the value per block that is lost if their KV is dropped, the
        lowest first, each with the blocks of its context. Moves keep the list up to date."""
        return sorted(self._drop_key(one, tier) for tier, one in self._with_kv if _is_droppable(one))

    def _drop_key(self, program: ProgramTierView, tier: Tier) -> tuple[float, ProgramId, int]:
        return (self._hold_value(program, tier, Tier.WAITING), program.program_id, program.context_blocks)

    def _reserve(self) -> float:
        """Return the share of the predicted growth that is reserved on the device now. 0 if a lower tier has
        room for the largest context on the device, or if no KV was lost within ``relax_s``."""
        largest = max((program.context_blocks for program in self._staying.values()), default=0)
        below = max(self._free[Tier.HOST], self._free[Tier.DISK])
        return 0.0 if below >= max(1, largest) else self._share

    def _reserved_blocks(self, program: ProgramTierView, reserve: float) -> float:
        """Return the blocks that count for the program on the device: its present size if ``reserve`` is 0,
        else its size after the next turn plus the share ``reserve`` of its further growth."""
        now_blocks = self._policy.device_blocks(program)
        if not reserve:
            return now_blocks
        turn_blocks = max(now_blocks, program.turn_blocks)
        return turn_blocks + reserve * max(0, program.peak_blocks - turn_blocks)

    def _victims_for(self, short: float, gain: float, reserve: float) -> list[tuple[float, ProgramTierView]]:
        """Return the acting programs of the least value that together free at least ``short`` blocks, each
        with its value per block.

        Empty if these programs would free too few blocks, or if their values add up to at least ``gain``."""
        free = dict(self._free)
        chosen: list[tuple[float, ProgramTierView]] = []
        for *_, program_id in islice(self._acting_by_hold_value(), MAX_EXCHANGES):
            victim = self._staying[program_id]
            # Earlier victims may have taken the room below.
            to = self._tier_below(victim, free)
            hold = self._hold_value(victim, Tier.DEVICE, to)
            gain -= hold * self._policy.device_blocks(victim)
            if gain <= 0:
                break
            if to is not Tier.WAITING:
                free[to] -= victim.context_blocks
            chosen.append((hold, victim))
            short -= self._reserved_blocks(victim, reserve)
            if short <= 0:
                return chosen
        return []

    @cached_property
    def _delayed_programs(self) -> float:
        """N: number of programs that are delayed while a context is computed again."""
        now = sum(p.activity is not ProgramActivity.ACTING for p in self._view.on_device)
        # If no program runs, computing delays only the program itself.
        return max(now, self._view.mean_running) if now else 1.0

    @cached_property
    def _stands_still(self) -> bool:
        return all(program.activity is ProgramActivity.ACTING for program in self._view.on_device)

    @cached_property
    def _headroom(self) -> float:
        if self._stands_still:
            return 1.0
        view = self._view
        return max(MIN_HEADROOM, (1.0 - view.prefill_share) * (1.0 - view.kv_read_share))

    # -- leaving the device ---------------------------------------------------------------------

    def _acting_by_hold_value(self) -> list[tuple[float, float, ProgramId]]:
        """Return the acting programs on the device, by the value of holding their KV, the lowest first."""
        room = (self._free[Tier.HOST], self._free[Tier.DISK])
        if room != self._acting_room:
            self._acting_room = room
            self._acting = sorted(
                (self._hold_value(program, Tier.DEVICE), program.last_active_s, program.program_id)
                for program in self._staying.values()
                if program.activity is ProgramActivity.ACTING
            )
        return [key for key in self._acting if key[-1] in self._staying]

    def _hold_value(self, program: ProgramTierView, tier: Tier, to: Tier | None = None) -> float:
        """Return the progress per block and second that the program's KV in ``tier`` is expected to save.

        ``to``: the tier to which the program would move; by default the highest tier with room."""
        if not program.context_blocks or program.return_chance <= 0.0:
            return 0.0
        cost_s = self._cost_s(program, self._tier_below(program, tier=tier) if to is None else to)
        if tier is not Tier.DEVICE:
            cost_s -= min(cost_s, self._cost_s(program, tier))
        elapsed_s = max(0.0, self._now - program.gap_since_s)
        if not cost_s < math.inf:
            # A context whose restore cost is unknown is not dropped, unless the engine stands still.
            return 0.0 if self._stands_still and elapsed_s >= gittins.UNKNOWN_GAP_S else math.inf
        rate = self._rates.get(program.program_id)
        if rate is None:
            rate = self._rates[program.program_id] = gittins.gittins_index(
                program.gap_durations_s, elapsed_s, program.return_chance
            )
        return cost_s / program.context_blocks * rate

    def _cost_s(self, program: ProgramTierView, tier: Tier) -> float:
        """Return the seconds of work that the engine's programs lose until a context in ``tier`` is on the
        device; ``inf``: unknown."""
        compute_s, copy_s = self._delayed_programs * program.rebuild_s, None
        if tier is not Tier.WAITING:
            below = self._view.host if tier is Tier.HOST else self._view.disk
            if below.load_s_per_block is not None:
                copy_s = self._headroom * (
                    below.load_queue_s + below.load_s_per_block * program.context_blocks
                )
        known = compute_s > 0 or copy_s is not None
        return restore_s(compute_s, copy_s) if known else math.inf

    def _demotion_candidates(self) -> list[ProgramTierView]:
        staying = self._staying
        pending = [p for p in staying.values() if p.pending and p.activity is ProgramActivity.READY]
        acting = [staying[program_id] for *_, program_id in self._acting_by_hold_value()]
        reasoning = [p for p in staying.values() if p.activity is ProgramActivity.REASONING]
        reasoning.sort(key=lambda program: (-program.arrived_s, program.program_id))
        return [*pending, *acting, *reasoning]

    # -- the tiers below ------------------------------------------------------------------------

    def _tier_below(
        self, program: ProgramTierView, free: Mapping[Tier, int] | None = None, tier: Tier = Tier.DEVICE
    ) -> Tier:
        """Return the highest tier below ``tier`` with room for the program's context; ``WAITING`` if none has
        room. ``free``: free blocks by tier, by default those of this plan."""
        free = self._free if free is None else free
        for below in (Tier.HOST, Tier.DISK)[tier is Tier.HOST :] if tier is not Tier.DISK else ():
            if 0 < program.context_blocks <= free[below]:
                return below
        return Tier.WAITING

    def _demote_overflow(self) -> bool:
        """Demote the programs of the least value from host memory and from disk while the tier is over
        capacity. Returns whether a program moved."""
        before = len(self._moved)
        for tier, group in ((Tier.HOST, self._view.on_host), (Tier.DISK, self._view.on_disk)):
            if self._free[tier] >= 0:
                continue
            values = [(self._hold_value(p, tier), p.last_active_s, p.program_id, p) for p in group]
            for *_, program in sorted(values, key=lambda entry: entry[:3]):
                if self._free[tier] >= 0:
                    break
                if program.program_id not in self._moved:
                    self._send(program, self._tier_below(program, tier=tier), MoveReason.OVER_CAPACITY)
        return len(self._moved) > before

    # -- bookkeeping ----------------------------------------------------------------------------

    def _promote(self, program: ProgramTierView, reason: MoveReason, **terms: float) -> None:
        super()._promote(program, reason, **terms)
        self._with_kv.move(program, Tier.DEVICE)

    def _send(self, program: ProgramTierView, to: Tier, reason: MoveReason, **terms: float) -> None:
        super()._send(program, to, reason, **terms)
        self._with_kv.move(program, to)
        if "_droppable" in vars(self) and _is_droppable(program):
            del self._droppable[bisect_left(self._droppable, self._drop_key(program, program.tier))]
            if to is not Tier.WAITING:
                insort(self._droppable, self._drop_key(program, to))


def _has_saved_context(program: ProgramTierView) -> bool:
    return program.tier in (Tier.HOST, Tier.DISK)


def _is_droppable(program: ProgramTierView) -> bool:
    return program.activity is ProgramActivity.ACTING and program.context_blocks > 0


def size_class(blocks: int) -> int:
    """Return the exponent of the power of two above ``blocks``: 1 → 1, 2 and 3 → 2, 4 to 7 → 3.

    First prompts of one kind of agent often differ by less than a factor of two, which says little about the
    programs' total work. So within a class the size does not decide which program waits. At the boundary
    between two classes, one block still decides."""
    return blocks.bit_length()


@lru_cache(maxsize=4096)
def _relative_worth(sizes_s: tuple[float, ...], attained_s: float, new_s: tuple[float, ...]) -> float:
    worth = gittins.gittins_index(sizes_s, attained_s) / gittins.gittins_index(new_s, 0.0)
    return min(MAX_WORTH, max(1.0 / MAX_WORTH, worth))
