"""The desk with a tape running."""

from __future__ import annotations

from typing import Any

from sojourn.events import AnyEvent
from sojourn.ids import EmitterId
from sojourn.wire import EventOutcome

from ..desk import Desk
from .steward import TapingSteward


class TapingDesk(Desk):
    """A ``Desk`` whose every readable event is written to its steward's tape.

    Events that cannot be read change nothing but a counter and are not written down.
    """

    def __init__(self, steward: TapingSteward) -> None:
        super().__init__(steward)
        self._taping = steward

    def fold(self, emitter: str, event: AnyEvent, now: float) -> EventOutcome:
        """Take in one event from a tape."""
        return self._apply(EmitterId(emitter), event, now)

    def _apply(self, emitter: EmitterId, event: AnyEvent, now: float) -> EventOutcome:
        applies = super()._apply

        def answer(outcome: EventOutcome) -> Any:
            lease = self._taping.leases.get(event.program_id)  # type: ignore[arg-type]
            if lease is None:
                return (outcome.outcome.value,)
            return outcome.outcome.value, lease.expires_s, lease.silent_s

        return self._taping.told_event(emitter, event, now, answer, lambda: applies(emitter, event, now))
