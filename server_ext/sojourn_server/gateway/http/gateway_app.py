"""The gateway: its routes, and its background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import UNSET
from sojourn.wire_codec import MAX_BATCH_BYTES, OutcomeBatch, WireError, decode_batch, encode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.api_errors import ApiError
from ...api.body_reader import read_body
from ...api.live_stream import Audience, LiveHub
from ...api.openapi import PREFIX, openapi_document
from ...api.web_page import page_routes
from ...metrics.turn_explanation import Explanation
from ...routing import routing_events
from ...routing.routing_events import PairRole
from ...routing.routing_limits import SILENT_PROGRAM_S
from ...routing.routing_status import PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .client_apis import (
    GATEWAY_FAILED,
    INVALID_KEY,
    ClientApi,
    error_body,
    internal_error_response,
    unknown_route_response,
)
from .engine_client import open_session
from .engine_monitor import EngineMonitorProtocol
from .engine_queries import EngineQueries
from .engine_routes import AnyEngineRoutes, AsgiEndpoint, GatewayApplication, GenerationRoutes
from .event_forwarder import EventForwarder
from .gateway_metrics import GatewayMetrics
from .gateway_operations import (
    GATEWAY_OPERATIONS,
    MAX_LISTED_PROGRAMS,
    GatewayStats,
    MovePage,
    ReplicaList,
    RoutedProgramList,
)
from .live_engines import GatewayLiveSource
from .program_id_mapper import ProgramIdMapper
from .program_migrator import ProgramMigrator
from .proxy_headers import GATEWAY, REPLICA
from .proxy_request import ProxyContext
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .request_bodies import MAX_BODY_BYTES, MAX_HELD_BYTES, BodyBudget
from .routing_backend import ControlAction, RoutingBackend
from .tenant_keys import TenantKeys

logger = logging.getLogger(__name__)


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Options of a gateway that an operator sets."""

    policy: str
    """Name of the cluster preset, for answers to clients."""
    engine_key: str | None = None
    """Key sent to engines instead of a client's own; ``None``: the client's is sent."""
    admin_key: str | None = None
    """Key with which clients may drain replicas and see all tenants' programs; ``None``: replicas cannot be
    drained."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Maximum size of one request body."""
    max_held_bytes: int = MAX_HELD_BYTES
    """Maximum total size of all bodies that the gateway holds."""
    reads_prefixes: bool = False
    """Whether the routing policy needs hashes of the prompts' pieces."""
    reads_deadlines: bool = False
    """Whether the gateway's shares depend on deadlines that clients state."""
    silent_program_s: float = SILENT_PROGRAM_S
    """Seconds without an event after which a program's events are no longer kept for a restarted engine."""
    in_pairs: bool = False
    """Whether the engines are prefill and decode engines, so that a request needs one of each."""
    read_side: str | None = None
    """Name of the policy that chooses which engine of a pair reads KV from storage; only with
    ``in_pairs``."""

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
    ) -> None:
        """Raises ``TenantKeysError`` if the admin key is a tenant's key."""
        self.routing_backend = routing_backend
        self.replicas = replicas
        self.metrics = metrics
        self.options = options
        self.monitor: EngineMonitorProtocol | None = None
        tenants.check_admin(options.admin_key)
        self._tenants = tenants
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
        self.live = LiveHub(GatewayLiveSource(self.queries, replicas, names), gateway=True)
        shared = ProxyContext(
            routing_backend,
            replicas,
            self.session,
            self.forwarder,
            self._migrator,
            metrics,
            engine_key=options.engine_key,
        )
        bodies = BodyBudget(
            options.max_body_bytes, options.max_held_bytes, several_tenants=len(tenants.names) > 1
        )
        self.generation = GenerationRoutes(shared, tenants, bodies, reads_prefixes=options.reads_prefixes)
        self._any = AnyEngineRoutes(shared, bodies)
        routing_backend.on_control_action = self._told

    def session(self) -> aiohttp.ClientSession:
        """The pool of connections to engines. The first call opens the pool in the running event loop."""
        if self._open is None:
            self._open = open_session()
        return self._open

    async def close(self) -> None:
        """Close the connections to engines."""
        if self._open is not None:
            await self._open.close()
            self._open = None

    def app(
        self,
        beside: Callable[[], list[Awaitable[Any]]],
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> Starlette:
        """Build the ASGI application. At its start, the application awaits ``before()``, then runs the
        awaitables that ``beside()`` returns as background tasks until its end."""

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            if before is not None:
                await before()
            tasks = [asyncio.ensure_future(one) for one in beside()]
            for task in tasks:
                task.add_done_callback(_log_task_failure)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.close()

        generating = {api.value: AsgiEndpoint(self.generation.route(api)) for api in ClientApi}
        # These routes are also in the router, which answers other methods and knows its mount point.
        relayed = [Route(path, one, methods=["POST"]) for path, one in generating.items()]
        return GatewayApplication(
            generating,
            routes=[*relayed, *self._routes()],
            lifespan=lifespan,
            exception_handlers={HTTPException: unknown_route_response, Exception: internal_error_response},
        )

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._guard(self._models, _openai_error)),
            Route("/tokenize", self._guard(self._anywhere, _openai_error), methods=["POST"]),
            Route("/detokenize", self._guard(self._anywhere, _openai_error), methods=["POST"]),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._metrics),
            *page_routes(),
            Route(f"{PREFIX}/events", self._guard(self._events), methods=["POST"]),
            Route(f"{PREFIX}/capabilities", self._guard(self._capabilities)),
            Route(f"{PREFIX}/programs", self._guard(self._programs)),
            Route(f"{PREFIX}/programs/{{program_id:path}}/explain", self._guard(self._explanation)),
            Route(f"{PREFIX}/programs/{{program_id:path}}", self._guard(self._program)),
            Route(f"{PREFIX}/graphs", self._guard(self._graphs)),
            Route(f"{PREFIX}/graphs/{{graph_hash}}", self._guard(self._graph)),
            Route(f"{PREFIX}/stats", self._guard(self._stats)),
            Route(f"{PREFIX}/stream", self._guard(self._stream)),
            Route(f"{PREFIX}/decisions", self._guard(self._decisions)),
            Route(f"{PREFIX}/moves", self._guard(self._moves)),
            Route(f"{PREFIX}/replicas", self._guard(self._replica_list)),
            Route(f"{PREFIX}/replicas/{{replica:path}}/drain", self._guard(self._drain), methods=["POST"]),
            Route(f"{PREFIX}/replicas/{{replica:path}}/stay", self._guard(self._stay), methods=["POST"]),
            Route(f"{PREFIX}/openapi.json", self._guard(self._openapi)),
        ]

    # -- access -------------------------------------------------------------------

    def _guard(self, handle: Handler, words: Callable[[ApiError], Response] = ApiError.response) -> Handler:
        """Wrap a handler so that the client's key is checked before the body is read. The wrapper sets
        ``request.state.tenant``; ``None``: the client has the admin key. ``words`` formats an
        ``ApiError``."""

        @functools.wraps(handle)
        async def guarded(request: Request) -> Response:
            try:
                if self._is_admin(request):
                    request.state.tenant = None
                else:
                    request.state.tenant = self._tenants.of(
                        request.headers.get("authorization"), request.headers.get("x-api-key")
                    )
                    if request.state.tenant is None:
                        challenge = {"WWW-Authenticate": "Bearer"}
                        next_step = "send one of the gateway's keys"
                        self.metrics.refused(INVALID_KEY)
                        raise ApiError(401, "missing or unknown API key", next_step, challenge)
                response = await handle(request)
            except ApiError as failure:
                response = words(failure)
            except Exception:
                self.metrics.refused(GATEWAY_FAILED)
                raise
            response.headers.setdefault(GATEWAY, "1")
            return response

        return guarded

    def _is_admin(self, request: Request) -> bool:
        """Whether the request has the admin key."""
        key = self.options.admin_key
        scheme, _, shown = (request.headers.get("authorization") or "").partition(" ")
        return (
            key is not None
            and scheme.lower() == "bearer"
            and hmac.compare_digest(shown.encode(), key.encode())
        )

    def _only_admin(self, request: Request) -> None:
        """Raise ``ApiError`` unless the request has the admin key. If the gateway neither checks keys nor has
        an admin key, every client passes."""
        if not self._sees_all(request):
            raise ApiError(403, "this shows every tenant's programs", "send the gateway's admin key")

    def _sees_all(self, request: Request) -> bool:
        """Whether the request may see what is about all tenants together."""
        return request.state.tenant is None or not (
            self._tenants.checks or self.options.admin_key is not None
        )

    def _tenant(self, request: Request) -> str:
        """The request's tenant; ``admin`` for the admin key."""
        tenant: str | None = request.state.tenant
        return tenant if tenant is not None else "admin"

    def _shown(self, request: Request) -> str | None:
        """The client's ``Authorization`` header, for engines; ``None`` if it has the admin key, which is
        never sent to engines."""
        return request.headers.get("authorization") if request.state.tenant is not None else None

    # -- routes of engines ------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        found = await self.queries.first("/v1/models", self._shown(request))
        if found is None:
            raise ApiError(503, "no engine answers", "try again soon", {"Retry-After": "2"})
        return Response(found.body, media_type="application/json")

    async def _anywhere(self, request: Request) -> Response:
        """Handle a route that any engine can answer, such as ``/tokenize``."""
        keeps_key = request.state.tenant is not None
        return await self._any.answer(request, self._tenant(request), keeps_key=keeps_key)

    async def _health(self, request: Request) -> Response:
        """Handle ``/health``: 200 if at least one replica is not suspect, else 503. With prefill and decode
        engines, 200 also requires that at least one engine of each role is ``up``."""
        states = await self.routing_backend.replicas()
        up = sum(state.health != "suspect" for state in states)
        roles = self._roles(states)
        told = {"replicas": len(states), "up": up, "waiting": self.metrics.waiting, **(roles or {})}
        return _json(told, 200 if up and (roles is None or all(roles.values())) else 503)

    def _roles(self, states: Sequence[ReplicaStatus]) -> dict[str, int] | None:
        """Number of engines that are ``up``, by role; ``None``: the engines have no roles."""
        engines = [state for state in states if isinstance(state, PairEngineStatus)]
        if not engines and not self.options.in_pairs:
            return None
        return {
            role.value: sum(state.role == role.value and state.health == "up" for state in engines)
            for role in PairRole
        }

    async def _metrics(self, request: Request) -> Response:
        states = await self.routing_backend.replicas()
        return Response(
            self.metrics.exposition(states, self.routing_backend.shares_used()),
            media_type="text/plain; version=0.0.4",
        )

    # -- routes of the gateway -----------------------------------------------------

    async def _events(self, request: Request) -> Response:
        """Receive events of programs and their tools. The answer has one outcome per event."""
        body = await read_body(request, MAX_BATCH_BYTES)
        try:
            batch = decode_batch(body)
        except WireError as error:
            raise ApiError(400, str(error), f"{PREFIX}/capabilities lists what is understood") from None
        outcomes = await self.forwarder.forward_batch(batch, self._tenant(request), self._shown(request))
        return Response(encode(OutcomeBatch(outcomes=outcomes)), media_type="application/json")

    async def _capabilities(self, request: Request) -> Response:
        """Return the capabilities of all engines, merged as if they were those of one server."""
        found = await self.queries.capabilities(self._shown(request))
        if not found:
            raise ApiError(
                503, "no engine answers that speaks sojourn", "try again soon", {"Retry-After": "2"}
            )
        used = {"deadline_seconds"} if self.options.reads_deadlines else set()
        if "pairs" in found:
            used.add("expected_output_length")  # the choice of a decode engine reads it
        unused = [field for field in found.get("unused_hints", ()) if field not in used]
        return _json({**found, "unused_hints": unused, "cluster_policy": self.options.policy})

    async def _programs(self, request: Request) -> Response:
        """List the live programs with their homes.

        A tenant sees its own programs. Engines know the status of a program; ask for a single program."""
        limit = _number(request, "limit", 100, 1, MAX_LISTED_PROGRAMS)
        status = request.query_params.get("status")
        if status is not None:
            raise ApiError(
                400,
                f"status is {status[:40]!r}: this list has all live programs, and engines know their status",
                f"leave it out; GET {PREFIX}/programs/ID has a program's status under engine",
            )
        known = [
            place
            for place in await self.routing_backend.programs()
            if request.state.tenant in (None, place.tenant)
        ]
        shown = known[:limit]
        return _json(RoutedProgramList(programs=shown, shown=len(shown), total=len(known)))

    async def _program(self, request: Request) -> Response:
        """Return one program: its home, and under ``engine`` the answer of its engine.

        Of a program that is over, the gateway knows no more than the engines still remember."""
        program_id = request.path_params["program_id"]
        for place in await self.routing_backend.programs():
            if place.program_id != program_id or request.state.tenant not in (None, place.tenant):
                continue
            told = None
            replica = place.replica or self.routing_backend.answered_by(place.tenant, program_id)
            if replica is not None:
                path = f"{PREFIX}/programs/{_quoted(self.forwarder.names.of(place.tenant, program_id))}"
                told = await self.queries.one(replica, path, self._shown(request))
            engine = told.document if told is not None else None
            if engine is not None:
                shows_all = request.state.tenant is None
                engine = self.forwarder.names.answer(place.tenant, engine, shows_all=shows_all)
            return _json({**msgspec.to_builtins(place), "engine": engine})
        ended = await self._ended_program(request, program_id)
        if ended is not None:
            return _json(ended)
        raise ApiError(404, "no program of this id is known", f"GET {PREFIX}/programs lists those that are")

    async def _ended_program(self, request: Request, program_id: str) -> dict[str, Any] | None:
        """What the engines remember of a program that is over; ``None``: nothing.

        The admin key finds it only if there is one tenant, since its tenant is unknown."""
        names = self.forwarder.names
        tenant = request.state.tenant if request.state.tenant is not None else names.only
        if tenant is None:
            return None
        path = f"{PREFIX}/programs/{_quoted(names.of(tenant, program_id))}"
        engine = await self.queries.ended_program(path, self._shown(request))
        if engine is None:
            return None
        turns, tokens = engine.get("turns", 0), engine.get("context_tokens", 0)
        place = ProgramRouteStatus(program_id, tenant, None, turns, tokens, tokens, 0, 0, 0)
        engine = names.answer(tenant, engine, shows_all=request.state.tenant is None)
        return {**msgspec.to_builtins(place), "engine": engine}

    async def _explanation(self, request: Request) -> Response:
        """Explain a turn of a program, the newest one by default: seconds, tokens, losses and decisions."""
        program_id = request.path_params["program_id"]
        places = await self.routing_backend.programs()
        place = next(
            (p for p in places if p.program_id == program_id and request.state.tenant in (None, p.tenant)),
            None,
        )
        if place is None:
            request.path_params["program_id"] = f"{program_id}/explain"  # an id may itself end in /explain
            return await self._program(request)
        replica = place.replica or self.routing_backend.answered_by(place.tenant, program_id)
        path = f"{PREFIX}/programs/{_quoted(self.forwarder.names.of(place.tenant, program_id))}/explain"
        if "turn" in request.query_params:
            path += f"?turn={_number(request, 'turn', 1, 1, 2**31)}"
        told = await self.queries.one(replica, path, self._shown(request)) if replica is not None else None
        if told is None:
            raise ApiError(503, "the program's engine does not answer", "try again", {"Retry-After": "2"})
        if told.document is None:
            return Response(told.body, told.status, media_type=told.media_type)
        try:
            found = msgspec.convert(told.document, Explanation)
        except msgspec.ValidationError as error:
            raise ApiError(
                502,
                f"the program's engine sent no explanation: {error}",
                "run one release of sojourn everywhere",
            ) from None
        shows_all = request.state.tenant is None
        return _json(self.forwarder.names.explanation(place.tenant, found, replica, shows_all=shows_all))

    async def _graphs(self, request: Request) -> Response:
        """List the graphs that the engines know. Needs the admin key, if there are keys."""
        self._only_admin(request)
        return _json(await self.queries.graphs(self._shown(request)))

    async def _graph(self, request: Request) -> Response:
        """Return one graph with its nodes and edges. Needs the admin key, if there are keys."""
        self._only_admin(request)
        path = f"{PREFIX}/graphs/{_quoted(request.path_params['graph_hash'])}"
        found = await self.queries.first(path, self._shown(request))
        if found is None:
            raise ApiError(404, "no graph of this hash is known", f"GET {PREFIX}/graphs lists those that are")
        return Response(found.body, media_type=found.media_type)

    async def _stats(self, request: Request) -> Response:
        """Return the status of all replicas and the statistics of their engines.

        Needs the admin key, if there are keys."""
        self._only_admin(request)
        told = await self.queries.ask(f"{PREFIX}/stats", self._shown(request))
        replicas = await self.routing_backend.replicas()
        return _json(
            GatewayStats(replicas=replicas, engines=told.documents, stock=told.stock, silent=told.silent)
        )

    async def _stream(self, request: Request) -> Response:
        """Stream live frames as server-sent events: memory, totals and programs of all engines.

        ``once=1`` returns one frame as JSON. A tenant sees its own programs and no totals."""
        audience = Audience(request.state.tenant, pools=self._sees_all(request))
        if request.query_params.get("once", "0") not in ("1", "true"):
            return self.live.stream(audience, request.app.state)
        within_s = None
        if "changed_within_s" in request.query_params:
            within_s = float(_number(request, "changed_within_s", 0, 0, 86_400))
        return await self.live.once(audience, within_s)

    async def _decisions(self, request: Request) -> Response:
        """Return the decision log of one replica's engine. Needs the admin key, if there are keys."""
        self._only_admin(request)
        name = request.query_params.get("replica")
        if name is None and len(self.replicas.engines()) > 1:
            known = ", ".join(one.replica_id for one in self.replicas)
            raise ApiError(
                400,
                "each replica has its own decisions, and the query names none",
                f"add replica=NAME to the query; replicas are: {known}",
            )
        replica = self._replica(name)
        query = "&".join(
            f"{key}={_quoted(value)}" for key, value in request.query_params.items() if key != "replica"
        )
        path = f"{PREFIX}/decisions" + (f"?{query}" if query else "")
        accept = request.headers.get("accept")
        found = await self.queries.one(
            replica.replica_id,
            path,
            self._shown(request),
            headers={"Accept": accept} if accept is not None else None,
        )
        if found is None:
            raise ApiError(503, "this replica does not answer", "try again soon", {"Retry-After": "2"})
        told_by = {REPLICA: replica.replica_id}
        return Response(found.body, found.status, told_by, media_type=found.media_type)

    async def _moves(self, request: Request) -> Response:
        """List the latest changes of programs' homes, oldest first. A tenant sees its own programs'."""
        since = _number(request, "since", 0, 0, 2**63 - 1)
        limit = _number(request, "limit", 100, 1, MAX_LISTED_PROGRAMS)
        moves, following = self.metrics.moves(since, limit, request.state.tenant)
        return _json(MovePage(moves=moves, next=following))

    async def _replica_list(self, request: Request) -> Response:
        """List the replicas with health, load and capacity."""
        states = await self.routing_backend.replicas()
        missing = self.monitor.missing() if self.monitor is not None else []
        refused = self.monitor.refused() if self.monitor is not None else {}
        roles = self._roles(states)
        return _json(
            ReplicaList(
                policy=self.options.policy,
                replicas=states,
                missing=missing,
                pairs=UNSET if roles is None else roles,
                read_side=self.options.read_side or UNSET,
                refused=refused or UNSET,
            )
        )

    async def _openapi(self, request: Request) -> Response:
        """Return this document: OpenAPI 3.1 with the schemas of all answers."""
        return _json(await asyncio.to_thread(lambda: self.document))

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document of the gateway's own routes."""
        return openapi_document("sojourn gateway", self._routes(), GATEWAY_OPERATIONS)

    async def _drain(self, request: Request) -> Response:
        """Send a replica no new programs, and move its programs elsewhere at their next request.

        Needs the admin key."""
        return await self._say_of(request, routing_events.ReplicaDrainStarted)

    async def _stay(self, request: Request) -> Response:
        """Cancel the drain of a replica. Needs the admin key."""
        return await self._say_of(request, routing_events.ReplicaDrainCancelled)

    async def _say_of(
        self,
        request: Request,
        event: type[routing_events.ReplicaDrainStarted | routing_events.ReplicaDrainCancelled],
    ) -> Response:
        """Report ``event`` about the replica that the path names, and answer with the replica's status. Only
        for the admin key."""
        if self.options.admin_key is None:
            raise ApiError(403, "no admin key is set", "start the gateway with an admin key")
        if request.state.tenant is not None:
            raise ApiError(403, "only operators drain replicas", "send the gateway's admin key")
        replica = self._replica(request.path_params["replica"])
        self.routing_backend.tell(event(replica.replica_id))
        logger.info("%s: %s", replica.replica_id, event.__name__)
        states = await self.routing_backend.replicas()
        if event is routing_events.ReplicaDrainStarted and not any(state.health == "up" for state in states):
            logger.warning("every replica is drained or gone: requests wait until one is available")
        return _json(_state_of(states, replica.replica_id))

    def _replica(self, name: str | None) -> ReplicaAddress:
        """The address of the replica ``name``; ``None``: of the first replica. Raises ``ApiError`` if there
        is none."""
        address = self.replicas.get(name) if name is not None else next(iter(self.replicas), None)
        if address is None:
            known = ", ".join(one.replica_id for one in self.replicas) or "none yet"
            raise ApiError(404, "no such replica here", f"replicas are: {known}")
        return address

    # -- internals ----------------------------------------------------------------

    def _told(self, told: ControlAction) -> None:
        """Carry out an action of the core that concerns no single request."""
        if isinstance(told, routing_events.ReleaseProgramKv):
            self._migrator.release(told)
        elif isinstance(told, routing_events.YieldPrograms):
            self.queries.order_yield(told, self.forwarder.names)
        elif self.monitor is not None:
            self.monitor.probe(told)

    def _description_of(self, replica_id: str) -> Any:
        """The last description of a replica's engine; ``None``: unknown."""
        return self.monitor.description_of(replica_id) if self.monitor is not None else None


def _openai_error(failure: ApiError) -> Response:
    """The answer for an error on one of vLLM's own routes, in vLLM's format."""
    text = f"{failure.message}; {failure.next_step}"
    code = INVALID_KEY if failure.status == 401 else "gateway_refused"
    body = error_body(None, failure.status, code, text)
    return Response(body, failure.status, failure.headers, media_type="application/json")


def _log_task_failure(task: asyncio.Future[Any]) -> None:
    """Log the exception of a background task that ended with one."""
    if not task.cancelled() and task.exception() is not None:
        logger.critical("a background task of the gateway failed; restart it", exc_info=task.exception())


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def _state_of(states: Any, replica_id: str) -> ReplicaStatus | None:
    """The status of one replica; ``None``: it is not in ``states``."""
    return next((state for state in states if state.replica == replica_id), None)


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """The query parameter ``name`` as a number, or ``default`` if it is missing. Raises ``ApiError`` unless
    it is a whole number from ``least`` to ``most``."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ApiError(400, f"{name} is {text[:40]!r}", f"expected a whole number from {least} to {most}")
    return value


def _quoted(text: str) -> str:
    """``text``, percent-encoded for a URL, slashes included."""
    return quote(text, safe="")
