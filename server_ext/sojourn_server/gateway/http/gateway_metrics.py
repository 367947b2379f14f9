"""The gateway's Prometheus metrics, and a log of programs' latest moves from one home (replica) to
another."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Number of latest moves that are kept for ``GatewayMetrics.moves``."""
_WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_OF_REPLICAS = (
    ("load", "Share of a replica's capacity that requests use, waiting ones included."),
    ("in_flight", "Requests sent to a replica and not answered."),
    ("queued", "Requests that wait at the gateway for a replica."),
    ("programs", "Programs at home at a replica."),
    (
        "room_tokens",
        "KV capacity of a replica, in device and host memory, that its programs leave free.",
    ),
)
"""(field of ``ReplicaStatus``, description) of gauges with one value for each replica."""
_HEALTH_LABELS = tuple(health.value for health in ReplicaHealth)


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
    """``shared``: the new replica finds the program's KV on the shared disk. ``recomputed``: it computes the
    KV again."""
    waited_s: float
    """Seconds that the program's request waited for KV to be written to the disk."""
    left_because: str = ""
    """Why the program had to leave its former home: ``drain`` or ``failed``. Empty if it could have
    stayed."""


class GatewayMetrics(Collector):
    """Metrics of one gateway. ``docs/gateway.md`` lists their names and labels; ids are never labels."""

    def __init__(
        self,
        reasons: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``reasons``: all known values of ``SendRequest.reason``. Their counters start at 0, so that
        ``rate()`` sees the first increment. ``clock``: Unix time in seconds."""
        self._clock = clock
        self.registry = CollectorRegistry()
        self._moves: deque[ProgramMove] = deque(maxlen=MAX_LOGGED_MOVES)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sojourn_gateway_{name}", text, labels, registry=self.registry)

        self._requests = counter("requests", "Requests sent to a replica, by why it was chosen.", "reason")
        self._refused = counter(
            "refused", "Requests answered by the gateway with an error, by its code.", "code"
        )
        self._moved = counter("moves", "Programs that went to another replica, by reason.", "reason")
        self.recalls = counter("recalls", "Requests recalled from a replica for a more urgent one.")
        self.cut_streams = counter("cut_streams", "Answers that broke off after their first byte.")
        self.disconnects = counter(
            "client_disconnects", "Requests whose client closed the connection before the answer's end."
        )
        self._ended = counter(
            "programs_finished",
            "Programs whose client reported their end. Engines count those that fell silent.",
            "outcome",
        )
        for outcome in (*REPORTED_OUTCOMES, ProgramOutcome.FINAL):
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
        self.waiting = 0
        """Number of requests that wait at the gateway, for one replica or for any replica. No other metric
        counts the requests that wait for any replica."""
        self._replicas: Sequence[ReplicaStatus] = ()
        self._uses: Mapping[str, float] = {}
        self._missing = 0
        self._up_by_role: Mapping[str, int] = {}
        self.registry.register(self)

    # -- events ---------------------------------------------------------------------

    def sent(self, reason: str, waited_s: float) -> None:
        """Count a request whose replica has begun to answer. ``reason``: ``SendRequest.reason``.
        ``waited_s``: seconds that the request waited at the gateway before."""
        self._requests.labels(reason).inc()
        self._waits.observe(waited_s)

    def refused(self, code: str) -> None:
        """Count a request that got an error of the gateway or the routing core, by its code."""
        self._refused.labels(code).inc()

    def moved(
        self, key: Key, moved_from: str, decision: routing_events.SendRequest, kv: str, waited_s: float
    ) -> None:
        """Record that a program, (tenant, id), moves to a new home. Call this just before the program's first
        request goes there. ``kv``, ``waited_s``: fields of ``ProgramMove``."""
        self._moved.labels(decision.reason).inc()
        to, why, left_because = decision.replica_id, decision.reason, decision.left_because
        now, (tenant, program_id) = self._clock(), key
        self._moves.append(
            ProgramMove(now, program_id, tenant, moved_from, to, why, kv, round(waited_s, 4), left_because)
        )

    def ended(self, status: str) -> None:
        """Count a program whose client reported its end. Any ``status`` other than ``ok``, ``cancelled`` and
        ``final`` counts as an error."""
        known = (*REPORTED_OUTCOMES, ProgramOutcome.FINAL)
        self._ended.labels(status if status in known else ProgramOutcome.ERROR.value).inc()

    # -- queries --------------------------------------------------------------------

    def moves(self, tenant: str | None = None) -> list[ProgramMove]:
        """Return the recorded moves of a tenant's programs, the oldest first; ``None``: of all tenants."""
        return [move for move in self._moves if tenant in (None, move.tenant)]

    def exposition(
        self,
        replicas: Sequence[ReplicaStatus],
        uses: Mapping[str, float],
        *,
        missing: int = 0,
        up_by_role: Mapping[str, int] | None = None,
    ) -> bytes:
        """Return all metrics in Prometheus' text format.

        ``uses``: used capacity ÷ share, by tenant. ``missing``: number of engines that do not answer and are
        not among ``replicas``. ``up_by_role``: number of engines that are up, by role; ``None``: the engines
        have no roles.
        """
        self._replicas, self._uses, self._missing = replicas, uses, missing
        self._up_by_role = up_by_role or {}
        return generate_latest(self.registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges, with the values of the last ``exposition``."""
        states = self._replicas
        engines = [state for state in states if isinstance(state, PairEngineStatus)]
        yield _gauge(
            "waiting", "Requests that wait at the gateway, for one replica or for any.", {(): self.waiting}
        )
        for field, text in _OF_REPLICAS:
            values = {(state.replica,): getattr(state, field) for state in states}
            yield _gauge(f"replica_{field}", text, values, "replica")
        yield _gauge(
            "replica_health",
            "1 for the assumed health of a replica.",
            {(one.replica, health): health == one.health for one in states for health in _HEALTH_LABELS},
            "replica",
            "health",
        )
        # A sum of ``replica_health`` has no value once there is no replica, so no alert could compare it.
        counts = Counts(state.health for state in states)
        yield _gauge(
            "replicas",
            "Replicas, by assumed health. missing: engines that should be there and do not answer.",
            {(health,): counts[health] for health in _HEALTH_LABELS} | {("missing",): self._missing},
            "health",
        )
        yield _gauge(
            "role_replicas",
            "Prefill and decode engines that are up, by role.",
            {(role,): up for role, up in self._up_by_role.items()},
            "role",
        )
        yield _gauge(
            "replica_role",
            "1 for the role and node of a prefill or decode engine.",
            {(state.replica, state.role, state.node): 1 for state in engines},
            "replica", "role", "node",
        )  # fmt: skip
        yield _gauge(
            "link_queued_seconds",
            "Queue of a link of a replica at its last report, in seconds.",
            {
                (state.replica, name): link.queued_s
                for state in engines
                for name, link in state.links.items()
                if link.queued_s is not None
            },
            "replica", "link",
        )  # fmt: skip
        yield _gauge(
            "load_spread",
            "Load of the most loaded replica less that of the least loaded, among those of one role that are "
            "up.",
            {(): _load_spread(states)},
        )
        yield _gauge(
            "tenant_use_ratio",
            "Usage of a tenant's requests in flight, divided by its share.",
            {(tenant,): use for tenant, use in self._uses.items()},
            "tenant",
        )


def _gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> GaugeMetricFamily:
    """Return a gauge. ``values``: by values of the labels."""
    family = GaugeMetricFamily(f"sojourn_gateway_{name}", text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, float(value))
    return family


def _load_spread(replicas: Sequence[ReplicaStatus]) -> float:
    """Return the largest difference in load between two replicas of the same role; 0.0 if no role has two
    replicas. Only replicas that are up count, because other replicas get no new requests."""
    loads = defaultdict(list)
    for state in replicas:
        if state.health == "up":
            loads[state.role if isinstance(state, PairEngineStatus) else ""].append(state.load)
    return max((max(found) - min(found) for found in loads.values()), default=0.0)
