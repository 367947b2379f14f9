"""Requests that get an error for an answer."""

from __future__ import annotations

from .facts import AnyAction, Refuse
from .failures import Failures
from .limits import CoreCounts
from .line import Waiting
from .requests import Requests


class Refusals:
    """Words and counts them; ``actions`` is where they go."""

    def __init__(
        self, requests: Requests, failures: Failures, counts: CoreCounts, actions: list[AnyAction]
    ) -> None:
        self._requests = requests
        self._failures = failures
        self._counts = counts
        self._actions = actions

    def refuse(
        self, request_id: str, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        """One that is open no more, or never was."""
        self._counts.refused += 1
        self._actions.append(Refuse(request_id, status, code, message, retry_after_s))

    def failed(self, waiting: Waiting, now: float) -> None:
        """Replicas have failed at it, and no other is to try."""
        self._requests.close(waiting, now)
        words = self._failures.words(waiting)
        self.refuse(waiting.request_id, 502, "replicas_failed", words, retry_after_s=1.0)

    def waited_too_long(self, waiting: Waiting, wait_s: float, now: float) -> None:
        """No replica had room for it."""
        self._requests.close(waiting, now)
        message = f"no replica had room for it in {wait_s:g} s"
        self.refuse(waiting.request_id, 503, "no_room", message, retry_after_s=10.0)

    def unrouted(self, request_id: str, error: BaseException) -> None:
        """A policy failed at it, and it is open no more."""
        self._counts.policy_failed(error)
        self.refuse(request_id, 500, "policy_failed", "nobody could say where it goes")
