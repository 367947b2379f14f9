"""Tells vLLM the program of a request whose client names it in a way of its own, such as a coding agent.

vLLM reads the program in ``session_id`` of the body, then in ``X-Session-ID``. The middleware sets that
header from ``client_identity``, and leaves a body that names a program, or has a hint, to vLLM and the
scheduler. With beam search it sets the hint's program, since vLLM's requests for the beams have no hint.
A program's parent, root and agent type reach the engine as one ``program_start`` event.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from contextvars import ContextVar
from itertools import count
from typing import Any

import msgspec
from sojourn.wire_codec import WIRE_VERSION, EventBatch, encode
from sojourn.wire_events import ProgramStart
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.request_hints import read_identity
from .api_errors import websocket_refusal
from .api_keys import ApiKeys
from .body_reader import utf8_json
from .client_identity import SESSION_PATH, ClientIdentity, identify, split_session_path, with_session
from .engine_rpc import EngineError
from .event_intake import EventIntake
from .routes import unauthorised

logger = logging.getLogger(__name__)

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_REPORTED = 2000
"""Maximum number of programs whose report is remembered. A forgotten program is reported again."""
MAX_REPORTS = 256
"""Maximum number of reports on their way to the engine. Beyond it, a program's next request reports it."""
REPORT_TIMEOUT_S = 30.0


class _Body(msgspec.Struct):
    """The fields that name a program. vLLM checks their types."""

    session_id: Any = None
    vllm_xargs: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    use_beam_search: Any = None


_is_refused = ContextVar("_is_refused", default=False)
"""Whether the task has refused a WebSocket offer."""
_decoder = msgspec.json.Decoder(_Body)


class IdentityMiddleware:
    """ASGI middleware; vLLM's own lie outside it. ``session_header``: the operator's name of a header with
    program ids; ``None`` for no such header."""

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, events: EventIntake, session_header: str | None
    ) -> None:
        self._app = app
        self._keys = keys
        self._events = events
        self._session_header = session_header
        self._emitter = f"identity-{secrets.token_hex(8)}"
        self._seq = count()
        self._reported: OrderedDict[str, None] = OrderedDict()
        """Programs whose relations are reported, in the order of their last request."""
        self._reports: set[asyncio.Task[None]] = set()
        logging.getLogger("uvicorn.error").addFilter(_is_no_false_alarm)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if (answer := websocket_refusal(scope)) is not None:
            await answer(scope, receive, send)
            _is_refused.set(True)
            return
        if SESSION_PATH in scope["path"] and (found := split_session_path(scope)) is not None:
            scope = found
            # vLLM checks the key of paths that begin with /v1 only, and it saw another path.
            allowed = self._keys.allow(Headers(scope=scope).get("authorization"))
            if not allowed and scope.get("method") != "OPTIONS":
                await unauthorised().response()(scope, receive, send)
                return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope.get("method") == "POST" and path in GENERATION_PATHS:
            scope, receive = await self._identified(scope, receive, path)
        await self._app(scope, receive, send)

    async def _identified(self, scope: Scope, receive: Receive, path: str) -> tuple[Scope, Receive]:
        """Return the request with its program in ``X-Session-ID``, if it names one. Reads the body only if
        the headers name no program, or one whose relations are to be reported."""
        headers = Headers(scope=scope)
        identity = identify(headers, self._session_header)
        if identity is None or self._is_news(identity):
            body, receive = await _peek(receive)
            xargs = body.vllm_xargs if isinstance(body.vllm_xargs, dict) else {}
            own = body.session_id if path != "/v1/messages" else None  # vLLM reads none there
            is_hinted = xargs.get("agentic_context") is not None
            if identity is None and not is_hinted and not own:
                metadata = body.metadata if isinstance(body.metadata, dict) else {}
                user_id, xargs_id = metadata.get("user_id"), xargs.get("session_id")
                identity = identify({}, None, user_id, body.prompt_cache_key, xargs_id)
            elif identity is not None and not is_hinted and own in (None, "", identity.program_id):
                self._report(identity)  # a hint names its own parent
            elif body.use_beam_search and (named := read_identity(None, xargs).program_id):
                identity = ClientIdentity(named)
        return (scope if identity is None else with_session(scope, identity.program_id)), receive

    def _is_news(self, identity: ClientIdentity) -> bool:
        is_known = identity.program_id in self._reported
        if is_known:
            self._reported.move_to_end(identity.program_id)
        return any(identity[1:]) and not is_known

    def _report(self, identity: ClientIdentity) -> None:
        """Start to report a program's relations. The request does not wait for the report."""
        if len(self._reports) >= MAX_REPORTS:
            return
        if len(self._reported) >= MAX_REPORTED:
            self._reported.popitem(last=False)
        self._reported[identity.program_id] = None
        event = ProgramStart(
            program_id=identity.program_id,
            seq=next(self._seq),
            agent_type=identity.agent_type,
            parent_program_id=identity.parent_id,
            root_program_id=identity.root_id,
        )
        batch = EventBatch(v=WIRE_VERSION, emitter=self._emitter, events=[msgspec.Raw(encode(event))])
        task = asyncio.create_task(self._send(batch, event.program_id), name="sojourn-identity")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _send(self, batch: EventBatch, program_id: str) -> None:
        try:
            await self._events.submit(batch, REPORT_TIMEOUT_S)
        except EngineError as error:
            self._reported.pop(program_id, None)  # the program's next request reports it again
            logger.debug("a program's parent is unknown to the engine: %s", error)


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    """Return whether a line belongs in the log. uvicorn 0.54 logs an error after each 426 to a WebSocket
    offer, as if it had sent no answer, in the task that sent it."""
    return record.msg != "ASGI callable returned without completing handshake." or not _is_refused.get()


async def _peek(receive: Receive) -> tuple[_Body, Receive]:
    """Return a request's body, and a function that returns its messages again, and then what ``receive``
    returns. The last message may say that the client has disconnected."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    try:
        body = _decoder.decode(utf8_json(b"".join([message.get("body", b"") for message in messages])))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = _Body()  # vLLM answers what is wrong

    async def replayed() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, replayed
