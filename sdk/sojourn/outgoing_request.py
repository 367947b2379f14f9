"""A logical LLM request that a client sends, and the fields and headers added to each attempt.

Every patch of an LLM client uses this module. The user's own fields always win: if the request already names
a program, nothing is added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextvars import ContextVar, Token
from operator import methodcaller
from threading import get_ident
from types import TracebackType
from typing import Any

from . import listener_registry, runtime, valid_ids_and_names
from .process_program import process_program
from .program import current_context, find_context, resolvers
from .request import Parts, RequestContext, body_additions
from .request_tracker import LogicalRequest
from .request_warnings import warn_outside_program
from .response_watcher import end_with_response

_lower = methodcaller("lower")


class OutgoingRequest(LogicalRequest, RequestContext):
    """A logical request of a patched client, from the client's call to its answer or its last failure.

    ``begin`` and ``parts`` are long on purpose. While the agent waits for the model, the CPU's caches are
    filled with other data. The first call of each small function would then take microseconds.
    """

    __slots__ = (
        "_around", "_busy", "_emitter", "_step", "_taken", "bound_for", "client", "headers", "is_outside",
        "prepared", "session", "to_event_server",
    )  # fmt: skip

    client: Any
    """The client object that sends the request; ``None`` once the attempt has ended. A task started during
    the request may outlive it with the request in its context. Calls by such a task are new requests."""
    prepared: Any
    """The ``options`` object to which our body fields were added last. A new attempt has a new object. Only
    the patch of the ``openai`` client uses it."""
    headers: dict[str, str]
    """The headers to add to the last attempt. Only the patch of the ``openai`` client uses them."""
    bound_for: tuple[str, str]
    """URL of the request, and its server's entry of ``Config.hosts``. Only the patch of the ``openai`` client
    uses it."""
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
        here, node = current_context.get(), None
        program = here.program
        if program is None or program.has_ended or resolvers:
            here, node = find_context(session.counters)
            program = here.program
            if program is None:
                program = process_program(session, asks=True)
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
        step = here.step
        model = body.get("model") if type(body) is dict or isinstance(body, Mapping) else None
        request = cls(
            session.counters,
            program,
            next(valid_ids_and_names.request_ids),
            (None if step is None else step.node) or node or program.node,
            model=model if isinstance(model, str) else None,
            host=target if "/" not in target else target.partition("/")[0],
            path=path,
            session=session,
        )
        request.session = session
        request.client = client
        request._step = step
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
        if theirs is None or (server.dialect.yields_to and self.yields_to(theirs)):
            body = {}
        elif body and not theirs.keys().isdisjoint(body):
            body = body_additions(body, theirs)
        self.is_outside = self.program.implicit and bool(body or headers)
        if header_names:
            taken = set(map(_lower, header_names))
            if not taken.isdisjoint(map(_lower, headers)):
                headers = {name: value for name, value in headers.items() if name.lower() not in taken}
        return body, headers

    def answered(self, result: Any) -> None:
        """Record the answer. For a stream, this is called when the answer starts. Never raises."""
        if self._around is not None and self._around.open is self:
            self._around.open = None
        # Listeners and open streams may hold the request for long, so the request must not hold the prompt.
        self.client, self.prepared, self._taken = None, None, []
        if hasattr(type(result), "construct") and not listener_registry.usage_wanted:
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
