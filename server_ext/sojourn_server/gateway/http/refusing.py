"""A request that gets an answer of the gateway's own, in the words of its API."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from . import headers
from .apis import Api, error_body

logger = logging.getLogger(__name__)

INVALID_KEY = "invalid_api_key"
AT_THE_DOOR = (INVALID_KEY, "bad_request", "body_too_large", "encoded_body", "gateway_full", "slow_body")
"""Codes of what is refused before anybody is asked where it goes."""
GATEWAY_FAILED = "gateway_failed"
REPLICA_LOST = "replica_lost"
LATER = (GATEWAY_FAILED, REPLICA_LOST)
"""Codes of what is refused after that, and not by who was asked."""

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refused(Exception):
    """The request gets an answer of the gateway's own."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        *,
        is_counted: bool = False,
    ) -> None:
        """``is_counted``: whoever decided it has."""
        super().__init__(message)
        self.is_counted = is_counted
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


async def say_failed(send: Send, api: Api) -> None:
    """In an ``except``: an error of ours, before anything was answered."""
    logger.exception("the gateway failed at a request; please report this")
    await refuse(send, api, Refused(500, GATEWAY_FAILED, "the gateway failed; see its log"))


async def refuse(send: Send, api: Api | None, refused: Refused) -> None:
    body = error_body(api, refused.status, refused.code, refused.message)
    passed = {"Content-Type": "application/json", "Content-Length": str(len(body)), headers.GATEWAY: "1"}
    if refused.retry_after_s is not None:
        passed["Retry-After"] = str(max(1, round(refused.retry_after_s)))
    if refused.status == 401:
        passed["WWW-Authenticate"] = "Bearer"
    with contextlib.suppress(OSError):
        await send(
            {"type": "http.response.start", "status": refused.status, "headers": headers.plain(passed)}
        )
        await send({"type": "http.response.body", "body": body})
