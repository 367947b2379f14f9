"""Routes that show a gateway's programs, replicas and engines, and that drain replicas."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api import response_merging
from ...api.api_errors import ApiError
from ...api.live_stream import MAX_DELTA_S, Audience, LiveHub
from ...api.openapi import PREFIX, either
from ...core.engine_answers import EngineStats, PolicyState
from ...metrics.turn_explanation import Explanation
from ...programs.program_status import OVER_STATUSES
from ...routing.routing_events import PairRole, ReplicaDrainCancelled, ReplicaDrainStarted
from ...routing.routing_records import PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .client_apis import unavailable_error
from .engine_client import REPLICA, EngineReply
from .gateway_metrics import GatewayMetrics, ProgramMove
from .multi_engine_queries import EngineQueries
from .peers import Peers
from .replica_addresses import ReplicaAddress
from .routing_backend import RoutingBackend
from .tenant_keys import ClientAccess, engine_authorization

logger = logging.getLogger(__name__)

MAX_LISTED_PROGRAMS = 1000
"""Maximum number of programs in one answer."""

AnyReplicaStatus = Annotated[Any, either(ReplicaStatus, PairEngineStatus)]


class RoutedProgramList(msgspec.Struct, frozen=True, kw_only=True):
    """Live programs of the client, the most recently active first. The answer has ``shown`` of ``total``."""

    programs: Sequence[ProgramRouteStatus]
    shown: int
    total: int
    note: str = "ended programs are not listed; GET /sojourn/v1/programs/ID or sojourn top shows them"
    """What the list leaves out, for people."""


class GatewayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Status of all replicas, and the statistics of their engines."""

    replicas: Sequence[AnyReplicaStatus]
    engines: dict[str, EngineStats]
    """Statistics by the engine's URL."""
    stock: list[str]
    """URLs of engines that run without sojourn."""
    silent: list[str]
    """URLs of engines that did not answer."""


