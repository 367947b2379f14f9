"""OpenAI clients (``openai`` ≥ 1.40): every LLM request to a named host says whose turn it is.

Two methods of the client's base classes are all it takes: ``request`` runs once for a
logical request, ``_build_request`` once for each HTTP attempt of it. Everything
else of the package ends there: raw and streaming responses, ``parse``, ``stream``,
Azure (whose ``_prepare_options`` never reaches the base class), LangChain, AutoGen.
Not covered: the Responses *websocket* transport.

The user's code is called exactly once, outside our ``try``; whatever it raises
passes unchanged; a fault of ours ends in a counter and the request goes out bare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from . import runtime
from .config import canonical_host
from .request import Turn
from .streams import LogicalRequest, follow

PATHS = ("/chat/completions", "/completions", "/responses")

_under_way: ContextVar[_Call | None] = ContextVar("sojourn_request", default=None)
_swapped: dict[type, type] = {}
_patched: dict[tuple[type, str], tuple[Any, Any]] = {}
"""Class and method → our function and theirs. Kept here: ``functools.wraps`` copies marks made on a function
to whatever a tracer puts on top of it."""


class _Call:
    """A logical request between the two patched methods."""

    __slots__ = ("at_home", "prepared", "request", "turn")

    def __init__(self, turn: Turn, request: LogicalRequest) -> None:
        self.turn = turn
        self.request = request
        self.prepared: Any = None
        """Options of the current attempt, so that two patched layers add to it once."""
        self.at_home = False
        """It goes to the server that takes the events."""

    def answered(self, result: Any) -> None:
        """The answer, or its head, is there. Never raises."""
        follow(result, self.request)
        emitter = self.turn.session.emitter
        if self.at_home and emitter is not None:
            emitter.server_answered()

    def fail(self, error: BaseException) -> None:
        """It raised. Never raises."""
        self.request.fail(error)
        self.turn.failed()


def patch() -> bool:
    """Patch all clients, sync and async. False, and nothing changed, where the methods are not there."""
    from openai import _base_client

    places = {
        ("SyncAPIClient", "request"): _request,
        ("AsyncAPIClient", "request"): _async_request,
        ("BaseClient", "_build_request"): _build,
    }
    kinds = {kind: getattr(_base_client, kind, None) for kind, _ in places}
    if not all(name in vars(kinds[kind] or object) for kind, name in places):
        return False
    for (kind, name), wrapped in places.items():
        owner: Any = kinds[kind]
        theirs = vars(owner)[name]
        ours, _ = _patched.get((owner, name), (None, None))
        if ours is None or all(function is not ours for function in _layers(theirs)):
            ours = wrapped(theirs)
            _patched[owner, name] = ours, theirs
            setattr(owner, name, ours)
    return True


def unpatch() -> None:
    """Put the package's own functions back, unless somebody patched on top of us."""
    for (kind, name), (ours, theirs) in list(_patched.items()):
        if vars(kind).get(name) is ours:
            setattr(kind, name, theirs)
            del _patched[kind, name]


def _layers(function: Any) -> Iterator[Any]:
    """``function`` and what it says it wraps."""
    for _ in range(100):
        yield function
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return


def wrap(client: Any) -> bool:
    """Patch this one object by giving it a subclass of its own class. False where it is no such client."""
    kind = type(client)
    if kind in _swapped.values():
        return True
    from openai import _base_client

    if issubclass(kind, _base_client.AsyncAPIClient):
        request: Callable[..., Any] = _async_request(kind.request)
    elif issubclass(kind, _base_client.SyncAPIClient):
        request = _request(kind.request)
    else:
        return False
    if not callable(getattr(kind, "_build_request", None)):
        return False
    if kind not in _swapped:
        body = {"request": request, "_build_request": _build(kind._build_request)}
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _swapped[kind] = type(kind.__name__, (kind,), {**body, **names})
    client.__class__ = _swapped[kind]
    return True


def _request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def request(self: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(self, options)
        if call is None:
            return original(self, cast_to, options, *args, **kwargs)
        token = _under_way.set(call)
        try:
            result = original(self, cast_to, options, *args, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            _leave(token)
        call.answered(result)
        return result

    return request


def _async_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def request(self: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(self, options)
        if call is None:
            return await original(self, cast_to, options, *args, **kwargs)
        token = _under_way.set(call)
        try:
            result = await original(self, cast_to, options, *args, **kwargs)
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            _leave(token)
        call.answered(result)
        return result

    return request


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _build_request(self: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        _add(self, options)
        return original(self, options, *args, **kwargs)

    return _build_request


def _begin(client: Any, options: Any) -> _Call | None:
    session = runtime.session()
    try:
        if _under_way.get() is not None or _target(session, client, options) is None:
            return None
        turn = Turn(session)
        return _Call(turn, LogicalRequest(session.counters, turn.program))
    except Exception:
        session.counters.add("internal_error")
        return None


def _leave(token: Any) -> None:
    try:
        _under_way.reset(token)
    except ValueError:
        runtime.session().counters.add("context_reset_failed")


def _target(session: runtime.Session, client: Any, options: Any) -> str | None:
    """``host:port`` of an LLM request that may be told about programs; ``None`` for all others."""
    if session.config is None or not session.online or options.method.lower() != "post":
        return None
    url = options.url.partition("?")[0]
    if not url.endswith(PATHS):
        return None
    # An absolute URL in the options goes to its own host, whatever the client's base_url is.
    target = client._prepare_url(options.url) if "://" in url else client.base_url
    port = target.port or (443 if target.scheme == "https" else 80)
    host = canonical_host(target.host, port)
    return host if host in session.config.hosts else None


def _has_place(options: Any) -> bool:
    """The body is a JSON object, or will be one: bytes, lists and forms are sent as they are."""
    if getattr(options, "content", None) is not None or getattr(options, "files", None):
        return False
    return options.json_data is None or isinstance(options.json_data, Mapping)


def _add(client: Any, options: Any) -> None:
    """Add our fields to one attempt. What the user set stays as it is."""
    call = _under_way.get()
    if call is None or call.prepared is options:
        return
    session = call.turn.session
    try:
        target = _target(session, client, options)
        if target is None or session.config is None:
            return
        call.prepared = options
        call.request.attempt()
        call.at_home = target == session.config.host
        has_place = _has_place(options)
        theirs = dict(options.extra_json or {}) if has_place else {}
        given = theirs.get("vllm_xargs")
        if given is None and has_place and options.json_data is not None:
            given = options.json_data.get("vllm_xargs")
        # A context of the user's own leaves no place for ours, and so for no events either.
        unsaid = given is None or (isinstance(given, dict) and "agentic_context" not in given)
        ours_fits = has_place and unsaid
        # Events go to the one server that takes them: a replica would not know their program's others.
        body, headers = call.turn.parts(take=ours_fits and call.at_home)
        if not has_place:
            body = {}
        for key, value in body.items():
            if key == "vllm_xargs":
                if ours_fits:
                    theirs[key] = {**value, **(given or {})}
            else:
                theirs.setdefault(key, value)
        if theirs:
            options.extra_json = theirs
        known = dict(options.headers) if isinstance(options.headers, dict) else {}
        always = getattr(client, "_custom_headers", None) or {}
        taken = {name.lower() for name in (*known, *always)}
        options.headers = {**{k: v for k, v in headers.items() if k.lower() not in taken}, **known}
    except Exception:
        session.counters.add("inject_error")
