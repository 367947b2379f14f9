"""Prompts recorded as ids of content blocks, one id per full block of ``TraceProgram.block_size`` tokens: the
first ``hash_lcp`` ids of the previous turn's prompt, then those of the turn's ``hash_runs``. A run (first,
count) stands for ``first`` to ``first + count - 1``. Equal ids mean equal text within ``hash_scope``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .trace_schema import TraceProgram

BlockRuns = tuple[tuple[int, int], ...]
"""Block ids of a prompt as runs of consecutive ids: (first, count) of each run."""


def has_block_ids(program: TraceProgram) -> bool:
    """Return whether every turn of the program has the block ids of its prompt."""
    return program.block_size is not None and all(turn.hash_runs is not None for turn in program.turns)


def block_runs(program: TraceProgram) -> list[BlockRuns]:
    """Return the block ids of each turn's prompt, as runs. Runs that continue one another are merged."""
    runs: list[BlockRuns] = []
    for turn in program.turns:
        kept = _first_blocks(runs[-1], turn.hash_lcp or 0) if runs else ()
        runs.append(_merged_runs(kept + (turn.hash_runs or ())))
    return runs


def run_ids(runs: BlockRuns, first: int, last: int) -> Iterable[int]:
    """Yield the ids of the blocks at positions ``first`` to ``last - 1``."""
    at = 0
    for start, count in runs:
        if at >= last:
            return
        yield from range(start + max(0, first - at), start + min(count, last - at))
        at += count


def count_blocks(runs: BlockRuns) -> int:
    """Return the number of blocks in all runs."""
    return sum(count for _, count in runs)


def common_blocks(a: BlockRuns, b: BlockRuns) -> int:
    """Return the number of leading blocks that two prompts have in common. Both must have merged runs, as
    from ``block_runs``."""
    same = 0
    for (start_a, count_a), (start_b, count_b) in zip(a, b, strict=False):
        same += min(count_a, count_b) if start_a == start_b else 0
        # Runs are merged as far as possible, so the blocks after a shorter run differ.
        if (start_a, count_a) != (start_b, count_b):
            break
    return same


def system_blocks(programs: Sequence[TraceProgram]) -> frozenset[int]:
    """Return the block ids of all shared prefixes (``shared_prefix_tokens``), such as system prompts."""
    found: set[int] = set()
    for program in programs:
        if program.shared_prefix_tokens and program.block_size and has_block_ids(program):
            runs: BlockRuns = program.turns[0].hash_runs or ()
            found.update(run_ids(runs, 0, program.shared_prefix_tokens // program.block_size))
    return frozenset(found)


def _first_blocks(runs: BlockRuns, count: int) -> BlockRuns:
    kept: list[tuple[int, int]] = []
    for start, length in runs:
        if count > 0:
            kept.append((start, min(length, count)))
        count -= length
    return tuple(kept)


def _merged_runs(runs: BlockRuns) -> BlockRuns:
    joined: list[tuple[int, int]] = []
    for start, count in runs:
        if count and joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        elif count:
            joined.append((start, count))
    return tuple(joined)
