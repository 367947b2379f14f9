"""Full Blocks for tests: their identity, their keys, and a content that depends on the key."""

from __future__ import annotations

import hashlib
from typing import Any

from sojourn_server.kv_offload.shared_store import KvIdentity

LAYERS = 3
BLOCK_BYTES = 96


def identity(**changed: Any) -> KvIdentity:
    fields: dict[str, Any] = {
        "model": "tiny@1",
        "kv_dtype": "float32",
        "block_tokens": 64,
        "block_bytes": BLOCK_BYTES,
        "layers": LAYERS,
        "hash_scheme": "sha256/seed=0/16",
        "vllm_version": "0.32.0",
    }
    return KvIdentity(**{**fields, **changed})


def key(number: int, size: int = 32) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=size).digest()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(key: bytes, size: int = BLOCK_BYTES) -> bytes:
    """Content of a block. It differs for every key and layer, so that a mix-up shows."""
    return hashlib.shake_128(key).digest(size)
