"""Ray Serve's deployments of engines and gateways. Also the gateways' own HTTP servers beside Serve's
proxies."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import ray
import uvicorn
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...policies.cluster_preset import ClusterPreset
from ...routing.routing_events import PairRole, ProbeReplica
from ...routing.routing_from_preset import PAIR_POLICY, routing_reasons
from ..http.client_connection import DeadlineProtocol, log_accept_errors_rarely, raise_open_file_limit
from ..http.engine_descriptions import EngineDescription
from ..http.engine_monitor import EngineMonitorProtocol
from ..http.engine_probe import PROBE_TIMEOUT_S, EngineProbe
from ..http.gateway_app import Gateway, GatewayOptions
from ..http.gateway_metrics import GatewayMetrics
from ..http.replica_addresses import ReplicaAddresses
from ..http.status_routes import METRICS_MEDIA_TYPE
from ..http.tenant_keys import DEFAULT_TENANT, TenantKeys, load_tenant_keys
from .coordinated_routing_backend import CoordinatedRoutingBackend
from .coordinator_actor import CoordinatorActorClient, load_policy_preset, routing_rules
from .engine_process import STOP_GRACE_S, EngineProcess
from .engine_supervisor import EngineSupervisor
from .ray_config import EngineGroup, RayConfig, parse_config, read_key

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds that an idle connection of a client stays open. The time is longer than the usual limits of clients
and load balancers, because they should close idle connections first."""
MAX_TRIED_PORTS = 100
"""Maximum number of ports that a gateway tries for its own metrics."""


async def serve_http(app: Starlette, host: str, port: int) -> None:
    """Serve ``app`` until cancelled. Then let running requests finish, for at most ``STREAM_GRACE_S``.
    Several processes may share the port. Raises ``OSError`` if a process uses the port without sharing it."""
    await _serve(app, bound_socket(host, port))


async def serve_metrics(metrics: GatewayMetrics, config: RayConfig) -> None:
    """Serve this gateway's own metrics (``own_exposition``) until cancelled. Use the first free port from
    ``metrics_port`` on. If no port is free, log an error and return."""
    assert config.metrics_port is not None
    used = (config.port, config.direct_port)
    bound = first_free_socket(config.host, config.metrics_port, used)
    if bound is None:
        logger.error("no port from %d on is free for the metrics of this gateway", config.metrics_port)
        return
    logger.info("the metrics of this gateway are at port %d", bound.getsockname()[1])

    async def metrics_route(request: Request) -> Response:
        return Response(metrics.own_exposition(), media_type=METRICS_MEDIA_TYPE)

    await _serve(Starlette(routes=[Route("/metrics", metrics_route)]), bound)


async def _serve(app: Starlette, bound: socket.socket) -> None:
    """Serve ``app`` at a bound socket until cancelled."""
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(STREAM_GRACE_S),
        server_header=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def bound_socket(host: str, port: int, *, shared: bool = True) -> socket.socket:
    """Open a TCP socket at an address. ``shared``: whether several processes may share the address. Raises
    ``OSError`` if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm, which costs 40 ms, only for sockets declared as TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The kernel spreads connections over the gateways of a node, and skips dead ones.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    try:
        bound.bind((host, port))
        if not shared:
            bound.listen()  # with SO_REUSEADDR, others can bind the port until it listens
    except OSError:
        bound.close()
        raise
    return bound


def first_free_socket(host: str, first: int, used: Collection[int | None]) -> socket.socket | None:
    """Open a TCP socket at the first free port from ``first`` on, for this process alone. Return ``None`` if
    none of ``MAX_TRIED_PORTS`` ports is free. ``used``: ports to skip."""
    for port in range(first, min(first + MAX_TRIED_PORTS, 65536)):
        if port not in used:
            with contextlib.suppress(OSError):
                return bound_socket(host, port, shared=False)
    return None


def restrict_to_loopback() -> None:
    """Restrict the server of a Serve replica to the loopback interface. Serve opens this server on all
    interfaces, for calls between deployments, and has no setting to change this.

    Call this in the replica's process before the replica is ready. Raises ``RuntimeError`` if this release of
    Ray works differently.
    """
    from ray.serve._private import replica

    opens: Any = getattr(replica, "add_port_to_grpc_server", None)
    if opens is None:
        raise RuntimeError(
            "this release of Ray opens its replicas' ports differently from 2.60; expected 2.60, or "
            "loopback_only: false"
        )
    if getattr(opens, "keeps_to_loopback", False):
        return

    def on_loopback(server: Any, address: str) -> Any:
        return opens(server, address.replace("[::]:", "127.0.0.1:").replace("0.0.0.0:", "127.0.0.1:"))

    on_loopback.keeps_to_loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = on_loopback  # type: ignore[attr-defined,unused-ignore]


GATEWAY = "Gateway"
"""Name of the gateways' deployment."""
WANTED_ENGINES_METRIC = "wanted_engines"
"""Name under which engine replicas report the wanted number of engines to Serve."""
GATEWAY_CPUS = 0.1
"""CPUs that Ray reserves for a gateway."""
MAX_ONGOING_REQUESTS = 100_000
"""Serve's limit of requests per gateway. It is high, because the coordinator already limits waiting
requests."""
STREAM_GRACE_S = 60.0
"""Maximum seconds that a stopping gateway waits for running requests to end."""


