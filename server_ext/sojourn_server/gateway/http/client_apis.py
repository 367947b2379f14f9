"""The client APIs, and how each reports an error: instead of an answer, or inside a stream."""

from __future__ import annotations

import json
from enum import Enum


class ClientApi(Enum):
    """By the path under which engines serve it."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(api: ClientApi | None, status: int, code: str, message: str) -> bytes:
    """An error as JSON in an API's format; ``api`` ``None``: OpenAI's."""
    kind = _TYPES.get(status, "api_error")
    if api is ClientApi.MESSAGES:
        return _json({"type": "error", "error": {"type": kind, "message": message}})
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error_event(api: ClientApi, code: str, message: str) -> bytes:
    """Events that end a broken stream with an error; to be sent after a complete event."""
    if api is ClientApi.RESPONSES:
        told = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + _json(told) + b"\n\n"
    if api is ClientApi.MESSAGES:
        failed = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + _json(failed) + b"\n\n"
    event = {"error": {"message": message, "type": code, "param": None, "code": 502}}
    return b"data: " + _json(event) + b"\n\ndata: [DONE]\n\n"


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
