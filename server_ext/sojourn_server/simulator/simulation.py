"""The simulation loop: one virtual clock with its events, and N engines that step independently.

The loop runs due client events, ends the steps that end now, begins new steps, and moves the clock to the
next due time. An engine schedules with vLLM's own scheduler; the latency model gives the duration of a step.
Policies see what a real server would: requests when they arrive, and events when clients send them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .event_queue import EventQueue
from .latency.latency_models import LatencyModel, isolated_completion_s
from .run_log import REPLICA_STEP_OFFSET, ReplicaLog, RunLog
from .simulated_clients import SimulatedClients
from .simulated_engine import STOP_TOKEN, SimulatedEngine
from .simulated_gateway import RequestRouter, SimulatedGateway
from .simulated_replica import NEVER_S, SimulatedReplica
from .token_accounting import InFlightTurn, TokenAccounting, annotate_from_scheduler
from .workloads.arrival_processes import ArrivalProcess
from .workloads.program_plans import ProgramPlan

STALL_TIMEOUT_S = 3600.0
"""Virtual seconds without progress after which a run is aborted."""
_CHECK_PASSES = 256
"""Iterations of the loop between two checks for a stall."""
MAX_VIRTUAL_S = 30 * 86400.0
"""End of a run without ``until_s``. A run that reaches it gets a note."""


class Simulation:
    """One policy on one workload. Call ``run()`` once; ``run_simulation`` has the arguments.

    ``engines`` are pairs: an engine, and the simulated transfers of its host memory or ``None``. All engines
    have the same options. ``standalone`` means a single engine outside a cluster; its logs name no replica.
    """

    def __init__(
        self,
        engines: Sequence[tuple[SimulatedEngine, Any]],
        clock: EventQueue,
        latency: LatencyModel,
        loop: ArrivalProcess,
        log: RunLog,
        *,
        front: RequestRouter,
        standalone: bool = False,
        with_hints: bool,
        until_s: float | None = None,
        on_progress: Callable[[float, int], None] = lambda now, finished: None,
    ) -> None:
        assert not standalone or len(engines) == 1
        self.clock, self.latency, self.log, self.front = clock, latency, log, front
        self.standalone, self._until_s, self._on_progress = standalone, until_s, on_progress
        computed: set[bytes] | None = None if len(engines) == 1 else set()
        self.replicas = [
            SimulatedReplica(
                f"r{number}",
                engine,
                TokenAccounting(engine.options.block_size, computed),
                host,
                latency,
                clock,
                on_first_token=lambda turn: self.clients.first_token(turn),
                on_finished=self._finished,
            )
            for number, (engine, host) in enumerate(engines)
        ]
        self.clients = SimulatedClients(
            self.replicas,
            clock,
            loop,
            front,
            log,
            expected_s=self.expected_s,
            call_s=latency.call_s,
            standalone=standalone,
            with_hints=with_hints,
        )
        self._stepped_s = 0.0
        """End of the latest step."""
        for sim_replica in self.replicas:
            sim_replica.engine.tokens = partial(_next_token, sim_replica.account.live)
            if sim_replica.engine.adapter is not None:
                sim_replica.engine.adapter.reader = self.clients.outputs

    def expected_s(self, plan: ProgramPlan) -> float:
        """Seconds that a program takes alone on an empty engine, tools included."""
        batched = self.replicas[0].engine.options.max_num_batched_tokens
        return isolated_completion_s(plan, self.latency, batched)

    # -- the loop -----------------------------------------------------------------

    def run(self) -> RunLog:
        """Run to the end. Fills and returns the log."""
        started = shown = time.perf_counter()
        clock, clients = self.clock, self.clients
        end_s = self._until_s if self._until_s is not None else MAX_VIRTUAL_S
        clients.begin()
        passes = 0
        while True:
            clock.run_due_events(clock.now_s)
            over = [sim_replica for sim_replica in self.replicas if sim_replica.due_s <= clock.now_s]
            for sim_replica in over:
                if sim_replica.is_stepping:
                    sim_replica.end_step()
                    self._stepped_s = clock.now_s
            if over:
                clock.run_due_events(clock.now_s)
            if not clients.active and clock.is_over:
                break
            if clock.now_s < end_s:
                self._begin_steps(over)
                next_s = min(sim_replica.due_s for sim_replica in self.replicas)
            else:
                next_s = min((one.due_s for one in self.replicas if one.is_stepping), default=NEVER_S)
                if next_s == NEVER_S:
                    break
            next_s = min(clock.next_s(), next_s)
            # Only a step may end after the end of the run.
            is_stepping = any(sim_replica.is_stepping for sim_replica in self.replicas)
            clock.now_s = next_s if is_stepping else min(end_s, next_s)
            passes += 1
            if passes % _CHECK_PASSES == 0:
                if self._is_stuck():
                    break
                if time.perf_counter() - shown > 0.2:
                    shown = time.perf_counter()
                    finished = sum(program.finished_s is not None for program in self.log.programs)
                    self._on_progress(clock.now_s, finished)
        if self._until_s is None and clock.now_s >= end_s:
            self.log.notes.append(f"given up after {end_s:.0f} virtual s")
        return self._close(started)

    def _begin_steps(self, over: Sequence[SimulatedReplica]) -> None:
        """Begin the next step of each engine that is between two steps and has a reason to act: a message, or
        a due time that has come.

        ``over`` are the engines whose step has just ended. If such an engine has planned a step ahead, that
        step now runs, and the engine plans one more.
        """
        now = self.clock.now_s
        # A single engine that can run no request retries after every event.
        retries = len(self.replicas) == 1 and not over
        for sim_replica in self.replicas:
            acts = sim_replica in over and (sim_replica.due_s <= now or sim_replica.is_stepping)
            waits = not sim_replica.is_stepping and (retries or sim_replica.has_messages)
            if acts or waits:
                sim_replica.begin_next_step()
                if sim_replica.is_stepping and sim_replica.due_s <= now and not sim_replica.is_computing:
                    sim_replica.end_step()

    def _is_stuck(self) -> bool:
        """Whether nothing has been computed for long although requests wait in an engine or at the router."""
        now = self.clock.now_s
        blocked = any(sim_replica.is_blocked for sim_replica in self.replicas)
        if now - self._stepped_s <= STALL_TIMEOUT_S or not (blocked or self.clock.is_over):
            return False
        where = "in an engine" if blocked else "at the router"
        self.log.notes.append(
            f"nothing happened for {STALL_TIMEOUT_S:.0f} s although requests waited {where}; "
            f"given up at {now:.0f} s"
        )
        return True

    # -- callbacks of engines -------------------------------------------------------

    def _finished(self, turn: InFlightTurn, engine: SimulatedEngine) -> None:
        self.clients.outputs.pop(id(turn.request.output_token_ids), None)
        if engine.adapter is not None:
            annotate_from_scheduler(turn.log, engine.adapter.program_scheduler)
        self.clients.answered(turn)

    def _close(self, started: float) -> RunLog:
        log = self.log
        log.virtual_s = self.clock.now_s
        if isinstance(self.front, SimulatedGateway):
            log.routes = dict(sorted(self.front.core.counts.routes.items()))
        for number, one in enumerate(self.replicas):
            host = one.host
            one.deliver()
            log.steps += one.steps
            log.busy_s += one.busy_s / len(self.replicas)
            log.scheduler_s += one.scheduler_s
            log.preemption_steps += [number * REPLICA_STEP_OFFSET + step for step in one.preemption_steps]
            if not self.standalone:
                log.replicas.append(ReplicaLog(replica=one.replica, steps=one.steps, busy_s=one.busy_s))
            if host is not None:
                log.copied_to_host_bytes += host.to_host.moved_bytes
                log.copied_to_device_bytes += host.to_device.moved_bytes
                log.copied_to_disk_bytes += host.to_disk.moved_bytes
                log.copied_from_disk_bytes += host.from_disk.moved_bytes
            if one.engine.adapter is not None:
                log.hook_failures += one.engine.adapter.failures
            one.account.cut_off(self.clock.now_s)
        log.wall_s = time.perf_counter() - started
        return log


def _next_token(live: dict[str, InFlightTurn], request: Any) -> int:
    """The planned output token. The last token is never computed and in no block, so it may differ from the
    next prompt's token."""
    output, index = live[request.request_id].output, request.num_output_tokens
    return output[index] if index + 1 < len(output) else STOP_TOKEN
