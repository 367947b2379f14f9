"""Whether two peers have KV of the same kind. They are told apart before a byte of it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from ..kv_offload.block_file import KvIdentity

_FIELD_DESCRIPTIONS = {
    "model": "the model",
    "kv_dtype": "the data type of KV (--kv-cache-dtype)",
    "block_tokens": "the tokens of a Full Block",
    "block_bytes": "the bytes of a Full Block",
    "layers": "the number of layers",
    "hash_scheme": "how blocks are hashed (PYTHONHASHSEED, --prefix-caching-hash-algo, --block-size)",
    "vllm_version": "the vLLM release, which is the layout within a layer",
    "tp_rank": "the rank",
    "tp_size": "the number of ranks",
}
_PRIVATE_FIELDS = {"model", "hash_scheme"}


def identity_fields(identity: KvIdentity) -> dict[str, str | int]:
    """What ``HelloMessage`` says of one's KV."""
    return asdict(identity)


def identity_digest(identity: KvIdentity) -> str:
    """32 hexadecimal digits that differ where any field does, and tell none of them."""
    text = json.dumps(identity_fields(identity), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def incompatibility_reason(
    ours: KvIdentity, theirs: Mapping[str, str | int], *, for_unidentified_peer: bool = False
) -> str | None:
    """Why the two engines cannot exchange blocks, in words for their operator; ``None``: they can.

    ``for_unidentified_peer``: weights and hash scheme are not named, only that they differ: one contains a
    path of this machine, the other a seed.
    """
    mine = identity_fields(ours)
    names = [*mine, *sorted(theirs.keys() - mine.keys())]
    different = [name for name in names if theirs.get(name) != mine.get(name)]
    if not different:
        return None

    def line(name: str) -> str:
        what = _FIELD_DESCRIPTIONS.get(name, name)
        if for_unidentified_peer and name in _PRIVATE_FIELDS:
            return what
        return f"{what}: {theirs.get(name, 'not said')!r} there, {mine.get(name, 'unknown')!r} here"

    listed = "; ".join(map(line, different))
    return f"KV of another kind cannot be used here: {listed}. Start both engines alike"
