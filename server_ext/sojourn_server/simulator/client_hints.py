"""Hints of a simulated client: the fields of ``agentic_context`` in each request, and client events.

The server receives no other data about a program. No hint reveals the program's recorded future; the expected
number of turns left is estimated from finished programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sojourn.event_sender import POLL_EVERY_S
from sojourn.learning.run_trace import MAX_PATH, MAX_TURNS, ProgramRun
from sojourn.learning.transitions import Transitions

from sojourn_server.traces.trace_schema import TraceToolRun

AGENT_NODE = "agent"
"""Node name of an agent without a workflow graph: one loop of model and tool calls."""


class ClientHistory:
    """Estimates the turns that a program has left from the turns of finished programs, with the SDK's
    estimator. All clients of a run share one history."""

    def __init__(self) -> None:
        self._transitions = Transitions()

    def steps_left(self, agent_type: str, turn: int) -> float | None:
        """Expected number of turns after turn ``turn`` (the first turn is 1); ``None`` if too few programs
        have finished."""
        return self._transitions.turns_left(agent_type, turns=turn, node=AGENT_NODE)

    def observe_end(self, agent_type: str, turns: int) -> None:
        """Record that a program ended after ``turns`` turns."""
        self._transitions.learn(
            agent_type,
            ProgramRun(
                path=((AGENT_NODE,),) * min(turns, MAX_PATH),
                turn_nodes=(AGENT_NODE,) * min(turns, MAX_TURNS),
                turns=turns,
            ),
        )


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

    def program_start(self) -> dict[str, Any]:
        """The event for the start of the program."""
        return self._event("program_start", **self._parent())

    def program_end(self) -> dict[str, Any]:
        """The event for the end of the program; also adds the program to the client history."""
        if self._history is not None and self._agent_type is not None:
            self._history.observe_end(self._agent_type, self._step)
        return self._event("program_end", status="ok")

    def tool_start(self, call_id: str, run: TraceToolRun) -> dict[str, Any]:
        """The event for the start of a tool call."""
        return self._event("tool_start", call_id=call_id, tool=run.name, tool_class=run.cmd)

    def tool_stop(self, call_id: str, duration_s: float) -> dict[str, Any]:
        """The event for the end of a tool call."""
        return self._event("tool_stop", call_id=call_id, duration_s=duration_s, status="ok")

    def _parent(self) -> dict[str, Any]:
        return {} if self._parent_id is None else {"parent_program_id": self._parent_id}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "program_id": self._program_id, "seq": self._sequence, **fields}
