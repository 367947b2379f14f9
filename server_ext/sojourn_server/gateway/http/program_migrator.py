"""Moves programs to other replicas: their events, and their KV if both engines use the same shared disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
import msgspec

from ...routing.routing_events import SendRequest
from ...routing.routing_records import Key
from .engine_client import ask_engine
from .gateway_metrics import GatewayMetrics
from .program_events import ProgramEvents
from .replica_addresses import ReplicaAddresses
from .routing_backend import RoutingBackend

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 5.0
"""Bounds, in seconds, of the wait for a program's KV to be on the shared disk; the lower one is a few steps
of the former engine."""
RELEASE_DELAY_S = 30.0
"""Seconds after which a program's former replica may drop its KV, even without a request to the new home."""
MAX_RELEASE_ATTEMPTS = 4
"""Number of release delays after which a program's KV is released even if the program has no home."""
STORE_POLL_S = 0.02
"""Seconds between two queries of whether KV is on the disk."""


class _StoredKv(msgspec.Struct):
    """An engine's report on writing a program's KV to disk, in tokens of the context."""

    context_tokens: int = 0
    stored_tokens: int = 0
    pending_tokens: int = 0
    compute_s: float | None = None
    """The engine's estimate of the seconds that recomputing the context takes; ``None``: unknown."""


@dataclass(frozen=True, slots=True)
class ProgramMigrator:
    """Carries out moves of programs to other replicas. A move cannot fail, because missing KV is recomputed.
    In all methods, ``key`` is (tenant, program id)."""

    routing_backend: RoutingBackend
    events: ProgramEvents
    replicas: ReplicaAddresses
    session: Callable[[], aiohttp.ClientSession]
    metrics: GatewayMetrics
    leaving: dict[Key, dict[str, asyncio.TimerHandle]] = field(default_factory=dict)
    """Timers of the releases that were not sent yet, by program and former replica, oldest first."""

    async def prepare(self, key: Key, decision: SendRequest, authorization: str | None) -> None:
        """Prepare a replica for a program's next request, and wait until the request may be sent. The replica
        gets the events that it lacks. If the program moves and both engines use a shared disk, its KV is
        written there; then it is released at the former replica. ``authorization``: header for engines."""
        replica_id = decision.replica_id
        self._cancel_release(key, replica_id)  # the program may have returned
        # After two moves without a request in between, the program's KV is still at the first home.
        moved_from = next(iter(self.leaving.get(key, ())), decision.moved_from)
        try:
            sending = self.events.replay_before_request(key, replica_id)
            if moved_from is None or moved_from == replica_id:
                await sending
            else:
                await asyncio.gather(sending, self._move(key, moved_from, decision, authorization))
        finally:
            for former in list(self.leaving.get(key, ())):
                self._send_release(key, former, authorization)

    async def _move(
        self, key: Key, moved_from: str, decision: SendRequest, authorization: str | None
    ) -> None:
        """Record a program's move. First have its KV written to the shared disk, if both engines use one."""
        began_s = time.monotonic()
        engines = [self.events.description_of(one) for one in (moved_from, decision.replica_id)]
        has_disk = all(one is not None and one.shares_disk for one in engines)
        stored = has_disk and await self._persist_kv(key, moved_from, authorization)
        self.metrics.moved(
            key, moved_from, decision, "shared" if stored else "recomputed", time.monotonic() - began_s
        )

    def release(self, key: Key, former: str, delays: int = 1) -> None:
        """Schedule the release of a program's KV at its former replica: when the program's next request is
        ready to be sent, or after ``RELEASE_DELAY_S``. Until then the KV can be written to the shared disk.
        ``delays``: number of delays with this one."""
        if delays == 1:  # else it keeps its place among the releases
            self._cancel_release(key, former)
        timer = asyncio.get_running_loop().call_later(RELEASE_DELAY_S, self._on_timer, key, former, delays)
        self.leaving.setdefault(key, {})[former] = timer

    def _on_timer(self, key: Key, former: str, delays: int) -> None:
        """Send a release whose delay has passed, or start another delay: the program has no home, or
        waits."""
        # A program that lost its home with a replica may return to the replica that has its KV.
        is_homeless = self.routing_backend.core.home(*key) is None and delays < MAX_RELEASE_ATTEMPTS
        if is_homeless or self.routing_backend.is_waiting(*key):
            self.release(key, former, delays + 1)
        else:
            self._send_release(key, former, None)

    def _send_release(self, key: Key, former: str, authorization: str | None) -> None:
        """Send a release, unless the program's home is this replica again or another rank of its engine."""
        self._cancel_release(key, former)
        old, home = self.replicas.get(former), self.replicas.get(self.routing_backend.core.home(*key))
        if old is not None and (home is None or home.url != old.url):
            self.events.release(key, old, authorization)

    def _cancel_release(self, key: Key, former: str) -> None:
        timers = self.leaving.get(key, {})
        if former in timers:
            timers.pop(former).cancel()
            if not timers:
                del self.leaving[key]

    async def _persist_kv(self, key: Key, moved_from: str, authorization: str | None) -> bool:
        """Have a replica write a program's KV to the shared disk, and wait for it at most the time in which
        the new replica would compute it. Return whether none is pending and half of the context is on the
        disk."""
        address = self.replicas.get(moved_from)
        name = quote(self.events.names.engine_name(*key), safe="")
        began_s = time.monotonic()
        while address is not None:
            reply = await ask_engine(
                self.session(),
                f"{address.url}/sojourn/v1/programs/{name}/persist",
                method="POST",
                authorization=authorization,
                timeout_s=MOST_WAIT_S,
            )
            try:
                stored = msgspec.convert(reply.document if reply is not None else None, _StoredKv)
            except msgspec.ValidationError:
                return False
            if not stored.context_tokens or not stored.pending_tokens:
                return 0 < stored.context_tokens <= stored.stored_tokens * 2
            if time.monotonic() - began_s >= worth_waiting_s(stored.compute_s):
                return False
            await asyncio.sleep(STORE_POLL_S)
        return False


def worth_waiting_s(compute_s: float | None) -> float:
    """Return the most seconds that a request waits for its program's KV to be on the shared disk.
    ``compute_s``: seconds in which the new replica would compute it; ``None``: unknown."""
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, compute_s or 0.0))
