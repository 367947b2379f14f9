"""Simulated clients: they run programs and tools, send client events, and query the router.

Only clients know the future of a program. A server receives only what a real client would send, and when a
real client would send it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sojourn_server.programs.tool_call_parsers import ParsedToolCall
from sojourn_server.traces.trace_schema import TraceToolRun

from .client_hints import EVENT_SEND_DELAY_S, ClientHints, ClientHistory, HintSetting, StatedHints
from .event_queue import EventQueue
from .request_router import RequestRouter, RequestRouterView, RoutableRequest, RoutedProgramView
from .run_log import ProgramLog, RunLog, TurnLog
from .simulated_replica import SimulatedReplica
from .token_accounting import InFlightTurn
from .workloads.arrival_processes import ArrivalProcess
from .workloads.program_plans import ProgramPlan

GATEWAY_EMITTER = "gateway"
"""Emitter name of events that the gateway sends."""

ACCEPTED_OUTCOMES = ("applied", "deferred")
"""Outcomes of a client event that do not count as a defect. ``deferred``: a ``tool_start`` arrived while a
request of its program was in the engine, as may happen on a network."""


class SimulatedOutputs:
    """Tool calls of simulated outputs, without durations. Replaces the ``ToolCallReader`` of sojourn's
    adapter. That class reads tool calls from an output's text, but simulated tokens have no text."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[ParsedToolCall, ...]] = {}
        """``id()`` of a request's list of output tokens → tool calls of the output. The list lives as long as
        the request."""

    def set_calls(self, token_ids: Sequence[int], runs: Sequence[TraceToolRun]) -> None:
        """Set the tool calls of an output."""
        self._calls[id(token_ids)] = tuple(ParsedToolCall(run.name, run.cmd) for run in runs)

    def forget(self, token_ids: Sequence[int]) -> None:
        """Remove the tool calls of an output whose request has left the engine."""
        self._calls.pop(id(token_ids), None)

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        """The tool calls of an output; empty if it has none."""
        return self._calls.get(id(token_ids), ())


@dataclass(slots=True)
class ActiveProgram:
    """A program that has arrived and is not over."""

    plan: ProgramPlan
    log: ProgramLog
    root: ActiveProgram | None
    """Top-level program of a sub-agent; ``None`` for a top-level program (a root)."""
    hints: ClientHints | None
    turn: int = 0
    """Index of the current turn; during a gap, of the next one."""
    family: int = 1
    """For a root program: number of unfinished programs in its tree of sub-agents, itself included."""
    children: list[ProgramPlan] = field(default_factory=list)
    """Sub-agents that start after one of the program's turns and have not been scheduled yet."""
    awaited: set[str] = field(default_factory=set)
    """Unfinished sub-agents for which the next turn waits."""
    hashes: list[Any] = field(default_factory=list)
    """Block hashes of the program's last turn."""
    state: str = "waiting"
    """``reasoning``, ``waiting``, ``acting`` or ``over`` (see ``RoutedProgramView.state``)."""
    since_s: float = 0.0
    """Time at which ``state`` began."""
    context_tokens: int = 0


class RequestInTransit(NamedTuple):
    """A request between client and engine."""

    active: ActiveProgram
    log: TurnLog
    prompt: list[int]
    known: list[Any]
    """Hashes of the prompt's leading blocks, known from the program's previous turn."""
    events: list[dict[str, Any]]
    """Client events that the request carries."""
    context: dict[str, Any] | None
    """Additional fields of the request's ``agentic_context``; ``None`` without hints."""


