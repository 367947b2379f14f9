"""Placement by price: KV stays on the device while holding it is worth more than another program's use of the
blocks.

``docs/policy.md`` derives the prices with an example, and ``docs/policy-rules.md`` has all rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice
from statistics import fmean
from typing import Annotated, NamedTuple

from msgspec import Meta
from sojourn.ids import ProgramId

from ..costs.reload_estimate import restore_s
from ..forecasting import growth_reserve
from . import gittins_index as gittins
from .placement_plan import PlacementPlan, SortKey, has_elapsed
from .placement_policy import MAX_EXCHANGES, MoveReason, QueuedPlacement, TierMove
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
MAX_HOLD_COST = 0.2
"""Without a tier below the device, no program waits for the KV of acting programs, or for room to grow, if
holding costs more than this share of what it saves (``PlacementView.hold_cost``)."""
SMALL_SHARE = 0.25
SMALL_PATIENCE_S = 5.0
"""A program whose predicted peak takes at most ``SMALL_SHARE`` of the free blocks waits at most
``SMALL_PATIENCE_S`` for the growth of other programs. It would end before they need its blocks."""
MAX_WORTH = 16.0
"""Maximum worth of a program. The minimum is 1 ÷ ``MAX_WORTH``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPricePlacement(QueuedPlacement):
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

    *The other rules*, on room to grow, on a full device, on small programs, and the bounds, are in
    ``docs/policy-rules.md``. The methods of the plan apply them one by one.
    """

    reads_costs = True
    tick_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    idle_tick_s: Annotated[float, Meta(gt=0, le=3600)] = 0.25
    reserve: Annotated[float, Meta(ge=0, le=1)] = 0.7
    """Maximum share of the predicted growth that is reserved. On the device, this maximum applies right after
    a loss of KV. In all tiers together, it applies if the lower tiers are at least as large as the device."""
    relax_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds after the last loss of KV within which the share reserved on the device shrinks evenly to 0;
    ``inf``: it does not shrink."""

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        """Return the moves to make now, possibly none. The order of programs in the view does not matter."""
        return ResidencyPricePlan(self, view, now).decide()

    def promotion_order(self, ready: Sequence[ProgramTierView]) -> list[ProgramTierView]:
        """Return ready programs, the first to enter first, but for urgent ones: those with their context in
        host memory or on disk, then others that ran before, then new programs.

        Contexts in lower tiers are first because their promotion frees blocks in these tiers. So the KV of
        the next program that leaves the device can move to a lower tier, and is not dropped. A program whose
        KV was dropped does not wait for ever: after a time it is overdue and enters first.

        Within a level, those with the most worth per block are first if the work left is stated for most of
        ``ready``. Else the earliest is, and of new programs the smallest: of sizes between the same powers of
        two, the earliest."""
        by_work = 2 * sum(program.work_stated for program in ready) > len(ready)
        return sorted(ready, key=lambda program: self._promotion_key(program, by_work))

    def _promotion_key(self, program: ProgramTierView, by_work: bool) -> SortKey:
        blocks = program.device_blocks
        level = _SAVED if _has_saved_context(program) else _RETURNING if program.returning else _NEW
        if by_work:
            return (level, blocks / self.worth(program), program.waiting_since_s, program.program_id)
        if level != _NEW:
            return (level, program.arrived_s, program.waiting_since_s, program.program_id)
        # First prompts of one kind of agent often differ by less than a factor of two, which says little
        # about the programs' total work. So sizes between the same powers of two count as equal.
        return (level, blocks.bit_length(), program.arrived_s, program.program_id)

    def worth(self, program: ProgramTierView) -> float:
        """Return the Gittins index of a program's service, relative to a new program of its type; 1 if
        unknown."""
        if not program.service_s or not program.new_service_s:
            return 1.0
        return _relative_worth(program.service_s, program.attained_s, program.new_service_s)


