"""What programs said of themselves and an engine may have to be told again, bounded in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from sojourn.events import AegReport, AnyEvent, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn.wire import MAX_EVENT_NAME_BYTES, MAX_GRAPH_BYTES, encode

MOST_PROGRAMS = 50_000
MOST_GRAPHS_BYTES = 32 << 20
"""Of graphs as JSON."""
MOST_KEPT = 64
"""Events kept of a program that no engine has heard."""
MOST_TOOLS = 64
EVENTS_A_PROGRAM = 4
"""Whoever keeps more of them counts as several programs."""

Key = tuple[str, str]
"""Tenant and program id."""
Place = tuple[str, str]
"""A replica and which life of it."""

Value = TypeVar("Value")


class Shared(Generic[Value]):
    """Values by tenant and name, of bounded weight: whoever holds most loses its oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, OrderedDict[str, tuple[Value, int]]] = {}
        self._weights: dict[str, int] = {}
        self._weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def get(self, key: Key) -> Value | None:
        """``None``: not there."""
        of_tenant = self._of.get(key[0])
        held = of_tenant.get(key[1]) if of_tenant is not None else None
        return held[0] if held is not None else None

    def put(self, key: Key, value: Value, weight: int) -> None:
        """It is its tenant's newest now."""
        self.pop(key)
        self._of.setdefault(key[0], OrderedDict())[key[1]] = (value, weight)
        self._add(key[0], weight)
        while self._weight > self._most:
            tenant = max(self._weights, key=lambda one: (self._weights[one], one))
            self.pop((tenant, next(iter(self._of[tenant]))))

    def pop(self, key: Key) -> Value | None:
        """Forget it."""
        of_tenant = self._of.get(key[0])
        held = of_tenant.pop(key[1], None) if of_tenant is not None else None
        if held is None:
            return None
        self._add(key[0], -held[1])
        if not of_tenant:
            del self._of[key[0]], self._weights[key[0]]
        return held[0]

    def _add(self, tenant: str, weight: int) -> None:
        self._weights[tenant] = self._weights.get(tenant, 0) + weight
        self._weight += weight


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """An event and when it came. A graph's text is not in it."""

    event: AnyEvent
    at_s: float
    in_full: bool = True
    """False: it gave its graph's hash alone."""


@dataclass(slots=True, eq=False)
class Told:
    """What one program said."""

    authorization: str | None
    start: Kept | None = None
    graph: Kept | None = None
    tools: dict[str, Kept] = field(default_factory=dict)
    """Those that run."""
    undelivered: list[Kept] = field(default_factory=list)
    """Of tools, what came while it had no home."""
    place: Place | None = None
    """Who knows all of this; ``None``: nobody."""
    missed: int = 0
    """Counted up by what its place has not heard."""
    telling: tuple[Place, asyncio.Future[bool]] | None = None
    """Who is being told."""
    again_s: float = 0.0
    """Nobody is told before: an engine has just not listened."""

    def unheard(self, place: Place | None = None) -> None:
        """There is something that no engine, or not this one, knows."""
        if place is None or place == self.place:
            self.place = None
            self.missed += 1

    def to_tell(self, riding: Container[Kept] = ()) -> list[Kept]:
        """For an engine that knows nothing of it. ``riding``: what it hears anyway."""
        later = set(self.undelivered)
        tools = [one for one in self.tools.values() if one not in later]
        every = (self.start, self.graph, *tools, *self.undelivered)
        return [one for one in every if one is not None and one not in riding]


class Known:
    """All of them."""

    def __init__(
        self, *, most_programs: int = MOST_PROGRAMS, most_graphs_bytes: int = MOST_GRAPHS_BYTES
    ) -> None:
        self._programs: Shared[Told] = Shared(most_programs)
        self._graphs: Shared[bytes] = Shared(most_graphs_bytes)
        """JSON by tenant and hash: programs that follow the same one share it."""

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: Key) -> Told | None:
        """``None``: it said nothing, or is forgotten."""
        return self._programs.get(key)

    def forget(self, key: Key) -> bool:
        """A program is over; whether it was known."""
        return self._programs.pop(key) is not None

    def graph(self, tenant: str, graph_hash: str) -> msgspec.Raw | None:
        """A graph's JSON; ``None``: nobody has spelt it out, or it is forgotten."""
        text = self._graphs.get((tenant, graph_hash))
        return msgspec.Raw(text) if text is not None else None

    def note(
        self, key: Key, event: AnyEvent, authorization: str | None, now_s: float, *, delivered: bool
    ) -> Kept | None:
        """A program said something. ``delivered``: an engine hears it now. Returns what is kept of it."""
        told = self._programs.get(key)
        if isinstance(event, (Heartbeat, ProgramEnd)):
            return None
        if told is None:
            told = Told(authorization)
        told.authorization = authorization
        kept = Kept(
            self._bounded(key[0], event), now_s, not isinstance(event, AegReport) or bool(event.graph)
        )
        if isinstance(event, ProgramStart):
            told.start = kept
        elif isinstance(event, AegReport):
            told.graph = kept
        else:
            self._note_tool(told, event, kept, delivered)
        if not delivered:
            told.unheard()
        weight = 1 + (len(told.tools) + len(told.undelivered)) // EVENTS_A_PROGRAM
        self._programs.put(key, told, weight)
        return kept

    def _note_tool(self, told: Told, event: ToolStart | ToolStop, kept: Kept, delivered: bool) -> None:
        call, starts = event.call_id, isinstance(event, ToolStart)
        if not starts:
            told.tools.pop(call, None)
        elif call in told.tools or len(told.tools) < MOST_TOOLS:
            told.tools[call] = kept
        # Said twice, or a start whose stop an engine hears now: it would run for ever if told afterwards.
        told.undelivered = [
            one
            for one in told.undelivered
            if one.event.call_id != call  # type: ignore[union-attr]
            or (not delivered and isinstance(one.event, ToolStart) and not starts)
        ]
        if not delivered:
            told.undelivered = [*told.undelivered[-MOST_KEPT + 1 :], kept]

    def _bounded(self, tenant: str, event: AnyEvent) -> AnyEvent:
        if isinstance(event, AegReport) and event.graph is not None:
            text = encode(event.graph)
            if len(text) <= MAX_GRAPH_BYTES:  # no engine takes a longer one
                self._graphs.put((tenant, event.graph_hash), text, len(text))
            return msgspec.structs.replace(event, graph=None)
        if isinstance(event, AegReport):
            text = self._graphs.get((tenant, event.graph_hash)) or b""
            if text:
                self._graphs.put((tenant, event.graph_hash), text, len(text))  # in use
        if isinstance(event, ToolStop) and len(event.status) > MAX_EVENT_NAME_BYTES:
            return msgspec.structs.replace(event, status="error")
        return event
