"""The web page at ``/sojourn``: its files, served alike by an engine and by a gateway.

The files have no data, so they need no API key. The page asks the routes under ``/sojourn/v1`` with the key
that its viewer enters.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .api_errors import ApiError

PAGE_PATH = "/sojourn"
FILES_PATH = "/sojourn/page"
INDEX = "index.html"
FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".LICENSE": "text/plain"}

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


class PageFile(NamedTuple):
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


@lru_cache(maxsize=1)
def page_files() -> dict[str, PageFile]:
    """Return the page's files by their path below ``page/``. They are read once."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = PageFile(body, MEDIA_TYPES[path.suffix], etag)
    return found


def answer_page(request: Request) -> Response:
    """Return a response with the file whose path follows ``FILES_PATH``, or with the index for ``PAGE_PATH``
    itself. The status is 304 if the browser has the file, and 404 for an unknown file."""
    file = page_files().get(request.path_params.get("name", INDEX))
    if file is None:
        return ApiError(404, "the page has no such file", f"open {PAGE_PATH}").response()
    headers = {**HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def page_routes() -> list[Route]:
    """Return the routes of the page, for the application of an engine or a gateway."""
    return [
        Route(PAGE_PATH, answer_page, include_in_schema=False),
        Route(f"{FILES_PATH}/{{name:path}}", answer_page, include_in_schema=False),
    ]
