"""Rewrites vLLM's error answer to a request that the placement policy rejected.

The new answer states the reason for the rejection. It has the format of the request's route.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .engine_rpc import EngineError, EngineRpc
from .response_merging import encode_json

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 15.0
"""Maximum seconds to wait for the engine's answer. The engine answers between two steps, and a step may be
long."""
MAX_CONCURRENT_LOOKUPS = 64
MAX_ERROR_BYTES = 64 * 1024
"""Maximum size of an error body that is rewritten. A longer body is passed on unchanged."""

REFUSAL_STATUS = 503
REFUSAL_ERROR_TYPE = "ServiceUnavailableError"
"""vLLM's error type for a request that may be sent again."""
REFUSAL_RETRY_RANGE_S = (15, 45)
"""Minimum and maximum seconds of ``Retry-After``. KV memory becomes free when a program ends or idles, which
takes a turn or more. OpenAI's clients wait at most a minute."""

# One event per chunk, as vLLM's routes write them.
_EVENT = re.compile(rb"((?:event: error\r?\n)?data: )(\{.*\})(\r?\n\r?\n)", re.DOTALL)
ERROR_EVENT_PREFIXES = (b'data: {"error"', b"event: error")
"""Beginnings of a stream chunk that may be an error event; the filter examines no other chunks."""
_START = "http.response.start"
_BODY = "http.response.body"

RequestId = Callable[[Scope], str | None]
"""Function that returns the id that vLLM's engine client gave the request of an ASGI scope; ``None`` if the
request has no id."""


def refusal_message(waited_s: float) -> str:
    """Return the error text for the client: reason and next step. ``waited_s``: seconds that the request
    waited."""
    return (
        f"The request was rejected: for {waited_s:g} s (gate_timeout_s) the device had no capacity for "
        "the KV cache of its program. Nothing was computed. Send it again later, end finished programs, "
        "or run fewer at a time; the operator can give the KV cache more memory or raise gate_timeout_s."
    )


def retry_after_s(request_id: str) -> int:
    """Return the seconds until the client should send a rejected request again, computed from the request's
    id.

    Requests that arrive together are rejected together. They get different delays, so that their clients do
    not send all of them again at once.
    """
    first_s, last_s = REFUSAL_RETRY_RANGE_S
    return first_s + zlib.crc32(request_id.encode("utf-8", "replace")) % (last_s - first_s + 1)


def rewrite_error(error_text: bytes, message: str) -> bytes | None:
    """Return the error's JSON with ``message`` as its text, and with the type and code of a refusal.

    ``None`` if ``error_text`` is no JSON error.
    """
    try:
        document: Any = json.loads(error_text)
    except (ValueError, RecursionError):
        return None
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return None
    new = {**error, "message": message, "type": REFUSAL_ERROR_TYPE}
    if "code" in error:  # not in errors of the messages route
        new["code"] = REFUSAL_STATUS
    return encode_json({**document, "error": new}).encode()


def rewrite_error_event(chunk: bytes, message: str) -> bytes | None:
    """Return an error event of a stream with ``message`` as its text; ``None`` if ``chunk`` is not exactly
    one error event."""
    found = _EVENT.fullmatch(chunk)
    if found is None:
        return None
    before, text, after = found.groups()
    new = rewrite_error(text, message)
    return None if new is None else before + new + after


def responses_error_event(message: str, sequence_number: int) -> bytes:
    """Return an error event in the format of the responses route."""
    event = {
        "type": "error",
        "code": REFUSAL_ERROR_TYPE,
        "message": message,
        "param": None,
        "sequence_number": sequence_number,
    }
    return b"event: error\ndata: " + encode_json(event).encode() + b"\n\n"


