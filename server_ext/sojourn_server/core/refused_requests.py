"""Requests that an engine refused. The API server looks these requests up, to tell clients the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_REFUSALS = 1024
"""Maximum number of refusals kept; the oldest is dropped first."""

# vLLM's API server derives the engine's request id from its own ID: CHILD_ID-PART-RANDOM. CHILD numbers the
# answers to one prompt, PART numbers the prompts of one request. CHILD, PART and RANDOM may each be absent.
_ID_DECORATIONS = (re.compile(r"^\d+_"), re.compile(r"-[0-9a-f]{8}$"), re.compile(r"[-_]\d+$"))


class RefusedRequests:
    """Table of refused requests and their waiting times, found by any id that the API server may use."""

    def __init__(self, limit: int = MAX_REFUSALS) -> None:
        self._limit = limit
        self._waited_s: dict[str, float] = {}
        self._api_server_ids: dict[str, frozenset[str]] = {}

    def record_refusal(self, request_id: str, waited_s: float) -> None:
        """Record that the engine's request ``request_id`` was refused after waiting ``waited_s`` seconds."""
        self._forget([request_id])
        self._waited_s[request_id] = waited_s
        self._api_server_ids[request_id] = api_server_ids(request_id)
        if len(self._waited_s) > self._limit:
            self._forget([next(iter(self._waited_s))])

    def take(self, api_server_id: str) -> float | None:
        """Remove a request's refusal, and return the seconds that the request waited; ``None`` if it was not
        refused. The refusal is removed because a client may use the id again.

        ``api_server_id``: the API server's id of the request.
        """
        found = [request_id for request_id, its in self._api_server_ids.items() if api_server_id in its]
        if not found:
            return None
        waited_s = self._waited_s[found[-1]]
        self._forget(found)
        return waited_s

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waited_s.pop(request_id, None)
            self._api_server_ids.pop(request_id, None)


def api_server_ids(request_id: str) -> frozenset[str]:
    """All ids that the API server may have for the engine's request ``request_id``."""
    found = {request_id}
    for decoration in _ID_DECORATIONS:
        found |= {decoration.sub("", name) for name in found}
    return frozenset(found)
