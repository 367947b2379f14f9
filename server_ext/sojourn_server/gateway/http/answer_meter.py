"""What an answer tells of itself as it goes by: its tokens, its id, and where its events end."""

from __future__ import annotations

import re

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
_TAIL_BYTES = 4096
"""Usage is told at the end of an answer."""
_HEAD_BYTES = 2048
"""And its id at the beginning."""
_ENDS = (b"\n\n", b"\r\n\r\n")
"""Of an event."""
_MOST_HELD_BYTES = 1 << 20
"""A longer event is no longer waited for as a whole."""


class AnswerMeter:
    """Looks at the chunks of one answer. Never fails on what it finds."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._tail = b""
        self._head = b""
        self._events = 0

    def saw(self, chunk: bytes) -> None:
        """The next part."""
        if self._stream:
            self._events += chunk.count(b"data:")
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]

    @property
    def prompt_tokens(self) -> int | None:
        """As the engine counted them; ``None``: it has not said."""
        return _last(_PROMPT, self._tail)

    @property
    def output_tokens(self) -> int:
        """As the engine counted them, else one for each event of a stream."""
        told = _last(_OUTPUT, self._tail)
        return told if told is not None else max(0, self._events - 1)

    @property
    def response_id(self) -> str | None:
        """Of an answer of the responses API."""
        found = _RESPONSE_ID.search(self._head)
        return found.group(1).decode("utf-8", "replace") if found else None


def prompt_tokens_of(answer: bytes) -> int | None:
    """Of a whole answer, as the engine counted them; ``None``: it has not said."""
    return _last(_PROMPT, answer)


class WholeEvents:
    """Lets a stream through up to the end of its last whole event, so that an error can follow any time."""

    def __init__(self) -> None:
        self._held = b""

    def through(self, chunk: bytes) -> bytes:
        """What may go on to the client now."""
        if self._held:
            chunk, self._held = self._held + chunk, b""
        if chunk.endswith(_ENDS):
            return chunk
        end = max((chunk.rfind(mark) + len(mark) for mark in _ENDS if mark in chunk), default=0)
        if len(chunk) - end > _MOST_HELD_BYTES:
            return chunk
        self._held = chunk[end:]
        return chunk[:end]

    def rest(self) -> bytes:
        """What is left when the stream has ended by itself."""
        held, self._held = self._held, b""
        return held


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
