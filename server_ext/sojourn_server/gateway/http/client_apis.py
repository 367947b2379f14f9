"""The client APIs that the gateway serves, and the gateway's own error answers in the format of each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from ...api.api_errors import RETRY_AFTER_S, ApiError
from ...api.openapi import PREFIX

GATEWAY = "X-Sojourn-Gateway"
"""Header that marks the gateway's own answers, which a proxy in front of it does not send."""


class ClientApi(Enum):
    """A client API. The value of each member is the path under which engines serve that API."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""``type`` of an error answer, by HTTP status; of others ``invalid_request_error`` or ``api_error``."""


def error_body(api: ClientApi | None, status: int, code: str, message: str) -> bytes:
    """Return the JSON body of an error answer in the format of ``api``; ``None``: OpenAI's format."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if api is ClientApi.MESSAGES:
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error_event(api: ClientApi, code: str, message: str) -> bytes:
    """Return the server-sent events that end a broken stream with an error, in the format of ``api``. The
    stream's earlier bytes must end with a complete event."""
    failed: dict[str, Any]
    if api is ClientApi.RESPONSES:
        failed = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
    elif api is ClientApi.MESSAGES:
        failed = {"type": "error", "error": {"type": "api_error", "message": message}}
    else:
        failed = {"error": {"message": message, "type": code, "param": None, "code": 502}}
        return b"data: " + msgspec.json.encode(failed) + b"\n\ndata: [DONE]\n\n"
    return b"event: error\ndata: " + msgspec.json.encode(failed) + b"\n\n"


INVALID_KEY = "invalid_api_key"
GATEWAY_FULL = "gateway_full"
"""Error code: the gateway holds too many request bodies."""
GATEWAY_FAILED = "gateway_failed"
GATEWAY_STOPPING = "gateway_stopping"
REPLICA_LOST = "replica_lost"
GATEWAY_ERROR_CODES = (
    INVALID_KEY, "bad_request", "body_too_large", "encoded_body", GATEWAY_FULL, "slow_body",
    GATEWAY_FAILED, GATEWAY_STOPPING, REPLICA_LOST, "not_found",
)  # fmt: skip
"""Error codes of requests that the gateway itself rejects or aborts. The routing core has further ones."""


class RequestRejected(Exception):
    """Raised to answer the request with an error: HTTP status, error code, message, and ``Retry-After`` in
    seconds (``None``: no such header)."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


async def send_rejection(send: Send, api: ClientApi, refused: RequestRejected) -> None:
    """Answer a request with the error ``refused``. Does nothing if the client has disconnected."""
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    if refused.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(refused.retry_after_s)))
    answer = _error_response(api.value, refused.status, refused.code, refused.message, headers)
    start = {"type": "http.response.start", "status": refused.status, "headers": answer.raw_headers}
    with contextlib.suppress(OSError):
        await send(start)
        await send({"type": "http.response.body", "body": answer.body})


def unavailable_error(message: str) -> ApiError:
    """Return the error 503 for a route whose engine does not answer at present."""
    return ApiError(503, message, "try again soon", {"Retry-After": str(RETRY_AFTER_S)})


def api_error(path: str, failure: ApiError) -> Response:
    """Return the answer for an error: on one of vLLM's routes in the format of its API, else our own."""
    if f"{PREFIX}/" in path:
        return failure.response()
    code = {401: INVALID_KEY, 500: GATEWAY_FAILED}.get(failure.status, "gateway_refused")
    message = f"{failure.message}; {failure.next_step}"
    return _error_response(path, failure.status, code, message, failure.headers)


async def failure_response(request: Request, error: Exception) -> Response:
    """Build the answer to a request for an unknown route or method, or with an internal error."""
    path = request.scope["path"]
    if isinstance(error, HTTPException):
        what = f"{request.method} {path} is not served by the gateway"
        return _error_response(path, error.status_code, "not_served", what, error.headers or {})
    return api_error(path, ApiError(500, "the gateway failed", "see its log", {GATEWAY: "1"}))


def _error_response(path: str, status: int, code: str, message: str, headers: Mapping[str, str]) -> Response:
    api = ClientApi.MESSAGES if ClientApi.MESSAGES.value in path else None
    body = error_body(api, status, code, message)
    return Response(body, status, {GATEWAY: "1", **headers}, media_type="application/json")
