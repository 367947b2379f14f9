"""Reads the free block queue's buckets for tests."""

from __future__ import annotations

import math
from typing import Any


def abandoned_branches(queue: Any, program_id: str) -> dict[float, int]:
    """Abandoned branches of a program, as time of last use → number of blocks."""
    lengths = {used_s: len(each.blocks) for used_s, each in queue._buckets.get(program_id, {}).items()}
    return {used_s: blocks for used_s, blocks in lengths.items() if used_s != math.inf}
