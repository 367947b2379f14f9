"""Routes that show a gateway's programs, replicas and engines. Two more routes start and cancel a replica's
drain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api import response_merging
from ...api.api_errors import ApiError
from ...api.live_stream import MAX_DELTA_S, Audience, LiveHub
from ...api.openapi import PREFIX
from ...metrics.turn_explanation import Explanation
from ...programs.program_status import OVER_STATUSES
from ...routing import routing_events
from ...routing.routing_events import PairRole
from ...routing.routing_records import PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .client_access import ClientAccess, engine_authorization
from .client_apis import unavailable_error
from .engine_client import REPLICA, EngineReply
from .engine_monitor import EngineMonitor
from .gateway_metrics import GatewayMetrics
from .gateway_route_types import (
    MAX_LISTED_PROGRAMS,
    GatewayStats,
    MoveList,
    ReplicaList,
    RoutedProgramList,
)
from .multi_engine_queries import EngineQueries
from .peers import Peers
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .routing_backend import RoutingBackend

logger = logging.getLogger(__name__)
NumberT = TypeVar("NumberT", int, float)

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4"
"""Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class StatusRoutes:
    """Routes that show the programs, replicas and engines of one gateway. Two further routes start and cancel
    the drain of a replica."""

    routing_backend: RoutingBackend
    replicas: ReplicaAddresses
    queries: EngineQueries
    names: ProgramIdMapper
    live: LiveHub
    metrics: GatewayMetrics
    access: ClientAccess
    monitor: EngineMonitor
    peers: Peers
    """The other gateways, which drain with this one."""
    policy: str
    """This field and the next ones are those of ``GatewayOptions``."""
    in_pairs: bool
    read_side: str | None

    def routes(self) -> list[Route]:
        """Return all routes of this class. Only ``/health``, ``/ping`` and ``/metrics`` check no key."""
        guard = self.access.guard
        return [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._exposition),
            Route(f"{PREFIX}/programs", guard(self._programs)),
            Route(f"{PREFIX}/programs/{{program_id:path}}/explain", guard(self._explanation)),
            Route(f"{PREFIX}/programs/{{program_id:path}}", guard(self._program)),
            Route(f"{PREFIX}/graphs", guard(self._graphs)),
            Route(f"{PREFIX}/graphs/{{graph_hash}}", guard(self._graph)),
            Route(f"{PREFIX}/stats", guard(self._stats)),
            Route(f"{PREFIX}/stream", guard(self._stream)),
            Route(f"{PREFIX}/decisions", guard(self._decisions)),
            Route(f"{PREFIX}/moves", guard(self._moves)),
            Route(f"{PREFIX}/replicas", guard(self._replica_list)),
            Route(f"{PREFIX}/replicas/{{replica:path}}/drain", guard(self._drain), methods=["POST"]),
            Route(f"{PREFIX}/replicas/{{replica:path}}/stay", guard(self._cancel_drain), methods=["POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        """Handle ``/health``. The status is 200 if at least one replica is not suspect, otherwise 503. With
        prefill and decode engines, 200 also needs an engine of each role that is ``up``. ``peers``: number of
        other gateways that answer."""
        states = self.routing_backend.replicas()
        up = sum(state.health != "suspect" for state in states)
        roles = self._roles(states)
        health = {"replicas": len(states), "up": up, "waiting": self.metrics.waiting, **(roles or {})}
        if self.peers.others:
            health["peers"] = len(self.peers.alive)
        return json_response(health, 200 if up and (roles is None or all(roles.values())) else 503)

    def _roles(self, states: Sequence[ReplicaStatus]) -> dict[str, int] | None:
        """Return the number of engines that are ``up``, by role; ``None``: the engines have no roles."""
        engines = [state for state in states if isinstance(state, PairEngineStatus)]
        if not engines and not self.in_pairs:
            return None
        return {
            role.value: sum(state.role == role.value and state.health == "up" for state in engines)
            for role in PairRole
        }

    async def _exposition(self, request: Request) -> Response:
        states = self.routing_backend.replicas()
        page = self.metrics.exposition(
            states,
            self.routing_backend.core.strategy.shares_used(),
            missing=len(self.monitor.missing()),
            up_by_role=self._roles(states),
        )
        return Response(page, media_type=METRICS_MEDIA_TYPE)

    async def _programs(self, request: Request) -> Response:
        """List the live programs with their homes.

        A tenant sees only its own programs. The list has no program's status, because only engines know it.
        To get the status, ask for a single program.
        """
        limit = _number(request, "limit", 100, 1, MAX_LISTED_PROGRAMS)
        status = request.query_params.get("status")
        if status is not None:
            raise ApiError(
                400,
                f"status is {status[:40]!r}: this list has all live programs, and engines know their status",
                f"leave it out; GET {PREFIX}/programs/ID has a program's status under engine",
            )
        found = self._visible_programs(request)
        shown = found[:limit]
        return json_response(RoutedProgramList(programs=shown, shown=len(shown), total=len(found)))

    def _visible_programs(self, request: Request) -> list[ProgramRouteStatus]:
        """Return the live programs that the client may see, most recently active first."""
        tenant = request.state.tenant
        programs = self.routing_backend.core.program_statuses()
        return [program for program in programs if tenant in (None, program.tenant)]

    def _place(self, request: Request) -> tuple[ProgramRouteStatus, bool]:
        """Return (status of the program that the path names, whether it is live). Of another program, which
        may have ended, only id and tenant are known. Raises ``ApiError`` if the tenant is not known either,
        because the request has the admin key and there are several."""
        program_id = request.path_params["program_id"]
        for place in self._visible_programs(request):
            if place.program_id == program_id:
                return place, True
        tenant: str | None = request.state.tenant
        tenant = tenant if tenant is not None else self.names.only_tenant
        if tenant is None:
            raise _unknown_program()
        return ProgramRouteStatus(program_id, tenant, None, 0, 0, 0, 0, 0, 0), False

    async def _ask(
        self, request: Request, place: ProgramRouteStatus, more: str = ""
    ) -> dict[str, EngineReply | None]:
        """Ask the engine that served a program last; all engines if that is unknown or gone. Return their
        answers by name. ``more``: rest of the path of the route."""
        path = f"{PREFIX}/programs/{_quoted(self.names.engine_name(place.tenant, place.program_id))}{more}"
        authorization = engine_authorization(request)
        last = place.replica or self.routing_backend.core.answered_by(place.tenant, place.program_id)
        if last is not None and last in self.replicas:
            return {last: await self.queries.one(last, path, authorization)}
        replies = await self.queries.every(path, authorization)
        return {urlsplit(url).netloc: reply for url, reply in replies.items()}

    async def _program(self, request: Request) -> Response:
        """Return one program: its home, and under ``engine`` the answer of its engine.

        For an ended program, the answer has only what the engines still remember."""
        place, is_live = self._place(request)
        found = await self._remembered(request, place)
        if not is_live:
            if found is None or found.get("status") not in OVER_STATUSES:
                raise _unknown_program()
            turns, tokens = found.get("turns", 0), found.get("context_tokens", 0)
            place = ProgramRouteStatus(place.program_id, place.tenant, None, turns, tokens, tokens, 0, 0, 0)
        if found is not None:
            found = self.names.answer(place.tenant, found, shows_all=request.state.tenant is None)
        return json_response({**msgspec.to_builtins(place), "engine": found})

    async def _remembered(self, request: Request, place: ProgramRouteStatus) -> dict[str, Any] | None:
        """Return what the engines remember about a program; ``None``: nothing."""
        replies = (await self._ask(request, place)).values()
        return response_merging.merge_program([one.document for one in replies if one is not None])

    async def _explanation(self, request: Request) -> Response:
        """Explain a turn of a program, the newest one by default: seconds, tokens, losses and decisions.

        If only engines remember the program, the explanation with the highest turn number is returned."""
        turn = f"?turn={_number(request, 'turn', 1, 1, 2**31)}" if "turn" in request.query_params else ""
        place, is_live = self._place(request)
        replies = await self._ask(request, place, f"/explain{turn}")
        explained: list[tuple[Explanation, str]] = []
        wrong = ""
        for replica, reply in replies.items():
            if reply is not None and reply.document is not None:
                try:
                    explained.append((msgspec.convert(reply.document, Explanation), replica))
                except msgspec.ValidationError as error:
                    wrong = str(error)
        if explained:
            found, replica = max(explained, key=lambda one: one[0].turn)
            shows_all = request.state.tenant is None
            return json_response(self.names.explanation(place.tenant, found, replica, shows_all=shows_all))
        if wrong:
            what = f"the program's engine sent no explanation: {wrong}"
            raise ApiError(502, what, "run one release of sojourn everywhere")
        if not is_live:
            known = await self._remembered(request, place) if turn else None
            if known is not None and known.get("status") in OVER_STATUSES:
                raise ApiError(404, "the turn is no longer known", "leave turn out for the newest one")
            raise _unknown_program()
        answer = next(iter(replies.values())) if len(replies) == 1 else None
        if answer is None:
            raise unavailable_error("the program's engine does not answer")
        return Response(answer.body, answer.status, media_type=answer.media_type)

    async def _graphs(self, request: Request) -> Response:
        """List the graphs that the engines know. Needs the admin key, if there are keys."""
        self.access.only_admin(request)
        return json_response(await self.queries.graphs(engine_authorization(request)))

    async def _graph(self, request: Request) -> Response:
        """Return one graph with its nodes and edges. Needs the admin key, if there are keys."""
        self.access.only_admin(request)
        path = f"{PREFIX}/graphs/{_quoted(request.path_params['graph_hash'])}"
        found = await self.queries.first(path, engine_authorization(request))
        if found is None:
            raise ApiError(404, "no graph of this hash is known", f"GET {PREFIX}/graphs lists those that are")
        return Response(found.body, media_type=found.media_type)

    async def _stats(self, request: Request) -> Response:
        """Return the status of all replicas and the statistics of their engines.

        Needs the admin key, if there are keys."""
        self.access.only_admin(request)
        found = await self.queries.ask(f"{PREFIX}/stats", engine_authorization(request))
        replicas = self.routing_backend.replicas()
        return json_response(
            GatewayStats(replicas=replicas, engines=found.documents, stock=found.stock, silent=found.silent)
        )

    async def _stream(self, request: Request) -> Response:
        """Stream live frames as server-sent events: memory, totals and programs of all engines.

        ``once=1`` returns one frame as JSON. A tenant sees its own programs and no totals."""
        audience = Audience(request.state.tenant, pools=self.access.sees_all(request))
        if request.query_params.get("once", "0") not in ("1", "true"):
            return self.live.stream(audience, request.app.state)
        within_s = None
        if "changed_within_s" in request.query_params:
            within_s = _number(request, "changed_within_s", 0.0, 0, MAX_DELTA_S)
        return await self.live.once(audience, within_s)

    async def _decisions(self, request: Request) -> Response:
        """Return the decision log of one replica's engine. Needs the admin key, if there are keys."""
        self.access.only_admin(request)
        name = request.query_params.get("replica")
        if name is None and len(self.replicas.engines()) > 1:
            known = ", ".join(one.replica_id for one in self.replicas.values())
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
            engine_authorization(request),
            headers={"Accept": accept} if accept is not None else None,
        )
        if found is None:
            raise unavailable_error("this replica does not answer")
        told_by = {REPLICA: replica.replica_id}
        return Response(found.body, found.status, told_by, media_type=found.media_type)

    async def _moves(self, request: Request) -> Response:
        """List the latest changes of programs' homes, oldest first. A tenant sees only its own programs."""
        return json_response(MoveList(moves=self.metrics.moves(request.state.tenant)))

    async def _replica_list(self, request: Request) -> Response:
        """List the replicas with health, load and capacity."""
        states = self.routing_backend.replicas()
        roles = self._roles(states)
        return json_response(
            ReplicaList(
                policy=self.policy,
                replicas=states,
                missing=self.monitor.missing(),
                pairs=UNSET if roles is None else roles,
                read_side=self.read_side or UNSET,
                refused=self.monitor.refused() or UNSET,
            )
        )

    async def _drain(self, request: Request) -> Response:
        """Send a replica no new programs, and move its programs elsewhere at their next request.

        Needs the admin key."""
        return await self._report_drain_event(request, routing_events.ReplicaDrainStarted)

    async def _cancel_drain(self, request: Request) -> Response:
        """Cancel the drain of a replica. The answer is null if the replica is absent. Needs the admin key."""
        return await self._report_drain_event(request, routing_events.ReplicaDrainCancelled)

    async def _report_drain_event(
        self,
        request: Request,
        event: type[routing_events.ReplicaDrainStarted | routing_events.ReplicaDrainCancelled],
    ) -> Response:
        """Report ``event`` about the replica that the path names, and answer with the replica's status.
        Raises ``ApiError`` without the admin key, if a drain is to start at an absent replica, or if another
        gateway has not taken the order."""
        if self.access.admin_key is None:
            raise ApiError(403, "no admin key is set", "start the gateway with an admin key")
        if request.state.tenant is not None:
            raise ApiError(403, "only operators drain replicas", "send the gateway's admin key")
        replica_id = request.path_params["replica"]
        if event is routing_events.ReplicaDrainStarted:
            self._replica(replica_id)
        self.routing_backend.tell(event(replica_id))
        missed = await self.peers.repeat(request.scope["path"], request.scope["headers"])
        if self.replicas.get(replica_id) is not None:
            logger.info("%s: %s", replica_id, event.__name__)
        else:
            # The core may have remembered the drain of a replica that is gone.
            logger.warning("%.200r is not here; it will not be drained if it returns", replica_id)
        states = self.routing_backend.replicas()
        if event is routing_events.ReplicaDrainStarted and not any(state.health == "up" for state in states):
            logger.warning("every replica is drained or gone: requests wait until one is available")
        if missed:
            what = f"this gateway has taken the order, but not {', '.join(missed)}"
            raise ApiError(502, what, "send it again when they answer")
        return json_response(next((state for state in states if state.replica == replica_id), None))

    def _replica(self, name: str | None) -> ReplicaAddress:
        """Return the address of the replica ``name``; ``None``: of the first replica. Raises ``ApiError`` if
        there is no such replica."""
        address = self.replicas.get(name) if name is not None else next(iter(self.replicas.values()), None)
        if address is None:
            known = ", ".join(one.replica_id for one in self.replicas.values()) or "none yet"
            raise ApiError(404, "no such replica here", f"replicas are: {known}")
        return address


def _number(request: Request, name: str, default: NumberT, least: int, most: int) -> NumberT:
    """Return the query parameter ``name`` as a number of the type of ``default``. If it is missing, return
    ``default``. Raises ``ApiError`` unless it is a number of this type from ``least`` to ``most``."""
    text = request.query_params.get(name)
    if text is None:
        return default
    kind = type(default)
    try:
        value = kind(text)
    except ValueError:
        value = kind(least - 1)
    if not least <= value <= most:  # also if it is no number (nan)
        expected = "a whole number" if kind is int else "a number"
        raise ApiError(400, f"{name} is {text[:40]!r}", f"expected {expected} from {least} to {most}")
    return value


def _unknown_program() -> ApiError:
    return ApiError(404, "no program of this id is known", f"GET {PREFIX}/programs lists those that are")


def _quoted(text: str) -> str:
    """Return ``text`` percent-encoded for a URL, slashes included."""
    return quote(text, safe="")


def json_response(document: Any, status: int = 200) -> Response:
    """Return ``document`` as a JSON answer."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")