class EngineReplica:
    """One engine as a Serve replica. Gateways send requests to the engine's own address, not through
    Serve."""

    async def __init__(self, config: dict[str, Any], name: str) -> None:  # type: ignore[misc]
        """Start the engine and wait until it answers. ``config``: a document that ``parse_config`` reads.
        ``name``: name of the deployment, equal to that of its ``EngineGroup``."""
        read = parse_config(config, source="the deployment")
        if read.on_loopback:
            restrict_to_loopback()
        context = serve.get_replica_context()
        group = next(one for one in read.groups if one.name == name)
        engines = group.engines
        host = "127.0.0.1" if read.on_loopback else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        process = EngineProcess(
            engine_command(read, group, host),
            engine_id=context.replica_id.unique_id,
            host=host,
            log_dir=Path(engines.log_dir) if engines.log_dir is not None else log_dir(),
            environment=engines.environment,
            key=read_key(read.keys.engine, "keys.engine"),
            start_timeout_s=engines.start_timeout_s,
            role=PairRole(group.role) if group.role is not None else None,
            # A restarted engine uses its predecessor's store.
            words={"{node}": _node_name(), "{rank}": str(context.rank.rank)},
        )
        self._supervisor = EngineSupervisor(process, CoordinatorActorClient(read), drain_s=engines.drain_s)
        await self._supervisor.start()

    def check_health(self) -> None:
        """Raise ``EngineFailed`` if the engine is gone, so that Serve replaces this replica."""
        self._supervisor.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that ``autoscaling_policy`` reads. Empty if the wanted number of engines is
        unknown, because a reported zero would lower Serve's average over time."""
        wanted = self._supervisor.wanted_engines
        return {WANTED_ENGINES_METRIC: float(wanted)} if wanted else {}

    async def __call__(self) -> str:
        return self._supervisor.process.url

    async def __del__(self) -> None:
        if hasattr(self, "_supervisor"):
            await self._supervisor.stop()


def autoscaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy. Return (number of engines that the coordinator wants, empty policy state).

    Engine replicas receive the number when they register, and report it to Serve as a metric. The highest
    reported number counts. Without a report, the present number of engines stays.
    """
    reported = (context.aggregated_metrics or {}).get(WANTED_ENGINES_METRIC, {})
    wanted = int(max(reported.values(), default=0))
    return wanted or context.target_num_replicas, {}


def engine_command(config: RayConfig, group: EngineGroup, host: str) -> list[str]:
    """Return the command that starts an engine of a group, with placeholders such as ``{port}``. ``host``:
    address at which a prefill or decode engine listens for KV."""
    if group.engines.command:
        return list(group.engines.command)
    args = list(group.engines.args)
    if group.role is not None:
        args = [*_role_args(config, group.role, args, host), *args]
    elif not any(one == "--policy" or one.startswith(("--policy=", "--policy-file")) for one in args):
        args = ["--policy", load_policy_preset(config).engine, *args]
    quiet = "--disable-uvicorn-access-log"
    if quiet not in args:
        args.append(quiet)  # health checks come twice a second
    serve_it = [sys.executable, "-m", "sojourn_server.cli", "serve", config.model]
    return [*serve_it, "--host", "{host}", "--port", "{port}", *args]


def _role_args(config: RayConfig, role: str, args: Sequence[str], host: str) -> list[str]:
    """Return the further arguments of ``sojourn serve`` for a prefill or decode engine. ``args``: the
    configured arguments."""
    assert config.pairs.store is not None, "the configuration was checked"
    own = ["--role", role, "--kv-store", config.pairs.store, "--kv-node", "{node}"]
    own += ["--kv-store-name", f"{config.name[:40]}-{role}-{{rank}}"]
    if not any(one == "--kv-listen" or one.startswith("--kv-listen=") for one in args):
        own += ["--kv-listen", f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0"]
    return own


def _node_name() -> str:
    """Return a unique name of this Ray node. It is Ray's name for the node, or else the node's id."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["NodeID"] == node_id and node.get("NodeName"):
            return str(node["NodeName"])
    return str(node_id)


