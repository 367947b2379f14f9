"""Sends live frames to viewers: the web page, ``sojourn top`` and scripts.

A frame is full, or a delta with only the programs that are active or have changed. ``LiveHub`` polls its
source only when a viewer asks. Frames do not queue up: a viewer that reads slowly gets a delta that reaches
further back. Pauses between polls bound the CPU that all viewers together cost (``BUSY_FACTOR``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ..metrics.live_frame import EngineRow, EngineSnapshot, LiveFrame, ProgramRow, merge_rows
from .api_errors import ApiError
from .engine_rpc import EngineError, EngineQueryLimiter, EngineRpc

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
MAX_INTERVAL_S = 10.0
BUSY_FACTOR = 200
"""The pause after a frame lasts at least this many times the CPU seconds that the frame took, here and in the
slowest engine. So deltas take at most 1/200 of a core, and the full frames of streams take at most as much.
``MAX_INTERVAL_S`` limits the pause, except the pause between two full frames of a stream."""
FULL_INTERVAL_S = 15.0
"""Minimum seconds between two full frames of a stream. A full frame lacks programs that have expired."""
MAX_VIEWERS = 8
"""Maximum number of open streams."""
SNAPSHOT_TIMEOUT_S = 30.0
"""Longest wait for an engine. A step with a long prompt on a CPU takes seconds."""
MAX_FAILURES = 3
"""Number of failed polls in a row after which the streams end. A viewer may connect again."""
SEND_TIMEOUT_S = 30.0
"""Seconds in which a viewer must read a frame. After that its connection is closed."""
MAX_DELTA_S = 86_400
"""Largest ``changed_within_s`` of a request for one frame."""
MAX_REMEMBERED = 20_000
"""Maximum number of programs whose last rows are remembered between two full frames."""
OVERLAP_S = 1.0
"""A delta covers the seconds since the stream's last frame, and this many more. Engines count the seconds
back from their answer, which comes some time after the poll begins."""

T = TypeVar("T")
_snapshots = msgspec.json.Decoder(EngineSnapshot)
_AT_REST = {"requests": 0, "running": False, "lease_blocks": 0, "lease_until_s": None, "lease_reason": None}
"""Fields of a row without requests and lease."""
_SHOWN = ("engine", "now_s", "policy", "error", "answer_s", "block_tokens", "block_bytes", "grants_leases")
"""Fields of ``EngineRow`` that are no totals over all tenants."""


class SourceFrame(NamedTuple):
    """Engines and programs of a source. ``total`` is the number of all programs of the engines that answered
    (a lower bound for data-parallel ranks). ``programs`` may have fewer, because engines limit their answers.
    """

    engines: list[EngineRow]
    programs: list[ProgramRow]
    total: int
    silent: frozenset[str] = frozenset()
    """Names of engines that get requests and did not answer. Their programs are missing in ``programs``."""


class LiveSource(Protocol):
    """Where a hub's frames come from: the engines of one server, or those of a gateway."""

    async def take(self, changed_within_s: float | None) -> SourceFrame:
        """Return the engines and programs. If ``changed_within_s`` is given, return only programs that
        changed within this many seconds or have a request or a lease. Raises ``EngineError`` or
        ``ApiError``."""
        ...


class Audience(NamedTuple):
    """What a viewer may see."""

    tenant: str | None = None
    """Only programs of this tenant; ``None`` for programs of all tenants."""
    pools: bool = True
    """Whether the engines' totals over all tenants are shown."""

    def filtered(self, frame: LiveFrame) -> LiveFrame:
        """Return the part of a frame that this audience may see."""
        if self.tenant is None and self.pools:
            return frame
        programs = [row for row in frame.programs if self.tenant in (None, row.tenant)]
        engines = frame.engines
        if not self.pools:
            engines = [EngineRow(**{name: getattr(one, name) for name in _SHOWN}) for one in engines]
        return msgspec.structs.replace(frame, programs=programs, engines=engines, total=len(programs))


