"""Parses the parts of a generation request that routing needs, such as its program, its length, and whether
it streams.

Only the fields of ``_Body`` are read. All other fields reach the engine byte for byte. The tenant comes from
the API key alone, never from the body.
"""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from statistics import median_low
from typing import NamedTuple, TypeGuard

import msgspec
from sojourn.hints import AgenticContext
from sojourn.wire_codec import Outcome

from ...core.request_hints import CONTEXT_KEY, clipped, read_identity
from ...routing.routed_programs import MIN_SHARING_TENANTS
from ...routing.tenant_statistics import FrequentTenants
from .client_apis import ClientApi
from .client_json import (
    LONG_VALUE,
    MAX_HINT_JSON_BYTES,
    NOT_SCALAR,
    InvalidGenerationRequest,
    encode_raw,
    members_of,
    short_value,
)

MAX_TOKENS = 2**31
"""Upper bound of ``GenerationRequest.output_tokens``."""
PREFIX_PIECE_BYTES = 1024
"""Bytes of each piece into which a prompt is divided for its prefix hashes. A piece is about as long as 16 of
vLLM's blocks."""
SLICE_BYTES = 1 << 20
"""Bytes of the slices in which a prompt is searched. A search holds Python's global lock, so the search of a
whole prompt would block the event loop."""
SESSION_KEY = "session_id"
"""Field that names the program of a request without a hint. It is a field of the body or of its
``vllm_xargs``."""


class _XArgs(msgspec.Struct):
    """The fields of ``vllm_xargs`` that the gateway reads."""

    agentic_context: msgspec.Raw = msgspec.Raw(b"")
    session_id: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The fields that the gateway reads, of the bodies of all APIs. They stay raw JSON, because decoded
    objects may take 25 times the memory of the body (``client_json``)."""

    stream: msgspec.Raw = msgspec.Raw(b"")
    model: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    session_id: msgspec.Raw = msgspec.Raw(b"")
    vllm_xargs: _XArgs | None = None
    max_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: msgspec.Raw = msgspec.Raw(b"")
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw(b"")
    truncation: msgspec.Raw = msgspec.Raw(b"")


_PROMPT_FIELDS = {
    ClientApi.CHAT: ("tools", "messages"),
    ClientApi.COMPLETIONS: ("prompt",),
    ClientApi.RESPONSES: ("tools", "instructions", "input"),
    ClientApi.MESSAGES: ("tools", "system", "messages"),
}
"""Fields of ``_Body`` that form the prompt, by API, roughly in the order of the prompt. Engines ignore the
fields of other APIs."""
_decoder = msgspec.json.Decoder(_Body)
_DIGIT = re.compile(rb"[0-9]")
_LIST_OF_LISTS = re.compile(rb"\[[ \t\n\r]*\[")
"""The beginning of a JSON list of lists: several prompts, each a list of token ids."""


class PromptSize(NamedTuple):
    """Sizes of a prompt, from which its number of tokens is estimated."""

    json_bytes: int
    """Length of the prompt as JSON, in bytes."""
    file_bytes: tuple[int, ...]
    """Length of each embedded file (base64 ``data:`` URL) as JSON, in bytes. At most ``MAX_EMBEDDED_FILES``
    entries."""
    is_text: bool
    """Whether the prompt has no images, audio, video or files."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """A parsed generation request."""

    api: ClientApi
    stream: bool
    model: str | None
    program_id: str | None
    """Id of the request's program; ``None``: the request names no program."""
    context: AgenticContext | None
    """The client's hint; ``None``: there is no hint, or it cannot be read."""
    prompt: tuple[msgspec.Raw, ...]
    """The parts of the body that form the prompt, as JSON, roughly in the order of the prompt. They keep the
    body in memory."""
    size: PromptSize
    prompt_tokens: int | None
    """Number of prompt tokens if the prompt is given as token ids; ``None``: only the engine knows the
    number."""
    output_tokens: int
    """Maximum or expected length of the answer in tokens; 0: neither is given."""
    previous_response_id: str | None = None
    has_bad_hint: bool = False
    """Whether the request has a hint that cannot be read."""
    names_session: bool = False
    """Whether the body has a session id in ``session_id`` or ``vllm_xargs``, even if the hint or the header
    names the program."""
    is_batch: bool = False
    """Whether the prompt is a list of lists of token ids. ``prompt_tokens`` is then the sum of their
    lengths."""
    is_truncated: bool = False
    """Whether the client lets the engine truncate the prompt, for example to the longest context that it
    serves."""

    @property
    def is_exact(self) -> bool:
        """Whether ``prompt_tokens`` is the length of the prompt that the engine computes. False if the length
        is unknown or the sum of a batch, or if the engine may truncate the prompt."""
        return self.prompt_tokens is not None and not (self.is_batch or self.is_truncated)

    def without_prompt(self) -> GenerationRequest:
        """Return a copy of this request without ``prompt``, so that the body can be freed."""
        return msgspec.structs.replace(self, prompt=())

    def prefix(self) -> tuple[int, ...]:
        """Return hashes of the prompt's prefixes, one per piece of ``PREFIX_PIECE_BYTES``. Each hash covers
        its piece and all earlier pieces. A last piece that is shorter has no hash.

        Different prompts may have equal hashes, so the hashes only estimate what an engine has cached.
        """
        text = b"".join(bytes(part) for part in self.prompt)
        chain, found = 0, []
        for start in range(0, len(text) - PREFIX_PIECE_BYTES + 1, PREFIX_PIECE_BYTES):
            chain = zlib.crc32(text[start : start + PREFIX_PIECE_BYTES], chain)
            found.append(chain)
        return tuple(found)

    @property
    def parent_id(self) -> str | None:
        """Id of the program that started this request's program; ``None``: not stated."""
        return self.context.parent_program_id if self.context is not None else None

    @property
    def agent_type(self) -> str | None:
        """Agent type of the request's program; ``None``: not stated."""
        own = self.context.sojourn if self.context is not None else None
        return clipped(own.agent_type) if own is not None else None

    @property
    def is_last(self) -> bool:
        """Whether the client declares this to be the program's last turn."""
        own = self.context.sojourn if self.context is not None else None
        return own is not None and own.final


