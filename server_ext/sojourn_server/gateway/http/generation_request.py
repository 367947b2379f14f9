"""Reads a generation request's body, and of it what routing needs, the fields of ``_Body``. All others reach
the engine byte for byte, and the whole body does if nothing in it has to change."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
from sojourn.errors import InputError
from sojourn.hints import AgenticContext
from sojourn.wire_codec import Outcome
from starlette.types import Receive

from ...api.client_identity import ClientIdentity, identify
from ...core.request_hints import CONTEXT_KEY, clipped, read_identity
from .client_apis import GATEWAY_FULL, ClientApi, RequestRejected
from .engine_client import ClientHeaders, header_id, parse_json_object

Members = dict[str, msgspec.Raw]
"""Fields of a JSON object by name, as raw JSON."""

MAX_BODY_BYTES = 16 << 20
"""Default maximum bytes of one body."""
MAX_HELD_BYTES = 2 << 30
"""Default maximum bytes of all bodies. A body is kept until its answer ends, to be sent again if need be."""
BODY_TIMEOUT_S = 60.0
"""Maximum seconds in which a whole body must arrive."""
MAX_TOKENS = 2**31
"""Upper bound of ``GenerationRequest.output_tokens``."""
PREFIX_PIECE_BYTES = 1024
"""Bytes of a prompt's pieces for its prefix hashes, about those of 16 of vLLM's blocks."""
SESSION_KEY = "session_id"
"""Field of the body, or of its ``vllm_xargs``, that names the program of a request without a hint."""


class InvalidGenerationRequest(InputError):
    """The body is not a valid request of its API. The text says what was wrong and what was expected."""


class ClientDisconnected(Exception):
    """The client of this request has disconnected."""


class BodyReader:
    """Reads the bodies of requests, within limits for each and for all together."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_body_bytes, self._max_held_bytes = max_body_bytes, max_held_bytes
        self.held_bytes = 0
        """Bytes of all bodies that were read and not freed."""

    async def read(self, headers: ClientHeaders, receive: Receive) -> bytes:
        """Read a body, and count its bytes until ``free``. Raises ``RequestRejected`` for a body that exceeds
        a limit or arrives too slowly, and ``ClientDisconnected``."""
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestRejected(415, "encoded_body", "the body is compressed; expected plain JSON")
        self._check(0, int(headers.get("content-length", 0)))  # before a large body is sent
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    self._check(len(body), len(part))
                    body += part
                    self.held_bytes += len(part)
                    more = message.get("more_body", False)
        except BaseException as error:
            self.free(len(body))
            if isinstance(error, TimeoutError):
                why = f"after {BODY_TIMEOUT_S:g} s the body has not arrived"
                raise RequestRejected(408, "slow_body", why) from None
            raise
        return bytes(body)

    def free(self, size: int) -> None:
        """Stop counting a body of ``size`` bytes. Call this when its request has ended."""
        self.held_bytes -= size

    def _check(self, size: int, more: int) -> None:
        if size + more > self._max_body_bytes:
            message = f"the body is larger than {self._max_body_bytes} bytes"
            raise RequestRejected(413, "body_too_large", message)
        if self.held_bytes + more > self._max_held_bytes:
            raise RequestRejected(503, GATEWAY_FULL, "the gateway holds too many bodies; try again", 2.0)


_ABSENT = msgspec.Raw(b"")


class _XArgs(msgspec.Struct):
    """The fields of ``vllm_xargs`` that the gateway reads."""

    agentic_context: Any = None
    session_id: Any = None


class _Body(msgspec.Struct):
    """The fields that the gateway reads, of the bodies of all APIs. The prompt's fields stay raw JSON."""

    stream: bool | None = None
    model: str | None = None
    messages: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    session_id: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    store: Any = None
    request_id: Any = None
    vllm_xargs: _XArgs | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    truncate_prompt_tokens: Any = None
    truncation: Any = None


