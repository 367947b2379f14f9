"""The event transport for servers that accept only one kind of event: the end of a program, as a small
POST."""

from __future__ import annotations

from sojourn.wire_codec import encode
from sojourn.wire_events import Event, ProgramEnd, ProgramStart

from .event_transport import UNSUPPORTED_STATUSES, DeliveryResult, PendingBatch, TransportContext

MAX_PROGRAMS = 10_000
"""Maximum number of open programs remembered, and of unreported ends. Beyond it the oldest are forgotten."""
_REFUSED = frozenset({400, 409, 410, 422})
"""Status codes that reject a program's end permanently. A retry would get the same answer."""


class EndNotifier:
    """Reports the end of each program by ``POST path {field: program id}``. ``close`` reports the ends of all
    open programs that no other session has taken over.

    A server of this kind has no leases and keeps a program until its end is reported. So an end that could
    not be sent is sent again together with the next end. An end that the server refused is not sent again. A
    killed process cannot report the ends of its programs.
    """

    kinds: frozenset[type[Event]] = frozenset({ProgramStart, ProgramEnd})

    def __init__(
        self, transport_context: TransportContext, path: str, field: str, *, takes_implicit: bool = False
    ) -> None:
        """``takes_implicit``: whether the server gets ends of implicit programs (``Program.implicit``)."""
        self.takes_implicit = takes_implicit
        self._transport = transport_context.transport
        self._counters = transport_context.counters
        self._path = path
        self._field = field
        shared = transport_context.open_programs
        self._open: dict[str, None] = {} if shared is None else shared
        self._replaced = transport_context.replaced
        self._unreported: dict[str, None] = {}

    def deliver(self, batch: PendingBatch) -> DeliveryResult:
        ends: list[str] = []
        for pending in batch.events:
            if pending.kind is ProgramEnd:
                ends.append(pending.program_id)
                self._open.pop(pending.program_id, None)
                self._remember(self._unreported, pending.program_id)
                continue
            self._counters.add("dropped_unsupported")
            if pending.kind is ProgramStart:
                self._unreported.pop(pending.program_id, None)  # the program was resumed
                self._remember(self._open, pending.program_id)
        result, reported = self._report_ends()
        failed = sum(program_id not in reported for program_id in ends)
        self._counters.add("events_sent", len(ends) - failed)
        if result is DeliveryResult.UNSUPPORTED:
            self._counters.add("dropped_unsupported", failed)
            self._open.clear()
            self._unreported = {}
        elif failed:
            self._counters.add("dropped_send", failed)
        return result

    def after_fork(self) -> None:
        self._open.clear()
        self._unreported = {}

    def close(self) -> None:
        if not self._replaced():
            self._unreported.update(self._open)
            self._open.clear()
        self._report_ends()

    def _report_ends(self) -> tuple[DeliveryResult, set[str]]:
        """Post the pending ends. Return the result, and the programs whose end the server accepted."""
        reported: set[str] = set()
        for program_id in list(self._unreported):
            status = self._post_end(program_id)
            del self._unreported[program_id]
            if 200 <= status < 300:
                reported.add(program_id)
            elif status in UNSUPPORTED_STATUSES:
                return DeliveryResult.UNSUPPORTED, reported
            elif status not in _REFUSED:
                self._unreported[program_id] = None  # put last, since this id may make the server fail
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

    @staticmethod
    def _remember(programs: dict[str, None], program_id: str) -> None:
        programs[program_id] = None
        if len(programs) > MAX_PROGRAMS:
            # The sender of a replaced session may be at work still and have removed the same program.
            programs.pop(next(iter(programs)), None)
