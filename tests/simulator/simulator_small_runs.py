"""Runs a small workload under any policy of the simulator, and records every decision with its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator_small_workload import BLOCK, FlatLatency, SmallLoop
from sojourn_server.simulator.event_queue import VirtualClock
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.simulator_policies import Bound, SimulatorPolicy, find_policy
from sojourn_server.simulator.tier_transfers import TierTransfers
from sojourn_server.simulator.vllm_offload_transfers import VllmOffloadTransfers

POOL_BLOCKS = 100


class SmallRun:
    """Result of a run: the log, and ``decisions`` as (virtual seconds, decision)."""

    def __init__(
        self,
        policy: str | SimulatorPolicy,
        loop: SmallLoop,
        *,
        blocks: int = POOL_BLOCKS,
        host_blocks: int = 200,
        disk_blocks: int = 0,
        until_s: float | None = None,
        call_s: float = 0.0,
        asynchronous: bool = False,
        prepare: Callable[[Simulation], None] | None = None,
    ) -> None:
        chosen = find_policy(policy) if isinstance(policy, str) else policy
        self.clock = VirtualClock()
        self.decisions: list[tuple[float, Any]] = []
        latency = FlatLatency(call_s)
        if chosen.bound is Bound.FREE_IO:
            host_blocks = 5000
        if not chosen.host_cache:
            host_blocks = 0
        settings = chosen.settings
        self.engine = SimulatedEngine(
            SimulatedEngineOptions(
                blocks=2000 if chosen.bound is Bound.UNLIMITED else blocks,
                block_size=BLOCK,
                max_num_seqs=8,
                max_num_batched_tokens=256,
                max_model_len=(blocks - 1) * BLOCK,
                asynchronous=asynchronous,
                host_blocks=host_blocks,
                own_tiers=chosen.own_tiers,
                disk_blocks=disk_blocks,
                sojourn=None if settings is None else {**settings, "strict": True},
            ),
            self.clock,
        )
        self._watch()
        self.log = RunLog(
            policy=chosen.name, programs_wanted=len(loop.programs), hardware="none", model="none",
            trace="small", seed=0, loop="open",
        )  # fmt: skip
        request_router = chosen.request_router()
        self._watch_door(request_router)
        make = TierTransfers if chosen.own_tiers else VllmOffloadTransfers
        copies = make(latency, 0 if chosen.bound is Bound.FREE_IO else 64) if host_blocks else None
        simulation = Simulation(
            [(self.engine, copies)],
            self.clock,
            latency,
            loop,
            self.log,
            front=request_router,
            standalone=True,
            with_hints=settings is not None,
            until_s=until_s,
        )
        if prepare is not None:
            prepare(simulation)
        simulation.run()
        adapter = getattr(self.engine.scheduler, "sojourn", None)
        if adapter is not None:
            for decision in adapter.program_scheduler.decisions.since(0, 100_000)[0]:
                self.decisions.append((decision.at_s, ("decision", decision.as_dict())))
        self.decisions.sort(key=lambda entry: entry[0])

    def before(self, at_s: float) -> list[tuple[float, Any]]:
        """The decisions before ``at_s``."""
        return [entry for entry in self.decisions if entry[0] < at_s]

    def _watch(self) -> None:
        plan = self.engine.plan

        def watched() -> Any:
            now = self.clock.now_s
            planned = plan()
            what = (
                tuple(planned.num_scheduled_tokens.items()),
                tuple((new.req_id, new.num_computed_tokens) for new in planned.scheduled_new_reqs),
                tuple(sorted(planned.preempted_req_ids or ())),
            )
            if any(what):
                self.decisions.append((now, ("step", what)))
            return planned

        self.engine.plan = watched  # type: ignore[method-assign]

    def _watch_door(self, request_router: Any) -> None:
        select_requests = request_router.select_requests

        def watched(view: Any, now: float) -> Any:
            entering = list(select_requests(view, now))
            if entering:
                self.decisions.append((now, ("door", tuple(entering))))
            return entering

        request_router.select_requests = watched
