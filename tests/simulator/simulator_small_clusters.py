"""Runs a small workload on several replicas, under any cluster policy of the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator_small_workload import BLOCK, FlatLatency, SmallLoop
from sojourn_server.simulator.event_queue import VirtualClock
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions
from sojourn_server.simulator.simulated_gateway import SimulatedGateway
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.simulator_policies import ClusterPolicy, find_cluster_policy
from sojourn_server.simulator.tier_transfers import TierTransfers
from sojourn_server.simulator.vllm_offload_transfers import VllmOffloadTransfers


class SmallCluster:
    """Result of a run: the log, and the final state of the router or gateway and of the engines."""

    def __init__(
        self,
        policy: str | ClusterPolicy,
        loop: Any,
        *,
        replicas: int = 3,
        blocks: int = 100,
        host_blocks: int = 200,
        disk_blocks: int = 0,
        until_s: float | None = None,
        call_s: float = 0.0,
        max_num_seqs: int = 8,
        seen: Iterable[Any] = (),
    ) -> None:
        chosen = find_cluster_policy(policy) if isinstance(policy, str) else policy
        engine = chosen.engine
        if not engine.host_cache:
            host_blocks = 0
        self.clock = VirtualClock()
        latency = FlatLatency(call_s)
        make = TierTransfers if engine.own_tiers else VllmOffloadTransfers
        self.engines: list[tuple[SimulatedEngine, Any]] = []
        for _ in range(replicas):
            settings = engine.settings
            options = SimulatedEngineOptions(
                blocks=blocks,
                block_size=BLOCK,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=256,
                max_model_len=(blocks - 1) * BLOCK,
                host_blocks=host_blocks,
                disk_blocks=disk_blocks,
                own_tiers=engine.own_tiers,
                sojourn=None if settings is None else {**settings, "strict": True},
            )
            copies = make(latency, 64) if host_blocks else None
            self.engines.append((SimulatedEngine(options, self.clock), copies))
        programs = loop.programs if isinstance(loop, SmallLoop) else []
        self.log = RunLog(
            policy=chosen.name, programs_wanted=len(programs), hardware="none", model="none",
            trace="small", seed=0, loop="open",
        )  # fmt: skip
        self.front = chosen.front(replicas)
        self.simulation = Simulation(
            self.engines,
            self.clock,
            latency,
            loop,
            self.log,
            front=self.front,
            with_hints=settings is not None,
            until_s=until_s,
        )
        self.simulation.observe_programs(seen)
        self.simulation.run()

    @property
    def core(self) -> Any:
        """The routing core, if the policy has one."""
        assert isinstance(self.front, SimulatedGateway)
        return self.front.core
