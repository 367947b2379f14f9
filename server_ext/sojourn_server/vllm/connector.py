"""KV blocks below the device, as a connector of vLLM's: planner beside the scheduler, mover beside the model.

vLLM makes one of each from ``--kv-transfer-config``. What the device loses is told
to the planner by our free queue, so the connector is of use only beside our
scheduler; without it nothing is saved and nothing is found.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from ..tiers.jobs import Key, TierJobs, TierResults
from ..tiers.planner import TierPlanner
from ..tiers.traffic import Traffic
from .tier_settings import TierSettings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ..tiers.mover import Mover

logger = init_logger("vllm.sojourn")

STEPS_UNDER_WAY = 4
"""No engine plans so many steps before it has heard of the first one's loads."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """What goes to the worker with a step."""

    jobs: TierJobs = field(default_factory=TierJobs)
    not_filled: set[int] = field(default_factory=set)
    """Blocks that a request counts on and that no job fills."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What comes back."""

    results: TierResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Raises ``NotImplementedError``: engines of several workers are refused when they start."""
        raise NotImplementedError("the tiers of several workers are not brought together yet")


class SojournConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Either half, by ``role``. Raises ``SettingsError`` where it cannot serve."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = TierSettings.read(vllm_config, kv_cache_config)
        self._block_size = self.settings.block_tokens
        if role is KVConnectorRole.SCHEDULER:
            self.planner = TierPlanner(self.settings.limits())
            self.traffic = Traffic()
            self.off = False
            """Nothing is saved and nothing found any more."""
            self.off_because: str | None = None
            self.strict = False
            """Raise our own errors. For tests."""
            self.clock = time.monotonic
            self._not_filled: set[int] = set()
            self._loading: deque[list[list[int]]] = deque([[]], maxlen=STEPS_UNDER_WAY)
            """Of each newest step, the blocks of requests that load something in it."""
            self._asked: dict[str, tuple[int, list[Key]]] = {}
            """Of a request, the number of blocks the device had and the keys that were found."""
            self.loaded_tokens: dict[str, int] = {}
            """Of requests admitted in this step, what they had from below the device."""
        else:
            self._mover: Mover | None = None
            self._not_filled_now: set[int] = set()

    # -- beside the scheduler -----------------------------------------------------
    # vLLM calls these where an error would end the engine.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind those on the device; ``None``: the disk is being read."""
        try:
            return self._find(request, num_computed_tokens), False
        except Exception as error:
            self.failed(error)
            return 0, False

    def _find(self, request: Request, num_computed_tokens: int) -> int | None:
        request_id = request.request_id
        self._asked.pop(request_id, None)
        if self.off or request.skip_reading_prefix_cache:
            return 0
        first = num_computed_tokens // self._block_size
        # One token at least is computed: its logits are asked for.
        keys: list[Key] = request.block_hashes[first : (request.num_tokens - 1) // self._block_size]
        found = self.planner.lookup(request_id, keys, self.clock())
        if found is None:
            return None
        self._asked[request_id] = first, keys[:found]
        return found * self._block_size

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has its blocks: those of external tokens are to be filled."""
        first, keys = self._asked.pop(request.request_id, (0, []))
        count = num_external_tokens // self._block_size
        block_ids = blocks.get_block_ids()[0][first : first + count]
        try:
            self.planner.load(request.request_id, keys[:count], block_ids)
            if count:
                self._loading[-1].append(list(blocks.get_block_ids()[0]))
                self.loaded_tokens[request.request_id] = num_external_tokens
        except Exception as error:
            self._not_filled.update(block_ids)
            self.failed(error)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """The orders of the step just planned."""
        self._asked.clear()
        self._loading.append([])
        not_filled, self._not_filled = self._not_filled, set()
        try:
            return StepOrders(self.planner.take_jobs(spill=not self.off), not_filled)
        except Exception as error:
            self.failed(error)
            return StepOrders(TierJobs(), not_filled)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What came of earlier orders."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            try:
                self.traffic.add(report.results, self.clock())
                self.planner.take_results(report.results)
            except Exception as error:
                self.failed(error)

    def loading(self) -> Iterator[list[int]]:
        """All blocks of each request that loads something in a step that may still be under way."""
        return chain.from_iterable(self._loading)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing holds its blocks: what is worth saving is saved when they are reused, or by order."""
        self._asked.pop(request.request_id, None)
        self.loaded_tokens.pop(request.request_id, None)
        try:
            self.planner.abandon(request.request_id)
        except Exception as error:
            self.failed(error)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Orders wait for a step, though no request does."""
        return not self.off and self.planner.has_orders

    def reset_cache(self) -> bool:
        """Nothing that was computed so far is to be found any more."""
        try:
            self.planner.forget()
        except Exception as error:
            self.failed(error)
        return True

    def turn_off(self, why: str) -> None:
        """What the device loses is not told any more, or cannot be believed: nothing below it is found again.

        What was found for a request that is just being admitted is loaded all the same: it was true.
        """
        if not self.off:
            self.off, self.off_because = True, why
            logger.error("sojourn: tiers below the device are off: %s", why)

    def failed(self, error: Exception) -> None:
        """An error of ours: the tiers are off from now on. Raises it where ``strict``."""
        if self.strict:
            raise error
        logger.error("sojourn: a hook of the connector failed; the engine goes on", exc_info=error)
        self.turn_off(f"an error of ours, {type(error).__name__}")

    # -- beside the model -------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device's blocks are there: make the host's, and open the disk."""
        from ..tiers.host_memory import HostMemory
        from ..tiers.mover import Mover

        settings = self.settings
        memory = HostMemory(kv_caches, settings.blocks, settings.host_slots)
        self._mover = Mover(memory, *settings.open_disk(memory.block_bytes, len(kv_caches)))
        disk = "no disk"
        if settings.disk:
            disk = (
                f"for {settings.disk_blocks} in {settings.disk}, where {self._mover.on_disk} are from before"
            )
            if settings.disk_name is not None:
                disk += f"; as {settings.disk_name}, and other engines' stores there are read"
        logger.info(
            "sojourn: room for %d blocks of %d bytes in host memory, %s",
            settings.host_slots, memory.block_bytes, disk,
        )  # fmt: skip

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass writes anything."""
        assert isinstance(kv_connector_metadata, StepOrders)
        self._not_filled_now = set(kv_connector_metadata.not_filled)
        if self._mover is None:
            return
        try:
            self._mover.begin_step(kv_connector_metadata.jobs)
        except Exception:
            logger.exception("sojourn: the mover failed to begin a step; what it was to load is computed")
            for copies in kv_connector_metadata.jobs.loads.values():
                self._not_filled_now.update(copy.block_id for copy in copies)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads have begun in ``handle_preemptions``, after what must be saved before them."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The forward pass has come to a layer."""
        if self._mover is not None:
            self._mover.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved as it is computed."""

    def wait_for_save(self) -> None:
        """The forward pass is over."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this step that were not filled. Nothing is being loaded any more when it returns."""
        not_filled, self._not_filled_now = self._not_filled_now, set()
        return not_filled | (self._mover.end_step() if self._mover is not None else set())

    def build_connector_worker_meta(self) -> StepReport | None:
        """What has come to its end."""
        if self._mover is None:
            return None
        results = self._mover.take_results()
        return StepReport(results) if results else None

    def shutdown(self) -> None:
        """The worker ends."""
        if self.role is KVConnectorRole.WORKER and self._mover is not None:
            self._mover.close()
            self._mover = None


def waited(output: KVConnectorOutput) -> float:
    """Seconds of a step for which its forward pass waited for our copies."""
    report = output.kv_connector_worker_meta
    return report.results.waited_s if isinstance(report, StepReport) else 0.0
