"""The ``vllm.general_plugins`` entry point: adds ``EngineCore.sojourn_call``, which the API server calls.

vLLM dispatches utility calls by name to ``EngineCore``, so one added method is enough. Those that may replace
weights are wrapped, to report that to sojourn's scheduler. With vLLM's own scheduler, only an engine of a
prefill/decode pair answers, and only some operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

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
        from ..core.engine_service import STOCK_OPERATIONS, stock_answer

        if operation in STOCK_OPERATIONS:  # their answers contain the worker's status
            reporter.refresh_status(self.model_executor)
    call = getattr(self.scheduler, METHOD, None)
    if call is not None:
        return str(call(operation, payload))
    if reporter is not None:
        from .engine_description import profile_description

        engine = profile_description(self.scheduler, self.scheduler.block_size)
        return stock_answer(operation, reporter, engine, reporter.stock_recorder)
    return json.dumps({"error": "stock"})