class WeightedValues:
    """Pairs (value, weight) in ascending order, and their cumulative sums."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        self._pairs = sorted(pairs)
        self._products, self._weights = [0.0], [0.0]
        self._add_up(0)

    def add(self, value: float, weight: float) -> None:
        """Add a pair."""
        at = bisect_left(self._pairs, (value, weight))
        self._pairs.insert(at, (value, weight))
        self._add_up(at)

    def _add_up(self, at: int) -> None:
        """Compute the sums from the pair at this index on."""
        more = self._pairs[at:]
        self._products[at:] = accumulate((each * its for each, its in more), initial=self._products[at])
        self._weights[at:] = accumulate((its for _, its in more), initial=self._weights[at])

    def split(self, value: float) -> tuple[float, float]:
        """Return the sum of value · weight over the values below ``value``, and the sum of the other values'
        weights."""
        at = bisect_left(self._pairs, (value, -math.inf))
        return self._products[at], self._weights[-1] - self._weights[at]


class KvUse(NamedTuple):
    """How a program with KV uses the device until it ends."""

    reasoning_share: float
    """Share of the program's time in which it reasons."""
    mean_blocks: float
    """Predicted mean size of its context, midway between now and the peak."""
    growth_blocks: int
    """Predicted growth of its context."""
    worth: float

    @property
    def demand_blocks(self) -> float:
        """Blocks of the device that the program uses on average."""
        return self.reasoning_share * self.mean_blocks


