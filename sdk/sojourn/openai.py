"""Patches OpenAI clients (``openai`` ≥ 1.40) and, for ``sojourn.anthropic``, those of Anthropic: LLM requests
to a host named in ``init()`` carry the id and hints of their program.

Both packages come from one generator and have the same base classes. Two methods of these are patched:
``request`` runs once per logical request, ``_build_request`` once per HTTP attempt. All requests of a package
pass through these methods: raw and streaming responses, ``parse``, ``stream``, Azure (which overrides
``_prepare_options``), LangChain, AutoGen. Not covered: the Responses *websocket* transport, and hosts that
need another path, as Bedrock and Vertex do.

The original method is called exactly once, and its exceptions pass unchanged. An error in our code is
counted, and the request goes out without our fields.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from . import runtime
from .config import LLM_PATHS, Config, Target, target_of
from .monkey_patches import Patches
from .outgoing_request import OutgoingRequest, under_way
from .program import find_context
from .request_warnings import warn_unlisted_host

_MAX_TARGETS = 256
_targets: dict[tuple[int, str], tuple[Any, Config, Target | None]] = {}
"""Cache, since parsing URLs is slow. Key: ``id()`` of a client's ``base_url`` object, and URL of a request.
Value: the same object, kept so that no other gets its ``id()``, the settings and the request's target."""
_swapped: dict[type, type] = {}


class ClientPackage:
    """The patches of one package, ``openai`` or ``anthropic``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._patches = Patches()

    def _base(self) -> Any:
        return import_module(f"{self._name}._base_client")

    def patch(self) -> bool:
        """Patch all clients, sync and async. Returns False, without changes, if the methods are missing."""
        base = self._base()
        places = {
            ("SyncAPIClient", "request"): _request,
            ("AsyncAPIClient", "request"): _async_request,
            ("BaseClient", "_build_request"): _build,
        }
        kinds = {kind: getattr(base, kind, None) for kind, _ in places}
        if not all(name in vars(kinds[kind] or object) for kind, name in places):
            return False
        for (kind, name), make in places.items():
            self._patches.put(kinds[kind], name, make)
        return True

    def unpatch(self) -> None:
        """Restore the original methods. If another library patched a method after us, its patch stays."""
        self._patches.undo()

    def wrap(self, client: Any) -> Any | None:
        """Patch only this client and return it. The client's class becomes a patched subclass. Returns
        ``None`` for an object that is not a client of the package."""
        kind = type(client)
        if kind in _swapped.values():
            return client
        base = self._base()
        if issubclass(kind, base.AsyncAPIClient):
            request: Callable[..., Any] = _async_request(kind.request)
        elif issubclass(kind, base.SyncAPIClient):
            request = _request(kind.request)
        else:
            return None
        if not callable(getattr(kind, "_build_request", None)):
            return None
        if kind not in _swapped:
            body = {"request": request, "_build_request": _build(kind._build_request)}
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            _swapped[kind] = type(kind.__name__, (kind,), {**body, **names})
        client.__class__ = _swapped[kind]
        return client


def _request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def request(self: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(self, options)
        if call is None:
            return original(self, cast_to, options, *args, **kwargs)
        with call:
            result = original(self, cast_to, options, *args, **kwargs)
        call.answered(result)
        return result

    return request


def _async_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def request(self: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(self, options)
        if call is None:
            return await original(self, cast_to, options, *args, **kwargs)
        with call:
            result = await original(self, cast_to, options, *args, **kwargs)
        call.answered(result)
        return result

    return request


def _begin(client: Any, options: Any) -> OutgoingRequest | None:
    session = runtime.live or runtime.session()
    try:
        outer, url = under_way.get(), options.url
        if outer is not None and outer.client is client:
            return None
        target = _llm_target(session, client, options)
        if target is None:
            return None
        path = url.partition("?")[0] if "?" in url else url
        return OutgoingRequest.begin(session, target, path, options.json_data, url, client)
    except Exception:
        session.counters.add("internal_error")
        return None


def _llm_target(session: runtime.Session, client: Any, options: Any) -> str | None:
    """Return the entry of ``Config.hosts`` for an LLM request to a server named in ``init``; ``None`` for all
    other requests."""
    config, url = session.config, options.url
    if config is None or session.event_sender is None or options.method.lower() != "post":
        return None
    base_url = client.base_url
    known = _targets.get((id(base_url), url))
    if known is None or known[0] is not base_url or known[1] is not config:
        # An absolute URL in the options goes to its own host, whatever the client's base_url is.
        is_llm = url.partition("?")[0].endswith(LLM_PATHS)
        known = base_url, config, target_of(config, str(client._prepare_url(url))) if is_llm else None
        if "://" not in url:
            if len(_targets) >= _MAX_TARGETS:
                _targets.clear()
            _targets[id(base_url), url] = known
    target = known[2]
    if target is None:
        return None
    if target.listed is None:
        warn_unlisted_host(session, find_context(session.counters)[0].program, target)
    return target.listed


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _build_request(self: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        """Add our fields to one HTTP attempt. The user's fields stay unchanged."""
        call = under_way.get()
        if call is None or call.client is not self:
            return original(self, options, *args, **kwargs)
        try:
            if call.prepared is not options:
                call.prepared, call.headers = options, {}
                url, target = call.bound_for
                # A hook of the user may have changed the URL.
                if options.url == url or (target := _llm_target(call.session, self, options) or ""):
                    call.headers = _add(call, target, self, options)
        except Exception:
            call.session.counters.add("inject_error")
        request = original(self, options, *args, **kwargs)
        # Set here, since a header in ``options`` would be encoded and compared three times.
        try:
            for name, value in call.headers.items():
                if name not in request.headers:  # the client's own default headers win too
                    request.headers[name] = value
        except Exception:
            call.session.counters.add("inject_error")
        return request

    return _build_request


def _add(call: OutgoingRequest, target: str, client: Any, options: Any) -> dict[str, str]:
    """Add our fields to the body in ``options``, and return the headers to add to the request."""
    headers = options.headers
    names = headers if hasattr(headers, "keys") else {}  # openai's ``NotGiven`` has none
    custom = getattr(client, "_custom_headers", None)
    if custom:
        names = {**names, **custom}
    data, extra = options.json_data, options.extra_json
    # Fields can be added to a JSON object or to an absent body, but not to bytes, lists and forms.
    has_place = (
        (type(data) is dict or data is None or isinstance(data, Mapping))
        and getattr(options, "content", None) is None
        and not getattr(options, "files", None)
    )
    # Written past pydantic's ``__setattr__``, whose four functions would only check the types again.
    fields = vars(options)
    if has_place and type(data) is dict and not extra:
        body, added = call.parts(target, data, names)
        if body:
            fields["json_data"] = {**data, **body}
    else:
        extra = dict(extra or {})
        body, added = call.parts(target, {**(data or {}), **extra} if has_place else None, names)
        if body:
            fields["extra_json"] = {**extra, **body}
    return added


_package = ClientPackage("openai")
patch, unpatch, wrap = _package.patch, _package.unpatch, _package.wrap
