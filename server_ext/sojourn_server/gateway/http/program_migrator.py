"""Moves programs to other replicas: their events, and their KV if both engines use the same shared disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
import msgspec

from ...routing import routing_events
from ...routing.routing_records import Key
from .engine_client import ask_engine
from .gateway_metrics import GatewayMetrics
from .program_events import ProgramEvents
from .replica_addresses import ReplicaAddresses

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 5.0
"""Bounds, in seconds, of the result of ``worth_waiting_s``. The lower bound lasts for a few steps of the
former engine. It also applies if the former engine does not report its speed."""
RELEASE_DELAY_S = 30.0
"""Seconds after which a program's former replica may drop its KV, even without a request to the new home."""
MAX_RELEASE_ATTEMPTS = 4
"""Number of release delays after which a program's KV is released even if the program has no home. See
``RELEASE_DELAY_S``."""
STORE_POLL_S = 0.02
"""Seconds between two queries of whether KV is on the disk."""


class _StoredKv(msgspec.Struct):
    """An engine's report on writing a program's KV to disk. It counts the tokens in the context, on disk, and
    still to be written."""

    context_tokens: int = 0
    stored_tokens: int = 0
    pending_tokens: int = 0
    compute_s: float | None = None
    """The engine's estimate of the seconds that recomputing the context takes; ``None``: unknown."""


@dataclass(slots=True, eq=False)
class _PendingRelease:
    """A release of a program's KV that was not sent to the former replica yet."""

    left: routing_events.ReleaseProgramKv
    timer: asyncio.TimerHandle | None = None
    """Timer of the present delay."""
    times: int = 0
    """Number of delays (``RELEASE_DELAY_S``) that have passed."""


_decoder = msgspec.json.Decoder(_StoredKv)


def read_stored_kv(answer: bytes) -> _StoredKv | None:
    """Parse an engine's answer to the route ``persist``; ``None``: the answer cannot be read."""
    try:
        return _decoder.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def worth_waiting_s(stored: _StoredKv) -> float:
    """Return the maximum seconds that a request waits for its program's KV to be on the shared disk. It is
    the time that the engine needs to compute the KV, clipped to ``LEAST_WAIT_S`` and ``MOST_WAIT_S``. After
    this time, the new replica computes the KV."""
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, stored.compute_s or 0.0))


