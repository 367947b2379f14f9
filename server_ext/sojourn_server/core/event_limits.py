"""Outcomes of client events that cannot be decoded, and the limits on the time that events take."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire_codec import EventOutcome, Outcome

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


def undecodable_outcome(raw: msgspec.Raw, error: str) -> tuple[str, EventOutcome]:
    """Return the type under which an event that cannot be decoded is counted, and its outcome. ``error``: why
    it cannot be decoded."""
    label: Any = None
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        label = msgspec.json.decode(raw)
    label = label if isinstance(label, dict) else {}
    given, program_id, seq = label.get("type"), label.get("program_id"), label.get("seq")
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
