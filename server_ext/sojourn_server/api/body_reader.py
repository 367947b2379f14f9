"""Reads the body of an HTTP request, with limits on size and time, and in any encoding of JSON."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import ClientDisconnect, Request

from .api_errors import ApiError

BODY_TIMEOUT_S = 10.0
"""Maximum seconds that a client may take to send a body."""


def utf8_json(body: bytes) -> bytes:
    """Return JSON in UTF-8 without a byte order mark, for msgspec. vLLM also reads UTF-16 and UTF-32, as
    ``json.loads`` does. Raises ``UnicodeDecodeError``."""
    encoding = json.detect_encoding(body)
    return body if encoding == "utf-8" else body.decode(encoding).encode()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read and return the whole body. Raises ``ApiError``: 413 for more than ``max_bytes``, 408 after
    ``BODY_TIMEOUT_S``, 400 if the client disconnects."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes", "send smaller batches")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", "send it again") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before its body arrived", "send it again") from None
    return bytes(body)
