"""``vllm.general_plugins``: gives the engine core the one method through which the API server reaches us.

vLLM dispatches utility calls by name to ``EngineCore`` (v1/engine/core.py), so
one added method is all that is needed; nothing of vLLM's own is replaced.
"""

from __future__ import annotations

import json
from typing import Any

METHOD = "sojourn_call"


def register() -> None:
    """Called by vLLM in every process; harmless twice and where the scheduler is not ours."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, METHOD):
        setattr(EngineCore, METHOD, _sojourn_call)


def _sojourn_call(self: Any, operation: str, payload: str) -> str:
    call = getattr(self.scheduler, METHOD, None)
    if call is None:
        return json.dumps({"error": "stock"})
    return str(call(operation, payload))