class EngineLiveSource:
    """Live frames of the engines behind one API server."""

    def __init__(self, engine: EngineRpc, ask: EngineQueryLimiter) -> None:
        self._engine = engine
        self._ask = ask

    async def take(self, changed_within_s: float | None) -> SourceFrame:
        """Query all engines at once and merge their programs. ``changed_within_s``: only programs that are
        active or changed within this many seconds (see ``LiveSource.take``); ``None``: all programs."""
        payload = msgspec.json.encode({"changed_within_s": changed_within_s}).decode()
        started_s = time.monotonic()
        answers = await self._ask("snapshot", payload, SNAPSHOT_TIMEOUT_S)
        answer_s = round(time.monotonic() - started_s, 4)
        engines, rows, total = [], [], 0
        for name, answer in zip(self._engine.engine_ids(), answers, strict=True):
            snapshot = _snapshots.decode(answer)
            engines.append(msgspec.structs.replace(snapshot.engine, engine=name, answer_s=answer_s))
            named = snapshot.programs
            if name != snapshot.engine.engine:
                named = [msgspec.structs.replace(row, engine=name) for row in named]
            rows += named
            total = max(total, snapshot.total)
        if len(answers) > 1:
            rows = merge_rows(rows)
            total = max(total, len(rows))
        return SourceFrame(engines, rows, total)


class _Shared:
    """The newest full frame or delta, which viewers share, and the pause after it."""

    def __init__(self, pause_s: float) -> None:
        self.lock = asyncio.Lock()
        """Held during a poll: there is one at a time, and who waits for it gets its frame."""
        self.begun_s = self.ended_s = -math.inf
        self.since_s = math.inf
        """The frame covers the changes from here to ``begun_s``; a full frame has all programs."""
        self.busy_s = 0.0
        """CPU seconds that the frame took."""
        self.pause_s = pause_s
        self.error: Exception | None = None
        """Why the last poll failed; ``None``: it did not."""
        self.frame: LiveFrame | None = None
        self.body = b""
        """The frame as JSON, for those who see all of it."""


