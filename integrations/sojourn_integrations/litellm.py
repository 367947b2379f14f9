"""Patches the method ``post`` of litellm's two HTTP classes, which send all requests that bypass the
``openai`` package (``hosted_vllm/``, litellm's Responses API and others).

At this level the URL names the server that is really used, and streams are followed to their last byte.
Models of ``openai/`` use the openai client, which has a patch of its own. No request passes both patches.

``completion`` and similar functions are wrapped as well. So retries belong to the same logical request, both
those of ``num_retries`` and those of a ``Router`` at another deployment. A function that was imported by name
before the patch (``from litellm import completion``) is not wrapped. Its requests are still reported, but
each of its attempts counts as a request.

Not covered: providers that bring their own HTTP client (``aiohttp_openai/``, ``petals/`` and others), and
litellm's proxy as a server of its own. Checked with 1.83.0, 1.106.12 and 1.110.2.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any, NamedTuple

import msgspec
from sojourn.config import LLM_PATHS, target_of
from sojourn.monkey_patches import Patches, wrap_like
from sojourn.outgoing_request import OutgoingRequest, RetryScope, under_way
from sojourn.program import find_context
from sojourn.request_warnings import warn_unlisted_host
from sojourn.runtime import session

from .instance_method_wrapper import overlay_method
from .safe_scope import count_error, inside

_RETRYING = ("completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses")
_ROUTER = ("function_with_fallbacks", "async_function_with_fallbacks")
"""Methods of a ``Router`` in Python through which all its requests pass. A router with a core in Rust (from
litellm 1.109 at the latest) has neither method. Its methods that send requests are patched instead."""
_SMALL_BYTES = 4096
"""Longest field of the user's body, in bytes of JSON, that is decoded. Longer fields stay as the user wrote
them; our fields are never merged into them."""

_patches = Patches()
_as_written = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decoder = msgspec.json.Decoder()


def patch() -> bool:
    """Patch litellm's HTTP handlers, and its functions that retry. Returns False if the handlers are
    missing."""
    import litellm
    from litellm.llms.custom_httpx import http_handler

    kinds = [getattr(http_handler, name, None) for name in ("HTTPHandler", "AsyncHTTPHandler")]
    if not all("post" in vars(kind or object) for kind in kinds):
        return False
    for kind in kinds:
        _patches.wrap_method(kind, "post", _post)
    for name in _RETRYING:
        if callable(vars(litellm).get(name)):
            _patches.put(litellm, name, _as_one_request)
    router = getattr(litellm, "Router", None)
    central = [name for name in _ROUTER if callable(vars(router or object).get(name))]
    for name in central or _RETRYING:
        if callable(getattr(router, name, None)):
            _patches.put(router, name, _as_one_request)
    return True


def unpatch() -> None:
    """Restore litellm's own functions. If another library patched a function after us, its patch stays, and
    our function beneath that patch only calls litellm's."""
    _patches.undo()


def wrap(target: Any) -> Any | None:
    """Instrument one ``HTTPHandler`` or ``AsyncHTTPHandler``, for ``completion(client=…)``, and return it.
    Returns ``None`` for other objects."""
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler

    if not isinstance(target, (AsyncHTTPHandler, HTTPHandler)):
        return None
    overlay_method(target, "post", _post)
    return target


# ---- one HTTP request


class _Answer(NamedTuple):
    """An HTTP response, in the attribute where ``end_with_response`` looks for it. The response's body may
    still be open."""

    http_response: Any


def _post(handler: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outgoing, kwargs = _begin(handler, args, kwargs)
    if outgoing is None:
        return original(*args, **kwargs)
    if iscoroutinefunction(original):
        return _awaited(outgoing, original(*args, **kwargs))
    with outgoing:
        response = original(*args, **kwargs)
    outgoing.answered(_Answer(response))
    return response


async def _awaited(outgoing: OutgoingRequest, answer: Awaitable[Any]) -> Any:
    with outgoing:
        response = await answer
    outgoing.answered(_Answer(response))
    return response


def _begin(
    handler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OutgoingRequest | None, dict[str, Any]]:
    """Return the LLM request that this call of ``post`` sends, and the keyword arguments with our fields
    added. Returns ``None`` and the unchanged arguments if the call is no LLM request to a listed server, or
    is part of a request under way."""
    outgoing: OutgoingRequest | None = None
    try:
        live = session()
        config, around = live.config, under_way.get()
        if config is None or live.event_sender is None or (around is not None and around.client is handler):
            return None, kwargs
        target = target_of(config, str(args[0] if args else kwargs.get("url")))
        if target is None:
            return None, kwargs
        if target.listed is None:
            warn_unlisted_host(live, find_context(live.counters)[0].program, target)
            return None, kwargs
        if len(args) > 1:  # no caller of litellm's gives more than the URL by position
            return None, kwargs
        where, given, write = _body(kwargs)
        theirs = None if given is None else {name: _read(name, value) for name, value in given.items()}
        suffix = next(filter(target.path.endswith, LLM_PATHS))
        outgoing = OutgoingRequest.begin(live, target.listed, suffix, theirs, client=handler)
        named = kwargs.get("headers") or {}
        body, headers = outgoing.parts(target.listed, theirs, named)
        added: dict[str, Any] = {"headers": {**headers, **named}}
        if body and given is not None:
            added[where] = write({**given, **body})
        kwargs = {**kwargs, **added}
    except Exception:
        count_error("inject_error")
    return outgoing, kwargs


def _body(kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None, Callable[[dict[str, Any]], Any]]:
    """Return three values:

    - the name of the argument that holds the body;
    - the body's fields, or ``None`` if the body is not a JSON object;
    - the function that encodes the fields.

    If the body is text, its fields stay encoded, since decoding and encoding a long conversation takes time.
    """
    if kwargs.get("files"):
        return "", None, dict
    given = kwargs.get("json")
    if given is not None:
        return "json", dict(given) if isinstance(given, Mapping) else None, dict
    for name in ("content", "data"):
        text = kwargs.get(name)
        if isinstance(text, (str, bytes)):
            # Only Python's own JSON reads and writes lone surrogates and infinities.
            for read, write in ((_as_written.decode, msgspec.json.encode), (json.loads, json.dumps)):
                with suppress(msgspec.DecodeError, ValueError):
                    fields = read(text)
                    return name, fields if isinstance(fields, dict) else None, write
    return "", None, dict


def _read(name: str, value: Any) -> Any:
    """Return the field ``name`` of the body, decoded if it is the model's name, an object or a null. All
    other values stay encoded, and so do values longer than ``_SMALL_BYTES``."""
    if type(value) is not msgspec.Raw:
        return value
    text = memoryview(value)
    if len(text) <= _SMALL_BYTES and (name == "model" or text[0] in b"{n"):
        with suppress(msgspec.DecodeError, ValueError):
            return _decoder.decode(value)
    return value


# ---- one logical request


def _as_one_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _retried(None, original, args, kwargs) if _patches.active else original(*args, **kwargs)

    return wrap_like(original, call)


_retried = inside(lambda _: RetryScope())
