"""Simulated clients: they run programs and tools, send client events, and query the router.

Only clients know the future of a program. A server receives only what a real client would send, and when a
real client would send it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sojourn_server.programs.tool_call_parsers import ParsedToolCall
from sojourn_server.routing import routing_events as ev

from .client_hints import EVENT_SEND_DELAY_S, ClientHints, ClientHistory
from .event_queue import EventQueue
from .run_log import ProgramLog, RunLog, TurnLog
from .simulated_gateway import RequestRouter
from .simulated_replica import SimulatedReplica
from .token_accounting import InFlightTurn
from .workloads.arrival_processes import ArrivalProcess
from .workloads.program_plans import ProgramPlan

GATEWAY_EMITTER = "gateway"
"""Emitter name of events that the gateway sends."""

ACCEPTED_OUTCOMES = ("applied", "deferred")
"""Outcomes of a client event that do not count as a defect. ``deferred``: a ``tool_start`` arrived while a
request of its program was in the engine, as may happen on a network."""

DEFAULT_TENANT = "lab"
"""Tenant of programs that have none in the workload."""
RESIDENCY_POLL_S = 5.0
"""Virtual seconds between two polls. A poll asks each engine which programs' KV it has."""
PREFIX_CHUNK_TOKENS = 256
"""Prompt tokens per hash that the routing core compares to find common prefixes."""


class SimulatedOutputs(dict[int, tuple[ParsedToolCall, ...]]):
    """``id()`` of a request's list of output tokens → tool calls of the output, without durations. The list
    lives as long as the request.

    Replaces the ``ToolCallReader`` of sojourn's adapter. That class reads tool calls from an output's text,
    but simulated tokens have no text."""

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        """The tool calls of an output; empty if it has none."""
        return self.get(id(token_ids), ())


@dataclass(slots=True)
class ActiveProgram:
    """A program that has arrived and is not over."""

    plan: ProgramPlan
    log: ProgramLog
    root: ActiveProgram | None
    """Top-level program of a sub-agent; ``None`` for a top-level program (a root)."""
    hints: ClientHints
    turn: int = 0
    """Index of the current turn; during a gap, of the next one."""
    family: int = 1
    """For a root program: number of unfinished programs in its tree of sub-agents, itself included."""
    children: list[ProgramPlan] = field(default_factory=list)
    """Sub-agents that start after one of the program's turns and have not been scheduled yet."""
    awaited: set[str] = field(default_factory=set)
    """Unfinished sub-agents for which the next turn waits."""
    home: str | None = None
    """Name of the engine that received the program's last request."""
    moved: bool = False
    """Whether the program changed engines. It may then have sent a ``tool_start`` to its former engine, so
    that the new engine answers ``missing`` to the ``tool_stop``, which does not count as a defect."""
    unsent_events: list[dict[str, Any]] = field(default_factory=list)
    """Client events that the current request carries, or the first one if there is none yet."""
    prompt: list[int] = field(default_factory=list)
    """Prompt of the current request."""
    context: dict[str, Any] | None = None
    """Additional fields of the request's ``agentic_context``; ``None`` without hints."""

    @property
    def tenant(self) -> str:
        return self.plan.tenant or DEFAULT_TENANT

    @property
    def agent_type(self) -> str:
        return agent_type_of(self.plan, is_child=self.root is not None)


