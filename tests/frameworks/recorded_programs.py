"""Programs rebuilt from the events of a server, and the invariants that hold for every framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sojourn
from scenario_types import ProgramFact, ToolFact
from sojourn.hints import SojournContext
from sojourn.testing import FakeServer, LlmRequest, ToolUse
from sojourn.valid_ids_and_names import name_of
from sojourn.wire_codec import decode_event
from sojourn.wire_events import AnyEvent, ProgramEnd, ProgramStart, ToolStart, ToolStop


class RecordedProgram(NamedTuple):
    """A program as the server knows it."""

    start: ProgramStart
    ends: list[ProgramEnd]
    tool_starts: list[ToolStart]
    tool_stops: list[ToolStop]
    requests: list[LlmRequest]
    """The first attempt of each request."""
    late: list[str]
    """Descriptions of events that came after the program's end, or before its start."""

    @property
    def tools(self) -> tuple[ToolFact, ...]:
        """Tool calls in the form of ``ProgramFact.tools``."""
        status = {stop.call_id: stop.status for stop in self.tool_stops}
        facts = [
            ToolFact(start.tool, status.get(start.call_id, "never ended"), start.tool_class)
            for start in self.tool_starts
        ]
        return tuple(sorted(facts, key=str))

    @property
    def nodes(self) -> tuple[str | None, ...]:
        """Node of each request, in the order of arrival."""
        return tuple(_ours(request).node for request in self.requests)

    @property
    def steps_left(self) -> tuple[float, ...]:
        """Steps left, as the requests state them."""
        stated = (_ours(request).expected_steps_left for request in self.requests)
        return tuple(left for left in stated if left is not None)

    @property
    def status(self) -> str:
        """How it ended."""
        return " and ".join(end.status for end in self.ends) or "never ended"


def recorded_programs(server: FakeServer) -> dict[str, RecordedProgram]:
    """The programs that a server received, by program id."""
    recorded: dict[str, RecordedProgram] = {}
    for event in server.program_events():
        known = recorded.get(event.program_id)
        if isinstance(event, ProgramStart):
            if known is None:
                recorded[event.program_id] = RecordedProgram(event, [], [], [], [], [])
            else:
                known.late.append("a second start")
            continue
        if known is None:
            never = ProgramStart(program_id=event.program_id, seq=-1)
            recorded[event.program_id] = known = RecordedProgram(never, [], [], [], [], [])
            known.late.append(f"{type(event).__name__} before its start")
        if known.ends and isinstance(event, (ToolStart, ToolStop, ProgramEnd)):
            known.late.append(f"{type(event).__name__} after its end")
        if isinstance(event, ToolStart):
            known.tool_starts.append(event)
        elif isinstance(event, ToolStop):
            known.tool_stops.append(event)
        elif isinstance(event, ProgramEnd):
            known.ends.append(event)
    for request in logical(server.requests):
        context = request.context
        if context is not None and context.program_id in recorded:
            recorded[context.program_id].requests.append(request)
    return recorded


def checked_programs(server: FakeServer, *allowed: str) -> dict[str, RecordedProgram]:
    """The programs, once all has arrived. Fails if a rule that holds for every program is broken, but for
    sentences with one of ``allowed`` in them, or if there was a fault of ours."""
    assert sojourn.flush(60), "events were lost or not sent within 60 s"
    counts = sojourn.stats()
    faults = ("internal_error", "attach_error", "resolver_error", "context_reset_failed")
    assert not any(counts[name] for name in faults), f"faults of ours: {counts}"
    programs = recorded_programs(server)
    wrong = [text for text in problems(server, programs, []) if not any(each in text for each in allowed)]
    assert not wrong, "\n".join(["", *wrong])
    return programs


def logical(requests: Iterable[LlmRequest]) -> list[LlmRequest]:
    """The first attempt of each of the requests."""
    seen: set[str] = set()
    firsts = []
    for request in list(requests):
        context = request.context
        own = context.request_id if context is not None else None
        key = own or f"none, {id(request.body)}"
        if key not in seen:
            seen.add(key)
            firsts.append(request)
    return firsts


def drawing(programs: Sequence[ProgramFact], *, in_order: bool) -> str:
    """Text of a forest of programs, which does not depend on ids and on the order of siblings."""
    children: dict[str | None, list[ProgramFact]] = {}
    keys = {fact.key for fact in programs}
    for fact in programs:
        parent = fact.parent if fact.parent in keys or fact.parent is None else None
        children.setdefault(parent, []).append(fact)
    return "\n".join(sorted("\n".join(_lines(fact, children, in_order)) for fact in children.get(None, ())))


def _lines(fact: ProgramFact, children: dict[str | None, list[ProgramFact]], in_order: bool) -> Iterator[str]:
    yield f"program, {fact.status}"
    nodes = fact.nodes if in_order else sorted(fact.nodes, key=str)
    for node in nodes:
        yield f"  request at {node}"
    if fact.steps_left:
        # Each takes one from the limit, in whichever order they arrive.
        yield f"  steps left {[float(left) for left in sorted(fact.steps_left, reverse=True)]}"
    for tool in sorted(fact.tools, key=str):
        yield f"  tool {tool.tool} [{tool.tool_class}] {tool.status}"
    for text in sorted("\n".join(_lines(child, children, in_order)) for child in children.get(fact.key, ())):
        yield from (f"  {line}" for line in text.splitlines())


