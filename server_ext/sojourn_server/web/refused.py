"""The client of a request that placement refused reads why: a 503 in place of "Internal server error".

vLLM ends such a request with an error that carries no text, and answers it as any failure inside the engine.
So whatever goes out as a failure is held back until the engine has said whether it was a refusal. All other
answers go out as they are, and so does the failure where the engine says nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import answers
from .calls import EngineCalls, EngineError
from .refusal import (
    EVENT_STARTS,
    STATUS,
    message,
    responses_event,
    retry_after_s,
    reworded,
    reworded_event,
)

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 15.0
"""The engine answers between two steps, and a step may be long."""
MAX_ASKED_AT_ONCE = 64
MAX_ERROR_BYTES = 64 * 1024
"""A failure with a longer body goes out as it is."""

RequestId = Callable[[Scope], str | None]
"""What the engine's client calls the request of a scope; ``None``: it has none."""

_START = "http.response.start"
_BODY = "http.response.body"


class Why:
    """Asks the engine why a request failed."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
        self._asking: set[asyncio.Task[str | None]] = set()

    async def __call__(self, request_id: str) -> str | None:
        """The words for its client; ``None`` where it was not refused, or the engine does not say."""
        # Not cancelled when time is up: the engine has the call by then and will answer it.
        task = asyncio.ensure_future(self._ask(request_id))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait({task}, timeout=ASK_TIMEOUT_S)
        return task.result() if done else None

    async def _ask(self, request_id: str) -> str | None:
        try:
            async with self._slots:
                found = await self._engine.call("refusal", answers.write({"request_id": request_id}))
            for answer in found:
                if (told := answers.read(answer)) is not None:
                    return message(told["waited_s"])
        except EngineError as error:
            logger.debug("why a request failed is not known: %s", error)
        except Exception:
            logger.exception("why a request failed was not found out")
        return None


class TellRefused:
    """ASGI middleware, to be nearer to the routes than whatever looks at what they answer."""

    def __init__(self, app: ASGIApp, *, engine: EngineCalls, request_id: RequestId) -> None:
        self._app = app
        self._why = Why(engine)
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The routes' own state, also where the server began the request without one.
        scope.setdefault("state", {})

        async def why() -> _Refused | None:
            request_id = self._request_id(scope)
            told = await self._why(request_id) if request_id is not None else None
            return None if request_id is None or told is None else _Refused(told, retry_after_s(request_id))

        answer = _Answer(why, send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if not await answer.mended():
                raise


class _Refused(NamedTuple):
    """What the client of a refused request is told."""

    told: str
    retry_after_s: int


class _Answer:
    """One response on its way out."""

    def __init__(self, why: Callable[[], Awaitable[_Refused | None]], send: Send) -> None:
        self._why = why
        self._send = send
        self._failure: Message | None = None
        """The start of one that is held back until its body is there."""
        self._body = bytearray()
        self._streams = False
        """It is a stream of events, and none was an error so far."""
        self._events = 0
        self._of_responses = False
        """The stream is one of the responses route, and goes on."""

    async def send(self, message: Message) -> None:
        if self._failure is not None:
            await self._hold(message, self._failure)
            return
        if self._streams and message["type"] == _BODY:
            message = await self._event(message)
        elif message["type"] == _START:
            if _is_json_failure(message):
                self._failure = message
                return
            self._streams = _content_type(message).startswith(b"text/event-stream")
        await self._send(message)

    async def _hold(self, message: Message, start: Message) -> None:
        is_body = message["type"] == _BODY
        more = is_body and message.get("more_body", False)
        if is_body:
            self._body += message.get("body", b"")
            if more and len(self._body) <= MAX_ERROR_BYTES:
                return
        self._failure = None
        body = bytes(self._body)
        refused = await self._why() if is_body and not more else None
        if refused is not None and (new := reworded(body, refused.told)) is not None:
            await self._send(_start_of_refusal(start, len(new), refused.retry_after_s))
            await self._send({"type": _BODY, "body": new})
            return
        await self._send(start)
        if is_body:
            await self._send({**message, "body": body})
            return
        if body:
            await self._send({"type": _BODY, "body": body, "more_body": True})
        await self._send(message)

    async def _event(self, message: Message) -> Message:
        chunk = message.get("body", b"")
        if type(chunk) is not bytes:
            return message
        if self._events == 0:
            self._of_responses = chunk.startswith(b"event: response.")
        self._events += 1
        if not message.get("more_body", False):
            self._of_responses = False
        if not chunk.startswith(EVENT_STARTS):
            return message
        self._streams = self._of_responses = False
        refused = await self._why()
        new = reworded_event(chunk, refused.told) if refused is not None else None
        return message if new is None else {**message, "body": new}

    async def mended(self) -> bool:
        """The route broke off; whether the answer could be ended in its stead.

        vLLM 0.32 does so in the responses route: it cannot write its own error as an event of that stream.
        """
        if not self._of_responses or (refused := await self._why()) is None:
            return False
        logger.debug("a stream broke off, since its request was refused", exc_info=True)
        await self._send(
            {"type": _BODY, "body": responses_event(refused.told, self._events), "more_body": False}
        )
        return True


def _is_json_failure(start: Message) -> bool:
    return start["status"] == 500 and _content_type(start).startswith(b"application/json")


def _content_type(start: Message) -> bytes:
    return next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")


def _start_of_refusal(start: Message, length: int, retry_after_s: int) -> Message:
    others = [
        (name, value)
        for name, value in start.get("headers", ())
        if name.lower() not in (b"content-length", b"retry-after")
    ]
    headers = [
        *others,
        (b"content-length", str(length).encode()),
        (b"retry-after", str(retry_after_s).encode()),
    ]
    return {**start, "status": STATUS, "headers": headers}
