"""The versioned wire format: encode and decode, nothing else.

``POST /sojourn/v1/events`` carries an ``EventBatch``; its answer is an ``OutcomeBatch``. A request carries an
``AgenticContext`` as a JSON *string* under ``vllm_xargs.agentic_context``, since vLLM allows only flat values
there.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, TypeVar

import msgspec

from .errors import InputError
from .hints import AgenticContext, SojournContext
from .ids import id_problem
from .wire_events import AnyEvent, Event

WIRE_VERSION = 1
EVENTS_PATH = "/sojourn/v1/events"
CAPABILITIES_PATH = "/sojourn/v1/capabilities"
MAX_CONTEXT_BYTES = 16 * 1024
"""Longest ``agentic_context`` accepted, in bytes (vLLM Router's limit)."""
MAX_BATCH_BYTES = 256 * 1024
MAX_BATCH_EVENTS = 1024
MAX_GRAPH_NODES = 1024
MAX_GRAPH_EDGES = 4096
MAX_GRAPH_TOOLS = 64
"""Maximum number of tools named for one node of a graph."""
MAX_GRAPH_BYTES = 128 * 1024
"""Longest graph report, in bytes of JSON."""
MAX_EVENT_NAME_BYTES = 256
"""Longest name of a tool, agent, node or tenant, in bytes of UTF-8. The client cuts longer names."""


class WireError(InputError):
    """The bytes are not a valid message of this wire format. The error's text says what was wrong and what
    was expected."""


class Outcome(str, Enum):
    """The server's result for an event or a hint. ``docs/wire.md`` says what each value means."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    DUPLICATE = "duplicate"
    CLIPPED = "clipped"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"
    MISSING = "missing"


class EventOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server's answer to one event of a batch."""

    outcome: Outcome
    reason: str = ""
    program_id: str | None = None
    seq: int | None = None
    unsupported: tuple[str, ...] = ()
    """Fields of an applied event that the server's policy does not use."""


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of events as sent. The events stay undecoded, so that one bad event does not affect the
    others."""

    v: int
    emitter: str
    """Id of the client process's event sender, which numbers the events."""
    events: list[msgspec.Raw]
    dropped: int = 0
    """Number of events that the emitter has dropped so far."""


class OutcomeBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server's answer to a batch: one outcome per event, in the same order."""

    v: int = WIRE_VERSION
    outcomes: list[EventOutcome] = []


_encoder = msgspec.json.Encoder()
_batch_decoder = msgspec.json.Decoder(EventBatch)
_event_decoder = msgspec.json.Decoder(AnyEvent)
_context_decoder = msgspec.json.Decoder(AgenticContext)
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_outcome_decoder = msgspec.json.Decoder(OutcomeBatch)


def encode(message: object) -> bytes:
    """Return compact JSON of any wire struct. Raises ``WireError`` for values that JSON cannot express."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot encode {type(message).__name__}: {error}") from error


def decode_batch(data: bytes) -> EventBatch:
    """Decode a batch and check its bounds; ``decode_event`` decodes single events later. Raises
    ``WireError``."""
    if len(data) > MAX_BATCH_BYTES:
        raise WireError(f"batch of {len(data)} bytes; at most {MAX_BATCH_BYTES} are accepted")
    try:
        batch = _batch_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an event batch: {error}") from error
    if batch.v != WIRE_VERSION:
        raise WireError(f"wire version {batch.v} is not spoken here; expected {WIRE_VERSION}")
    if len(batch.events) > MAX_BATCH_EVENTS:
        raise WireError(f"{len(batch.events)} events in one batch; at most {MAX_BATCH_EVENTS} are accepted")
    _check_id("emitter", batch.emitter)
    return batch


def decode_event(raw: bytes | msgspec.Raw) -> AnyEvent:
    """Decode one event and check its bounds. Raises ``WireError``."""
    try:
        event: AnyEvent = _event_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an event: {error}") from error
    check_event(event)
    return event


def check_event(event: Event) -> None:
    """Check bounds that the types do not express. Raises ``WireError``."""
    _check_id("program_id", event.program_id)
    if event.seq < 0:
        raise WireError(f"seq is {event.seq}; expected a number that grows from 0")
    for field in ("age_s", "duration_s", "expected_s", "expected_p95_s"):
        value = getattr(event, field, None)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise WireError(f"{field} is {value}; expected seconds ≥ 0")
    for field in ("call_id", "parent_program_id", "root_program_id", "graph_hash"):
        value = getattr(event, field, None)
        if value is not None:
            _check_id(field, value)
    for field in ("tool", "tool_class", "name", "agent_type", "tenant"):
        value = getattr(event, field, None)
        if value is not None and len(value.encode("utf-8", "replace")) > MAX_EVENT_NAME_BYTES:
            raise WireError(f"{field} is longer than {MAX_EVENT_NAME_BYTES} bytes")


def decode_context(text: str | bytes) -> AgenticContext:
    """Decode the string under ``vllm_xargs.agentic_context`` and check its bounds. Optional fields with
    invalid values are left out. Raises ``WireError``."""
    return read_context(text)[0]


def read_context(text: str | bytes) -> tuple[AgenticContext, list[str]]:
    """Return the result of ``decode_context``, and a problem text for each field that is left out. Raises
    ``WireError``."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if len(data) > MAX_CONTEXT_BYTES:
        raise WireError(f"agentic_context of {len(data)} bytes; at most {MAX_CONTEXT_BYTES} are accepted")
    problems: list[str] = []
    try:
        try:
            context = _context_decoder.decode(data)
        except msgspec.ValidationError:
            context = _valid_part(AgenticContext, data, "", problems)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an agentic_context: {error}") from error
    _check_id("program_id", context.program_id)
    for field in ("parent_program_id", "root_program_id"):
        value = getattr(context, field)
        if value is not None and (problem := id_problem(value)) is not None:
            problems.append(f"{field} {problem}")
            context = msgspec.structs.replace(context, **{field: None})
    if context.sojourn is not None and context.sojourn.v != WIRE_VERSION:
        raise WireError(f"sojourn context version {context.sojourn.v}; expected {WIRE_VERSION}")
    return context, problems


_Part = TypeVar("_Part", AgenticContext, SojournContext)
_ESSENTIAL = ("program_id", "sojourn.v")
"""Fields whose invalid value makes the whole context invalid."""


def _valid_part(kind: type[_Part], data: bytes | msgspec.Raw, prefix: str, problems: list[str]) -> _Part:
    """Decode an object that the strict decoder refused. A field with an invalid value is left out and added
    to ``problems``; ``null`` counts as absent. Raises ``WireError`` or ``msgspec.DecodeError``."""
    members = _members_decoder.decode(data)
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        raw = bytes(members.get(field.name, b"null"))
        if raw == b"null":
            continue
        name = prefix + field.name
        try:
            values[field.name] = _field_value(name, field.type, raw, problems)
        except (msgspec.DecodeError, RecursionError) as error:
            if name in _ESSENTIAL:
                raise WireError(f"not an agentic_context: {name}: {error}") from error
            problems.append(f"{name}: {error}")
    return msgspec.convert(values, kind)


def _field_value(name: str, kind: Any, raw: bytes, problems: list[str]) -> Any:
    is_number = raw[:1] in b"-0123456789"
    if name == "sojourn":
        return _valid_part(SojournContext, raw, "sojourn.", problems)
    if name == "step_id" and is_number:  # vLLM Router's step_id is a number
        return str(msgspec.json.decode(raw, type=int, strict=False))
    # With ``strict=False``, msgspec accepts 3.0 as an integer. It would also accept strings as numbers.
    return msgspec.json.decode(raw, type=kind, strict=not is_number)


def decode_outcomes(data: bytes) -> OutcomeBatch:
    """Decode the server's answer to a batch. Raises ``WireError``."""
    try:
        return _outcome_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an outcome batch: {error}") from error


def _check_id(field: str, value: str) -> None:
    if (problem := id_problem(value)) is not None:
        raise WireError(f"{field} {problem}")
