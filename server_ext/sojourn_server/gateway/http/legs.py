"""A request's two legs: its prompt computed by one engine, its answer written by another.

What goes to each engine is the client's body with a few members set. ``kv_transfer_params`` is vLLM's own
member for it; what the prefill engine answers under that name goes to the decode engine as it came.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .apis import Api
from .question import without_identity

TRANSFER = "kv_transfer_params"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LENGTHS = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}
"""The members that bound an answer, the first of them always set."""
_OF_THE_ANSWER = (
    "stream_options", "n", "best_of", "use_beam_search", "min_tokens", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo", "background", "store", "ec_transfer_params",
)  # fmt: skip
"""What matters to an answer alone, and could forbid one of a single token."""


def prefill_body(
    api: Api, body: bytes, transfer: str, peer: str, decode_share: float, epoch: str = ""
) -> bytes:
    """For the prefill engine: of no program, an answer of one token, and where its KV goes.

    ``transfer``: a name that no other leg has. ``peer``: address of the decode engine's traffic manager, and
    ``epoch`` which life of it; empty: any. ``decode_share``: part of what storage has that the decode
    engine's node reads. ``body`` is one that ``read_question`` has read.
    """
    document = _members.decode(without_identity(body))
    for name in _OF_THE_ANSWER:
        document.pop(name, None)
    first, *others = _LENGTHS[api]
    document[first] = _raw(1)
    for name in others:
        document.pop(name, None)
    document["stream"] = _raw(False)
    if api is Api.RESPONSES:
        document["store"] = _raw(False)
    told = {"do_remote_decode": True, "transfer": transfer, "peer": peer, "decode_share": decode_share}
    document[TRANSFER] = _raw({**told, "epoch": epoch} if epoch else told)
    return msgspec.json.encode(document)


def read_prefilled(answer: bytes) -> dict[str, Any] | None:
    """What the prefill engine says of where the KV is; ``None``: nothing, and it is no such engine."""
    try:
        found = _members.decode(answer).get(TRANSFER)
        told = msgspec.json.decode(found) if found is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return told if isinstance(told, dict) and told.get("do_remote_prefill") is True else None


def decode_body(body: bytes, told: dict[str, Any]) -> bytes:
    """For the decode engine: the client's own, and where its KV is. What a client says of that is not passed
    on: it would name memory of others."""
    document = _members.decode(body)
    document.pop("ec_transfer_params", None)
    document[TRANSFER] = _raw(told)
    return msgspec.json.encode(document)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
