"""Sends live frames to viewers: the web page, ``sojourn top`` and scripts.

A frame is full, or a delta with only the programs that are active or have changed. ``LiveHub`` polls its
source only while somebody looks. Frames do not queue up: a viewer that reads slowly skips deltas and then
gets the newest full frame. Viewers that ask for single frames share a poll. Pauses bound the CPU that all
viewers together cost (``BUSY_FACTOR``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
slowest engine. So a stream's deltas take at most 1/200 of a core, and its full frames take at most as much.
``MAX_INTERVAL_S`` limits the pause, except the pause between two full frames of a stream."""
FULL_INTERVAL_S = 15.0
"""Minimum seconds between two polls of all programs for a stream. Such a poll also finds expired programs."""
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
OVERLAP_S = 1.0
"""A delta covers the seconds since the previous poll, and this many more. Engines count the seconds back from
their answer, which comes some time after the poll begins."""

_snapshots = msgspec.json.Decoder(EngineSnapshot)


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
            engines = [
                EngineRow(
                    engine=one.engine, now_s=one.now_s, policy=one.policy, error=one.error,
                    answer_s=one.answer_s, block_tokens=one.block_tokens, block_bytes=one.block_bytes,
                    grants_leases=one.grants_leases,
                )
                for one in engines
            ]  # fmt: skip
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


class _Single:
    """The newest frame for viewers that ask for single frames, and the pause after it."""

    def __init__(self, pause_s: float) -> None:
        self.lock = asyncio.Lock()
        """Held during a poll: there is one at a time, and who waits for it gets its frame."""
        self.begun_s = self.ended_s = -math.inf
        self.pause_s = pause_s
        self.frame: LiveFrame | None = None
        self.within_s = math.inf
        """Past seconds whose changes the frame covers; infinity for a full frame."""


class _Viewer:
    def __init__(self, audience: Audience) -> None:
        self.audience = audience
        self.ready = asyncio.Event()
        self.pending: LiveFrame | None = None
        self.behind = True
        """Whether the viewer needs a full frame, because the viewer is new or missed a delta."""

    def end(self) -> None:
        """End the viewer's stream."""
        self.pending = None
        self.ready.set()


