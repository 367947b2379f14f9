"""The newest requests that were refused, for the HTTP side, which asks once a client is to be told."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_REFUSALS = 1024
"""Refusals remembered; the oldest goes first."""

# vLLM's API server makes the engine's ids of its own: CHILD_ID-PART-RANDOM for one of several answers to one
# of several prompts. Each of the three is left out where there is no reason for it.
_ID_DECORATIONS = (re.compile(r"^\d+_"), re.compile(r"-[0-9a-f]{8}$"), re.compile(r"[-_]\d+$"))


class EngineRefusals:
    """Why requests were refused, by the ids that the API server may know them by."""

    def __init__(self, limit: int = MAX_REFUSALS) -> None:
        self._limit = limit
        self._waited_s: dict[str, float] = {}
        self._names: dict[str, frozenset[str]] = {}

    def note(self, request_id: str, waited_s: float) -> None:
        """The engine's request ``request_id`` found no place on the device for ``waited_s`` seconds."""
        self._forget([request_id])
        self._waited_s[request_id] = waited_s
        self._names[request_id] = names(request_id)
        if len(self._waited_s) > self._limit:
            self._forget([next(iter(self._waited_s))])

    def take(self, name: str) -> float | None:
        """Seconds that the API server's request ``name`` waited; ``None`` where it was not refused.

        It is forgotten then: a client may use its id again, for a request that fails for another reason.
        """
        found = [request_id for request_id, its in self._names.items() if name in its]
        if not found:
            return None
        waited_s = self._waited_s[found[-1]]
        self._forget(found)
        return waited_s

    def __len__(self) -> int:
        return len(self._waited_s)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waited_s.pop(request_id, None)
            self._names.pop(request_id, None)


def names(request_id: str) -> frozenset[str]:
    """All ids that a request of the API server may have which the engine knows as ``request_id``."""
    found = {request_id}
    for decoration in _ID_DECORATIONS:
        found |= {decoration.sub("", name) for name in found}
    return frozenset(found)
