"""What the HTTP side may ask of an engine: one call with an operation and JSON, JSON back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
from sojourn.ids import ProgramId
from sojourn.wire import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_CONTEXT_BYTES,
    MAX_GRAPH_BYTES,
    WIRE_VERSION,
    WireError,
    encode,
)

from ..metrics.links import LinkMeter
from ..program.graphs import KnownGraph
from ..program.record import Program
from ..program.status import ProgramStatus
from .desk import EVENT_TYPES, Desk
from .refusals import Refusals
from .steward import Steward

MAX_PROGRAMS_SHOWN = 1000
MAX_DECISIONS_SHOWN = 5000
MAX_TOOLS_SHOWN = 256
"""Of one program, those that run longest; ``tools_running`` counts them all."""

_arguments = msgspec.json.Decoder(dict[str, Any] | None)

Gauges = dict[str, list[tuple[dict[str, str], float]]]


class Paths(Protocol):
    """An engine's half of a pair: what capabilities and stats have under ``paths``."""

    def capabilities(self) -> dict[str, Any] | None: ...

    def stats(self) -> dict[str, Any] | None: ...


class UnknownOperation(ValueError):
    """The HTTP side asked for something this engine does not offer."""


class Service:
    """Answers ``events, capabilities, programs, program, persist, graphs, graph, stats, decisions,
    drain_metrics``.

    And ``refusal``: how long a request that was refused had waited, once.
    ``pool_state`` is asked for blocks by state (running, leased, cached, free);
    ``engine`` describes the engine in capabilities; ``tier_state`` tells of each tier below the device its
    blocks ``used`` and ``free``, under ``moves`` what became of blocks so far, and under ``traffic`` how much
    was moved, how long that took, and what was waited for (``tiers.traffic``). ``below_device`` is what
    capabilities tell of the tiers (``docs/wire.md``), ``None`` where there are none. ``persist`` has a chain
    of block hashes written to disk; it answers ``stored_blocks``, of the first ones, ``pending_blocks`` and
    ``pending_bytes``, which are being written, and ``shared``, whether other engines read them; or only the
    ``reason`` why it cannot. ``paths`` is asked for what there is to tell of a pair.
    """

    def __init__(
        self,
        steward: Steward,
        *,
        engine: dict[str, str],
        pool_state: Callable[[], dict[str, int]],
        desk: Desk | None = None,
        tier_state: Callable[[], dict[str, Any]] = dict,
        below_device: Callable[[], dict[str, Any] | None] = lambda: None,
        network_state: Callable[[], dict[str, Any] | None] = lambda: None,
        persist: Callable[[Sequence[Any]], dict[str, Any]] = lambda hashes: {"reason": "there is no disk"},
        paths: Paths | None = None,
    ) -> None:
        self._steward = steward
        self._tier_state = tier_state
        self._below_device = below_device
        self._network_state = network_state
        self._persist_chain = persist
        self._paths = paths
        self._links = LinkMeter(steward.recorder)
        self._counted: dict[tuple[str, str], float] = {}
        """Of totals of the tiers what metrics have had already, by metric and label."""
        self._desk = desk if desk is not None else Desk(steward)
        self.refusals = Refusals()
        """To be told of each request that is refused."""
        self._engine = engine
        self._pool_state = pool_state
        self._operations: dict[str, Callable[[dict[str, Any], float], Any]] = {
            "capabilities": self._capabilities,
            "programs": self._programs,
            "program": self._program,
            "persist": self._persist,
            "graphs": self._graphs,
            "graph": self._graph,
            "stats": self._stats,
            "decisions": self._decisions,
            "refusal": self._refusal,
            "drain_metrics": self._drain_metrics,
        }

    @property
    def desk(self) -> Desk:
        """Where events that ride along with requests are folded."""
        return self._desk

    def call(self, operation: str, payload: str, now: float) -> str:
        """Carry out one operation. Raises ``UnknownOperation`` or ``WireError``."""
        if operation == "events":
            return encode(self._desk.batch(payload.encode("utf-8", "replace"), now)).decode()
        handler = self._operations.get(operation)
        if handler is None:
            expected = ", ".join(["events", *self._operations])
            raise UnknownOperation(f"unknown operation {operation!r}; expected one of {expected}")
        try:
            arguments = _arguments.decode(payload) if payload else None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise WireError(f"{operation}: arguments are not a JSON object: {error}") from error
        return encode(handler(arguments or {}, now)).decode()

    def _capabilities(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        return {
            "name": "sojourn",
            "version": version("sojourn"),
            "wire": [WIRE_VERSION],
            "policy": self._steward.preset.name,
            "events": list(EVENT_TYPES),
            "limits": {
                "batch_bytes": MAX_BATCH_BYTES,
                "batch_events": MAX_BATCH_EVENTS,
                "context_bytes": MAX_CONTEXT_BYTES,
                "programs": self._steward.limits.max_programs,
                "graphs": self._steward.limits.max_graphs,
                "graph_bytes": MAX_GRAPH_BYTES,
                "hinted_ttl_s": self._steward.limits.max_hinted_ttl_s,
            },
            "engine": self._engine,
            "tiers": self._below_device(),
            "paths": self._paths.capabilities() if self._paths is not None else None,
        }

    def _programs(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        limit = _whole(arguments, "limit", 100, 1, MAX_PROGRAMS_SHOWN)
        status = arguments.get("status")
        table = self._steward.table
        chosen = [p for p in table if status is None or p.status.value == status]
        chosen.sort(key=lambda program: program.rank, reverse=True)
        shown = [self._summary(program, now) for program in chosen[:limit]]
        return {"programs": shown, "shown": len(shown), "total": len(chosen), "forgotten": table.forgotten}

    def _program(self, arguments: dict[str, Any], now: float) -> dict[str, Any] | None:
        program = self._steward.table.get(ProgramId(str(arguments.get("program_id"))))
        if program is None:
            return None
        turns = self._steward.ledger.of_program(program.id)
        longest = sorted(program.tools.items(), key=lambda item: (item[1].started_s, item[0]))
        tools = [
            {
                "call_id": call_id,
                "tool": tool.name,
                "tool_class": tool.tool_class,
                "elapsed_s": round(max(0.0, now - tool.started_s), 3),
                "expected_s": tool.expected_s,
            }
            for call_id, tool in longest[:MAX_TOOLS_SHOWN]
        ]
        return {
            **self._summary(program, now),
            "tenant": program.tenant,
            "graph_hash": program.graph_hash,
            "expected_steps_left": program.expected_steps_left,
            "goes_on": program.goes_on,
            "tier": program.tier,
            "p_reuse": program.p_reuse,
            "tools": tools,
            "ledger": [turn.as_dict() for turn in turns],
        }

    def _persist(self, arguments: dict[str, Any], now: float) -> dict[str, Any] | None:
        program = self._steward.table.get(ProgramId(str(arguments.get("program_id"))))
        if program is None:
            return None
        told = self._persist_chain(self._steward.contexts.get(program.id) or ())
        pending, block_size = told.get("pending_blocks", 0), self._steward.pool.block_size
        state = "unsupported" if "reason" in told else "writing" if pending else "done"
        return {
            "program_id": program.id,
            "state": state,
            "reason": told.get("reason"),
            "shared": told.get("shared", False),
            "turns": program.turns,
            "context_tokens": program.context_tokens,
            "stored_tokens": told.get("stored_blocks", 0) * block_size,
            "pending_tokens": pending * block_size,
            "bytes": told.get("pending_bytes", 0),
        }

    def _graphs(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        graphs = self._steward.graphs
        types = graphs.types()
        shown = [_outline(known, types) for known in reversed(list(graphs))]
        return {"graphs": shown, "total": len(shown), "bytes": graphs.bytes, "forgotten": graphs.forgotten}

    def _graph(self, arguments: dict[str, Any], now: float) -> dict[str, Any] | None:
        known = self._steward.graphs.get(str(arguments.get("graph_hash")))
        if known is None:
            return None
        graph = known.aeg.wire()
        return {
            **_outline(known, self._steward.graphs.types()),
            "nodes": [{"id": node.id, "tools": node.tools} for node in graph.nodes],
            "edges": [
                {"source": edge.source, "target": edge.target, "probability": edge.probability}
                for edge in graph.edges
            ],
        }

    def _stats(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        steward = self._steward
        return {
            "policy": steward.preset.name,
            "programs": {status.value: steward.table.counts[status] for status in ProgramStatus},
            "requests": len(steward.tickets),
            "leases": {
                "count": len(steward.leases),
                "blocks": steward.leases.blocks,
                "budget_blocks": steward.leases.budget_blocks,
            },
            "pool": {"block_size": steward.pool.block_size, **self._pool_state()},
            "tiers": self._tier_state(),
            "paths": self._paths.stats() if self._paths is not None else None,
            "placed": {tier.value: count for tier, count in steward.placer.counts().items()},
            "ledger": msgspec.to_builtins(steward.ledger.totals),
            "output_lengths": {**steward.prospects.known(), "network": self._network_state()},
            "tombstones": len(steward.keeper.graveyard),
            "history": {
                "tool_calls": steward.histories.tools.count(),
                "programs": steward.histories.turns.count(),
                "memoryfulness": steward.histories.turns.memoryfulness(),
                "mean_evicted_wait_s": steward.histories.evicted_waits.mean(),
            },
        }

    def _decisions(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        limit = _whole(arguments, "limit", 1000, 1, MAX_DECISIONS_SHOWN)
        since = _whole(arguments, "since", 0, 0, sys.maxsize)
        chosen, following = self._steward.decisions.since(since, limit)
        return {"decisions": [decision.as_dict() for decision in chosen], "next": following}

    def _refusal(self, arguments: dict[str, Any], now: float) -> dict[str, Any] | None:
        waited_s = self.refusals.take(str(arguments.get("request_id")))
        return None if waited_s is None else {"waited_s": waited_s}

    def _drain_metrics(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        steward = self._steward
        state = self._pool_state()
        parts = {name: blocks for name, blocks in state.items() if name != "total"}
        gauges: Gauges = {
            "sojourn_programs": [
                ({"state": status.value}, steward.table.counts[status]) for status in ProgramStatus
            ],
            "sojourn_leases": [({}, len(steward.leases))],
            "sojourn_placed_programs": [
                ({"tier": tier.value}, count) for tier, count in steward.placer.counts().items()
            ],
            "sojourn_build_info": [
                (
                    {
                        "version": version("sojourn"),
                        "vllm": self._engine.get("vllm", "unknown"),
                        "preset": steward.preset.name,
                        "adapter": "active",
                    },
                    1,
                )
            ],
            "sojourn_kv_blocks": [
                ({"tier": "device", "state": name}, blocks) for name, blocks in parts.items()
            ],
            "sojourn_kv_bytes": [
                ({"tier": "device", "state": name}, blocks * steward.pool.block_bytes)
                for name, blocks in parts.items()
            ],
        }
        tiers = self._tier_state()
        traffic = tiers.pop("traffic", {})
        self._count("sojourn_tier_moves_total", "what", tiers.pop("moves", {}))
        self._count("sojourn_tier_bytes_total", "lane", traffic.get("moved_bytes", {}))
        self._count("sojourn_tier_seconds_total", "lane", traffic.get("seconds", {}))
        if traffic:
            self._count("sojourn_tier_wait_seconds_total", "", {"": traffic["waited_s"]})
            gauges["sojourn_tier_jobs"] = [({}, traffic["jobs"])]
        gauges["sojourn_tier_blocks"] = [
            ({"tier": tier, "state": state}, blocks)
            for tier, states in tiers.items()
            for state, blocks in states.items()
        ]
        gauges |= self._links.take(self._paths.stats() if self._paths is not None else None)
        return steward.recorder.drain(gauges)

    def _count(self, metric: str, label: str, totals: Mapping[str, float]) -> None:
        """Add to a counter by what its totals have grown since the last time."""
        for name, total in totals.items():
            grown = total - self._counted.get((metric, name), 0)
            self._counted[metric, name] = total
            if grown > 0:
                self._steward.recorder.count(metric, grown, **({label: name} if label else {}))

    def _summary(self, program: Program, now: float) -> dict[str, Any]:
        lease = self._steward.leases.get(program.id)
        placed = self._steward.placer.placed(program.id)
        return {
            "program_id": program.id,
            "status": program.status.value,
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
            else {
                "blocks": lease.blocks,
                "ttl_s": round(lease.ttl_s, 3),
                "left_s": round(lease.deadline_s() - now, 3),
                "reason": lease.reason.value,
                "waiting": lease.waiting,
            },
        }


def _outline(known: KnownGraph, types: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "graph_hash": known.aeg.hash,
        "agent_types": types.get(known.aeg.hash, []),
        "complete": known.aeg.complete,
        "node_count": len(known.aeg.nodes),
        "edge_count": len(known.aeg.edges),
        "bytes": known.size_bytes,
    }


def _whole(arguments: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    """The argument, clipped to ``least``..``most``; ``default`` where it is absent. Raises ``WireError``."""
    value = arguments.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"{name} is {value!r}; expected a whole number")
    return max(least, min(value, most))
