"""``vllm.general_plugins``: gives the engine core the one method through which the API server reaches us.

vLLM dispatches utility calls by name to ``EngineCore`` (v1/engine/core.py), so
one added method is all that is needed; nothing of vLLM's own is replaced. An engine
of a pair answers some questions also where its scheduler is vLLM's own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.member_alone import MemberAlone
    from .paths_member import PathsMember

METHOD = "sojourn_call"


def register() -> None:
    """Called by vLLM in every process; harmless twice and where the scheduler is not ours."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, METHOD):
        setattr(EngineCore, METHOD, _sojourn_call)


def _sojourn_call(self: Any, operation: str, payload: str) -> str:
    member = getattr(getattr(self.scheduler, "connector", None), "member", None)
    if member is not None:
        from .paths_member import ASKED_FOR, PathsMember

        if not isinstance(member, PathsMember):  # somebody else's connector
            member = None
        elif operation in ASKED_FOR:
            member.ask(self.model_executor)
    call = getattr(self.scheduler, METHOD, None)
    if call is not None:
        return str(call(operation, payload))
    if member is not None:
        return _alone(self.scheduler, member).call(operation)
    return json.dumps({"error": "stock"})


def _alone(scheduler: Any, member: PathsMember) -> MemberAlone:
    """The same one for all of an engine's life: it has the books of its metrics."""
    found: MemberAlone | None = member.alone
    if found is None:
        from ..engine.member_alone import MemberAlone
        from .engine_facts import described

        found = member.alone = MemberAlone(member, lambda: described(scheduler))
    return found
