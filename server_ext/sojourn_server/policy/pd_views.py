"""Frozen snapshots for separated prefill and decode: which two engines, and who reads (DualPath §6).

An engine is one device; a node is one machine, whose engines share its storage NIC. Engines and nodes have
numbers, given once by whoever drives the policies; ties go to the lowest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FULL_BLOCK_TOKENS = 64
"""Tokens of a Full Block, all layers of them: the unit of storage (DualPath §4.1, A.5)."""


class PdRequest(NamedTuple):
    """A request that is to be prefilled on one engine and decoded on another."""

    request_id: int | str
    tokens: int
    """Its prompt. The paper's proxy for what it costs devices, NICs and memory alike."""
    hit_blocks: int = 0
    """Full Blocks of the prompt that are in storage."""
    kv_tokens: int = 0
    """KV that it will need on the decode engine: the prompt and, as far as known, its output."""


class PrefillView(NamedTuple):
    """A prefill engine, by what was assigned to it and has not been prefilled."""

    number: int
    node: int
    tokens: int = 0


class DecodeView(NamedTuple):
    """A decode engine, by what was assigned to it and has not ended."""

    number: int
    node: int
    group: int
    """Engines that take requests together; those of one node are in one group."""
    free_kv_tokens: int
    """What its KV memory still holds, requests on their way to it counted as if they were there."""
    tokens: int = 0
    requests: int = 0
    most_requests: float = math.inf
    """So many it runs at once; ``inf``: not known."""


class ReadView(NamedTuple):
    """One read of Full Blocks from storage, and the storage NICs of the two nodes that could do it."""

    blocks: int
    prefill_queue_s: float
    """Seconds of reading that wait at the prefill engine's node already; below 0: none, for so long."""
    decode_queue_s: float
    prefill_block_s: float
    """Seconds that its NIC takes for one Full Block."""
    decode_block_s: float
    one_node: bool = False
    """Both engines are on the same node, and share its NIC."""


class ReadSplit(NamedTuple):
    """How many Full Blocks each side reads: the prompt's first ones the prefill side, the rest the other."""

    prefill_blocks: int
    decode_blocks: int


class Pair(NamedTuple):
    """A request's engines, and who reads what of its hit."""

    request: PdRequest
    prefill: int
    decode: int
    split: ReadSplit
