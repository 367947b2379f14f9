"""The gateway's routing core in a simulation, and the clients that send requests through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sojourn_server.policies.cluster_preset import ClusterPreset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_events import (
    KvReported,
    RecallRequest,
    RejectRequest,
    ReleaseProgramKv,
    ResidentKv,
    SendRequest,
)
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.routing_limits import RoutingLimits
from sojourn_server.routing.routing_records import RoutedProgram

from .event_queue import EventQueue
from .latency.latency_protocol import LatencyModel, StepWork
from .request_router import UNLIMITED_S, RoutableRequest
from .run_log import RunLog
from .simulated_clients import ActiveProgram, SimulatedClients, agent_type_of
from .simulated_replica import SimulatedReplica
from .token_accounting import InFlightTurn
from .workloads.arrival_processes import ArrivalProcess
from .workloads.program_plans import ProgramPlan


def isolated_completion_s(plan: ProgramPlan, latency: LatencyModel, max_batched_tokens: int) -> float:
    """Expected time of a program: seconds from its arrival to its last token, alone on an empty engine, tools
    included. Sub-agents count as programs of their own.

    Prefill computes the tokens that no earlier turn of the program computed, in chunks of
    ``max_batched_tokens``. Decoding adds one token per step. Simpson's rule gives the time of all decode
    steps from the first, middle and last step.
    """
    total_s = latency.call_s * len(plan.plans) + sum(isolated_turns_s(plan, latency, max_batched_tokens))
    return total_s + sum(plan.gap_s(turn) for turn in range(len(plan.plans) - 1))


def isolated_turns_s(plan: ProgramPlan, latency: LatencyModel, max_batched_tokens: int) -> list[float]:
    """Seconds of each turn, from admission to the last token, of a program that is alone on an engine."""
    return [
        _prefill_s(latency, lengths.reused_tokens, lengths.prompt_tokens, max_batched_tokens)
        + _decode_s(latency, lengths.prompt_tokens, lengths.output_tokens - 1)
        for lengths in plan.plans
    ]


def _prefill_s(latency: LatencyModel, found_tokens: int, prompt_tokens: int, chunk: int) -> float:
    # At least the last token of a prompt is computed.
    context, total_s = min(found_tokens, prompt_tokens - 1), 0.0
    while context < prompt_tokens:
        new = min(chunk, prompt_tokens - context)
        total_s += _step_s(latency, new, context, samples=context + new == prompt_tokens)
        context += new
    return total_s


def _decode_s(latency: LatencyModel, prompt_tokens: int, steps: int) -> float:
    if steps < 1:
        return 0.0
    first, last = prompt_tokens, prompt_tokens + steps - 1
    at = [_step_s(latency, 1, context) for context in (first, (first + last + 2) // 2 - 1, last)]
    return steps * (at[0] + 4 * at[1] + at[2]) / 6


def _step_s(latency: LatencyModel, new: int, context: int, *, samples: bool = True) -> float:
    """Seconds of a step of one request that adds ``new`` tokens to a context of ``context`` tokens.
    ``samples`` says whether the step also samples an output token."""
    pairs = new * context + new * (new + 1) // 2
    return latency.step_s(StepWork(1, new, pairs, kv_tokens_read=context + new, sampled=int(samples)))


DEFAULT_TENANT = "lab"
"""Tenant of programs that have none in the workload."""
TICK_INTERVAL_S = 0.1
"""Virtual seconds between two ticks of the routing core. Ticks occur only with presets whose decisions depend
on time: those that move waiting requests to other engines (work stealing, SAGA §5.2), divide capacity between
tenants, or make requests yield (SAGA §6.2)."""
RESIDENCY_POLL_S = 5.0
"""Virtual seconds between two polls. A poll asks each engine which programs' KV it has."""
PREFIX_CHUNK_TOKENS = 256
"""Prompt tokens per hash that the routing core compares to find common prefixes."""
MAX_WAITING_REQUESTS = 1_000_000


class SimulatedGateway:
    """The gateway's routing core (``sojourn_server.routing``: its decisions, without HTTP), used in place of
    a ``RequestRouter``.

    The core gets each event as it occurs, while a ``RequestRouter`` gets a view of the whole state. The
    core's limits are so high that it rejects no request for lack of capacity or after a long wait, since
    baselines reject no requests either.
    """

    is_open = False

    def __init__(self, preset: ClusterPreset) -> None:
        self.core = build_routing_core(
            preset,
            RoutingLimits(
                most_waiting=MAX_WAITING_REQUESTS,
                wait_s=UNLIMITED_S,
                lease_s=UNLIMITED_S,
                silent_program_s=UNLIMITED_S,
            ),
        )
        needs_time = (
            preset.stealing.is_used or preset.sharing.divides_capacity or preset.tenant_preemption.is_used
        )
        self.tick_s = TICK_INTERVAL_S if needs_time else float("inf")
        self.reads_prefixes = preset.routing.reads_prefixes

    def observe_program(
        self, tenant: str | None, agent_type: str, turns: int, tokens: int, took_s: float, tools_s: float
    ) -> None:
        """Record a program that ended before the run. ``tokens``: length of its longest context. ``took_s``:
        seconds from its start to its end. ``tools_s``: how many of these seconds it spent in tools.
        ``tenant``: ``None`` stands for the default tenant."""
        program = RoutedProgram(
            (tenant or DEFAULT_TENANT, ""), agent_type, None, 0.0, took_s, context_tokens=tokens, turns=turns
        )
        self.core.estimator.observe_turn(program, (took_s - tools_s) / turns)
        self.core.estimator.ended(program, took_s)


