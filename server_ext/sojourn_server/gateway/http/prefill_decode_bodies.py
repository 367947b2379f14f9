"""Bodies for the two stages of a request: one engine computes the prompt, another generates the answer.

Each engine gets the client's body with a few fields changed. ``kv_transfer_params`` is vLLM's field for
transfers. The value that the prefill engine returns is passed unchanged to the decode engine.

For some requests the decode engine computes everything, without a prefill stage. With several prompts,
several answers or beam search, vLLM itself creates several requests. So there is no single context to
transfer. With prompt logprobs, the answering engine has to compute the prompt itself.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .client_apis import ClientApi
from .client_json import InvalidGenerationRequest, encode_raw, members_of, short_value
from .engine_client import parse_json_object
from .generation_request import without_identity

TRANSFER = "kv_transfer_params"
_LENGTH_FIELDS = {
    ClientApi.CHAT: ("max_completion_tokens", "max_tokens"),
    ClientApi.COMPLETIONS: ("max_tokens",),
    ClientApi.RESPONSES: ("max_output_tokens",),
    ClientApi.MESSAGES: ("max_tokens",),
}
"""Fields that bound the length of an answer, by API. ``prefill_body`` sets the first to 1 and removes the
others."""
_ANSWER_FIELDS = (
    "stream_options", "n", "best_of", "use_beam_search", "min_tokens", "logprobs", "top_logprobs",
    "logprob_token_ids", "prompt_logprobs", "echo", "background", "store", "ec_transfer_params",
)  # fmt: skip
"""Fields that ``prefill_body`` removes. Most concern only the client's answer, and some forbid an answer of
one token. ``ec_transfer_params`` could name another request's data."""


class _BodyFields(msgspec.Struct):
    """Fields that decide whether the decode engine has to compute all of a request."""

    n: msgspec.Raw = msgspec.Raw(b"")
    best_of: msgspec.Raw = msgspec.Raw(b"")
    use_beam_search: msgspec.Raw = msgspec.Raw(b"")
    prompt_logprobs: msgspec.Raw = msgspec.Raw(b"")
    echo: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")


class _FirstPrompts(msgspec.Struct, array_like=True):
    """The first two prompts of a list. As Python objects, all prompts of a list would take 25 times their
    memory."""

    first: msgspec.Raw = msgspec.Raw(b"")
    second: msgspec.Raw = msgspec.Raw(b"")


_parts = msgspec.json.Decoder(_BodyFields)
_first_prompts = msgspec.json.Decoder(_FirstPrompts)
_LIST_OF_PROMPTS = re.compile(rb'\[[ \t\n\r]*["\[{]')
_ABSENT = (b"", b"null")


def decode_only_body(api: ClientApi, body: bytes) -> bytes | None:
    """Return the body for the decode engine if the request has no prefill stage, else ``None``.

    ``body``: a body that ``parse_generation_request`` accepted. Its transfer parameters are removed. Raises
    ``InvalidGenerationRequest``.
    """
    if api not in (ClientApi.CHAT, ClientApi.COMPLETIONS):
        return None  # these APIs have one prompt and one answer
    try:
        parts = _parts.decode(body)
        counts = [short_value(raw) for raw in (parts.n, parts.best_of)]
        flags = [short_value(raw) for raw in (parts.use_beam_search, parts.echo)]
        logprobs = short_value(parts.prompt_logprobs)
        several = _has_several_prompts(memoryview(parts.prompt)) if api is ClientApi.COMPLETIONS else False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(f"the body is not a request of {api.value}: {error}") from None
    # A count of another type, such as a text, is left to the decode engine.
    divided = (
        all(count is None or (type(count) is int and count <= 1) for count in counts)
        and all(flag in (None, False) for flag in flags)
        and logprobs is None
        and (api is not ClientApi.COMPLETIONS or bytes(memoryview(parts.prompt_embeds)[:4]) in _ABSENT)
        and not several
    )
    return None if divided else _without_transfer(members_of(body))


def _has_several_prompts(prompt: memoryview) -> bool:
    """Whether a prompt, as JSON, is a list of at least two texts, lists of token ids, or objects."""
    return (
        _LIST_OF_PROMPTS.match(prompt) is not None
        and bytes(memoryview(_first_prompts.decode(prompt).second)[:1]) != b""
    )


def prefill_body(
    api: ClientApi, body: bytes, transfer: str, peer: str, decode_share: float, epoch: str = ""
) -> bytes:
    """Return the body for the prefill engine. It has no program names, asks for an answer of one token, and
    names the destination of the KV. Raises ``InvalidGenerationRequest``.

    ``body``: a body that ``parse_generation_request`` accepted. ``transfer``: a unique name for this transfer
    of KV. ``peer``: address of the decode engine's KV transfer manager. ``epoch``: expected instance of that
    manager; empty: any. ``decode_share``: fraction of the prompt's stored KV that the decode engine's node
    reads.
    """
    document = members_of(without_identity(body))
    for name in _ANSWER_FIELDS:
        document.pop(name, None)
    first, *others = _LENGTH_FIELDS[api]
    document[first] = encode_raw(1)
    for name in others:
        document.pop(name, None)
    document["stream"] = encode_raw(False)
    if api is ClientApi.RESPONSES:
        document["store"] = encode_raw(False)
    params = {
        "do_remote_decode": True,
        "transfer": transfer,
        "peer": peer,
        "decode_share": decode_share,
    }
    document[TRANSFER] = encode_raw({**params, "epoch": epoch} if epoch else params)
    return msgspec.json.encode(document)


def parse_transfer_params(answer: bytes) -> dict[str, Any] | None:
    """Return the parameters in a prefill engine's answer that say where the KV is. ``None``: there are none,
    so the engine was not started as a prefill engine."""
    params = (parse_json_object(answer) or {}).get(TRANSFER)
    return params if isinstance(params, dict) and params.get("do_remote_prefill") is True else None


def decode_body(body: bytes, params: dict[str, Any]) -> bytes:
    """Return the body for the decode engine: the client's body with ``params``, which say where the KV is.
    Raises ``InvalidGenerationRequest``.

    The client's own transfer parameters are removed, because they could name another request's memory.
    """
    return _without_transfer(members_of(body), params)


def _without_transfer(document: dict[str, msgspec.Raw], params: dict[str, Any] | None = None) -> bytes:
    """Encode a body with its transfer parameters replaced by ``params``; ``None``: they are removed."""
    for name in (TRANSFER, "ec_transfer_params"):
        document.pop(name, None)
    if params is not None:
        document[TRANSFER] = encode_raw(params)
    return msgspec.json.encode(document)
