"""The gateway's Prometheus metrics, and a log of programs' latest moves between homes (replicas)."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from ...programs.program_status import REPORTED_OUTCOMES, ProgramOutcome
from ...routing import routing_events
from ...routing.routing_records import Key, PairEngineStatus, ReplicaHealth, ReplicaStatus
from .client_apis import GATEWAY_ERROR_CODES

MAX_LOGGED_MOVES = 100
_WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REPLICA_FIELDS = ("load", "in_flight", "queued", "programs", "room_tokens")
"""Fields of ``ReplicaStatus`` that are gauges."""
_GAUGES: Mapping[str, tuple[str, ...]] = {
    "waiting": ("Requests that wait at the gateway, for one replica or for any.",),
    "replica_load": ("Share of a replica's capacity that requests use, waiting ones included.", "replica"),
    "replica_in_flight": ("Requests sent to a replica and not answered.", "replica"),
    "replica_queued": ("Requests that wait at the gateway for a replica.", "replica"),
    "replica_programs": ("Programs at home at a replica.", "replica"),
    "replica_room_tokens": ("KV capacity in device and host memory that programs leave free.", "replica"),
    "replica_health": ("1 for the assumed health of a replica.", "replica", "health"),
    "replicas": ("Replicas by assumed health. missing: engines that do not answer.", "health"),
    "role_replicas": ("Prefill and decode engines that are up, by role.", "role"),
    "replica_role": ("1 for the role and node of a prefill or decode engine.", "replica", "role", "node"),
    "link_queued_seconds": ("Queue of a replica's link at its last report.", "replica", "link"),
    "load_spread": ("Largest less smallest load of the replicas of one role that are up.",),
    "tenant_use_ratio": ("Usage of a tenant's requests in flight, divided by its share.", "tenant"),
}  # fmt: skip
"""(description, *labels) by name."""
_OUTCOMES = (*REPORTED_OUTCOMES, ProgramOutcome.FINAL)


class ProgramMove(msgspec.Struct, frozen=True):
    """One change of a program's home, from one replica to another."""

    unix_s: float
    """Time of the move, in seconds since 1970."""
    program_id: str
    tenant: str
    moved_from: str
    moved_to: str
    reason: str
    """Why the new replica was chosen: the ``reason`` of its ``SendRequest``."""
    kv: str
    """``shared``: the new replica finds the KV on the shared disk. ``recomputed``: it computes it again."""
    waited_s: float
    """Seconds that the program's request waited for KV to be written to the disk."""
    left_because: str = ""
    """Why the program had to leave its former home: ``drain`` or ``failed``; empty: it could have stayed."""


class GatewayMetrics(Collector):
    """Metrics of one gateway. ``docs/gateway.md`` lists their names and labels; ids are never labels."""

    def __init__(self, reasons: Iterable[str] = ()) -> None:
        """``reasons``: values of ``SendRequest.reason``, whose counters start at 0 for ``rate()``."""
        self.registry = CollectorRegistry()
        self._moves: deque[ProgramMove] = deque(maxlen=MAX_LOGGED_MOVES)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sojourn_gateway_{name}", text, labels, registry=self.registry)

        self._requests = counter("requests", "Requests sent to a replica, by why it was chosen.", "reason")
        self._refused = counter(
            "refused", "Requests that the gateway answered with an error, by code.", "code"
        )
        self._moved = counter("moves", "Programs that went to another replica, by reason.", "reason")
        self.recalls = counter("recalls", "Requests recalled from a replica for a more urgent one.")
        self.cut_streams = counter("cut_streams", "Answers that broke off after their first byte.")
        self.disconnects = counter(
            "client_disconnects", "Requests whose client left before the answer's end."
        )
        self._ended = counter("programs_finished", "Programs whose client reported their end.", "outcome")
        for outcome in _OUTCOMES:
            self._ended.labels(outcome.value)
        for reason in reasons:
            self._requests.labels(reason)
            self._moved.labels(reason)
        for code in {*routing_events.REJECTION_CODES, *GATEWAY_ERROR_CODES}:
            self._refused.labels(code)
        self._waits = Histogram(
            "sojourn_gateway_wait_seconds",
            "Time that requests waited at the gateway before they were sent.",
            buckets=_WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self._values: Mapping[str, Mapping[Any, float]] = {}
        """Of the gauges, by the values of their labels."""
        self.registry.register(self)

    def sent(self, reason: str, waited_s: float) -> None:
        """Count a request whose replica has begun to answer. ``waited_s``: at the gateway before."""
        self._requests.labels(reason).inc()
        self._waits.observe(waited_s)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def moved(
        self, key: Key, moved_from: str, decision: routing_events.SendRequest, kv: str, waited_s: float
    ) -> None:
        self._moved.labels(decision.reason).inc()
        self._moves.append(
            ProgramMove(
                time.time(), key[1], key[0], moved_from, decision.home_id, decision.reason, kv,
                round(waited_s, 4), decision.left_because,
            )
        )  # fmt: skip

    def ended(self, status: str) -> None:
        """Count a reported end of a program. A ``status`` that is not known counts as an error."""
        self._ended.labels(status if status in _OUTCOMES else ProgramOutcome.ERROR.value).inc()

    def moves(self, tenant: str | None = None) -> list[ProgramMove]:
        """Return the recorded moves of a tenant's programs, the oldest first; ``None``: of all tenants."""
        return [move for move in self._moves if tenant in (None, move.tenant)]

    def exposition(
        self,
        replicas: Sequence[ReplicaStatus],
        uses: Mapping[str, float],
        missing: int = 0,
        up_by_role: Mapping[str, int] | None = None,
        waiting: int = 0,
    ) -> bytes:
        """Return all metrics in Prometheus' text format. ``uses``: used capacity ÷ share, by tenant."""
        engines = [state for state in replicas if isinstance(state, PairEngineStatus)]
        counts = Counts(state.health for state in replicas)
        loads = defaultdict(list)
        for state in replicas:
            if state.health == "up":
                loads[getattr(state, "role", "")].append(state.load)
        self._values = {
            **{
                f"replica_{field}": {(state.replica,): getattr(state, field) for state in replicas}
                for field in _REPLICA_FIELDS
            },
            "waiting": {(): waiting},
            "replica_health": {
                (state.replica, one.value): one.value == state.health
                for state in replicas
                for one in ReplicaHealth
            },
            # A sum of ``replica_health`` has no value once there is no replica, so no alert could compare it.
            "replicas": {(one.value,): counts[one.value] for one in ReplicaHealth} | {("missing",): missing},
            "role_replicas": {(role,): up for role, up in (up_by_role or {}).items()},
            "replica_role": {(state.replica, state.role, state.node): 1 for state in engines},
            "link_queued_seconds": {
                (state.replica, name): link.queued_s
                for state in engines
                for name, link in state.links.items()
                if link.queued_s is not None
            },
            "load_spread": {(): max((max(found) - min(found) for found in loads.values()), default=0.0)},
            "tenant_use_ratio": {(tenant,): use for tenant, use in uses.items()},
        }
        return generate_latest(self.registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (text, *labels) in _GAUGES.items():
            family = GaugeMetricFamily(f"sojourn_gateway_{name}", text, labels=labels)
            for of, value in self._values.get(name, {}).items():
                family.add_metric(of, float(value))
            yield family
