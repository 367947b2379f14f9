"""Writes the ``AgenticContext`` of a usual request as JSON text, without building its structs.

While an agent waits for the model, the CPU's caches are filled with other data, so each turn begins with cold
caches. The structs and their encoder touch many pages of memory, and then cost more than all other work for a
request. So this module writes the context of requests without hints, whose only events are those of tool
calls. Nearly all requests are of this kind. ``hints`` and ``wire_events`` define the format;
``tests/sdk/test_sdk_hint_encoder.py`` compares this module's text with the encoder's.
"""

from __future__ import annotations

from collections.abc import Iterable
from json import encoder
from typing import TYPE_CHECKING, Any, Final

from .wire_events import ToolStart, ToolStop

if TYPE_CHECKING:
    from .event_queue import PendingEvent
    from .program import Program

# Quotes and escapes a text as JSON. It raises ``TypeError`` for other objects.
_quoted: Any = encoder.encode_basestring
_LONGEST_S: Final = 1e9
"""Limit of ages and durations, in seconds. Shorter ones are written as whole microseconds, such as
``1500e-6``, because Python formats floats slowly. Longer ones are left to the caller's encoder."""


def write_context(
    program: Program,
    request_id: str,
    node: str | None,
    emitter: str | None,
    events: Iterable[PendingEvent],
    now: float,
    steps_left: float | None = None,
) -> str | None:
    """Return, as JSON text, the ``AgenticContext`` of a request for which the user's code gave neither hints
    nor a step id. It contains ``events`` with their ages at the time ``now`` (monotonic seconds).

    ``emitter`` is the id of the event sender that numbered the events; ``None`` if there are no events.

    Returns ``None`` if an event is neither ``ToolStart`` nor ``ToolStop``, if an age or duration is out of
    range, or if a duration is not a float. The caller then encodes the structs of ``hints`` and
    ``wire_events``. Raises ``TypeError`` if an id or a name in the program or its events is not a string, and
    ``UnicodeEncodeError`` if UTF-8 cannot express it."""
    id = _quoted(program.id)
    text = f'{{"program_id":{id}'
    if program.parent_id is not None:
        text += f',"parent_program_id":{_quoted(program.parent_id)}'
    if program.root_id is not None:
        text += f',"root_program_id":{_quoted(program.root_id)}'
    text += f',"request_id":"{request_id}","sojourn":{{'
    comma = ""
    if emitter is not None:
        text += f'"emitter":"{emitter}"'
        comma = ","
    if program.agent_type is not None:
        text += f'{comma}"agent_type":{_quoted(program.agent_type)}'
        comma = ","
    if node is not None:
        text += f'{comma}"node":{_quoted(node)}'
        comma = ","
    if program.heartbeat:
        text += f'{comma}"heartbeat":true'
        comma = ","
    if program.implicit:
        text += f'{comma}"implicit":true'
        comma = ","
    if program.tenant is not None:
        text += f'{comma}"tenant":{_quoted(program.tenant)}'
        comma = ","
    if steps_left is not None:
        text += f'{comma}"expected_steps_left":{steps_left!r}'
        comma = ","
    if emitter is not None:
        text += f'{comma}"events":['
        comma = ""
        for event in events:
            fields = event.fields
            age_s = now - event.at_s
            if not age_s > 0.0:
                age_s = 0.0
            elif not age_s < _LONGEST_S:
                return None
            age_us = int(age_s * 1e6 + 0.5)
            if event.kind is ToolStop:
                duration_s, status = fields["duration_s"], fields["status"]
                if type(duration_s) is not float or not 0.0 <= duration_s < _LONGEST_S:
                    return None
                text += (
                    f'{comma}{{"type":"tool_stop","program_id":{id},"seq":{event.seq},"age_s":{age_us}e-6,'
                    f'"call_id":{_quoted(fields["call_id"])},"duration_s":{int(duration_s * 1e6 + 0.5)}e-6'
                )
                text += "}" if status == "ok" else f',"status":{_quoted(status)}}}'
            elif event.kind is ToolStart:
                text += (
                    f'{comma}{{"type":"tool_start","program_id":{id},"seq":{event.seq},"age_s":{age_us}e-6,'
                    f'"call_id":{_quoted(fields["call_id"])},"tool":{_quoted(fields["tool"])}'
                )
                if fields["tool_class"] is not None:
                    text += f',"tool_class":{_quoted(fields["tool_class"])}'
                expected_s = fields["expected_s"]
                if expected_s is not None:
                    if type(expected_s) is not float or not 0.0 <= expected_s < _LONGEST_S:
                        return None
                    text += f',"expected_s":{int(expected_s * 1e6 + 0.5)}e-6'
                text += "}"
            else:
                return None
            comma = ","
        text += "]"
    text += "}}"
    if not text.isascii():
        text.encode()
    return text