class RayEngineMonitor(EngineMonitorProtocol):
    """Monitor of a gateway on Ray. It probes replicas at the coordinator's request, and returns the engine
    descriptions that the coordinator reported."""

    def __init__(
        self,
        routing_backend: CoordinatedRoutingBackend,
        session: Callable[[], aiohttp.ClientSession],
        engine_key: str | None,
        groups: Sequence[EngineGroup] = (),
    ) -> None:
        """``engine_key``: key sent to engines; ``None``: no key. ``groups``: engines that Ray is to run."""
        self._routing_backend = routing_backend
        self._groups = groups
        self._session = session
        self._engine_key = engine_key
        self._tasks: set[asyncio.Task[None]] = set()

    def probe(self, action: ProbeReplica) -> None:
        """Start to check whether a replica is alive, and report the result to the coordinator. A probe that
        fails in the gateway itself is not reported."""
        task = asyncio.ensure_future(self._probe(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, action: ProbeReplica) -> None:
        place = self._routing_backend.places.get(action.replica_id)
        if place is None:
            return
        probe = EngineProbe(place.url, self._session, key=self._engine_key)
        alive = await probe.check_health(PROBE_TIMEOUT_S)
        if not probe.failed_here:
            self._routing_backend.probed(action.replica_id, action.instance, alive is True)

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """Return the last description of a replica's engine; ``None``: unknown."""
        place = self._routing_backend.places.get(replica_id)
        return place.description if place is not None else None

    def missing(self) -> list[str]:
        """Return the names of the deployments with fewer engines than their minimum, each name once per
        missing engine. An engine is missing if the coordinator does not know it."""
        places = self._routing_backend.places.values()
        engines = {
            (place.url, place.paths.role.value if place.paths is not None else None) for place in places
        }
        known = Counter(role for _, role in engines)
        return [group.name for group in self._groups for _ in range(group.engines.min - known[group.role])]


def build_gateway(config: RayConfig) -> tuple[Gateway, CoordinatedRoutingBackend, Starlette]:
    """Build a gateway whose decisions come from the remote coordinator. Return (gateway, its routing backend,
    its ASGI application)."""
    rules = routing_rules(config)
    preset = rules if isinstance(rules, ClusterPreset) else None
    options = GatewayOptions(
        policy=preset.name if preset is not None else PAIR_POLICY,
        engine_key=read_key(config.keys.engine, "keys.engine"),
        admin_key=read_key(config.keys.admin, "keys.admin"),
        reads_prefixes=preset is not None and preset.routing.reads_prefixes,
        reads_deadlines=preset is not None and preset.sharing.divides_capacity,
        silent_program_s=config.silent_program_s,
        in_pairs=config.in_pairs,
        read_side=config.pairs.read_side if config.in_pairs else None,
    )
    # A gateway adds its own reasons, for known homes and for decisions without the coordinator.
    own = {"home", "sent_by_gateway"} if preset is not None else set()
    reasons = {*routing_reasons(rules), *own, "coordinator_away"}
    metrics = GatewayMetrics(reasons, shares_address=config.gateways > 1)
    replicas = ReplicaAddresses()
    routing_backend = CoordinatedRoutingBackend(CoordinatorActorClient(config), replicas)
    routing_backend.on_action = metrics.decided
    gateway = Gateway(routing_backend, replicas, load_tenants(config), options, metrics)
    key = options.engine_key
    gateway.monitor = RayEngineMonitor(routing_backend, gateway.session, key, config.groups)
    # Another gateway has moved the program, so send this gateway's records of it to the new home.
    routing_backend.on_affinity_change = lambda key, home: gateway.forwarder.catch_up(key, home[0])

    def background() -> list[Awaitable[Any]]:
        running: list[Awaitable[Any]] = [routing_backend.run()]
        if config.direct_port is not None:
            running.append(serve_http(app, config.host, config.direct_port))
        if config.metrics_port is not None:
            running.append(serve_metrics(metrics, config))
        return running

    raise_open_file_limit(config.max_waiting)
    log_accept_errors_rarely()
    app = gateway.app(background)
    return gateway, routing_backend, app


def load_tenants(config: RayConfig) -> TenantKeys:
    """Read the clients' keys that the configuration names. Raises ``TenantKeysError``, ``RayConfigError``."""
    if config.tenants is not None:
        return load_tenant_keys(Path(config.tenants))
    key = read_key(config.keys.api, "keys.api")
    return TenantKeys({key: DEFAULT_TENANT} if key else None)


def application(config: RayConfig) -> Any:
    """Return the Serve application of gateways and engines, for ``serve.run``."""
    document = config.plain()
    gateway: Any = serve.deployment(
        gateway_class(document),
        name=GATEWAY,
        num_replicas=config.gateways,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=STREAM_GRACE_S,
    )
    # Engines are bound only to be deployed together; tokens do not pass through Serve.
    return gateway.bind(*(_engine_deployment(group).bind(document, group.name) for group in config.groups))


def _engine_deployment(group: EngineGroup) -> Any:
    engines = group.engines
    number: dict[str, Any] = {"num_replicas": engines.min}
    if engines.scales:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=engines.min,
                max_replicas=engines.max or engines.min,
                initial_replicas=engines.min,
                # The coordinator has already waited ``shrink_after_s``.
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                metrics_interval_s=1.0,
                look_back_period_s=2.0,
                policy=AutoscalingPolicy(policy_function=autoscaling_policy),  # type: ignore[no-untyped-call]
            )
        }
    return serve.deployment(
        EngineReplica,
        name=group.name,
        max_ongoing_requests=100,
        ray_actor_options={
            "num_cpus": engines.num_cpus,
            "num_gpus": engines.num_gpus,
            "resources": engines.resources,
        },
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=engines.drain_s + STOP_GRACE_S + 10.0,
        **number,
    )


def gateway_class(document: dict[str, Any]) -> type[Any]:
    """Return the class of the gateways' deployment, which is Serve's ingress. Each replica builds its own
    ASGI application. ``document``: a configuration that ``parse_config`` reads."""

    def build_app() -> Starlette:
        config = parse_config(document, source="the deployment")
        if config.on_loopback:
            restrict_to_loopback()
        return build_gateway(config)[2]

    ingress: type[Any] = serve.ingress(build_app)()
    return ingress


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application.

    ``serve deploy`` and a RayService call this function if their configuration names it, as
    ``import_path: sojourn_server.gateway.ray.deployments:build``. ``args`` holds the keys of the gateway's
    configuration. Raises ``RayConfigError``.
    """
    return application(parse_config(args, source="args"))


def log_dir() -> Path:
    """Return the default folder for engines' logs."""
    return Path(tempfile.gettempdir()) / f"sojourn-{getpass.getuser()}" / "engines"
