"""The ``vllm.general_plugins`` entry point: adds ``EngineCore.sojourn_call``, which the API server calls.

vLLM dispatches utility calls by name to ``EngineCore`` (v1/engine/core.py), so one added method is enough and
nothing is replaced. An engine of a prefill/decode pair answers some operations even without sojourn's
scheduler.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.engine_service import StockEngineService
    from .kv_transfer_member import KVTransferMember

METHOD = "sojourn_call"


def register() -> None:
    """Add ``sojourn_call`` to ``EngineCore``. vLLM calls this in every process. Further calls do nothing."""
    from .compat import EngineCore

    if not hasattr(EngineCore, METHOD):
        setattr(EngineCore, METHOD, _sojourn_call)


def _sojourn_call(self: Any, operation: str, payload: str) -> str:
    member = getattr(getattr(self.scheduler, "connector", None), "member", None)
    if member is not None:
        from .kv_transfer_member import STATUS_OPERATIONS, KVTransferMember

        if not isinstance(member, KVTransferMember):  # another project's connector
            member = None
        elif operation in STATUS_OPERATIONS:
            member.refresh_status(self.model_executor)
    call = getattr(self.scheduler, METHOD, None)
    if call is not None:
        return str(call(operation, payload))
    if member is not None:
        return _pair_engine_service(self.scheduler, member).call(operation)
    return json.dumps({"error": "stock"})


def _pair_engine_service(scheduler: Any, member: KVTransferMember) -> StockEngineService:
    """Return the service that answers calls for an engine of a pair whose scheduler is vLLM's own. The first
    call creates the service. Later calls return the same object, which keeps the state of metrics."""
    found: StockEngineService | None = member.alone
    if found is None:
        from ..core.engine_service import StockEngineService
        from .engine_description import profile_description

        found = member.alone = StockEngineService(
            member, lambda: profile_description(scheduler, scheduler.block_size)
        )
    return found
