"""Bodies for the two stages of a request: one engine computes the prompt, another generates the answer.

Each gets the client's body with a few fields changed. The value of vLLM's field ``kv_transfer_params`` that
the prefill engine returns is passed unchanged to the decode engine. With several prompts, several answers or
beam search there is no single context to transfer, and with prompt logprobs the answering engine has to
compute the prompt itself: then the decode engine computes everything.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .client_apis import ClientApi
from .engine_client import parse_json_object
from .generation_request import LENGTH_FIELDS, Members, encode_raw, members_of

TRANSFER = "kv_transfer_params"
_ANSWER_FIELDS = (
    "stream_options", "n", "best_of", "use_beam_search", "min_tokens", "logprobs", "top_logprobs",
    "logprob_token_ids", "prompt_logprobs", "echo", "background", "store", "metadata", "prompt_cache_key",
    "ec_transfer_params",
)  # fmt: skip
"""Fields that ``prefill_body`` removes. Most concern only the client's answer, some forbid an answer of one
token, some name a program, which a header does. ``ec_transfer_params`` could name another request's data."""


_VALUES_OF_ONE = {
    "n": (b"null", b"0", b"1"),
    "best_of": (b"null", b"0", b"1"),
    "use_beam_search": (b"null", b"false"),
    "echo": (b"null", b"false"),
    "prompt_logprobs": (b"null",),
    "prompt_embeds": (b"null",),
}
"""Fields with which the decode engine computes all of a request, unless they have one of these values."""
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def decode_only_body(api: ClientApi, body: bytes) -> bytes | None:
    """Return the body for the decode engine if the request has no prefill stage, else ``None``.

    ``body``: a body that ``parse_generation_request`` accepted. Its transfer parameters are removed. Raises
    ``InvalidGenerationRequest``.
    """
    if api not in (ClientApi.CHAT, ClientApi.COMPLETIONS):
        return None  # these APIs have one prompt and one answer
    fields = members_of(body)
    prompt = bytes(fields.get("prompt", b"")) if api is ClientApi.COMPLETIONS else b""
    # A list of texts, lists of token ids, or objects.
    is_list = prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[", b"{")
    is_divided = all(bytes(fields.get(name, b"null")) in values for name, values in _VALUES_OF_ONE.items())
    if is_divided and not (is_list and len(_prompts.decode(prompt)) > 1):
        return None
    return decode_body(body, None)


def prefill_body(api: ClientApi, body: bytes, transfer: str, peer: str, decode_reads: bool) -> bytes:
    """Return the body for the prefill engine. It asks for an answer of one token, and names the destination
    of the KV. Raises ``InvalidGenerationRequest``.

    ``body``: as for ``decode_only_body``. ``transfer``: a unique name for this transfer. The others are those
    of ``SendRequest``.
    """
    document = members_of(body)
    first, *others = LENGTH_FIELDS[api]
    for name in (*_ANSWER_FIELDS, *others):
        document.pop(name, None)
    params = {"do_remote_decode": True, "transfer": transfer, "peer": peer, "decode_reads": decode_reads}
    fields: dict[str, Any] = {first: 1, "stream": False, TRANSFER: params}
    if api is ClientApi.RESPONSES:
        fields["store"] = False
    return _encode(document, fields)


def parse_transfer_params(answer: bytes) -> dict[str, Any] | None:
    """Return the parameters in a prefill engine's answer that say where the KV is. ``None``: there are none,
    so the engine was not started as a prefill engine."""
    params = (parse_json_object(answer) or {}).get(TRANSFER)
    return params if isinstance(params, dict) and params.get("do_remote_prefill") is True else None


def decode_body(body: bytes, params: dict[str, Any] | None) -> bytes:
    """Return the body for the decode engine: the client's body with ``params``, which say where the KV is;
    ``None``: it computes the prompt itself. Raises ``InvalidGenerationRequest``.

    The client's own transfer parameters are removed, because they could name another request's memory.
    """
    document = members_of(body)
    for name in (TRANSFER, "ec_transfer_params"):
        document.pop(name, None)
    return _encode(document, {} if params is None else {TRANSFER: params})


def _encode(document: Members, fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode({**document, **{name: encode_raw(value) for name, value in fields.items()}})
