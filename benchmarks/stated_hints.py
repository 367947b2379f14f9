"""Hints of simulated clients that know their programs' future: true, wrong by half, or hostile.

``run_simulation(spec, prepare=state(HintSetting(stated=("expected_steps_left",))))`` runs with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from sojourn.aeg import START, Aeg
from sojourn_server.simulator.client_hints import ClientHints
from sojourn_server.simulator.event_queue import EventQueue
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.workloads.program_plans import ProgramPlan
from sojourn_server.traces.trace_schema import TraceToolRun


def true_hints(plan: ProgramPlan, turn: int) -> dict[str, Any]:
    """What a client that knows the program's future can state with the request of ``turn``, in the names of
    the wire. What the workload states replaces what follows from the plan."""
    left = len(plan.plans) - turn - 1
    return {
        "expected_steps_left": float(left),
        "expected_resume": left > 0,
        "expected_output_length": plan.plans[turn].output_tokens,
        "kv_retention_ttl_seconds": plan.gap_s(turn) if left else 0.0,
        **plan.stated_hints(turn),
    }


HOSTILE: dict[str, Any] = {
    "expected_steps_left": 0.0,
    "expected_resume": True,
    "kv_retention_ttl_seconds": 300.0,
    "deadline_seconds": 1.0,
    "priority": 100,
    "expected_output_length": 1,
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
    """Hints of a client that knows its program's future (``true_hints``)."""

    def __init__(
        self, plan: ProgramPlan, parent_id: str | None, kind: str, setting: HintSetting, clock: EventQueue
    ) -> None:
        super().__init__(plan.instance_id, parent_id, agent_type=kind)
        self._plan, self._setting, self._clock, self._arrived_s = plan, setting, clock, clock.now_s
        self._lies = setting.lies(plan.instance_id)
        self._rng = random.Random(f"hints/{plan.instance_id}")
        self._factor = self._rng.choice((0.5, 2.0))
        graph = true_hints(plan, 0).get("graph") if "aeg" in setting.stated else None
        self._graph = Aeg(**(graph or {"nodes": ()}))

    def context(self) -> dict[str, Any]:
        context = super().context()
        for name, value in true_hints(self._plan, self._step - 1).items():
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


def state(setting: HintSetting) -> Callable[[Simulation], None]:
    """Return what prepares a simulation whose clients state hints as ``setting`` says."""

    def prepare(simulation: Simulation) -> None:
        clients = simulation.clients
        clients.make_hints = lambda plan, parent_id, kind: StatedHints(
            plan, parent_id, kind, setting, clients.event_queue
        )

    return prepare
