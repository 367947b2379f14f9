"""Prompts recorded as ids of content blocks, one id per full block of ``TraceProgram.block_size`` tokens: the
first ``hash_lcp`` ids of the previous turn's prompt, then those of the turn's ``hash_runs``. A run (first,
count) stands for ``first`` to ``first + count - 1``. Equal ids mean equal text within ``hash_scope``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .trace_schema import TraceProgram

BlockRuns = tuple[tuple[int, int], ...]
"""Block ids of a prompt as runs of consecutive ids: (first, count) of each run."""


def has_block_ids(program: TraceProgram) -> bool:
    """Return whether every turn of the program has the block ids of its prompt."""
    return program.block_size is not None and all(turn.hash_runs is not None for turn in program.turns)


def block_runs(program: TraceProgram) -> list[BlockRuns]:
    """Return the block ids of each turn's prompt, as runs. Runs that continue one another are merged."""
    prompts: list[BlockRuns] = [()]
    for turn in program.turns:
        left, runs = turn.hash_lcp or 0, list[tuple[int, int]]()
        for start, count in prompts[-1]:
            runs.append((start, max(0, min(count, left))))
            left -= count
        merged: list[tuple[int, int]] = []
        for start, count in (*runs, *(turn.hash_runs or ())):
            if count and merged and sum(merged[-1]) == start:
                merged[-1] = merged[-1][0], merged[-1][1] + count
            elif count:
                merged.append((start, count))
        prompts.append(tuple(merged))
    return prompts[1:]


def run_ids(runs: BlockRuns, first: int, last: int) -> Iterator[int]:
    """Return the ids of the blocks at positions ``first`` to ``last - 1``."""
    ids = itertools.chain.from_iterable(range(start, start + count) for start, count in runs)
    return itertools.islice(ids, first, max(0, last))


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