LENGTH_FIELDS = {
    ClientApi.CHAT: ("max_completion_tokens", "max_tokens"),
    ClientApi.COMPLETIONS: ("max_tokens",),
    ClientApi.RESPONSES: ("max_output_tokens",),
    ClientApi.MESSAGES: ("max_tokens",),
}
"""Fields that bound the length of an answer, by API, in their precedence."""
_PROMPT_FIELDS = {
    ClientApi.CHAT: ("tools", "messages"),
    ClientApi.COMPLETIONS: ("prompt",),
    ClientApi.RESPONSES: ("tools", "instructions", "input"),
    ClientApi.MESSAGES: ("tools", "system", "messages"),
}
"""Fields of ``_Body`` that form the prompt, by API, roughly in the order of the prompt. Engines ignore the
fields of other APIs."""
# vLLM takes "true" for true and 5.0 for 5 too.
_decoder = msgspec.json.Decoder(_Body, strict=False)
_members_decoder = msgspec.json.Decoder(Members)
_LIST_OF_LISTS = re.compile(rb"\[\s*\[")
"""The beginning of a JSON list of lists: several prompts, each a list of token ids."""
_EMBEDDED = re.compile(rb";base64,[A-Za-z0-9+/=_\\-]*")
"""A file in a prompt, as a data URL."""
_MEDIA = (b'"image_url"', b'"input_image"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"file"')
"""Fields and types of parts of a prompt that are no text."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """A parsed generation request."""

    stream: bool
    model: str | None
    program: ClientIdentity | None
    """The request's program; ``None``: the request names none. Its root is known only if no hint names it."""
    context: AgenticContext | None
    """The client's hint; ``None``: there is no hint, or it cannot be read."""
    is_last: bool
    """Whether the client declares this to be the program's last turn."""
    prefix: tuple[int, ...]
    """Hashes of the prompt's prefixes of n × ``PREFIX_PIECE_BYTES``, if the routing policy reads them."""
    text_bytes: int
    """Length of the prompt as JSON, in bytes, without embedded files."""
    files: int
    """Number of embedded files (base64 data URLs) in the prompt."""
    is_sample: bool
    """Whether the engine's count of this prompt's tokens tells the model's tokens per byte."""
    prompt_tokens: int | None
    """Number of prompt tokens, if it is given as token ids."""
    output_tokens: int
    """Maximum or expected length of the answer in tokens; 0: neither is given. That of the messages API does
    not count, since its clients must send one and send the model's."""
    previous_response_id: str | None
    is_stored: bool
    """Whether the engine may keep the answer, under an id of the client's, so that it can be continued."""
    has_identity: bool
    """Whether the body names a program: by a hint, readable or not, or by a session id."""
    is_exact: bool
    """Whether ``prompt_tokens`` is the length that the engine computes: no batch's, and not truncated."""


