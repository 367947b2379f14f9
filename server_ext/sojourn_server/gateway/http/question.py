"""What a gateway reads of a request: whose it is, how long it is, whether its answer is a stream.

The body goes on to the engine byte for byte. Of what it says only what is listed here is looked at, and
nothing of it is believed about who pays.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec
from sojourn.hints import AgenticContext
from sojourn.wire import Outcome

from ...engine.identity import CONTEXT_KEY, read_identity
from .apis import Api

MOST_TOKENS = 2**31
PIECE_BYTES = 1024
"""About 16 of vLLM's blocks."""


class BadQuestion(ValueError):
    """The body is no request of this API; the text says what was wrong and what was expected."""


class _Body(msgspec.Struct):
    stream: Any = None
    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    vllm_xargs: dict[str, Any] | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(_Body)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Question(msgspec.Struct, frozen=True):
    """One request, as far as it matters where it goes."""

    stream: bool
    model: str | None
    program_id: str | None
    context: AgenticContext | None
    prompt: tuple[msgspec.Raw, ...]
    """The parts of the body that become the prompt, roughly in its order."""
    prompt_tokens: int | None
    """Where the prompt came as token ids; ``None``: known only to the engine."""
    output_tokens: int
    """At most, or as many as its client expects; 0: not said."""
    previous_response_id: str | None = None
    has_bad_hint: bool = False
    """There is one, and it cannot be read."""

    @property
    def prompt_bytes(self) -> int:
        """Of JSON."""
        return sum(len(bytes(part)) for part in self.prompt)

    def prefix(self) -> tuple[int, ...]:
        """Hashes of its prompt's pieces, each of one and all before it; the last, shorter one is left out.

        Two that differ may have the same hash: it is a guess at what an engine has, and no more.
        """
        text = b"".join(bytes(part) for part in self.prompt)
        chain, found = 0, []
        for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
            chain = zlib.crc32(text[start : start + PIECE_BYTES], chain)
            found.append(chain)
        return tuple(found)

    @property
    def parent_id(self) -> str | None:
        """The program that started this one."""
        return self.context.parent_program_id if self.context is not None else None

    @property
    def agent_type(self) -> str | None:
        """The kind of program."""
        own = self.context.sojourn if self.context is not None else None
        return own.agent_type if own is not None else None

    @property
    def is_last(self) -> bool:
        """Its program's client says that no turn follows."""
        own = self.context.sojourn if self.context is not None else None
        return own is not None and own.final


def read_question(api: Api, body: bytes, session: str | None) -> Question:
    """``session``: the header ``X-Session-ID``. Raises ``BadQuestion``."""
    try:
        read = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQuestion(f"the body is no request of {api.value}: {error}") from None
    identity = read_identity(session, read.vllm_xargs)
    expected = identity.context.expected_output_length if identity.context is not None else None
    told = (expected, read.max_completion_tokens, read.max_tokens, read.max_output_tokens)
    return Question(
        read.stream in (True, "true", "True", "1"),
        read.model,
        identity.program_id,
        identity.context,
        (read.tools, read.system, read.instructions, read.messages, read.input, read.prompt),
        _count_ids(bytes(read.prompt)) if api is Api.COMPLETIONS else None,
        # What no context holds is not worth the words on their way to a coordinator.
        min(MOST_TOKENS, next((count for count in told if _is_count(count)), 0)),
        read.previous_response_id,
        identity.outcome is Outcome.REJECTED,
    )


def without_identity(body: bytes) -> bytes:
    """The same request of no program, of a body that ``read_question`` has read. What it says besides is kept
    as it came: nothing else of it has been looked at, or is."""
    document = _members.decode(body)
    xargs = bytes(document.get("vllm_xargs", b""))
    if xargs.startswith(b"{"):
        members = _members.decode(xargs)
        if members.pop(CONTEXT_KEY, None) is not None:
            document["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(members))
    return msgspec.json.encode(document)


def with_hint(body: bytes, change: Callable[[dict[str, msgspec.Raw]], None]) -> bytes:
    """The same request, of a body whose hint ``read_question`` has read, with what ``change`` makes of the
    hint's members. Of a member that is there twice the last counts."""
    document = _members.decode(body)
    xargs = _members.decode(document["vllm_xargs"])
    text: str = msgspec.json.decode(xargs[CONTEXT_KEY], type=str)
    hint = _members.decode(text.encode("utf-8", "replace"))
    change(hint)
    xargs[CONTEXT_KEY] = msgspec.Raw(msgspec.json.encode(msgspec.json.encode(hint).decode()))
    document["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(xargs))
    return msgspec.json.encode(document)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count_ids(prompt: bytes) -> int | None:
    # It is valid JSON. Numbers are not read one by one: there may be millions, and clients wait meanwhile.
    if not prompt.startswith(b"[") or b'"' in prompt:
        return None  # one text, or several
    return prompt.count(b",") + 1 if any(48 <= byte <= 57 for byte in prompt[:64]) else 0
