"""Scenarios of a framework, and the events that it must report for each.

Each ``scenarios_<framework>.py`` has a list ``SCENARIOS`` and a dict ``ABSENT`` (row → why this framework
has no such thing). ``test_frameworks_scenarios.py`` plays every scenario against the fake server and the
real engine, with and without instrumentation. A play file imports its framework inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sojourn.testing import Reply

ROWS = ("sync", "async", "stream", "error", "cancel", "parallel", "sub_agent")
"""Every framework has at least one scenario of each, but for those that its ``ABSENT`` names."""

RETRY = "retry"
"""A further row: the server fails the first request. Where a framework has none, its first ``sync`` (else
``async``) scenario is played that way as well."""


class ToolFact(NamedTuple):
    """A tool call as reported: its name, class and how it ended."""

    tool: str
    status: str = "ok"
    tool_class: str | None = None


class ProgramFact(NamedTuple):
    """A program as reported. ``parent`` is the ``key`` of another one in the same list."""

    key: str
    status: str = "ok"
    parent: str | None = None
    nodes: tuple[str | None, ...] = ()
    """Node of each of its LLM requests, in order. In the row ``parallel``, and in scenarios whose name says
    ``branches``, the order is not looked at."""
    tools: tuple[ToolFact, ...] = ()
    """Sorted by name, then status."""


class Scenario(NamedTuple):
    """``play`` is what a user would write without us; only hand-written loops hold scopes of sojourn's,
    which do nothing before ``init()``."""

    framework: str
    row: str
    needs: tuple[str, ...]
    """Packages without which it is left out."""
    script: Callable[[], Sequence[Reply]]
    """What the model says, one answer per request in the order they arrive. Where requests are made in
    parallel the answers must not depend on the order."""
    play: Callable[[str, str], Any]
    """``play(base_url, model)`` runs it all and returns what came out (comparable, without random ids), or
    raises what the framework raises. ``base_url`` ends in ``/v1``; no API key is needed."""
    programs: tuple[ProgramFact, ...]
    raises: str | None = None
    """Name of the exception class that ``play`` lets out."""
    name: str = ""
    """Where a row has several."""
    only_fake: str = ""
    """Why no real server can answer so, where that is the case."""

    @property
    def id(self) -> str:
        """For pytest."""
        return "-".join(part for part in (self.framework, self.row, self.name) if part)

    @property
    def in_order(self) -> bool:
        """Whether the order of its requests is settled."""
        return self.row != "parallel" and "branches" not in self.name
