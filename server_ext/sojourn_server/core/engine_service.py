"""Carries out the operations of an engine's HTTP routes: JSON arguments in, JSON out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
from sojourn.errors import InputError
from sojourn.ids import ProgramId
from sojourn.wire_codec import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_CONTEXT_BYTES,
    MAX_GRAPH_BYTES,
    WIRE_VERSION,
    WireError,
    encode,
)

from ..metrics.link_metrics import count_links
from ..metrics.live_frame import EngineSnapshot
from ..metrics.metrics_recorder import MetricsRecorder
from ..policies.placement.placement_views import Tier
from ..programs.declared_graphs import KnownGraph
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES, ProgramStatus
from . import engine_answers as answers
from .client_event_decoder import EVENT_TYPES, ClientEventDecoder, EventHandler
from .live_frame_builder import collect_turn_facts, take_snapshot
from .program_scheduler import ProgramScheduler
from .refused_requests import RefusedRequests
from .request_hints import unused_fields

MAX_PROGRAMS_SHOWN = 1000
MAX_DECISIONS_SHOWN = 5000
MAX_RESIDENT_SHOWN = 2000
"""Maximum number of programs with KV in the answer to ``load``."""
MAX_SNAPSHOT_PROGRAMS = 20_000
MAX_TOOLS_SHOWN = 256
"""Maximum number of a program's tools in a reply, longest-running first; ``tools_running`` counts all."""
STOCK_OPERATIONS = ("capabilities", "drain_metrics", "load", "stats")
"""Operations that ``StockEngineService`` answers."""

_batches = msgspec.json.Decoder(list[msgspec.Raw])
_arguments = msgspec.json.Decoder(dict[str, Any] | None)


class KVTransferStatus(Protocol):
    """Protocol of an object that returns the status of KV transfer in an engine of a prefill/decode pair.

    The status is the entry ``paths`` in the answers to ``capabilities`` and ``stats``."""

    def capabilities(self) -> dict[str, Any] | None: ...

    def stats(self) -> dict[str, Any] | None: ...


class UnknownOperation(InputError):
    """The engine has no operation of this name."""


