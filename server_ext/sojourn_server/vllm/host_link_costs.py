"""Measured costs of copies between the device and host memory, for policies that decide whether to copy."""

from __future__ import annotations

from collections.abc import Sized

from ..core.program_scheduler import ProgramScheduler
from ..kv_offload.host_block_pool import RetentionRank
from ..policies.costs.reload_estimate import LinkCosts
from ..policies.preemption_policies import NO_OFFLOAD_S_PER_TOKEN
from .kv_cache_groups import KVCacheGroups
from .kv_offload_connector import SojournConnector


class HostLinkCosts:
    """Cost of copies between one engine's device and host memory, as measured by the connector. ``wanted``:
    keys of the blocks that preempted requests will load."""

    def __init__(
        self,
        connector: SojournConnector,
        program_scheduler: ProgramScheduler,
        groups: KVCacheGroups,
        wanted: Sized,
    ) -> None:
        self._connector = connector
        self._program_scheduler = program_scheduler
        self._wanted = wanted
        self._tokens_per_block = (
            connector.settings.block_tokens if groups.is_single else groups.tokens_per_block
        )

    def offload_costs(self, blocks: int = 1) -> LinkCosts:
        """Return the costs of a copy to host memory and back. If host memory has no space for ``blocks`` more
        blocks of preempted requests, the time to host memory is ``NO_OFFLOAD_S_PER_TOKEN``."""
        traffic, settings = self._connector.traffic, self._connector.settings
        token_bytes = settings.block_bytes / self._tokens_per_block
        now = self._connector.clock()
        out_s, back_s = (traffic.seconds_a_byte(lane, now) for lane in ("to_host", "to_device"))
        queued = self._connector.planner.storing_blocks * settings.block_bytes
        to_host = out_s * token_bytes if out_s is not None else None
        return LinkCosts(
            to_host if self._room() >= blocks else NO_OFFLOAD_S_PER_TOKEN,
            back_s * token_bytes if back_s is not None else None,
            queued * out_s if out_s is not None else 0.0,
        )

    def load_costs(self) -> LinkCosts:
        """Return the costs of a copy from host memory to the device."""
        connector = self._connector
        settings, loading = connector.settings, connector.planner.loads.block_count()
        byte_s = connector.traffic.seconds_a_byte("to_device", connector.clock())
        if byte_s is None:
            return LinkCosts(None, None, loads_queued_s=0.0)
        block_s = byte_s * settings.block_bytes
        return LinkCosts(None, block_s / self._tokens_per_block, loads_queued_s=loading * block_s)

    def _room(self) -> int:
        """Return how many more blocks of preempted requests host memory can take."""
        planner = self._connector.planner
        if self._connector.off:
            return 0
        if not self._program_scheduler.forecaster.predicts:
            return planner.host.room(RetentionRank.PLAIN)
        # Blocks of preempted requests, copied or yet to be copied, do not replace each other.
        return min(planner.host.room(RetentionRank.IDLE), planner.host.slots - len(self._wanted))
