"""Base of sojourn's KV connectors. vLLM creates a connector twice, as planner side and as worker side.

    scheduler process                                        worker process
    ─────────────────                                        ──────────────
    vLLM asks for each request: _match, _allocated
    after each step is planned: _plan_step  ── StepOrders ─▶ _begin_step, before the forward pass
    planner: take_results                   ◀─ StepReport ── worker: take_results, after the forward pass

A request with an asynchronous load keeps its blocks and waits until the worker's ``get_finished`` returns it.
This may be in the step that ordered the load, or later. The request is computed only after that. A failed
load is therefore known before anything is computed from it, even if steps are planned ahead.

``SojournConnector`` (host memory and disk) and ``PathsConnector`` (storage and other engines) supply the
methods with an underscore. vLLM's hooks, error handling and the messages between the two sides are here.
Planners and workers know neither vLLM nor torch. Only a worker's device backend reads and writes device
memory: ``kv_offload.cpu_device_backend`` or ``cuda_device_backend``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ..kv_offload.context_keys import ContextKeys
from ..metrics.rate_limited_log import RateLimitedLog
from .compat import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch

    from .compat import (
        ForwardContext,
        KVCacheBlocks,
        KVCacheConfig,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )
    from .kv_connector_settings import KVConnectorSettings

logger = logging.getLogger("vllm.sojourn")

JobsT = TypeVar("JobsT")
ResultsT = TypeVar("ResultsT")

BlockIds = Sequence[list[int]]
"""A request's block ids by KV cache group. ``PathsConnector`` supports one group."""


@dataclass
class StepOrders(KVConnectorMetadata, Generic[JobsT]):
    jobs: JobsT
    stop: bool = False
    """Whether to close the links to peers, because the engine's weights may have changed."""
    host: StepOrders[Any] | None = None
    """In an engine of a pair with host memory: the orders of its host memory."""


@dataclass
class StepReport(KVConnectorWorkerMetadata, Generic[ResultsT]):
    """One worker's results of one step, and after ``aggregate`` those of other workers."""

    results: ResultsT
    others: tuple[ResultsT, ...] = ()
    off_because: str = ""
    """Why a worker has no host memory, so that the planner must turn the connector off; or empty."""
    not_filled: Set[int] = frozenset()
    """In an engine of a pair with host memory: device blocks that transfers did not fill."""
    host: StepReport[Any] | None = None
    """In such an engine: the report of its host memory."""

    @property
    def of_all(self) -> list[ResultsT]:
        return [self.results, *self.others]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        why, not_filled = self.off_because or other.off_because, self.not_filled | other.not_filled
        host: Any = self.host or other.host
        if self.host is not None and other.host is not None:
            host = self.host.aggregate(other.host)
        return StepReport(self.results, (*self.others, *other.of_all), why, not_filled, host)


class MatchedTokens(NamedTuple):
    """The tokens of a request that the connector can supply, as last reported to vLLM."""

    computed: int = 0
    """Number of leading tokens that the device has, before the supplied ones."""
    is_async: bool = False
    """Whether they load while other requests compute, not in the step that runs the request."""
    context: ContextKeys | None = None
    """Keys of the request's blocks, for ``SojournConnector``."""


