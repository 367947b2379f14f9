"""Where the running code is: in which program, at which step, inside which tool call.

One context variable holds all three, so that entering anything is one ``set`` and
a thread can be given the whole place at once. Frameworks whose callbacks run in
contexts of their own cannot set it; their adapters add a *resolver* that reads the
framework's own context instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .program import Program
    from .stats import Counters
    from .step import Step
    from .tools import ToolCall


class Place(NamedTuple):
    """Program, step and tool call around the running code."""

    program: Program | None = None
    step: Step | None = None
    tool_call: ToolCall | None = None


NOWHERE = Place()
opened: list[Program] = []
"""Programs of the whole process, by ``program().open()``: the last is the one of code that knows no other."""
place: ContextVar[Place] = ContextVar("sojourn_place", default=NOWHERE)


class Resolved(NamedTuple):
    """What a framework's own context says."""

    program: Program | None = None
    node: str | None = None
    tool_call: ToolCall | None = None
    """The program's call in which the code runs: what it opens is a child in that call."""


Resolver = Callable[[], "Resolved | None"]
_resolvers: list[Resolver] = []


def add_resolver(resolver: Resolver) -> None:
    """Ask ``resolver`` too; it must be quick and free of side effects. Adding it again is harmless."""
    if resolver not in _resolvers:
        _resolvers.append(resolver)


def remove_resolver(resolver: Resolver) -> None:
    """Ask it no more."""
    if resolver in _resolvers:
        _resolvers.remove(resolver)


def find(counters: Counters) -> tuple[Place, str | None]:
    """The deepest known place, and the node a framework named for it."""
    if not _resolvers:
        here = place.get()
        if here.program is not None:
            return here, None
    here, node = deepest(counters)
    if here.program is None and opened:
        here = here._replace(program=opened[-1])
    return here, node


def deepest(counters: Counters) -> tuple[Place, str | None]:
    """``find``, without the programs that are the whole process's."""
    here = place.get()
    node: str | None = None
    for resolver in _resolvers:
        try:
            resolved = resolver()
        except Exception:
            counters.add("resolver_error")
            continue
        if resolved is None:
            continue
        program = resolved.program
        if program is not None and (here.program is None or program.depth > here.program.depth):
            call = here.tool_call
            here = Place(
                program,
                here.step if here.program is None else None,
                call if call is not None and call.program is program else None,
            )
        if resolved.tool_call is not None and here.tool_call is None and program is here.program:
            here = here._replace(tool_call=resolved.tool_call)
        if program is None or program is here.program:
            node = resolved.node or node
    return here, node


def leave(token: Token[Place], counters: Counters) -> None:
    """Reset; a generator that is finalised in another context cannot, which is counted."""
    try:
        place.reset(token)
    except ValueError:
        counters.add("context_reset_failed")
