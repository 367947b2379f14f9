"""Servers that want to hear one thing only: that a program is over. One small POST for each."""

from __future__ import annotations

from sojourn.events import Event, ProgramEnd, ProgramStart
from sojourn.wire import encode

from .courier import Batch, Delivery, Road
from .sojourn import NOT_OURS

MAX_PROGRAMS = 10_000
"""Programs remembered as open, and as owed a farewell; the oldest are forgotten."""


_REFUSED = frozenset({400, 409, 410, 422})
"""Answers that are about the program and would be the same the next time."""


class Farewell:
    """``POST path {field: program id}`` when a program ends, and at the close for those still open.

    These servers have no leases: what is not said stays with them for good. So a farewell that failed is
    tried again together with the next one, unlike other events, unless the server refused that very one.
    Still nothing to rely on: a killed process says nothing.
    """

    kinds: frozenset[type[Event]] = frozenset({ProgramStart, ProgramEnd})

    def __init__(self, road: Road, path: str, field: str) -> None:
        self._transport = road.transport
        self._counters = road.counters
        self._path = path
        self._field = field
        self._open: dict[str, None] = {}
        self._owed: dict[str, None] = {}

    def deliver(self, batch: Batch) -> Delivery:
        ends: list[str] = []
        for pending in batch.events:
            if pending.kind is ProgramEnd:
                ends.append(pending.program_id)
                self._open.pop(pending.program_id, None)
                self._remember(self._owed, pending.program_id)
                continue
            self._counters.add("dropped_unsupported")
            if pending.kind is ProgramStart:
                self._owed.pop(pending.program_id, None)  # resumed: not over after all
                self._remember(self._open, pending.program_id)
        delivery, said = self._say_all()
        unsaid = sum(program_id not in said for program_id in ends)
        self._counters.add("events_sent", len(ends) - unsaid)
        if delivery is Delivery.NO_PLACE:
            self._counters.add("dropped_unsupported", unsaid)
            self._open, self._owed = {}, {}  # this server will never hear of them
        elif unsaid:
            self._counters.add("dropped_send", unsaid)
        return delivery

    def after_fork(self) -> None:
        self._open, self._owed = {}, {}

    def close(self) -> None:
        self._owed.update(self._open)
        self._open = {}
        self._say_all()

    def _say_all(self) -> tuple[Delivery, set[str]]:
        """What the server let us do, and whose farewells it took."""
        said: set[str] = set()
        for program_id in list(self._owed):
            status = self._say(program_id)
            del self._owed[program_id]
            if 200 <= status < 300:
                said.add(program_id)
            elif status in NOT_OURS:
                return Delivery.NO_PLACE, said
            elif status not in _REFUSED:
                # To the end of the line: it may be over this one that the server stumbles.
                self._owed[program_id] = None
                return Delivery.FAILED, said
        return Delivery.TAKEN, said

    def _say(self, program_id: str) -> int:
        """The answer's status; 0 where there was none."""
        try:
            status = self._transport.post(self._path, encode({self._field: program_id})).status
        except Exception as error:
            self._counters.add(f"net_{type(error).__name__}")
            return 0
        if not 200 <= status < 300:
            self._counters.add(f"http_{status}")
        return status

    @staticmethod
    def _remember(programs: dict[str, None], program_id: str) -> None:
        programs[program_id] = None
        if len(programs) > MAX_PROGRAMS:
            del programs[next(iter(programs))]
