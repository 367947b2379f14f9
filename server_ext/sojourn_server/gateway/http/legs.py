"""A request's two legs: its prompt computed by one engine, its answer written by another.

What goes to each engine is the client's body with a few members set. ``kv_transfer_params`` is vLLM's own
member for it; what the prefill engine answers under that name goes to the decode engine as it came.

Some requests have no first leg: of several prompts, several answers or a beam vLLM makes several requests of
its own, and what it tells of a prompt it has to compute itself. No one context would serve them, so all of
such a request is the decode engine's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .apis import Api
from .question import BadQuestion, members_of, without_identity

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
    "logprob_token_ids", "prompt_logprobs", "echo", "background", "store", "ec_transfer_params",
)  # fmt: skip
"""What matters to an answer alone, and could forbid one of a single token."""


class _Parts(msgspec.Struct):
    """What says of a request that it has no one context, or that whoever answers has to compute it."""

    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")


_parts = msgspec.json.Decoder(_Parts)
_several = msgspec.json.Decoder(list[msgspec.Raw])
_NO = (b"", b"null")


def whole_body(api: Api, body: bytes) -> bytes | None:
    """For the decode engine, of a request that has no first leg; ``None``: it has one.

    ``body`` is one that ``read_question`` has read. Raises ``BadQuestion``.
    """
    if api not in (Api.CHAT, Api.COMPLETIONS):
        return None  # these have one prompt and one answer
    try:
        parts = _parts.decode(body)
        several = _has_several(memoryview(parts.prompt)) if api is Api.COMPLETIONS else False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQuestion(f"the body is no request of {api.value}: {error}") from None
    # A count that vLLM reads otherwise than it looks, such as a text, is left to the engine that answers.
    divided = (
        all(count is None or (type(count) is int and count <= 1) for count in (parts.n, parts.best_of))
        and parts.use_beam_search in (None, False)
        and parts.prompt_logprobs is None
        and parts.echo in (None, False)
        and (api is not Api.COMPLETIONS or bytes(memoryview(parts.prompt_embeds)[:4]) in _NO)
        and not several
    )
    return None if divided else _without_transfer(members_of(body))


def _has_several(prompt: memoryview) -> bool:
    """Texts, or lists of token ids, and not one of either."""
    start = bytes(prompt[:64])
    inner = start[1:].lstrip() if start.startswith(b"[") else b""
    return inner[:1] in (b'"', b"[", b"{") and len(_several.decode(prompt)) > 1


def prefill_body(
    api: Api, body: bytes, transfer: str, peer: str, decode_share: float, epoch: str = ""
) -> bytes:
    """For the prefill engine: of no program, an answer of one token, and where its KV goes.

    ``transfer``: a name that no other leg has. ``peer``: address of the decode engine's traffic manager, and
    ``epoch`` which life of it; empty: any. ``decode_share``: part of what storage has that the decode
    engine's node reads. ``body`` is one that ``read_question`` has read. Raises ``BadQuestion``.
    """
    document = members_of(without_identity(body))
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
    on: it would name memory of others. Raises ``BadQuestion``."""
    return _without_transfer(members_of(body), told)


def _without_transfer(document: dict[str, msgspec.Raw], told: dict[str, Any] | None = None) -> bytes:
    for name in (TRANSFER, "ec_transfer_params"):
        document.pop(name, None)
    if told is not None:
        document[TRANSFER] = _raw(told)
    return msgspec.json.encode(document)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
