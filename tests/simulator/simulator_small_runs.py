"""Runs a small workload under any policy of the simulator, and records every decision with its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator_small_workload import BLOCK, FlatLatency, SmallLoop
from sojourn_server.simulator.event_queue import EventQueue
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions
from sojourn_server.simulator.simulated_gateway import SimulatedGateway
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.simulator_policies import (
    SimulatorPolicy,
    find_cluster_policy,
    find_policy,
)
from sojourn_server.simulator.tier_transfers import TierTransfers
from sojourn_server.simulator.vllm_offload_transfers import VllmOffloadTransfers

POOL_BLOCKS = 100


class SmallRun:
    """Result of a run: the log, ``decisions`` as (virtual seconds, decision), and the final state of the
    router or gateway and of the engines. ``replicas``: engines behind a gateway; ``None``: one without."""

    def __init__(
        self,
        policy: str | SimulatorPolicy,
        loop: Any,
        *,
        replicas: int | None = None,
        blocks: int = POOL_BLOCKS,
        host_blocks: int = 200,
        disk_blocks: int = 0,
        until_s: float | None = None,
        call_s: float = 0.0,
        asynchronous: bool = False,
        prepare: Callable[[Simulation], None] = lambda simulation: None,
    ) -> None:
        find = find_policy if replicas is None else find_cluster_policy
        engine = find(policy) if isinstance(policy, str) else policy
        self.clock = EventQueue()
        self.decisions: list[tuple[float, Any]] = []
        latency = FlatLatency(call_s)
        if engine.bound == "host":
            host_blocks = 5000
        if not engine.host_cache:
            host_blocks = 0
        settings = engine.settings
        make = TierTransfers if engine.own_tiers else VllmOffloadTransfers
        self.engines: list[tuple[SimulatedEngine, Any]] = []
        for _ in range(replicas or 1):
            options = SimulatedEngineOptions(
                blocks=2000 if engine.bound == "device" else blocks,
                block_size=BLOCK,
                max_num_seqs=8,
                max_num_batched_tokens=256,
                max_model_len=(blocks - 1) * BLOCK,
                asynchronous=asynchronous,
                host_blocks=host_blocks,
                own_tiers=engine.own_tiers,
                disk_blocks=disk_blocks,
                sojourn=None if settings is None else {**settings, "strict": True},
            )
            copies = make(latency, 0 if engine.bound == "host" else 64) if host_blocks else None
            self.engines.append((SimulatedEngine(options, self.clock), copies))
        self.engine = self.engines[0][0]
        self._watch()
        programs = loop.programs if isinstance(loop, SmallLoop) else []
        self.log = RunLog(
            policy=engine.name, programs_wanted=len(programs), hardware="none", model="none",
            trace="small", seed=0, loop="open",
        )  # fmt: skip
        self.front: Any = engine.request_router()
        self.routed: list[Any] = []
        """The events that the router got."""
        self._watch_router()
        simulation = Simulation(
            self.engines,
            self.clock,
            latency,
            loop,
            self.log,
            front=self.front,
            standalone=replicas is None,
            with_hints=settings is not None,
            until_s=until_s,
        )
        prepare(simulation)
        simulation.run()
        adapter = getattr(self.engine.scheduler, "sojourn", None)
        if adapter is not None:
            for decision in adapter.program_scheduler.decisions.since(0, 100_000)[0]:
                self.decisions.append((decision.at_s, ("decision", decision.as_dict())))
        self.decisions.sort(key=lambda entry: entry[0])

    @property
    def core(self) -> Any:
        """The routing core, if the policy has one."""
        assert isinstance(self.front, SimulatedGateway)
        return self.front.core

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

    def _watch_router(self) -> None:
        take = self.front.take

        def watched(event: Any, now: float) -> Any:
            self.routed.append(event)
            actions = take(event, now)
            if actions:
                self.decisions.append((now, ("router", tuple(actions))))
            return actions

        self.front.take = watched


class SmallCluster(SmallRun):
    """A run on several replicas: three, where a test does not say."""

    def __init__(self, policy: str | SimulatorPolicy, loop: Any, *, replicas: int = 3, **more: Any) -> None:
        super().__init__(policy, loop, replicas=replicas, **more)
