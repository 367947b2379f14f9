"""Reads token counts from the answer to an LLM request, without an extra request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_KEY = b'"usage"'
"""JSON key of the token counts. These bytes cannot occur in the text of an answer, since quotes inside a JSON
string are escaped."""
_OBJECT = re.compile(rb"[: \t\r\n]*\{")
_MAX_BYTES = 16 * 1024
"""Longest ``usage`` object that is read."""
_MAX_TRIES = 8
"""Maximum number of candidates that the search for the ``usage`` object parses."""


class TokenUsage(NamedTuple):
    """Token counts of one answer; ``None`` for a count that the answer lacks."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """The part of ``input_tokens`` found in the server's prefix cache."""


def of_answer(result: Any) -> TokenUsage | None:
    """Return the token counts of a complete answer, given as the client's own object or as a raw response.
    Returns ``None`` if the answer has none, or was not read."""
    usage = getattr(result, "usage", None)
    if usage is not None:
        return _usage(usage)
    for name in ("http_response", "response"):
        try:
            content = getattr(getattr(result, name, None), "content", None)
        except Exception:  # the HTTP library raises if the response was closed unread
            return None
        if isinstance(content, bytes):
            return of_tail(content)
    return None


def of_tail(tail: bytes) -> TokenUsage | None:
    """Return the token counts of the last ``usage`` object in ``tail``, the last bytes of an answer (streamed
    or not). Returns ``None`` if there is none."""
    end = len(tail)
    tries = 0
    while tries < _MAX_TRIES and (at := tail.rfind(_KEY, 0, end)) >= 0:
        end = at
        start = _OBJECT.match(tail, at + len(_KEY))
        if start is None:
            continue
        tries += 1
        begin = start.end() - 1
        text = tail[begin : begin + _MAX_BYTES].decode("utf-8", "replace")
        try:
            found, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        return _usage(found)
    return None


def _usage(given: Any) -> TokenUsage | None:
    """Return the token counts in a ``usage`` object of the OpenAI API (chat, completions or Responses) or of
    Anthropic's Messages. Returns ``None`` if it has no counts."""
    details = _of(given, "prompt_tokens_details", "input_tokens_details")
    input_tokens = _count(_of(given, "prompt_tokens", "input_tokens"))
    cached = _count(_of(details, "cached_tokens"))
    if _of(given, "prompt_tokens") is None and details is None and input_tokens is not None:
        # Anthropic counts as input what the cache neither had nor took in.
        cached = _count(_of(given, "cache_read_input_tokens"))
        input_tokens += (cached or 0) + (_count(_of(given, "cache_creation_input_tokens")) or 0)
    usage = TokenUsage(input_tokens, _count(_of(given, "completion_tokens", "output_tokens")), cached)
    return None if usage == TokenUsage() else usage


def _of(holder: Any, *names: str) -> Any:
    for name in names:
        value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
        if value is not None:
            return value
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
