"""What runs on Ray Serve: the deployments of engines, of gateways, and of the directory that lists them."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import math
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import ray
import uvicorn
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.applications import Starlette

from ...metrics.rate_limited_log import RateLimitedLog
from ...policies.cluster_preset import ClusterPreset, load_cluster_preset, read_cluster_preset
from ...routing.routing_events import PairRole, ReplicaDrainStarted
from ...routing.routing_from_preset import PrefillDecodeRules
from ...routing.routing_limits import RoutingLimits
from ..http.gateway_app import Gateway, GatewayOptions, build_gateway
from ..http.gateway_server import raise_open_file_limit, uvicorn_settings
from ..http.peers import Peers
from ..http.tenant_keys import load_tenant_keys
from .engine_process import STOP_GRACE_S, EngineProcess
from .ray_config import EngineGroup, RayConfig, parse_config, read_key

logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)

DIRECTORY = "Directory"
"""Name of the directory's deployment."""
ANNOUNCE_S = 2.0
"""Seconds between two announcements of an engine or gateway."""
SILENT_S = 10.0
"""Seconds without an announcement after which an engine or gateway is no longer listed."""
CALL_TIMEOUT_S = 10.0
"""Seconds that a caller waits for the directory."""
GATEWAY = "Gateway"
"""Name of the gateways' deployment."""
GATEWAY_CPUS = 0.1
"""CPUs that Ray reserves for a gateway."""
STREAM_GRACE_S = 60.0
"""Maximum seconds that a stopping gateway waits for running requests to end."""
MAX_TRIED_PORTS = 100
"""Maximum number of ports that a gateway tries for its own address."""
MAX_ONGOING_REQUESTS = 100_000
"""Serve's limit of requests per gateway. It is high, because each gateway limits its waiting requests."""
ENGINES_METRIC = "engines"
"""Name under which an engine's replica reports to Serve how many engines its load would fill to the
target."""


class Announcement(NamedTuple):
    """An engine or a gateway that runs."""

    url: str
    kind: str
    """Name of its deployment."""
    is_draining: bool = False
    """Whether the engine is about to stop, and takes no new programs."""


class FleetDirectory:
    """The list of engines and gateways that run: one Serve replica that remembers the last seconds'
    announcements.

    The list is no state that matters. A restarted directory is complete after ``ANNOUNCE_S``, and its readers
    keep the engines and gateways that still answer them, listed or not."""

    def __init__(self, *, on_loopback: bool) -> None:
        if on_loopback:
            restrict_to_loopback()
        self._heard: dict[str, tuple[float, Announcement]] = {}
        """(time of the last announcement, announcement), by URL."""

    def announce(self, one: Announcement) -> list[Announcement]:
        """Add an announcement to the list, and return the list."""
        now_s = time.monotonic()
        self._heard[one.url] = (now_s, one)
        self._heard = {url: heard for url, heard in self._heard.items() if now_s - heard[0] < SILENT_S}
        return [listed for _, listed in self._heard.values()]


async def announce(one: Announcement) -> list[Announcement]:
    """Announce an engine or gateway from its own Serve replica. Return all that run. Raises what Ray raises,
    and ``TimeoutError``."""
    directory = serve.get_deployment_handle(DIRECTORY, serve.get_replica_context().app_name)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        listed: list[Announcement] = await directory.announce.remote(one)
    return listed


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


