"""The loop: virtual time, programs that come and go, and the engine's own scheduler in between.

One pass of the loop is one engine step. What is due by now happens first
(arrivals, tools that end, ticks of a router); then the scheduler plans, the
clock goes on by what the latency model says the step takes, and its results are
taken in. A policy sees what a server would: requests when they arrive, events
when a client sends them. The plan of a program stays on the client's side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .access_recorder import AccessRecorder
from .account import Account, ask_steward
from .agenda import Agenda
from .bare_engine import BareEngine
from .clients import Clients
from .clock import VirtualClock
from .door import Door
from .host_cache import HostCache
from .latency.work import LatencyModel
from .lives import RunLog
from .occupancy import look
from .script import follow_script
from .workloads.loops import Loop

if TYPE_CHECKING:  # of ours, and the stock scheduler's process has nothing of ours in it
    from .tier_copies import TierCopies

POLL_S = 0.05
"""How long the engine waits where it has requests and can run none of them: something must first happen."""

STUCK_S = 3600.0
"""Virtual seconds without any step after which a run is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How long, and what is recorded. Seconds are virtual."""

    until_s: float | None = None
    """Stop here; ``None``: when all programs have finished."""
    samples: int = 200
    """Looks at the occupancy, over the whole run; 0: none."""
    outputs_name_tools: bool = True
    """A finished output says which tools it calls, as a real model's does, and an engine's parser reads
    it there and then. False: servers hear of tools from clients only."""
    oracle: bool = False
    """The policy is told how long each output will be, in place of its own predictor's answers."""
    erring: float | None = None
    """Of outputs that have begun it is told so too, but for an error: mean |ln(actual ÷ told)|."""
    max_virtual_s: float = 30 * 86400.0
    """A run without ``until_s`` is given up here, with a note."""


