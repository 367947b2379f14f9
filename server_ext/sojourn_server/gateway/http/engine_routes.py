"""Routes that engines answer. For generation, the routing core chooses the replica. Any engine can answer the
other routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...api.api_errors import ApiError
from . import proxy_headers
from .cancel_scope import CancelScope
from .client_apis import (
    GATEWAY_FULL,
    INVALID_KEY,
    AsgiSend,
    ClientApi,
    RequestRejected,
    unavailable_error,
)
from .client_json import InvalidGenerationRequest
from .engine_client import EngineAnswer, ReplicaRequestError, send_to_engine
from .engine_connection import GatewayConnectError
from .generation_request import parse_generation_request
from .peers import Peers, is_passed
from .proxy_context import ProxyContext
from .proxy_headers import RawHeaders, client_response_headers, engine_request_headers, without_credentials
from .proxy_request import AsgiScope, ParsedRequest, ProxyRequest
from .replica_addresses import ReplicaAddress
from .request_bodies import AsgiReceive, BodyBudget, RequestBody, process_body
from .routing_backend import RequestDecisionQueue
from .tenant_keys import TenantKeys

logger = logging.getLogger(__name__)

WATCH_DELAY_S = 0.02
"""Seconds after a request's start at which the gateway begins to watch for a disconnect of the client. An
earlier disconnect is noticed then."""


class DisconnectWatcher:
    """Calls ``mark_client_disconnected`` of a request's decision queue when the client disconnects."""

    def __init__(self, receive: AsgiReceive, decisions: RequestDecisionQueue) -> None:
        self._receive = receive
        self._decisions = decisions
        self._task: asyncio.Task[None] | None = None
        # Begin later, so that this does not delay sending the request to its engine.
        self._later = asyncio.get_running_loop().call_later(WATCH_DELAY_S, self._begin)

    def stop(self) -> None:
        """Stop watching. Call this when the request has ended."""
        self._later.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._until_gone())

    async def _until_gone(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            logger.debug("a client counts as disconnected: %s", error)  # no other event will follow
        self._decisions.mark_client_disconnected()


class GenerationRoutes:
    """All generation routes of a gateway. For use in one event loop.

    ``reads_prefixes``: whether the routing policy needs prefix hashes of prompts
    (``GenerationRequest.prefix``).
    """

    def __init__(
        self,
        shared: ProxyContext,
        tenants: TenantKeys,
        bodies: BodyBudget | None = None,
        *,
        reads_prefixes: bool = False,
        peers: Peers,
    ) -> None:
        self._shared = shared
        self._peers = peers
        self._tenants = tenants
        self._names = shared.forwarder.names
        self._reads_prefixes = reads_prefixes
        self.bodies = bodies or BodyBudget()
        self.open_requests = 0
        """Number of requests whose answers are not complete."""

    async def serve(self, api: ClientApi, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Handle one generation request: check its key and encoding, then read its body and proxy it."""
        self.open_requests += 1
        try:
            await self._serve(api, scope, receive, send)
        finally:
            self.open_requests -= 1

    async def _serve(self, api: ClientApi, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        raw: RawHeaders = scope["headers"]
        try:
            tenant = self._tenants.tenant_of(
                proxy_headers.first_value(raw, b"authorization"), proxy_headers.first_value(raw, b"x-api-key")
            )
            if tenant is None:
                raise RequestRejected(
                    401, INVALID_KEY, "missing or unknown API key; expected one of the gateway's"
                )
            if proxy_headers.first_value(raw, b"content-encoding") not in (None, "identity"):
                raise RequestRejected(415, "encoded_body", "the body is compressed; expected plain JSON")
        except RequestRejected as refused:
            await self._shared.refuse(send, api, refused)
            return
        held = self.bodies.begin(tenant)
        try:
            await self._exchange(api, scope, receive, send, tenant, held)
        finally:
            held.free()

    async def _exchange(
        self,
        api: ClientApi,
        scope: AsgiScope,
        receive: AsgiReceive,
        send: AsgiSend,
        tenant: str,
        held: RequestBody,
    ) -> None:
        """Read and parse the body, then proxy the request. All errors before the answer are sent to the
        client."""
        raw: RawHeaders = scope["headers"]
        try:
            body = await held.read(proxy_headers.first_value(raw, b"content-length"), receive)
            if body is None:
                return
            read = await self._read(api, body, proxy_headers.first_value(raw, proxy_headers.SESSION), tenant)
            program_id = read.question.program_id
            if program_id is not None and not is_passed(raw):
                owner = self._peers.owner(tenant, program_id)
                if owner and await self._peers.pass_on(owner, api, scope, body, receive, send):
                    return
            del body  # replaced by ``read.body``, which has the engines' program ids
            held.set_size(len(read.body))
            exchange = ProxyRequest(self._shared, api, scope, send, tenant, read, held)
            del read
        except RequestRejected as refused:
            await self._shared.refuse(send, api, refused)
            return
        except InvalidGenerationRequest as error:
            await self._shared.refuse(send, api, RequestRejected(400, "bad_request", str(error)))
            return
        except OSError:  # the client has left while another gateway answered
            self._shared.metrics.count_disconnect()
            return
        except Exception:
            await self._shared.send_internal_error(send, api)
            return
        watch = DisconnectWatcher(receive, exchange.decisions)
        try:
            await exchange.run()
        except Exception:
            if exchange.has_begun:
                raise  # the server closes the connection, so that the answer does not look complete
            await self._shared.send_internal_error(send, api)
        finally:
            watch.stop()

    async def _read(self, api: ClientApi, body: bytes, session: str | None, tenant: str) -> ParsedRequest:
        """Parse a body, and replace its program ids by the ids that engines use (``ProgramIdMapper``).
        ``session``: value of the header ``X-Session-ID``; ``None``: no such header. Raises
        ``InvalidGenerationRequest``."""

        def read() -> ParsedRequest:
            question = parse_generation_request(api, body, session)
            prefix = question.prefix() if self._reads_prefixes else ()
            named, fits = self._names.request(tenant, body, question)
            return ParsedRequest(named, question.without_prompt(), prefix, fits)

        return await process_body(body, read)


MAX_REQUEST_BYTES = 16 << 20
"""Maximum bytes of the body of a request to ``AnyEngineRoutes``."""
ANY_ENGINE_TIMEOUT_S = 15.0
"""Seconds that ``AnyEngineRoutes`` waits for an engine before it asks the next one."""


class AnyEngineRoutes:
    """Answers the routes that any engine can answer."""

    def __init__(self, shared: ProxyContext, bodies: BodyBudget) -> None:
        self._shared = shared
        self._bodies = bodies

    async def answer(self, path: str, request: Request, tenant: str, *, keeps_key: bool) -> Response:
        """Forward a request to the least loaded engine that answers, and return the answer. Raises
        ``ApiError`` if the body is rejected or no engine answers.

        ``path``: the engine's route. Do not take it from ``request.url``, because older releases of Starlette
        build that from the client's ``Host``. ``keeps_key``: whether engines get the client's key. Pass False
        for the admin key.
        """
        held = self._bodies.begin(tenant, MAX_REQUEST_BYTES)
        try:
            body = await held.read(request.headers.get("content-length"), request.receive)
            if body is None:
                raise ApiError(400, "the client disconnected before its body arrived", "send it again")
            return await self._ask(path, request, body, keeps_key)
        except RequestRejected as refused:
            self._shared.metrics.refused(refused.code)
            after = {"Retry-After": str(round(refused.retry_after_s))} if refused.retry_after_s else {}
            next_step = "try again soon" if after else "send it again, shorter or faster"
            raise ApiError(refused.status, refused.message, next_step, after) from None
        finally:
            held.free()

    async def _ask(self, path: str, request: Request, body: bytes, keeps_key: bool) -> Response:
        headers = request.scope["headers"] if keeps_key else without_credentials(request.scope["headers"])
        passed = engine_request_headers(headers, key=self._shared.engine_key, rank=None, session=None)
        for address in await self._by_load():
            asking = send_to_engine(self._shared.connections, address, path.encode(), passed, body)
            try:
                answer = await asyncio.wait_for(asking, ANY_ENGINE_TIMEOUT_S)
            except (ReplicaRequestError, asyncio.TimeoutError):
                continue
            except GatewayConnectError as error:
                self._shared.metrics.refused(GATEWAY_FULL)
                raise unavailable_error(str(error)) from None
            if answer.is_complete:
                response = Response(answer.first, answer.response.status)
            else:
                response = StreamingResponse(_parts(answer), answer.response.status)
            response.raw_headers.extend(
                pair
                for pair in client_response_headers(answer.response.raw_headers, address.replica_id)
                if pair[0] != b"content-length"
            )
            return response
        raise unavailable_error("no engine answers")

    async def _by_load(self) -> list[ReplicaAddress]:
        """Return the addresses of the engines, the least loaded first. Suspect engines are left out."""
        states = await self._shared.routing_backend.replicas()
        loads = {state.replica: state.load for state in states if state.health != "suspect"}
        usable = [address for address in self._shared.replicas.engines() if address.replica_id in loads]
        return sorted(usable, key=lambda address: loads[address.replica_id])


async def _parts(answer: EngineAnswer) -> AsyncIterator[bytes]:
    """Yield the parts of a long answer. Raises ``EngineConnectionError`` or ``asyncio.TimeoutError`` if the
    answer breaks off."""
    try:
        part = answer.first
        while part:
            yield part
            # If the client leaves, this task is cancelled. Before Python 3.12, ``asyncio.wait_for`` would
            # lose the cancellation if a part had just arrived.
            with CancelScope() as scope:
                scope.end_after(ANY_ENGINE_TIMEOUT_S)
                part = await answer.response.read_some()
            if scope.ended_early:
                raise asyncio.TimeoutError
    finally:
        answer.response.close()


class GenerationEndpoint:
    """The ASGI application of one API's generation route. It is a class, because Starlette's router would
    call a plain function with a ``Request``, not with (scope, receive, send)."""

    def __init__(self, routes: GenerationRoutes, api: ClientApi) -> None:
        self._routes = routes
        self._api = api

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._routes.serve(self._api, scope, receive, send)


class GatewayApplication(Starlette):
    """ASGI application that passes generation requests directly to their endpoints. They skip the router and
    its middlewares. ``generating``: the endpoints by path."""

    def __init__(self, generating: Mapping[str, GenerationEndpoint], **rest: Any) -> None:
        super().__init__(**rest)
        self._generating = generating

    def is_generation(self, scope: Any) -> bool:
        """Return whether a request with this ASGI scope is one that a model answers."""
        return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._generating

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.is_generation(scope):
            await self._generating[scope["path"]](scope, receive, send)
            return
        await super().__call__(scope, receive, send)
