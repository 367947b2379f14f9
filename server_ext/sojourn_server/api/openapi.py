"""The OpenAPI 3.1 documents of the routes under ``/sojourn/v1``. ``docs/http_api.py`` writes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import Meta
from starlette.responses import Response

PREFIX = "/sojourn/v1"
"""Path of all routes of sojourn."""
TYPES = "types"
"""Key of the types of ``either`` in its annotation."""


def either(*types: type | None) -> Meta:
    """Return an annotation for a field of type ``Any`` whose value is one of the structs ``types``. ``None``
    among ``types`` stands for null. msgspec does not support such unions of structs."""
    names = ["#/components/schemas/" + one.__name__ if one is not None else None for one in types]
    schemas = [{"type": "null"} if name is None else {"$ref": name} for name in names]
    return Meta(extra_json_schema={"anyOf": schemas}, extra={TYPES: [one for one in types if one]})


@cache
def _document(server: str) -> bytes:
    return (Path(__file__).parent / f"openapi_{server}.json").read_bytes()


def openapi_response(server: str) -> Response:
    """Return a response with the document of ``server``, which is ``engine`` or ``gateway``."""
    return Response(_document(server), media_type="application/json")
