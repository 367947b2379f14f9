"""Handles the events in a request's hint. Each event goes to its program's home, even if the request goes to
another replica."""

from __future__ import annotations

import msgspec
from sojourn.hints import AgenticContext
from sojourn.ids import id_problem
from sojourn.wire_codec import MAX_BATCH_EVENTS, WIRE_VERSION, EventBatch, WireError, decode_event
from sojourn.wire_events import AnyEvent

from ...core.client_event_decoder import MAX_ATTACHED_EVENTS
from .client_json import encode_raw, members_of
from .event_forwarder import EventForwarder
from .generation_request import with_names
from .program_event_records import RecordedEvent
from .request_bodies import process_body


class PiggybackedEvents:
    """The events in one request's hint. One object serves all attempts to send the request.

    ``program_id`` is ``None`` if the request counts as having no program, even if its hint names a program.
    """

    def __init__(
        self,
        forwarder: EventForwarder,
        tenant: str,
        program_id: str | None,
        context: AgenticContext,
        authorization: str | None,
        *,
        fits: bool = True,
    ) -> None:
        """``context``: the client's hint. ``authorization``: the client's ``Authorization`` header.

        ``fits``: whether the body still has the hint's events. If not, the engines' longer names for programs
        made the hint too long. All events are then forwarded separately.
        """
        self._forwarder = forwarder
        self._tenant = tenant
        self._authorization = authorization
        self._program_id = program_id
        self._implicit = context.program_id if program_id is None else None
        own = context.sojourn
        self._emitter = own.emitter if own is not None else None
        # Engines reject events without an emitter, and batches above this size.
        counts = self._emitter is not None and id_problem(self._emitter) is None
        self._events: list[tuple[msgspec.Raw, AnyEvent | None]] = [
            (raw, _read(raw)) for raw in (own.events if own is not None and counts else ())
        ][:MAX_BATCH_EVENTS]
        self._fits = fits
        self._recorded: set[int] = set()
        self.kept: set[RecordedEvent] = set()
        """Records of the events that the request carries to its replica."""
        for _, event in self._events[:MAX_ATTACHED_EVENTS]:
            if fits and event is not None and event.program_id == program_id:
                self._record_once(event)

    def _record_once(self, event: AnyEvent) -> None:
        """Record an event that the request carries to its replica. No effect if an earlier attempt has
        recorded the event. If the request counts as having no program, no effect for events of the hint's
        program either."""
        if id(event) in self._recorded or event.program_id == self._implicit:
            return
        self._recorded.add(id(event))
        own = event.program_id == self._program_id
        kept = self._forwarder.piggyback(self._tenant, event, self._authorization, own=own)
        if kept is not None:
            self.kept.add(kept)

    async def prepare_body(self, replica_id: str, body: bytes) -> bytes:
        """Return the body to send to the replica ``replica_id``. ``body``: the client's body, or the result
        of an earlier call.

        The body keeps the events of the request's own program and of programs whose home is that replica.
        Events of other programs are removed, and forwarded to the homes of these programs. All events after
        the first ``MAX_ATTACHED_EVENTS`` are removed and forwarded too, because an engine would reject them.
        """
        staying: list[tuple[msgspec.Raw, AnyEvent | None]] = []
        leaving: list[msgspec.Raw] = []
        for place, (raw, event) in enumerate(self._events):
            rides = self._fits and place < MAX_ATTACHED_EVENTS
            if rides and (event is None or self._belongs_to(event, replica_id)):
                staying.append((raw, event))
                if event is not None:
                    self._record_once(event)
            else:
                leaving.append(raw)
        if len(staying) == len(self._events):
            return body
        self._events = staying
        if leaving and self._emitter is not None:
            batch = EventBatch(v=WIRE_VERSION, emitter=self._emitter, events=leaving)
            self._forwarder.forward(batch, self._tenant, self._authorization)
        named = [self._forwarder.names.event(self._tenant, raw) for raw, _ in staying]
        events = [event for event in named if event is not None]
        return await process_body(body, lambda: with_events(body, events))

    def _belongs_to(self, event: AnyEvent, replica_id: str) -> bool:
        """Whether the request may carry an event to this replica."""
        program_id = event.program_id
        home = self._forwarder.home(self._tenant, program_id)
        # Events of a program without a home wait for a home. If the request counts as having no program, the
        # program of its hint gets no home, so its events do not wait.
        return (
            program_id == self._program_id
            or home == replica_id
            or (home is None and program_id == self._implicit)
        )


def with_events(body: bytes, events: list[msgspec.Raw]) -> bytes:
    """Return the body with the events of its hint replaced by ``events``. ``body``: a body that
    ``parse_generation_request`` accepted, with events in its hint. Raises ``InvalidGenerationRequest``."""

    def change(hint: dict[str, msgspec.Raw]) -> None:
        own = members_of(hint["sojourn"])
        own["events"] = encode_raw(events)
        hint["sojourn"] = encode_raw(own)

    return with_names(body, str, change)


def _read(raw: msgspec.Raw) -> AnyEvent | None:
    """Decode an event; ``None``: the event cannot be read."""
    try:
        return decode_event(raw)
    except WireError:
        return None  # the engine reports the error
