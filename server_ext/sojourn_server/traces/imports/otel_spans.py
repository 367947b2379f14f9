"""Reader of OpenTelemetry spans from files of the collector (OTLP JSON) or of the Python SDK.

    OTLP JSON     {"resourceSpans": [{"scopeSpans": [{"spans": [...]}]}]}, one or many; also bare spans
    SDK JSON      output of ``ReadableSpan.to_json``: {"name", "context", "parent_id", "start_time", ...}

Only names, ids, times and attributes are read. Attributes may contain prompts; ``otel_import`` copies only
known attributes into the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..trace_schema import TraceError
from .json_records import read_records

_RELATIVE_NANOS = 1e9
"""If the first span of a file starts at or before this number, the file's times count as relative to the
beginning of the recording."""
_EARLIEST_NANOS = 1e17
"""March 1973 in nanoseconds since 1970. A smaller number must be a present time in a coarser unit, such as
microseconds."""
_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")


class OtelSpan(NamedTuple):
    """One span. Times are seconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the span: its trace's id and its own."""
        return self.trace_id, self.span_id


def read_spans(path: str | Path) -> tuple[list[OtelSpan], int]:
    """Return (ended spans of a file, in order; number of spans without an end). Raises ``TraceError``, which
    names the file. If one span is at fault, it also names the line."""
    spans: list[OtelSpan] = []
    unended = 0
    first_otlp_s = math.inf
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        for raw in _raw_spans(record, where):
            span = _span(raw, where)
            if span is None:
                unended += 1
                continue
            spans.append(span)
            if not isinstance(raw.get("context"), dict):
                first_otlp_s = min(first_otlp_s, span.start_s)
    if not spans and unended:
        raise TraceError(f"{path}: none of its {unended} spans has an end; expected spans that have ended")
    if not spans:
        raise TraceError(f"{path}: holds no spans; expected OTLP JSON or one span of the Python SDK a line")
    _check_unit(first_otlp_s * 1e9, str(path))
    return spans, unended


def _check_unit(first: float, where: str) -> None:
    """Raise ``TraceError`` if ``first``, the earliest start in an OTLP file, seems not to be in nanoseconds.
    A value of at most 1e9 counts as a relative time and passes."""
    if not _RELATIVE_NANOS < first < _EARLIEST_NANOS:
        return
    unit = "seconds" if first < 1e11 else "milliseconds" if first < 1e14 else "microseconds"
    raise TraceError(
        f"{where}: the first span has startTimeUnixNano {first:.0f}; expected nanoseconds since 1970; "
        f"this looks like {unit}"
    )


def _raw_spans(record: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(record, dict):
        raise TraceError(f"{where}: found {_kind(record)}; expected a span or resourceSpans, an object")
    batches = record.get("resourceSpans", record.get("resource_spans"))
    if batches is None:
        yield record
        return
    for batch in _list(batches, "resourceSpans", where):
        scopes: Any = next((batch[key] for key in _SCOPES if key in batch), [])
        for scope in _list(scopes, "scopeSpans", where):
            yield from _list(scope.get("spans", []), "spans", where)


def _list(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TraceError(f"{where}: {name} is {_kind(value)}; expected an array of objects")
    return value


def _span(raw: dict[str, Any], where: str) -> OtelSpan | None:
    """Return the parsed span; ``None`` if it has not ended."""
    context = raw.get("context")
    if isinstance(context, dict):
        return _sdk_span(raw, context, where)
    trace_id, span_id = raw.get("traceId", raw.get("trace_id")), raw.get("spanId", raw.get("span_id"))
    if not isinstance(trace_id, str) or not isinstance(span_id, str):
        raise TraceError(
            f"{where}: no span: neither traceId and spanId (OTLP) nor context (Python SDK) is there"
        )
    start = raw.get("startTimeUnixNano", raw.get("start_time_unix_nano"))
    end = raw.get("endTimeUnixNano", raw.get("end_time_unix_nano"))
    start_s = _nano_s(start, "startTimeUnixNano", where)
    end_s = _nano_s(end, "endTimeUnixNano", where) if end else 0.0
    attributes = {
        item["key"]: _otlp_value(item.get("value"))
        for item in _list(raw.get("attributes") or [], "attributes", where)
        if isinstance(item.get("key"), str)
    }
    parent = raw.get("parentSpanId", raw.get("parent_span_id"))
    return _ended(trace_id, span_id, parent, raw.get("name"), start_s, end_s, attributes, where)


def _sdk_span(raw: dict[str, Any], context: dict[str, Any], where: str) -> OtelSpan | None:
    trace_id, span_id = context.get("trace_id"), context.get("span_id")
    if not isinstance(trace_id, str) or not isinstance(span_id, str):
        raise TraceError(f"{where}: context is without trace_id or span_id")
    attributes = raw.get("attributes")
    if not isinstance(attributes, dict):
        attributes = {}
    start_s = _iso_s(raw.get("start_time"), "start_time", where)
    end_s = _iso_s(raw.get("end_time"), "end_time", where) if raw.get("end_time") else 0.0
    return _ended(trace_id, span_id, raw.get("parent_id"), raw.get("name"), start_s, end_s, attributes, where)


def _ended(
    trace_id: str,
    span_id: str,
    parent: Any,
    name: Any,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, Any],
    where: str,
) -> OtelSpan | None:
    """Return the span with normalised ids; ``None`` if ``end_s`` is 0, since the span has not ended. Raises
    ``TraceError`` for an end before the start."""
    if not end_s:
        return None
    if end_s < start_s:
        raise TraceError(f"{where}: span {span_id} ends {start_s - end_s:.6f} s before it starts")
    parent_id = _normalized_id(parent) if isinstance(parent, str) and parent.strip("0x") else None
    return OtelSpan(
        _normalized_id(trace_id),
        _normalized_id(span_id),
        parent_id,
        str(name or ""),
        start_s,
        end_s,
        attributes,
    )


def _normalized_id(number: str) -> str:
    """Return a hexadecimal id in lower case without ``0x``, so that equal ids compare equal. Other ids stay
    unchanged."""
    bare = number.lower().removeprefix("0x")
    return bare if all(digit in "0123456789abcdef" for digit in bare) else number


def _nano_s(value: Any, name: str, where: str) -> float:
    try:
        return int(value) / 1e9
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{where}: {name} is {value!r:.80}; expected nanoseconds since 1970") from None


def _iso_s(value: Any, name: str, where: str) -> float:
    try:
        # Python 3.10 does not parse Z.
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    except (AttributeError, TypeError, ValueError, OverflowError, OSError):
        raise TraceError(
            f"{where}: {name} is {value!r:.80}; expected a time as 2025-01-31T12:00:00.000000Z"
        ) from None


def _otlp_value(value: Any, depth: int = 8) -> Any:
    if not isinstance(value, dict) or not depth:
        return None
    if "intValue" in value:  # 64-bit numbers are strings in OTLP JSON
        try:
            return int(value["intValue"])
        except (TypeError, ValueError):
            return None
    if "arrayValue" in value:
        items = value["arrayValue"]
        values = items.get("values") if isinstance(items, dict) else None
        return [_otlp_value(item, depth - 1) for item in values] if isinstance(values, list) else []
    return next((value[k] for k in ("stringValue", "doubleValue", "boolValue") if k in value), None)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", type(None): "null"}.get(
        type(value), repr(value)
    )
