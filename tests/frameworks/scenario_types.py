"""Scenarios of a framework, and the events that it must report for each.

Each ``scenarios_<framework>.py`` has a list ``SCENARIOS``, and a dict ``ABSENT`` (row → why this framework
has no such thing) if it lacks a row. ``test_frameworks_scenarios.py`` plays every scenario against the fake
server, with and without instrumentation; ``test_frameworks_engine.py`` plays one of each framework against a
real engine. A play file imports its framework inside functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from sojourn.testing import Reply

ROWS = ("sync", "async", "stream", "error", "cancel", "parallel", "sub_agent")
"""Every framework has at least one scenario of each row, except the rows that its ``ABSENT`` names."""

RETRY = "retry"
"""A further row, in which the server fails the first request. If a framework has no such scenario, its first
``sync`` (else ``async``) scenario is also played in this way."""


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
    ``branches``, the order is not compared."""
    tools: tuple[ToolFact, ...] = ()
    """Sorted by name, then status."""
    steps_left: tuple[float, ...] = ()
    """The numbers of steps left that its requests state, in order; empty if they state none."""

    def limited(self, steps: int) -> ProgramFact:
        """Return this program with a limit of ``steps``, of which each request states what is left."""
        return self._replace(steps_left=tuple(max(0, steps - 1 - i) for i in range(len(self.nodes))))


def fact(key: str, nodes: str, *tools: str | ToolFact, limit: int | None = None, **more: str) -> ProgramFact:
    """A program with these nodes, separated by blanks (``-``: none), tools that ended well or as said, and a
    limit of steps."""
    used = tuple(tool if isinstance(tool, ToolFact) else ToolFact(tool) for tool in tools)
    names = tuple(None if node == "-" else node for node in nodes.split())
    found = ProgramFact(key, nodes=names, tools=used)._replace(**more)
    return found if limit is None else found.limited(limit)


class Scenario(NamedTuple):
    """A scenario. ``play`` is code that a user would write without sojourn. Only hand-written loops use
    sojourn's scopes, which do nothing before ``init()``."""

    framework: str
    row: str
    needs: tuple[str, ...]
    """Packages that the scenario needs. It is left out if one is missing."""
    script: Callable[[], Sequence[Reply]]
    """The model's answers, one per request, in order of arrival. If requests are parallel, the answers must
    not depend on the order."""
    play: Callable[[str, str], Any]
    """``play(base_url, model)`` runs the scenario. It returns a comparable result without random ids, or
    raises the framework's exception. ``base_url`` ends in ``/v1``; no API key is needed."""
    programs: tuple[ProgramFact, ...]
    raises: str | None = None
    """Name of the class of the exception that ``play`` raises."""
    name: str = ""
    """Distinguishes several scenarios of a row."""

    @property
    def id(self) -> str:
        """Name of the scenario in pytest."""
        return "-".join(part for part in (self.framework, self.row, self.name) if part)

    @property
    def in_order(self) -> bool:
        """Whether the order of the scenario's requests is fixed."""
        return self.row != "parallel" and "branches" not in self.name


def scenarios_of(framework: str, *needs: str) -> Callable[..., Scenario]:
    """Return a function that makes the scenarios of a framework."""

    def scenario(
        row: str,
        play: Callable[[str, str], Any],
        script: Sequence[Reply],
        *programs: ProgramFact,
        name: str = "",
        raises: str | None = None,
    ) -> Scenario:
        return Scenario(framework, row, needs, lambda: list(script), play, programs, raises, name)

    return scenario


async def cancel_once(begun: asyncio.Event, run: Coroutine[Any, Any, Any]) -> Any:
    """Cancel ``run`` as soon as ``begun`` is set."""
    task = asyncio.ensure_future(run)
    await begun.wait()
    task.cancel()
    return await task


class StreamPiece(NamedTuple):
    """One piece of a streamed answer."""

    kind: str
    text: str = ""


def join_pieces(value: Any) -> Any:
    """Result of a play, with successive pieces of one kind joined: an engine's cuts depend on its load."""
    if isinstance(value, StreamPiece) or not isinstance(value, (list, tuple)):
        return value
    found: list[Any] = []
    for each in map(join_pieces, value):
        last = found[-1] if found else None
        if isinstance(each, StreamPiece) and isinstance(last, StreamPiece) and each.kind == last.kind:
            found[-1] = StreamPiece(each.kind, last.text + each.text)
        else:
            found.append(each)
    return type(value)(found)
