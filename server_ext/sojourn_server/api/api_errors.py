"""Error answers of the HTTP API. Each says what the client should do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

RETRY_AFTER_S = 2
"""Seconds in the ``Retry-After`` header of an error answer, if the client may send the request again."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong. Quotes no text of the request's body."""

    message: str
    next_step: str = msgspec.field(name="next")
    """What the client should do."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The answer to a request that failed."""

    error: ErrorDetail


class ApiError(Exception):
    """An error that becomes the answer to a request. Its text quotes no text of the request's body."""

    def __init__(
        self, status: int, message: str, next_step: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.next_step = next_step
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return the HTTP answer with an ``ErrorAnswer``."""
        body = msgspec.json.encode(ErrorAnswer(ErrorDetail(self.message, self.next_step)))
        return Response(body, self.status, self.headers, media_type="application/json")


_NO_WEBSOCKET = {
    "message": "this server speaks no WebSocket; send POST /v1/responses",
    "type": "invalid_request_error",
    "param": None,
    "code": "websocket_not_supported",
}
"""In the form of OpenAI's API, which Codex reads."""


def websocket_refusal(scope: Mapping[str, Any], path_end: str = "/v1/responses") -> Response | None:
    """Return the answer 426 to a WebSocket offer on a path that ends so; ``None`` for any other request.

    Codex offers one before its first request. At 426 it sends requests over HTTP at once; at 403, 404 or 405
    it offers six times more. If no WebSocket package is installed, uvicorn passes the offer on as a GET.
    """
    is_offer = scope["type"] == "websocket" or (
        scope["method"] == "GET" and "sec-websocket-key" in Headers(scope=dict(scope))
    )
    if not is_offer or not scope["path"].endswith(path_end):
        return None
    # Starlette sends it as ``websocket.http.response`` in a WebSocket scope. RFC 9110, 15.5.22: a 426 names
    # the protocol to use.
    return JSONResponse({"error": _NO_WEBSOCKET}, 426, {"Upgrade": "HTTP/1.1"})
