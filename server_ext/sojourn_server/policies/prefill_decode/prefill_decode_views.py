"""Frozen snapshots for prefill/decode disaggregation: requests, engines and storage reads (DualPath §6).

An engine is one device; a node is one machine, whose engines share its storage NIC. The caller numbers the
engines and nodes. Of equally good engines, the one with the lowest number is chosen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FULL_BLOCK_TOKENS = 64
"""Tokens of a Full Block, with all layers: the unit of storage (DualPath §4.1, A.5)."""


class PdRequest(NamedTuple):
    """A request to prefill on one engine and decode on another."""

    request_id: int | str
    tokens: int
    """Prompt length in tokens: the paper's estimate of the request's cost for devices, NICs and memory."""
    hit_blocks: int = 0
    """Full Blocks of the prompt in storage."""
    kv_tokens: int = 0
    """KV tokens that the request needs on the decode engine: the prompt and, if known, the output."""


class PrefillEngineView(NamedTuple):
    """A prefill engine, and the number of its assigned tokens that are not prefilled yet."""

    number: int
    node: int
    tokens: int = 0


class DecodeEngineView(NamedTuple):
    """A decode engine and its assigned requests that have not ended."""

    number: int
    node: int
    group: int
    """Number of the group whose engines share a queue; engines of one node are in one group."""
    free_kv_tokens: int
    """Free KV memory in tokens. An assigned request's memory counts as used even before its KV arrives."""
    tokens: int = 0
    requests: int = 0
    most_requests: float = math.inf
    """Request limit; ``inf``: unknown."""


class StorageReadView(NamedTuple):
    """A read of Full Blocks (DualPath's unit of storage, several engine blocks), and the state of the two
    storage NICs that could do it: of the prefill node and of the decode node."""

    blocks: int
    prefill_queue_s: float
    """Seconds of reads queued at the prefill engine's node; negative: seconds since its NIC became idle."""
    decode_queue_s: float
    prefill_block_s: float
    """Seconds that the NIC of the prefill engine's node takes per Full Block."""
    decode_block_s: float
    one_node: bool = False
    """Whether both engines are on one node and share its NIC."""


class ReadSplit(NamedTuple):
    """Numbers of Full Blocks (DualPath's unit of storage) that the prefill engine and the decode engine read.
    The prefill engine reads the first blocks of the prompt."""

    prefill_blocks: int
    decode_blocks: int


class EnginePair(NamedTuple):
    """A request's engines, and the split of its storage read."""

    request: PdRequest
    prefill: int
    decode: int
    split: ReadSplit
