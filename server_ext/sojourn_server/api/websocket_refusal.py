"""Answers a client's offer of a WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

_BODY = msgspec.json.encode(
    {
        "error": {
            "message": "this server speaks no WebSocket; send POST /v1/responses",
            "type": "invalid_request_error",
            "param": None,
            "code": "websocket_not_supported",
        }
    }
)


def websocket_refusal(scope: Mapping[str, Any], path_end: str = "/v1/responses") -> Response | None:
    """Return the answer 426 to a WebSocket offer on a path that ends so; ``None`` for any other request.

    Codex offers one before its first request. At 426 it sends requests over HTTP at once; at 403, 404 or 405
    it offers six times more. If no WebSocket package is installed, uvicorn passes the offer on as a GET.
    """
    if not scope["path"].endswith(path_end):
        return None
    offered = scope["type"] == "websocket" or (
        scope["method"] == "GET" and "sec-websocket-key" in Headers(scope=dict(scope))
    )
    # Starlette sends it as ``websocket.http.response`` in a WebSocket scope. RFC 9110, 15.5.22: a 426 names
    # the protocol to use.
    headers = {"Upgrade": "HTTP/1.1"}
    return Response(_BODY, 426, headers, media_type="application/json") if offered else None
