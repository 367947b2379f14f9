"""A logical LLM request, from its start to the end of its answer, and the fields and headers of each attempt.

Every patch of an LLM client uses this module. A request ends when its HTTP answer ends or is released. The
user's own fields always win: if the request already names a program, nothing is added.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextvars import ContextVar, Token
from functools import cache
from operator import methodcaller
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import runtime, valid_ids_and_names
from .errors import status_of
from .program import stop_counting_as_one_run
from .request import Parts, RequestContext, body_additions, place_of_request
from .request_warnings import warn_outside_program
from .token_usage import of_answer, of_tail

if TYPE_CHECKING:
    from .program import Program
    from .stats import Counters
    from .token_usage import TokenUsage

_lower = methodcaller("lower")
_DONE = b"\ndata: [DONE]"
_LAST = (_DONE, b"\nevent: response.completed", b"\nevent: message_stop")
"""Markers at the end of a stream. Clients close the stream after a marker, before the last byte. A marker
counts only at the start of a line; inside a line it is text of the answer."""
_TAIL_BYTES = 64
under_way: ContextVar[OutgoingRequest | None] = ContextVar("sojourn_request", default=None)
"""The request whose attempt runs in this code. A call by the client that sends it
(``OutgoingRequest.client``) is part of that request. A call by another client, for example in a hook, is a
request of its own. So is a call in a task that outlives the request; ``client`` is then ``None``."""
_READ_TAIL_BYTES = 16 * 1024
"""Number of last bytes kept if a listener wants the token counts. The counts are near the end of the last
event. In the Responses API that event first repeats the whole answer."""


class LogicalRequest:
    """One LLM request with all its attempts. It counts attempts, time to first token and outcome in the SDK's
    counters. Until it ends, it is in its program's ``open_requests``. No method raises."""

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
        """Token counts of the answer. ``None`` if no listener has ``wants_usage``, or if the answer holds no
        counts."""
        self.error: str | None = None
        """Class name of the exception that ended the request; ``None`` if there was none."""
        self.attempts = 0
        self._counters = counters
        self.started_s = runtime.clock()
        """When the request started, in monotonic seconds."""
        self.awaits_answer = True
        """True until the first byte of the answer."""
        self._open = True
        program.open_requests.add(self)
        program.is_used = True
        if len(program.open_requests) > 1:
            # ``process_program`` checks this too, but two threads may pass that check at the same moment.
            _check_overlap(program, lambda other: other is not self and other.awaits_answer, counters)
        counters.of_thread[get_ident()]["requests_started"] += 1
        if runtime.hears_turns:
            runtime.notify_listeners("request_started", self)

    def pause(self) -> None:
        """Remove the request from ``open_requests`` after a failed attempt. The next attempt puts it back.
        While a program has no open request, every due heartbeat is sent (see ``Heartbeats.take_due``)."""
        self.program.open_requests.discard(self)

    def got_bytes(self) -> None:
        """Record that bytes of the answer arrived. The first call marks the start of the answer. Later calls
        check for a newer open request outside of ``program()``. If there is one, the process no longer counts
        as one run (``Session.counts_as_one_run``)."""
        if self.awaits_answer:
            self.awaits_answer = False
            self._counters.add("ttft_count")
            self._counters.add("ttft_ms_sum", round((runtime.clock() - self.started_s) * 1000))
            if runtime.hears_turns:
                runtime.notify_listeners("request_first_byte", self)
        elif len(self.program.open_requests) > 1:
            # One agent loop does not go back to an older stream, so a newer open request is of another loop.
            _check_overlap(self.program, lambda other: other.started_s > self.started_s, self._counters)

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
            if runtime.hears_turns:
                runtime.notify_listeners("request_ended", self, how)
            if program.ends_as is not None:
                program.end_if_deferred()

    def fail(self, error: BaseException) -> None:
        """End the request as ``cancelled`` or ``failed``, because of the exception ``error``."""
        self.error = type(error).__name__
        self.end("cancelled" if status_of(error) == "cancelled" else "failed")


def _check_overlap(program: Program, is_other_run: Callable[[Any], bool], counters: Counters) -> None:
    """Stop counting the process as one run if ``is_other_run`` is true for an open request of ``program``."""
    try:
        session = runtime.session()
        if not session.counts_as_one_run or program is not session.program:
            return
        if any(map(is_other_run, tuple(program.open_requests))):
            stop_counting_as_one_run(session)
    except Exception:
        counters.add("internal_error")