class KvSums:
    """Sums over the programs with KV."""

    def __init__(self, uses: Sequence[KvUse]) -> None:
        self.demand_blocks = sum(use.demand_blocks for use in uses)
        self.mean_blocks = sum(use.mean_blocks for use in uses)
        self.growths = WeightedValues((use.growth_blocks, use.reasoning_share) for use in uses)
        self.worths = WeightedValues((use.worth, use.demand_blocks) for use in uses)

    def add(self, use: KvUse) -> None:
        """Add a program."""
        self.demand_blocks += use.demand_blocks
        self.mean_blocks += use.mean_blocks
        self.growths.add(use.growth_blocks, use.reasoning_share)
        self.worths.add(use.worth, use.demand_blocks)


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
        self._use_of: dict[ProgramId, KvUse] = {}
        self._small_growth_blocks = 0
        """Predicted growth of the small programs that enter without a reserve."""

    def decide(self) -> tuple[TierMove, ...]:
        """Choose all moves, and return them."""
        if self.is_settled:
            return ()
        if self._promote_overdue():
            while self._fill() or self._demote_overflow():
                pass
        else:
            self._demote_overflow()
        return self.answer()

    # -- entering the device --------------------------------------------------------------------

    @cached_property
    def _computing_is_cheap(self) -> bool:
        """Whether contexts are not worth the blocks that they take. With a tier below, leaving the device is
        only a copy."""
        return self._view.hold_cost > MAX_HOLD_COST and not self._below_blocks

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
        present = chain(view.on_device, view.on_host, view.on_disk, view.waiting)
        return fmean([program.importance for program in present] or [0])

    def _patience_s(self, program: ProgramTierView) -> float:
        return self._policy.patience_s * (1.0 if _has_saved_context(program) else BEGIN_PATIENCE)

    def _waits_for_long_turn(self, program: ProgramTierView) -> bool:
        """Return whether an overdue program can enter only after the end of a turn that has run for
        ``patience_s``. If so, other programs may enter meanwhile. Without this exception, one long answer
        would make all programs wait."""
        short = program.device_blocks - self._free[Tier.DEVICE]
        for victim in self._demotion_candidates() if short > 0 else ():
            if has_elapsed(min(victim.running_since_s, self._now), self._policy.patience_s, self._now):
                return True
            short -= victim.device_blocks
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
                price = gain / program.device_blocks
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
        blocks = max(program.device_blocks, program.turn_blocks, program.peak_blocks)
        free_blocks = self._free[Tier.DEVICE] - self._small_growth_blocks
        if blocks > SMALL_SHARE * free_blocks:
            return False
        is_late = has_elapsed(program.waiting_since_s, SMALL_PATIENCE_S, self._now)
        self._small_growth_blocks += is_late * (blocks - program.device_blocks)
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
        if _has_saved_context(program) or not (self._staying or self._entered) or self._computing_is_cheap:
            return True
        idle = self._stands_still and not self._entered
        if not (idle or self._device_has_spare_share(program)):
            return False
        if not self._below_blocks:
            return True
        free = sum(max(0, blocks) for blocks in self._free.values())
        share = self._share_in_all_tiers
        # While this program is there, the others grow about as much as it does, and only while they reason.
        own_blocks = self._use(program).growth_blocks
        less_blocks, share_of_others = self._kv_sums.growths.split(own_blocks)
        growth_blocks = less_blocks + own_blocks * share_of_others
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
        sums = self._kv_sums
        own = sums.demand_blocks / max(1.0, sums.mean_blocks) * self._use(program).mean_blocks
        room = self._view.device.budget_blocks - own
        worthy_blocks = sums.worths.split(self._worth(program) * BEGIN_WORTH)[1]
        return worthy_blocks <= room

    @property
    def _with_kv(self) -> list[tuple[Tier, ProgramTierView]]:
        """The programs with KV after the moves so far, each with its tier."""
        view, moved = self._view, self._moved
        before = chain(view.on_device, view.on_host, view.on_disk)
        now = [(moved[p.program_id].to if p.program_id in moved else p.tier, p) for p in before]
        new = ((Tier.DEVICE, p) for p in self._entered.values() if p.tier is Tier.WAITING)
        return [(tier, program) for tier, program in (*now, *new) if tier is not Tier.WAITING]

    @cached_property
    def _kv_sums(self) -> KvSums:
        return KvSums([self._use(program) for _, program in self._with_kv])

    def _use(self, program: ProgramTierView) -> KvUse:
        use = self._use_of.get(program.program_id)
        if use is None:
            now_blocks = program.device_blocks
            peak_blocks = max(now_blocks, program.peak_blocks)
            use = self._use_of[program.program_id] = KvUse(
                1.0 - program.idleness.at(self._now),
                (now_blocks + peak_blocks) / 2,
                peak_blocks - now_blocks,
                self._policy.worth(program),
            )
        return use

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
        room for the largest context on the device, if no KV was lost within ``relax_s``, or if computing it
        again is cheap."""
        largest = max((program.context_blocks for program in self._staying.values()), default=0)
        below = max(self._free[Tier.HOST], self._free[Tier.DISK])
        return 0.0 if below >= max(1, largest) or self._computing_is_cheap else self._share

    def _reserved_blocks(self, program: ProgramTierView, reserve: float) -> float:
        """Return the blocks that count for the program on the device: its present size if ``reserve`` is 0,
        else its size after the next turn plus the share ``reserve`` of its further growth."""
        now_blocks = program.device_blocks
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
            gain -= hold * victim.device_blocks
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
                self._demotion_key(program, Tier.DEVICE)
                for program in self._staying.values()
                if program.activity is ProgramActivity.ACTING
            )
        return [key for key in self._acting if key[-1] in self._staying]

    def _demotion_key(self, program: ProgramTierView, tier: Tier) -> tuple[float, float, ProgramId]:
        return (self._hold_value(program, tier), program.last_active_s, program.program_id)

    def _hold_value(self, program: ProgramTierView, tier: Tier, to: Tier | None = None) -> float:
        """Return the progress per block and second that the program's KV in ``tier`` is expected to save.

        ``to``: the tier to which the program would move; by default the highest tier with room."""
        if not program.context_blocks or program.return_chance <= 0.0 or self._computing_is_cheap:
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

    # -- bookkeeping ----------------------------------------------------------------------------

    def _promote(self, program: ProgramTierView, reason: MoveReason, **terms: float) -> None:
        super()._promote(program, reason, **terms)
        if program.tier is Tier.WAITING and "_kv_sums" in vars(self):
            self._kv_sums.add(self._use(program))

    def _send(self, program: ProgramTierView, to: Tier, reason: MoveReason, **terms: float) -> None:
        super()._send(program, to, reason, **terms)
        if to is Tier.WAITING:
            vars(self).pop("_kv_sums", None)
        if "_droppable" in vars(self) and _is_droppable(program):
            del self._droppable[bisect_left(self._droppable, self._drop_key(program, program.tier))]
            if to is not Tier.WAITING:
                insort(self._droppable, self._drop_key(program, to))


def _has_saved_context(program: ProgramTierView) -> bool:
    return program.tier in (Tier.HOST, Tier.DISK)


def _is_droppable(program: ProgramTierView) -> bool:
    return program.activity is ProgramActivity.ACTING and program.context_blocks > 0


@lru_cache(maxsize=4096)
def _relative_worth(sizes_s: tuple[float, ...], attained_s: float, new_s: tuple[float, ...]) -> float:
    worth = gittins.gittins_index(sizes_s, attained_s) / gittins.gittins_index(new_s, 0.0)
    return min(MAX_WORTH, max(1.0 / MAX_WORTH, worth))
