"""One logical LLM request from its start to its end, which for a stream is the last byte or the loss of
interest."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import runtime
from .program import status_of

if TYPE_CHECKING:
    from .program import Program
    from .stats import Counters

_LAST = (b"data: [DONE]", b"event: response.completed")
"""Seen in a stream, they tell that nothing worth reading follows; clients close before the end of the
bytes."""
_TAIL_BYTES = 64


class LogicalRequest:
    """Counts a request and keeps its program's list of requests under way. No method raises."""

    def __init__(self, counters: Counters, program: Program) -> None:
        self._counters = counters
        self._program = program
        self._started_s = runtime.clock()
        self._first_byte = True
        self._open = True
        self._token = object()
        program.open_requests.add(self._token)
        counters.add("requests_started")

    def attempt(self) -> None:
        """One HTTP attempt goes out."""
        self._counters.add("request_attempts")

    def first_byte(self) -> None:
        """The answer began; only the first call counts."""
        if self._first_byte:
            self._first_byte = False
            self._counters.add("ttft_count")
            self._counters.add("ttft_ms_sum", round((runtime.clock() - self._started_s) * 1000))

    def end(self, how: str = "ended") -> None:
        """It is over: ``ended``, ``failed``, ``cancelled``, ``closed_early`` or ``abandoned``. Once only."""
        if self._open:
            self._open = False
            self._program.open_requests.discard(self._token)
            self._counters.add(f"requests_{how}")

    def fail(self, error: BaseException) -> None:
        """It raised."""
        self.end("cancelled" if status_of(error) == "cancelled" else "failed")


def follow(result: Any, request: LogicalRequest) -> None:
    """End ``request`` when the response behind ``result`` is done; at once where it is already read."""
    try:
        response = _open_response(result)
        if response is None:
            request.end()
        else:
            _watch(response, request)
    except Exception:
        request.end()
        runtime.session().counters.add("internal_error")


def _open_response(result: Any) -> Any:
    for name in ("response", "http_response"):
        response: Any = getattr(result, name, None)
        if hasattr(response, "is_closed") and hasattr(response, "stream"):
            return None if response.is_closed else response
    return None


def _watch(response: Any, request: LogicalRequest) -> None:
    # All readers of a response, raw or decoded, end at its byte stream; all ways to let go of it close that.
    stream = response.stream
    kinds = {kind.__name__: kind for kind in type(stream).__mro__}
    readable = bool(response.headers.get("content-encoding", "identity") == "identity")
    if "AsyncByteStream" in kinds:
        response.stream = _async_watch(kinds["AsyncByteStream"])(stream, _Bytes(request, readable))
    elif "SyncByteStream" in kinds:
        response.stream = _sync_watch(kinds["SyncByteStream"])(stream, _Bytes(request, readable))
    else:
        request.end()
        return
    # Never closed, only forgotten: the garbage collector is the last to know.
    weakref.finalize(response, request.end, "abandoned").atexit = False


class _Bytes:
    """What was seen of the body."""

    def __init__(self, request: LogicalRequest, readable: bool) -> None:
        self._request = request
        self._tail = b""
        self._complete = not readable  # compressed bytes do not show their last line

    def saw(self, chunk: bytes) -> None:
        self._request.first_byte()
        if not self._complete:
            seen = self._tail + chunk
            self._complete = any(mark in seen for mark in _LAST)
            self._tail = seen[-_TAIL_BYTES:]

    def over(self) -> None:
        self._complete = True
        self._request.end()

    def closed(self) -> None:
        self._request.end("ended" if self._complete else "closed_early")

    def broke(self, error: BaseException) -> None:
        if status_of(error) == "cancelled" and type(error).__name__ == "GeneratorExit":
            return  # the reader went away; close() follows
        self._request.fail(error)


_made: dict[type, type] = {}


def _sync_watch(base: type) -> type:
    """A byte stream of the HTTP library in use (httpx or httpx2), which checks for its own base class."""

    def __init__(self: Any, inner: Any, seen: _Bytes) -> None:
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
    def __init__(self: Any, inner: Any, seen: _Bytes) -> None:
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
