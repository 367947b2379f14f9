"""Parses the parts of a generation request that routing needs: its program, its length, whether it streams.

Only the fields of ``_Body`` are read; all other fields reach the engine byte for byte. The body does not
determine the tenant: only the API key does.
"""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec
from sojourn.errors import InputError
from sojourn.hints import AgenticContext
from sojourn.wire_codec import Outcome

from ...core.request_hints import CONTEXT_KEY, clipped, read_identity
from .client_apis import ClientApi

MAX_TOKENS = 2**31
"""Upper bound of ``GenerationRequest.output_tokens``."""
PREFIX_PIECE_BYTES = 1024
"""Bytes of each piece into which a prompt is divided for its prefix hashes. A piece is about as long as 16 of
vLLM's blocks."""
SESSION_KEY = "session_id"
"""Field of a body, or of its ``vllm_xargs``, that names the program of a request without a hint."""


class InvalidGenerationRequest(InputError):
    """The body is not a request of its API. The text says what was wrong and what was expected."""


class _Body(msgspec.Struct):
    """The fields of all APIs' bodies that the gateway reads."""

    stream: Any = None
    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    session_id: Any = None
    vllm_xargs: dict[str, Any] | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(_Body)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class GenerationRequest(msgspec.Struct, frozen=True):
    """A parsed generation request."""

    stream: bool
    model: str | None
    program_id: str | None
    """Id of the request's program; ``None``: the request names none."""
    context: AgenticContext | None
    """The client's hint; ``None``: there is none, or it cannot be read."""
    prompt: tuple[msgspec.Raw, ...]
    """The parts of the body that form the prompt, as JSON, roughly in the order of the prompt."""
    prompt_tokens: int | None
    """Length of a prompt that is given as token ids; ``None``: only the engine knows the length."""
    output_tokens: int
    """Maximum or expected length of the answer; 0: none given."""
    previous_response_id: str | None = None
    has_bad_hint: bool = False
    """Whether the request has a hint that cannot be read."""
    names_session: bool = False
    """Whether the body has a session id outside the hint, whether or not that id names the program."""
    is_batch: bool = False
    """Whether the request has several prompts as lists of token ids. ``prompt_tokens`` is then their sum."""

    @property
    def is_exact(self) -> bool:
        """Whether ``prompt_tokens`` is known and is the length of a single prompt."""
        return self.prompt_tokens is not None and not self.is_batch

    def with_body(self, body: bytes) -> GenerationRequest:
        """Return a copy of this request whose ``prompt`` refers to ``body`` instead of the earlier body, so
        that the earlier body can be freed. Both bodies must contain the same prompt."""
        return msgspec.structs.replace(self, prompt=_prompt(_decoder.decode(body)))

    @property
    def prompt_bytes(self) -> int:
        """Length of the prompt as JSON, in bytes."""
        return sum(len(bytes(part)) for part in self.prompt)

    def prefix(self) -> tuple[int, ...]:
        """Hashes of the prompt's prefixes, one per piece of ``PREFIX_PIECE_BYTES``. Each hash covers its
        piece and all earlier pieces. A shorter last piece has no hash.

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
    """Parse a body. ``session``: value of the header ``X-Session-ID``. Raises ``InvalidGenerationRequest``.

    A request may name its program in several places. The first of these places wins: the hint, the body, the
    header, ``vllm_xargs``. The last three are in the order of vLLM's ``_get_session_id``.
    """
    try:
        read = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(f"the body is not a request of {api.value}: {error}") from None
    # vLLM neither reads nor forwards this member of a messages request.
    own = read.session_id if api is not ClientApi.MESSAGES else None
    beside = read.vllm_xargs.get(SESSION_KEY) if read.vllm_xargs else None
    named = next((name for name in (own, session, beside) if isinstance(name, str) and name), None)
    identity = read_identity(named, read.vllm_xargs)
    expected = identity.context.expected_output_length if identity.context is not None else None
    told = (expected, read.max_completion_tokens, read.max_tokens, read.max_output_tokens)
    return GenerationRequest(
        read.stream in (True, "true", "True", "1"),
        read.model,
        identity.program_id,
        identity.context,
        _prompt(read),
        _count_ids(bytes(read.prompt)) if api is ClientApi.COMPLETIONS else None,
        # A number larger than any context is useless, and makes messages to a coordinator longer.
        min(MAX_TOKENS, next((count for count in told if _is_count(count)), 0)),
        read.previous_response_id,
        identity.outcome is Outcome.REJECTED,
        read.session_id is not None or beside is not None,
        _has_several_prompts(bytes(memoryview(read.prompt)[:64])),
    )


def members_of(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, as raw JSON. Raises ``InvalidGenerationRequest`` if a field is not valid
    JSON.

    This can happen even to a body of a parsed request, because that parser skips unknown fields.
    """
    try:
        return _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(
            f"the body has an object whose members cannot be read: {error}"
        ) from None


def without_identity(body: bytes) -> bytes:
    """The body of a parsed request without the fields that name its program: hint and session ids. All other
    fields stay byte for byte. Raises ``InvalidGenerationRequest``."""
    document = members_of(body)
    document.pop(SESSION_KEY, None)
    xargs = document.get("vllm_xargs")
    if xargs is not None and bytes(xargs).startswith(b"{"):
        members = members_of(xargs)
        if [members.pop(name, None) for name in (CONTEXT_KEY, SESSION_KEY)] != [None, None]:
            document["vllm_xargs"] = _raw(members)
    return msgspec.json.encode(document)


