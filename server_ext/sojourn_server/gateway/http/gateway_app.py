"""The gateway: its parts, its routes for agents, and its background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from sojourn.wire_codec import MAX_BATCH_BYTES, OutcomeBatch, WireError, decode_batch, encode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.api_errors import ApiError
from ...api.body_reader import read_body
from ...api.live_stream import LiveHub
from ...api.openapi import PREFIX, openapi_document
from ...api.web_page import page_routes
from ...metrics.rate_limited_log import RateLimitedLog
from ...routing import routing_events
from ...routing.routing_limits import SILENT_PROGRAM_S
from .client_access import ClientAccess, engine_authorization, tenant_name
from .client_apis import (
    INVALID_KEY,
    ClientApi,
    error_body,
    internal_error_response,
    unavailable_error,
    unknown_route_response,
)
from .engine_client import open_session
from .engine_connection_pool import EngineConnectionPool
from .engine_descriptions import EngineDescription
from .engine_monitor import EngineMonitorProtocol
from .engine_routes import AnyEngineRoutes, GatewayApplication, GenerationEndpoint, GenerationRoutes
from .event_forwarder import EventForwarder
from .gateway_metrics import GatewayMetrics
from .gateway_route_types import GATEWAY_OPERATIONS
from .live_engines import GatewayLiveSource
from .multi_engine_queries import EngineQueries
from .peers import Peers
from .program_id_mapper import ProgramIdMapper
from .program_migrator import ProgramMigrator
from .proxy_context import ProxyContext
from .replica_addresses import ReplicaAddresses
from .request_bodies import MAX_BODY_BYTES, MAX_HELD_BYTES, BodyBudget
from .routing_backend import ControlAction, RoutingBackend
from .status_routes import StatusRoutes, json_response
from .tenant_keys import TenantKeys

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Options of a gateway that an operator sets."""

    policy: str
    """Name of the cluster preset, or of the policy for pairs. ``/capabilities`` and ``/replicas`` show it."""
    engine_key: str | None = None
    """Key sent to engines instead of a client's own; ``None``: the client's key is sent."""
    admin_key: str | None = None
    """Key with which clients may drain replicas and see all tenants' programs. ``None``: replicas cannot be
    drained."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Maximum bytes of one request body."""
    max_held_bytes: int = MAX_HELD_BYTES
    """Maximum total bytes of all request bodies that the gateway holds."""
    reads_prefixes: bool = False
    """Whether the routing policy needs prefix hashes of prompts."""
    reads_deadlines: bool = False
    """Whether the tenants' shares of capacity depend on deadlines that clients state."""
    silent_program_s: float = SILENT_PROGRAM_S
    """Seconds without a new event after which the gateway drops a program's recorded events. Until then it
    can send them to a restarted engine or a new home."""
    in_pairs: bool = False
    """Whether the engines are prefill and decode engines. Then a request needs one of each."""
    read_side: str | None = None
    """Name of the policy that chooses which engine of a pair reads KV from storage. ``/replicas`` shows it;
    ``None``: it does not."""

    def __post_init__(self) -> None:
        for name in ("engine_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not key.strip():
                raise ValueError(f"{name} is empty; expected a key, or None")


class Gateway:
    """One gateway: its routes for clients, its routing backend, and its connections to engines."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        tenants: TenantKeys,
        options: GatewayOptions,
        metrics: GatewayMetrics,
        peers: Peers | None = None,
    ) -> None:
        """``peers``: the other gateways; ``None``: there are none. Raises ``TenantKeysError`` if the admin
        key is a tenant's key."""
        self.routing_backend = routing_backend
        self.replicas = replicas
        self.metrics = metrics
        self.options = options
        self.monitor: EngineMonitorProtocol | None = None
        self.peers = peers or Peers()
        self.starts: list[Callable[[], Awaitable[None]]] = [self.peers.check_all]
        """Functions that are awaited one after the other before the gateway takes requests."""
        self.tasks: list[Callable[[], Awaitable[Any]]] = [self.peers.run]
        """Functions whose coroutines run while the application does."""
        self._access = ClientAccess(tenants, options.admin_key, metrics)
        self.connections = EngineConnectionPool()
        """Connections for clients' requests."""
        self._rate_limited_log = RateLimitedLog(logger)
        self._open: aiohttp.ClientSession | None = None
        names = ProgramIdMapper(tenants.names)
        self.forwarder = EventForwarder(
            routing_backend,
            replicas,
            self.session,
            names=names,
            engine_key=options.engine_key,
            silent_program_s=options.silent_program_s,
        )
        self.forwarder.on_end = metrics.ended
        self._migrator = ProgramMigrator(
            self.forwarder, replicas, self._description_of, self.session, metrics
        )
        self.queries = EngineQueries(replicas, self.session, engine_key=options.engine_key)
        source = GatewayLiveSource(self.queries, replicas, names, lambda: self.monitor)
        self.live = LiveHub(source, gateway=True)
        shared = ProxyContext(
            routing_backend=routing_backend,
            replicas=replicas,
            connections=self.connections,
            forwarder=self.forwarder,
            migrator=self._migrator,
            metrics=metrics,
            engine_key=options.engine_key,
        )
        bodies = BodyBudget(
            options.max_body_bytes, options.max_held_bytes, several_tenants=len(tenants.names) > 1
        )
        self.generation = GenerationRoutes(
            shared, tenants, bodies, reads_prefixes=options.reads_prefixes, peers=self.peers
        )
        self._any = AnyEngineRoutes(shared, bodies)
        self._status = StatusRoutes(
            routing_backend,
            replicas,
            self.queries,
            names,
            self.live,
            metrics,
            self._access,
            lambda: self.monitor,
            policy=options.policy,
            peers=self.peers,
            in_pairs=options.in_pairs,
            read_side=options.read_side,
        )
        routing_backend.on_control_action = self._run_control_action

    def session(self) -> aiohttp.ClientSession:
        """Return the connection pool for the gateway's own queries to engines. The first call opens the pool
        in the running event loop."""
        if self._open is None:
            self._open = open_session()
        return self._open

    async def close(self) -> None:
        """Close the connections to engines."""
        self.connections.close()
        if self._open is not None:
            await self._open.close()
            self._open = None

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
                await self.close()

        generating = {api.value: GenerationEndpoint(self.generation, api) for api in ClientApi}
        # ``GatewayApplication`` answers POSTs to these paths directly. The router has the routes too, for
        # other methods and for paths below a mount point.
        relayed = [Route(path, one, methods=["POST"]) for path, one in generating.items()]
        return GatewayApplication(
            generating,
            routes=[*relayed, *self._routes()],
            lifespan=lifespan,
            exception_handlers={HTTPException: unknown_route_response, Exception: internal_error_response},
        )

    def _routes(self) -> list[Route]:
        guard = self._access.guard
        return [
            Route("/v1/models", guard(self._models, _openai_error)),
            Route("/tokenize", guard(self._any_engine_handler("/tokenize"), _openai_error), methods=["POST"]),
            Route(
                "/detokenize", guard(self._any_engine_handler("/detokenize"), _openai_error), methods=["POST"]
            ),
            *page_routes(),
            Route(f"{PREFIX}/events", guard(self._events), methods=["POST"]),
            Route(f"{PREFIX}/capabilities", guard(self._capabilities)),
            Route(f"{PREFIX}/openapi.json", guard(self._openapi)),
            *self._status.routes(),
        ]

    # -- routes of engines ------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        found = await self.queries.first("/v1/models", engine_authorization(request))
        if found is None:
            raise unavailable_error("no engine answers")
        return Response(found.body, media_type="application/json")

    def _any_engine_handler(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a route that any engine can answer, such as ``/tokenize``."""

        async def handle(request: Request) -> Response:
            keeps_key = request.state.tenant is not None
            return await self._any.answer(path, request, tenant_name(request), keeps_key=keeps_key)

        return handle

    # -- routes of the gateway -----------------------------------------------------

    async def _events(self, request: Request) -> Response:
        """Receive events of programs and their tools. The answer has one outcome per event."""
        body = await read_body(request, MAX_BATCH_BYTES)
        try:
            batch = decode_batch(body)
        except WireError as error:
            raise ApiError(400, str(error), f"{PREFIX}/capabilities lists what is understood") from None
        tenant = tenant_name(request)
        passed = await self.peers.report(batch, tenant, request.scope["headers"])
        rest = [raw for place, raw in enumerate(batch.events) if place not in passed]
        mine = msgspec.structs.replace(batch, events=rest)
        own = iter(await self.forwarder.forward_batch(mine, tenant, engine_authorization(request)))
        outcomes = [passed.get(place) or next(own) for place in range(len(batch.events))]
        return Response(encode(OutcomeBatch(outcomes=outcomes)), media_type="application/json")

    async def _capabilities(self, request: Request) -> Response:
        """Return the capabilities of all engines, merged as if they were those of one server."""
        found = await self.queries.capabilities(engine_authorization(request))
        if not found:
            raise unavailable_error("no engine that runs sojourn answers")
        used = {"deadline_seconds"} if self.options.reads_deadlines else set()
        if "pairs" in found:
            used.add("expected_output_length")  # the gateway uses it to choose a decode engine
        unused = [field for field in found.get("unused_hints", ()) if field not in used]
        return json_response({**found, "unused_hints": unused, "cluster_policy": self.options.policy})

    async def _openapi(self, request: Request) -> Response:
        """Return this document: OpenAPI 3.1 with the schemas of all answers."""
        return json_response(await asyncio.to_thread(lambda: self.document))

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document of the gateway's own routes."""
        return openapi_document("sojourn gateway", self._routes(), GATEWAY_OPERATIONS)

    # -- internals ----------------------------------------------------------------

    def _run_control_action(self, action: ControlAction) -> None:
        """Carry out an action of the core that concerns no single request."""
        if isinstance(action, routing_events.ReleaseProgramKv):
            self._migrator.release(action)
        elif isinstance(action, routing_events.YieldPrograms):
            self.queries.order_yield(
                action, self.forwarder.names, functools.partial(self._report_yield_answer, action)
            )
        elif self.monitor is not None:
            self.monitor.probe(action)

    def _report_yield_answer(
        self, order: routing_events.YieldPrograms, answer: routing_events.YieldAnswered
    ) -> None:
        """Count an engine's answer to a yield order, which asks the engine to preempt running requests for a
        more urgent one. Report the answer to the core."""
        self.metrics.yielded(len(answer.programs), len(order.programs) - len(answer.programs))
        if not answer.understood:
            self._rate_limited_log.log(
                logging.WARNING,
                "%s: its engine did not accept a yield order: it runs without sojourn, does not answer, or "
                "rejects the gateway's key",
                order.replica_id,
            )
        self.routing_backend.tell(answer)

    def _description_of(self, replica_id: str) -> EngineDescription | None:
        """Return the last description of a replica's engine; ``None``: unknown."""
        return self.monitor.description_of(replica_id) if self.monitor is not None else None


def _openai_error(failure: ApiError) -> Response:
    """Return the answer for an error on one of vLLM's own routes, in vLLM's format."""
    text = f"{failure.message}; {failure.next_step}"
    code = INVALID_KEY if failure.status == 401 else "gateway_refused"
    body = error_body(None, failure.status, code, text)
    return Response(body, failure.status, failure.headers, media_type="application/json")


def _log_task_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("a background task of the gateway failed; restart it", exc_info=task.exception())