class PolicyStates(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of all engines after a switch."""

    engines: dict[str, PolicyState]
    """Policy by the engine's URL."""
    stock: list[str]
    """URLs of engines that run without sojourn."""
    silent: list[str]
    """URLs of engines that did not answer."""


class MoveList(msgspec.Struct, frozen=True, kw_only=True):
    """The latest moves of programs to other replicas, the oldest first."""

    moves: Sequence[ProgramMove]


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a gateway."""

    policy: str
    replicas: Sequence[AnyReplicaStatus]
    missing: list[str]
    """Addresses at which no engine answers. On Ray, names of deployments, each once per missing engine."""
    pairs: dict[str, int] | UnsetType = UNSET
    """Number of engines that are up, by role (``prefill`` or ``decode``); absent without roles."""
    read_side: str | UnsetType = UNSET
    """Name of the policy that chooses which engine of a pair reads KV from storage; absent: unknown."""
    refused: Mapping[str, str] | UnsetType = UNSET
    """Addresses of engines that answer but get no requests, with the reasons."""


class StatusRoutes:
    """The routes of a ``Gateway``, which sets the fields."""

    routing_backend: RoutingBackend
    queries: EngineQueries
    live: LiveHub
    metrics: GatewayMetrics
    access: ClientAccess
    peers: Peers
    policy: str
    """Name of the cluster preset, or of the rules of pairs."""
    read_side: str | None
    """Name of the policy that chooses which engine of a pair reads KV from storage; ``None``: no pairs."""

    def status_routes(self) -> list[Route]:
        """Return all routes of this class. Only ``/health``, ``/ping`` and ``/metrics`` check no key."""
        guard = self.access.guard
        return [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._exposition),
            Route(f"{PREFIX}/programs", guard(self._programs)),
            Route(f"{PREFIX}/programs/{{program_id:path}}/explain", guard(self._explanation)),
            Route(f"{PREFIX}/programs/{{program_id:path}}", guard(self._program)),
            Route(f"{PREFIX}/stats", guard(self._stats)),
            Route(f"{PREFIX}/policy", guard(self._switch_policy), methods=["POST"]),
            Route(f"{PREFIX}/stream", guard(self._stream)),
            Route(f"{PREFIX}/decisions", guard(self._decisions)),
            Route(f"{PREFIX}/moves", guard(self._moves)),
            Route(f"{PREFIX}/replicas", guard(self._replica_list)),
            *(
                Route(f"{PREFIX}/replicas/{{replica:path}}/{order}", guard(self._drain), methods=["POST"])
                for order in ("drain", "stay")
            ),
        ]

    async def _health(self, request: Request) -> Response:
        """Answer 503 unless a replica is not suspect and, with roles, one of each is ``up``."""
        states = self.routing_backend.replicas()
        up = sum(state.health != "suspect" for state in states)
        roles = self._roles(states)
        health = {
            "replicas": len(states),
            "up": up,
            "waiting": len(self.routing_backend.core.waiting),
            **(roles or {}),
        }
        if self.peers.others:
            health["peers"] = len(self.peers.alive)
        return json_response(health, 200 if up and (roles is None or all(roles.values())) else 503)

    def _roles(self, states: Sequence[ReplicaStatus]) -> dict[str, int] | None:
        """Return the number of engines that are ``up``, by role; ``None``: they have no roles."""
        engines = [state for state in states if isinstance(state, PairEngineStatus)]
        if not engines and not self.peers.in_pairs:
            return None
        return {
            role.value: sum(state.role == role.value and state.health == "up" for state in engines)
            for role in PairRole
        }

    async def _exposition(self, request: Request) -> Response:
        states, core = self.routing_backend.replicas(), self.routing_backend.core
        missing, uses = len(self.queries.monitor.missing()), core.shares_used()
        page = self.metrics.exposition(states, uses, missing, self._roles(states) or {}, len(core.waiting))
        return Response(page, media_type="text/plain; version=0.0.4")

    async def _programs(self, request: Request) -> Response:
        """List the live programs with their homes, most recently active first. Engines know their status."""
        limit = _number(request, "limit", 100, 1, MAX_LISTED_PROGRAMS)
        if (status := request.query_params.get("status")) is not None:
            what = f"status is {status[:40]!r}; this list has all live programs"
            raise ApiError(400, what, f"leave it out; GET {PREFIX}/programs/ID has it under engine")
        found = self._visible_programs(request)
        shown = found[:limit]
        return json_response(RoutedProgramList(programs=shown, shown=len(shown), total=len(found)))

    def _visible_programs(self, request: Request) -> list[ProgramRouteStatus]:
        tenant = request.state.tenant
        programs = self.routing_backend.core.program_statuses()
        return [program for program in programs if tenant in (None, program.tenant)]

    def _place(self, request: Request) -> tuple[ProgramRouteStatus, bool]:
        """Return (status of the path's program, whether it is live), of others with only id and tenant."""
        program_id = request.path_params["program_id"]
        for place in self._visible_programs(request):
            if place.program_id == program_id:
                return place, True
        tenant = self.queries.names.only_tenant if request.state.tenant is None else request.state.tenant
        if tenant is None:
            raise _unknown_program()
        return ProgramRouteStatus(program_id, tenant, None, 0, 0, 0, 0, 0, 0), False

    async def _ask(
        self, request: Request, place: ProgramRouteStatus, more: str = ""
    ) -> dict[str, EngineReply | None]:
        """Ask the engine that served a program last; if that is unknown or gone, all."""
        name = self.queries.names.engine_name(place.tenant, place.program_id)
        path = f"{PREFIX}/programs/{quote(name, safe='')}{more}"
        authorization = engine_authorization(request)
        last = place.replica or self.routing_backend.core.last_engines(place.tenant, place.program_id)[0]
        if last is not None and last in self.queries.replicas:
            return {last: await self.queries.one(last, path, authorization)}
        replies = await self.queries.every(path, authorization)
        return {urlsplit(url).netloc: reply for url, reply in replies.items()}

    async def _program(self, request: Request) -> Response:
        """Return one program: its home, and under ``engine`` what its engine says or still remembers."""
        place, is_live = self._place(request)
        replies = (await self._ask(request, place)).values()
        found = response_merging.merge_program([one.document for one in replies if one is not None])
        if not is_live:
            if found is None or found.get("status") not in OVER_STATUSES:
                raise _unknown_program()
            turns, tokens = found.get("turns", 0), found.get("context_tokens", 0)
            place = ProgramRouteStatus(place.program_id, place.tenant, None, turns, tokens, tokens, 0, 0, 0)
        if found is not None:
            found = self.queries.names.answer(place.tenant, found, shows_all=request.state.tenant is None)
        return json_response({**msgspec.to_builtins(place), "engine": found})

    async def _explanation(self, request: Request) -> Response:
        """Explain a turn of a program, by default the newest one that an engine remembers."""
        turn = f"?turn={_number(request, 'turn', 1, 1, 2**31)}" if "turn" in request.query_params else ""
        place, is_live = self._place(request)
        replies = await self._ask(request, place, f"/explain{turn}")
        documents = {name: one.document for name, one in replies.items() if one is not None and one.document}
        explained = []
        for name, document in documents.items():
            with contextlib.suppress(msgspec.ValidationError):
                explained.append((msgspec.convert(document, Explanation), name))
        if documents and not explained:
            raise ApiError(502, "the program's engine sent no explanation", "run one release everywhere")
        if explained:
            found, replica = max(explained, key=lambda one: one[0].turn)
            shows_all = request.state.tenant is None
            shown = self.queries.names.explanation(place.tenant, found, replica, shows_all=shows_all)
            return json_response(shown)
        if not is_live:
            raise _unknown_program()
        answer = next(iter(replies.values())) if len(replies) == 1 else None
        if answer is None:
            raise unavailable_error("the program's engine does not answer")
        return Response(answer.body, answer.status, media_type=answer.media_type)

    async def _switch_policy(self, request: Request) -> Response:
        """Switch the policy of all engines off or on. Needs the admin key."""
        self._only_operators(request)
        if (on := request.query_params.get("on")) not in ("true", "false"):
            raise ApiError(400, f"on is {on!r}; expected true or false", f"POST {PREFIX}/policy?on=false")
        path = f"{PREFIX}/policy?on={on}"
        found = await self.queries.every(path, engine_authorization(request), body=b"")
        found.check_key()
        states = msgspec.convert(found.documents, dict[str, PolicyState])
        return json_response(PolicyStates(engines=states, stock=found.stock, silent=found.silent))

    async def _stats(self, request: Request) -> Response:
        """Return the status of all replicas and the statistics of their engines."""
        self.access.only_admin(request)
        found = await self.queries.every(f"{PREFIX}/stats", engine_authorization(request))
        replicas, engines = self.routing_backend.replicas(), cast("dict[str, EngineStats]", found.documents)
        stats = GatewayStats(replicas=replicas, engines=engines, stock=found.stock, silent=found.silent)
        return json_response(stats)

    async def _stream(self, request: Request) -> Response:
        """Stream live frames of all engines as server-sent events; with ``once=1`` return one as JSON."""
        audience = Audience(request.state.tenant, pools=self.access.sees_all(request))
        if request.query_params.get("once", "0") not in ("1", "true"):
            return self.live.stream(audience, request.app.state)
        is_delta = "changed_within_s" in request.query_params
        within_s = _number(request, "changed_within_s", 0.0, 0, MAX_DELTA_S) if is_delta else None
        return await self.live.once(audience, within_s)

    async def _decisions(self, request: Request) -> Response:
        """Return the decision log of one replica's engine. Needs the admin key, if there are keys."""
        self.access.only_admin(request)
        name = request.query_params.get("replica")
        if name is None and len(self.queries.replicas.engines()) > 1:
            what = "each replica has its own decisions, and the query names none"
            raise ApiError(400, what, f"add replica=NAME to the query; replicas are: {self._known()}")
        replica_id = self._replica(name).replica_id
        query = urlencode([(key, value) for key, value in request.query_params.items() if key != "replica"])
        path, accept = f"{PREFIX}/decisions?{query}", request.headers.get("accept", "*/*")
        found = await self.queries.one(
            replica_id, path, engine_authorization(request), headers={"Accept": accept}
        )
        if found is None:
            raise unavailable_error("this replica does not answer")
        return Response(found.body, found.status, {REPLICA: replica_id}, media_type=found.media_type)

    async def _moves(self, request: Request) -> Response:
        """List the latest changes of programs' homes, oldest first. A tenant sees only its own programs."""
        return json_response(MoveList(moves=self.metrics.moves(request.state.tenant)))

    async def _replica_list(self, request: Request) -> Response:
        """List the replicas with health, load and capacity."""
        states = self.routing_backend.replicas()
        listed = ReplicaList(
            policy=self.policy,
            replicas=states,
            missing=self.queries.monitor.missing(),
            pairs=UNSET if (roles := self._roles(states)) is None else roles,
            read_side=self.read_side or UNSET,
            refused=self.queries.monitor.refused() or UNSET,
        )
        return json_response(listed)

    async def _drain(self, request: Request) -> Response:
        """Start the drain of a replica, or cancel it if the path ends with ``stay``. Answer with the
        replica's status; null if it is absent."""
        self._only_operators(request)
        replica_id = request.path_params["replica"]
        if is_start := request.scope["path"].endswith("/drain"):
            self._replica(replica_id)
        self.routing_backend.tell((ReplicaDrainStarted if is_start else ReplicaDrainCancelled)(replica_id))
        missed = await self.peers.repeat(request.scope["path"], request.scope["headers"])
        logger.info("%.200r: %s", replica_id, "it is drained" if is_start else "its drain is cancelled")
        if missed:
            what = f"this gateway has taken the order, but not {', '.join(missed)}"
            raise ApiError(502, what, "send it again when they answer")
        states = self.routing_backend.replicas()
        return json_response(next((state for state in states if state.replica == replica_id), None))

    def _only_operators(self, request: Request) -> None:
        if self.access.admin is None:
            raise ApiError(403, "no admin key is set", "start the gateway with an admin key (--admin-key)")
        if request.state.tenant is not None:
            raise ApiError(403, "this is for operators", "send the gateway's admin key")

    def _replica(self, name: str | None) -> ReplicaAddress:
        replicas = self.queries.replicas
        address = replicas.get(next(iter(replicas), None) if name is None else name)
        if address is None:
            raise ApiError(404, "no such replica here", f"replicas are: {self._known() or 'none yet'}")
        return address

    def _known(self) -> str:
        return ", ".join(one.replica_id for one in self.queries.replicas.values())


def _number(request: Request, name: str, default: float, least: int, most: int) -> Any:
    """Return a query parameter as a number of the type of ``default``, its value if it is missing."""
    text, kind = request.query_params.get(name), type(default)
    try:
        value = default if text is None else kind(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:  # also if it is no number (nan)
        expected = f"{'a whole number' if kind is int else 'a number'} from {least} to {most}"
        raise ApiError(400, f"{name} is {str(text)[:40]!r}", f"expected {expected}")
    return value


def _unknown_program() -> ApiError:
    return ApiError(404, "no program of this id is known", f"GET {PREFIX}/programs lists those that are")


def json_response(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")
