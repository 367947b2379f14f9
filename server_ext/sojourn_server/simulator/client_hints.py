"""Hints of a simulated client: the fields of ``agentic_context`` in each request, and client events.

The server receives no other data about a program. By default no hint reveals the program's recorded future;
the expected number of turns left is estimated from finished programs, as a client may that knows its own
runs. (sojourn's SDK sends no such estimate.) With a ``HintSetting`` clients state what they know, or lie.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from sojourn.aeg import START, Aeg
from sojourn.event_sender import POLL_EVERY_S

from sojourn_server.traces.trace_schema import TraceToolRun

from .event_queue import EventQueue
from .workloads.program_plans import ProgramPlan

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
        self._types: dict[str, tuple[list[int], dict[int, list[float]]]] = {}
        """Agent type → ([number of finished programs], turn → [weight, weighted sum of the turns left]). Turn
        0 stands for all turns."""

    def steps_left(self, agent_type: str, turn: int) -> float | None:
        """Expected number of turns after turn ``turn`` (the first turn is 1); ``None`` if too few programs
        have finished."""
        (finished,), averages = self._types.get(agent_type, ([0], {}))
        if finished < _ENOUGH_PROGRAMS:
            return None
        for key in (min(max(turn, 1), _MAX_TURN), 0):
            weight, left = averages.get(key, (0.0, 0.0))
            if weight >= _CONFIDENT_WEIGHT:
                return left / weight
        return None

    def observe_end(self, agent_type: str, turns: int) -> None:
        """Record that a program ended after ``turns`` turns."""
        finished, averages = self._types.setdefault(agent_type, ([0], {}))
        finished[0] += 1
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


HOSTILE: dict[str, Any] = {
    "expected_steps_left": 0.0,
    "expected_resume": True,
    "kv_retention_ttl_seconds": 300.0,
    "deadline_seconds": 1.0,
    "priority": 100,
    "expected_output_length": 1,
    "blocks_parent": True,
    "expected_s": 1.0,
}
"""Hint → the value that would help a program most, were it believed. A hostile graph says that every node
follows itself, so that the program always returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintSetting:
    """What clients state beyond what sojourn's SDK states by itself, and how true it is."""

    stated: tuple[str, ...] = ()
    """Keys of ``HOSTILE``, or ``aeg`` for graph and nodes. With ``expected_resume`` goes ``final``, with
    ``expected_s`` the 95th percentile. Where a workload does not know a value, clients do not state it."""
    quality: Literal["true", "half", "hostile"] = "true"
    """``half``: a program's numbers are all halved or all doubled, and half of its other values are wrong."""
    liars: float = 1.0
    """Share of the programs whose hints are not true, if ``quality`` is not ``true``."""
    ends: bool = True
    """Whether clients report the ends of programs."""

    def lies(self, program_id: str) -> bool:
        """Whether the hints of this program are not true."""
        return self.quality != "true" and random.Random(f"liar/{program_id}").random() < self.liars


class StatedHints(ClientHints):
    """Hints of a client that knows its program's future (``ProgramPlan.true_hints``)."""

    def __init__(
        self, plan: ProgramPlan, parent_id: str | None, kind: str, setting: HintSetting, clock: EventQueue
    ) -> None:
        super().__init__(plan.instance_id, parent_id, agent_type=kind)
        self._plan, self._setting, self._clock, self._arrived_s = plan, setting, clock, clock.now_s
        self._lies = setting.lies(plan.instance_id)
        self._rng = random.Random(f"hints/{plan.instance_id}")
        self._factor = self._rng.choice((0.5, 2.0))
        graph = plan.true_hints(0).get("graph") if "aeg" in setting.stated else None
        self._graph = Aeg(**(graph or {"nodes": ()}))

    def context(self) -> dict[str, Any]:
        context = super().context()
        for name, value in self._plan.true_hints(self._step - 1).items():
            if ("aeg" if name == "node" else name) not in self._setting.stated:
                continue
            if name == "deadline_seconds":
                value = max(0.0, value - (self._clock.now_s - self._arrived_s))
            told = self._told(name, value)
            of_ours = name in ("node", "expected_steps_left")
            (context["sojourn"] if of_ours else context)[name] = told
            if name == "expected_resume":
                context["sojourn"]["final"] = not told
        return context

    def start_events(self) -> list[dict[str, Any]]:
        events = super().start_events()
        if (graph := self._graph).nodes:
            if self._lies and self._setting.quality == "hostile":
                first = [(START, node) for node in graph.successors(START)]
                graph = Aeg(graph.nodes, [*first, *((node, node, 1.0) for node in graph.nodes)])
            content = {"graph_hash": graph.hash, "graph": msgspec.to_builtins(graph.wire())}
            events.append(self._event("aeg", agent_type=self._agent_type, **content))
        return events

    def end_events(self) -> list[dict[str, Any]]:
        return super().end_events() if self._setting.ends else []

    def tool_start(self, call_id: str, run: TraceToolRun) -> dict[str, Any]:
        event = super().tool_start(call_id, run)
        if "expected_s" in self._setting.stated and run.s is not None:
            event["expected_s"] = event["expected_p95_s"] = self._told("expected_s", run.s)
        return event

    def _told(self, name: str, value: Any) -> Any:
        """What the client states where ``value`` is true."""
        if not self._lies:
            return value
        if self._setting.quality == "hostile":
            return HOSTILE.get(name, value)
        if isinstance(value, (bool, str)):
            wrong = not value if isinstance(value, bool) else self._rng.choice([*self._graph.nodes])
            return self._rng.choice((value, wrong))
        return type(value)(value * self._factor)
