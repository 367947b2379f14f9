"""Values of prefill/decode disaggregation: requests, engine pairs and storage reads (DualPath §6).

An engine is one device; a node is one machine, whose engines share its storage NIC. The caller numbers the
engines and nodes. Of equally good engines, the engine with the lowest number is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

FULL_BLOCK_TOKENS = 64
"""Tokens of a Full Block, with all layers: the unit of storage (DualPath §4.1, A.5)."""


class PdRequest(NamedTuple):
    """A request to prefill on one engine and decode on another."""

    request_id: int | str
    tokens: int
    """Prompt length in tokens: the paper's estimate of the request's cost for devices, NICs and memory."""
    hit_blocks: int = 0
    """Number of the prompt's first Full Blocks whose KV is in storage."""
    kv_tokens: int = 0
    """KV tokens that the request needs on the decode engine: the prompt and, if known, the output."""


class StorageReadView(NamedTuple):
    """A request's read from storage, and the state of the two storage NICs that could do the read. One NIC is
    on the prefill engine's node, the other on the decode engine's node."""

    blocks: int
    """Number of Full Blocks to read (64 tokens over all layers, DualPath's unit of storage)."""
    prefill_queue_s: float
    """Seconds of reads queued at the prefill engine's node; negative: seconds since its NIC became idle."""
    decode_queue_s: float
    """Seconds of reads queued at the decode engine's node; negative: seconds since its NIC became idle."""
    prefill_block_s: float
    """Seconds that the NIC of the prefill engine's node takes per Full Block."""
    decode_block_s: float
    """Seconds that the NIC of the decode engine's node takes per Full Block."""
    one_node: bool = False
    """Whether both engines are on one node and share its NIC."""


class ReadSplit(NamedTuple):
    """Numbers of Full Blocks of a request that each engine's node reads from storage. The prefill engine's
    node reads the first blocks of the prompt, the decode engine's node the later ones."""

    prefill_blocks: int
    decode_blocks: int


class EnginePair(NamedTuple):
    """A request's engines, and the split of its storage read."""

    request: PdRequest
    prefill: int
    decode: int
    split: ReadSplit
