"""The dialect of a server that runs the sojourn plugin: all hints, in the body field that vLLM accepts."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from sojourn.hints import AgenticContext
from sojourn.sdk_logger import logger
from sojourn.wire_codec import (
    EVENTS_PATH,
    MAX_BATCH_BYTES,
    MAX_CONTEXT_BYTES,
    WIRE_VERSION,
    EventBatch,
    Outcome,
    WireError,
    decode_outcomes,
    encode,
)
from sojourn.wire_events import AegReport, AnyEvent, Event

from .event_transport import UNSUPPORTED_STATUSES, DeliveryResult, PendingBatch, TransportContext
from .server_dialects import SESSION_HEADER, header_text

_ENVELOPE_BYTES = 1024
"""Bytes left free in a batch for everything that is not an event."""


class SojournDialect:
    """Sends all hints in ``vllm_xargs.agentic_context``, as a JSON *string*, since vLLM allows only flat
    values there."""

    name = "sojourn"
    carries_events = True
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        return self.text_fields(context.program_id, encode(context).decode())

    def text_fields(self, program_id: str, context: str) -> tuple[dict[str, Any], dict[str, str]]:
        size = len(context) if context.isascii() else len(context.encode())
        if size > MAX_CONTEXT_BYTES:
            raise WireError(f"agentic_context of {size} bytes; at most {MAX_CONTEXT_BYTES} are accepted")
        plain = program_id.isascii() and program_id.isprintable() and " " not in program_id
        return {"vllm_xargs": {"agentic_context": context}}, {
            SESSION_HEADER: program_id if plain else header_text(program_id)
        }

    def event_transport(self, transport_context: TransportContext) -> SojournEventTransport:
        return SojournEventTransport(transport_context)


class SojournEventTransport:
    """Sends every event by ``POST /sojourn/v1/events``, in batches. The answer has an outcome for each
    event."""

    kinds: frozenset[type[Event]] = frozenset(get_args(AnyEvent))
    takes_implicit = False  # the server treats requests of implicit programs as requests of no program

    def __init__(self, transport_context: TransportContext) -> None:
        self._transport = transport_context.transport
        self._counters = transport_context.counters
        self._unknown_graph = transport_context.unknown_graph

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
            unsent = sum(map(len, bodies[sent:]))
            if delivery is DeliveryResult.FAILED:
                self._counters.add("dropped_send", unsent)
                break
            if delivery is DeliveryResult.UNSUPPORTED:
                self._counters.add("dropped_unsupported", unsent)
                break
        return delivery

    def after_fork(self) -> None: ...

    def close(self) -> None: ...

    def _post(self, batch: PendingBatch, events: list[msgspec.Raw]) -> DeliveryResult:
        body = encode(EventBatch(v=WIRE_VERSION, emitter=batch.emitter, events=events, dropped=batch.dropped))
        try:
            answer = self._transport.post(EVENTS_PATH, body)
        except Exception as error:
            self._counters.add(f"net_{type(error).__name__}")
            return DeliveryResult.FAILED
        if answer.status in UNSUPPORTED_STATUSES:
            self._counters.add(f"http_{answer.status}")
            return DeliveryResult.UNSUPPORTED
        if not 200 <= answer.status < 300:
            if self._counters[f"http_{answer.status}"] == 0:
                logger.warning("the server answered %d to events; they are being dropped", answer.status)
            self._counters.add(f"http_{answer.status}")
            return DeliveryResult.FAILED
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
        if missing and self._unknown_graph is not None:
            for pending in batch.events:
                if pending.seq in missing and pending.kind is AegReport:
                    self._unknown_graph(pending)
        # Some servers answer 200 to everything; one outcome per event shows that the batch was read.
        return DeliveryResult.CONFIRMED if len(outcomes) == expected else DeliveryResult.ACCEPTED
