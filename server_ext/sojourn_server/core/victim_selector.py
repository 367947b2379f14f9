"""Running requests that are to lose their blocks: which of them, and which will before long."""

from __future__ import annotations

from collections.abc import Sequence

from ..policies.policy_protocols import VictimPolicy
from ..policies.policy_views import RunningRequestView
from ..policies.preemption.preemption_recovery import RecoveryMethod
from .demand_forecaster import DemandForecaster
from .request_table import RequestTable


class VictimSelector:
    """Asks the victim policy, with what all that run will yet need."""

    def __init__(
        self, policy: VictimPolicy, demand_forecaster: DemandForecaster, requests: RequestTable
    ) -> None:
        self._policy = policy
        self._demand_forecaster = demand_forecaster
        self._requests = requests

    def choose(
        self, running: Sequence[RunningRequestView], short_blocks: int, used_blocks: int, now: float
    ) -> str | None:
        """Which to preempt for ``short_blocks`` more; None: the engine's choice."""
        return self._select_victim(self._with_predictions(running, now), short_blocks, used_blocks, now)

    def coming(self, running: Sequence[RunningRequestView], used_blocks: int, now: float) -> str | None:
        """Which will probably be preempted soon and is to have its KV copied to host memory; None: none."""
        if self._demand_forecaster.look(running, used_blocks, now) is None:
            return None
        views = self._with_predictions(running, now)
        victim = self._select_victim(views, 0, used_blocks, now)
        view = next((view for view in views if view.request_id == victim), None)
        if (
            view is None
            or self._demand_forecaster.recovery(view.context_tokens, now) is not RecoveryMethod.OFFLOAD
        ):
            return None
        return victim

    def _with_predictions(
        self, running: Sequence[RunningRequestView], now: float
    ) -> list[RunningRequestView]:
        return self._demand_forecaster.foreseen(self._requests.served(running, now), now)

    def _select_victim(
        self, views: Sequence[RunningRequestView], short_blocks: int, used_blocks: int, now: float
    ) -> str | None:
        return self._policy.victim(views, self._demand_forecaster.need(views, short_blocks, used_blocks), now)
