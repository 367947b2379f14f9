"""What the gateway did: counts for ``/metrics`` and a ledger of the newest moves."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from ..core import facts
from ..pd.decider import PairStatus
from .decider import ReplicaStatus
from .refusing import AT_THE_DOOR, LATER

MOST_MOVES = 10_000
_WAITS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_HEALTHS = ("up", "draining", "suspect")


class Move(msgspec.Struct, frozen=True):
    """A program went from one replica to another."""

    number: int
    unix_s: float
    program_id: str
    tenant: str
    moved_from: str
    moved_to: str
    reason: str
    kv: str
    """What became of its KV: ``shared`` (the new replica finds it on the shared disk), ``recomputed``."""
    waited_s: float
    """How long its request waited for KV to be written out."""
    left_because: str = ""
    """Why it could not stay, ``drain`` or ``failed``; empty: it could, and ``reason`` says why it went."""


class Books:
    """One gateway's. Names and labels as ``docs/metrics.md`` has them; ids are never labels."""

    def __init__(self, reasons: Iterable[str] = (), clock: Callable[[], float] = time.time) -> None:
        """``reasons``: those for which a request may go somewhere, as far as they are known now; their
        counts are there from the start, at 0, so that ``rate()`` sees their first increment."""
        self._clock = clock
        self.registry = CollectorRegistry()
        self._moves: deque[Move] = deque(maxlen=MOST_MOVES)
        self._number = 0

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sojourn_gateway_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sojourn_gateway_{name}", text, labels, registry=self.registry)

        self._requests = counter(
            "requests", "Requests sent to a replica, by the reason for which one.", "reason"
        )
        self._refused = counter(
            "refused", "Requests answered by the gateway with an error, by its code.", "code"
        )
        self._moved = counter("moves", "Programs that went to another replica, by reason.", "reason")
        self._recalled = counter("recalls", "Requests taken back from a replica for somebody more urgent.")
        self._cut = counter("cut_streams", "Answers that broke off after their first byte.")
        for reason in reasons:
            self._requests.labels(reason)
            self._moved.labels(reason)
        for code in {*facts.REFUSALS, *AT_THE_DOOR, *LATER}:
            self._refused.labels(code)
        self._waits = Histogram(
            "sojourn_gateway_wait_seconds",
            "Time that requests waited at the gateway before they were sent.",
            buckets=_WAITS_S,
            registry=self.registry,
        )
        self.waiting = 0
        """Requests that are nowhere now: of those for whom no replica has room, or none is there, only this
        tells."""
        self._waiting = gauge("waiting", "Requests that wait at the gateway, for one replica or for any.")
        self._waiting.set_function(lambda: self.waiting)
        self._load = gauge("replica_load", "Share of a replica that requests in flight use.", "replica")
        self._in_flight = gauge(
            "replica_in_flight", "Requests sent to a replica and not answered.", "replica"
        )
        self._queued = gauge("replica_queued", "Requests that wait at the gateway for a replica.", "replica")
        self._homed = gauge("replica_programs", "Programs at home at a replica.", "replica")
        self._room = gauge(
            "replica_room_tokens", "KV that the programs at home leave of all tiers of a replica.", "replica"
        )
        self._health = gauge("replica_health", "1 for what is believed of a replica.", "replica", "health")
        self._role = gauge(
            "replica_role",
            "1 for what a replica does of requests that are prefilled and decoded apart, and where it is.",
            "replica", "role", "node",
        )  # fmt: skip
        self._link = gauge(
            "link_queued_seconds",
            "What waits for a link of a replica's, as it told last, in seconds.",
            "replica", "link",
        )  # fmt: skip
        self._balance = gauge("load_spread", "Load of the most loaded replica less that of the least loaded.")
        self._use = gauge(
            "tenant_use_ratio", "What a tenant's requests in flight use of its share.", "tenant"
        )
        self._shown: set[str] = set()
        self._shown_pairs: set[tuple[Gauge, tuple[str, ...]]] = set()
        """Of roles and links."""
        self._users: set[str] = set()

    # -- what happens -------------------------------------------------------------

    def sent(self, reason: str, waited_s: float) -> None:
        """A request went to a replica, which answers it."""
        self._requests.labels(reason).inc()
        self._waits.observe(waited_s)

    def refused(self, code: str) -> None:
        """A request got an error that whoever decides where it goes knows nothing of."""
        self._refused.labels(code).inc()

    def decided(self, action: facts.AnyAction) -> None:
        """The core decided something."""
        if isinstance(action, facts.Refuse):
            self._refused.labels(action.code).inc()
        elif isinstance(action, facts.Recall):
            self._recalled.inc()

    def moved(
        self,
        tenant: str,
        program_id: str,
        moved_from: str,
        moved_to: str,
        reason: str,
        kv: str,
        waited_s: float,
        left_because: str = "",
    ) -> None:
        """A program has a new home, and its first request there goes on."""
        self._moved.labels(reason).inc()
        self._moves.append(
            Move(
                self._number, self._clock(), program_id, tenant, moved_from, moved_to, reason, kv,
                round(waited_s, 4), left_because,
            )
        )  # fmt: skip
        self._number += 1

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """A request waits for what is decided."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def cut(self) -> None:
        """An answer broke off."""
        self._cut.inc()

    # -- who asks -----------------------------------------------------------------

    def moves(self, since: int, limit: int, tenant: str | None = None) -> tuple[Sequence[Move], int]:
        """From number ``since`` on, and the number to go on with; with a tenant, only its own."""
        found = [move for move in self._moves if move.number >= since and tenant in (None, move.tenant)][
            :limit
        ]
        return found, (found[-1].number + 1 if len(found) == limit else max(since, self._number))

    def exposition(self, replicas: Sequence[ReplicaStatus], uses: dict[str, float]) -> bytes:
        """In Prometheus' text format. ``uses``: by tenant, share in flight ÷ share it has."""
        for state in replicas:
            self._load.labels(state.replica).set(state.load)
            self._in_flight.labels(state.replica).set(state.in_flight)
            self._queued.labels(state.replica).set(state.queued)
            self._homed.labels(state.replica).set(state.programs)
            self._room.labels(state.replica).set(state.room_tokens)
            for health in _HEALTHS:
                self._health.labels(state.replica, health).set(float(health == state.health))
        self._show_pairs([state for state in replicas if isinstance(state, PairStatus)])
        loads = [state.load for state in replicas]
        self._balance.set(max(loads) - min(loads) if loads else 0.0)
        names = {state.replica for state in replicas}
        for gone in self._shown - names:
            for gauge in (self._load, self._in_flight, self._queued, self._homed, self._room):
                gauge.remove(gone)
            for health in _HEALTHS:
                self._health.remove(gone, health)
        self._shown = names
        for tenant in self._users - uses.keys():
            self._use.labels(tenant).set(0.0)
        self._users |= uses.keys()
        for tenant, use in uses.items():
            self._use.labels(tenant).set(use)
        return generate_latest(self.registry)

    def _show_pairs(self, replicas: Sequence[PairStatus]) -> None:
        shown: dict[tuple[Gauge, tuple[str, ...]], float] = {
            (self._role, (state.replica, state.role, state.node)): 1.0 for state in replicas
        }
        for state in replicas:
            for name, link in state.links.items():
                if link.queued_s is not None:
                    shown[self._link, (state.replica, name)] = link.queued_s
        for gauge, labels in self._shown_pairs - shown.keys():
            gauge.remove(*labels)
        for (gauge, labels), value in shown.items():
            gauge.labels(*labels).set(value)
        self._shown_pairs = {*shown}
