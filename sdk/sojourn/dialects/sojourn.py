"""A server that runs the sojourn plugin: everything we know, under the field vLLM lets through."""

from __future__ import annotations

import logging
from typing import Any, get_args

import msgspec

from sojourn.events import AegReport, AnyEvent, Event
from sojourn.hints import AgenticContext
from sojourn.wire import (
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

from .courier import Batch, Delivery, Road
from .header import session_header

logger = logging.getLogger("sojourn")

NOT_OURS = frozenset({404, 405, 501})
"""Answers of a server that has no such endpoint."""
_ENVELOPE_BYTES = 1024
"""Room left in a batch for everything that is not an event."""


class SojournDialect:
    """``vllm_xargs.agentic_context``: a JSON *string*, since vLLM allows only flat values there."""

    name = "sojourn"
    carries_events = True
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        data = encode(context)
        if len(data) > MAX_CONTEXT_BYTES:
            raise WireError(f"agentic_context of {len(data)} bytes; at most {MAX_CONTEXT_BYTES} are accepted")
        return {"vllm_xargs": {"agentic_context": data.decode()}}, session_header(context.program_id)

    def courier(self, road: Road) -> SojournCourier:
        return SojournCourier(road)


class SojournCourier:
    """``POST /sojourn/v1/events``: every event, in batches, each answered with an outcome."""

    kinds: frozenset[type[Event]] = frozenset(get_args(AnyEvent))

    def __init__(self, road: Road) -> None:
        self._transport = road.transport
        self._counters = road.counters
        self._unknown_graph = road.unknown_graph

    def deliver(self, batch: Batch) -> Delivery:
        bodies: list[list[msgspec.Raw]] = [[]]
        used = 0
        for pending in batch.events:
            try:
                raw = pending.encode(batch.now)
            except Exception:  # one event that cannot be said must not spoil the others
                self._counters.add("encode_error")
                continue
            used += len(raw) + 1
            if used > MAX_BATCH_BYTES - _ENVELOPE_BYTES:
                bodies.append([])
                used = len(raw) + 1
            bodies[-1].append(msgspec.Raw(raw))
        delivery = Delivery.TAKEN
        for sent, events in enumerate(bodies):
            if not events:
                continue
            delivery = self._post(batch, events)
            unsent = sum(map(len, bodies[sent:]))
            if delivery is Delivery.FAILED:
                self._counters.add("dropped_send", unsent)
                break
            if delivery is Delivery.NO_PLACE:
                self._counters.add("dropped_unsupported", unsent)
                break
        return delivery

    def after_fork(self) -> None: ...

    def close(self) -> None: ...

    def _post(self, batch: Batch, events: list[msgspec.Raw]) -> Delivery:
        body = encode(EventBatch(v=WIRE_VERSION, emitter=batch.emitter, events=events, dropped=batch.dropped))
        try:
            answer = self._transport.post(EVENTS_PATH, body)
        except Exception as error:
            self._counters.add(f"net_{type(error).__name__}")
            return Delivery.FAILED
        if answer.status in NOT_OURS:
            self._counters.add(f"http_{answer.status}")
            return Delivery.NO_PLACE
        if not 200 <= answer.status < 300:
            if self._counters[f"http_{answer.status}"] == 0:
                logger.warning("the server answered %d to events; they are being dropped", answer.status)
            self._counters.add(f"http_{answer.status}")
            return Delivery.FAILED
        self._counters.add("events_sent", len(events))
        return self._read_outcomes(answer.body, len(events), batch)

    def _read_outcomes(self, body: bytes, expected: int, batch: Batch) -> Delivery:
        try:
            outcomes = decode_outcomes(body[: 2 * MAX_BATCH_BYTES]).outcomes
        except WireError:
            self._counters.add("answer_unreadable")
            return Delivery.TAKEN
        for outcome in outcomes:
            self._counters.add(f"outcome_{outcome.outcome.value}")
        missing = {outcome.seq for outcome in outcomes if outcome.outcome is Outcome.MISSING}
        if missing and self._unknown_graph is not None:
            for pending in batch.events:
                if pending.seq in missing and pending.kind is AegReport:
                    self._unknown_graph(pending)
        # Some servers answer 200 to everything; only one answer per event shows that ours was read.
        return Delivery.SHOWN if len(outcomes) == expected else Delivery.TAKEN
