"""Our own tiers with copies that take virtual time: the planner is the engine's, the mover is made up here.

What a step overwrites is saved before it begins; what it loads comes layer by
layer while it computes, so a step ends no sooner than its last layer has come and
been computed. Each direction is one lane, first come first served.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput

from ..tiers.jobs import Fate, TierResults
from ..vllm.connector import StepOrders, StepReport

if TYPE_CHECKING:
    from .latency.work import LatencyModel

LAYERS = 32
"""Of a step's time, the share of the layer that is computed after the last load has come."""


class TierCopies:
    """The copies of one engine. All times are virtual seconds."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        self._latency = latency
        self._block_bytes = block_bytes
        self._stores: dict[int, float] = {}
        """Of each store under way, when it ends; in the order of their ends."""
        self._to_host_free_s = 0.0
        self._to_device_free_s = 0.0
        self._loaded_s = 0.0
        self._results = TierResults(on_disk=[])
        self.to_host_bytes = 0
        self.to_device_bytes = 0

    def loads(self, orders: StepOrders) -> Iterable[tuple[str, int]]:
        """Requests that load something in this step, and how many blocks."""
        return [(request_id, len(copies)) for request_id, copies in orders.jobs.loads.items()]

    def begin_step(self, orders: StepOrders, now: float) -> float:
        """Start the copies a step asks for. Returns when the step may begin."""
        jobs = orders.jobs
        begins_s = max([now, *(self._stores[job] for job in jobs.awaited if job in self._stores)])
        if jobs.saves:
            # The lane is not waited for: it is the forward pass that must not write before.
            begins_s += self._copy_s(len(jobs.saves), to_host=True)
        blocks = sum(len(copies) for copies in jobs.loads.values())
        if blocks:
            took_s = self._copy_s(blocks, to_host=False)
            self._to_device_free_s = self._loaded_s = max(begins_s, self._to_device_free_s) + took_s
        for job, copies in jobs.stores.items():
            took_s = self._copy_s(len(copies), to_host=True)
            self._stores[job] = self._to_host_free_s = max(begins_s, self._to_host_free_s) + took_s
        return begins_s

    def step_over_s(self, began_s: float, took_s: float) -> float:
        """When a step that computes for so long is over."""
        return max(began_s + took_s, self._loaded_s + took_s / LAYERS if self._loaded_s > began_s else 0.0)

    def finished(self, now: float) -> KVConnectorOutput | None:
        """Copies done by ``now`` that were not reported before, as the worker would report them."""
        for job in [job for job, done_s in self._stores.items() if done_s <= now]:
            del self._stores[job]
            self._results.stored[job] = Fate.MOVED
        if not self._results:
            return None
        results, self._results = self._results, TierResults()
        return KVConnectorOutput(kv_connector_worker_meta=StepReport(results))

    def next_done_s(self) -> float:
        """When the next copy ends; ``inf`` where none is under way."""
        return next(iter(self._stores.values()), float("inf"))

    @property
    def has_unsubmitted(self) -> bool:
        """Nothing waits here for the next step: orders wait in the planner."""
        return False

    def _copy_s(self, blocks: int, *, to_host: bool) -> float:
        size = blocks * self._block_bytes
        if to_host:
            self.to_host_bytes += size
        else:
            self.to_device_bytes += size
        return self._latency.copy_s(size, to_host=to_host)


def transfer_config(host_blocks: int, page_bytes: int) -> KVTransferConfig:
    """The engine's settings for our tiers with ``host_blocks`` blocks of host memory."""
    return KVTransferConfig(
        kv_connector="SojournConnector",
        kv_connector_module_path="sojourn_server.vllm.connector",
        kv_role="kv_both",
        engine_id="lab",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host_bytes": host_blocks * page_bytes},
    )
