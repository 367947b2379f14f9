"""A server without a socket for commands that ask one."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec


class CommandServer:
    """Answers requests from a table: path → document, or (status, document). An exception is raised instead.
    With ``key``, all paths but ``/health`` need this key."""

    def __init__(self, answers: dict[str, Any], key: str | None = None) -> None:
        self.answers = answers
        self.key = key
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        has_key = self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"
        if request.url.path != "/health" and not has_key:
            return httpx.Response(401, json={"error": "Unauthorized"})
        answer = self.answers.get(request.url.path, (404, {"error": {"message": "no program has this id"}}))
        if isinstance(answer, Exception):
            raise answer
        status, document = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, content=msgspec.json.encode(document))