class GatewayClients(SimulatedClients):
    """Clients behind the gateway's routing core.

    Without a ``HintSetting`` they state no deadlines. The core then derives them from the mean duration of
    earlier programs of the same agent type.
    """

    def __init__(
        self,
        sim_replicas: Sequence[SimulatedReplica],
        event_queue: EventQueue,
        loop: ArrivalProcess,
        gateway: SimulatedGateway,
        log: RunLog,
        **options: Any,
    ) -> None:
        super().__init__(sim_replicas, event_queue, loop, gateway, log, **options)  # type: ignore[arg-type]
        self._gateway = gateway
        self._target_of: dict[str, str] = {}
        """Request → name of the engine that the routing core chose."""

    def begin(self) -> None:
        for sim_replica in self._sim_replicas.values():
            options = sim_replica.engine.options
            # As the real gateway: of vLLM's own connector an engine reports no blocks of host memory.
            host_blocks = options.host_blocks if options.own_tiers else 0
            self._take(
                routing_events.ReplicaRegistered(
                    sim_replica.replica,
                    "1",
                    (options.blocks - 1) * options.block_size,
                    host_tokens=host_blocks * options.block_size,
                    max_running=options.max_num_seqs,
                    max_context_tokens=options.max_model_len,
                )
            )
        super().begin()
        if any(one.engine.adapter is not None for one in self._sim_replicas.values()):
            self._schedule_residency_poll()

    def _schedule_residency_poll(self) -> None:
        due_s = self._event_queue.now_s + RESIDENCY_POLL_S
        self._event_queue.schedule_at(due_s, self._poll_residency, background=True)

    def _poll_residency(self) -> None:
        """Report to the routing core the programs that have their KV on an engine."""
        for name, sim_replica in self._sim_replicas.items():
            if sim_replica.engine.adapter is None:
                continue
            load = sim_replica.engine.ask("load")
            programs = (
                ResidentKv(
                    self._tenant_of(one["program_id"]),
                    one["program_id"],
                    one["tokens"],
                    one["context_tokens"],
                    one.get("idle_s", 0.0),
                )
                for one in load["programs"]
                if one["program_id"] in self.active
            )
            waiting = tuple((self._tenant_of(one), one) for one in load["waiting"])
            self._take(KvReported(replica_id=name, instance="1", programs=tuple(programs), waiting=waiting))
        self._schedule_residency_poll()

    def _tenant_of(self, program_id: str) -> str:
        active = self.active.get(program_id)
        return (active.plan.tenant if active is not None else None) or DEFAULT_TENANT

    def first_token(self, turn: InFlightTurn) -> None:
        assert turn.log.replica is not None
        self._take(routing_events.FirstByteSent(turn.log.request_id, turn.log.replica))

    def answered(self, turn: InFlightTurn) -> None:
        # The core gets the event first, so that the client's next request finds the freed capacity.
        log = turn.log
        replica = self._target_of.pop(log.request_id)
        self._take(routing_events.RequestFinished(log.request_id, log.output_tokens, replica))
        super().answered(turn)

    def _target_replica(self, request_id: str) -> str:
        return self._target_of[request_id]

    def _route_request(self, request: RoutableRequest) -> None:
        active = self._submitted[request.request_id].active
        plan, log = active.plan, active.log
        deadline_s = (self._submitted[request.request_id].context or {}).get("deadline_seconds")
        prefix: tuple[int, ...] = ()
        if self._gateway.reads_prefixes:
            prefix = prefix_hashes(self._submitted[request.request_id].prompt)
        self._take(
            routing_events.RequestReceived(
                request.request_id,
                plan.tenant or DEFAULT_TENANT,
                request.prompt_tokens,
                program_id=request.program_id,
                parent_id=log.parent,
                agent_type=agent_type_of(plan, is_child=log.parent is not None),
                deadline_s=None if deadline_s is None else self._event_queue.now_s + deadline_s,
                prefix=prefix,
                exact=True,
            )
        )

    def _tick(self) -> None:
        self._take(routing_events.Tick())
        super()._tick()

    def _query_router(self, over: ActiveProgram | None = None) -> None:
        # All simulated clients report the end of a program, with hints or without.
        if over is not None:
            tenant = over.plan.tenant or DEFAULT_TENANT
            self._take(routing_events.ProgramEnded(over.plan.instance_id, tenant))

    def _take(self, event: routing_events.AnyRoutingEvent) -> None:
        """Pass an event to the routing core, and execute its actions."""
        for action in self._gateway.core.take(event, self._event_queue.now_s):
            if isinstance(action, SendRequest):
                self._target_of[action.request_id] = action.replica_id
                self._send_to_engine(action.request_id)
            elif isinstance(action, RejectRequest):
                self._end_rejected(action)
            elif isinstance(action, ReleaseProgramKv):
                self._release(action.program_id, action.replica_id)
            elif isinstance(action, RecallRequest):
                self._recall(action.request_id)
            else:
                raise AssertionError(f"{action}: unexpected, because engines do not fail in a simulation")

    def _end_rejected(self, refusal: RejectRequest) -> None:
        """End the program of a rejected request."""
        sent = self._submitted.pop(refusal.request_id)
        self._log.notes.append(f"{refusal.request_id} was refused: {refusal.message}")
        self._end_program(sent.active)


def prefix_hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Chained hashes of a prompt's full chunks of ``PREFIX_CHUNK_TOKENS`` tokens."""
    chain = 0
    found = []
    for start in range(0, len(prompt) - PREFIX_CHUNK_TOKENS + 1, PREFIX_CHUNK_TOKENS):
        chain = hash((chain, *prompt[start : start + PREFIX_CHUNK_TOKENS]))
        found.append(chain)
    return tuple(found)
