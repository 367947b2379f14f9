"""Tracks one logical LLM request from its start to the end of its answer. A streamed answer ends at its last
byte, or when the client releases it."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from . import listener_registry, runtime
from .errors import status_of
from .listener_registry import notify_listeners
from .program import give_up_one_loop
from .token_usage import TokenUsage, of_answer, of_tail

if TYPE_CHECKING:
    from .program import Program
    from .stats import Counters

_DONE = b"\ndata: [DONE]"
_LAST = (_DONE, b"\nevent: response.completed")
"""Markers at the end of a stream. Clients close the stream after a marker, before the last byte. A marker
counts only at the start of a line; inside a line it is text of the answer."""
_TAIL_BYTES = 64
_READ_TAIL_BYTES = 16 * 1024
"""Number of last bytes kept if a listener wants the token counts. The counts are near the end of the last
event; in the Responses API that event repeats the whole answer before them."""


class LogicalRequest:
    """One LLM request with all its attempts. It counts attempts, time to first token and outcome in the SDK's
    counters. Until the request ends, it is in its program's ``open_requests``. No method raises."""

    __slots__ = (
        "__dict__", "__weakref__", "_counters", "_open", "attempts", "awaits_answer", "error",
        "host", "id", "model", "node", "path", "program", "started_s", "usage",
    )  # fmt: skip

    def __init__(
        self,
        counters: Counters,
        program: Program,
        id: str = "",
        node: str | None = None,
        *,
        model: str | None = None,
        host: str | None = None,
        path: str | None = None,
        session: runtime.Session | None = None,
    ) -> None:
        self.id = id
        """Id of the request, the same for every attempt."""
        self.program = program
        self.node = node
        """Node of the program's graph, as sent with the request."""
        self.model = model
        """Model name in the request's body, if any."""
        self.host = host
        """Target ``host:port``, if known."""
        self.path = path
        """Path of the request's URL, e.g. ``/chat/completions``."""
        self.usage: TokenUsage | None = None
        """Token counts of the answer. ``None`` if no listener has ``wants_usage``, or the answer has none."""
        self.error: str | None = None
        """Class name of the exception that ended the request; ``None`` if there was none."""
        self.attempts = 0
        self._counters = counters
        self.started_s = runtime.clock()
        """Monotonic time of the start, seconds."""
        self.awaits_answer = True
        """True until the first byte of the answer."""
        self._open = True
        program.open_requests.add(self)
        if len(program.open_requests) > 1:
            try:
                _check_overlapping_requests(program, self)
            except Exception:
                counters.add("internal_error")
        counters.of_thread[get_ident()]["requests_started"] += 1
        advisor = (session or runtime.session()).advisor
        if advisor is not None:
            try:
                advisor.request_begins(self)
            except Exception:
                counters.add("internal_error")
        if listener_registry.hears_turns:
            notify_listeners("request_started", self)

    def pause(self) -> None:
        """Remove the request from ``open_requests`` after a failed attempt, so that the program sends
        all its heartbeats until the next attempt puts the request back."""
        self.program.open_requests.discard(self)

    def got_bytes(self) -> None:
        """Record that bytes of the answer arrived. The first call marks the start of the answer. Later calls
        check whether requests outside ``program()`` overlap; such requests cannot be of one run."""
        if self.awaits_answer:
            self.awaits_answer = False
            self._counters.add("ttft_count")
            self._counters.add("ttft_ms_sum", round((runtime.clock() - self.started_s) * 1000))
            if listener_registry.hears_turns:
                notify_listeners("request_first_byte", self)
        elif len(self.program.open_requests) > 1:
            try:
                _check_overlapping_streams(self.program, self.started_s)
            except Exception:
                self._counters.add("internal_error")

    def end(self, how: str = "ended") -> None:
        """End the request. Only the first call counts. ``how``: ``ended`` (the answer is complete),
        ``failed``, ``cancelled``, ``closed_early`` (closed before the stream's end) or ``abandoned`` (the
        response was garbage-collected without being closed)."""
        if self._open:
            self._open = False
            program = self.program
            program.open_requests.discard(self)
            outcome = "requests_ended" if how == "ended" else f"requests_{how}"
            self._counters.of_thread[get_ident()][outcome] += 1
            trail = program.trail
            if trail is not None and trail.has_nodes:
                advisor = (runtime.live or runtime.session()).advisor
                if advisor is not None:
                    try:
                        advisor.request_over(trail, self.node)
                    except Exception:
                        self._counters.add("internal_error")
            if listener_registry.hears_turns:
                notify_listeners("request_ended", self, how)
            if program.ends_as is not None:
                program.end_if_deferred()

    def fail(self, error: BaseException) -> None:
        """End the request as ``cancelled`` or ``failed``, because of the exception ``error``."""
        self.error = type(error).__name__
        self.end("cancelled" if status_of(error) == "cancelled" else "failed")


def end_with_response(result: Any, request: LogicalRequest) -> None:
    """End ``request`` when the HTTP response in ``result`` ends, or now if the response was already read."""
    try:
        response = _open_response(result)
        if response is None:
            if listener_registry.usage_wanted:
                request.usage = of_answer(result)
            request.end()
        else:
            _watch_body(response, request)
    except Exception:
        request.end()
        runtime.session().counters.add("internal_error")


