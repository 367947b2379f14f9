"""Watches an HTTP response until its answer ends: at the end of a stream, or when the client releases the
response."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from . import listeners, runtime
from .errors import status_of
from .token_usage import of_answer, of_tail

if TYPE_CHECKING:
    from .outgoing_request import LogicalRequest

_DONE = b"\ndata: [DONE]"
_LAST = (_DONE, b"\nevent: response.completed")
"""Markers at the end of a stream. Clients close the stream after a marker, before the last byte. A marker
counts only at the start of a line; inside a line it is text of the answer."""
_TAIL_BYTES = 64
_READ_TAIL_BYTES = 16 * 1024
"""Number of last bytes kept if a listener wants the token counts. The counts are near the end of the last
event. In the Responses API that event first repeats the whole answer."""


def end_with_response(result: Any, request: LogicalRequest) -> None:
    """End ``request`` when the HTTP response in ``result`` ends, or now if the response was already read."""
    try:
        response = _open_response(result)
        if response is None:
            if listeners.usage_wanted:
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
        self._reads = readable and listeners.usage_wanted

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


def _of_inner(self: Any, name: str) -> Any:
    """Return the attribute ``name`` of the watched stream. httpx2 reads an attribute of it for
    ``Response.elapsed``."""
    if name == "_inner":  # missing in a copy, before ``__init__``
        raise AttributeError(name)
    return getattr(self._inner, name)


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
        body = {"__init__": __init__, "__getattr__": _of_inner, "__iter__": __iter__, "close": close}
        _made[base] = type("WatchedStream", (base,), body)
    return _made[base]


def _async_watch(base: type) -> type:
    def __init__(self: Any, inner: Any, seen: _ResponseBytes) -> None:
        self._inner, self._seen = inner, seen

    async def __aiter__(self: Any) -> Any:
        inner = aiter(self._inner)
        try:
            async for chunk in inner:
                self._seen.saw(chunk)
                yield chunk
        except BaseException as error:
            self._seen.broke(error)
            raise
        finally:
            # Awaited, as httpx2 does it. Otherwise the loop closes it later, or not at all as it ends.
            if isinstance(inner, AsyncGenerator):
                await inner.aclose()
        self._seen.over()

    async def aclose(self: Any) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._seen.closed()

    if base not in _made:
        body = {"__init__": __init__, "__getattr__": _of_inner, "__aiter__": __aiter__, "aclose": aclose}
        _made[base] = type("WatchedAsyncStream", (base,), body)
    return _made[base]
