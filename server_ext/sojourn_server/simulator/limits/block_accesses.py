"""The block accesses of one run, as recorded: the fixed sequence on which eviction orders are compared."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec


class BlockAccessKind(IntEnum):
    """What happened to a request's blocks."""

    ADMIT = 0
    """It got its first blocks: cached leading blocks are reused here."""
    GROW = 1
    """It holds more blocks than before."""
    FREE = 2
    """It gave all of them back: finished, aborted or preempted. Full ones stay cached until reused."""


class BlockAccess(NamedTuple):
    """One entry. ``held_blocks`` is what the request holds from now on, partly filled ones included."""

    kind: BlockAccessKind
    request: int
    """Index into ``AccessLog.chains``."""
    held_blocks: int
    full_blocks: int
    """Of these, full ones whose KV is complete: what a cache may keep."""


class AccessLog(msgspec.Struct, kw_only=True):
    """Everything an eviction order needs of a run. A chain identifies each full block of a request, in order;
    equal ids are equal content with equal history."""

    pool_blocks: int
    block_size: int
    chains: list[list[int]] = msgspec.field(default_factory=list)
    prompt_blocks: list[int] = msgspec.field(default_factory=list)
    """Of each request, full blocks of its prompt that a cache may be asked for."""
    owners: list[str] = msgspec.field(default_factory=list)
    """Program of each request."""
    requests: list[str] = msgspec.field(default_factory=list)
    """Id of each request; no replay asks for it."""
    accesses: list[BlockAccess] = msgspec.field(default_factory=list)
