"""Checks answers of ``/sojourn/v1`` against a server's OpenAPI document, and serves a virtual engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator
from virtual_engine import VirtualEngine


class VirtualRpc:
    """An ``EngineRpc`` to virtual engines. ``instead`` maps an operation to an answer that replaces the
    engines' own."""

    def __init__(self, *engines: VirtualEngine) -> None:
        self.engines = engines
        self.instead: dict[str, Any] = {}

    def engine_ids(self) -> Sequence[str]:
        return [str(index) for index in range(len(self.engines))]

    async def call(self, op: str, payload: str) -> list[str]:
        if op in self.instead:
            return [json.dumps(self.instead[op])] * len(self.engines)
        found = [engine.service.call(op, payload, engine.now) for engine in self.engines]
        if op == "event_batches":
            return [json.dumps({"batches": json.loads(answer), "wait_s": 0.0}) for answer in found]
        return found


class Contract:
    """An OpenAPI document. ``seen`` has the operations that gave at least one valid answer."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.seen: set[tuple[str, str]] = set()
        self.operations = {
            (method.upper(), path) for path, item in document["paths"].items() for method in item
        }

    def check(self, method: str, url: str, status: int, content_type: str, body: bytes) -> Any:
        """Check one answer, and return its JSON. Fails if the document has no such operation or query."""
        parts = urlsplit(url)
        path = max(
            (path for path in self.document["paths"] if _matches(path, parts.path)), key=len, default=None
        )
        assert path is not None, f"{parts.path} is not in the document"
        operation = self.document["paths"][path][method.lower()]
        known = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
        assert {word.partition("=")[0] for word in parts.query.split("&") if word} <= known
        code = "200" if status == 200 else f"{status // 100}XX"
        schema = operation["responses"][code]["content"][content_type.partition(";")[0]]["schema"]
        if "json" not in content_type or "ndjson" in content_type:
            return body
        document = json.loads(body)
        closed = _closed({**schema, "components": self.document["components"]})
        errors = [
            f"{method} {url}: {error.json_path}: {error.message}"
            for error in Draft202012Validator(closed).iter_errors(document)
        ]
        assert not errors, "\n".join(errors)[:4000]
        if status == 200:
            self.seen.add((method, path))
        return document


def _matches(template: str, path: str) -> bool:
    pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
    return re.fullmatch(pattern, path) is not None


def _closed(schema: Any) -> Any:
    """The schema with unknown fields forbidden, so that an answer may only have fields that the document
    names."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found
