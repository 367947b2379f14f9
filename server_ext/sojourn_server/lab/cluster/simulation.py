"""The loop over several engines: one virtual time, in which the steps of each overlap with the others'."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..account import Account, LiveTurn, ask_steward
from ..agenda import Agenda
from ..bare_engine import BareEngine
from ..clock import VirtualClock
from ..latency.work import LatencyModel
from ..lives import STEPS_APART, OccupancySample, ReplicaLife, RunLog
from ..occupancy import look
from ..script import follow_script
from ..simulation import STUCK_S, SimulationOptions
from ..workloads.loops import Loop
from ..workloads.players import ProgramPlan
from .clients import ClusterClients, GatewayClients, RoutedClients, Router
from .expected import alone_s
from .gateway import Gateway
from .stepper import NEVER_S, Stepper


class ClusterSimulation:
    """One policy on one workload, on several engines of the same shape. ``run()`` once.

    ``front`` is our gateway's core, or a router that does without it. Each of ``engines`` comes with the
    copies of its host memory. With one engine, and a front that holds nobody back, everything happens
    as in ``Simulation``.
    """

    def __init__(
        self,
        engines: Sequence[tuple[BareEngine, Any]],
        clock: VirtualClock,
        latency: LatencyModel,
        loop: Loop,
        log: RunLog,
        options: SimulationOptions,
        *,
        front: Gateway | Router,
        with_hints: bool = False,
        on_progress: Callable[[RunLog, float], None] = lambda log, now: None,
    ) -> None:
        self._clock = clock
        self._log = log
        self._options = options
        self._front = front
        self._on_progress = on_progress
        self._agenda = Agenda()
        computed: set[bytes] = set()
        self._steppers = [
            Stepper(
                f"r{number}",
                engine,
                Account(engine.options.block_size, computed),
                host,
                latency,
                clock,
                on_first_token=self._first_token,
                on_finished=self._finished,
            )
            for number, (engine, host) in enumerate(engines)
        ]
        self._numbers = {stepper.replica: number for number, stepper in enumerate(self._steppers)}
        batched = self._steppers[0].engine.options.max_num_batched_tokens
        self._expected_s: Callable[[ProgramPlan], float] = lambda plan: alone_s(plan, latency, batched)
        more: dict[str, Any] = {
            "expected_s": self._expected_s,
            "call_s": latency.call_s,
            "with_hints": with_hints,
        }
        self._clients: ClusterClients
        if isinstance(front, Gateway):
            self._clients = GatewayClients(self._steppers, self._agenda, loop, front, log, **more)
        else:
            self._clients = RoutedClients(self._steppers, self._agenda, loop, front, log, **more)
        self._due: list[tuple[float, int]] = []
        """When each engine is to be looked at, as a heap; an entry that is not its ``due_s`` is stale."""
        self._in_a_step = 0
        self._stepped_s = 0.0
        """When a step was last over."""
        for stepper in self._steppers:
            follow_script(stepper.engine, stepper.account, self._clients.outputs, options)

    def saw(self, programs: Iterable[ProgramPlan]) -> None:
        """These have ended before the run begins, each as if it had been alone: what clients and the gateway
        have learned of their types is known from the start. To be called before ``run``."""
        for plan in programs:
            kind = self._clients.saw(plan)
            if isinstance(self._front, Gateway):
                last = plan.plans[-1]
                tokens = last.prompt_tokens + last.output_tokens
                tools_s = sum(plan.gap_s(turn) for turn in range(len(plan.plans) - 1))
                self._front.saw(kind, len(plan.plans), tokens, self._expected_s(plan), tools_s)

    # -- the loop -----------------------------------------------------------------

    def run(self) -> RunLog:
        """Play until the end; the log handed in is filled and returned."""
        started = shown = time.perf_counter()
        options, clock, agenda, clients = self._options, self._clock, self._agenda, self._clients
        end_s = options.until_s if options.until_s is not None else options.max_virtual_s
        clients.begin()
        if options.samples and options.until_s:
            self._sample_every(options.until_s / options.samples)
        passes = 0
        while True:
            agenda.happen_until(clock.now_s)
            over = self._take_due()
            for stepper in over:
                if stepper.stepping:
                    self._in_a_step -= 1
                    stepper.results()
                    self._put_down(stepper)
                    self._stepped_s = clock.now_s
            if over:
                agenda.happen_until(clock.now_s)
            if not clients.playing and agenda.is_over:
                break
            if clock.now_s < end_s:
                self._look(over)
            elif not self._in_a_step:
                break
            next_s = min(agenda.next_s(), self._next_s())
            # Steps that have begun are ended; else nobody goes beyond the end.
            clock.advance_to(next_s if self._in_a_step else min(end_s, next_s))
            passes += 1
            if passes % 256 == 0 and time.perf_counter() - shown > 0.2:
                shown = time.perf_counter()
                self._on_progress(self._log, clock.now_s)
            if passes % 4096 == 0 and self._is_stuck():
                break
        if options.until_s is None and clock.now_s >= end_s:
            self._log.notes.append(f"given up after {end_s:.0f} virtual s")
        return self._close(started)

    def _next_s(self) -> float:
        due = self._due
        while due and self._steppers[due[0][1]].due_s != due[0][0]:
            heapq.heappop(due)
        return due[0][0] if due else NEVER_S

    def _take_due(self) -> list[Stepper]:
        """Engines whose time has come, in their order."""
        numbers = set()
        while self._next_s() <= self._clock.now_s:
            number = heapq.heappop(self._due)[1]
            numbers.add(number)
        return [self._steppers[number] for number in sorted(numbers)]

    def _put_down(self, stepper: Stepper) -> None:
        if stepper.due_s != NEVER_S:
            heapq.heappush(self._due, (stepper.due_s, self._numbers[stepper.replica]))

    def _look(self, over: Sequence[Stepper]) -> None:
        """Let engines look that something has reached, or whose time has come: those in no step."""
        now, mail = self._clock.now_s, self._clients.mail
        numbers = {self._numbers[replica] for replica in mail}
        numbers.update(self._numbers[stepper.replica] for stepper in over if stepper.due_s <= now)
        if len(self._steppers) == 1 and not over:
            # An engine by itself that can run nothing looks whenever anything happens, as in ``Simulation``.
            numbers.add(0)
        mail.clear()
        for number in sorted(numbers):
            stepper = self._steppers[number]
            if stepper.stepping:
                continue
            stepper.look()
            if stepper.stepping and stepper.due_s <= now and not stepper.computes:
                stepper.results()
            self._in_a_step += stepper.stepping
            self._put_down(stepper)

    def _is_stuck(self) -> bool:
        now = self._clock.now_s
        for stepper in self._steppers:
            since_s = stepper.counts.stood_still_since_s
            if since_s is not None and now - since_s > STUCK_S:
                self._log.notes.append(
                    f"{stepper.replica}: nothing could run for {STUCK_S:.0f} s although requests waited; "
                    f"given up at {now:.0f} s"
                )
                return True
        if self._agenda.is_over and now - self._stepped_s > STUCK_S:
            self._log.notes.append(
                f"nothing happened for {STUCK_S:.0f} s although requests waited at the gateway; given up at "
                f"{now:.0f} s"
            )
            return True
        return False

    # -- what engines do ------------------------------------------------------------

    def _first_token(self, stepper: Stepper, turn: LiveTurn) -> None:
        self._clients.first_token(turn)

    def _finished(self, stepper: Stepper, turn: LiveTurn) -> None:
        self._clients.outputs.forget(turn.request.output_token_ids)
        if stepper.adapter is not None:
            ask_steward(turn.life, stepper.adapter.steward)
        self._clients.answered(turn)

    # -- looking --------------------------------------------------------------------

    def _sample_every(self, every_s: float) -> None:
        def sample() -> None:
            self._log.occupancy.append(self._sample())
            self._agenda.at(self._clock.now_s + every_s, sample, background=True)

        self._agenda.at(every_s, sample, background=True)

    def _sample(self) -> OccupancySample:
        """Of all engines together, as means a replica: the pool's size in the log is one replica's."""
        playing = self._clients.playing
        acting = [program for program in playing.values() if program.state == "acting"]
        held = 0
        samples = []
        for stepper in self._steppers:
            mine = [p.hashes for p in acting if p.life.turns[-1].replica == stepper.replica]
            running = {request.request_id for request in stepper.engine.scheduler.running}
            held += sum(1 for request_id in running if request_id in stepper.account.live)
            samples.append(look(stepper.engine, mine, at_s=self._clock.now_s, waiting=0, acting=0, running=0))
        count = len(samples)
        return OccupancySample(
            at_s=self._clock.now_s,
            running=round(sum(s.running for s in samples) / count),
            idle=round(sum(s.idle for s in samples) / count),
            other=round(sum(s.other for s in samples) / count),
            free=round(sum(s.free for s in samples) / count),
            host=round(sum(s.host for s in samples) / count),
            programs_waiting=len(playing) - len(acting) - held,
            programs_acting=len(acting),
            programs_running=held,
        )

    def _close(self, started: float) -> RunLog:
        log = self._log
        log.virtual_s = self._clock.now_s
        if isinstance(self._front, Gateway):
            log.routes = dict(sorted(self._front.core.counts.routes.items()))
        for number, stepper in enumerate(self._steppers):
            counts, host = stepper.counts, stepper.host
            log.steps += counts.steps
            log.busy_s += counts.busy_s / len(self._steppers)
            log.scheduler_s += counts.scheduler_s
            log.preemption_steps.extend(number * STEPS_APART + step for step in counts.preemption_steps)
            log.replicas.append(
                ReplicaLife(replica=stepper.replica, steps=counts.steps, busy_s=counts.busy_s)
            )
            if host is not None:
                log.copied_to_host_bytes += host.to_host_bytes
                log.copied_to_device_bytes += host.to_device_bytes
                log.copied_to_disk_bytes += host.to_disk_bytes
                log.copied_from_disk_bytes += host.from_disk_bytes
            if stepper.adapter is not None:
                log.hook_failures += stepper.adapter.failures
            stepper.account.cut_off(self._clock.now_s)
        log.wall_s = time.perf_counter() - started
        return log
