"""The ``vllm.general_plugins`` entry point: adds ``EngineCore.sojourn_call``, which the API server calls.

vLLM dispatches utility calls by name to ``EngineCore``, so one added method is enough. Those that may replace
weights are wrapped, to report that to sojourn's scheduler. With vLLM's own scheduler, only an engine of a
prefill/decode pair answers, and only some operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.engine_service import StockEngineService
    from .kv_transfer_connector import PairStatusReporter

METHOD = "sojourn_call"
"""Name of the engine core's method that answers all calls: ``(operation, payload) -> str``."""


def register() -> None:
    """Add ``sojourn_call`` to ``EngineCore``. vLLM calls this in every process. Further calls do nothing."""
    from .compat import EngineCore

    if not hasattr(EngineCore, METHOD):
        setattr(EngineCore, METHOD, _sojourn_call)
        for name in ("add_lora", "remove_lora", "collective_rpc"):
            setattr(EngineCore, name, _reported(getattr(EngineCore, name)))


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:  # a failed call may have changed some weights
            report = getattr(self.scheduler, "sojourn_weights_called", None)
            if report is not None:
                report(method.__name__, *args[:1], *list(kwargs.values())[: not args])

    return call


def _sojourn_call(self: Any, operation: str, payload: str) -> str:
    reporter = getattr(getattr(self.scheduler, "connector", None), "pair_status", None)
    if reporter is not None:
        from ..core.engine_service import STOCK_OPERATIONS
        from .kv_transfer_connector import PairStatusReporter

        if not isinstance(reporter, PairStatusReporter):  # another project's connector
            reporter = None
        elif operation in STOCK_OPERATIONS:  # their answers contain the worker's status
            reporter.refresh_status(self.model_executor)
    call = getattr(self.scheduler, METHOD, None)
    if call is not None:
        return str(call(operation, payload))
    if reporter is not None:
        return _pair_engine_service(self.scheduler, reporter).call(operation)
    return json.dumps({"error": "stock"})


def _pair_engine_service(scheduler: Any, reporter: PairStatusReporter) -> StockEngineService:
    """Return the service of a pair's engine with vLLM's own scheduler, which keeps the state of metrics."""
    found: StockEngineService | None = reporter.stock_service
    if found is None:
        from ..core.engine_service import StockEngineService
        from .engine_description import profile_description

        found = reporter.stock_service = StockEngineService(
            reporter, lambda: profile_description(scheduler, scheduler.block_size)
        )
    return found
