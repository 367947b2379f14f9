"""A ``ProgramScheduler`` that records each event with its actions and decisions."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace
from sojourn.hints import AgenticContext
from sojourn.wire_events import AnyEvent, ProgramEnd, ProgramStart, ToolStop

from ..core import events_and_actions as ev
from ..core.program_scheduler import ProgramScheduler
from ..core.request_hints import MAX_NAME_CHARS, RequestIdentity
from ..core.scheduler_state import SchedulerState
from ..metrics.turn_ledger import common_prefix_length
from ..programs.program_status import REPORTED_OUTCOMES

HASH_BYTES = 8
"""Number of bytes kept of a block hash. Among 10^6 blocks, a collision has a probability of 3 in 10^8."""

encode_record = msgspec.json.Encoder().encode
_WithHashes = ev.RequestArrived | ev.RequestAdmitted | ev.TurnFinished


class RecordSink(Protocol):
    """Protocol of an object that stores records. No method raises."""

    @property
    def is_open(self) -> bool:
        """Whether more records can be stored."""

    @property
    def is_full(self) -> bool:
        """Whether the next record must be the last, because the maximum size is reached."""

    def write(self, record: Any) -> None:
        """Store a record. It is encoded at once, so the caller may change its parts afterwards."""

    def close(self) -> None:
        """Store what was written, and end."""

    def give_up(self, error: Exception) -> None:
        """End the recording, because a record could not be made."""


class RecordingScheduler(ProgramScheduler):
    """A ``ProgramScheduler`` that also records its events in ``sink``. Results and exceptions are
    unchanged. If recording fails, only the recording ends."""

    def __init__(self, sink: RecordSink, state: SchedulerState) -> None:
        super().__init__(state)
        self._sink = sink
        self._chains: dict[str, Sequence[Any]] = {}
        """Id of a program's request → the block hashes recorded at its last admission."""
        self._next_decision = 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        if not self._sink.is_open:
            return super().handle(event, now)
        try:
            # Before the event is handled: it changes the contexts from which the difference is taken.
            recorded = self._recorded(event)
        except Exception as error:
            self._sink.give_up(error)
            return super().handle(event, now)
        try:
            actions = super().handle(event, now)
        except Exception as error:
            self._write(now, recorded, type(error).__name__)
            raise
        self._write(now, recorded, [_recorded_action(action) for action in actions])
        return actions

    def close_recording(self, reason: str) -> None:
        """Write the end record and close the sink. Does nothing if the recording has ended already."""
        if self._sink.is_open:
            self._sink.write({"ended": reason, "totals": self._totals()})
            self._sink.close()

    def restore(self, recorded: ev.Event) -> ev.Event:
        """Return the event of a decoded record, before it is handled. Raises ``ValueError`` for invalid block
        hashes."""
        if isinstance(recorded, ev.RequestArrived | ev.RequestAdmitted | ev.TurnFinished):
            if recorded.block_hashes is None:
                return recorded
            base = self._chain_before(recorded)
            shared, rest = recorded.block_hashes
            return replace(recorded, block_hashes=[*base[:shared], *_read_hashes(rest)])
        if isinstance(recorded, ev.BlocksEvicted):
            blocks = [(each, text and _read_hashes(text)[0]) for each, text in recorded.blocks]
            return replace(recorded, blocks=blocks)
        return recorded

    def _write(self, now: float, recorded: ev.Event, actions: Any) -> None:
        outcome = actions
        if not isinstance(actions, str):
            log = self.decisions
            decisions, self._next_decision = log.since(self._next_decision, log.capacity)
            outcome = actions, decisions
        self._sink.write((now, recorded, outcome))
        if self._sink.is_full:
            self.close_recording("cut off: the recording has reached its maximum size")

    def _recorded(self, event: ev.Event) -> ev.Event:
        """Return the event without texts of clients, and with shortened block hashes."""
        if isinstance(event, ev.RequestArrived):
            identity = event.identity
            context = _without_text(identity.context) if identity.context is not None else None
            identity = RequestIdentity(identity.program_id, context, identity.outcome)
            return replace(event, identity=identity, block_hashes=self._chain_difference(event))
        if isinstance(event, ev.ClientEventReceived):
            return replace(event, event=_event_without_text(event.event))
        if isinstance(event, ev.RequestAdmitted | ev.TurnFinished):
            return replace(event, block_hashes=self._chain_difference(event))
        if isinstance(event, ev.BlocksEvicted):
            blocks = [(each, block_hash and block_hash[:HASH_BYTES]) for each, block_hash in event.blocks]
            return replace(event, blocks=blocks, score=None)
        return event

    def _chain_difference(self, event: _WithHashes) -> tuple[int, bytes] | None:
        """Return (number of leading hashes shared with ``_chain_before``, the further hashes)."""
        request_id, hashes = event.request_id, event.block_hashes
        if hashes is None:
            return None
        base = self._chain_before(event)
        state = self._requests.states.get(request_id)
        if isinstance(event, ev.TurnFinished):
            self._chains.pop(request_id, None)
        elif isinstance(event, ev.RequestArrived) or (state is not None and state.program is not None):
            self._chains[request_id] = hashes = list(hashes)
        elif not self.tiers.places:  # only placement uses the hashes of requests without a program
            hashes = ()
        shared = common_prefix_length(base, hashes)
        return shared, _joined(hashes[shared:])

    def _chain_before(self, event: _WithHashes) -> Sequence[Any]:
        """Return the block hashes recorded at the request's last admission, or else at its arrival, or else
        those of its program's last context, or else none."""
        chain = self._chains.get(event.request_id)
        if chain is None:
            known = event.identity if isinstance(event, ev.RequestArrived) else self.request(event.request_id)
            if known is not None and known.program_id is not None:
                chain = self.state.contexts.get(known.program_id)
        return chain if chain is not None else ()

    def _totals(self) -> dict[str, Any]:
        return {
            "leases": len(self._leases),
            "lease_blocks": self._leases.blocks,
            "requests": len(self._requests.states),
            "programs": {status.value: count for status, count in sorted(self._programs.counts.items())},
            "ledger": self.state.ledger.totals,
        }