def _open_response(result: Any) -> Any:
    if hasattr(type(result), "construct"):
        return None  # a pydantic model: the answer was read, and further look-ups are slow
    for name in ("response", "http_response"):
        response: Any = getattr(result, name, None)
        if hasattr(response, "is_closed") and hasattr(response, "stream"):
            return None if response.is_closed else response
    return None


def _watch_body(response: Any, request: LogicalRequest) -> None:
    # Every reader of a response, raw or decoded, uses its byte stream, and every release closes it.
    stream = response.stream
    kinds = {kind.__name__: kind for kind in type(stream).__mro__}
    readable = bool(response.headers.get("content-encoding", "identity") == "identity")
    if "AsyncByteStream" in kinds:
        response.stream = _async_watch(kinds["AsyncByteStream"])(stream, _ResponseBytes(request, readable))
    elif "SyncByteStream" in kinds:
        response.stream = _sync_watch(kinds["SyncByteStream"])(stream, _ResponseBytes(request, readable))
    else:
        request.end()
        return
    # A response that is never closed ends when it is garbage-collected.
    weakref.finalize(response, request.end, "abandoned").atexit = False


class _ResponseBytes:
    """Watches the bytes of a response body for the end of the stream, and for token counts if a listener
    wants them."""

    def __init__(self, request: LogicalRequest, readable: bool) -> None:
        self._request = request
        self._tail = b"\n"
        self._complete = not readable  # compressed bytes do not show the end marker
        self._reads = readable and listener_registry.usage_wanted

    def saw(self, chunk: bytes) -> None:
        self._request.got_bytes()
        done = False
        if not self._complete:
            seen = self._tail[-_TAIL_BYTES:] + chunk
            self._complete = any(mark in seen for mark in _LAST)
            done = self._complete and _DONE in seen
            if not self._reads:
                self._tail = seen[-_TAIL_BYTES:]
        if self._reads:
            # The tail is decoded once, at the end.
            self._tail = (self._tail + chunk)[-_READ_TAIL_BYTES:]
        if done:
            self._finish("ended")  # litellm never closes; it stops reading here

    def over(self) -> None:
        self._complete = True
        self._finish("ended")

    def closed(self) -> None:
        self._finish("ended" if self._complete else "closed_early")

    def _finish(self, how: str) -> None:
        if self._reads:
            self._reads = False
            try:
                self._request.usage = of_tail(self._tail)
            except Exception:
                runtime.session().counters.add("internal_error")
            self._tail = b""
        self._request.end(how)

    def broke(self, error: BaseException) -> None:
        if status_of(error) == "cancelled" and type(error).__name__ == "GeneratorExit":
            return  # the reader stopped; close() follows
        self._request.fail(error)


_made: dict[type, type] = {}


def _sync_watch(base: type) -> type:
    """Return a subclass of the stream class ``base`` that reports the stream's bytes and end to a
    ``_ResponseBytes``. A subclass is needed because httpx and httpx2 each check for their own base class."""

    def __init__(self: Any, inner: Any, seen: _ResponseBytes) -> None:
        self._inner, self._seen = inner, seen

    def __iter__(self: Any) -> Any:
        try:
            for chunk in self._inner:
                self._seen.saw(chunk)
                yield chunk
        except BaseException as error:
            self._seen.broke(error)
            raise
        self._seen.over()

    def close(self: Any) -> None:
        try:
            self._inner.close()
        finally:
            self._seen.closed()

    if base not in _made:
        _made[base] = type(
            "WatchedStream", (base,), {"__init__": __init__, "__iter__": __iter__, "close": close}
        )
    return _made[base]


def _async_watch(base: type) -> type:
    def __init__(self: Any, inner: Any, seen: _ResponseBytes) -> None:
        self._inner, self._seen = inner, seen

    async def __aiter__(self: Any) -> Any:
        try:
            async for chunk in self._inner:
                self._seen.saw(chunk)
                yield chunk
        except BaseException as error:
            self._seen.broke(error)
            raise
        self._seen.over()

    async def aclose(self: Any) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._seen.closed()

    if base not in _made:
        body = {"__init__": __init__, "__aiter__": __aiter__, "aclose": aclose}
        _made[base] = type("WatchedAsyncStream", (base,), body)
    return _made[base]


def _check_overlapping_requests(program: Program, begun: object) -> None:
    """Stop counting the process as one run if another request of ``program`` waits for its answer when the
    request ``begun`` starts. ``process_program`` checks this too, but two threads may pass its check at the
    same moment."""
    session = runtime.session()
    if not session.one_loop or program is not session.program:
        return
    others = (other for other in tuple(program.open_requests) if other is not begun)
    if any(getattr(other, "awaits_answer", False) for other in others):
        give_up_one_loop(session)


def _check_overlapping_streams(program: Program, began_s: float) -> None:
    """Stop counting the process as one run if ``program`` has an open request that began after ``began_s``.

    Called when the agent reads further bytes of a stream. ``began_s``: start of the stream's request, in
    monotonic seconds. A newer open request then belongs to another agent loop, since one loop does not go
    back to an older stream."""
    session = runtime.session()
    if not session.one_loop or program is not session.program:
        return
    if any(getattr(other, "started_s", began_s) > began_s for other in tuple(program.open_requests)):
        give_up_one_loop(session)
