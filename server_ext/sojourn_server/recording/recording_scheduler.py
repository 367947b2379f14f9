"""A ``ProgramScheduler`` that records each event with its actions and decisions, or replays such a record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from sojourn.hints import AgenticContext
from sojourn.wire_events import AnyEvent, ProgramEnd, ProgramStart, ToolStop

from ..core import events_and_actions as ev
from ..core.program_scheduler import ProgramScheduler
from ..core.request_hints import RequestIdentity
from ..core.scheduler_state import Histories, SchedulerState
from ..metrics.turn_ledger import common_prefix_length
from ..policies.preset import parse_preset
from ..programs.program_status import REPORTED_OUTCOMES
from ..programs.windowed_history import recent_entry
from .recording_file import RecordingFile, RecordingHeader

HASH_DIGITS = 16
"""Number of hexadecimal digits kept of a block hash. Among 10^6 blocks, a collision has a probability of 3 in
10^8."""
MAX_CHAINS = 500
"""Maximum number of chains of hashes that are kept, to record the next ones as differences."""

_WithHashes = ev.RequestArrived | ev.RequestAdmitted | ev.TurnFinished


class RecordingScheduler(ProgramScheduler):
    """A ``ProgramScheduler`` that also records its events in ``file``. Results and exceptions are unchanged.
    If recording fails, only the recording ends. Without a file it ``replay``\\ s records."""

    def __init__(self, state: SchedulerState, file: RecordingFile | None = None) -> None:
        super().__init__(state)
        self._file = file
        self._chains: dict[str, list[Any]] = {}
        """Id of a program, or of a request without one → the chain of block hashes recorded last."""
        self._next_decision = 0

    @classmethod
    def from_header(cls, header: RecordingHeader) -> RecordingScheduler:
        """Return a new scheduler in the initial state of the recorded scheduler. Raises ``ValueError`` or
        ``KeyError`` for an invalid preset or history."""
        preset = parse_preset(header.preset_toml, source=header.preset_source)
        histories = Histories.restore(header.histories)
        return cls(
            SchedulerState(preset, header.pool, limits=header.limits, curve=header.curve, histories=histories)
        )

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        file = self._file
        if file is None or not file.is_open:
            return super().handle(event, now)
        recorded: ev.Event | None = None
        try:
            recorded = self._recorded(event)  # before it is handled, as a replay restores it
        except Exception as error:
            file.give_up(error)
        try:
            actions = super().handle(event, now)
        except Exception as error:
            file.write((now, recorded, type(error).__name__))
            raise
        file.write((now, recorded, self._outcome(actions)))
        if file.is_full:
            self.close_recording("cut off: the recording has reached its maximum size")
        return actions

    def replay(self, recorded: ev.Event, now: float) -> tuple[Any, str]:
        """Handle the event of a record. Return the outcome in its recorded form, and the text of an exception
        that was raised."""
        try:
            return self._outcome(super().handle(self._restored(recorded), now)), ""
        except Exception as error:
            return type(error).__name__, f"; raised {error!r}"

    def close_recording(self, reason: str) -> None:
        """Write the end record and close the file. Does nothing if the recording has ended already."""
        if self._file is not None and self._file.is_open:
            self._file.close({"ended": reason, "totals": self.totals()})

    def totals(self) -> dict[str, Any]:
        """Return the state that the end record has."""
        return {
            "leases": len(self._leases),
            "lease_blocks": self._leases.blocks,
            "requests": len(self._requests.states),
            "programs": {status.value: count for status, count in sorted(self._programs.counts.items())},
            "ledger": self.state.ledger.totals,
        }

    def _outcome(self, actions: list[ev.Action]) -> Any:
        decisions, self._next_decision = self.decisions.since(self._next_decision, self.decisions.capacity)
        return [self._recorded_action(action) for action in actions], decisions

    def _recorded_action(self, action: ev.Action) -> tuple[Any, ...]:
        fields: Iterable[Any] = action
        if isinstance(action, ev.EventAnswered):
            fields = (action.outcome.outcome,)  # the reason may quote the client
        elif isinstance(action, ev.LeaseGranted):
            lease = self._leases.get(action.program_id)  # compared with all digits of its TTL
            ttl_s, reason = (lease.ttl_s, lease.reason.value) if lease is not None else (None, None)
            fields = (action.program_id, ttl_s, reason, len(action.block_ids))
        return type(action).__name__, *fields

    def _recorded(self, event: ev.Event) -> ev.Event:
        """Return the event without texts of clients, and with shortened block hashes. Of a chain of hashes
        only (number of leading hashes that the program's last recorded chain has, the others) remain."""
        if isinstance(event, ev.ClientEventReceived):
            return replace(event, event=_event_without_text(event.event))
        if isinstance(event, ev.BlocksEvicted):
            blocks = [(block_id, _joined([name]) if name else None) for block_id, name in event.blocks]
            return replace(event, blocks=blocks, score=None)
        if isinstance(event, ev.RequestArrived) and event.identity.context is not None:
            identity = event.identity
            context = _without_text(event.identity.context)
            event = replace(event, identity=RequestIdentity(identity.program_id, context, identity.outcome))
        if not isinstance(event, _WithHashes) or event.block_hashes is None:
            return event
        hashes = event.block_hashes
        shared = common_prefix_length(self._next_chain(event, list(hashes)), hashes)
        return replace(event, block_hashes=(shared, _joined(hashes[shared:])))

    def _restored(self, event: ev.Event) -> ev.Event:
        """Return the event of which this is the recorded form. Block hashes remain shortened texts."""
        if not isinstance(event, _WithHashes) or event.block_hashes is None:
            return event
        shared, text = event.block_hashes
        chain: list[Any] = []
        before = self._next_chain(event, chain)
        chain += before[:shared]
        chain += (text[start : start + HASH_DIGITS] for start in range(0, len(text), HASH_DIGITS))
        return replace(event, block_hashes=chain)

    def _next_chain(self, event: _WithHashes, chain: list[Any]) -> list[Any]:
        """Store the newest chain of the event's program, or of its request if that has no program. Return the
        one before, which is empty at first."""
        if isinstance(event, ev.RequestArrived):
            program_id = event.identity.program_id
        else:
            known = self.request(event.request_id)
            program_id = known.program_id if known is not None else None
        key = program_id or event.request_id
        before = self._chains.get(key, [])
        recent_entry(self._chains, key, list, MAX_CHAINS)
        self._chains[key] = chain
        if program_id is None and isinstance(event, ev.TurnFinished):
            del self._chains[key]
        return before


def _without_text(context: AgenticContext) -> AgenticContext:
    """Return a request's hints without their text, and without the events that the request carries, which
    have records of their own."""
    ours = context.sojourn
    if ours is not None:
        ours = replace(ours, emitter=None, events=[])
    return replace(context, step_id=None, sojourn=ours)


def _event_without_text(event: AnyEvent) -> AnyEvent:
    """Return a client's event with constants in place of the fields that cannot change a decision."""
    if isinstance(event, ProgramStart):
        return replace(event, name=None)
    if isinstance(event, ToolStop):
        return replace(event, status="ok")
    if isinstance(event, ProgramEnd) and event.status not in REPORTED_OUTCOMES:
        return replace(event, status="error")
    return event


def _joined(hashes: Iterable[bytes]) -> str:
    return "".join(block_hash[: HASH_DIGITS // 2].hex() for block_hash in hashes)