class ProgramMigrator:
    """Carries out moves of programs to other replicas. A move cannot fail, because missing KV is recomputed.
    In all methods, ``key`` is (tenant, program id)."""

    def __init__(
        self,
        events: ProgramEvents,
        replicas: ReplicaAddresses,
        session: Callable[[], aiohttp.ClientSession],
        metrics: GatewayMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = events
        self._replicas = replicas
        self._session = session
        self._metrics = metrics
        self._clock = clock
        self.leaving: dict[Key, list[_PendingRelease]] = {}
        """Pending releases of each program, oldest first."""
        self._waiting: Counter[Key] = Counter()
        """Number of requests of each program that wait for a decision of the routing core."""

    @contextlib.contextmanager
    def while_waiting(self, key: Key) -> Iterator[None]:
        """Context manager for the time that a request of a program waits for a routing decision. Meanwhile, a
        pending release of the program's KV is not sent, even if its delay has passed."""
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    async def prepare(
        self,
        key: Key,
        replica_id: str,
        moved_from: str | None,
        reason: str,
        authorization: str | None,
        *,
        left_because: str = "",
    ) -> None:
        """Prepare a replica for a program's next request, and wait until the request may be sent.

        The replica gets the events that it lacks. If the program moves, its KV is written to the shared
        disk, provided that both engines use one. Then the KV is released at the former replica.

        ``moved_from``: id of the former home; ``None``: the program does not move. ``reason``,
        ``left_because``: fields of the ``SendRequest``. ``authorization``: header for engines.
        """
        if key not in self.leaving and moved_from in (None, replica_id):
            await self._events.replay_before_request(key, replica_id)
            return
        self._cancel_release(key, replica_id)
        # After two moves without a request in between, the program's KV is still at the first home.
        leaving = self.leaving.get(key)
        moved_from = leaving[0].left.replica_id if leaving else moved_from
        try:
            sending = self._events.replay_before_request(key, replica_id)
            if moved_from is None or moved_from == replica_id:
                await sending
            else:
                moving = self._move(key, moved_from, replica_id, reason, authorization, left_because)
                await asyncio.gather(sending, moving)
        finally:
            self._send_pending_releases(key, authorization)

    async def _move(
        self,
        key: Key,
        moved_from: str,
        moved_to: str,
        reason: str,
        authorization: str | None,
        left_because: str,
    ) -> None:
        """Record a program's move. First have its KV written to the shared disk, if both engines use one."""
        began_s = self._clock()
        stored = False
        old, new = (self._events.description_of(one) for one in (moved_from, moved_to))
        if old is not None and new is not None and old.shares_disk and new.shares_disk:
            stored = await self._persist_kv(key, moved_from, authorization)
        waited_s = self._clock() - began_s
        kv = "shared" if stored else "recomputed"
        self._metrics.moved(key[0], key[1], moved_from, moved_to, reason, kv, waited_s, left_because)

    def release(self, left: routing_events.ReleaseProgramKv) -> None:
        """Schedule the release of a program's KV at its former replica. The release is sent when the
        program's next request is ready to be sent, or after ``RELEASE_DELAY_S``. Until then the KV can be
        written to the shared disk."""
        key = (left.tenant, left.program_id)
        self._cancel_release(key, left.replica_id)
        one = _PendingRelease(left)
        self.leaving.setdefault(key, []).append(one)
        self._start_release_timer(key, one)

    def _start_release_timer(self, key: Key, one: _PendingRelease) -> None:
        one.timer = asyncio.get_running_loop().call_later(RELEASE_DELAY_S, self._on_release_timer, key, one)

    def _on_release_timer(self, key: Key, one: _PendingRelease) -> None:
        """Send a release whose delay has passed. Start another delay instead if the program has no home, or
        one of its requests waits."""
        one.times += 1
        # A program that lost its home with a replica may return to the replica that has its KV.
        is_homeless = self._events.home(*key) is None and one.times < MAX_RELEASE_ATTEMPTS
        if key in self._waiting or is_homeless:
            self._start_release_timer(key, one)
        else:
            self._send_release(key, one, None)

    def _send_pending_releases(self, key: Key, authorization: str | None) -> None:
        """Send a program's pending releases now, without waiting for their timers."""
        for one in list(self.leaving.get(key, ())):
            self._send_release(key, one, authorization)

    def _send_release(self, key: Key, one: _PendingRelease, authorization: str | None) -> None:
        """Send a release to the former replica. Do not send it if the program's home is this replica again,
        or another rank of the same engine."""
        self._drop(key, one)
        home_id = self._events.home(*key)
        if home_id == one.left.replica_id:
            return
        old, home = self._replicas.get(one.left.replica_id), self._replicas.get(home_id)
        if old is not None and home is not None and old.url == home.url:
            return  # all ranks of an engine get the same message
        self._events.release(one.left, authorization)

    def _cancel_release(self, key: Key, replica_id: str) -> None:
        """Cancel a program's pending release at a replica to which the program has returned."""
        for one in list(self.leaving.get(key, ())):
            if one.left.replica_id == replica_id:
                self._drop(key, one)

    def _drop(self, key: Key, one: _PendingRelease) -> None:
        if one.timer is not None:
            one.timer.cancel()
        every = self.leaving.get(key, [])
        if one in every:
            every.remove(one)
        if not every:
            self.leaving.pop(key, None)

    async def _persist_kv(self, key: Key, moved_from: str, authorization: str | None) -> bool:
        """Have a replica write a program's KV to the shared disk, and wait until it is written, at most
        ``worth_waiting_s``. Return True if no write is pending and at least half of the context is on the
        disk."""
        address = self._replicas.get(moved_from)
        if address is None:
            return False
        name = quote(self._events.names.engine_name(*key), safe="")
        url = f"{address.url}/sojourn/v1/programs/{name}/persist"
        began_s = self._clock()
        while True:
            stored = await self._ask(url, authorization)
            if stored is None or not stored.context_tokens:
                return False
            if not stored.pending_tokens:
                return stored.stored_tokens * 2 >= stored.context_tokens
            if self._clock() - began_s >= worth_waiting_s(stored):
                return False
            await asyncio.sleep(STORE_POLL_S)

    async def _ask(self, url: str, authorization: str | None) -> _StoredKv | None:
        """Call an engine's route ``persist``; ``None``: there is no usable answer."""
        answer = await ask_engine(
            self._session(), url, method="POST", authorization=authorization, timeout_s=MOST_WAIT_S
        )
        return read_stored_kv(answer.body) if answer is not None and answer.status == 200 else None
