"""Every eviction order on one fixed access sequence, beside the offline optimum."""

from __future__ import annotations

from collections.abc import Sequence

from .accesses import AccessLog
from .belady import belady
from .cache import replay
from .orders import OPTIMUM, order_maker, order_names
from .regenerated import Progress, Regenerated
from .sequence import AccessSequence, prepare


def compare(
    log: AccessLog | AccessSequence, orders: Sequence[str] | None = None, *, progress: Progress | None = None
) -> dict[str, Regenerated]:
    """Replay the sequence under each order (default: all), with its ratio to the optimum, which comes first.

    ``progress`` counts entries over all replays together. Raises ``ValueError``
    for an unknown order, before anything is replayed, and ``AccessLogError``.
    """
    wanted = dict.fromkeys(order_names() if orders is None else orders)
    wanted.pop(OPTIMUM, None)
    makers = {name: order_maker(name) for name in wanted}
    sequence = prepare(log) if isinstance(log, AccessLog) else log
    rounds = 1 + len(makers)
    optimum = belady(sequence, progress=_part(progress, 0, rounds))
    results = {OPTIMUM: _compared(optimum, optimum)}
    for number, (name, maker) in enumerate(makers.items(), 1):
        result = replay(sequence, maker(sequence.owners), name=name, progress=_part(progress, number, rounds))
        results[name] = _compared(result, optimum)
    return results


def over_belady(regenerated_tokens: int, optimum_tokens: int) -> float | None:
    """SAGA's competitive ratio (S10) on one log; 0/0 is 1, and None stands for x/0."""
    if optimum_tokens == 0:
        return 1.0 if regenerated_tokens == 0 else None
    return regenerated_tokens / optimum_tokens


def _compared(result: Regenerated, optimum: Regenerated) -> Regenerated:
    result.over_belady = over_belady(result.regenerated_tokens, optimum.regenerated_tokens)
    notes = []
    if result.over_belady is None:
        notes.append("no ratio: the offline optimum loses nothing")
    if result.given_back_tokens:
        notes.append(f"{result.given_back_tokens} reused tokens given back for want of space")
    if result.overflow_blocks:
        notes.append(f"the sequence overflowed the pool by up to {result.overflow_blocks} blocks")
    result.note = "; ".join(notes)
    return result


def _part(progress: Progress | None, number: int, rounds: int) -> Progress | None:
    if progress is None:
        return None
    tell = progress
    return lambda done, total: tell(number * total + done, rounds * total)
