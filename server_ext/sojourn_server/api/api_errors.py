"""Error answers of the HTTP API, with what the client should do next."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

RETRY_AFTER_S = 2
"""``Retry-After`` in the answer to a request that may be sent again."""


class ApiError(Exception):
    """An error answer to a request. It repeats nothing of the client's input."""

    def __init__(
        self, status: int, message: str, next_step: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.next_step = next_step
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        """The answer: ``{"error": {"message": …, "next": …}}``."""
        body = {"error": {"message": self.message, "next": self.next_step}}
        return JSONResponse(body, status_code=self.status, headers=self.headers)
