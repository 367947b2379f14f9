"""What a client reads of a request that placement refused, in the error that its route would have sent."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

STATUS = 503
ERROR_TYPE = "ServiceUnavailableError"
"""vLLM's own word for a request that failed and may be sent again."""
RETRY_AFTER_S = (15, 45)
"""From and to. A place is free once some program goes or rests, which takes a turn or more. OpenAI's clients
heed at most a minute."""

# One event a chunk, as vLLM's routes write them.
_EVENT = re.compile(rb"((?:event: error\r?\n)?data: )(\{.*\})(\r?\n\r?\n)", re.DOTALL)
EVENT_STARTS = (b'data: {"error"', b"event: error")
"""How a chunk begins that may be such an event: all that other chunks of a stream are looked at for."""


def message(waited_s: float) -> str:
    """Why, and what to do about it."""
    return (
        f"The request was refused: for {waited_s:g} s (gate_timeout_s) there was no place on the device for "
        "the KV cache of its program. Nothing was computed. Send it again later, end programs that are done, "
        "or run fewer at a time; the operator can give the KV cache more memory or raise gate_timeout_s."
    )


def retry_after_s(request_id: str) -> int:
    """When to send a refused request again: each at a time of its own, the same whenever it is asked for.

    Those who came together are refused together, and would come back together.
    """
    first_s, last_s = RETRY_AFTER_S
    return first_s + zlib.crc32(request_id.encode("utf-8", "replace")) % (last_s - first_s + 1)


def reworded(error_text: bytes, told: str) -> bytes | None:
    """The JSON of an error with ``told`` in it, in the same shape; ``None`` where it is no error's."""
    try:
        document: Any = json.loads(error_text)
    except (ValueError, RecursionError):
        return None
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return None
    new = {**error, "message": told, "type": ERROR_TYPE}
    if "code" in error:  # not in errors of the messages route
        new["code"] = STATUS
    return _json({**document, "error": new})


def reworded_event(chunk: bytes, told: str) -> bytes | None:
    """The same for the event of a stream; ``None`` where it is not one event with an error."""
    found = _EVENT.fullmatch(chunk)
    if found is None:
        return None
    before, text, after = found.groups()
    new = reworded(text, told)
    return None if new is None else before + new + after


def responses_event(told: str, sequence_number: int) -> bytes:
    """An error event of the responses route."""
    event = {
        "type": "error",
        "code": ERROR_TYPE,
        "message": told,
        "param": None,
        "sequence_number": sequence_number,
    }
    return b"event: error\ndata: " + _json(event) + b"\n\n"


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