def _recorded_action(action: ev.Action) -> tuple[Any, ...]:
    # The reason of an outcome may quote the client.
    fields = (action.outcome.outcome,) if isinstance(action, ev.EventAnswered) else action
    return type(action).__name__, *fields


def _without_text(context: AgenticContext) -> AgenticContext:
    """Return a request's hints with long names cut, and without the events that the request carries, which
    have records of their own."""
    ours = context.sojourn
    if ours is not None:
        ours = replace(
            ours, emitter=None, events=[], agent_type=_cut(ours.agent_type), node=_cut(ours.node),
            tenant=_cut(ours.tenant),
        )  # fmt: skip
    return replace(context, request_id=_cut(context.request_id), step_id=None, sojourn=ours)


def _event_without_text(event: AnyEvent) -> AnyEvent:
    """Return a client's event with constants in place of the fields that cannot change a decision."""
    if isinstance(event, ProgramStart):
        return replace(event, name=None)
    if isinstance(event, ToolStop):
        return replace(event, status="ok")
    if isinstance(event, ProgramEnd) and event.status not in REPORTED_OUTCOMES:
        return replace(event, status="error")
    return event


def _cut(name: str | None) -> str | None:
    return name[:MAX_NAME_CHARS] if name is not None else None


def _joined(hashes: Iterable[Any]) -> bytes:
    return b"".join(block_hash[:HASH_BYTES] for block_hash in hashes)


def _read_hashes(text: str) -> list[bytes]:
    """Return the block hashes in a base64 text."""
    data = base64.b64decode(text, validate=True)
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes of block hashes; expected a multiple of {HASH_BYTES}")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
