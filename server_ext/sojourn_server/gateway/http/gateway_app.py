"""The gateway: its parts, its routes for agents, and its background tasks. ``build_gateway`` builds one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sojourn.wire_codec import MAX_BATCH_BYTES, OutcomeBatch, WireError, decode_batch, encode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...api.api_errors import ApiError, websocket_refusal
from ...api.body_reader import read_body
from ...api.client_identity import SESSION_PATH, split_session_path
from ...api.live_stream import LiveHub
from ...api.openapi import PREFIX, openapi_response
from ...api.web_page import page_routes
from ...policies.cluster_preset import ClusterPreset
from ...routing import routing_events
from ...routing.routing_events import PairRole
from ...routing.routing_from_preset import (
    PAIR_POLICY,
    PrefillDecodeRules,
    build_pair_core,
    build_routing_core,
    routing_reasons,
)
from ...routing.routing_limits import RoutingLimits
from .client_apis import ClientApi, RequestRejected, failure_response, unavailable_error
from .engine_client import (
    REPLICA,
    EngineAnswer,
    EngineClient,
    EngineHeaders,
    ReplicaRequestError,
    bearer,
    end_to_end_headers,
    headers_not_sent,
)
from .engine_monitor import POLL_S, EngineMonitor
from .gateway_metrics import GatewayMetrics
from .generation_request import MAX_BODY_BYTES, BodyReader
from .multi_engine_queries import EngineQueries
from .peers import Peers, is_passed
from .program_events import ProgramEvents
from .program_id_mapper import ProgramIdMapper
from .proxy_request import GenerationProxy
from .replica_addresses import ReplicaAddresses
from .routing_backend import GatewayAction, RoutingBackend
from .status_routes import StatusRoutes, json_response
from .tenant_keys import ClientAccess, TenantKeys, engine_authorization

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Options of a gateway that an operator sets."""

    engine_key: str | None = None
    """Key sent to engines instead of a client's own."""
    admin_key: str | None = None
    """Key with which clients may drain replicas and see all tenants' programs."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Maximum bytes of one request body."""
    session_header: str | None = None
    """Name of a header that names the program, before those that ``client_identity`` lists."""


class GatewayApplication(Starlette):
    """ASGI application that passes generation requests directly to the proxy, without the router."""

    def __init__(self, generation: GenerationProxy, **rest: Any) -> None:
        super().__init__(**rest)
        self._generation = generation
        self.metrics = generation.metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer: Any = super().__call__
        if scope["type"] == "http":
            if SESSION_PATH in scope["path"]:
                scope = split_session_path(scope) or scope
            is_generation = scope["method"] == "POST" and scope["path"] in _GENERATING
            answer = self._generation if is_generation else websocket_refusal(scope, "") or answer
        await answer(scope, receive, send)


_GENERATING = frozenset(api.value for api in ClientApi)


