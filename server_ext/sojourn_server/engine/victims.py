"""Running requests that are to lose their blocks: which of them, and which will before long."""

from __future__ import annotations

from collections.abc import Sequence

from ..policy.base import VictimPolicy
from ..policy.recovery import Recovery
from ..policy.views import RunningView
from .prospects import Prospects
from .requests import Requests


class Victims:
    """Asks the victim policy, with what all that run will yet need."""

    def __init__(self, policy: VictimPolicy, prospects: Prospects, requests: Requests) -> None:
        self._policy = policy
        self._prospects = prospects
        self._requests = requests

    def choose(
        self, running: Sequence[RunningView], short_blocks: int, used_blocks: int, now: float
    ) -> str | None:
        """Which to preempt for ``short_blocks`` more; None: the engine's choice."""
        return self._among(self._foreseen(running, now), short_blocks, used_blocks, now)

    def coming(self, running: Sequence[RunningView], used_blocks: int, now: float) -> str | None:
        """Which will probably be preempted soon and is to have its KV copied to host memory; None: none."""
        if self._prospects.look(running, used_blocks, now) is None:
            return None
        views = self._foreseen(running, now)
        victim = self._among(views, 0, used_blocks, now)
        view = next((view for view in views if view.request_id == victim), None)
        if view is None or self._prospects.recovery(view.context_tokens, now) is not Recovery.OFFLOAD:
            return None
        return victim

    def _foreseen(self, running: Sequence[RunningView], now: float) -> list[RunningView]:
        return self._prospects.foreseen(self._requests.served(running, now), now)

    def _among(
        self, views: Sequence[RunningView], short_blocks: int, used_blocks: int, now: float
    ) -> str | None:
        return self._policy.victim(views, self._prospects.need(views, short_blocks, used_blocks), now)
