"""Host memory by vLLM's own offloading connector (``--tier-backend vllm``), on CPU engines too.

vLLM loads connector and spec by name, from the connector's configuration. A chunk is one or more blocks of a
KV cache group. It is stored when its blocks are computed; a request loads what it finds at its admission.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from ..policies.costs.reload_estimate import LinkCosts
from . import compat
from .compat import LookupResult
from .cpu_offload_worker import CpuOffloadWorker
from .kv_connector_settings import AUTO_DEVICES
from .offload_cache_policy import ProgramCachePolicy

if TYPE_CHECKING:
    from .offload_cache_policy import OffloadKey

MAX_LOOKUP_WAIT_S = 2.0
"""Time for which a request's lookups may be undecided, for example because a chunk is being stored. Then they
miss and the request computes. vLLM itself asks again without a bound."""


class ProgramOffloadingConnector(compat.OffloadingConnector):
    """vLLM's connector. A request whose load failed computes instead; vLLM's own ends the engine."""

    def __init__(
        self,
        vllm_config: compat.VllmConfig,
        role: compat.KVConnectorRole,
        kv_cache_config: compat.KVCacheConfig,
    ) -> None:
        # For the spec, which does not see it.
        vllm_config.kv_transfer_config.kv_connector_extra_config["device_blocks"] = kv_cache_config.num_blocks
        super().__init__(vllm_config, role, kv_cache_config)
        self._load_s_per_byte: float | None = None
        """Of the newest loads."""

    @property
    def host(self) -> ProgramOffloadingManager:
        """The scheduler side's manager of host memory."""
        side = self.scheduler
        return cast("ProgramOffloadingManager", side.manager)

    def get_transfer_results(self, finished_req_ids: set[str]) -> compat.KVConnectorTransferResults:
        side = self.connector_worker
        requests = dict(side._load_jobs)  # ``get_finished`` forgets those of finished jobs
        sent, received = self.get_finished(finished_req_ids)
        take_failed = getattr(side.worker, "take_failed", set)  # vLLM's CUDA worker reports no failures
        failed = {requests[job] for job in take_failed() if job in requests}
        return compat.KVConnectorTransferResults(sent, received, failed)

    def update_connector_output(self, connector_output: compat.KVConnectorOutput) -> None:
        self.host.failed |= connector_output.failed_recving
        meta: Any = connector_output.kv_connector_worker_meta
        if meta is not None and meta.transfer_stats.load.bytes:
            self._load_s_per_byte = meta.transfer_stats.load.time / meta.transfer_stats.load.bytes
        super().update_connector_output(connector_output)

    def load_costs(self, bytes_per_token: float) -> LinkCosts:
        """Return the measured costs of copies. A store costs nothing: chunks are stored anyway."""
        s_per_byte = self._load_s_per_byte
        return LinkCosts(0.0, None if s_per_byte is None else s_per_byte * bytes_per_token, 0.0)


class ProgramOffloadingSpec(compat.CPUOffloadingSpec):
    """vLLM's host memory, with a worker for CPU engines too. ``cpu_bytes_to_use`` may be missing:
    ``AUTO_DEVICES`` times the device's KV then, at most ``host_bytes_max``."""

    _manager: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        extra = config.extra_config  # the connector's own, so that capabilities tell the size too
        if "cpu_bytes_to_use" not in extra:
            worker_bytes = extra["device_blocks"] * config.worker_kv_bytes_per_block
            most = AUTO_DEVICES * worker_bytes * config.parallel.world_size
            extra["cpu_bytes_to_use"] = min(most, extra["host_bytes_max"])
        super().__init__(config)

    def get_manager(self) -> ProgramOffloadingManager:
        if not self._manager:
            info = {"info": self.cpu_info} if hasattr(self, "cpu_info") else {}  # vLLM 0.33
            self._manager = ProgramOffloadingManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                **info,
            )
        return cast("ProgramOffloadingManager", self._manager)

    def get_worker(self, kv_caches: compat.CanonicalKVCaches) -> compat.OffloadingWorker:
        if not compat.current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            self._worker = CpuOffloadWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return cast("compat.OffloadingWorker", self._worker)


class ProgramOffloadingManager(compat.CPUOffloadingManager):
    """vLLM's manager of host memory. It drops chunks that could not be loaded, bounds lookups, and stores no
    chunk in place of one that is worth more."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.failed: set[str] = set()
        """Requests whose load has failed, until vLLM calls ``complete_load``."""
        self.moves: Counter[str] = Counter()
        """Numbers of chunks by outcome."""
        self._undecided_since_s: dict[str, float] = {}
        self._refused: set[str] = set()

    def state(self) -> dict[str, dict[str, int]]:
        """Return numbers of chunks, in the form of ``OffloadManager.state``."""
        used = len(self._policy.chunks)
        return {"host": {"used": used, "free": self._num_chunks - used}, "moves": dict(self.moves)}

    def lookup(self, key: OffloadKey, req_context: compat.ReqContext) -> LookupResult:
        found = super().lookup(key, req_context)
        if found in (LookupResult.HIT, LookupResult.MISS):
            return found
        now = time.monotonic()
        since_s = self._undecided_since_s.setdefault(req_context.req_id, now)
        return found if now - since_s <= MAX_LOOKUP_WAIT_S else LookupResult.MISS

    def complete_load(self, keys: Collection[OffloadKey], req_context: compat.ReqContext) -> None:
        super().complete_load(keys, req_context)
        is_failed = req_context.req_id in self.failed
        self.moves["discarded" if is_failed else "loaded"] += len(keys)
        if not is_failed:
            return
        self.failed.remove(req_context.req_id)
        for key in keys:  # otherwise the request would find them again
            chunk = self._policy.get(key)
            if chunk.ref_cnt == 0:
                self._policy.remove(key)
                self._free_chunk(chunk)
                self._num_evictable_cache_chunks -= 1

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: compat.ReqContext
    ) -> compat.PrepareStoreOutput | None:
        nothing = compat.PrepareStoreOutput([], self._get_load_store_spec([], []), [])
        if req_context.req_id in self._refused:
            return nothing
        if isinstance(self._policy, ProgramCachePolicy):
            self._policy.stores_for(req_context.req_id)
        stored = super().prepare_store(keys, req_context)
        if stored is None:
            # What follows is useless without these. vLLM would ask again in each step and log each refusal.
            self._refused.add(req_context.req_id)
            self.moves["no_room"] += len(keys)
            return nothing
        self.moves["dropped"] += len(stored.evicted_keys)
        return stored

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: compat.ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        self.moves["stored"] += len(keys)

    def on_request_finished(self, req_context: compat.ReqContext) -> None:
        self._undecided_since_s.pop(req_context.req_id, None)
        self._refused.discard(req_context.req_id)
        self.failed.discard(req_context.req_id)
        super().on_request_finished(req_context)
