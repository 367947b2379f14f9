"""Looking into an in-process engine; imported by the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def scheduler_of(llm: Any) -> Any:
    """The scheduler object inside an in-process LLM."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def count_preemptions(llm: Any) -> Iterator[list[str]]:
    """Collects the ids of the requests preempted meanwhile."""
    scheduler = scheduler_of(llm)
    original = scheduler._preempt_request
    preempted: list[str] = []

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = watched
    try:
        yield preempted
    finally:
        del scheduler._preempt_request
