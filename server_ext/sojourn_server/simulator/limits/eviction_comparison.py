"""All eviction orders on one access sequence, compared with the offline optimum."""

from __future__ import annotations

from collections.abc import Sequence

from .belady import replay_belady
from .block_accesses import AccessLog, AccessSequence, prepare_access_sequence
from .eviction_replay import EvictionReplayResult, replay_evictions
from .replay_eviction_orders import OPTIMAL_ORDER, eviction_order_factory, eviction_order_names


def compare_eviction_orders(
    log: AccessLog | AccessSequence, orders: Sequence[str] | None = None
) -> dict[str, EvictionReplayResult]:
    """Replay ``log`` with each of ``orders`` (default: all). Returns the results by name of the order, each
    with its ratio to the offline optimum. The optimum's own result is the first.

    Raises ``ValueError`` for an unknown order, before any replay. Raises ``AccessLogError`` for an
    inconsistent log.
    """
    wanted = dict.fromkeys(eviction_order_names() if orders is None else orders)
    wanted.pop(OPTIMAL_ORDER, None)
    factories = {name: eviction_order_factory(name) for name in wanted}
    sequence = prepare_access_sequence(log) if isinstance(log, AccessLog) else log
    optimum = replay_belady(sequence)
    results = {OPTIMAL_ORDER: _with_competitive_ratio(optimum, optimum)}
    for name, factory in factories.items():
        result = replay_evictions(sequence, factory(sequence.owners), name=name)
        results[name] = _with_competitive_ratio(result, optimum)
    return results


def competitive_ratio(regenerated_tokens: int, optimum_tokens: int) -> float | None:
    """SAGA's competitive ratio (mechanism S10) on one log; 0/0 is 1, and x/0 is ``None``."""
    if optimum_tokens == 0:
        return 1.0 if regenerated_tokens == 0 else None
    return regenerated_tokens / optimum_tokens


def _with_competitive_ratio(
    result: EvictionReplayResult, optimum: EvictionReplayResult
) -> EvictionReplayResult:
    result.over_belady = competitive_ratio(result.regenerated_tokens, optimum.regenerated_tokens)
    notes = []
    if result.over_belady is None:
        notes.append("no ratio: the offline optimum loses nothing")
    if result.given_back_tokens:
        notes.append(f"{result.given_back_tokens} reused tokens given back for want of space")
    if result.overflow_blocks:
        notes.append(f"the sequence overflowed the pool by up to {result.overflow_blocks} blocks")
    result.note = "; ".join(notes)
    return result