def parse_generation_request(
    api: ClientApi,
    body: bytes,
    headers: ClientHeaders,
    session_header: str | None = None,
    *,
    reads_prefixes: bool = False,
) -> GenerationRequest:
    """Parse a body. ``session_header``: that of ``GatewayOptions``. ``reads_prefixes``: whether prefix hashes
    are needed. Raises ``InvalidGenerationRequest``.

    The program's id comes from the first of these that has one: the hint, which may declare that there is no
    program, the field ``session_id``, the headers, ``vllm_xargs``, other fields of the body
    (``client_identity``), in the order of vLLM's ``_get_session_id``.
    """
    try:
        read = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(f"the body is not a request of {api.value}: {error}") from None
    xargs = read.vllm_xargs or _XArgs()
    # vLLM neither reads nor forwards this member of a messages request.
    own = read.session_id if api is not ClientApi.MESSAGES else None
    identity = read_identity(own, {CONTEXT_KEY: xargs.agentic_context})
    hint = identity.context.sojourn if identity.context is not None else None
    program: ClientIdentity | None = None
    if identity.program_id is not None:
        parent = identity.context.parent_program_id if identity.context is not None else None
        agent_type = clipped(hint.agent_type) if hint is not None else None
        program = ClientIdentity(identity.program_id, parent, None, agent_type)
    elif identity.context is None and not (isinstance(own, str) and own):
        user_id = read.metadata.get("user_id") if isinstance(read.metadata, dict) else None
        program = identify(headers, session_header, user_id, read.prompt_cache_key, xargs.session_id)
        program = program and program._replace(program_id=header_id(program.program_id))
    text = b"".join([bytes(getattr(read, name)) for name in _PROMPT_FIELDS[api]])
    embedded = _EMBEDDED.findall(text)
    ids, is_truncated = None, read.truncate_prompt_tokens is not None and api is not ClientApi.MESSAGES
    if api is ClientApi.COMPLETIONS:
        ids = _count_ids(text)
    elif api is ClientApi.RESPONSES:
        is_truncated = read.truncation not in (None, "disabled")
    text_bytes = len(text) - sum(map(len, embedded))
    limits = LENGTH_FIELDS[api] if api is not ClientApi.MESSAGES else ()
    limit = next(filter(None, [getattr(read, name) for name in limits]), None)
    expected = identity.context.expected_output_length if identity.context is not None else None
    lengths = [count for count in (expected, limit) if count is not None and count > 0]
    return GenerationRequest(
        bool(read.stream),
        read.model,
        program,
        identity.context,
        hint is not None and hint.final,
        _prefix(text) if reads_prefixes else (),
        text_bytes,
        len(embedded),
        text_bytes >= MIN_SAMPLE_BYTES
        and ids is None
        and not (is_truncated or read.previous_response_id is not None)
        and not any(sign in text for sign in _MEDIA),
        ids,
        min([MAX_TOKENS, *lengths]) if lengths else 0,
        read.previous_response_id,
        api is ClientApi.RESPONSES and (read.store is not False or read.request_id is not None),
        identity.context is not None
        or identity.outcome is Outcome.REJECTED
        or (read.session_id, xargs.session_id) != (None, None),
        ids is not None and not is_truncated and _LIST_OF_LISTS.match(text) is None,
    )


def members_of(raw: bytes | msgspec.Raw) -> Members:
    """Return the fields of a JSON object. Raises ``InvalidGenerationRequest``."""
    try:
        return _members_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(f"the body has an object that cannot be read: {error}") from None


def encode_raw(value: Any) -> msgspec.Raw:
    """Encode ``value`` as raw JSON, to be put into a larger document."""
    return msgspec.Raw(msgspec.json.encode(value))


def with_identity(
    body: bytes,
    rename: Callable[[str], str | None],
    hint: Callable[[Members], None] | None,
    request_id: str | None = None,
) -> bytes:
    """Return a body that ``parse_generation_request`` accepted with changed session ids and a changed hint.

    ``rename`` maps each session id to its replacement; ``None``: the id is removed. ``hint`` changes the
    fields of the hint in place; ``None``: the hint is removed. ``request_id``: a new one; ``None``: it stays.
    """
    document = members_of(body)
    if request_id is not None:
        document["request_id"] = encode_raw(request_id)
    _rename_session(document, rename)
    if bytes(document.get("vllm_xargs", b"")).startswith(b"{"):
        xargs = members_of(document["vllm_xargs"])
        _rename_session(xargs, rename)
        text = xargs.pop(CONTEXT_KEY, None)
        if hint is not None and text is not None:
            fields = members_of(msgspec.json.decode(text, type=str).encode("utf-8", "replace"))
            hint(fields)
            xargs[CONTEXT_KEY] = encode_raw(msgspec.json.encode(fields).decode())
        document["vllm_xargs"] = encode_raw(xargs)
    return msgspec.json.encode(document)


