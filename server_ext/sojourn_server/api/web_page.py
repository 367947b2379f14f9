"""The web page at ``/sojourn``: its files, served alike by an engine and by a gateway.

The files have no data, so they need no API key. The page asks the routes under ``/sojourn/v1`` with the key
that its viewer enters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from .api_errors import ApiError

PAGE_PATH = "/sojourn"
FILES_PATH = "/sojourn/page"
INDEX = "index.html"
FOLDER = Path(__file__).parent / "page"

HEADERS = {
    # Only our own files run, nothing can be sent elsewhere, and a string never becomes markup or code.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every file. ``no-cache``: a browser asks each time whether its copy is the newest."""


class _PageFiles(StaticFiles):
    """The files below ``page/``. Browsers cache them by their ETag."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            return await super().get_response(path, scope)
        except HTTPException as error:
            missing = ApiError(error.status_code, "the page has no such file", f"open {PAGE_PATH}")
            return missing.response()


def page_routes() -> list[Route]:
    """Return the routes of the page, for the application of an engine or a gateway."""
    files = _PageFiles(directory=FOLDER)

    async def answer(request: Request) -> Response:
        return await files.get_response(request.path_params.get("name", INDEX), request.scope)

    paths = (PAGE_PATH, f"{FILES_PATH}/{{name:path}}")
    return [Route(path, answer, include_in_schema=False) for path in paths]