def facts(recorded: dict[str, RecordedProgram]) -> list[ProgramFact]:
    """The reported programs, in the form in which a scenario lists them."""
    return [
        ProgramFact(id, each.status, each.start.parent_program_id, each.nodes, each.tools, each.steps_left)
        for id, each in recorded.items()
    ]


def problems(server: FakeServer, recorded: dict[str, RecordedProgram], asked: Sequence[ToolUse]) -> list[str]:
    """Violations of the rules for all scenarios, one sentence each."""
    return [
        *_lifetime_problems(recorded),
        *_identity(server, recorded),
        *_call_ids(recorded, asked),
        *(text for each in recorded.values() for text in _out_of_order_requests(server, each)),
    ]


def _lifetime_problems(recorded: dict[str, RecordedProgram]) -> Iterator[str]:
    for id, each in recorded.items():
        label = f"program {each.start.name or id}"
        if len(each.ends) != 1:
            yield f"{label} ended {len(each.ends)} times; a start needs one end"
        yield from (f"{label}: {text}" for text in each.late)
        starts, stops = (Counter(e.call_id for e in events) for events in (each.tool_starts, each.tool_stops))
        for call_id in starts.keys() | stops.keys():
            if (starts[call_id], stops[call_id]) != (1, 1):
                counts = f"started {starts[call_id]} and stopped {stops[call_id]} times"
                yield f"{label}: tool call {call_id} {counts}"
        parent = recorded.get(each.start.parent_program_id or "")
        if each.start.parent_program_id is not None:
            if parent is None:
                yield f"{label}: its parent {each.start.parent_program_id} was never told of"
            else:
                root = parent.start.root_program_id or parent.start.program_id
                if each.start.root_program_id != root:
                    yield f"{label}: its root is {each.start.root_program_id}, its parent's is {root}"
                calls = {start.call_id for start in parent.tool_starts}
                if each.start.call_id is not None and each.start.call_id not in calls:
                    yield f"{label}: it runs in the call {each.start.call_id}, which its parent never told of"
        elif each.start.root_program_id is not None:
            yield f"{label}: it has a root and no parent"


def _identity(server: FakeServer, recorded: dict[str, RecordedProgram]) -> Iterator[str]:
    for number, request in enumerate(list(server.requests), 1):
        label = f"request {number} ({request.path})"
        context = request.context
        if context is None:
            yield f"{label} says nothing of its program"
            continue
        if _ours(request).implicit:
            yield f"{label} was made outside any program"
        each = recorded.get(context.program_id)
        if each is None:
            yield f"{label} belongs to {context.program_id}, which was never told of"
            continue
        if request.headers.get("x-session-id") != context.program_id:
            yield f"{label}: X-Session-ID is {request.headers.get('x-session-id')}, not the program's id"
        for field, said, known in (
            ("parent", context.parent_program_id, each.start.parent_program_id),
            ("root", context.root_program_id, each.start.root_program_id),
            ("agent type", _ours(request).agent_type, each.start.agent_type),
        ):
            if said != known:
                yield f"{label}: its {field} is {said}, its program's is {known}"


def _call_ids(recorded: dict[str, RecordedProgram], asked: Sequence[ToolUse]) -> Iterator[str]:
    given: dict[str, set[str | None]] = {}
    for use in asked:
        given.setdefault(name_of(use.name), set()).add(use.id)
    for each in recorded.values():
        for start in each.tool_starts:
            # A tool that the model never asked for (a code executor's) has an id of its own.
            if start.tool in given and start.call_id not in given[start.tool]:
                ids = sorted(map(str, given[start.tool]))
                yield f"tool {start.tool} has the call id {start.call_id}; the model's answers said {ids}"


def _out_of_order_requests(server: FakeServer, each: RecordedProgram) -> Iterator[str]:
    """Yield a sentence for each request that has a tool's result in its prompt, but came before the tool's
    end was reported."""
    stopped = {stop.call_id for stop in each.tool_stops}
    rode: set[str] = set()
    for request in each.requests:
        rode |= _stops(request.events)
        # One more batch may be in transit, because the sender had taken it before the request took the other
        # events.
        sent = server.batches[: request.batches_before + 1]
        heard = rode | _stops(decode_event(raw) for batch in sent for raw in batch.events)
        for call_id in results_in(request.body):
            if call_id in stopped and call_id not in heard:
                yield f"{request.path} with the result of {call_id} came before the news that it ended"


def _stops(events: Iterable[AnyEvent]) -> set[str]:
    return {event.call_id for event in events if isinstance(event, ToolStop)}


def results_in(body: dict[str, Any]) -> list[str]:
    """Ids of the tool calls whose results a prompt holds."""
    messages = body.get("messages") or body.get("input") or []
    if not isinstance(messages, list):
        return []
    return [
        str(message.get("tool_call_id") or message.get("call_id"))
        for message in messages
        if message.get("role") == "tool" or message.get("type") == "function_call_output"
    ]


def _ours(request: LlmRequest) -> SojournContext:
    context = request.context
    return (context.sojourn if context is not None else None) or SojournContext()