def parse_generation_request(api: ClientApi, body: bytes, session: str | None) -> GenerationRequest:
    """Parse a body. ``session``: value of the header ``X-Session-ID``; ``None``: no such header. Raises
    ``InvalidGenerationRequest``.

    The program's id comes from the first of these that has one: the hint, the field ``session_id``, the
    header, ``vllm_xargs``. vLLM's ``_get_session_id`` reads the last three in the same order. If the hint
    declares its program implicit, the request has no program.
    """
    try:
        return _parse(api, _decoder.decode(body), session)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(f"the body is not a request of {api.value}: {error}") from None


def _parse(api: ClientApi, read: _Body, session: str | None) -> GenerationRequest:
    """Build the ``GenerationRequest`` of a body. ``session``: value of the header ``X-Session-ID``; ``None``:
    no such header. Raises ``msgspec.DecodeError``."""
    xargs = read.vllm_xargs or _XArgs()
    in_body, beside = short_value(read.session_id), short_value(xargs.session_id)
    # vLLM neither reads nor forwards this member of a messages request.
    own = in_body if api is not ClientApi.MESSAGES else None
    named = next((name for name in (own, session, beside) if isinstance(name, str) and name), None)
    hint = short_value(xargs.agentic_context, MAX_HINT_JSON_BYTES)
    identity = read_identity(named, {CONTEXT_KEY: hint})
    is_completion = api is ClientApi.COMPLETIONS
    return GenerationRequest(
        api,
        short_value(read.stream) in (True, "true", "True", "1"),
        _text("model", read.model),
        identity.program_id,
        identity.context,
        tuple(getattr(read, name) for name in _PROMPT_FIELDS[api]),
        _measure(api, read),
        _count_ids(bytes(read.prompt)) if is_completion else None,
        _output_tokens(read, identity.context),
        _text("previous_response_id", read.previous_response_id),
        identity.outcome is Outcome.REJECTED,
        in_body is not None or beside is not None,
        is_completion and _LIST_OF_LISTS.match(read.prompt) is not None,
        _is_truncated(api, read),
    )


