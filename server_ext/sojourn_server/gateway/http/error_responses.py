"""The gateway's own error answers, in the format of the client's API."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from . import proxy_headers
from .client_apis import ClientApi, error_body

logger = logging.getLogger(__name__)

INVALID_KEY = "invalid_api_key"
GATEWAY_ERROR_CODES = (
    INVALID_KEY,
    "bad_request",
    "body_too_large",
    "encoded_body",
    "gateway_full",
    "slow_body",
)
"""Codes of requests that are rejected before they reach the core."""
GATEWAY_FAILED = "gateway_failed"
REPLICA_LOST = "replica_lost"
LATE_ERROR_CODES = (GATEWAY_FAILED, REPLICA_LOST)
"""Codes of requests that the gateway rejects after that."""

AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequestRejected(Exception):
    """A request that the gateway answers with an error."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        *,
        is_counted: bool = False,
    ) -> None:
        """``is_counted``: the core has counted the rejection."""
        super().__init__(message)
        self.is_counted = is_counted
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


async def send_internal_error(send: AsgiSend, api: ClientApi) -> None:
    """To be called in an ``except`` block, before anything was answered."""
    logger.exception("the gateway failed at a request; please report this")
    await send_rejection(send, api, RequestRejected(500, GATEWAY_FAILED, "the gateway failed; see its log"))


async def send_rejection(send: AsgiSend, api: ClientApi | None, refused: RequestRejected) -> None:
    body = error_body(api, refused.status, refused.code, refused.message)
    passed = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        proxy_headers.GATEWAY: "1",
    }
    if refused.retry_after_s is not None:
        passed["Retry-After"] = str(max(1, round(refused.retry_after_s)))
    if refused.status == 401:
        passed["WWW-Authenticate"] = "Bearer"
    with contextlib.suppress(OSError):
        await send(
            {
                "type": "http.response.start",
                "status": refused.status,
                "headers": proxy_headers.decoded_headers(passed),
            }
        )
        await send({"type": "http.response.body", "body": body})
