"""Reading a request body without trusting its length or its speed."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from .failure import Failure

BODY_TIMEOUT_S = 10.0
"""A client that takes longer to send one small body is cut off."""


async def read_body(request: Request, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body. Raises ``Failure`` 413 before more than ``max_bytes`` are held, 408 when it is slow."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_collect(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise Failure(408, f"the body did not arrive within {timeout_s:g} s", "send it again") from None
    except ClientDisconnect:
        raise Failure(400, "the client went away before its body arrived", "send it again") from None


async def _collect(request: Request, max_bytes: int) -> bytes:
    # The declared length may be absent or a lie, so what arrives is counted as well.
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> Failure:
    return Failure(413, f"the body is larger than {max_bytes} bytes", "send smaller batches")
