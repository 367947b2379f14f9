"""A context of a model with one KV cache group, whose blocks have one token each."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn_server.kv_offload.context_keys import ContextKeys, GroupLayout

WHOLE = GroupLayout(
    suffix=b"", block_tokens=1, hashes_per_block=1, first_needed=lambda tokens: 0, keeps_all=True
)


def as_context(keys: Sequence[bytes]) -> ContextKeys:
    """The context whose blocks have these keys. The device has none of them."""
    return ContextKeys([WHOLE], keys, step_tokens=1, start_tokens=0, end_tokens=len(keys))