class EngineReplica:
    """One engine as a Serve replica. Gateways send requests to the engine's own address, not through
    Serve."""

    async def __init__(self, config: RayConfig, name: str) -> None:  # type: ignore[misc]
        """Start the engine and wait until it answers. ``name``: name of the deployment, equal to that of its
        ``EngineGroup``."""
        if config.on_loopback:
            restrict_to_loopback()
        context = serve.get_replica_context()
        group = next(one for one in config.groups if one.name == name)
        self._engines, self._name = group.engines, name
        host = node_address(config)
        engine_id = context.replica_id.unique_id
        self._process = EngineProcess(
            command=engine_command(config, group, host),
            engine_id=engine_id,
            host=host,
            log_path=log_dir(group) / f"engine-{engine_id}.log",
            environment={key: str(value) for key, value in group.engines.environment.items()},
            api_key=read_key(config.keys.engine, "keys.engine"),
            start_timeout_s=group.engines.start_timeout_s,
            # A restarted engine uses its predecessor's store.
            words={"{rank}": str(context.rank.rank)},
        )
        self._is_draining = False
        await self._process.start()
        self._tasks = [asyncio.ensure_future(one) for one in (self._process.watch(), self._announce())]

    def check_health(self) -> None:
        """Raise ``EngineFailed`` if the engine is gone, so that Serve replaces this replica."""
        self._process.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that ``autoscaling_policy`` reads; empty if the engine does not answer."""
        load = await self._process.load()
        return {} if load is None else {ENGINES_METRIC: load[0] / self._engines.target_use}

    async def __del__(self) -> None:
        if not hasattr(self, "_tasks"):
            return
        self._is_draining = True
        try:
            await self._announce_once()
            # Gateways read the list every ``ANNOUNCE_S``, and may send turns until then.
            await self._process.drain(ANNOUNCE_S + 1.0, self._engines.drain_s)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._process.stop()

    async def _announce(self) -> None:
        """Announce the engine while it runs."""
        while self._process.code is None:
            await self._announce_once()
            await asyncio.sleep(ANNOUNCE_S)

    async def _announce_once(self) -> None:
        """Announce the engine. It goes on while the directory is away."""
        try:
            await announce(Announcement(self._process.url, self._name, self._is_draining))
        except Exception as error:
            _log.log(logging.WARNING, "the engine was not announced: %s", error)


def autoscaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy. Return (number of engines that have the present load at the target use,
    empty policy state). Serve keeps the number within its bounds, and waits before it stops an engine.
    Without a report, the present number of engines stays."""
    reported = (context.aggregated_metrics or {}).get(ENGINES_METRIC, {})
    wanted = math.ceil(round(sum(reported.values()), 6)) if reported else context.target_num_replicas
    return max(wanted, 1), {}


