"""Checks of a request's key and body, and error answers with what to do next."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

RETRY_AFTER_S = 2
"""``Retry-After`` of answers that a client may repeat."""


class ApiError(Exception):
    """A request that gets an error answer; it holds nothing of the client's input."""

    def __init__(
        self, status: int, message: str, next_step: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.next_step = next_step
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        """``{"error": {"message": …, "next": …}}``."""
        body = {"error": {"message": self.message, "next": self.next_step}}
        return JSONResponse(body, status_code=self.status, headers=self.headers)


class ApiKeys:
    """Keys that a server accepts in ``Authorization: Bearer KEY``, as in vLLM.

    Before ``configure`` every request is rejected, so a starting server is not open. As in vLLM, no
    configured key means no check.
    """

    def __init__(self) -> None:
        self._digests: tuple[bytes, ...] | None = None

    def configure(self, keys: Iterable[str]) -> None:
        """Accept ``keys``; empty strings are ignored."""
        self._digests = tuple(_digest(key) for key in keys if key)

    def allow(self, authorization: str | None) -> bool:
        """Whether a request with this ``Authorization`` header may pass.

        Its duration reveals nothing about the keys: it compares digests of equal length in constant time,
        and always all of them.
        """
        if self._digests is None:
            return False
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        shown = _digest(token)
        matched = False
        for digest in self._digests:
            matched |= hmac.compare_digest(shown, digest)
        return matched and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


BODY_TIMEOUT_S = 10.0
"""Longest time for a client to send a body."""


async def read_body(request: Request, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body. Raises ``ApiError``: 413 for more than ``max_bytes``, 408 after ``timeout_s``."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_read_stream(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", "send it again") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before its body arrived", "send it again") from None


async def _read_stream(request: Request, max_bytes: int) -> bytes:
    # The declared length may be absent or wrong, so received bytes are counted too.
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", "send smaller batches")