class Gateway(StatusRoutes):
    """One gateway: its routes for clients, its routing backend, and its connections to engines."""

    def __init__(
        self,
        engines: Mapping[str, PairRole | None],
        rules: ClusterPreset | PrefillDecodeRules,
        routing_backend: RoutingBackend,
        tenants: TenantKeys,
        options: GatewayOptions,
        peers: Peers,
        poll_s: float,
    ) -> None:
        """``engines``: their roles by URL. The others are those of ``build_gateway``. Raises
        ``InputError`` if the admin key is a tenant's key."""
        preset = rules if isinstance(rules, ClusterPreset) else None
        self.rules = rules
        self.policy = preset.name if preset is not None else PAIR_POLICY
        self.read_side = rules.read_side if isinstance(rules, PrefillDecodeRules) else None
        self.routing_backend = routing_backend
        self.replicas = replicas = ReplicaAddresses()
        self.metrics = metrics = GatewayMetrics(routing_reasons(rules))
        self.options = options
        self.peers = peers
        peers.in_pairs = preset is None
        self.client = EngineClient()
        names = ProgramIdMapper(tenants.names)
        self.monitor = EngineMonitor(
            engines,
            routing_backend,
            replicas,
            names,
            self.client.session,
            engine_key=options.engine_key,
            poll_s=poll_s,
        )
        routing_backend.links_of = self.monitor.links_of
        # The monitor's first poll also tells which programs of a former gateway have their KV where.
        self.starts: list[Callable[[], Awaitable[None]]] = [peers.check_all, self.monitor.poll_all]
        """Functions that are awaited one after the other before the gateway takes requests."""
        self.tasks: list[Callable[[], Awaitable[Any]]] = [peers.run, self.monitor.run, routing_backend.run]
        """Functions whose coroutines run while the application does."""
        self.access = ClientAccess(tenants, options.admin_key, metrics)
        self.queries = EngineQueries(replicas, self.client.session, options.engine_key, names, self.monitor)
        self.events = ProgramEvents(routing_backend, self.queries, metrics)
        self.live = LiveHub(self.queries, gateway=True)
        self.generation = GenerationProxy(
            routing_backend=routing_backend,
            client=self.client,
            events=self.events,
            metrics=metrics,
            tenants=tenants,
            bodies=BodyReader(options.max_body_bytes),
            peers=peers,
            queries=self.queries,
            reads_prefixes=preset is not None and preset.routing.reads_prefixes,
            session_header=options.session_header,
            dropped=headers_not_sent(key=options.engine_key, session_header=options.session_header),
        )
        routing_backend.on_action = self._run_action

    def app(self) -> GatewayApplication:
        """Build the ASGI application. It awaits ``starts``, and then runs ``tasks`` until its end."""

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            for start in self.starts:
                await start()
            tasks = [asyncio.ensure_future(run()) for run in self.tasks]
            for task in tasks:
                task.add_done_callback(_log_task_failure)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.peers.close()
                await self.client.close()

        return GatewayApplication(
            self.generation,
            routes=self._routes(),
            lifespan=lifespan,
            exception_handlers={HTTPException: failure_response, Exception: failure_response},
        )

    def _routes(self) -> list[Route]:
        guard = self.access.guard
        return [
            # Other methods, and paths below a mount point, come to the router.
            *(Route(api.value, self.generation, methods=["POST"]) for api in ClientApi),
            *(Route(path, guard(self._models)) for path in ("/v1/models", "/v1/models/{model:path}")),
            *(
                Route(path, guard(functools.partial(self._any_engine, path)), methods=["POST"])
                for path in ("/tokenize", "/detokenize", f"{ClientApi.MESSAGES.value}/count_tokens")
            ),
            Route("/v1/responses/{response_id}", guard(self._stored_response)),
            Route("/v1/responses/{response_id}/cancel", guard(self._stored_response), methods=["POST"]),
            *page_routes(),
            Route(f"{PREFIX}/events", guard(self._events), methods=["POST"]),
            Route(f"{PREFIX}/capabilities", guard(self._capabilities)),
            Route(f"{PREFIX}/openapi.json", guard(self._openapi)),
            *self.status_routes(),
        ]

    # -- routes of engines ------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        found = await self.queries.first("/v1/models", engine_authorization(request))
        if found is None:
            raise unavailable_error("no engine answers")
        name = request.path_params.get("model")
        if name is None:
            return Response(found.body, media_type="application/json")
        for model in (found.document or {}).get("data", ()):
            if model.get("id") == name:
                return json_response(model)
        raise ApiError(404, f"the model {name!r} does not exist", "GET /v1/models lists the models")

    async def _stored_response(self, request: Request) -> Response:
        """Pass on a stored answer of the responses API, maybe a stream, or that to its cancellation."""
        response_id, authorization = request.path_params["response_id"], engine_authorization(request)
        path = f"{ClientApi.RESPONSES.value}/{quote(response_id, safe='')}"
        path += "/cancel" if request.method == "POST" else f"?{request.url.query}"
        headers = EngineHeaders({"accept-encoding": "identity"})
        if (shown := bearer(self.options.engine_key, authorization)) is not None:
            headers["authorization"] = shown
        try:
            stored = await self.generation.stored_response(request.state.tenant, response_id, authorization)
            at = self.replicas.get(stored.replica_id) if stored is not None else None
            if at is None:
                raise RequestRejected(404, "not_found", f"Response with id {response_id!r} not found")
            answer = await self.client.send(at.url + path, headers, b"", method=request.method)
        except RequestRejected as refused:
            next_step = "engines keep answers with VLLM_ENABLE_RESPONSES_API_STORE=1, until they restart"
            raise ApiError(refused.status, refused.message, next_step) from None
        except ReplicaRequestError:
            raise unavailable_error("the engine that stores it does not answer") from None
        response = StreamingResponse(_parts(answer), answer.status)
        response.raw_headers = end_to_end_headers(answer.response.raw_headers)
        response.headers[REPLICA] = at.replica_id
        return response

    async def _any_engine(self, path: str, request: Request) -> Response:
        """Pass on the answer of the least loaded engine that answers."""
        body = await read_body(request, self.options.max_body_bytes)
        states = self.routing_backend.replicas()
        loads = {state.replica: state.load for state in states if state.health != "suspect"}
        usable = [address for address in self.replicas.engines() if address.replica_id in loads]
        for address in sorted(usable, key=lambda one: loads[one.replica_id]):
            found = await self.queries.one(
                address.replica_id,
                path,
                engine_authorization(request),
                headers={"Content-Type": request.headers.get("content-type", "application/json")},
                body=body,
            )
            if found is not None:
                headers = {REPLICA: address.replica_id}
                return Response(found.body, found.status, headers, media_type=found.media_type)
        raise unavailable_error("no engine answers")

    # -- routes of the gateway -----------------------------------------------------

    async def _events(self, request: Request) -> Response:
        """Receive events of programs and their tools. The answer has one outcome per event."""
        body = await read_body(request, MAX_BATCH_BYTES)
        try:
            batch = decode_batch(body)
        except WireError as error:
            raise ApiError(400, str(error), f"{PREFIX}/capabilities lists what is understood") from None
        headers, tenant = request.scope["headers"], request.state.tenant or "admin"
        passing = None if is_passed(headers) else headers
        shown = engine_authorization(request)
        outcomes = await self.peers.forward(self.events, batch, tenant, shown, passing)
        return Response(encode(OutcomeBatch(outcomes=outcomes)), media_type="application/json")

    async def _capabilities(self, request: Request) -> Response:
        """Return the capabilities of all engines, merged as if they were those of one server."""
        found = await self.queries.capabilities(engine_authorization(request))
        if not found:
            raise unavailable_error("no engine that runs sojourn answers")
        divides = isinstance(self.rules, ClusterPreset) and self.rules.sharing.divides_capacity
        used = {"deadline_seconds"} if divides else set()
        if "pairs" in found:
            used.add("expected_output_length")  # the gateway uses it to choose a decode engine
        unused = [field for field in found.get("unused_hints", ()) if field not in used]
        return json_response({**found, "unused_hints": unused, "cluster_policy": self.policy})

    async def _openapi(self, request: Request) -> Response:
        """Return this document: OpenAPI 3.1 with the schemas of all answers."""
        return openapi_response("gateway")

    # -- internals ----------------------------------------------------------------

    def _run_action(self, action: GatewayAction) -> None:
        """Carry out an action of the core that concerns more than its request."""
        if isinstance(action, routing_events.ReleaseProgramKv):
            self.events.leave((action.tenant, action.program_id), action.replica_id)
        elif isinstance(action, routing_events.ProbeReplica):
            self.monitor.probe(action)
        else:
            self.metrics.recalls.inc()