class EngineService:
    """Carries out the operations ``events, event_batches, capabilities, programs, program, load, explain,
    persist, graphs, graph, stats, snapshot, decisions, drain_metrics`` and ``refusal``.

    ``refusal`` returns the seconds that a refused request had waited; each refusal is returned once.

    Arguments that are entries of the answer to ``capabilities`` (``docs/wire.md``), or functions that return
    one:

    - ``engine``: the entry ``engine``.
    - ``below_device``: returns the entry ``tiers``; ``None`` without tiers.
    - ``missing``: the entry ``missing``, the mechanisms that are off for lack of tiers; ``None``: all are on.

    Functions that return parts of the engine's state:

    - ``pool_state``: numbers of blocks by state (running, leased, cached, free).
    - ``tier_state``: ``used`` and ``free`` blocks of each tier below the device, numbers of copies by result
      (``moves``), and ``traffic``: bytes moved, seconds of copying, seconds that forward passes waited.
    - ``network_state``: state of the neural network that predicts output lengths; ``None`` without one.
    - ``owned_blocks``: number of cached blocks on the device that a program owns.
    - ``below_blocks``: numbers of blocks of a program's context in host memory and on disk.
    - ``cpu_clock``: CPU seconds used so far. A snapshot reports how many of them it took.

    ``handle`` handles client events, by default ``program_scheduler.handle``. ``paths`` returns the status of
    KV transfer; ``None``: no prefill/decode pair. ``persist`` writes the blocks of a chain of hashes to disk.
    It returns ``stored_blocks``, ``pending_blocks``, ``pending_bytes`` and ``shared``, or the ``reason`` why
    writing is not possible.
    """

    def __init__(
        self,
        program_scheduler: ProgramScheduler,
        *,
        engine: dict[str, str],
        pool_state: Callable[[], dict[str, int]],
        handle: EventHandler | None = None,
        tier_state: Callable[[], dict[str, Any]] = dict,
        below_device: Callable[[], answers.TierCapabilities | None] = lambda: None,
        missing: answers.MissingTiers | None = None,
        network_state: Callable[[], dict[str, Any] | None] = lambda: None,
        persist: Callable[[Sequence[Any]], dict[str, Any]] = lambda hashes: {"reason": "there is no disk"},
        paths: KVTransferStatus | None = None,
        owned_blocks: Callable[[ProgramId], int] = lambda program_id: 0,
        below_blocks: Callable[[ProgramId], tuple[int, int]] = lambda program_id: (0, 0),
        cpu_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._program_scheduler = program_scheduler
        self._state = program_scheduler.state
        self._tier_state = tier_state
        self._below_device = below_device
        self._missing = missing
        self._network_state = network_state
        self._persist_blocks = persist
        self._paths = paths
        self._owned_blocks = owned_blocks
        self._below_blocks = below_blocks
        self._cpu_clock = cpu_clock
        self._handle = handle or program_scheduler.handle
        self.client_event_decoder = ClientEventDecoder(self._handle, program_scheduler.recorder)
        """Handles client events, including those attached to requests."""
        self.refusals = RefusedRequests()
        """Requests that the engine refused, as noted by the vLLM adapter."""
        self._engine = engine
        self._pool_state = pool_state
        self._operations: dict[str, Callable[[dict[str, Any], float], Any]] = {
            "capabilities": self._capabilities,
            "programs": self._programs,
            "program": self._program,
            "load": self._load,
            "explain": self._explain,
            "persist": self._persist,
            "graphs": self._graphs,
            "graph": self._graph,
            "stats": self._stats,
            "snapshot": self._snapshot,
            "decisions": self._decisions,
            "refusal": self._refusal,
            "drain_metrics": self._drain_metrics,
        }

    def call(self, operation: str, payload: str, now: float) -> str:
        """Carry out one operation; returns JSON. Raises ``UnknownOperation`` or ``WireError``."""
        apply_batch = self.client_event_decoder.apply_batch
        if operation == "events":
            return encode(apply_batch(payload.encode("utf-8", "replace"), now)).decode()
        if operation == "event_batches":
            try:
                batches = _batches.decode(payload)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise WireError(f"{operation}: not a list of batches: {error}") from error
            return encode([apply_batch(bytes(batch), now) for batch in batches]).decode()
        handler = self._operations.get(operation)
        if handler is None:
            expected = ", ".join(["events", "event_batches", *self._operations])
            raise UnknownOperation(f"unknown operation {operation!r}; expected one of {expected}")
        try:
            arguments = _arguments.decode(payload) if payload else None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise WireError(f"{operation}: arguments are not a JSON object: {error}") from error
        return encode(handler(arguments or {}, now)).decode()

    def _capabilities(self, arguments: dict[str, Any], now: float) -> answers.EngineCapabilities:
        preset, limits = self._state.preset, self._state.limits
        return answers.EngineCapabilities(
            version=version("sojourn"),
            wire=[WIRE_VERSION],
            policy=preset.name,
            events=list(EVENT_TYPES),
            limits=answers.CapabilityLimits(
                batch_bytes=MAX_BATCH_BYTES,
                batch_events=MAX_BATCH_EVENTS,
                context_bytes=MAX_CONTEXT_BYTES,
                programs=limits.max_programs,
                graphs=limits.max_graphs,
                graph_bytes=MAX_GRAPH_BYTES,
                hinted_ttl_s=limits.max_hinted_ttl_s,
            ),
            unused_hints=unused_fields(preset),
            engine=self._engine,
            tiers=self._below_device(),
            missing=self._missing,
            paths=self._paths.capabilities() if self._paths is not None else None,
        )

    def _programs(self, arguments: dict[str, Any], now: float) -> answers.ProgramList:
        limit = _int_argument(arguments, "limit", 100, 1, MAX_PROGRAMS_SHOWN)
        status = arguments.get("status")
        table = self._state.programs
        chosen = [p for p in table if status is None or p.status.value == status]
        chosen.sort(key=lambda program: program.rank, reverse=True)
        shown = [answers.ProgramSummary(**self._summary(program, now)) for program in chosen[:limit]]
        return answers.ProgramList(
            programs=shown, shown=len(shown), total=len(chosen), forgotten=table.forgotten
        )

    def _program(self, arguments: dict[str, Any], now: float) -> answers.ProgramDetail | None:
        program = self._state.programs.get(ProgramId(str(arguments.get("program_id"))))
        if program is None:
            return None
        turns = self._state.ledger.of_program(program.id)
        longest = sorted(program.tools.items(), key=lambda item: (item[1].started_s, item[0]))
        tools = [
            answers.ToolSummary(
                call_id=call_id,
                tool=tool.name,
                tool_class=tool.tool_class,
                elapsed_s=round(max(0.0, now - tool.started_s), 3),
                expected_s=tool.expected_s,
            )
            for call_id, tool in longest[:MAX_TOOLS_SHOWN]
        ]
        return answers.ProgramDetail(
            **self._summary(program, now),
            tenant=program.tenant,
            graph_hash=program.graph_hash,
            expected_steps_left=program.expected_steps_left,
            goes_on=program.continuation_probability,
            tier=program.prediction_source,
            p_reuse=program.p_reuse,
            tools=tools,
            ledger=[turn.as_dict() for turn in turns],
            decisions=[one.own_dict() for one in self._state.decisions.of_program(program.id)],
        )

    def _load(self, arguments: dict[str, Any], now: float) -> answers.EngineLoad:
        state = self._state
        requests = state.requests.states.values()
        programs: list[tuple[ProgramState, int, int]] = []
        waiting: list[str] = []
        for program in sorted(state.programs, key=lambda one: one.last_contact_s, reverse=True):
            if program.status in OVER_STATUSES:
                continue
            found = map(state.requests.states.get, program.live_requests)
            own = [request for request in found if request is not None]
            if self._program_scheduler.tiers.placed(program.id) is Tier.WAITING:
                if own:
                    waiting.append(str(program.id))
                continue
            if len(programs) > MAX_RESIDENT_SHOWN:
                continue  # to look for its KV takes time of the scheduler's thread
            runs = any(one.running for one in own)
            tokens = program.context_tokens if runs else self._resident_tokens(program)
            if tokens or runs:
                programs.append((program, tokens, len(own)))
        blocks, paths = self._pool_state(), self._paths
        return answers.EngineLoad(
            requests=len(requests),
            request_tokens=sum(one.prompt_tokens for one in requests),
            free_tokens=int((blocks["cached"] + blocks["free"]) * state.pool.tokens_per_block),
            programs=[
                answers.ResidentProgram(
                    program.id,
                    tokens,
                    program.context_tokens,
                    round(max(0.0, now - program.last_contact_s), 3),
                    self._steps_left(program, own),
                )
                for program, tokens, own in programs[:MAX_RESIDENT_SHOWN]
            ],
            complete=len(programs) <= MAX_RESIDENT_SHOWN,
            waiting=waiting[:MAX_RESIDENT_SHOWN],
            **pair_load(paths),
        )

    def _resident_tokens(self, program: ProgramState) -> int:
        """Return the number of tokens of a program's context whose KV is in any tier. A context that fills no
        block counts as there, since nothing of it is kept."""
        per_block = self._state.pool.tokens_per_block
        full = int(program.context_tokens / per_block)
        blocks = self._owned_blocks(program.id) + sum(self._below_blocks(program.id))
        return program.context_tokens if blocks >= full else int(blocks * per_block)

    def _steps_left(self, program: ProgramState, requests: int) -> float | None:
        """Return the expected number of turns that have not ended: by the client's hint, or else the
        pending nodes of the declared graph. ``None``: unknown. ``requests``: number of the program's open
        requests."""
        left, node = program.expected_steps_left, program.node
        if left is None and program.graph_hash and node is not None:
            graph = self._state.graphs.get(program.graph_hash)
            left = graph.steps_after(node) if graph is not None else None
        return round(left + requests, 3) if left is not None else None

    def _explain(self, arguments: dict[str, Any], now: float) -> dict[str, Any] | None:
        program = self._state.programs.get(ProgramId(str(arguments.get("program_id"))))
        return None if program is None else collect_turn_facts(self._state, program, now)

    def _persist(self, arguments: dict[str, Any], now: float) -> answers.EnginePersistProgress | None:
        program = self._state.programs.get(ProgramId(str(arguments.get("program_id"))))
        if program is None:
            return None
        progress = self._persist_blocks(self._state.contexts.get(program.id) or ())
        pending, block_size = progress.get("pending_blocks", 0), self._state.pool.block_size
        return answers.EnginePersistProgress(
            program_id=program.id,
            state="unsupported" if "reason" in progress else "writing" if pending else "done",
            reason=progress.get("reason"),
            shared=progress.get("shared", False),
            turns=program.turns,
            context_tokens=program.context_tokens,
            stored_tokens=progress.get("stored_blocks", 0) * block_size,
            pending_tokens=pending * block_size,
            bytes=progress.get("pending_bytes", 0),
            compute_s=self._state.compute_s(program.context_tokens),
        )

    def _graphs(self, arguments: dict[str, Any], now: float) -> answers.GraphList:
        graphs = self._state.graphs
        types = graphs.types()
        shown = [answers.GraphSummary(**_graph_summary(known, types)) for known in reversed(list(graphs))]
        return answers.GraphList(
            graphs=shown, total=len(shown), bytes=graphs.bytes, forgotten=graphs.forgotten
        )

    def _graph(self, arguments: dict[str, Any], now: float) -> answers.GraphDetail | None:
        known = self._state.graphs.get(str(arguments.get("graph_hash")))
        if known is None:
            return None
        graph = known.aeg.wire()
        return answers.GraphDetail(
            **_graph_summary(known, self._state.graphs.types()),
            nodes=[answers.GraphNode(id=node.id, tools=node.tools) for node in graph.nodes],
            edges=[
                answers.GraphEdge(source=edge.source, target=edge.target, probability=edge.probability)
                for edge in graph.edges
            ],
        )

    def _stats(self, arguments: dict[str, Any], now: float) -> answers.EngineStats:
        state, histories = self._state, self._state.histories
        return answers.EngineStats(
            policy=state.preset.name,
            programs={status.value: state.programs.counts[status] for status in ProgramStatus},
            requests=len(state.requests.states),
            leases=answers.LeaseTotals(
                count=len(state.leases),
                blocks=state.leases.blocks,
                budget_blocks=state.leases.budget_blocks,
            ),
            pool={"block_size": state.pool.block_size, **self._pool_state()},
            tiers=self._tier_state(),
            paths=self._paths.stats() if self._paths is not None else None,
            placed={tier.value: count for tier, count in self._program_scheduler.tiers.counts().items()},
            ledger=state.ledger.totals,
            output_lengths={
                **self._program_scheduler.forecaster.statistics(),
                "network": self._network_state(),
            },
            tombstones=len(state.eviction_log),
            history=answers.HistoryTotals(
                tool_calls=histories.tools.count(),
                programs=histories.turns.count(),
                memoryfulness=histories.turns.memoryfulness(),
                mean_evicted_wait_s=histories.evicted_waits.mean(),
            ),
        )

    def _snapshot(self, arguments: dict[str, Any], now: float) -> EngineSnapshot:
        within_s = arguments.get("changed_within_s")
        if not isinstance(within_s, int | float | None):
            raise WireError(f"changed_within_s is {within_s!r}; expected a number of seconds")
        started = self._cpu_clock()
        found = take_snapshot(
            self._state,
            now=now,
            since_s=None if within_s is None else now - within_s,
            limit=_int_argument(arguments, "limit", MAX_SNAPSHOT_PROGRAMS, 1, MAX_SNAPSHOT_PROGRAMS),
            placed_tier=self._program_scheduler.tiers.placed,
            owned_blocks=self._owned_blocks,
            below_blocks=self._below_blocks,
            blocks=self._pool_state(),
            tiers=self._tier_state(),
        )
        spent_s = round(self._cpu_clock() - started, 6)
        return msgspec.structs.replace(found, engine=msgspec.structs.replace(found.engine, spent_s=spent_s))

    def _decisions(self, arguments: dict[str, Any], now: float) -> answers.DecisionPage:
        limit = _int_argument(arguments, "limit", 1000, 1, MAX_DECISIONS_SHOWN)
        since = _int_argument(arguments, "since", 0, 0, sys.maxsize)
        chosen, following = self._state.decisions.since(since, limit)
        return answers.DecisionPage(decisions=[decision.as_dict() for decision in chosen], next=following)

    def _refusal(self, arguments: dict[str, Any], now: float) -> dict[str, Any] | None:
        waited_s = self.refusals.take(str(arguments.get("request_id")))
        return None if waited_s is None else {"waited_s": waited_s}

    def _drain_metrics(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        state = self._state
        parts = {name: blocks for name, blocks in self._pool_state().items() if name != "total"}
        gauges: dict[str, list[tuple[dict[str, str], float]]] = {
            "sojourn_programs": [
                ({"state": status.value}, state.programs.counts[status]) for status in ProgramStatus
            ],
            "sojourn_leases": [({}, len(state.leases))],
            "sojourn_placed_programs": [
                ({"tier": tier.value}, count)
                for tier, count in self._program_scheduler.tiers.counts().items()
            ],
            "sojourn_build_info": [
                (
                    {
                        "version": version("sojourn"),
                        "vllm": self._engine.get("vllm", "unknown"),
                        "preset": state.preset.name,
                        "adapter": "active",
                    },
                    1,
                )
            ],
            "sojourn_kv_blocks": [
                ({"tier": "device", "state": name}, blocks) for name, blocks in parts.items()
            ],
            "sojourn_kv_bytes": [
                ({"tier": "device", "state": name}, blocks * state.pool.block_bytes)
                for name, blocks in parts.items()
            ],
        }
        tiers, recorder = self._tier_state(), state.recorder
        traffic = tiers.pop("traffic", {})
        for what, total in tiers.pop("moves", {}).items():
            recorder.count_total("sojourn_tier_moves_total", total, what=what)
        if traffic:
            for lane, total in traffic["moved_bytes"].items():
                recorder.count_total("sojourn_tier_bytes_total", total, lane=lane)
            for lane, total in traffic["seconds"].items():
                recorder.count_total("sojourn_tier_seconds_total", total, lane=lane)
            recorder.count_total("sojourn_tier_wait_seconds_total", traffic["waited_s"])
            gauges["sojourn_tier_jobs"] = [({}, traffic["jobs"])]
        gauges["sojourn_tier_blocks"] = [
            ({"tier": tier, "state": state}, blocks)
            for tier, states in tiers.items()
            for state, blocks in states.items()
        ]
        gauges |= count_links(recorder, self._paths.stats() if self._paths is not None else None)
        return state.recorder.drain(gauges)

    def _summary(self, program: ProgramState, now: float) -> dict[str, Any]:
        """The fields of a ``ProgramSummary``."""
        lease = self._state.leases.get(program.id)
        placed = self._program_scheduler.tiers.placed(program.id)
        return {
            "program_id": program.id,
            "status": program.status,
            "outcome": program.outcome,
            "name": program.name,
            "agent_type": program.agent_type,
            "parent_program_id": program.parent_id,
            "root_program_id": program.root_id,
            "node": program.node,
            "turns": program.turns,
            "context_tokens": program.context_tokens,
            "requests": len(program.live_requests),
            "placed": placed.value if placed is not None else None,
            "tool": program.tool_now(),
            "tools_running": len(program.tools),
            "age_s": round(now - program.arrived_s, 3),
            "silent_s": round(now - program.last_contact_s, 3),
            "lease": None
            if lease is None
            else answers.LeaseSummary(
                blocks=lease.blocks,
                ttl_s=round(lease.ttl_s, 3),
                left_s=round(lease.deadline_s() - now, 3),
                reason=lease.reason.value,
                waiting=lease.waiting,
            ),
        }


class StockEngineService:
    """Carries out ``STOCK_OPERATIONS`` for an engine of a prefill/decode pair with vLLM's own scheduler."""

    def __init__(self, paths: KVTransferStatus, engine: Callable[[], dict[str, str]]) -> None:
        """``engine`` returns the entry ``engine`` of the answer to ``capabilities``."""
        self._paths = paths
        self._engine = engine
        self._recorder = MetricsRecorder()

    def call(self, operation: str) -> str:
        """Carry out one operation; returns JSON. An unsupported operation returns an error with the names of
        the supported operations."""
        if operation == "capabilities":
            paths = self._paths.capabilities()
            answer: Any = answers.StockCapabilities(wire=[], engine=self._engine(), paths=paths)
        elif operation == "stats":
            answer = answers.StockStats(paths=self._paths.stats())
        elif operation == "load":
            answer = answers.EngineLoad(complete=False, **pair_load(self._paths))
        elif operation == "drain_metrics":
            answer = self._recorder.drain(count_links(self._recorder, self._paths.stats()))
        else:
            answer = {"error": "stock", "answers": STOCK_OPERATIONS}
        return encode(answer).decode()


def pair_load(paths: KVTransferStatus | None) -> dict[str, Any]:
    """Return the fields ``links`` and ``epoch`` of an ``EngineLoad``; empty if the engine is in no pair."""
    capabilities, stats = (paths.capabilities(), paths.stats()) if paths is not None else (None, None)
    if capabilities is None or stats is None:
        return {}
    return {"epoch": capabilities["epoch"], "links": stats.get("links", {})}


def _graph_summary(known: KnownGraph, types: dict[str, list[str]]) -> dict[str, Any]:
    """The fields of a ``GraphSummary``."""
    return {
        "graph_hash": known.aeg.hash,
        "agent_types": types.get(known.aeg.hash, []),
        "complete": known.aeg.complete,
        "node_count": len(known.aeg.nodes),
        "edge_count": len(known.aeg.edges),
        "bytes": known.size_bytes,
    }


def _int_argument(arguments: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    """Return the argument, limited to ``least``..``most``, or ``default`` if absent. Raises ``WireError`` if
    the argument is not an integer."""
    value = arguments.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"{name} is {value!r}; expected a whole number")
    return max(least, min(value, most))
