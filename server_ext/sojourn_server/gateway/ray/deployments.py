"""The deployments, and the application that they make: engines, and gateways before them."""

from __future__ import annotations

import asyncio
import getpass
import logging
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.applications import Starlette

from ..core.from_preset import reasons_of
from ..core.journal import Home
from ..core.programs import Key
from ..http.app import Gateway, GatewayOptions
from ..http.books import Books
from ..http.replicas import Replicas
from ..http.tenants import EVERYBODY, Tenants, read_tenants
from ..http.watch import PROBE_TIMEOUT_S
from ..pd.facts import Role
from ..pd.standalone import POLICY, REASONS
from .actor import ActorCalls, preset_of
from .config import Group, RayConfig, key_of, parse_config
from .decider import RayDecider
from .listening import keep_to_loopback, listen
from .process import END_S, EngineProcess
from .supervisor import Supervisor
from .watch import RayWatch

logger = logging.getLogger(__name__)

GATEWAY = "Gateway"
WANTED = "wanted_engines"
GATEWAY_CPUS = 0.1
"""What Ray reserves for a gateway."""
MOST_ONGOING = 100_000
"""Of a gateway: what waits is bounded by the coordinator."""
STREAM_GRACE_S = 60.0


class EngineReplica:
    """One engine. Nobody calls it: requests go to its engine's own address."""

    async def __init__(self, config: dict[str, Any], name: str) -> None:  # type: ignore[misc]
        """``name``: of its deployment."""
        read = parse_config(config, source="the deployment")
        if read.on_loopback:
            keep_to_loopback()
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
            key=key_of(read.keys.engine, "keys.engine"),
            start_timeout_s=engines.start_timeout_s,
            role=Role(group.role) if group.role is not None else None,
            # A restarted engine goes on with the store of the one before.
            words={"{node}": _node_name(), "{rank}": str(context.rank.rank)},
        )
        self._supervisor = Supervisor(process, ActorCalls(read), drain_s=engines.drain_s)
        await self._supervisor.start()

    def check_health(self) -> None:
        """Raises where the engine is gone: then Serve starts another replica."""
        self._supervisor.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For ``follow_the_coordinator``."""
        return {WANTED: float(self._supervisor.wanted_engines)}

    async def __call__(self) -> str:
        return self._supervisor.process.url

    async def __del__(self) -> None:
        if hasattr(self, "_supervisor"):
            await self._supervisor.stop()


def follow_the_coordinator(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many engines as the coordinator says; it is what replicas heard when they registered."""
    told = (context.aggregated_metrics or {}).get(WANTED, {})
    wanted = int(max(told.values(), default=0))
    return wanted or context.target_num_replicas, {}


def engine_command(config: RayConfig, group: Group, host: str) -> list[str]:
    """What a replica starts at ``host``, with words in braces for the rest."""
    if group.engines.command:
        return list(group.engines.command)
    args = list(group.engines.args)
    if group.role is not None:
        args = [*_of_role(config, group.role, args, host), *args]
    elif not any(one == "--policy" or one.startswith(("--policy=", "--policy-file")) for one in args):
        args = ["--policy", preset_of(config).engine, *args]
    quiet = "--disable-uvicorn-access-log"
    if quiet not in args:
        args.append(quiet)  # it is asked for its health twice a second
    serve_it = [sys.executable, "-m", "sojourn_server.cli", "serve", config.model]
    return [*serve_it, "--host", "{host}", "--port", "{port}", *args]


