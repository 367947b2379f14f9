"""Whether two peers have KV of the same kind. They are told apart before a byte of it is sent."""

from __future__ import annotations

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


def told(identity: KvIdentity) -> dict[str, str | int]:
    """What ``Hello`` says of one's KV."""
    return asdict(identity)


def refusal(ours: KvIdentity, theirs: Mapping[str, str | int]) -> str | None:
    """Why blocks must not go between the two, in words for whoever started them; ``None``: they may."""
    mine = told(ours)
    names = [*mine, *sorted(theirs.keys() - mine.keys())]
    different = [name for name in names if theirs.get(name) != mine.get(name)]
    if not different:
        return None
    listed = "; ".join(
        f"{_WHAT.get(name, name)}: {theirs.get(name, 'not said')!r} there, {mine.get(name, 'unknown')!r} here"
        for name in different
    )
    return f"KV of another kind cannot be used here: {listed}. Start both engines alike"
