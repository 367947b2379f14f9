"""The ASGI application: a short path for generation, and answers for unknown routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .client_apis import error_body
from .proxy_headers import GATEWAY


class AsgiEndpoint:
    """Wraps a function as an application: a router passes a plain function a request."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class GatewayApplication(Starlette):
    """Sends generation requests straight to their handlers, past the router and its middlewares."""

    def __init__(self, generating: Mapping[str, Callable[..., Awaitable[None]]], **rest: Any) -> None:
        super().__init__(**rest)
        self._generating = generating

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            relay = self._generating.get(scope["path"])
            if relay is not None:
                await relay(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def unknown_route_response(request: Request, error: Exception) -> Response:
    """The answer to an unknown route or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not served by the gateway"
    return Response(
        error_body(None, status, "not_served", what),
        status,
        {GATEWAY: "1", **(dict(error.headers or {}) if isinstance(error, HTTPException) else {})},
        media_type="application/json",
    )


async def internal_error_response(request: Request, error: Exception) -> Response:
    """The answer after an internal error."""
    body = error_body(None, 500, "gateway_failed", "the gateway failed; see its log")
    return Response(body, 500, {GATEWAY: "1"}, media_type="application/json")