def build_gateway(
    engines: Iterable[str] | Mapping[str, PairRole | None],
    rules: ClusterPreset | PrefillDecodeRules,
    tenants: TenantKeys,
    options: GatewayOptions,
    *,
    limits: RoutingLimits | None = None,
    poll_s: float = POLL_S,
    peers: Peers | None = None,
) -> tuple[Gateway, GatewayApplication]:
    """Build a gateway. Return it with its ASGI application.

    ``engines``: their URLs; with the roles of prefill and decode engines. ``rules``: how requests are routed.
    ``limits``: bounds of the routing core. ``poll_s``: seconds between two polls of an engine.
    ``peers``: the other gateways. Raises ``ValueError`` for wrong rules or options.
    """
    if isinstance(rules, PrefillDecodeRules):
        core = build_pair_core(rules, limits)
    else:
        core = build_routing_core(rules, limits)
    roles = engines if isinstance(engines, Mapping) else dict.fromkeys(engines)
    gateway = Gateway(roles, rules, RoutingBackend(core), tenants, options, peers or Peers(), poll_s)
    return gateway, gateway.app()


async def _parts(answer: EngineAnswer) -> AsyncIterator[bytes]:
    """Yield an engine's answer. An error of it makes the server close the client's connection."""
    part = answer.first
    try:
        while part:
            yield part
            part = await answer.next_part()
    finally:
        answer.close()


def _log_task_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("a background task of the gateway failed; restart it", exc_info=task.exception())
