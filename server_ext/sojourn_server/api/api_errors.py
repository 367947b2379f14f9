"""Error answers of the HTTP API. Each says what the client should do next."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

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
