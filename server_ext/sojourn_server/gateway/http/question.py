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

from ...engine.hint import clipped
from ...engine.identity import CONTEXT_KEY, read_identity
from .apis import Api

MOST_TOKENS = 2**31
PIECE_BYTES = 1024
"""About 16 of vLLM's blocks."""
SESSION_KEY = "session_id"
"""Where a body names its program without a hint: a member of it, or of its ``vllm_xargs``."""


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
    session_id: Any = None
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
    names_session: bool = False
    """The body names its program besides its hint."""
    is_batch: bool = False
    """Several prompts in one request; ``prompt_tokens`` is the sum of theirs."""

    @property
    def is_exact(self) -> bool:
        """So many tokens have to fit into one context."""
        return self.prompt_tokens is not None and not self.is_batch

    def of(self, body: bytes) -> Question:
        """The same question of another body with the same prompt. It keeps that body in memory, as every
        question does its own, and no longer the one before."""
        return msgspec.structs.replace(self, prompt=_prompt(_decoder.decode(body)))

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
        return clipped(own.agent_type) if own is not None else None

    @property
    def is_last(self) -> bool:
        """Its program's client says that no turn follows."""
        own = self.context.sojourn if self.context is not None else None
        return own is not None and own.final


def read_question(api: Api, body: bytes, session: str | None) -> Question:
    """``session``: the header ``X-Session-ID``. Raises ``BadQuestion``.

    Of several names of its program the engine's order decides: the hint's, the body's, the header's, that of
    ``vllm_xargs`` (vLLM, ``_get_session_id``).
    """
    try:
        read = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQuestion(f"the body is no request of {api.value}: {error}") from None
    # Of messages vLLM reads no member of this name, and passes none on.
    own = read.session_id if api is not Api.MESSAGES else None
    beside = read.vllm_xargs.get(SESSION_KEY) if read.vllm_xargs else None
    named = next((name for name in (own, session, beside) if isinstance(name, str) and name), None)
    identity = read_identity(named, read.vllm_xargs)
    expected = identity.context.expected_output_length if identity.context is not None else None
    told = (expected, read.max_completion_tokens, read.max_tokens, read.max_output_tokens)
    return Question(
        read.stream in (True, "true", "True", "1"),
        read.model,
        identity.program_id,
        identity.context,
        _prompt(read),
        _count_ids(bytes(read.prompt)) if api is Api.COMPLETIONS else None,
        # What no context holds is not worth the words on their way to a coordinator.
        min(MOST_TOKENS, next((count for count in told if _is_count(count)), 0)),
        read.previous_response_id,
        identity.outcome is Outcome.REJECTED,
        read.session_id is not None or beside is not None,
        _opens_twice(bytes(memoryview(read.prompt)[:64])),
    )


def members_of(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Of an object as JSON. Raises ``BadQuestion``: names that were passed over when the body was read need
    be no text."""
    try:
        return _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQuestion(f"the body has an object whose members cannot be read: {error}") from None


def without_identity(body: bytes) -> bytes:
    """The same request of no program, of a body that ``read_question`` has read. What it says besides is kept
    as it came: nothing else of it has been looked at, or is. Raises ``BadQuestion``."""
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
    """The same request, of a body that ``read_question`` has read, with what ``of`` makes of its sessions and
    ``change`` of its hint's members; ``None``: it has no hint then. Raises ``BadQuestion``.

    Of a member that is there twice the last counts.
    """
    document = members_of(body)
    _rename_session(document, of)
    xargs = document.get("vllm_xargs")
    if xargs is not None and bytes(xargs).startswith(b"{"):
        members = members_of(xargs)
        _rename_session(members, of)
        hint = members.pop(CONTEXT_KEY, None)
        if change is not None and hint is not None:
            members[CONTEXT_KEY] = _changed(hint, change)
        document["vllm_xargs"] = _raw(members)
    return msgspec.json.encode(document)


def with_hint(body: bytes, change: Callable[[dict[str, msgspec.Raw]], None]) -> bytes:
    """The same request, of a body whose hint ``read_question`` has read, with what ``change`` makes of the
    hint's members. Raises ``BadQuestion``."""
    return with_names(body, str, change)


def _changed(hint: msgspec.Raw, change: Callable[[dict[str, msgspec.Raw]], None]) -> msgspec.Raw:
    text: str = msgspec.json.decode(hint, type=str)
    found = members_of(text.encode("utf-8", "replace"))
    change(found)
    return _raw(msgspec.json.encode(found).decode())


def _rename_session(members: dict[str, msgspec.Raw], of: Callable[[str], str]) -> None:
    raw = members.get(SESSION_KEY)
    if raw is not None and bytes(raw).startswith(b'"'):
        members[SESSION_KEY] = _raw(of(msgspec.json.decode(raw, type=str)))


def _opens_twice(prompt: bytes) -> bool:
    return prompt.startswith(b"[") and prompt[1:].lstrip().startswith(b"[")


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _prompt(read: _Body) -> tuple[msgspec.Raw, ...]:
    return (read.tools, read.system, read.instructions, read.messages, read.input, read.prompt)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count_ids(prompt: bytes) -> int | None:
    # It is valid JSON. Numbers are not read one by one: there may be millions, and clients wait meanwhile.
    if not prompt.startswith(b"[") or b'"' in prompt:
        return None  # one text, or several
    return prompt.count(b",") + 1 if any(48 <= byte <= 57 for byte in prompt[:64]) else 0