def _text(name: str, raw: msgspec.Raw) -> str | None:
    """Return the text of a field; ``None``: the field is missing or null. Raises ``msgspec.DecodeError``."""
    value = short_value(raw)
    if value is not None and not isinstance(value, str):
        kind = "array or object" if value is NOT_SCALAR else type(value).__name__
        raise msgspec.ValidationError(f"Expected `str | null`, got `{kind}` - at `$.{name}`")
    return value


def without_identity(body: bytes) -> bytes:
    """Return the body without the fields that name the request's program: hint and session ids. All other
    fields stay byte for byte. ``body``: a body that ``parse_generation_request`` accepted. Raises
    ``InvalidGenerationRequest``."""
    document = members_of(body)
    document.pop(SESSION_KEY, None)
    xargs = document.get("vllm_xargs")
    if xargs is not None and bytes(memoryview(xargs)[:1]) == b"{":
        members = members_of(xargs)
        if [members.pop(name, None) for name in (CONTEXT_KEY, SESSION_KEY)] != [None, None]:
            document["vllm_xargs"] = encode_raw(members)
    return msgspec.json.encode(document)


def with_names(
    body: bytes, rename: Callable[[str], str], change: Callable[[dict[str, msgspec.Raw]], None] | None
) -> bytes:
    """Return the body with changed session ids and a changed hint. If a field is repeated, the last one
    counts. Raises ``InvalidGenerationRequest``.

    ``body``: a body that ``parse_generation_request`` accepted. ``rename`` maps each session id to its
    replacement. ``change`` gets the fields of the hint and changes them in place; ``None``: the hint is
    removed.
    """
    document = members_of(body)
    _rename_session(document, rename)
    xargs = document.get("vllm_xargs")
    if xargs is not None and bytes(memoryview(xargs)[:1]) == b"{":
        members = members_of(xargs)
        _rename_session(members, rename)
        hint = members.pop(CONTEXT_KEY, None)
        if change is not None and hint is not None:
            members[CONTEXT_KEY] = _changed_hint(hint, change)
        document["vllm_xargs"] = encode_raw(members)
    return msgspec.json.encode(document)


def _changed_hint(hint: msgspec.Raw, change: Callable[[dict[str, msgspec.Raw]], None]) -> msgspec.Raw:
    """Apply ``change`` to the fields of a hint, and return the changed hint. A hint is a JSON object inside a
    JSON string."""
    text: str = msgspec.json.decode(hint, type=str)
    found = members_of(text.encode("utf-8", "replace"))
    change(found)
    return encode_raw(msgspec.json.encode(found).decode())


def _rename_session(members: dict[str, msgspec.Raw], rename: Callable[[str], str]) -> None:
    """Replace the session id in ``members``, in place. ``members``: the fields of a JSON object."""
    name = short_value(members.get(SESSION_KEY, msgspec.Raw(b"")))
    if isinstance(name, str) and name is not LONG_VALUE:  # a longer text is no id, so it names no program
        members[SESSION_KEY] = encode_raw(rename(name))


def _output_tokens(read: _Body, context: AgenticContext | None) -> int:
    """Return the maximum or the expected length of the answer in tokens, whichever is smaller; 0 if neither
    is given."""
    fields = (read.max_completion_tokens, read.max_tokens, read.max_output_tokens)
    limits = [short_value(raw) for raw in fields]
    limit = next((count for count in limits if _is_count(count)), None)
    expected = context.expected_output_length if context is not None else None
    # A number larger than any context is useless, and makes messages to a coordinator longer.
    counts = [count for count in (expected, limit) if _is_count(count)]
    return min(MAX_TOKENS, *counts) if counts else 0


