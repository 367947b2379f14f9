"""Hints of a simulated client: the fields of ``agentic_context`` in each request, and client events.

The server receives no other data about a program. By default no hint reveals the program's recorded future;
the expected number of turns left is estimated from finished programs, as a client may that knows its own
runs. (sojourn's SDK sends no such estimate.) ``SimulatedClients.make_hints`` may replace these hints.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from sojourn.event_sender import POLL_EVERY_S

from sojourn_server.traces.trace_schema import TraceToolRun

AGENT_NODE = "agent"
"""Node name of an agent without a workflow graph: one loop of model and tool calls."""
_DECAY = 0.5 ** (1 / 20)
"""Each program weighs this much less than the next one of its type, so 20 later programs halve its weight."""
_ENOUGH_PROGRAMS = 5
_CONFIDENT_WEIGHT = _ENOUGH_PROGRAMS * 0.9 * _DECAY ** (_ENOUGH_PROGRAMS / 2)
"""Minimum weight of an average that is used, where the next program weighs 1."""
_MAX_TURN = 64
"""Highest turn number that has an average of its own. Later turns count as this turn."""
_MAX_TURNS = 512


class ClientHistory:
    """Estimates the turns that a program has left, as decayed averages over the finished programs of its
    type: at the same turn if enough are known, else at any turn. All clients of a run share one history."""

    def __init__(self) -> None:
        self._finished: Counter[str] = Counter()
        """Number of finished programs of each agent type."""
        self._averages: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
        """Agent type → turn → [weight, weighted sum of the turns left]. Turn 0 stands for all turns."""

    def steps_left(self, agent_type: str, turn: int) -> float | None:
        """Expected number of turns after turn ``turn`` (the first turn is 1); ``None`` if too few programs
        have finished."""
        if self._finished[agent_type] < _ENOUGH_PROGRAMS:
            return None
        for key in (min(max(turn, 1), _MAX_TURN), 0):
            weight, left = self._averages[agent_type].get(key, (0.0, 0.0))
            if weight >= _CONFIDENT_WEIGHT:
                return left / weight
        return None

    def observe_end(self, agent_type: str, turns: int) -> None:
        """Record that a program ended after ``turns`` turns."""
        self._finished[agent_type] += 1
        averages = self._averages[agent_type]
        for number in range(1, min(turns, _MAX_TURNS) + 1):
            for key in (min(number, _MAX_TURN), 0):
                average = averages.setdefault(key, [0.0, 0.0])
                average[0] += 1.0
                average[1] += turns - number
        for average in averages.values():
            average[:] = average[0] * _DECAY, average[1] * _DECAY


BATCH_LINGER_S = 0.005
"""Seconds that the SDK's event sender waits for further events (default of ``linger_s`` in
``sojourn.config``)."""
EVENT_SEND_DELAY_S = POLL_EVERY_S / 2 + BATCH_LINGER_S
"""Mean delay in seconds before an event is sent: half of the event sender's poll interval, plus
``BATCH_LINGER_S``. A request that the program sends sooner carries the event."""


class ClientHints:
    """Builds the hints and events of one simulated program, and queues the events that are not sent yet."""

    def __init__(
        self,
        program_id: str,
        parent_id: str | None = None,
        *,
        agent_type: str | None = None,
        history: ClientHistory | None = None,
    ) -> None:
        self._agent_type = agent_type
        self._history = history
        self._unsent: list[tuple[float, dict[str, Any]]] = []
        self._program_id = program_id
        self._parent_id = parent_id
        self._sequence = 0
        self._step = 0

    def context(self) -> dict[str, Any]:
        """Return the hints in the next request's ``agentic_context``. Call this once per request, because
        each call increments ``step_id``."""
        self._step += 1
        context: dict[str, Any] = {"step_id": str(self._step)}
        if self._parent_id is not None:
            context["parent_program_id"] = self._parent_id
        if self._agent_type is not None:
            fields: dict[str, Any] = {"agent_type": self._agent_type, "node": AGENT_NODE}
            left = None if self._history is None else self._history.steps_left(self._agent_type, self._step)
            if left is not None:
                fields["expected_steps_left"] = round(left, 3)
            context["sojourn"] = fields
        return context

    def queue_events(self, events: Iterable[dict[str, Any]], now: float) -> bool:
        """Queue events to be sent. Returns whether the queue was empty before."""
        was_empty = not self._unsent
        self._unsent += [(now, event) for event in events]
        return was_empty

    def pop_unsent(self, now: float) -> list[dict[str, Any]]:
        """Remove and return all unsent events, oldest first. Each gets ``age_s``, the seconds since it was
        queued."""
        taken, self._unsent = self._unsent, []
        return [{**event, "age_s": round(now - at_s, 6)} for at_s, event in taken]

    def start_events(self) -> list[dict[str, Any]]:
        """The events at the start of the program."""
        parent = {} if self._parent_id is None else {"parent_program_id": self._parent_id}
        return [self._event("program_start", **parent)]

    def end_events(self) -> list[dict[str, Any]]:
        """The events at the end of the program; also adds the program to the client history."""
        if self._history is not None and self._agent_type is not None:
            self._history.observe_end(self._agent_type, self._step)
        return [self._event("program_end", status="ok")]

    def tool_start(self, call_id: str, run: TraceToolRun) -> dict[str, Any]:
        """The event for the start of a tool call."""
        return self._event("tool_start", call_id=call_id, tool=run.name, tool_class=run.cmd)

    def tool_stop(self, call_id: str, duration_s: float) -> dict[str, Any]:
        """The event for the end of a tool call."""
        return self._event("tool_stop", call_id=call_id, duration_s=duration_s, status="ok")

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "program_id": self._program_id, "seq": self._sequence, **fields}
