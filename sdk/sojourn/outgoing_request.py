"""A logical LLM request that a client sends, and the fields and headers added to each attempt.

Every patch of an LLM client uses this module. The user's own fields always win: if the request already names
a program, nothing is added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from . import listener_registry, runtime
from .logical_request import LogicalRequest, end_with_response
from .request import Parts, Turn, body_additions
from .request_warnings import note_outside_program

LLM_PATHS = ("/chat/completions", "/completions", "/responses")
"""Suffixes of the URLs of LLM requests."""


class OutgoingRequest:
    """One logical request, from the client's call to its answer or its last failure."""

    __slots__ = ("_around", "_busy", "at_home", "bound_for", "is_outside", "prepared", "request", "turn")

    def __init__(self, turn: Turn, request: LogicalRequest, around: RetryScope | None) -> None:
        self.turn = turn
        self.request = request
        self.prepared: Any = None
        """The client's own object for the last attempt to which our fields were added. Only the patch of the
        ``openai`` client uses it."""
        self.bound_for: tuple[str, str | None] = ("", None)
        """URL of the request, and its server's ``host:port``. Only the patch of the ``openai`` client uses
        it."""
        self.at_home = False
        """True if the last attempt went to the server that receives the events."""
        self.is_outside = False
        """True if the last attempt went to a sojourn server as a request of no program."""
        self._around = around
        self._busy = True

    @classmethod
    def begin(cls, session: runtime.Session, host: str, path: str, body: object) -> OutgoingRequest:
        """Return a new request of the current program. For a retry inside a ``RetryScope``, return the
        earlier request instead."""
        turn = Turn(session)
        around = _around.get()
        if around is not None:
            if around.over:
                around = None
            else:
                last = around.open
                # A request that runs at the same time, or in another program, is not a retry.
                if last is not None and not last._busy and last._is_of(session, turn):
                    last._busy = True
                    return last
        model = body.get("model") if type(body) is dict or isinstance(body, Mapping) else None
        request = LogicalRequest(
            session.counters,
            turn.program,
            turn.id,
            turn.node,
            model=model if isinstance(model, str) else None,
            host=host,
            path=path,
        )
        outgoing = cls(turn, request, around)
        if around is not None and (around.open is None or not around.open._busy):
            around.give_up()
            around.open = outgoing
        return outgoing

    def parts(self, host: str, theirs: Mapping[str, Any] | None, header_names: Collection[str]) -> Parts:
        """Return the body fields and headers to add to one attempt at ``host``.

        ``theirs`` is the user's body, ``None`` if it is not a JSON object. If a returned field is also in
        ``theirs``, the returned value includes the user's value. ``header_names`` are the headers that the
        user set; they are compared in any letter case, and none of them is returned.
        """
        turn = self.turn
        config, server = turn.session.config, turn.session.server
        self.request.attempt()
        assert config is not None
        assert server is not None
        at_home = self.at_home = host == config.host
        fits = theirs is not None
        given = None if theirs is None else theirs.get("vllm_xargs")
        if given is not None:
            if isinstance(given, Mapping) and "agentic_context" in given:
                return {}, {}  # the user names the program; our header would name another one
            fits = isinstance(given, dict)
        # Events go to one server only: a replica would lack the program's other events.
        body, headers = turn.parts(take=fits and at_home)
        if theirs is None or (server.dialect.yields_to and turn.yields_to(theirs)):
            body = {}
        elif body and not theirs.keys().isdisjoint(body):
            body = body_additions(body, theirs)
        self.is_outside = turn.program.implicit and bool(body) and server.dialect.name == "sojourn"
        if header_names:
            taken = {name.lower() for name in header_names}
            headers = {name: value for name, value in headers.items() if name.lower() not in taken}
        return body, headers

    def answered(self, result: Any) -> None:
        """Record the answer. For a stream, this is called when the answer starts. Never raises."""
        if self._around is not None and self._around.open is self:
            self._around.open = None
        if hasattr(type(result), "construct") and not listener_registry.usage_wanted:
            self.request.end()  # a pydantic model, which was read; more attribute look-ups are slow
        else:
            end_with_response(result, self.request)
        if self.is_outside:
            note_outside_program(self.turn.session)
        if self.at_home:
            emitter = self.turn.session.emitter
            if emitter is not None and emitter.backing_off:
                emitter.server_answered()

    def fail(self, error: BaseException) -> None:
        """Record that an attempt failed with ``error``. Inside a ``RetryScope`` the request stays open for a
        retry; otherwise it ends. Never raises."""
        self.turn.failed()
        self._busy = False
        if self._around is None or self._around.open is not self:
            self.request.fail(error)
        else:
            self.request.pause()

    def _is_of(self, session: runtime.Session, turn: Turn) -> bool:
        return self.turn.session is session and self.turn.program is turn.program


class RetryScope:
    """A ``with`` block around a call that retries. All attempts inside count as one logical request. After an
    attempt is answered, the next one begins a new request. A nested scope does nothing. Never raises."""

    __slots__ = ("_token", "open", "over")

    def __init__(self) -> None:
        self.over = False
        """True after the block. Needed because tasks started inside still have the scope in their context."""
        self.open: OutgoingRequest | None = None
        """The logical request without an answer so far. The next attempt may belong to it."""
        self._token: Token[RetryScope | None] | None = None

    def __enter__(self) -> RetryScope:
        if _current() is None:
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
            self.give_up(error)

    def give_up(self, error: BaseException | None = None) -> None:
        """End the request ``open`` as failed, because no further attempt follows. A request with an attempt
        in progress is left alone: it reports its own end."""
        outgoing, self.open = self.open, None
        if outgoing is None or outgoing._busy:
            return  # a request in progress reports its own end
        if error is not None:
            outgoing.request.fail(error)
        else:
            outgoing.request.end("failed")


_around: ContextVar[RetryScope | None] = ContextVar("sojourn_one_request", default=None)


def _current() -> RetryScope | None:
    around = _around.get()
    return None if around is None or around.over else around
