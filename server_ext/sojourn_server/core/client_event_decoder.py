"""Decodes client events from the wire, passes each to the scheduler, and limits the time that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sojourn.ids import MAX_ID_BYTES, id_problem
from sojourn.wire_codec import EventOutcome, Outcome, OutcomeBatch, WireError, decode_batch, decode_event

from ..metrics.metrics_recorder import MetricsRecorder
from .events_and_actions import Action, ClientEventReceived, Event, EventAnswered
from .request_hints import RequestIdentity

EventHandler = Callable[[Event, float], list[Action]]
"""Function that handles an event and returns the actions: ``ProgramScheduler.handle``, or an engine's own
method that calls ``handle`` and also collects the actions to carry out."""

MAX_ATTACHED_EVENTS = 64
"""Maximum number of events attached to one request that are handled. The SDK attaches no more. The engine
handles attached events before their request, so ``EventTimeBudget`` cannot delay them. Their time is charged
to the budget, and delays events that are posted later."""
EVENT_TYPES = ("program_start", "tool_start", "tool_stop", "heartbeat", "aeg", "program_end")
EVENT_SHARE = 0.04
"""Share of the engine's time that events may use once ``EVENT_BURST_S`` is used up."""
EVENT_BURST_S = 0.02
"""Maximum budget that can be saved up for a burst of events, in seconds of the engine's time."""
MAX_WAIT_S = 1.5
"""Maximum wait after a call in seconds, so that one slow call does not delay events for long. The value is
below the SDK's ``send_timeout_s``."""


class _EventLabel(msgspec.Struct):
    """Fields that are read from an invalid event, so that its outcome can name the event."""

    type: Any = None
    program_id: Any = None
    seq: Any = None


class ClientEventDecoder:
    """Decodes client events and passes each to the scheduler. An event that cannot be decoded is only
    counted, and its outcome names the reason."""

    def __init__(self, handle: EventHandler, recorder: MetricsRecorder) -> None:
        self._handle = handle
        self._recorder = recorder

    def apply_batch(self, data: bytes, now: float) -> OutcomeBatch:
        """Handle a posted batch of events; returns their outcomes. Raises ``WireError`` if ``data`` is not a
        valid batch."""
        batch = decode_batch(data)
        return OutcomeBatch(outcomes=[self._one(batch.emitter, raw, now) for raw in batch.events])

    def apply_attached_events(self, identity: RequestIdentity, now: float) -> list[EventOutcome]:
        """Handle the first ``MAX_ATTACHED_EVENTS`` events attached to a request, and return their outcomes.
        Events without a valid emitter id are ignored. Call this method before the scheduler handles the
        request's ``RequestArrived``."""
        ours = identity.context.sojourn if identity.context is not None else None
        if ours is None or not ours.events or not ours.emitter or id_problem(ours.emitter) is not None:
            return []
        return [self._one(ours.emitter, raw, now) for raw in ours.events[:MAX_ATTACHED_EVENTS]]

    def _one(self, emitter: str, raw: msgspec.Raw, now: float) -> EventOutcome:
        try:
            event = decode_event(raw)
        except WireError as error:
            kind, outcome = undecodable_outcome(raw, str(error))
        else:
            kind = str(event.__struct_config__.tag)
            answer = self._handle(ClientEventReceived(emitter, event), now)[-1]
            assert isinstance(answer, EventAnswered)
            outcome = answer.outcome
        self._recorder.count("sojourn_events_total", type=kind, outcome=outcome.outcome.value)
        return outcome


def undecodable_outcome(raw: msgspec.Raw, error: str) -> tuple[str, EventOutcome]:
    """Return the type under which an event that cannot be decoded is counted, and its outcome. ``error``: why
    it cannot be decoded."""
    try:
        label = msgspec.json.decode(raw, type=_EventLabel)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        label = _EventLabel()
    given, program_id, seq = label.type, label.program_id, label.seq
    kind, outcome = "unknown", Outcome.REJECTED
    if given in EVENT_TYPES:
        kind = given
    elif isinstance(given, str):
        outcome = Outcome.UNSUPPORTED
        error = f"unknown event type {given[:64]!r}; expected {', '.join(EVENT_TYPES)}"
    return kind, EventOutcome(
        outcome=outcome,
        reason=error,
        program_id=program_id[:MAX_ID_BYTES] if isinstance(program_id, str) else None,
        seq=seq if type(seq) is int else None,
    )


class EventTimeBudget:
    """Computes how long an engine's API servers must wait before they send the next client events. There is
    one budget per engine, because its API servers share the engine's time. Times are in seconds."""

    def __init__(self, now: float) -> None:
        self._credit_s = EVENT_BURST_S
        self._credited_at = now

    def spend(self, busy_s: float, now: float) -> float:
        """Charge a call that took ``busy_s`` and ended at ``now``; returns the seconds to wait before the
        next call."""
        earned_s = max(now - self._credited_at, 0.0) * EVENT_SHARE
        self._credited_at = now
        credit_s = min(self._credit_s + earned_s, EVENT_BURST_S) - busy_s
        self._credit_s = max(credit_s, -MAX_WAIT_S * EVENT_SHARE)
        return max(-self._credit_s / EVENT_SHARE, 0.0)
