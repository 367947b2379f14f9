"""One logical LLM request from its start to its end, which for a stream is the last byte or the loss of
interest."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import observe, runtime
from .observe import tell
from .program import status_of
from .usage import Usage, of_answer, of_tail

if TYPE_CHECKING:
    from .program import Program
    from .stats import Counters

_DONE = b"\ndata: [DONE]"
_LAST = (_DONE, b"\nevent: response.completed")
"""Seen in a stream, they tell that nothing worth reading follows; clients close before the end of the
bytes. Only at the start of a line: inside one they are words of the answer."""
_TAIL_BYTES = 64
_READ_TAIL_BYTES = 16 * 1024
"""Kept instead where somebody wants the usage: it stands in the last event, which for Responses repeats the
whole answer, and behind it come only small fields."""


class LogicalRequest:
    """Counts a request and keeps its program's list of requests under way. No method raises."""

    __slots__ = (
        "__dict__", "__weakref__", "_counters", "_first_byte", "_open", "_started_s", "_token", "attempts",
        "error", "host", "id", "model", "node", "path", "program", "usage",
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
    ) -> None:
        self.id = id
        """The same for every attempt."""
        self.program = program
        self.node = node
        """Of the program's graph, as the request says it."""
        self.model = model
        """As the request names it."""
        self.host = host
        """``host:port`` it goes to, where known."""
        self.path = path
        """Of its URL, e.g. ``/chat/completions``."""
        self.usage: Usage | None = None
        """Tokens as the answer counts them; only read while a listener ``wants_usage``."""
        self.error: str | None = None
        """Name of the exception that ended it."""
        self.attempts = 0
        self._counters = counters
        self._started_s = runtime.clock()
        self._first_byte = True
        self._open = True
        token = self._token = object()
        program.open_requests.add(token)
        counters.add("requests_started")
        tell("request_started", self)

    def attempt(self) -> None:
        """One HTTP attempt goes out."""
        self.attempts += 1
        self._counters.add("request_attempts")
        if self._open:
            self.program.open_requests.add(self._token)

    def pause(self) -> None:
        """The attempt failed and another may follow: the server sees nothing of it, so its program has to be
        heard from."""
        self.program.open_requests.discard(self._token)

    def first_byte(self) -> None:
        """The answer began; only the first call counts."""
        if self._first_byte:
            self._first_byte = False
            self._counters.add("ttft_count")
            self._counters.add("ttft_ms_sum", round((runtime.clock() - self._started_s) * 1000))
            tell("request_first_byte", self)

    def end(self, how: str = "ended") -> None:
        """It is over: ``ended``, ``failed``, ``cancelled``, ``closed_early`` or ``abandoned``. Once only."""
        if self._open:
            self._open = False
            self.program.open_requests.discard(self._token)
            self._counters.add(f"requests_{how}")
            tell("request_ended", self, how)

    def fail(self, error: BaseException) -> None:
        """It raised."""
        self.error = type(error).__name__
        self.end("cancelled" if status_of(error) == "cancelled" else "failed")


def follow(result: Any, request: LogicalRequest) -> None:
    """End ``request`` when the response behind ``result`` is done; at once where it is already read."""
    try:
        response = _open_response(result)
        if response is None:
            if observe.usage_wanted:
                request.usage = of_answer(result)
            request.end()
        else:
            _watch(response, request)
    except Exception:
        request.end()
        runtime.session().counters.add("internal_error")


def _open_response(result: Any) -> Any:
    if hasattr(type(result), "construct"):
        return None  # a pydantic model: an answer that was read; asking it for more is slow
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
        self._tail = b"\n"
        self._complete = not readable  # compressed bytes do not show their last line
        self._reads = readable and observe.usage_wanted

    def saw(self, chunk: bytes) -> None:
        self._request.first_byte()
        done = False
        if not self._complete:
            seen = self._tail[-_TAIL_BYTES:] + chunk
            self._complete = any(mark in seen for mark in _LAST)
            done = self._complete and _DONE in seen
            if not self._reads:
                self._tail = seen[-_TAIL_BYTES:]
        if self._reads:
            # Only joined and cut: the tail is decoded once, at the end.
            self._tail = (self._tail + chunk)[-_READ_TAIL_BYTES:]
        if done:
            self._finish("ended")  # litellm never closes: it only stops reading here

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
