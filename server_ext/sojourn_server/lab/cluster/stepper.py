"""One engine among several: it steps as it does alone, while the others are in the midst of theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..account import Account, LiveTurn
from ..bare_engine import BareEngine
from ..clients import Site
from ..clock import VirtualClock
from ..latency.work import LatencyModel
from ..simulation import POLL_S

if TYPE_CHECKING:
    from ..host_cache import HostCache
    from ..tier_copies import TierCopies

NEVER_S = float("inf")


@dataclass(slots=True)
class StepCounts:
    """What one engine did."""

    steps: int = 0
    busy_s: float = 0.0
    scheduler_s: float = 0.0
    """Wall seconds inside the scheduler's own calls."""
    preemption_steps: list[int] = field(default_factory=list)
    stood_still_since_s: float | None = None
    """Since when it has had requests and could run none of them; ``None``: it has none, or runs."""


class Stepper(Site):
    """An engine, what has reached it, and the step that it is in.

    ``due_s`` is when it is to be looked at again: at the end of its step, or where nothing can run when a
    copy ends, or soon, for a lease may end; ``inf`` where it has nothing to do.
    """

    def __init__(
        self,
        replica: str,
        engine: BareEngine,
        account: Account,
        host: HostCache | TierCopies | None,
        latency: LatencyModel,
        clock: VirtualClock,
        *,
        on_first_token: Callable[[Stepper, LiveTurn], None],
        on_finished: Callable[[Stepper, LiveTurn], None],
    ) -> None:
        super().__init__(engine, account)
        self.replica = replica
        self.host = host
        self.adapter: Any = getattr(engine.scheduler, "sojourn", None)
        self.counts = StepCounts()
        self.due_s = NEVER_S
        self._latency = latency
        self._clock = clock
        self._on_first_token = on_first_token
        self._on_finished = on_finished
        self._planned: Any = None
        """Of the step it is in; ``None``: it is in none."""
        self.computes = False
        """Whether that step computes anything, rather than only copying."""
        self._first: list[LiveTurn] = []
        self._withdrawn: list[str] = []

    @property
    def stepping(self) -> bool:
        """Whether it is in a step."""
        return self._planned is not None

    def withdraw(self, request_id: str) -> LiveTurn | None:
        """The gateway takes a request back: nothing of it counts any more, and it is aborted before the
        engine does anything else. ``None``: it has not come to the engine."""
        if request_id not in self.account.live:
            return None
        self._withdrawn.append(request_id)
        return self.account.recalled(request_id, self._clock.now_s)

    def look(self) -> None:
        """Between two steps: take in what has come, and begin the next where there is anything to do."""
        self._abort_withdrawn()
        self.deliver()
        if not self.engine.scheduler.has_requests() and not self._copying():
            self.counts.stood_still_since_s = None
            self.due_s = NEVER_S
            return
        self._plan()

    def results(self) -> None:
        """The step is over: who has made a first token, who has finished, which copies have ended."""
        now = self._clock.now_s
        planned, self._planned = self._planned, None
        self._abort_withdrawn()
        for turn in self._first:
            # One's first token may have another taken back that makes its own in the same step.
            if turn.request.request_id in self.account.live:
                turn.life.first_token_s = now
                self._on_first_token(self, turn)
        self._abort_withdrawn()
        copies = self.host.finished(now) if self.host is not None else None
        if not self.computes and copies is None:
            self._stand_still()
            return
        self.counts.stood_still_since_s = None
        self.due_s = now
        entered = time.perf_counter()
        finished = self.engine.take_in(planned, copies)
        self.counts.scheduler_s += time.perf_counter() - entered
        for request_id in finished:
            self._on_finished(self, self.account.finished(request_id, now))

    def _plan(self) -> None:
        counts, now = self.counts, self._clock.now_s
        entered = time.perf_counter()
        planned = self.engine.plan()
        counts.scheduler_s += time.perf_counter() - entered
        if planned.preempted_req_ids:
            counts.preemption_steps.extend([counts.steps] * len(planned.preempted_req_ids))
        orders: Any = planned.kv_connector_metadata
        host = self.host if orders is not None else None
        if host is not None:
            for request_id, blocks in host.loads(orders):
                self.account.loading(request_id, blocks)
        work, self._first = self.account.step(planned, self.engine.scheduler.requests, now)
        over_s = host.begin_step(orders, now) if host is not None else now
        if work.tokens:
            took_s = self._latency.step_s(work)
            counts.steps += 1
            counts.busy_s += took_s
            over_s = self.host.step_over_s(over_s, took_s) if self.host is not None else over_s + took_s
        self._planned, self.computes = planned, bool(work.tokens)
        self.due_s = over_s

    def _stand_still(self) -> None:
        now = self._clock.now_s
        if self.counts.stood_still_since_s is None:
            self.counts.stood_still_since_s = now
        copied_s = self.host.next_done_s() if self.host is not None else NEVER_S
        self.due_s = max(now, min(copied_s, now + POLL_S))

    def _abort_withdrawn(self) -> None:
        withdrawn, self._withdrawn = self._withdrawn, []
        for request_id in withdrawn:
            self.engine.abort(request_id)

    def _copying(self) -> bool:
        return self.host is not None and (self.host.next_done_s() != NEVER_S or self.host.has_unsubmitted)