def _is_truncated(api: ClientApi, read: _Body) -> bool:
    """Return ``GenerationRequest.is_truncated`` for a body."""
    if api is ClientApi.RESPONSES:
        return short_value(read.truncation) not in (None, "disabled")
    return short_value(read.truncate_prompt_tokens) is not None and api is not ClientApi.MESSAGES


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count_ids(prompt: bytes) -> int | None:
    """Return the number of token ids in a prompt that is given as JSON; ``None``: the prompt is text."""
    # The JSON is valid, so commas are counted. Parsing millions of numbers would block other clients.
    if not prompt.startswith(b"[") or b'"' in prompt:
        return None  # one or several texts
    has_ids = any(_DIGIT.search(text) for _, text in _slices(memoryview(prompt)))
    return prompt.count(b",") + 1 if has_ids else 0


INITIAL_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of JSON that are assumed for a model until enough prompts were counted. English has about
four characters per token."""
MIN_TOKENS_PER_BYTE, MAX_TOKENS_PER_BYTE = 0.05, 1.0
"""Bounds to which each learned sample of tokens per byte is clipped. They are wide enough for any
tokenizer."""
MEAN_WEIGHT = 0.1
"""Weight of the newest prompt in the moving mean of tokens per byte."""
MIN_SAMPLE_BYTES = 2_000
"""Minimum bytes of a prompt from which tokens per byte are learned. In shorter prompts most tokens come from
the chat template."""
MIN_PROMPTS = 8
"""Number of counted prompts that a tenant needs for a model before its own tokens per byte are used."""
MAX_MODELS = 64
"""Maximum number of models for which a tenant's tokens per byte are remembered."""
MAX_EMBEDDED_FILE_TOKENS = 1024
"""Maximum number of tokens that are counted for an embedded file. Vision models use about this many for an
image of a megapixel."""
MAX_EMBEDDED_FILES = 4096
"""Maximum number of embedded files that are looked for in each part of a prompt. The rest counts as text."""
_FILE_SIGN = b";base64,"
_FILE_HEAD = re.compile(
    rb'"[a-z_]{0,16}(?:url|data)"[ \t\n\r]*:[ \t\n\r]*"data:[^",]{1,100};base64,\Z',
)
"""A field with a base64 data URL, up to its data. Text does not match: quotes inside a text are escaped, and
fields with text have other names."""
_MAX_FILE_HEAD_BYTES = 256
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_\\-]*")
_MEDIA_PARTS = (b'"image_url"', b'"input_image"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"file"')


class _TokensPerByte(NamedTuple):
    """Tokens per byte of JSON, and the number of prompts behind them, at most ``MIN_PROMPTS``."""

    ratio: float
    prompts: int


