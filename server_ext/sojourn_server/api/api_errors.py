"""Error answers of the HTTP API. Each says what the client should do next."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

RETRY_AFTER_S = 2
"""Seconds in the ``Retry-After`` header of an error answer, if the client may send the request again."""


class ApiError(Exception):
    """An error that becomes the answer to a request. Its text repeats nothing of the client's input."""

    def __init__(
        self, status: int, message: str, next_step: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.next_step = next_step
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        """Return the HTTP answer with the body ``{"error": {"message": …, "next": …}}``."""
        body = {"error": {"message": self.message, "next": self.next_step}}
        return JSONResponse(body, status_code=self.status, headers=self.headers)