class Simulation:
    """One policy on one workload. ``run()`` once."""

    def __init__(
        self,
        engine: BareEngine,
        clock: VirtualClock,
        latency: LatencyModel,
        loop: Loop,
        log: RunLog,
        options: SimulationOptions,
        *,
        door: Door,
        host: HostCache | TierCopies | None = None,
        recorder: AccessRecorder | None = None,
        with_hints: bool = False,
        on_progress: Callable[[RunLog, float], None] = lambda log, now: None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._latency = latency
        self._log = log
        self._options = options
        self._host = host
        self._recorder = recorder
        self._on_progress = on_progress
        self._account = Account(engine.options.block_size)
        self._agenda = Agenda()
        self._clients = Clients(
            engine,
            self._agenda,
            loop,
            door,
            self._account,
            log,
            call_s=latency.call_s,
            with_hints=with_hints,
        )
        self._adapter = getattr(engine.scheduler, "sojourn", None)
        follow_script(engine, self._account, self._clients.outputs, options)

    # -- the loop -----------------------------------------------------------------

    def run(self) -> RunLog:
        """Play until the end; the log handed in is filled and returned."""
        started = time.perf_counter()
        self._clients.begin()
        if self._options.samples and self._options.until_s:
            self._sample_every(self._options.until_s / self._options.samples)
        end_s = self._options.until_s if self._options.until_s is not None else self._options.max_virtual_s
        clock, scheduler = self._clock, self._engine.scheduler
        stood_still_s = 0.0
        shown = started
        while True:
            self._agenda.happen_until(clock.now_s)
            self._clients.deliver()
            if clock.now_s >= end_s or (not self._clients.playing and self._agenda.is_over):
                break
            if not scheduler.has_requests() and not self._copying():
                clock.advance_to(min(end_s, self._agenda.next_s()))
                continue
            before_s = clock.now_s
            if self._step():
                stood_still_s = 0.0
            else:
                clock.advance_to(min(end_s, max(clock.now_s, self._wake_up_s())))
                stood_still_s += clock.now_s - before_s
                if stood_still_s > STUCK_S:
                    self._log.notes.append(
                        f"nothing could run for {STUCK_S:.0f} s although requests waited; given up at "
                        f"{clock.now_s:.0f} s"
                    )
                    break
            if self._log.steps % 256 == 0 and time.perf_counter() - shown > 0.2:
                shown = time.perf_counter()
                self._on_progress(self._log, clock.now_s)
        if self._options.until_s is None and clock.now_s >= end_s:
            self._log.notes.append(f"given up after {end_s:.0f} virtual s")
        return self._close(started)

    def _step(self) -> bool:
        """One engine step; False where nothing was computed and no copy ended."""
        engine, clock, log = self._engine, self._clock, self._log
        requests = engine.scheduler.requests
        entered = time.perf_counter()
        planned = engine.plan()
        log.scheduler_s += time.perf_counter() - entered
        if planned.preempted_req_ids:
            log.preemption_steps.extend([log.steps] * len(planned.preempted_req_ids))
        orders: Any = planned.kv_connector_metadata
        if self._host is not None and orders is not None:
            for request_id, blocks in self._host.loads(orders):
                self._account.loading(request_id, blocks)
        work, first = self._account.step(planned, requests, clock.now_s)
        if self._recorder is not None:
            self._recorder.step(planned, requests)
        if self._host is not None and orders is not None:
            clock.advance_to(self._host.begin_step(orders, clock.now_s))
        if work.tokens:
            took_s = self._latency.step_s(work)
            log.steps += 1
            log.busy_s += took_s
            over_s = clock.now_s + took_s
            if self._host is not None:
                over_s = self._host.step_over_s(clock.now_s, took_s)
            clock.advance_to(over_s)
        for turn in first:
            turn.life.first_token_s = clock.now_s
        # Clients and routers do not wait for a step's end: what was due meanwhile came before its results.
        # It has reached the engine by then, which looks at it after them.
        self._agenda.happen_until(clock.now_s)
        copies = self._host.finished(clock.now_s) if self._host is not None else None
        if not work.tokens and copies is None:
            return False
        entered = time.perf_counter()
        finished = engine.take_in(planned, copies)
        log.scheduler_s += time.perf_counter() - entered
        for request_id in finished:
            self._finished(request_id)
        return True

    def _finished(self, request_id: str) -> None:
        turn = self._account.finished(request_id, self._clock.now_s)
        self._clients.outputs.forget(turn.request.output_token_ids)
        if self._recorder is not None:
            self._recorder.finished(turn.request)
        if self._adapter is not None:
            ask_steward(turn.life, self._adapter.steward)
        self._clients.answered(turn)

    def _wake_up_s(self) -> float:
        """When to look again where nothing can run: when something happens, or soon, for a lease may end."""
        copied_s = self._host.next_done_s() if self._host is not None else float("inf")
        return min(self._agenda.next_s(), copied_s, self._clock.now_s + POLL_S)

    def _copying(self) -> bool:
        return self._host is not None and (
            self._host.next_done_s() != float("inf") or self._host.has_unsubmitted
        )

    # -- looking ------------------------------------------------------------------------

    def _sample_every(self, every_s: float) -> None:
        def sample() -> None:
            playing = self._clients.playing
            acting = [p for p in playing.values() if p.state == "acting"]
            running = {r.request_id for r in self._engine.scheduler.running}
            held = sum(1 for r in running if r in self._account.live)
            self._log.occupancy.append(
                look(
                    self._engine,
                    [p.hashes for p in acting],
                    at_s=self._clock.now_s,
                    waiting=len(playing) - len(acting) - held,
                    acting=len(acting),
                    running=held,
                )
            )
            self._agenda.at(self._clock.now_s + every_s, sample, background=True)

        self._agenda.at(every_s, sample, background=True)

    def _close(self, started: float) -> RunLog:
        log = self._log
        log.virtual_s = self._clock.now_s
        if self._host is not None:
            log.copied_to_host_bytes = self._host.to_host_bytes
            log.copied_to_device_bytes = self._host.to_device_bytes
            log.copied_to_disk_bytes = self._host.to_disk_bytes
            log.copied_from_disk_bytes = self._host.from_disk_bytes
        if self._adapter is not None:
            log.hook_failures = self._adapter.failures
        self._account.cut_off(self._clock.now_s)
        log.wall_s = time.perf_counter() - started
        return log
