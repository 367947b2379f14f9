"""Whether two peers have KV of the same kind. They are told apart before a byte of it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from ..tiers.full_block import KvIdentity

_WHAT = {
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
_PRIVATE = {"model", "hash_scheme"}


def told(identity: KvIdentity) -> dict[str, str | int]:
    """What ``Hello`` says of one's KV."""
    return asdict(identity)


def digest(identity: KvIdentity) -> str:
    """32 hexadecimal digits that differ where any field does, and tell none of them."""
    text = json.dumps(told(identity), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def refusal(ours: KvIdentity, theirs: Mapping[str, str | int], *, for_stranger: bool = False) -> str | None:
    """Why blocks must not go between the two, in words for whoever started them; ``None``: they may.

    ``for_stranger``: what weights and hashes are here is not said, only that they differ. The one is a path
    of this machine, the other has a seed.
    """
    mine = told(ours)
    names = [*mine, *sorted(theirs.keys() - mine.keys())]
    different = [name for name in names if theirs.get(name) != mine.get(name)]
    if not different:
        return None

    def line(name: str) -> str:
        what = _WHAT.get(name, name)
        if for_stranger and name in _PRIVATE:
            return what
        return f"{what}: {theirs.get(name, 'not said')!r} there, {mine.get(name, 'unknown')!r} here"

    listed = "; ".join(map(line, different))
    return f"KV of another kind cannot be used here: {listed}. Start both engines alike"
