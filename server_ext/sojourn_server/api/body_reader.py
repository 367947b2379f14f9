"""Reads the body of an HTTP request, with limits on size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from .api_errors import ApiError

BODY_TIMEOUT_S = 10.0
"""Maximum seconds that a client may take to send a body."""


async def read_body(request: Request, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Read and return the whole body.

    Raises ``ApiError``: 413 for more than ``max_bytes``, 408 after ``timeout_s`` seconds, 400 if the client
    disconnects.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes", "send smaller batches")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", "send it again") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before its body arrived", "send it again") from None
    return bytes(body)