class RefusalMiddleware:
    """ASGI middleware that rewrites the errors of rejected requests. Middleware that reads error answers must
    wrap this one, so that it sees the rewritten errors."""

    def __init__(self, app: ASGIApp, *, engine: EngineRpc, request_id: RequestId) -> None:
        self._app = app
        self._engine = engine
        self._request_id = request_id
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_LOOKUPS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The routes need a state; some servers begin a request without one.
        scope.setdefault("state", {})

        async def why() -> tuple[str, int] | None:
            request_id = self._request_id(scope)
            if request_id is None or (text := await self._reason(request_id)) is None:
                return None
            return text, retry_after_s(request_id)

        answer = _ResponseFilter(why, send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if not await answer.end_broken_stream():
                raise

    async def _reason(self, request_id: str) -> str | None:
        """Return the error text for the client; ``None`` if the request was not rejected or the engine does
        not answer."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), self._slots:
                found = await self._engine.call("refusal", encode_json({"request_id": request_id}))
            for answer in found:
                if (refusal := json.loads(answer)) is not None:
                    return refusal_message(refusal["waited_s"])
        except (EngineError, TimeoutError) as error:
            logger.debug("the reason of a failed request is unknown: %s", error)
        except Exception:
            logger.exception("the lookup of a failed request's reason failed")
        return None


class _ResponseFilter:
    """Filters one response on its way to the client, and rewrites its error if the request was rejected.
    ``why`` returns the error text and ``Retry-After`` of a rejected request, else ``None``."""

    def __init__(self, why: Callable[[], Awaitable[tuple[str, int] | None]], send: Send) -> None:
        self._why = why
        self._send = send
        self._failure: Message | None = None
        """Start message of an error answer, held back until the body is complete."""
        self._body = bytearray()
        self._streams = False
        """Whether the response is a stream of events, without an error so far."""
        self._events = 0
        self._is_responses_stream = False
        """Whether the response is an unfinished stream of the responses route."""

    async def send(self, message: Message) -> None:
        if self._failure is not None:
            await self._hold(message, self._failure)
        elif message["type"] == _START and _is_json_error(message):
            self._failure = message
        else:
            if self._streams and message["type"] == _BODY:
                message = await self._event(message)
            elif message["type"] == _START:
                self._streams = _content_type(message).startswith(b"text/event-stream")
            await self._send(message)

    async def _hold(self, message: Message, start: Message) -> None:
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._body) <= MAX_ERROR_BYTES:
            return
        self._failure = None
        body = bytes(self._body)
        refused = await self._why() if not more else None
        if refused is not None and (new := rewrite_error(body, refused[0])) is not None:
            start, body = _refusal_start(start, len(new), refused[1]), new
        await self._send(start)
        await self._send({"type": _BODY, "body": body, "more_body": more})

    async def _event(self, message: Message) -> Message:
        chunk = message.get("body", b"")
        if type(chunk) is not bytes:
            return message
        if self._events == 0:
            self._is_responses_stream = chunk.startswith(b"event: response.")
        self._events += 1
        if not message.get("more_body", False):
            self._is_responses_stream = False
        if not chunk.startswith(ERROR_EVENT_PREFIXES):
            return message
        self._streams = self._is_responses_stream = False
        refused = await self._why()
        new = rewrite_error_event(chunk, refused[0]) if refused is not None else None
        return message if new is None else {**message, "body": new}

    async def end_broken_stream(self) -> bool:
        """End a responses stream with an error event if its request was rejected. Return whether the event
        was sent.

        Called after the route raised, because vLLM 0.32 cannot write its error as an event of this stream.
        """
        if not self._is_responses_stream or (refused := await self._why()) is None:
            return False
        logger.debug("a stream ended early, because its request was rejected", exc_info=True)
        event = responses_error_event(refused[0], self._events)
        await self._send({"type": _BODY, "body": event, "more_body": False})
        return True


def _is_json_error(start: Message) -> bool:
    return start["status"] == 500 and _content_type(start).startswith(b"application/json")


def _content_type(start: Message) -> bytes:
    return next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")


def _refusal_start(start: Message, length: int, retry_after_s: int) -> Message:
    replaced = {b"content-length": str(length).encode(), b"retry-after": str(retry_after_s).encode()}
    others = [(name, value) for name, value in start.get("headers", ()) if name.lower() not in replaced]
    return {**start, "status": REFUSAL_STATUS, "headers": [*others, *replaced.items()]}
