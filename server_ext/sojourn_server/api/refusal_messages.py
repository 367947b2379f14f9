"""Error texts of requests that the placement policy rejected, in the format of their routes."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

REFUSAL_STATUS = 503
REFUSAL_ERROR_TYPE = "ServiceUnavailableError"
"""vLLM's error type for a request that may be repeated."""
REFUSAL_RETRY_RANGE_S = (15, 45)
"""Shortest and longest ``Retry-After``. Capacity becomes free when a program ends or idles, after a turn or
more. OpenAI's clients wait for a minute at most."""

# One event a chunk, as vLLM's routes write them.
_EVENT = re.compile(rb"((?:event: error\r?\n)?data: )(\{.*\})(\r?\n\r?\n)", re.DOTALL)
ERROR_EVENT_PREFIXES = (b'data: {"error"', b"event: error")
"""Beginnings of a chunk that may be an error event; the filter checks nothing else of a stream's chunks."""


def refusal_message(waited_s: float) -> str:
    """Text for the client: the reason and the next step."""
    return (
        f"The request was rejected: for {waited_s:g} s (gate_timeout_s) the device had no capacity for "
        "the KV cache of its program. Nothing was computed. Send it again later, end finished programs, "
        "or run fewer at a time; the operator can give the KV cache more memory or raise gate_timeout_s."
    )


def retry_after_s(request_id: str) -> int:
    """Seconds until a rejected request should be sent again; a function of its id.

    Requests that arrive together are rejected together; different delays keep them from returning together.
    """
    first_s, last_s = REFUSAL_RETRY_RANGE_S
    return first_s + zlib.crc32(request_id.encode("utf-8", "replace")) % (last_s - first_s + 1)


def rewrite_error(error_text: bytes, message: str) -> bytes | None:
    """The JSON of an error with ``message`` as its text; ``None`` if ``error_text`` is no error."""
    try:
        document: Any = json.loads(error_text)
    except (ValueError, RecursionError):
        return None
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return None
    new = {**error, "message": message, "type": REFUSAL_ERROR_TYPE}
    if "code" in error:  # not in errors of the messages route
        new["code"] = REFUSAL_STATUS
    return _json({**document, "error": new})


def rewrite_error_event(chunk: bytes, message: str) -> bytes | None:
    """Like ``rewrite_error`` for a stream's event; ``None`` if ``chunk`` is not exactly one error event."""
    found = _EVENT.fullmatch(chunk)
    if found is None:
        return None
    before, text, after = found.groups()
    new = rewrite_error(text, message)
    return None if new is None else before + new + after


def responses_error_event(message: str, sequence_number: int) -> bytes:
    """An error event of the responses route."""
    event = {
        "type": "error",
        "code": REFUSAL_ERROR_TYPE,
        "message": message,
        "param": None,
        "sequence_number": sequence_number,
    }
    return b"event: error\ndata: " + _json(event) + b"\n\n"


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