def without_events(body: bytes) -> bytes:
    """Return a body whose hint has lost its events. Raises ``InvalidGenerationRequest``."""

    def change(hint: Members) -> None:
        own = members_of(hint["sojourn"])
        own.pop("events", None)
        hint["sojourn"] = encode_raw(own)

    return with_identity(body, str, change)


def _rename_session(members: Members, rename: Callable[[str], str | None]) -> None:
    """Replace the session id in ``members``, in place. Remove it if it is no text."""
    name = msgspec.json.decode(members.pop(SESSION_KEY, b"null"))
    if isinstance(name, str) and (name := rename(name)) is not None:
        members[SESSION_KEY] = encode_raw(name)


def _prefix(text: bytes) -> tuple[int, ...]:
    """Return ``GenerationRequest.prefix``, hashes that only estimate what an engine has cached."""
    chain, found = 0, []
    for start in range(0, len(text) - PREFIX_PIECE_BYTES + 1, PREFIX_PIECE_BYTES):
        chain = zlib.crc32(text[start : start + PREFIX_PIECE_BYTES], chain)
        found.append(chain)
    return tuple(found)


def _count_ids(prompt: bytes) -> int | None:
    """Return the number of token ids in a prompt that is given as JSON; ``None``: the prompt is text."""
    # The JSON is valid, so commas are counted. Parsing millions of numbers would block other clients.
    if not prompt.startswith(b"[") or b'"' in prompt:
        return None  # one or several texts
    return prompt.count(b",") + 1 if prompt.strip(b"[], \t\r\n") else 0


INITIAL_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of JSON that are assumed for a model until prompts were counted."""
MIN_TOKENS_PER_BYTE, MAX_TOKENS_PER_BYTE = 0.05, 1.0
"""Bounds to which each learned sample of tokens per byte is clipped."""
MEAN_WEIGHT = 0.1
"""Weight of the newest prompt in the moving mean of tokens per byte."""
MIN_SAMPLE_BYTES = 2_000
"""Minimum bytes of a prompt from which tokens per byte are learned: of shorter ones most is the template."""
FILE_TOKENS = 1024
"""Tokens that are assumed for an embedded file, about those of an image of a megapixel."""


class PromptSizeEstimator:
    """Estimates the tokens of a prompt: its bytes times the model's tokens per byte, a moving mean over the
    prompts whose tokens an engine has counted."""

    def __init__(self) -> None:
        self._ratios: dict[str | None, float] = {}
        """Tokens per byte by model. Only models that an engine has answered for are here."""

    def tokens(self, question: GenerationRequest) -> int:
        """Estimate the number of prompt tokens of a request, at least 1."""
        if question.prompt_tokens is not None:
            return max(1, question.prompt_tokens)
        ratio = self._ratios.get(question.model, INITIAL_TOKENS_PER_BYTE)
        return max(1, round(question.text_bytes * ratio) + FILE_TOKENS * question.files)

    def learn(self, question: GenerationRequest, prompt_tokens: int) -> None:
        """Update the model's tokens per byte. ``prompt_tokens``: the engine's count for this request."""
        if not question.is_sample or prompt_tokens <= 0:
            return
        sample = min(MAX_TOKENS_PER_BYTE, max(MIN_TOKENS_PER_BYTE, prompt_tokens / question.text_bytes))
        ratio = self._ratios.get(question.model, INITIAL_TOKENS_PER_BYTE)
        self._ratios[question.model] = ratio + MEAN_WEIGHT * (sample - ratio)


# -- the two stages of a request at a pair of engines ------------------------------------------------
# One engine computes the prompt, another generates the answer. Each gets the client's body with a few fields
# changed. The value of vLLM's ``kv_transfer_params`` that the prefill engine returns is passed on unchanged
# to the decode engine. With several prompts, several answers or beam search there is no single context to
# transfer, and with prompt logprobs the answering engine has to compute the prompt itself: then the decode
# engine computes everything.

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
