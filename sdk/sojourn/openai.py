"""OpenAI clients (``openai`` ≥ 1.40): every LLM request to a named host says whose turn it is.

Two methods of the client's base class are all it takes: ``request`` runs once for a
logical request, ``_prepare_options`` once for each HTTP attempt of it. Everything
else of the package ends there: raw and streaming responses, ``parse``, ``stream``,
Azure, LangChain, AutoGen. Not covered: the Responses *websocket* transport.

The user's code is called exactly once, outside our ``try``; whatever it raises
passes unchanged; a fault of ours ends in a counter and the request goes out bare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from . import runtime
from .config import canonical_host
from .request import Turn
from .streams import LogicalRequest, follow

PATHS = ("/chat/completions", "/completions", "/responses")
_MARK = "__sojourn_original__"
_METHODS = ("request", "_prepare_options")

_under_way: ContextVar[_Call | None] = ContextVar("sojourn_request", default=None)
_swapped: dict[type, type] = {}


class _Call:
    """A logical request between the two patched methods."""

    __slots__ = ("prepared", "request", "turn")

    def __init__(self, turn: Turn, request: LogicalRequest) -> None:
        self.turn = turn
        self.request = request
        self.prepared: Any = None
        """Options of the current attempt, so that two patched layers add to it once."""


def patch() -> bool:
    """Patch all clients, sync and async. False, and nothing changed, where the methods are not there."""
    from openai import _base_client

    kinds: list[Any] = [getattr(_base_client, name, None) for name in ("SyncAPIClient", "AsyncAPIClient")]
    if not all(kind is not None and all(method in vars(kind) for method in _METHODS) for kind in kinds):
        return False
    for kind in kinds:
        for name, wrapped in _methods(kind).items():
            if not hasattr(vars(kind)[name], _MARK):
                setattr(kind, name, wrapped)
    return True


def unpatch() -> None:
    """Put the package's own functions back, unless somebody patched on top of us."""
    from openai import _base_client

    for kind in (_base_client.SyncAPIClient, _base_client.AsyncAPIClient):
        for name in _METHODS:
            original = getattr(vars(kind)[name], _MARK, None)
            if original is not None:
                setattr(kind, name, original)


def wrap(client: Any) -> bool:
    """Patch this one object by giving it a subclass of its own class. False where it is no such client."""
    kind = type(client)
    if kind in _swapped.values():
        return True
    if not all(callable(getattr(kind, method, None)) for method in _METHODS):
        return False
    if kind not in _swapped:
        body = {**_methods(kind), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _swapped[kind] = type(kind.__name__, (kind,), body)
    client.__class__ = _swapped[kind]
    return True


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    request, prepare = kind.request, kind._prepare_options  # type: ignore[attr-defined]
    if any("async" in base.__name__.lower() for base in kind.__mro__):
        return {"request": _async_request(request), "_prepare_options": _async_prepare(prepare)}
    return {"request": _request(request), "_prepare_options": _prepare(prepare)}


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
            call.request.fail(error)
            raise
        finally:
            _leave(token)
        follow(result, call.request)
        return result

    setattr(request, _MARK, original)
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
            call.request.fail(error)
            raise
        finally:
            _leave(token)
        follow(result, call.request)
        return result

    setattr(request, _MARK, original)
    return request


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prepare_options(self: Any, options: Any) -> Any:
        options = original(self, options)
        _add(self, options)
        return options

    setattr(_prepare_options, _MARK, original)
    return _prepare_options


def _async_prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def _prepare_options(self: Any, options: Any) -> Any:
        options = await original(self, options)
        _add(self, options)
        return options

    setattr(_prepare_options, _MARK, original)
    return _prepare_options


def _begin(client: Any, options: Any) -> _Call | None:
    session = runtime.session()
    try:
        if _under_way.get() is not None or not _concerns_us(session, client, options):
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


def _concerns_us(session: runtime.Session, client: Any, options: Any) -> bool:
    if session.config is None or not session.online or options.method.lower() != "post":
        return False
    url = options.url.partition("?")[0]
    if not url.endswith(PATHS):
        return False
    # An absolute URL in the options goes to its own host, whatever the client's base_url is.
    target = client._prepare_url(options.url) if "://" in url else client.base_url
    port = target.port or (443 if target.scheme == "https" else 80)
    return canonical_host(target.host, port) in session.config.hosts


def _add(client: Any, options: Any) -> None:
    """Add our fields to one attempt. What the user set stays as it is."""
    session = runtime.session()
    try:
        call = _under_way.get()
        if call is None or call.prepared is options or not _concerns_us(session, client, options):
            return
        call.prepared = options
        call.request.attempt()
        theirs = dict(options.extra_json or {})
        given = theirs.get("vllm_xargs")
        if given is None and isinstance(options.json_data, dict):
            given = options.json_data.get("vllm_xargs")
        # A context of the user's own leaves no place for ours, and so for no events either.
        ours_fits = given is None or (isinstance(given, dict) and "agentic_context" not in given)
        body, headers = call.turn.parts(take=ours_fits)
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