class OutgoingRequest(LogicalRequest, RequestContext):
    """A logical request of a patched client, from the client's call to its answer or its last failure. As a
    ``with`` block, it is one attempt: ``under_way`` inside the block, and failed if the block raises.

    ``begin`` and ``parts`` are long on purpose. While the agent waits for the model, the CPU's caches are
    filled with other data. The first call of each small function would then take microseconds.
    """

    __slots__ = (
        "_around", "_busy", "_emitter", "_step", "_steps_left", "_taken", "_token", "bound_for", "client",
        "headers", "is_outside", "prepared", "session", "to_event_server",
    )  # fmt: skip

    client: Any
    """The client object that sends the request; ``None`` once the attempt has ended. A task started during
    the request may outlive it with the request in its context. Calls by such a task are new requests."""
    prepared: Any
    """The ``options`` object to which our body fields were added last. A new attempt has a new object. Only
    ``sojourn.openai`` uses it."""
    headers: dict[str, str]
    """The headers to add to the last attempt. Only ``sojourn.openai`` uses them."""
    bound_for: tuple[str, str]
    """URL of the request, and its server's entry of ``Config.hosts``. Only ``sojourn.openai`` uses it."""
    to_event_server: bool
    """True if the last attempt went to the server that receives the events."""
    is_outside: bool
    """True if the last attempt went out as a request of no program."""
    _around: RetryScope | None
    _busy: bool
    """True while an attempt is in progress."""

    @classmethod
    def begin(
        cls,
        session: runtime.Session,
        target: str,
        path: str,
        body: object,
        url: str = "",
        client: object = None,
    ) -> OutgoingRequest:
        """Return a new request of the current program. For a retry inside a ``RetryScope``, return the
        earlier request instead. ``target``: the server's entry of ``Config.hosts``. ``body``: the user's
        body, read for the model's name only. ``url`` and ``target`` are stored in ``bound_for``."""
        program, step, node = place_of_request(session)
        session.has_turns = True
        around = _around.get()
        if around is not None:
            if around.over:
                around = None
            else:
                last = around.open
                # A request that runs at the same time, or in another program, is not a retry.
                if (
                    last is not None
                    and not last._busy
                    and last.session is session
                    and last.program is program
                ):
                    last._busy = True
                    last.client = client
                    last.bound_for = url, target
                    return last
        model = body.get("model") if type(body) is dict or isinstance(body, Mapping) else None
        request = cls(
            session.counters,
            program,
            next(valid_ids_and_names.request_ids),
            node,
            model=model if isinstance(model, str) else None,
            host=target if "/" not in target else target.partition("/")[0],
            path=path,
        )
        request.session = session
        request.client = client
        request._step = step
        request._steps_left = None if program.steps_left is None else program.count_turn()
        request._taken = []
        request._emitter = None
        request.prepared, request.headers = None, {}
        request.bound_for = url, target
        request.to_event_server = request.is_outside = False
        request._around = around
        request._busy = True
        if around is not None and (around.open is None or not around.open._busy):
            if around.open is not None:
                around.give_up()
            around.open = request
        return request

    def parts(self, target: str, theirs: Mapping[str, Any] | None, header_names: Collection[str]) -> Parts:
        """Count an attempt at ``target``, and return the body fields and headers to add to it.

        ``target`` is the server's entry of ``Config.hosts``. ``theirs`` is the user's body, ``None`` if it is
        not a JSON object. If a returned field is also in ``theirs``, the returned value includes the user's
        value. ``header_names`` are the headers that the user set. None of these headers is returned, in any
        letter case.
        """
        config, server = self.session.config, self.session.server
        self.attempts += 1
        self._counters.of_thread[get_ident()]["request_attempts"] += 1
        if self._open:
            self.program.open_requests.add(self)  # ``pause`` removes the request
        assert config is not None
        assert server is not None
        to_event_server = self.to_event_server = target == config.event_server
        fits = theirs is not None
        given = None if theirs is None else theirs.get("vllm_xargs")
        if given is not None:
            if isinstance(given, Mapping) and "agentic_context" in given:
                return {}, {}  # the user names the program; our header would name another one
            fits = isinstance(given, dict)
        # Events go to one server only: a replica would lack the program's other events.
        body, headers = self.context_parts(take=fits and to_event_server)
        if theirs is None or any(theirs.get(name) is not None for name in server.dialect.yields_to):
            body = {}
        elif self.path == "/v1/messages" and not server.dialect.carries_events:
            body = {}  # of Anthropic's API it is unknown which fields these servers refuse
        elif body and not theirs.keys().isdisjoint(body):
            body = body_additions(body, theirs)
        self.is_outside = self.program.implicit and bool(body or headers)
        if header_names:
            taken = set(map(_lower, header_names))
            if not taken.isdisjoint(map(_lower, headers)):
                headers = {name: value for name, value in headers.items() if name.lower() not in taken}
        return body, headers

    def __enter__(self) -> None:
        self._token = under_way.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.attempt_failed(error)
        try:
            under_way.reset(self._token)
        except ValueError:  # another context finalises the call
            self._counters.add("context_reset_failed")

    def answered(self, result: Any) -> None:
        """Record the answer. For a stream, this is called when the answer starts. Never raises."""
        if self._around is not None and self._around.open is self:
            self._around.open = None
        # Listeners and open streams may hold the request for long, so the request must not hold the prompt.
        self.client, self.prepared, self._taken = None, None, []
        if hasattr(type(result), "construct") and not runtime.usage_wanted:
            self.end()  # a pydantic model: the answer was read, and more attribute look-ups are slow
        else:
            end_with_response(result, self)
        try:
            if self.is_outside:
                warn_outside_program(self.session)
            if self.to_event_server:
                sender = self.session.event_sender
                if sender is not None and sender.backing_off:
                    sender.server_answered()
        except Exception:  # a listener may have replaced an attribute
            self._counters.add("internal_error")

    def attempt_failed(self, error: BaseException) -> None:
        """Record that an attempt failed with ``error``. Inside a ``RetryScope`` the request stays open for a
        retry; otherwise it ends. Never raises."""
        self.return_events()
        self._busy, self.client = False, None
        if self._around is None or self._around.open is not self:
            self.prepared = None
            self.fail(error)
        else:
            self.pause()