class SimulatedClients:
    """All clients of a run, behind a router in front of one or several engines."""

    def __init__(
        self,
        sim_replicas: Sequence[SimulatedReplica],
        event_queue: EventQueue,
        loop: ArrivalProcess,
        request_router: RequestRouter,
        log: RunLog,
        *,
        standalone: bool,
        expected_s: Callable[[ProgramPlan], float],
        call_s: float,
        with_hints: bool,
        hint_setting: HintSetting | None = None,
    ) -> None:
        """``standalone``: whether there is a single engine outside a cluster; logs then do not name the
        engine. ``expected_s``: function that returns the seconds a program takes alone on an empty engine.
        ``call_s``: virtual seconds that requests and events take to reach an engine. ``with_hints``: whether
        clients send hints and events. ``hint_setting``: what they state; ``None``: no future."""
        self._event_queue = event_queue
        self._loop = loop
        self._request_router: Any = request_router
        self._log = log
        self._standalone = standalone
        self._expected_s = expected_s
        self._call_s = call_s
        self._with_hints = with_hints
        self._hint_setting = hint_setting
        self._history = ClientHistory()
        self._sim_replicas = {sim_replica.replica: sim_replica for sim_replica in sim_replicas}
        self._names = list(self._sim_replicas)
        self._first_engine = sim_replicas[0].engine
        self.replicas_with_messages: set[str] = set()
        """Names of engines whose inbox has an undelivered message."""
        self.outputs = SimulatedOutputs()
        self.active: dict[str, ActiveProgram] = {}
        """Programs that have arrived and are not over."""
        self._waiting_at_router: dict[str, RoutableRequest] = {}
        self._submitted: dict[str, RequestInTransit] = {}
        self._attempts: dict[str, int] = {}
        """How often each unanswered request has been withdrawn from an engine."""
        self._homes: dict[str, str] = {}
        """Name of the engine that received each program's last request."""
        self._moved: set[str] = set()
        """Programs that changed engines. Such a program may have sent a ``tool_start`` to its former engine.
        Then the new engine answers ``missing`` to the ``tool_stop``, which does not count as a defect."""
        self._unsent_events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """Events of programs that have no engine yet. A program's first request carries its events."""
        self._gateway_event_seq = 0
        self._arrivals: Iterable[tuple[float, ProgramPlan]] = ()

    def begin(self) -> None:
        """Schedule the first arrival and the router's ticks."""
        self._arrivals = iter(self._loop.initial())
        self._schedule_next_arrival()
        if self._request_router.tick_s != float("inf"):
            self._tick()

    def observe_program(self, plan: ProgramPlan) -> str:
        """Add a program that ended before the run to the statistics of its agent type. Returns the agent
        type."""
        kind = agent_type_of(plan)
        self._history.observe_end(kind, len(plan.plans))
        return kind

    # -- programs -------------------------------------------------------------------

    def _schedule_next_arrival(self) -> None:
        """Schedule the next arrival. Each arrival schedules the one after it, because arrivals may be
        endless."""
        arrival = next(iter(self._arrivals), None)
        if arrival is not None:
            at_s, plan = arrival

            def arrive() -> None:
                self._begin(plan, None)
                self._schedule_next_arrival()

            self._event_queue.schedule_at(at_s, arrive)

    def _begin(self, plan: ProgramPlan, parent: ActiveProgram | None) -> None:
        now = self._event_queue.now_s
        log = ProgramLog(
            program_id=plan.instance_id,
            trace_id=plan.trace_id,
            parent=parent.log.program_id if parent is not None else None,
            arrived_s=now,
            turns_total=len(plan.plans),
            cut=plan.cut,
            tenant=plan.tenant,
        )
        self._log.programs.append(log)
        hints: ClientHints | None = None
        if self._with_hints:
            kind = agent_type_of(plan, is_child=parent is not None)
            if (stated := self._hint_setting) is None:
                hints = ClientHints(plan.instance_id, log.parent, agent_type=kind, history=self._history)
            else:
                hints = StatedHints(plan, log.parent, kind, stated, self._event_queue)
        root = None if parent is None else parent.root or parent
        active = ActiveProgram(plan, log, root, hints, since_s=now)
        if root is not None:
            root.family += 1
        self.active[plan.instance_id] = active
        log.expected_s = self._expected_s(plan)
        if hints is not None:
            self._queue_events(hints, *hints.start_events())
        for child in plan.children:
            (root or active).family += 1
            if child.parent_turn is None:
                starts_s = now + (child.start_offset_s or 0.0)
                self._event_queue.schedule_at(starts_s, lambda child=child: self._begin_child(child, active))
            else:
                active.children.append(child)
        self._submit(active)

    def _submit(self, active: ActiveProgram) -> None:
        now = self._event_queue.now_s
        plan, turn = active.plan, active.turn
        lengths = plan.plans[turn]
        prompt = plan.prompt(turn)
        log = TurnLog(
            program_id=plan.instance_id,
            turn=turn,
            submitted_s=now,
            prompt_tokens=len(prompt),
            output_tokens=lengths.output_tokens,
            tool=plan.tool(turn),
        )
        active.log.turns.append(log)
        active.state, active.since_s = "waiting", now
        request_id = log.request_id
        continues = lengths.base is not None and lengths.base == turn - 1
        reused_blocks = lengths.reused_tokens // self._first_engine.options.block_size
        known = active.hashes[:reused_blocks] if continues else []
        riding = active.hints.pop_unsent(now) if active.hints is not None else []
        context = active.hints.context() if active.hints is not None else None
        self._submitted[request_id] = RequestInTransit(active, log, prompt, known, riding, context)
        self._route_request(RoutableRequest(request_id, plan.instance_id, len(prompt), now, turn))

    def _route_request(self, request: RoutableRequest) -> None:
        if self._request_router.is_open:
            self._send_to_engine(request.request_id)
        else:
            self._waiting_at_router[request.request_id] = request
            self._query_router()

    def _send_to_engine(self, request_id: str) -> None:
        """Send a request to its engine, where it arrives after ``call_s`` seconds."""
        sent = self._submitted[request_id]
        program_id = sent.log.program_id
        replica = self._target_replica(request_id)
        if self._homes.get(program_id, replica) != replica:
            self._moved.add(program_id)
        self._homes[program_id] = replica
        if not self._standalone:
            sent.log.replica = replica
        attempt = self._attempts.setdefault(request_id, 0)
        sent.active.state, sent.active.since_s = "reasoning", self._event_queue.now_s
        self._after_call_delay(lambda: self._arrive(request_id, attempt, replica))

    def _target_replica(self, request_id: str) -> str:
        """Name of the engine for a request that the router has just admitted."""
        if self._standalone:
            return self._names[0]
        number: int = self._request_router.replica_of(self._submitted[request_id].log.program_id)
        return self._names[number]

    def _after_call_delay(self, what: Callable[[], None]) -> None:
        """Call ``what`` after ``call_s`` seconds, the delay of the API server. Calls keep their order."""
        if self._call_s:
            self._event_queue.schedule_at(self._event_queue.now_s + self._call_s, what)
        else:
            what()

    def _arrive(self, request_id: str, attempt: int, replica: str) -> None:
        if self._is_attempt_stale(request_id, attempt):
            return
        sent = self._submitted[request_id]
        now = sent.log.entered_s = self._event_queue.now_s

        def add() -> None:
            if not self._is_attempt_stale(request_id, attempt):
                self._add_to_engine(self._sim_replicas[replica], sent, attempt, now)

        self._post(replica, add)

    def _add_to_engine(
        self, sim_replica: SimulatedReplica, sent: RequestInTransit, attempt: int, now: float
    ) -> None:
        active, log, prompt, known, riding, context = sent
        self._apply_events(sim_replica, self._unsent_events.pop(log.program_id, []))
        self._apply_events(sim_replica, riding)
        riding.clear()  # later attempts carry no events, because this one has delivered them
        request_id = engine_request_id(log.request_id, attempt)
        turn = sim_replica.account.live[request_id] = InFlightTurn(log, active.plan.planned_output(log.turn))
        turn.request = sim_replica.engine.add(
            request_id,
            prompt,
            # A client does not know the length of the answer, so the request allows the longest answer.
            max_tokens=sim_replica.engine.options.max_model_len - len(prompt),
            program_id=active.plan.instance_id if active.hints is not None else None,
            context=context,
            arrival_s=now,
            known_hashes=known,
        )
        self.outputs.set_calls(turn.request.output_token_ids, active.plan.tool_runs(log.turn))

    def _recall(self, request_id: str) -> None:
        """Withdraw a request that has no token yet from its engine. The request waits for an engine again."""
        sent = self._submitted[request_id]
        attempt = self._attempts[request_id]
        self._attempts[request_id] = attempt + 1
        replica = sent.log.replica
        assert replica is not None
        turn = self._sim_replicas[replica].cancel(engine_request_id(request_id, attempt))
        if turn is not None:
            self.outputs.forget(turn.request.output_token_ids)
            self.replicas_with_messages.add(replica)
        sent.log.entered_s = sent.log.admitted_s = None
        sent.log.recalls += 1
        sent.active.state, sent.active.since_s = "waiting", self._event_queue.now_s

    def _is_attempt_stale(self, request_id: str, attempt: int) -> bool:
        return self._attempts.get(request_id) != attempt

    def first_token(self, turn: InFlightTurn) -> None:
        """Handle the first token of an answer. Without a gateway, this has no effect."""

    def answered(self, turn: InFlightTurn) -> None:
        """Handle a finished turn: start its tools, or end its program."""
        now = self._event_queue.now_s
        self._submitted.pop(turn.log.request_id)
        self._attempts.pop(turn.log.request_id, None)
        active = self.active[turn.log.program_id]
        active.hashes = turn.hashes
        active.context_tokens = turn.log.prompt_tokens + turn.log.output_tokens
        number = active.turn
        started = [child for child in active.children if child.parent_turn == number]
        active.awaited = {child.instance_id for child in started if child.blocks_parent}
        for child in started:
            active.children.remove(child)
            self._event_queue.schedule_at(
                now + child.delay_s, lambda child=child: self._begin_child(child, active)
            )
        active.turn += 1
        if active.turn >= len(active.plan.plans):
            active.log.finished_s = now
            self._end_program(active)
            return
        gap_s = active.plan.gap_s(number)
        turn.log.gap_s = gap_s
        active.state, active.since_s = "acting", now
        if active.hints is not None:
            self._send_tool_events(active.hints, active.plan.tool_runs(number), number, gap_s)
        if not active.awaited:  # else the end of the last sub-agent sends the next request
            self._event_queue.schedule_at(now + gap_s, lambda: self._submit(active))
        self._query_router()

    def _begin_child(self, child: ProgramPlan, parent: ActiveProgram) -> None:
        (parent.root or parent).family -= 1  # the child has counted since its parent began
        self._begin(child, parent)

    def _send_tool_events(
        self, hints: ClientHints, runs: Sequence[TraceToolRun], number: int, gap_s: float
    ) -> None:
        """Send a ``tool_start`` event for each of ``runs``, the tools after turn ``number``, and schedule
        their ``tool_stop`` events. A tool without a known duration lasts for the whole gap."""
        self._queue_events(hints, *(hints.tool_start(f"{number}.{i}", run) for i, run in enumerate(runs)))
        for i, run in enumerate(runs):
            took_s = gap_s if run.s is None else min(run.s, gap_s)
            call_id = f"{number}.{i}"
            self._event_queue.schedule_at(
                self._event_queue.now_s + took_s,
                lambda call_id=call_id, took_s=took_s: self._queue_events(
                    hints, hints.tool_stop(call_id, took_s)
                ),
            )

    def _end_program(self, active: ActiveProgram) -> None:
        """End a program that has finished, or whose request was rejected."""
        now = self._event_queue.now_s
        active.state, active.since_s = "over", now
        del self.active[active.plan.instance_id]
        ending = active.hints.end_events() if active.hints is not None else []
        if active.hints is not None:
            self._queue_events(active.hints, *ending)
        parent = self.active.get(active.log.parent or "")
        if parent is not None and active.plan.instance_id in parent.awaited:
            parent.awaited.remove(active.plan.instance_id)
            if not parent.awaited:
                self._submit(parent)
        root = active.root or active
        root.family -= 1
        if root.family == 0:
            following = self._loop.finished(root.plan, now)
            if following is not None:
                at_s, plan = following
                self._event_queue.schedule_at(max(now, at_s), lambda: self._begin(plan, None))
        self._query_router(over=active)
        if not ending:  # an event about the end still needs the engine's name
            self._forget(active.plan.instance_id)

    def _forget(self, program_id: str) -> None:
        self._homes.pop(program_id, None)
        self._unsent_events.pop(program_id, None)

    def _queue_events(self, hints: ClientHints, *events: dict[str, Any]) -> None:
        """Queue client events. They are sent after ``EVENT_SEND_DELAY_S``, or with an earlier request."""
        now = self._event_queue.now_s
        if events and hints.queue_events(events, now):
            self._event_queue.schedule_at(now + EVENT_SEND_DELAY_S, lambda: self._send(hints))

    def _send(self, hints: ClientHints) -> None:
        events = hints.pop_unsent(self._event_queue.now_s)
        if events:  # else a request has carried them
            self._after_call_delay(lambda: self._deliver_events(events))

    def _deliver_events(self, events: list[dict[str, Any]]) -> None:
        """Deliver events of one program to its engine, or keep them for its first request."""
        program_id = events[0]["program_id"]
        replica = self._names[0] if self._standalone else self._homes.get(program_id)
        if replica is None:
            self._unsent_events[program_id] += events
            return
        self._post(replica, lambda: self._apply_events(self._sim_replicas[replica], events))
        if any(event["type"] == "program_end" for event in events):
            self._forget(program_id)

    def _apply_events(self, sim_replica: SimulatedReplica, events: list[dict[str, Any]]) -> None:
        for outcome in sim_replica.engine.tell(*events, emitter="lab") if events else ():
            # The tool_start of a program that moved went to its former engine.
            moved = outcome["outcome"] == "missing" and outcome.get("program_id") in self._moved
            if outcome["outcome"] not in ACCEPTED_OUTCOMES and not moved:
                self._log.refused_hints += 1

    def _release(self, program_id: str, replica: str) -> None:
        """Notify a program's former engine, ``replica``, that the program will not reuse its KV there."""
        if not self._with_hints:
            return
        self._gateway_event_seq += 1
        # Status cancelled: histories must not learn from such a program.
        event = {
            "type": "program_end",
            "program_id": program_id,
            "seq": self._gateway_event_seq,
            "status": "cancelled",
        }

        def release() -> None:
            self._sim_replicas[replica].engine.tell(event, emitter=GATEWAY_EMITTER)

        self._after_call_delay(lambda: self._post(replica, release))

    def _post(self, replica: str, what: Callable[[], None]) -> None:
        self._sim_replicas[replica].submit(what)
        self.replicas_with_messages.add(replica)

    # -- the router in front ----------------------------------------------------------

    def _tick(self) -> None:
        self._query_router()
        self._event_queue.schedule_at(
            self._event_queue.now_s + self._request_router.tick_s, self._tick, background=True
        )

    def _query_router(self, over: ActiveProgram | None = None) -> None:
        if self._request_router.is_open:
            return
        for request_id in self._request_router.select_requests(
            self._router_view(over), self._event_queue.now_s
        ):
            if self._waiting_at_router.pop(request_id, None) is not None:
                self._send_to_engine(request_id)

    def _router_view(self, over: ActiveProgram | None) -> RequestRouterView:
        engine = self._first_engine
        active = list(self.active.values()) + ([over] if over is not None else [])
        return RequestRouterView(
            waiting=tuple(self._waiting_at_router.values()),
            programs=tuple(
                RoutedProgramView(
                    p.plan.instance_id, p.state, p.context_tokens, p.since_s, p.turn, p.log.arrived_s
                )
                for p in active
            ),
            capacity_tokens=(engine.pool.num_gpu_blocks - 1) * engine.options.block_size,
        )


def agent_type_of(plan: ProgramPlan, *, is_child: bool = False) -> str:
    """The agent type that clients send. If the trace has no agent type, clients send "sub-agent" if
    ``is_child`` is true, else "agent"."""
    return plan.agent_type or ("sub-agent" if is_child else "agent")


def engine_request_id(request_id: str, attempt: int) -> str:
    """A request's id in an engine. ``attempt``: how often the gateway has withdrawn the request so far. Each
    attempt has its own id, because a withdrawn attempt may still be in the engine."""
    return request_id if not attempt else f"{request_id}~{attempt}"