class KVConnector(KVConnectorBase_V1, SupportsHMA, Generic[JobsT, ResultsT]):
    """Base of sojourn's connectors. ``role`` selects planner or worker side. The constructors of subclasses
    raise ``SettingsError`` for wrong settings."""

    settings: KVConnectorSettings
    planner: Any

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.strict = False
        self.off = False
        """Planner side: whether it finds and saves no more KV."""
        self._failure_log = RateLimitedLog(logger)
        self.matches: dict[str, MatchedTokens] = {}
        """Request → its match, until the request's blocks are allocated or the step is planned."""
        self._worker: Any = None
        """Carries out the jobs of each step (``take_results``, ``close``)."""

    # -- what each connector supplies -----------------------------------------------

    def _match(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        """Return (number of tokens that can be supplied after the first ``computed`` ones; ``None`` while it
        is not known, and vLLM asks again, the match to pass to ``_allocated``)."""
        raise NotImplementedError

    def _allocated(self, request: Request, block_ids: BlockIds, match: MatchedTokens, tokens: int) -> None:
        """Load ``tokens`` tokens into new blocks, after the ``match.computed`` ones on the device."""
        raise NotImplementedError

    def _reject_fill(self, request: Request, block_ids: BlockIds, match: MatchedTokens, tokens: int) -> None:
        """After ``_allocated`` failed: make the worker report the request's load as failed."""
        raise NotImplementedError

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[JobsT]:
        """Return the jobs of the step just planned. Must not raise."""
        raise NotImplementedError

    def _take_results(self, results: list[ResultsT]) -> None:
        for each in results:
            self.planner.take_results(each)

    def _finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return (whether vLLM must keep its blocks for now, the response's ``kv_transfer_params``)."""
        raise NotImplementedError

    def _disable(self, error: Exception) -> None:
        """After an error of our own, turn the connector off, or cancel transfers that requests wait for."""
        raise NotImplementedError

    def _open_worker(self, kv_caches: dict[str, torch.Tensor]) -> Any:
        """Return a new worker, if the connector needs one. ``kv_caches``: the engine's KV tensors by layer,
        in forward pass order. Raises ``UnsupportedKvCaches``."""
        raise NotImplementedError

    def _begin_step(self, orders: StepOrders[JobsT]) -> None:
        raise NotImplementedError

    # -- planner side: an exception here would end the engine -----------------------------

    def _is_off(self) -> bool:
        return self.off

    def _is_loading(self, request_id: str) -> bool:
        return bool(self.planner.is_loading(request_id))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.matches.pop(request.request_id, None)
        if request.skip_reading_prefix_cache or self._is_off():
            return 0, False
        tokens, match = self.attempt(self._match, request, num_computed_tokens) or (0, None)
        if match is None:
            return tokens, False
        self.matches[request.request_id] = match
        return tokens, match.is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()
        match = self.matches.pop(request.request_id, MatchedTokens())
        try:
            self._allocated(request, block_ids, match, num_external_tokens)
        except Exception as error:
            if num_external_tokens:  # vLLM already expects these tokens to arrive
                self._reject_fill(request, block_ids, match, num_external_tokens)
            self.handle_failure(error)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders[JobsT]:
        self.matches.clear()
        return self._plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self.attempt(self._take_results, report.of_all)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.matches.pop(request.request_id, None)
        is_loading = self._is_loading(request.request_id)
        return self.attempt(self._finished, request, block_ids) or (is_loading, None)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Only ``PathsConnector``, which has one group, reads the blocks."""
        return self.request_finished(request, block_ids[0])

    def handle_failure(self, error: Exception) -> None:
        """Log an error of sojourn's own and call ``_disable``. If ``strict``, raise the error instead."""
        if self.strict:
            raise error
        kind = type(error).__name__  # a lasting defect fails in every step; it must not hide another one
        self._failure_log.log(
            logging.ERROR,
            f"sojourn: a hook of %s failed ({kind}); the engine continues and computes what it cannot load",
            type(self).__name__,
            exc_info=error,
        )
        self._disable(error)

    def attempt(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call; ``None`` if it fails."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.handle_failure(error)
            return None

    # -- worker side ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker = self._open_worker(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Give the worker its orders. vLLM calls this in every step, before anything is written."""
        assert isinstance(kv_connector_metadata, StepOrders)
        self._begin_step(kv_connector_metadata)

    # Do nothing by default, because ``handle_preemptions`` has given the worker its orders, loads included.
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def build_connector_worker_meta(self) -> StepReport[ResultsT] | None:
        results = self._worker.take_results() if self._worker is not None else None
        return StepReport(results) if results else None

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
