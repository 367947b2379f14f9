"""Stand-ins for vLLM's requests, with the attributes that the planner reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK_TOKENS = 16
PER_FULL = 4
FULL_TOKENS = BLOCK_TOKENS * PER_FULL


@dataclass
class Request:
    """A request. Its hashes are computed from its tokens, as in vLLM."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: Mapping[str, Any] | None = None
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*(self.prompt_token_ids or ()), *self.output]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes(self.tokens)


def hashes(tokens: Sequence[int]) -> list[bytes]:
    found, last = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        text = last + repr(list(tokens[start : start + BLOCK_TOKENS])).encode()
        last = hashlib.sha256(text).digest()
        found.append(last)
    return found


def full_keys(tokens: Sequence[int]) -> list[bytes]:
    """Keys of the Full Blocks that these tokens fill."""
    return hashes(tokens)[PER_FULL - 1 :: PER_FULL]


def prompt(seed: int, tokens: int) -> list[int]:
    return [seed * 100_000 + at for at in range(tokens)]


def to_prefill(transfer: str, peer: str = "d", **said: Any) -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer": transfer, "peer": peer, **said}
