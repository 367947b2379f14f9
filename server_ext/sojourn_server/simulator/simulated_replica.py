"""One vLLM engine of a simulation: its inbox, its current step, and its next due time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .event_queue import EventQueue
from .latency.latency_models import LatencyModel
from .simulated_engine import SimulatedEngine
from .token_accounting import InFlightTurn, TokenAccounting

if TYPE_CHECKING:
    from ..vllm.compat import SchedulerOutput
    from .tier_transfers import TierTransfers
    from .vllm_offload_transfers import VllmOffloadTransfers

NEVER_S = float("inf")

IDLE_POLL_S = 0.05
"""Retry interval, in virtual seconds, of an engine that has requests but can run none."""


@dataclass(slots=True)
class _Step:
    """A step that the scheduler has planned, and that has not ended yet."""

    planned: SchedulerOutput
    sampled: dict[str, InFlightTurn]
    """Requests that get a token, by id."""
    is_computing: bool
    """Whether the step computes tokens. If false, the step only waits for copies."""
    ends_s: float
    is_ahead: bool
    """Whether the step was planned before the results of the previous step were known."""


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """An engine, driven by the simulation loop.

    With asynchronous scheduling, the engine plans a step when the previous step begins. At that time, it does
    not know the previous step's results.

    ``due_s`` is the virtual time of the engine's next action: the end of its step, or ``inf`` if the engine
    is idle. If the engine has requests but can run none, ``due_s`` is the earlier of two times: the end of
    the next copy, and ``IDLE_POLL_S`` from now, when a lease may have ended.
    """

    replica: str
    engine: SimulatedEngine
    account: TokenAccounting
    host: VllmOffloadTransfers | TierTransfers | None
    latency: LatencyModel
    clock: EventQueue
    on_first_token: Callable[[InFlightTurn], None]
    on_finished: Callable[[InFlightTurn, SimulatedEngine], None]
    steps: int = 0
    busy_s: float = 0.0
    scheduler_s: float = 0.0
    """Wall-clock seconds inside calls of the scheduler."""
    preemption_steps: list[int] = field(default_factory=list)
    is_blocked: bool = False
    """Whether the engine has requests but can run none."""
    due_s: float = NEVER_S
    _inbox: deque[Callable[[], object]] = field(default_factory=deque)
    _steps: deque[_Step] = field(default_factory=deque)
    """The current step and, if a step is planned ahead, that step; empty between two steps."""
    _recalled_ids: list[str] = field(default_factory=list)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is in progress."""
        return bool(self._steps)

    @property
    def is_computing(self) -> bool:
        """Whether a step is in progress that computes tokens. False if the step only waits for copies."""
        return bool(self._steps) and self._steps[0].is_computing

    def submit(self, message: Callable[[], object]) -> None:
        """Put ``message``, a function that gives the engine a request or event, in the inbox. ``deliver``
        calls it between two steps of the engine."""
        self._inbox.append(message)

    @property
    def has_messages(self) -> bool:
        """Whether a message is undelivered or a request is to be aborted."""
        return bool(self._inbox or self._recalled_ids)

    def cancel(self, request_id: str) -> InFlightTurn | None:
        """Withdraw a request. The engine aborts the request before its next action. Returns the request's
        turn; ``None`` if the request is not in the engine."""
        if request_id not in self.account.live:
            return None
        self._recalled_ids.append(request_id)
        return self.account.recalled(request_id, self.clock.now_s)

    def deliver(self) -> None:
        """Deliver the queued messages in order."""
        while self._inbox:
            self._inbox.popleft()()

    def begin_next_step(self) -> None:
        """Deliver messages, then begin the next step if there is work. Call this method between two steps."""
        self._abort_recalled()
        self.deliver()
        if not self._steps:
            if not self.engine.scheduler.has_requests() and not (self.host and self.host.is_busy):
                self.is_blocked = False
                self.due_s = NEVER_S
                return
            self._plan(self.clock.now_s)
        if self.engine.options.asynchronous and len(self._steps) == 1 and self.is_computing:
            self._plan(self._steps[0].ends_s)
        self.due_s = self._steps[0].ends_s

    def end_step(self) -> None:
        """End the current step: handle first tokens, finished requests and finished copies."""
        now = self.clock.now_s
        step = self._steps.popleft()
        self._abort_recalled()
        for turn in step.sampled.values():
            # After the first token of one request, the gateway may withdraw another request of the same step.
            if turn.log.first_token_s is None and turn.request.request_id in self.account.live:
                turn.log.first_token_s = now
                self.on_first_token(turn)
        self._abort_recalled()
        self._take_in(step, now)
        if self._steps:
            self.due_s = self._steps[0].ends_s
            if not self.is_computing and self.due_s <= now:
                self.end_step()

    def _take_in(self, step: _Step, now: float) -> None:
        """Give the results of ``step`` and of finished copies to the scheduler. Sets ``due_s``."""
        copies = self.host.get_finished(now) if self.host is not None else None
        if not step.is_computing and copies is None and not step.is_ahead:
            self.is_blocked = True
            copied_s = self.host.next_done_s() if self.host is not None else NEVER_S
            self.due_s = max(now, min(copied_s, now + IDLE_POLL_S))
            return
        self.due_s = now
        if not step.is_computing and copies is None:
            return  # the results of the previous step may let a request run
        self.is_blocked = False
        entered = time.perf_counter()
        finished = self.engine.update_from_output(step.planned, copies, step.sampled)
        self.scheduler_s += time.perf_counter() - entered
        for request_id in finished:
            self.on_finished(self.account.finished(request_id, now), self.engine)

    def _plan(self, begins_s: float) -> None:
        """Plan a step that begins at ``begins_s``, or later if it has to wait for copies."""
        now = self.clock.now_s
        entered = time.perf_counter()
        planned = self.engine.plan()
        self.scheduler_s += time.perf_counter() - entered
        if planned.preempted_req_ids:
            self.preemption_steps.extend([self.steps] * len(planned.preempted_req_ids))
        orders: Any = planned.kv_connector_metadata
        host = self.host if orders is not None else None
        if host is not None:
            for request_id, blocks in host.loads(orders):
                self.account.loading(request_id, blocks)
        work, sampled = self.account.step(planned, self.engine.scheduler.requests, now)
        over_s = host.begin_step(orders, begins_s) if host is not None else begins_s
        if work.tokens:
            took_s = self.latency.step_s(work)
            self.steps += 1
            self.busy_s += took_s
            over_s += took_s
        self._steps.append(_Step(planned, sampled, bool(work.tokens), over_s, is_ahead=bool(self._steps)))

    def _abort_recalled(self) -> None:
        withdrawn, self._recalled_ids = self._recalled_ids, []
        for request_id in withdrawn:
            self.engine.abort(request_id)
