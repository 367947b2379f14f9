"""Events that ride in a request's hint: they go where their programs are, not wherever the request goes."""

from __future__ import annotations

from typing import Protocol

import msgspec
from sojourn.events import AnyEvent
from sojourn.hints import AgenticContext
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire import MAX_BATCH_EVENTS, WIRE_VERSION, EventBatch, WireError, decode_event

from .known import Kept
from .question import with_hint

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Carriage(Protocol):
    """Where they get off."""

    def rides(self, tenant: str, event: AnyEvent, authorization: str | None, *, own: bool) -> Kept | None:
        """An event goes with a request to its program's replica; what is kept of it."""
        ...

    def named(self, tenant: str, raw: msgspec.Raw) -> msgspec.Raw:
        """An event as engines get it."""
        ...

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that a program is at home at."""
        ...

    def forward(self, batch: EventBatch, tenant: str, authorization: str | None) -> None:
        """Events that go another way."""
        ...


class Riding:
    """Those of one request, however often it is sent."""

    def __init__(
        self,
        news: Carriage,
        tenant: str,
        program_id: str | None,
        context: AgenticContext,
        authorization: str | None,
        *,
        fits: bool = True,
    ) -> None:
        """``context`` as it came. ``tenant``, ``authorization``: of its sender. ``program_id``: the
        request's; ``None``: it is of no program, whatever its hint is called. ``fits``: there is room for the
        events in the hint as engines get it; else all of them go their own way."""
        self._news = news
        self._tenant = tenant
        self._authorization = authorization
        self._program_id = program_id
        self._implicit = context.program_id if program_id is None else None
        own = context.sojourn
        self._emitter = own.emitter if own is not None else None
        # Without an emitter no engine takes any, and none more than so many.
        counts = (
            self._emitter is not None and 0 < len(self._emitter.encode("utf-8", "replace")) <= MAX_ID_BYTES
        )
        self._events: list[tuple[msgspec.Raw, AnyEvent | None]] = [
            (raw, _read(raw)) for raw in (own.events if own is not None and counts else ())
        ][:MAX_BATCH_EVENTS]
        self._fits = fits
        self._noted: set[int] = set()
        self.kept: set[Kept] = set()
        """What is kept of them: an engine that is sent the request needs not be told it again."""
        for _, event in self._events:
            if fits and event is not None and event.program_id == program_id:
                self._note(event)

    def _note(self, event: AnyEvent) -> None:
        if id(event) in self._noted or event.program_id == self._implicit:
            return
        self._noted.add(id(event))
        own = event.program_id == self._program_id
        kept = self._news.rides(self._tenant, event, self._authorization, own=own)
        if kept is not None:
            self.kept.add(kept)

    def towards(self, replica_id: str, body: bytes) -> bytes:
        """The body as this replica gets it, whose events may ride there; the others are taken out of it and
        go their own way. ``body``: as it came, or as this returned it before."""
        staying: list[tuple[msgspec.Raw, AnyEvent | None]] = []
        leaving: list[msgspec.Raw] = []
        for raw, event in self._events:
            if self._fits and (event is None or self._goes_to(event, replica_id)):
                staying.append((raw, event))
                if event is not None:
                    self._note(event)
            else:
                leaving.append(raw)
        if len(staying) == len(self._events):
            return body
        self._events = staying
        if leaving and self._emitter is not None:
            batch = EventBatch(v=WIRE_VERSION, emitter=self._emitter, events=leaving)
            self._news.forward(batch, self._tenant, self._authorization)
        return with_events(body, [self._news.named(self._tenant, raw) for raw, _ in staying])

    def _goes_to(self, event: AnyEvent, replica_id: str) -> bool:
        program_id = event.program_id
        home = self._news.home(self._tenant, program_id)
        # What has no home waits for one; of the process that stands for no program none will come.
        return (
            program_id == self._program_id
            or home == replica_id
            or (home is None and program_id == self._implicit)
        )


def with_events(body: bytes, events: list[msgspec.Raw]) -> bytes:
    """The same request, with these events in its hint."""

    def change(hint: dict[str, msgspec.Raw]) -> None:
        own = _members.decode(hint["sojourn"])
        own["events"] = msgspec.Raw(msgspec.json.encode(events))
        hint["sojourn"] = msgspec.Raw(msgspec.json.encode(own))

    return with_hint(body, change)


def _read(raw: msgspec.Raw) -> AnyEvent | None:
    try:
        return decode_event(raw)
    except WireError:
        return None  # the engine says so
