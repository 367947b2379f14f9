"""Sends events to a server outside of LLM requests: all of them to a sojourn server, the ends of programs to
some others.

An event transport runs on the event sender's thread and may block there, within its time limits. It never
touches the agent's thread. It counts each event under exactly one of ``events_sent``, ``dropped_send``,
``dropped_unsupported`` and ``encode_error``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, get_args

import msgspec

from .event_queue import PendingEvent
from .sdk_logger import logger
from .stats import Counters
from .wire_codec import (
    EVENTS_PATH,
    MAX_BATCH_BYTES,
    WIRE_VERSION,
    EventBatch,
    Outcome,
    WireError,
    decode_outcomes,
    encode,
)
from .wire_events import AegReport, AnyEvent, Event, ProgramEnd, ProgramStart

if TYPE_CHECKING:
    from .http_transport import ServerTransport

MAX_PROGRAMS = 10_000
"""Maximum number of programs that an ``EndNotifier`` remembers. Beyond it the oldest are forgotten."""
_NO_ENDPOINT = frozenset({404, 405, 501})
"""Status codes of a server that has no endpoint for events."""
_REFUSED = frozenset({400, 409, 410, 422})
"""Status codes that reject a program's end permanently. A retry would get the same answer."""
_ENVELOPE_BYTES = 1024
"""Bytes left free in a batch for everything that is not an event."""


class PendingBatch(NamedTuple):
    """Events of one or more programs, in order within each program."""

    emitter: str
    """Id of the event sender that numbered the events."""
    events: list[PendingEvent]
    now: float
    """Monotonic seconds; the events' ``at_s`` is on the same clock."""
    dropped: int = 0
    """Number of events that the event sender has dropped so far."""


class DeliveryResult(Enum):
    """The result of sending a batch."""

    ACCEPTED = "accepted"
    CONFIRMED = "confirmed"
    """Accepted, and the answer proves that the server speaks sojourn's wire format."""
    FAILED = "failed"
    """The server is unreachable or busy. The event sender waits before the next batch."""
    UNSUPPORTED = "unsupported"
    """The server has no endpoint for these events."""


class EventTransport(Protocol):
    """Sends events to one kind of server."""

    @property
    def kinds(self) -> frozenset[type[Event]]:
        """Event classes that the server accepts; the event sender drops all others."""

    @property
    def takes_implicit(self) -> bool:
        """Whether the server gets events of implicit programs (``Program.implicit``)."""

    def deliver(self, batch: PendingBatch) -> DeliveryResult:
        """Send a batch. An exception counts as a failed batch."""

    def after_fork(self) -> None:
        """Drop the parent's unfinished work, in a forked child."""

    def close(self, leave_open: frozenset[str] = frozenset()) -> None:
        """Send what is left, until the first failure. The event sender's ``close`` bounds the time.
        ``leave_open``: ids of programs whose requests are in progress, so that their end must not be
        reported."""


class SojournEventTransport:
    """Sends every event by ``POST /sojourn/v1/events``, in batches. The answer has an outcome for each
    event."""

    kinds: frozenset[type[Event]] = frozenset(get_args(AnyEvent))
    takes_implicit = False  # the server treats requests of implicit programs as requests of no program

    def __init__(
        self,
        transport: ServerTransport,
        counters: Counters,
        unknown_graph: Callable[[PendingEvent], None] = lambda report: None,
    ) -> None:
        """``unknown_graph`` is called with an ``AegReport`` whose graph the server does not know."""
        self._transport = transport
        self._counters = counters
        self._unknown_graph = unknown_graph

    def deliver(self, batch: PendingBatch) -> DeliveryResult:
        bodies: list[list[msgspec.Raw]] = [[]]
        used = 0
        for pending in batch.events:
            try:
                raw = pending.encode(batch.now)
            except Exception:  # one event that cannot be encoded must not spoil the others
                self._counters.add("encode_error")
                continue
            used += len(raw) + 1
            if used > MAX_BATCH_BYTES - _ENVELOPE_BYTES:
                bodies.append([])
                used = len(raw) + 1
            bodies[-1].append(msgspec.Raw(raw))
        delivery = DeliveryResult.ACCEPTED
        for sent, events in enumerate(bodies):
            if not events:
                continue
            delivery = self._post(batch, events)
            if delivery in (DeliveryResult.FAILED, DeliveryResult.UNSUPPORTED):
                name = "dropped_send" if delivery is DeliveryResult.FAILED else "dropped_unsupported"
                self._counters.add(name, sum(map(len, bodies[sent:])))
                break
        return delivery

    def after_fork(self) -> None: ...

    def close(self, leave_open: frozenset[str] = frozenset()) -> None: ...

    def _post(self, batch: PendingBatch, events: list[msgspec.Raw]) -> DeliveryResult:
        body = encode(EventBatch(v=WIRE_VERSION, emitter=batch.emitter, events=events, dropped=batch.dropped))
        try:
            answer = self._transport.post(EVENTS_PATH, body)
        except Exception as error:
            self._counters.add(f"net_{type(error).__name__}")
            return DeliveryResult.FAILED
        if not 200 <= answer.status < 300:
            known = answer.status in _NO_ENDPOINT
            if not known and self._counters[f"http_{answer.status}"] == 0:
                logger.warning("the server answered %d to events; they are being dropped", answer.status)
            self._counters.add(f"http_{answer.status}")
            return DeliveryResult.UNSUPPORTED if known else DeliveryResult.FAILED
        self._counters.add("events_sent", len(events))
        return self._read_outcomes(answer.body, len(events), batch)

    def _read_outcomes(self, body: bytes, expected: int, batch: PendingBatch) -> DeliveryResult:
        try:
            outcomes = decode_outcomes(body[: 2 * MAX_BATCH_BYTES]).outcomes
        except WireError:
            self._counters.add("answer_unreadable")
            return DeliveryResult.ACCEPTED
        for outcome in outcomes:
            self._counters.add(f"outcome_{outcome.outcome.value}")
            if outcome.unsupported:
                self._counters.add("fields_unsupported", len(outcome.unsupported))
        missing = {outcome.seq for outcome in outcomes if outcome.outcome is Outcome.MISSING}
        for pending in batch.events if missing else ():
            if pending.seq in missing and pending.kind is AegReport:
                self._unknown_graph(pending)
        # Some servers answer 200 to everything; one outcome per event shows that the batch was read.
        return DeliveryResult.CONFIRMED if len(outcomes) == expected else DeliveryResult.ACCEPTED


