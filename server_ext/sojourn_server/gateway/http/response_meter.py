"""Reads an answer while it passes through the gateway: token counts, id, and the ends of streamed events."""

from __future__ import annotations

import re

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,18})(?!\d)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,18})(?!\d)')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
_TAIL_BYTES = 4096
"""Number of bytes kept of an answer's end, which has the token counts."""
_HEAD_BYTES = 2048
"""Number of bytes kept of an answer's beginning, which has the id."""
_ENDS = (b"\n\n", b"\r\n\r\n")
"""Byte sequences that end an event of a stream."""
_MOST_HELD_BYTES = 1 << 20
"""Maximum bytes of an event that is held back until it is complete. A longer event is passed on in parts."""


class ResponseMeter:
    """Reads token counts and id from the chunks of one answer. Any content is accepted.

    ``stream``: whether the answer is a stream of server-sent events."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._tail = b""
        self._head = b""
        self._events = 0

    def add_chunk(self, chunk: bytes) -> None:
        """Read the next chunk of the answer."""
        if self._stream:
            self._events += chunk.count(b"data:")
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]

    def counts(self) -> tuple[int | None, int]:
        """Return the engine's counts of (prompt tokens, output tokens). If it reports none: ``None``, and the
        number of a stream's events minus one, or 0 if the answer is not a stream."""
        output = _last(_OUTPUT, self._tail)
        return _last(_PROMPT, self._tail), max(0, self._events - 1) if output is None else output

    @property
    def response_id(self) -> str | None:
        """Id of an answer of the responses API; ``None``: there is none."""
        found = _RESPONSE_ID.search(self._head)
        return found.group(1).decode("utf-8", "replace") if found else None


def parse_prompt_tokens(answer: bytes) -> int | None:
    """Return the engine's count of prompt tokens in a complete answer; ``None``: not reported."""
    return _last(_PROMPT, answer)


class SseEventBuffer:
    """Holds back the incomplete event at the end of a stream, so that an error event can be sent at any
    time."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, chunk: bytes) -> bytes:
        """Add a chunk. Return the bytes that may be sent now: up to the end of the last complete event."""
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
        """Return the bytes still held back. Call this after the stream has ended regularly."""
        held, self._held = self._held, b""
        return held


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    """Return the number in the last match of a pattern; ``None``: there is no match."""
    found = pattern.findall(text)
    return int(found[-1]) if found else None