class SimulatedClients:
    """All clients of a run, behind a router in front of one or several engines.

    They state no deadlines. The gateway's routing core derives them from the mean duration of earlier
    programs of the same agent type.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        clock: EventQueue,
        loop: ArrivalProcess,
        front: RequestRouter,
        log: RunLog,
        *,
        expected_s: Callable[[ProgramPlan], float],
        call_s: float,
        standalone: bool,
        with_hints: bool,
    ) -> None:
        """``expected_s``: seconds that a program takes alone on an empty engine. ``call_s``: virtual seconds
        that requests and events take to reach an engine. ``with_hints``: whether clients send any."""
        self.event_queue, self._loop, self._front, self._log = clock, loop, front, log
        self._expected_s, self._call_s = expected_s, call_s
        self._standalone, self._with_hints = standalone, with_hints
        self._replicas = {sim_replica.replica: sim_replica for sim_replica in replicas}
        self.history = ClientHistory()
        self.make_hints: Callable[[ProgramPlan, str | None, str], ClientHints] = (
            lambda plan, parent_id, kind: ClientHints(
                plan.instance_id, parent_id, agent_type=kind, history=self.history
            )
        )
        """Makes the hints of a program (its parent's id, its agent type). By default without its future."""
        self.outputs = SimulatedOutputs()
        self.active: dict[str, ActiveProgram] = {}
        """Programs that have arrived and are not over."""
        self._gateway_event_seq = 0

    def begin(self) -> None:
        """Register the engines, and schedule the first arrival, the router's ticks and its reports."""
        for sim_replica in self._replicas.values():
            options = sim_replica.engine.options
            # As the real gateway: of vLLM's own connector an engine reports no blocks of host memory.
            host_blocks = options.host_blocks if options.own_tiers else 0
            self._take(
                ev.ReplicaRegistered(
                    sim_replica.replica,
                    "1",
                    (options.blocks - 1) * options.block_size,
                    host_tokens=host_blocks * options.block_size,
                    max_running=options.max_num_seqs,
                    max_context_tokens=options.max_model_len,
                )
            )
        self._schedule_next_arrival(iter(self._loop.initial))
        if self._front.tick_s != float("inf"):
            self._tick()
        if self._front.reads_residency and self._replicas["r0"].engine.adapter is not None:
            self._repeat(self._poll_residency, RESIDENCY_POLL_S)

    # -- programs -------------------------------------------------------------------

    def _schedule_next_arrival(self, arrivals: Iterator[tuple[float, ProgramPlan]]) -> None:
        """Schedule the next arrival. Each arrival schedules the one after it, because arrivals may be
        endless."""
        if (following := next(arrivals, None)) is not None:
            self.event_queue.schedule_at(following[0], self._arrive, following[1], arrivals)

    def _arrive(self, plan: ProgramPlan, arrivals: Iterator[tuple[float, ProgramPlan]]) -> None:
        self._begin(plan, None)
        self._schedule_next_arrival(arrivals)

    def _begin(self, plan: ProgramPlan, parent: ActiveProgram | None) -> None:
        now = self.event_queue.now_s
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
        root = None if parent is None else parent.root or parent
        hints = self.make_hints(plan, log.parent, agent_type_of(plan, is_child=root is not None))
        active = self.active[plan.instance_id] = ActiveProgram(plan, log, root, hints)
        if root is not None:
            root.family += 1
        log.expected_s = self._expected_s(plan)
        self._queue_events(active, *hints.start_events())
        for child in plan.children:
            (root or active).family += 1
            if child.parent_turn is None:
                starts_s = now + (child.start_offset_s or 0.0)
                self.event_queue.schedule_at(starts_s, self._begin_child, child, active)
            else:
                active.children.append(child)
        self._submit(active)

    def _submit(self, active: ActiveProgram) -> None:
        now = self.event_queue.now_s
        plan, turn = active.plan, active.turn
        prompt = plan.prompt(turn)
        log = TurnLog(
            program_id=plan.instance_id,
            turn=turn,
            submitted_s=now,
            prompt_tokens=len(prompt),
            output_tokens=plan.plans[turn].output_tokens,
            tool=plan.tool(turn),
        )
        active.log.turns.append(log)
        active.prompt = prompt
        if self._with_hints:
            active.unsent_events += active.hints.pop_unsent(now)
            active.context = active.hints.context()
        deadline_s = (active.context or {}).get("deadline_seconds")
        self._take(
            ev.RequestReceived(
                log.request_id,
                active.tenant,
                len(prompt),
                program_id=plan.instance_id,
                parent_id=active.log.parent,
                agent_type=active.agent_type,
                deadline_s=None if deadline_s is None else now + deadline_s,
                prefix=prefix_hashes(prompt) if self._front.reads_prefixes else (),
                exact=True,
            )
        )

    def _send_to_engine(self, request_id: str, replica: str) -> None:
        """Send a request to an engine, where it arrives after ``call_s`` seconds."""
        active = self._sender(request_id)
        active.moved |= active.home not in (None, replica)
        active.home = replica
        log = active.log.turns[-1]
        attempt = log.recalls
        if not self._standalone:
            log.replica = replica

        def arrive() -> None:
            if log.recalls == attempt:
                log.entered_s = self.event_queue.now_s
                self._replicas[replica].submit(add)

        def add() -> None:
            if log.recalls == attempt:
                self._add_to_engine(self._replicas[replica], active, log)

        self._after_call_delay(arrive)

    def _sender(self, request_id: str) -> ActiveProgram:
        """The program of an unanswered request."""
        return self.active[request_id.rpartition("/")[0]]

    def _after_call_delay(self, what: Callable[[], None]) -> None:
        """Call ``what`` after the delay of the API server. Calls keep their order."""
        if self._call_s:
            self.event_queue.schedule_at(self.event_queue.now_s + self._call_s, what)
        else:
            what()

    def _add_to_engine(self, sim_replica: SimulatedReplica, active: ActiveProgram, log: TurnLog) -> None:
        events, active.unsent_events = active.unsent_events, []  # later attempts carry no events
        self._apply_events(sim_replica, active, events)
        turn = InFlightTurn(log, active.plan.planned_output(log.turn))
        sim_replica.account.live[engine_request_id(log)] = turn
        turn.request = sim_replica.engine.add(
            engine_request_id(log),
            active.prompt,
            # A client does not know the length of the answer, so the request allows the longest answer.
            max_tokens=sim_replica.engine.options.max_model_len - len(active.prompt),
            program_id=active.plan.instance_id if self._with_hints else None,
            context=active.context,
            arrival_s=log.entered_s or 0.0,
        )
        calls = (ParsedToolCall(run.name, run.cmd) for run in active.plan.tool_runs(log.turn))
        self.outputs[id(turn.request.output_token_ids)] = tuple(calls)

    def _recall(self, request_id: str) -> None:
        """Withdraw a request that has no token yet from its engine. The request waits for an engine again."""
        active = self._sender(request_id)
        assert active.home is not None
        log = active.log.turns[-1]
        turn = self._replicas[active.home].cancel(engine_request_id(log))
        if turn is not None:
            self.outputs.pop(id(turn.request.output_token_ids), None)
        log.entered_s = log.admitted_s = None
        log.recalls += 1

    def first_token(self, turn: InFlightTurn) -> None:
        """Handle the first token of an answer."""
        self._take(ev.FirstByteSent(turn.log.request_id, self.active[turn.log.program_id].home or ""))

    def answered(self, turn: InFlightTurn) -> None:
        """Handle a finished turn: start its tools, or end its program."""
        now = self.event_queue.now_s
        active = self.active[turn.log.program_id]
        # The router gets the event first, so that the client's next request finds the freed capacity.
        self._take(ev.RequestFinished(turn.log.request_id, turn.log.output_tokens, active.home or ""))
        number = active.turn
        started = [child for child in active.children if child.parent_turn == number]
        active.awaited = {child.instance_id for child in started if child.blocks_parent}
        for child in started:
            active.children.remove(child)
            self.event_queue.schedule_at(now + child.delay_s, self._begin_child, child, active)
        active.turn += 1
        if active.turn >= len(active.plan.plans):
            active.log.finished_s = now
            self._end_program(active)
            return
        gap_s = active.plan.gap_s(number)
        turn.log.gap_s = gap_s
        tools = active.plan.tool_runs(number) if self._with_hints else ()
        runs = [(f"{number}.{i}", run) for i, run in enumerate(tools)]
        self._queue_events(active, *(active.hints.tool_start(call_id, run) for call_id, run in runs))
        for call_id, run in runs:
            # A tool without a known duration lasts for the whole gap.
            took_s = gap_s if run.s is None else min(run.s, gap_s)
            self.event_queue.schedule_at(now + took_s, self._stop_tool, active, call_id, took_s)
        if not active.awaited:  # else the end of the last sub-agent sends the next request
            self.event_queue.schedule_at(now + gap_s, self._submit, active)

    def _begin_child(self, child: ProgramPlan, parent: ActiveProgram) -> None:
        (parent.root or parent).family -= 1  # the child has counted since its parent began
        self._begin(child, parent)

    def _stop_tool(self, active: ActiveProgram, call_id: str, took_s: float) -> None:
        self._queue_events(active, active.hints.tool_stop(call_id, took_s))

    def _end_program(self, active: ActiveProgram) -> None:
        """End a program that has finished, or whose request was rejected."""
        now = self.event_queue.now_s
        del self.active[active.plan.instance_id]
        self._queue_events(active, *active.hints.end_events())
        parent = self.active.get(active.log.parent or "")
        if parent is not None and active.plan.instance_id in parent.awaited:
            parent.awaited.remove(active.plan.instance_id)
            if not parent.awaited:
                self._submit(parent)
        root = active.root or active
        root.family -= 1 + len(active.children)  # those of a refused program never start
        if root.family == 0 and (plan := next(self._loop.following, None)) is not None:
            self.event_queue.schedule_at(now, self._begin, plan, None)
        # All simulated clients report the end of a program, with hints or without.
        self._take(ev.ProgramEnded(active.plan.instance_id, active.tenant))

    def _queue_events(self, active: ActiveProgram, *events: dict[str, Any]) -> None:
        """Queue client events, if clients send hints. They are sent after ``EVENT_SEND_DELAY_S``, or with an
        earlier request."""
        now = self.event_queue.now_s
        if self._with_hints and events and active.hints.queue_events(events, now):
            self.event_queue.schedule_at(now + EVENT_SEND_DELAY_S, self._send, active)

    def _send(self, active: ActiveProgram) -> None:
        events = active.hints.pop_unsent(self.event_queue.now_s)
        if events:  # else a request has carried them
            self._after_call_delay(lambda: self._deliver_events(active, events))

    def _deliver_events(self, active: ActiveProgram, events: list[dict[str, Any]]) -> None:
        """Deliver events of one program to its engine, or keep them for its first request."""
        if active.home is None:
            active.unsent_events += events
            return
        sim_replica = self._replicas[active.home]
        sim_replica.submit(lambda: self._apply_events(sim_replica, active, events))

    def _apply_events(
        self, sim_replica: SimulatedReplica, active: ActiveProgram, events: list[dict[str, Any]]
    ) -> None:
        for outcome in sim_replica.engine.tell(*events, emitter="lab") if events else ():
            moved = outcome["outcome"] == "missing" and active.moved
            self._log.refused_hints += outcome["outcome"] not in ACCEPTED_OUTCOMES and not moved

    def _release(self, program_id: str, replica: str) -> None:
        """Notify a program's former engine, ``replica``, that the program will not reuse its KV there."""
        if not self._with_hints:
            return
        self._gateway_event_seq += 1
        # Status cancelled: histories must not learn from such a program.
        event: dict[str, Any] = {"type": "program_end", "program_id": program_id, "status": "cancelled"}
        event["seq"] = self._gateway_event_seq
        sim_replica = self._replicas[replica]
        tell = partial(sim_replica.engine.tell, event, emitter=GATEWAY_EMITTER)
        self._after_call_delay(lambda: sim_replica.submit(tell))

    # -- the router in front ----------------------------------------------------------

    def _tick(self) -> None:
        self._take(ev.Tick())
        self._repeat(self._tick, self._front.tick_s)

    def _poll_residency(self) -> None:
        """Report to the router the programs that have their KV on an engine."""
        for name, sim_replica in self._replicas.items():
            load = sim_replica.engine.ask("load")
            programs = tuple(
                ev.ResidentKv(
                    self.active[one["program_id"]].tenant,
                    one["program_id"],
                    one["tokens"],
                    one["context_tokens"],
                    one.get("idle_s", 0.0),
                )
                for one in load["programs"]
                if one["program_id"] in self.active
            )
            waiting = tuple(
                (self.active[one].tenant if one in self.active else DEFAULT_TENANT, one)
                for one in load["waiting"]
            )
            self._take(ev.KvReported(replica_id=name, instance="1", programs=programs, waiting=waiting))
        self._repeat(self._poll_residency, RESIDENCY_POLL_S)

    def _repeat(self, call: Callable[[], None], after_s: float) -> None:
        self.event_queue.schedule_at(self.event_queue.now_s + after_s, call, background=True)

    def _take(self, event: ev.AnyRoutingEvent) -> None:
        """Pass an event to the router, and execute its actions."""
        for action in self._front.take(event, self.event_queue.now_s):
            if isinstance(action, ev.SendRequest):
                self._send_to_engine(action.request_id, action.replica_id)
            elif isinstance(action, ev.RejectRequest):
                self._log.notes.append(f"{action.request_id} was refused: {action.message}")
                self._end_program(self._sender(action.request_id))
            elif isinstance(action, ev.ReleaseProgramKv):
                self._release(action.program_id, action.replica_id)
            elif isinstance(action, ev.RecallRequest):
                self._recall(action.request_id)
            else:
                raise AssertionError(f"{action}: unexpected, because engines do not fail in a simulation")


def prefix_hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Chained hashes of a prompt's full chunks of ``PREFIX_CHUNK_TOKENS`` tokens."""
    chain = 0
    found = []
    for start in range(0, len(prompt) - PREFIX_CHUNK_TOKENS + 1, PREFIX_CHUNK_TOKENS):
        chain = hash((chain, *prompt[start : start + PREFIX_CHUNK_TOKENS]))
        found.append(chain)
    return tuple(found)


def agent_type_of(plan: ProgramPlan, *, is_child: bool = False) -> str:
    """The agent type that clients send. If the trace has no agent type, clients send "sub-agent" if
    ``is_child`` is true, else "agent"."""
    return plan.agent_type or ("sub-agent" if is_child else "agent")


def engine_request_id(log: TurnLog) -> str:
    """A request's id in an engine. Each attempt has its own id, because a withdrawn attempt may still be in
    the engine."""
    return f"{log.request_id}~{log.recalls}" if log.recalls else log.request_id