def engine_command(config: RayConfig, group: EngineGroup, host: str) -> list[str]:
    """Return the command that starts an engine of a group, with placeholders such as ``{port}``. ``host``:
    address at which a prefill or decode engine listens for KV."""
    if group.engines.command:
        return [str(part) for part in group.engines.command]
    args = [str(part) for part in group.engines.args]
    if group.role is not None:
        assert config.pairs.store is not None, "the configuration was checked"
        if not any(one == "--kv-listen" or one.startswith("--kv-listen=") for one in args):
            args = ["--kv-listen", f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0", *args]
        name = f"{config.name[:40]}-{group.role}-{{rank}}"
        store = ["--kv-store", config.pairs.store, "--kv-store-name", name]
        args = ["--role", group.role, *store, *args]
    elif not any(one == "--policy" or one.startswith(("--policy=", "--policy-file")) for one in args):
        args = ["--policy", load_policy_preset(config).engine, *args]
    quiet = "--disable-uvicorn-access-log"
    if quiet not in args:
        args.append(quiet)  # health checks come twice a second
    serve_it = [sys.executable, "-m", "sojourn_server.cli", "serve", config.model]
    return [*serve_it, "--host", "{host}", "--port", "{port}", *args]


def node_address(config: RayConfig) -> str:
    """Return the address at which engines and gateways of this node reach each other."""
    return "127.0.0.1" if config.on_loopback else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def load_policy_preset(config: RayConfig) -> ClusterPreset:
    """Load the cluster preset that the configuration names. Raises ``PresetError``."""
    if config.policy_file is not None:
        return read_cluster_preset(Path(config.policy_file), allowed_modules=config.allow_policy_modules)
    return load_cluster_preset(config.policy)


def build_ray_gateway(config: RayConfig, own_url: str) -> tuple[Gateway, Starlette]:
    """Build a gateway without engines; ``follow_directory`` names them. ``own_url``: the address at which
    other gateways reach it. Return (gateway, its ASGI application)."""
    options = GatewayOptions(
        engine_key=read_key(config.keys.engine, "keys.engine"),
        admin_key=read_key(config.keys.admin, "keys.admin"),
        max_body_bytes=config.max_body_mib << 20,
        session_header=config.session_header,
    )
    limits = RoutingLimits(
        most_waiting=config.max_waiting, wait_s=config.wait_s, silent_program_s=config.silent_program_s
    )
    pairs, tenants = config.pairs, Path(config.tenants) if config.tenants is not None else None
    rules = PrefillDecodeRules(
        pairs.read_side, pairs.short_queue_s, pairs.most_prefill_s, pairs.high_tokens_ratio
    )
    return build_gateway(
        (),
        rules if config.in_pairs else load_policy_preset(config),
        load_tenant_keys(tenants, read_key(config.keys.api, "keys.api")),
        options,
        limits=limits,
        peers=Peers(own_url),
    )


async def follow_directory(gateway: Gateway, config: RayConfig, own_url: str) -> None:
    """Announce a gateway, and keep its lists of engines and of other gateways, until cancelled."""
    while True:
        await asyncio.sleep(ANNOUNCE_S)
        await read_directory(gateway, config, own_url)


async def read_directory(gateway: Gateway, config: RayConfig, own_url: str) -> None:
    """Announce a gateway, and update its lists of engines and of other gateways. Without an answer of the
    directory, they stay."""
    try:
        listed = await announce(Announcement(own_url, GATEWAY))
    except Exception as error:
        _log.log(logging.WARNING, "the list of engines and gateways is not known: %s", error)
        return
    roles = {group.name: PairRole(group.role) if group.role else None for group in config.groups}
    engines = [one for one in listed if one.kind in roles]
    running = Counter(one.kind for one in engines)
    absent = [group.name for group in config.groups for _ in range(group.engines.min - running[group.name])]
    gateway.monitor.watch({one.url: roles[one.kind] for one in engines}, absent)
    await gateway.peers.set_urls(one.url for one in listed if one.kind == GATEWAY)
    draining = {one.url for one in engines if one.is_draining}
    for address in gateway.replicas.values():
        if address.url in draining:
            gateway.routing_backend.tell(ReplicaDrainStarted(address.replica_id))


def gateway_class(config: RayConfig) -> type[Any]:
    """Return the class of the gateways' deployment, which is Serve's ingress. Each replica builds its own
    ASGI application."""

    def build_app() -> Starlette:
        if config.on_loopback:
            restrict_to_loopback()
        host = node_address(config)
        own = own_socket(host, config.metrics_port)
        name = f"[{host}]" if ":" in host else host
        own_url = f"http://{name}:{own.getsockname()[1]}"
        gateway, app = build_ray_gateway(config, own_url)
        gateway.starts.insert(0, lambda: read_directory(gateway, config, own_url))
        gateway.tasks.append(lambda: serve_http(app, own))
        direct = config.direct_port
        if direct is not None:
            gateway.tasks.append(lambda: serve_http(app, bound_socket(config.host, direct, shared=True)))
        gateway.tasks.append(lambda: follow_directory(gateway, config, own_url))
        raise_open_file_limit(config.max_waiting)
        logger.info("this gateway's own address is %s", own_url)
        return app

    ingress: type[Any] = serve.ingress(build_app)()
    return ingress


def own_socket(host: str, first: int | None) -> socket.socket:
    """Open a TCP socket for one gateway: at the first free port from ``first`` on, or at any free port if
    ``first`` is ``None`` or its neighbours are all in use."""
    for port in range(first, min(first + MAX_TRIED_PORTS, 65536)) if first is not None else ():
        with contextlib.suppress(OSError):
            return bound_socket(host, port, shared=False)
    return bound_socket(host, 0, shared=False)


def bound_socket(host: str, port: int, *, shared: bool) -> socket.socket:
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


async def serve_http(app: Starlette, bound: socket.socket) -> None:
    """Serve ``app`` at a bound socket until cancelled. Then let running requests finish, for at most
    ``STREAM_GRACE_S``."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=round(STREAM_GRACE_S),
        **uvicorn_settings(),
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def application(config: RayConfig) -> Any:
    """Return the Serve application of gateways, engines and the directory, for ``serve.run``."""
    gateway: Any = serve.deployment(
        gateway_class(config),
        name=GATEWAY,
        num_replicas=config.number_of_gateways,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=STREAM_GRACE_S,
    )
    directory: Any = serve.deployment(
        FleetDirectory, name=DIRECTORY, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    # Engines and directory are bound only to be deployed together; tokens do not pass through Serve.
    engines = [_engine_deployment(group).bind(config, group.name) for group in config.groups]
    return gateway.bind(directory.bind(on_loopback=config.on_loopback), *engines)


def _engine_deployment(group: EngineGroup) -> Any:
    engines = group.engines
    number: dict[str, Any] = {"num_replicas": engines.min}
    if engines.scales:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=engines.min,
                max_replicas=engines.max or engines.min,
                initial_replicas=engines.min,
                upscale_delay_s=0.0,
                downscale_delay_s=engines.shrink_after_s,
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


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application.

    ``serve deploy`` and a RayService call this function if their configuration names it, as
    ``import_path: sojourn_server.gateway.ray.deployments:build``. ``args`` holds the keys of the gateway's
    configuration. Raises ``RayConfigError``.
    """
    return application(parse_config(args, source="args"))


def log_dir(group: EngineGroup) -> Path:
    """Return the folder for the logs of a group's engines."""
    usual = Path(tempfile.gettempdir()) / f"sojourn-{getpass.getuser()}" / "engines"
    return Path(group.engines.log_dir) if group.engines.log_dir is not None else usual