def _of_role(config: RayConfig, role: str, args: Sequence[str], host: str) -> list[str]:
    assert config.pairs.store is not None, "the configuration was checked"
    own = ["--role", role, "--kv-store", config.pairs.store, "--kv-node", "{node}"]
    own += ["--kv-store-name", f"{config.name[:40]}-{role}-{{rank}}"]
    if not any(one == "--kv-listen" or one.startswith("--kv-listen=") for one in args):
        own += ["--kv-listen", f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0"]
    return own


def _node_name() -> str:
    """Of this node of Ray's, another one for each."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["NodeID"] == node_id and node.get("NodeName"):
            return str(node["NodeName"])
    return str(node_id)


def build_gateway(config: RayConfig) -> tuple[Gateway, RayDecider, Starlette]:
    """A gateway replica's application: the one of one machine, with another decider."""
    preset = None if config.in_pairs else preset_of(config)
    options = GatewayOptions(
        policy=preset.name if preset is not None else POLICY,
        engine_key=key_of(config.keys.engine, "keys.engine"),
        admin_key=key_of(config.keys.admin, "keys.admin"),
        reads_prefixes=preset is not None and preset.routing.reads_prefixes,
    )
    # Some a gateway gives itself: it sends to homes that it knows, and while the coordinator is away.
    homes = {*reasons_of(preset), "home", "sent_by_gateway"} if preset is not None else set(REASONS)
    books = Books({*homes, "coordinator_away"})
    replicas = Replicas()
    decider = RayDecider(ActorCalls(config), replicas)
    decider.on_decided = books.decided
    gateway = Gateway(decider, replicas, tenants_of(config), options, books, uses=decider.uses)
    headers = {"Authorization": f"Bearer {options.engine_key}"} if options.engine_key else {}
    gateway.watch = RayWatch(decider, lambda url: _lives(gateway.session(), url, headers))

    def on_home(key: Key, before: Home | None, home: Home) -> None:
        # Another gateway has sent the program there; what was said of it here follows it.
        if before is None:
            gateway.news.settled(key, home[0])
        else:
            gateway.news.moved(key, home[0])

    decider.on_home = on_home

    def beside() -> list[Awaitable[Any]]:
        running: list[Awaitable[Any]] = [decider.run()]
        if config.direct_port is not None:
            running.append(listen(app, config.host, config.direct_port))
        return running

    app = gateway.app(beside)
    return gateway, decider, app


def tenants_of(config: RayConfig) -> Tenants:
    """Whose keys are known. Raises ``TenantsError``, ``ConfigError``."""
    if config.tenants is not None:
        return read_tenants(Path(config.tenants))
    key = key_of(config.keys.api, "keys.api")
    return Tenants({key: EVERYBODY} if key else None)


async def _lives(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with session.get(f"{url}/health", headers=headers, timeout=timeout) as answer:
            return answer.status not in (500, 503)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return False


def application(config: RayConfig) -> Any:
    """For ``serve.run``."""
    document = config.plain()
    gateway: Any = serve.deployment(
        gateway_class(document),
        name=GATEWAY,
        num_replicas=config.gateways,
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=STREAM_GRACE_S,
    )
    # Engines are bound to it only so that they are deployed with it: tokens do not go through Serve.
    return gateway.bind(*(_deployment(group).bind(document, group.name) for group in config.groups))


def _deployment(group: Group) -> Any:
    """Of engines of one kind."""
    engines = group.engines
    number: dict[str, Any] = {"num_replicas": engines.min}
    if engines.scales:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=engines.min,
                max_replicas=engines.max or engines.min,
                initial_replicas=engines.min,
                # The coordinator has waited already where it is worth waiting.
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                metrics_interval_s=1.0,
                look_back_period_s=2.0,
                policy=AutoscalingPolicy(policy_function=follow_the_coordinator),  # type: ignore[no-untyped-call]
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
        graceful_shutdown_timeout_s=engines.drain_s + END_S + 10.0,
        **number,
    )


def gateway_class(document: dict[str, Any]) -> type[Any]:
    """The ingress: each replica builds its own ASGI application."""

    def build_app() -> Starlette:
        config = parse_config(document, source="the deployment")
        if config.on_loopback:
            keep_to_loopback()
        return build_gateway(config)[2]

    ingress: type[Any] = serve.ingress(build_app)()
    return ingress


def build(args: dict[str, Any]) -> Any:
    """For ``serve deploy`` and a RayService: ``import_path: sojourn_server.gateway.ray.deployments:build``,
    with the keys of the configuration under ``args``. Raises ``ConfigError``."""
    return application(parse_config(args, source="args"))


def log_dir() -> Path:
    """Where engines write if nobody says otherwise."""
    return Path(tempfile.gettempdir()) / f"sojourn-{getpass.getuser()}" / "engines"