def with_names(
    body: bytes, of: Callable[[str], str], change: Callable[[dict[str, msgspec.Raw]], None] | None
) -> bytes:
    """The body of a parsed request with other program names in it.

    ``of`` maps each session id to its replacement. ``change`` is called with the fields of the hint and
    changes them; ``None``: the hint is removed. If a field is repeated, the last one counts. Raises
    ``InvalidGenerationRequest``."""
    document = members_of(body)
    _rename_session(document, of)
    xargs = document.get("vllm_xargs")
    if xargs is not None and bytes(xargs).startswith(b"{"):
        members = members_of(xargs)
        _rename_session(members, of)
        hint = members.pop(CONTEXT_KEY, None)
        if change is not None and hint is not None:
            members[CONTEXT_KEY] = _changed_hint(hint, change)
        document["vllm_xargs"] = _raw(members)
    return msgspec.json.encode(document)


def with_hint(body: bytes, change: Callable[[dict[str, msgspec.Raw]], None]) -> bytes:
    """The body of a parsed request with a changed hint. ``change`` is called with the fields of the hint and
    changes them. Raises ``InvalidGenerationRequest``."""
    return with_names(body, str, change)


def _changed_hint(hint: msgspec.Raw, change: Callable[[dict[str, msgspec.Raw]], None]) -> msgspec.Raw:
    """The hint after ``change``. A hint is a JSON object inside a JSON string."""
    text: str = msgspec.json.decode(hint, type=str)
    found = members_of(text.encode("utf-8", "replace"))
    change(found)
    return _raw(msgspec.json.encode(found).decode())


def _rename_session(members: dict[str, msgspec.Raw], of: Callable[[str], str]) -> None:
    raw = members.get(SESSION_KEY)
    if raw is not None and bytes(raw).startswith(b'"'):
        members[SESSION_KEY] = _raw(of(msgspec.json.decode(raw, type=str)))


def _has_several_prompts(prompt: bytes) -> bool:
    """Whether a prompt, as JSON, is a list of lists of token ids, so that it has several prompts."""
    return prompt.startswith(b"[") and prompt[1:].lstrip().startswith(b"[")


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _prompt(read: _Body) -> tuple[msgspec.Raw, ...]:
    """The fields that form the prompt, in any API; an absent field is empty."""
    return (read.tools, read.system, read.instructions, read.messages, read.input, read.prompt)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count_ids(prompt: bytes) -> int | None:
    """Number of token ids in a prompt, as JSON; ``None``: the prompt is text."""
    # The JSON is valid. Reading millions of numbers one by one would block other clients.
    if not prompt.startswith(b"[") or b'"' in prompt:
        return None  # one or several texts
    return prompt.count(b",") + 1 if any(48 <= byte <= 57 for byte in prompt[:64]) else 0


INITIAL_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of JSON, assumed for a model until an engine has counted the tokens of a prompt. English
has about four characters per token."""
MIN_TOKENS_PER_BYTE, MAX_TOKENS_PER_BYTE = 0.05, 1.0
"""Bounds of a learned sample of tokens per byte, wide enough for any tokenizer."""
MEAN_WEIGHT = 0.1
"""Weight of the newest prompt in the moving mean of tokens per byte."""
MIN_SAMPLE_BYTES = 2_000
"""Minimum size of a prompt from which tokens per byte are learned. In shorter prompts most tokens come from
the chat template."""
MAX_MODELS = 64
"""Maximum number of models whose tokens per byte are remembered."""
_INLINE_DATA = re.compile(rb'"data:[^"]*"')
_MEDIA_PARTS = (b'"image_url"', b'"input_image"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"file"')


class PromptSizeEstimator:
    """Estimates the number of tokens of a prompt: its length in bytes times the model's tokens per byte. The
    tokens per byte are a moving mean over prompts whose tokens an engine has counted."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str | None, float] = OrderedDict()

    def tokens(self, question: GenerationRequest) -> int:
        """Estimated number of prompt tokens of a request, at least 1."""
        if question.prompt_tokens is not None:
            return max(1, question.prompt_tokens)
        return max(
            1, round(_text_bytes(question) * self._ratios.get(question.model, INITIAL_TOKENS_PER_BYTE))
        )

    def learn(self, question: GenerationRequest, prompt_tokens: int) -> None:
        """Update the model's tokens per byte. ``prompt_tokens``: the engine's count for this request. Prompts
        that are short, not only text, or continue a stored conversation are ignored."""
        size = question.prompt_bytes
        if question.prompt_tokens is not None or size < MIN_SAMPLE_BYTES or prompt_tokens <= 0:
            return
        # The body lacks earlier turns of a conversation, and an image's bytes do not tell its tokens.
        if question.previous_response_id is not None or _has_more_than_text(question):
            return
        ratio = min(MAX_TOKENS_PER_BYTE, max(MIN_TOKENS_PER_BYTE, prompt_tokens / size))
        known = self._ratios.get(question.model, INITIAL_TOKENS_PER_BYTE)
        self._ratios[question.model] = known + MEAN_WEIGHT * (ratio - known)
        if len(self._ratios) > MAX_MODELS:
            self._ratios.popitem(last=False)


def _has_more_than_text(question: GenerationRequest) -> bool:
    """Whether the prompt has images, audio, video or files."""
    return any(sign in bytes(part) for part in question.prompt for sign in _MEDIA_PARTS)


def _text_bytes(question: GenerationRequest) -> int:
    """Length of the prompt as JSON, in bytes, without embedded files (``data:`` URLs)."""
    left_out = 0
    for part in question.prompt:
        text = bytes(part)
        if b'"data:' in text:
            left_out += sum(len(found.group()) for found in _INLINE_DATA.finditer(text))
    return question.prompt_bytes - left_out
