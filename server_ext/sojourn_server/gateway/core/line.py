"""Requests that wait at a gateway: for any replica, or for the one they are to go to."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from operator import attrgetter

from .programs import Key, Program

CHUNK = 128
"""Requests looked through one by one; a line of 10,000 is 80 to 160 chunks."""

_NUMBER = attrgetter("number")


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that the gateway has."""

    request_id: str
    number: int
    tenant: str
    program: Program | None
    context_tokens: int
    size_tokens: int
    since_s: float
    output_tokens: int = 0
    prefix: tuple[int, ...] = ()
    replica_id: str | None = None
    """Where it waits to be sent, or was sent; ``None``: it waits for any."""
    sent_s: float | None = None
    began: bool = False
    failures: int = 0
    """Replicas that did not answer it."""
    failures_computing: int = 0
    """Of these, those that had taken it in."""
    failed_at: tuple[str, ...] = ()
    """Of these, those that live on as they were: it is not sent there again."""
    failed_at_gone: tuple[tuple[str, str], ...] = ()
    """Of these, those that are gone, each with its instance: it may turn out to have lived."""
    lost_with: str | None = None
    """The replica that was last gone with it, of which nobody has said whether it had taken it in."""
    reason: str = ""
    moved_from: str | None = None
    left_because: str = ""
    needs_tokens: int = 0
    """Room that it waits for, as its route said; 0: it is to be asked about."""
    recalled_from: str | None = None
    """The replica that it had to leave for somebody more urgent, until it is answered elsewhere."""
    recalled: bool = False
    """So it was, once, and will not be again."""
    first_since: int | None = None
    """How many had got room before it became the first of its row."""


def may_leave(waiting: Waiting) -> bool:
    """It may go elsewhere, its program with it: at a turn gap, not a second time for the same turn, and not
    where it has failed already."""
    program = waiting.program
    if waiting.failed_at:
        return False
    return program is None or (not program.in_flight and program.moved_at_turn != program.turns)


class _Chunk:
    """Some of a row that stand side by side."""

    __slots__ = ("least", "requests")

    def __init__(self, requests: list[Waiting]) -> None:
        self.requests = requests
        self.least = min(waiting.needs_tokens for waiting in requests)


class Row:
    """Those of one tenant, in order of arrival; knows the first of them that needs no more than so much.

    Cut into chunks, each with the least that one in it needs: a search looks at one number a chunk and at
    the requests of one chunk.
    """

    __slots__ = ("_chunks", "least")

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self.least: float = math.inf
        """The least that one of them needs."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[Waiting]:
        for chunk in self._chunks:
            yield from chunk.requests

    @property
    def first(self) -> Waiting:
        """The one that came first."""
        return self._chunks[0].requests[0]

    def first_needing(self, most_tokens: float) -> Waiting | None:
        """The first that needs at most so much."""
        for chunk in self._chunks:
            if chunk.least <= most_tokens:
                return next(w for w in chunk.requests if w.needs_tokens <= most_tokens)
        return None

    def add(self, waiting: Waiting) -> None:
        """Where its arrival puts it: at the end, unless it was sent before, in vain."""
        self.least = min(self.least, waiting.needs_tokens)
        if not self._chunks:
            self._chunks.append(_Chunk([waiting]))
            return
        at = self._at(waiting.number)
        chunk = self._chunks[at]
        insort(chunk.requests, waiting, key=_NUMBER)
        chunk.least = min(chunk.least, waiting.needs_tokens)
        if len(chunk.requests) > CHUNK:
            half = CHUNK // 2
            self._chunks[at : at + 1] = [_Chunk(chunk.requests[:half]), _Chunk(chunk.requests[half:])]

    def remove(self, waiting: Waiting) -> bool:
        """Take one out; False: it does not wait here."""
        if not self._chunks:
            return False
        at = self._at(waiting.number)
        chunk = self._chunks[at]
        place = bisect_left(chunk.requests, waiting.number, key=_NUMBER)
        if place == len(chunk.requests) or chunk.requests[place] is not waiting:
            return False
        del chunk.requests[place]
        if not chunk.requests:
            del self._chunks[at]
        elif waiting.needs_tokens == chunk.least:
            chunk.least = min(other.needs_tokens for other in chunk.requests)
        if waiting.needs_tokens == self.least:
            self.least = min((chunk.least for chunk in self._chunks), default=math.inf)
        return True

    def _at(self, number: int) -> int:
        return max(0, bisect_right(self._chunks, number, key=lambda chunk: chunk.requests[0].number) - 1)


class Line:
    """Those who wait for the same, in order of arrival, by tenant where tenants take turns."""

    def __init__(self, *, by_tenant: bool) -> None:
        self._by_tenant = by_tenant
        self._rows: dict[str, Row] = {}
        self._programs: dict[Key, dict[str, Waiting]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting]:
        for row in self._rows.values():
            yield from row

    @property
    def rows(self) -> dict[str, Row]:
        """By tenant, of whom somebody waits; one for all, under ``""``, where they take no turns."""
        return self._rows

    def of(self, program: Program) -> list[Waiting]:
        """Those of one program."""
        return list(self._programs.get(program.key, {}).values())

    def oldest(self, count: int) -> list[Waiting]:
        """The first that came, of whatever tenant."""
        return list(islice(merge(*self._rows.values(), key=_NUMBER), count))

    def add(self, waiting: Waiting) -> None:
        """Where its arrival puts it."""
        self._rows.setdefault(self._row(waiting), Row()).add(waiting)
        if waiting.program is not None:
            self._programs.setdefault(waiting.program.key, {})[waiting.request_id] = waiting
        self._count += 1

    def remove(self, waiting: Waiting) -> bool:
        """Take one out; False: it does not wait here."""
        name = self._row(waiting)
        row = self._rows.get(name)
        if row is None or not row.remove(waiting):
            return False
        self._count -= 1
        if not row:
            del self._rows[name]
        if waiting.program is not None:
            own = self._programs[waiting.program.key]
            del own[waiting.request_id]
            if not own:
                del self._programs[waiting.program.key]
        return True

    def waits_for(self, waiting: Waiting, needs_tokens: int) -> None:
        """One that waits here has been asked about: it needs so much."""
        row = self._rows[self._row(waiting)]
        row.remove(waiting)
        waiting.needs_tokens = needs_tokens
        row.add(waiting)

    def _row(self, waiting: Waiting) -> str:
        return waiting.tenant if self._by_tenant else ""