class RetryScope:
    """A ``with`` block around a call that retries. The attempts inside, up to the first one that is answered,
    count as one logical request. A later attempt begins a new request. A nested scope does nothing. Never
    raises."""

    __slots__ = ("_token", "open", "over")

    def __init__(self) -> None:
        self.over = False
        """True after the block. Needed because tasks started inside still have the scope in their context."""
        self.open: OutgoingRequest | None = None
        """The logical request that has no answer yet, if any. The next attempt is a retry of it, unless the
        attempt has another program or session, or an attempt of this request is still in progress."""
        self._token: Token[RetryScope | None] | None = None

    def __enter__(self) -> RetryScope:
        around = _around.get()
        if around is None or around.over:
            self._token = _around.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            try:
                _around.reset(token)
            except ValueError:
                runtime.session().counters.add("context_reset_failed")
            self.over = True
            if self.open is not None:
                self.give_up(error)

    def give_up(self, error: BaseException | None = None) -> None:
        """End the open request, because no further attempt follows, and clear ``self.open``. The request ends
        as ``failed``, or as ``cancelled`` if ``error`` is a cancellation. If an attempt is in progress, the
        request ends when that attempt does."""
        outgoing, self.open = self.open, None
        if outgoing is None or outgoing._busy:
            return  # a request in progress reports its own end
        if error is not None:
            outgoing.fail(error)
        else:
            outgoing.end("failed")


_around: ContextVar[RetryScope | None] = ContextVar("sojourn_one_request", default=None)


def end_with_response(result: Any, request: LogicalRequest) -> None:
    """End ``request`` when the HTTP response in ``result`` ends, or now if the response was already read."""
    try:
        response = _open_response(result)
        if response is None:
            if runtime.usage_wanted:
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
    base = next((kind for kind in type(stream).__mro__ if kind.__name__ in _WATCHES), None)
    if base is None:
        request.end()
        return
    readable = bool(response.headers.get("content-encoding", "identity") == "identity")
    response.stream = _watch(base)(stream, _ResponseBytes(request, readable))
    # A response that is never closed ends when it is garbage-collected.
    weakref.finalize(response, request.end, "abandoned").atexit = False


class _ResponseBytes:
    """Watches the bytes of a response body for the end of the stream, and for token counts if a listener
    wants them."""

    def __init__(self, request: LogicalRequest, readable: bool) -> None:
        self._request = request
        self._tail = b"\n"
        self._complete = not readable  # compressed bytes do not show the end marker
        self._reads = readable and runtime.usage_wanted

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


def _init(self: Any, inner: Any, seen: _ResponseBytes) -> None:
    self._inner, self._seen = inner, seen


def _of_inner(self: Any, name: str) -> Any:
    """Return the attribute ``name`` of the watched stream. httpx2 reads an attribute of it for
    ``Response.elapsed``."""
    if name == "_inner":  # missing in a copy, before ``__init__``
        raise AttributeError(name)
    return getattr(self._inner, name)


def _iter(self: Any) -> Any:
    try:
        for chunk in self._inner:
            self._seen.saw(chunk)
            yield chunk
    except BaseException as error:
        self._seen.broke(error)
        raise
    self._seen.over()


async def _aiter(self: Any) -> Any:
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


def _close(self: Any) -> None:
    try:
        self._inner.close()
    finally:
        self._seen.closed()


async def _aclose(self: Any) -> None:
    try:
        await self._inner.aclose()
    finally:
        self._seen.closed()


_WATCHES: dict[str, dict[str, Any]] = {
    "AsyncByteStream": {"__aiter__": _aiter, "aclose": _aclose},
    "SyncByteStream": {"__iter__": _iter, "close": _close},
}


@cache
def _watch(base: type) -> type:
    """Return a subclass of the stream class ``base`` that reports the stream's bytes and end to a
    ``_ResponseBytes``. A subclass is needed because httpx and httpx2 each check for their own base class."""
    body = {"__init__": _init, "__getattr__": _of_inner, **_WATCHES[base.__name__]}
    return type("WatchedStream", (base,), body)