class PromptSizeEstimator:
    """Estimates the number of tokens of a prompt: its length in bytes times the model's tokens per byte. The
    tokens per byte are a moving mean over the tenant's prompts whose tokens an engine has counted.

    A tenant with fewer than ``MIN_PROMPTS`` counted prompts for a model gets the median of the tenants that
    have enough. If fewer than ``MIN_SHARING_TENANTS`` tenants have enough, it gets
    ``INITIAL_TOKENS_PER_BYTE``. So no single tenant sets the estimates of another tenant.
    """

    def __init__(self) -> None:
        self._models: FrequentTenants[OrderedDict[str | None, _TokensPerByte]] = FrequentTenants(OrderedDict)
        """Tokens per byte by tenant and model. A tenant's least recently updated model is first."""

    def tokens(self, question: GenerationRequest, tenant: str = "") -> int:
        """Estimate the number of prompt tokens of a tenant's request, at least 1. If the request gives token
        ids, return their number."""
        if question.prompt_tokens is not None:
            return max(1, question.prompt_tokens)
        size = question.size
        ratio = self._ratio(tenant, question.model)
        files = sum(min(MAX_EMBEDDED_FILE_TOKENS, round(count * ratio)) for count in size.file_bytes)
        return max(1, round((size.json_bytes - sum(size.file_bytes)) * ratio) + files)

    def _ratio(self, tenant: str, model: str | None) -> float:
        """Return the tokens per byte for a tenant's prompts for a model."""
        known = {
            name: one.ratio
            for name, models in self._models.items()
            if (one := models.get(model)) is not None and one.prompts >= MIN_PROMPTS
        }
        shared = median_low(known.values()) if len(known) >= MIN_SHARING_TENANTS else INITIAL_TOKENS_PER_BYTE
        return known.get(tenant, shared)

    def learn(self, question: GenerationRequest, prompt_tokens: int, tenant: str = "") -> None:
        """Update the tenant's tokens per byte for the model. ``prompt_tokens``: the engine's count for this
        request.

        A prompt is ignored if it is short, is given as token ids, has images or other media, may be
        truncated, or continues a stored conversation.
        """
        size = question.size.json_bytes
        if question.prompt_tokens is not None or size < MIN_SAMPLE_BYTES or prompt_tokens <= 0:
            return
        # The body lacks earlier turns of a conversation, and an image's bytes do not tell its tokens.
        if question.previous_response_id is not None or not question.size.is_text or question.is_truncated:
            return
        ratio = min(MAX_TOKENS_PER_BYTE, max(MIN_TOKENS_PER_BYTE, prompt_tokens / size))
        models = self._models.observed(tenant)
        known = models.setdefault(question.model, _TokensPerByte(INITIAL_TOKENS_PER_BYTE, 0))
        models[question.model] = _TokensPerByte(
            known.ratio + MEAN_WEIGHT * (ratio - known.ratio), min(MIN_PROMPTS, known.prompts + 1)
        )
        models.move_to_end(question.model)
        if len(models) > MAX_MODELS:
            models.popitem(last=False)


def _measure(api: ClientApi, read: _Body) -> PromptSize:
    json_bytes, is_text = 0, True
    files: list[int] = []
    for name in _PROMPT_FIELDS[api]:
        part = memoryview(getattr(read, name))
        json_bytes += len(part)
        is_text = is_text and not _has_media(part)
        if name != "tools":  # tools are text, whatever their fields
            files += _embedded_file_bytes(part)
    return PromptSize(json_bytes, tuple(files[:MAX_EMBEDDED_FILES]), is_text)


def _slices(part: memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield (start, slice) for the slices of a part. Each slice also has the first 15 bytes of the next
    slice. So each string of up to 16 bytes lies within one slice."""
    for start in range(0, len(part), SLICE_BYTES):
        yield start, bytes(part[start : start + SLICE_BYTES + 15])


def _has_media(part: memoryview) -> bool:
    """Whether a part of a prompt has images, audio, video or files."""
    return any(sign in text for _, text in _slices(part) for sign in _MEDIA_PARTS)


def _embedded_file_bytes(part: memoryview) -> list[int]:
    """Return the lengths in bytes of the JSON fields of ``part`` that embed files. A length counts the base64
    text, not the decoded file. At most ``MAX_EMBEDDED_FILES`` lengths are returned."""
    found: list[int] = []
    end = 0  # end of the last sign or file
    signs = 0
    for start, text in _slices(part):
        while (at := text.find(_FILE_SIGN, max(0, end - start))) >= 0:
            signs += 1
            if signs > MAX_EMBEDDED_FILES:
                return found
            before, end = end, start + at + len(_FILE_SIGN)
            first = max(before, end - _MAX_FILE_HEAD_BYTES)
            head = _FILE_HEAD.search(bytes(part[first:end]))
            if head is None:
                continue
            close = _end_of_base64(part, end)
            if bytes(part[close : close + 1]) == b'"':
                end = close + 1
                found.append(end - first - head.start())
    return found


def _end_of_base64(part: memoryview, start: int) -> int:
    """Return the index of the first byte from ``start`` on that is not base64."""
    while start < len(part):
        text = bytes(part[start : start + SLICE_BYTES])
        match = _BASE64.match(text)
        count = match.end() if match is not None else 0
        start += count
        if count < len(text):
            break
    return start