class LiveHub:
    """Polls one source when viewers ask for frames, and shares the frames among them. Each stream asks for
    what has changed since its own last frame, so a slow viewer misses nothing."""

    def __init__(
        self,
        source: LiveSource,
        *,
        gateway: bool = False,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._gateway = gateway
        self._interval_s = interval_s
        self._clock = clock
        self.viewers = 0
        """Number of open streams."""
        self._server: Any = None
        self._closed = asyncio.Event()
        self._seq = 0
        self._full, self._delta = _Shared(interval_s), _Shared(interval_s)
        self._last_rows: dict[tuple[str | None, str], ProgramRow] = {}
        """(Tenant, program) → the newest row that any frame had, since the last full frame."""

    async def once(self, audience: Audience, changed_within_s: float | None = None) -> Response:
        """Return a response with one frame: a full frame, or a delta if ``changed_within_s`` is given."""
        since_s = None if changed_within_s is None else self._clock() - changed_within_s
        body, _ = await self._frame(audience, since_s)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    def stream(self, audience: Audience, app_state: Any = None) -> Response:
        """Return a response with an endless stream of frames. Raises ``ApiError`` 429 if ``MAX_VIEWERS``
        streams are open.

        ``app_state``: the application's state. If it has Uvicorn's ``server``, the streams end when that
        server stops, because open streams would delay the stop."""
        self._server = getattr(app_state, "server", self._server)
        if self.viewers >= MAX_VIEWERS:
            raise ApiError(
                429,
                f"{MAX_VIEWERS} viewers are watching already",
                "close one, or poll the stream with ?once=1",
                {"Retry-After": "10"},
            )
        # Count the viewer before it asks for its first frame, since other viewers may come until then.
        self.viewers += 1
        return _BoundedStream(self._frames(audience), self._left)

    def close(self) -> None:
        """End all streams, and streams that open later too. For a server that stops."""
        self._closed.set()

    def _left(self) -> None:
        self.viewers -= 1

    async def _frames(self, audience: Audience) -> AsyncIterator[bytes]:
        """Yield frames. A full one comes first, and again after a while, since it lacks expired programs."""
        failures, full_s, since_s = 0, -math.inf, -math.inf
        while not (self._closed.is_set() or getattr(self._server, "should_exit", False)):
            now, full = self._clock(), self._full
            full_pause_s = max(FULL_INTERVAL_S, BUSY_FACTOR * full.busy_s * self.viewers)
            # A shared full frame must not be older than what the viewer has.
            is_old = full.begun_s < since_s and now - full.begun_s < full.pause_s
            is_full = now - full_s >= full_pause_s and not is_old
            asking = self._frame(audience, None if is_full else since_s - OVERLAP_S)
            try:
                if (found := await self._unless_closed(asking)) is not None:
                    body, since_s = found
                    failures, full_s = 0, since_s if is_full else full_s
                    yield b"data: " + body + b"\n\n"
            except (EngineError, ApiError) as error:
                failures += 1
                logger.debug("live frame failed: %s", error)
                if failures >= MAX_FAILURES:
                    return
            except Exception:
                logger.exception("the live stream failed")
                return
            await self._unless_closed(asyncio.sleep(self._delta.pause_s))

    async def _unless_closed(self, doing: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``doing``; ``None`` if ``close`` comes first."""
        task, closing = asyncio.ensure_future(doing), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            closing.cancel()

    async def _frame(self, audience: Audience, since_s: float | None) -> tuple[bytes, float]:
        """Return (a full frame, or for ``since_s`` a delta with all changes since then; the time up to which
        it covers changes). The frame may be one that was made for another viewer: by a poll that ended
        meanwhile, or that began at most ``interval_s`` ago for a delta, or within the pause after it for a
        full frame."""
        shared = self._full if since_s is None else self._delta
        asked_s = self._clock()
        async with shared.lock:
            max_age_s = shared.pause_s if since_s is None else self._interval_s
            is_recent = shared.ended_s >= asked_s or self._clock() - shared.begun_s < max_age_s
            covers = since_s is None or shared.since_s <= since_s
            if shared.error is not None and shared.ended_s >= asked_s:
                raise shared.error  # who waits in a row waits for one poll
            if shared.frame is None or not is_recent or not covers:
                await asyncio.sleep(max(0.0, shared.begun_s + shared.pause_s - self._clock()))
                shared.frame = shared.error = None
                now = shared.begun_s = self._clock()
                within_s = None if since_s is None else min(MAX_DELTA_S, round(now - since_s, 3))
                try:
                    found = await self._source.take(within_s)
                except Exception as error:
                    shared.error, shared.ended_s = error, self._clock()
                    raise
                busy_s = time.thread_time()
                rows = self._remember(found, is_full=since_s is None)
                self._seq += 1
                shared.frame = LiveFrame(
                    seq=self._seq,
                    full=since_s is None,
                    unix_s=round(time.time(), 3),
                    interval_s=self._delta.pause_s,
                    gateway=self._gateway,
                    engines=found.engines,
                    programs=rows,
                    total=found.total,
                )
                shared.body = msgspec.json.encode(shared.frame)
                slowest_s = max((engine.spent_s for engine in found.engines), default=0.0)
                shared.busy_s = time.thread_time() - busy_s + slowest_s
                shared.pause_s = min(MAX_INTERVAL_S, max(self._interval_s, BUSY_FACTOR * shared.busy_s))
                shared.since_s = math.inf if since_s is None else since_s
                shared.ended_s = self._clock()
            part = audience.filtered(shared.frame)
            return (shared.body if part is shared.frame else msgspec.json.encode(part)), shared.begun_s

    def _remember(self, found: SourceFrame, *, is_full: bool) -> list[ProgramRow]:
        """Remember the rows of a poll, and return those of its frame. A full frame also has the last rows of
        silent engines, which have not lost their programs."""
        rows = {(row.tenant, row.program_id): row for row in found.programs}
        if not is_full:
            self._last_rows |= rows
            while len(self._last_rows) > MAX_REMEMBERED:
                del self._last_rows[next(iter(self._last_rows))]
            return found.programs
        rows |= {
            at: msgspec.structs.replace(row, **_AT_REST)
            for at, row in self._last_rows.items()
            if row.engine in found.silent and at not in rows
        }
        self._last_rows = rows
        return list(rows.values())


class _BoundedStream(StreamingResponse):
    """A stream that ends if its client does not read."""

    def __init__(self, frames: AsyncIterator[bytes], left: Callable[[], object]) -> None:
        """``left`` is called when the stream is over, even if it never began."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()

    async def stream_response(self, send: Send) -> None:
        async def bounded(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_TIMEOUT_S)

        with contextlib.suppress(asyncio.TimeoutError):
            await super().stream_response(bounded)