class EndNotifier:
    """Reports the end of each program by ``POST path {field: program id}``. ``close`` reports the ends of all
    open programs, except of those with a request in progress, whose session a server would close under it.

    A server of this kind has no leases and keeps a program until its end is reported. So an end that could
    not be sent is sent again together with the next end. An end that the server refused is not sent again. A
    killed process cannot report the ends of its programs.
    """

    kinds: frozenset[type[Event]] = frozenset({ProgramStart, ProgramEnd})

    def __init__(
        self,
        transport: ServerTransport,
        counters: Counters,
        path: str,
        field: str,
        *,
        takes_implicit: bool = False,
    ) -> None:
        self.takes_implicit = takes_implicit
        self._transport = transport
        self._counters = counters
        self._path = path
        self._field = field
        self._programs: dict[str, bool] = {}
        """Program id → whether the program has ended. Reported ends are removed."""

    def deliver(self, batch: PendingBatch) -> DeliveryResult:
        ended: set[str] = set()
        for pending in batch.events:
            if pending.kind is ProgramEnd:
                ended.add(pending.program_id)
            else:
                self._counters.add("dropped_unsupported")
            self._programs.pop(pending.program_id, None)
            self._programs[pending.program_id] = pending.kind is ProgramEnd
            if len(self._programs) > MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        result, reported = self._report_ends()
        self._counters.add("events_sent", len(ended & reported))
        if result is DeliveryResult.UNSUPPORTED:
            self._programs.clear()
        if lost := len(ended - reported):
            name = "dropped_unsupported" if result is DeliveryResult.UNSUPPORTED else "dropped_send"
            self._counters.add(name, lost)
        return result

    def after_fork(self) -> None:
        self._programs.clear()

    def close(self, leave_open: frozenset[str] = frozenset()) -> None:
        for program_id in self._programs:
            self._programs[program_id] |= program_id not in leave_open
        self._report_ends()

    def _report_ends(self) -> tuple[DeliveryResult, set[str]]:
        """Post the ends. Return the result, and the programs whose end the server accepted."""
        reported: set[str] = set()
        for program_id in [id for id, has_ended in self._programs.items() if has_ended]:
            status = self._post_end(program_id)
            del self._programs[program_id]
            if 200 <= status < 300:
                reported.add(program_id)
            elif status in _NO_ENDPOINT:
                return DeliveryResult.UNSUPPORTED, reported
            elif status not in _REFUSED:
                self._programs[program_id] = True  # put last, since this id may make the server fail
                return DeliveryResult.FAILED, reported
        return DeliveryResult.ACCEPTED, reported

    def _post_end(self, program_id: str) -> int:
        """Post the end of a program. Returns the status of the answer; 0 without an answer."""
        try:
            status = self._transport.post(self._path, encode({self._field: program_id})).status
        except Exception as error:
            self._counters.add(f"net_{type(error).__name__}")
            return 0
        if not 200 <= status < 300:
            self._counters.add(f"http_{status}")
        return status
