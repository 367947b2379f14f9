"""Placement by price: KV stays on the device while holding it is worth more than another program's use of the
blocks.

``ResidencyPricePlacement`` states the rules, and ``residency_price_plan`` applies them; ``docs/policy.md``
derives them with an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...programs.idleness import WINDOW_CYCLES
from . import gittins_index as gittins
from .placement_plan import SortKey
from .placement_policy import TierMove, check_times
from .placement_views import PlacementView, ProgramTierView, Tier
from .residency_price_plan import ResidencyPricePlan

# Levels of the Waiting queue.
_SAVED, _RETURNING, _NEW = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPricePlacement:
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
    programs may enter. The first program enters an empty device, whatever its size. Raises ``ValueError`` for
    settings out of range.
    """

    is_used: bool = True
    needs_tiers: bool = False
    reads_costs: bool = True
    refuses: bool = False
    k: int = WINDOW_CYCLES
    """Number of cycles over which idleness (the share of time in tools) is measured, for the rule on a full
    device."""
    tick_s: float = 1.0
    idle_tick_s: float = 0.25
    reserve: float = 0.7
    """Maximum share of the predicted growth that is reserved. On the device, this maximum applies right after
    a loss of KV. In all tiers together, it applies if the lower tiers are at least as large as the device."""
    relax_s: float = 600.0
    """Seconds after the last loss of KV within which the share reserved on the device shrinks evenly to 0;
    ``inf``: it does not shrink."""
    patience_s: float = 300.0
    """Seconds until a waiting ready program is overdue; ``inf``: never."""
    overdue_gap_s: float = 60.0
    """Seconds between promotions of two overdue programs; 0: none."""
    order: str = "size"
    """Order of new programs that wait. "size": the smallest context first; of contexts of the same
    ``size_class``, the earliest program first. "arrival": the earliest first. Programs that ran before enter
    before new programs: first programs with their context in host memory or on disk, then the others. In each
    of these two groups the earliest is first."""

    def __post_init__(self) -> None:
        check_times(self, "patience_s", "overdue_gap_s")
        if not self.relax_s > 0:
            raise ValueError(f"relax_s is {self.relax_s}; expected seconds > 0, or inf to reserve always")
        if not 0 <= self.reserve <= 1:
            raise ValueError(f"reserve is {self.reserve}; expected 0 to 1")
        if self.order not in ("size", "arrival"):
            raise ValueError(f'order is {self.order!r}; expected "size" or "arrival"')

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
        ``ready``. Else the earliest is, and of new programs the smallest."""
        by_work = 2 * sum(program.work_stated for program in ready) > len(ready)
        return sorted(ready, key=lambda program: self._promotion_key(program, by_work))

    def _promotion_key(self, program: ProgramTierView, by_work: bool) -> SortKey:
        saved, blocks = program.tier in (Tier.HOST, Tier.DISK), self.device_blocks(program)
        level = _SAVED if saved else _RETURNING if program.returning else _NEW
        if by_work:
            return (level, blocks / self.worth(program), program.waiting_since_s, program.program_id)
        if level != _NEW or self.order == "arrival":
            return (level, program.arrived_s, program.waiting_since_s, program.program_id)
        return (level, float(size_class(blocks)), program.arrived_s, program.program_id)

    def worth(self, program: ProgramTierView) -> float:
        """Return the value of a program's progress, relative to the progress of a new program of its type."""
        return program_worth(program)


def size_class(blocks: int) -> int:
    """Return the exponent of the power of two above ``blocks``: 1 → 1, 2 and 3 → 2, 4 to 7 → 3.

    First prompts of one kind of agent often differ by less than a factor of two, which says little about the
    programs' total work. So within a class the size does not decide which program waits. At the boundary
    between two classes, one block still decides."""
    return blocks.bit_length()


MAX_WORTH = 16.0
"""Maximum worth of a program. The minimum is 1 ÷ ``MAX_WORTH``."""


def program_worth(program: ProgramTierView) -> float:
    """Return the Gittins index of a program's service, relative to a new program of its type; 1 if
    unknown."""
    if not program.service_s or not program.new_service_s:
        return 1.0
    return _relative_worth(program.service_s, program.attained_s, program.new_service_s)


@lru_cache(maxsize=4096)
def _relative_worth(sizes_s: tuple[float, ...], attained_s: float, new_s: tuple[float, ...]) -> float:
    worth = gittins.gittins_index(sizes_s, attained_s) / gittins.gittins_index(new_s, 0.0)
    return min(MAX_WORTH, max(1.0 / MAX_WORTH, worth))
