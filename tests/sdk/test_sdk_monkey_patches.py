"""Patches of methods that another library patches too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from sojourn.monkey_patches import Patches


@pytest.mark.parametrize("static", [False, True])
def test_a_call_is_reported_once_after_a_new_start_beneath_another_librarys_patch(static: bool) -> None:
    patches, reported = Patches(), []

    def answer(*args: Any) -> str:
        return "answer"

    def wrapped(inner: Callable[..., Any], before: Callable[[], None]) -> Any:
        @functools.wraps(inner)
        def wrapper(*args: Any) -> Any:
            before()
            return inner(*args)

        return staticmethod(wrapper) if static else wrapper

    def report() -> None:
        if patches.active:
            reported.append("call")

    class Agent:
        ask: Any = staticmethod(answer) if static else answer

    def start() -> None:
        patches.put(Agent, "ask", lambda theirs: wrapped(getattr(theirs, "__func__", theirs), report))

    start()
    Agent.ask = wrapped(Agent.ask, lambda: None)  # another library's patch
    patches.undo()
    assert (Agent().ask(), reported) == ("answer", []), "ours is beneath, and only calls the original"
    start()
    assert (Agent().ask(), reported) == ("answer", ["call"])
