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

    prefill_queue_s: float
    """Seconds of reads queued at the prefill engine's node; negative: seconds since its NIC became idle."""
    decode_queue_s: float
    """Seconds of reads queued at the decode engine's node; negative: seconds since its NIC became idle."""
    one_node: bool = False
    """Whether both engines are on one node and share its NIC."""


class EnginePair(NamedTuple):
    """A request's engines, and the side of its storage read."""

    request: PdRequest
    prefill: int
    decode: int
    decode_reads: bool
    """Whether the decode engine's node reads the stored blocks. If not, the prefill engine's node does."""
