"""The client APIs that the gateway serves, and the gateway's own error answers in the format of each."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...api.api_errors import RETRY_AFTER_S, ApiError
from ...api.openapi import PREFIX

GATEWAY = "X-Sojourn-Gateway"
"""Header that marks the gateway's own answers. A proxy in front of the gateway does not send it, so clients
can distinguish the two."""


class ClientApi(Enum):
    """A client API. The value of each member is the path under which engines serve that API."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""``type`` of an error answer, by HTTP status."""


def error_body(api: ClientApi | None, status: int, code: str, message: str) -> bytes:
    """Return the JSON body of an error answer in the format of ``api``; ``None``: OpenAI's format."""
    kind = _TYPES.get(status, "api_error")
    if api is ClientApi.MESSAGES:
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error_event(api: ClientApi, code: str, message: str) -> bytes:
    """Return the server-sent events that end a broken stream with an error, in the format of ``api``. The
    stream's earlier bytes must end with a complete event."""
    failed: dict[str, Any]
    if api is ClientApi.RESPONSES:
        failed = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + msgspec.json.encode(failed) + b"\n\n"
    if api is ClientApi.MESSAGES:
        failed = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(failed) + b"\n\n"
    failed = {"error": {"message": message, "type": code, "param": None, "code": 502}}
    return b"data: " + msgspec.json.encode(failed) + b"\n\ndata: [DONE]\n\n"


INVALID_KEY = "invalid_api_key"
GATEWAY_FULL = "gateway_full"
"""Error code: the gateway holds too many request bodies, or cannot open a connection to an engine."""
GATEWAY_FAILED = "gateway_failed"
INVALID_HTTP = "invalid_http"
GATEWAY_STOPPING = "gateway_stopping"
REPLICA_LOST = "replica_lost"
GATEWAY_ERROR_CODES = (
    INVALID_HTTP, INVALID_KEY, "bad_request", "body_too_large", "encoded_body", GATEWAY_FULL, "slow_body",
    GATEWAY_FAILED, GATEWAY_STOPPING, REPLICA_LOST, "not_found",
)  # fmt: skip
"""Error codes of requests that the gateway itself rejects or aborts. The routing core has further ones."""

AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequestRejected(Exception):
    """Raised to answer the request with an error: HTTP status, error code, message, and ``Retry-After`` in
    seconds (``None``: no such header)."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


async def send_rejection(send: AsgiSend, api: ClientApi, refused: RequestRejected) -> None:
    """Answer a request with the error ``refused``. Does nothing if the client has disconnected."""
    body = error_body(api, refused.status, refused.code, refused.message)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (GATEWAY.lower().encode(), b"1"),
    ]
    if refused.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(refused.retry_after_s))))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def unavailable_error(message: str) -> ApiError:
    """Return the error 503 for a route whose engine does not answer at present."""
    return ApiError(503, message, "try again soon", {"Retry-After": str(RETRY_AFTER_S)})


def api_error(path: str, failure: ApiError) -> Response:
    """Return the answer for an error: on one of vLLM's routes in the format of its API, else our own."""
    if f"{PREFIX}/" in path:
        return failure.response()
    code = INVALID_KEY if failure.status == 401 else "gateway_refused"
    return _error_response(
        path, failure.status, code, f"{failure.message}; {failure.next_step}", failure.headers
    )


async def unknown_route_response(request: Request, error: Exception) -> Response:
    """Build the answer to a request for an unknown route or method."""
    status, headers = 500, {}
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
    path = request.scope["path"]
    what = f"{request.method} {path} is not served by the gateway"
    return _error_response(path, status, "not_served", what, headers)


async def internal_error_response(request: Request, error: Exception) -> Response:
    """Build the answer to a request that failed with an internal error."""
    path, message = request.scope["path"], "the gateway failed; see its log"
    if f"{PREFIX}/" in path:
        return ApiError(500, message, "report it as a bug", {GATEWAY: "1"}).response()
    return _error_response(path, 500, GATEWAY_FAILED, message)


def _error_response(
    path: str, status: int, code: str, message: str, headers: Mapping[str, str] = MappingProxyType({})
) -> Response:
    api = ClientApi.MESSAGES if ClientApi.MESSAGES.value in path else None
    body = error_body(api, status, code, message)
    return Response(body, status, {GATEWAY: "1", **headers}, media_type="application/json")
