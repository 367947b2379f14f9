"""The ``vllm.general_plugins`` entry point: adds ``EngineCore.sojourn_call``, which the API server calls.

vLLM dispatches utility calls by name to ``EngineCore``, so one added method is enough and nothing is
replaced. With vLLM's own scheduler, only an engine of a prefill/decode pair answers, and only some
operations.
"""

from __future__ import annotations

import json
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