class LiveHub:
    """Polls one source while there are viewers, and gives each viewer the latest frame."""

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
        self._viewers: set[_Viewer] = set()
        """The viewers of all open streams."""
        self._server: Any = None
        self._is_closed = False
        self._poller: asyncio.Task[None] | None = None
        self._rows: dict[tuple[str | None, str], ProgramRow] = {}
        self._active: set[tuple[str | None, str]] = set()
        """Programs that had a request or a lease in the newest frame."""
        self._engines: list[EngineRow] = []
        self._total = 0
        self._seq = 0
        self._pause_s = interval_s
        self._polled_s: float | None = None
        self._full_s: float | None = None
        self._full_pause_s = FULL_INTERVAL_S
        self._full, self._delta = _Single(interval_s), _Single(interval_s)

    @property
    def viewers(self) -> int:
        """Number of open streams."""
        return len(self._viewers)

    async def once(self, audience: Audience, changed_within_s: float | None = None) -> Response:
        """Return a response with one frame: a full frame, or a delta if ``changed_within_s`` is given. The
        frame may be one that was made for another viewer: by a poll that ended meanwhile, or that began at
        most ``interval_s`` ago for a delta, or within the pause after it for a full frame."""
        single = self._full if changed_within_s is None else self._delta
        within_s = math.inf if changed_within_s is None else changed_within_s
        asked_s = self._clock()
        async with single.lock:
            frame = single.frame
            max_age_s = self._interval_s if single is self._delta else single.pause_s
            is_recent = single.ended_s >= asked_s or self._clock() - single.begun_s < max_age_s
            if frame is None or not is_recent or within_s > single.within_s:
                await asyncio.sleep(max(0.0, single.begun_s + single.pause_s - self._clock()))
                single.begun_s, single.frame = self._clock(), None
                found = await self._source.take(changed_within_s)
                busy_s = time.thread_time()
                self._seq += 1
                frame = self._frame(changed_within_s is None, found.engines, found.programs, found.total)
                body = msgspec.json.encode(audience.filtered(frame))
                busy_s = time.thread_time() - busy_s + _spent_s(found.engines)
                single.frame, single.within_s, single.ended_s = frame, within_s, self._clock()
                single.pause_s = min(MAX_INTERVAL_S, max(self._interval_s, BUSY_FACTOR * busy_s))
            else:
                body = msgspec.json.encode(audience.filtered(frame))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    def stream(self, audience: Audience, app_state: Any = None) -> Response:
        """Return a response with an endless stream of frames. Raises ``ApiError`` 429 if ``MAX_VIEWERS``
        streams are open.

        ``app_state``: the application's state. If it has Uvicorn's ``server``, the streams end when that
        server stops, because open streams would delay the stop."""
        self._server = getattr(app_state, "server", self._server)
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(
                429,
                f"{MAX_VIEWERS} viewers are watching already",
                "close one, or poll the stream with ?once=1",
                {"Retry-After": "10"},
            )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        # Count the viewer before it asks for its first frame, since other viewers may come until then.
        viewer = _Viewer(audience)
        self._viewers.add(viewer)
        left = functools.partial(self._viewers.discard, viewer)
        return _BoundedStream(self._frames(viewer), left, headers)

    def close(self) -> None:
        """End all streams at once, and streams that open later too. For a server that stops."""
        self._is_closed = True
        if self._poller is not None:
            self._poller.cancel()
        for viewer in self._viewers:
            viewer.end()

    async def _frames(self, viewer: _Viewer) -> AsyncIterator[bytes]:
        if not self._is_closed and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll(), name="sojourn-live")
        try:
            while not self._is_closed:
                await viewer.ready.wait()
                viewer.ready.clear()
                frame, viewer.pending = viewer.pending, None
                if frame is None:
                    return
                if viewer.behind and not frame.full:
                    frame = self._frame(True, self._engines, list(self._rows.values()), self._total)
                viewer.behind = False
                yield b"data: " + msgspec.json.encode(viewer.audience.filtered(frame)) + b"\n\n"
        finally:
            self._viewers.discard(viewer)

    async def _poll(self) -> None:
        failures = 0
        while self._viewers and not getattr(self._server, "should_exit", False):
            try:
                frame = await self._next_frame()
                failures = 0
            except (EngineError, ApiError) as error:
                failures += 1
                logger.debug("live frame failed: %s", error)
                if failures >= MAX_FAILURES:
                    break
                await asyncio.sleep(self._pause_s)
                continue
            except Exception:
                logger.exception("the live stream failed")
                break
            for viewer in self._viewers:
                # The new frame replaces a frame that the viewer has not read. The viewer then lacks a delta,
                # and needs a full frame.
                viewer.behind = viewer.behind or viewer.pending is not None
                viewer.pending = frame
                viewer.ready.set()
            await asyncio.sleep(self._pause_s)
        self._rows, self._active = {}, set()
        self._polled_s = self._full_s = None
        for viewer in self._viewers:
            viewer.end()

    async def _next_frame(self) -> LiveFrame:
        now = self._clock()
        full = self._full_s is None or self._polled_s is None or now - self._full_s >= self._full_pause_s
        within_s = None if full or self._polled_s is None else now - self._polled_s + OVERLAP_S
        found = await self._source.take(within_s)
        busy = time.thread_time()
        self._polled_s = now
        self._seq += 1
        if full:
            self._full_s = now
            # A silent engine has not lost its programs, so the stream keeps their last known rows.
            self._rows = {key: row for key, row in self._rows.items() if row.engine in found.silent}
            self._active &= self._rows.keys()
        active = set()
        for row in found.programs:
            key = (row.tenant, row.program_id)
            self._rows[key] = row
            if row.requests or row.lease_blocks:
                active.add(key)
        for key in self._active - active:
            row = self._rows[key]
            if row.requests or row.lease_blocks:
                self._rows[key] = msgspec.structs.replace(
                    row, requests=0, running=False, lease_blocks=0, lease_until_s=None, lease_reason=None
                )
        self._active, self._engines, self._total = active, found.engines, found.total
        frame = self._frame(
            full, found.engines, [*self._rows.values()] if full else found.programs, found.total
        )
        busy_s = time.thread_time() - busy + _spent_s(found.engines)
        if full:
            self._full_pause_s = max(FULL_INTERVAL_S, BUSY_FACTOR * busy_s)
            self._pause_s = self._interval_s
        else:
            self._pause_s = min(MAX_INTERVAL_S, max(self._interval_s, BUSY_FACTOR * busy_s))
        return frame

    def _frame(
        self, full: bool, engines: Sequence[EngineRow], programs: Sequence[ProgramRow], total: int
    ) -> LiveFrame:
        return LiveFrame(
            seq=self._seq,
            full=full,
            unix_s=round(time.time(), 3),
            interval_s=self._pause_s,
            gateway=self._gateway,
            engines=list(engines),
            programs=list(programs),
            total=total,
        )


def _spent_s(engines: Sequence[EngineRow]) -> float:
    """Return the CPU seconds that a frame took in the slowest engine."""
    return max((engine.spent_s for engine in engines), default=0.0)


class _BoundedStream(StreamingResponse):
    """A stream that ends if its client does not read."""

    def __init__(
        self, frames: AsyncIterator[bytes], left: Callable[[], object], headers: dict[str, str]
    ) -> None:
        """``left`` is called when the stream is over, even if it never began."""
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
