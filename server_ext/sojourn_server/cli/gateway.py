"""``sojourn gateway``: one address for several engines, that sends a program's turns to where its KV is."""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .console import CliError, console

if TYPE_CHECKING:
    from sojourn_server.gateway.http.tenants import Tenants
    from sojourn_server.policy.cluster_preset import ClusterPreset


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("gateway", help="One address for several engines: a program's turns go to where its KV is.")(
        gateway
    )


def gateway(
    context: typer.Context,
    engines: list[str] = typer.Option([], help="Addresses of engines, http://HOST:PORT; commas or repeated"),
    policy: str = typer.Option("sojourn", help="A cluster preset's name"),
    policy_file: Path | None = typer.Option(None, help="A TOML cluster preset in place of a named one"),
    host: str = typer.Option("127.0.0.1", help="Address to listen at"),
    port: int = typer.Option(8100, min=0, max=65535, help="Port to listen at; 0: any that is free"),
    tenants: Path | None = typer.Option(None, help="TOML file of tenants and their keys"),
    api_key: str | None = typer.Option(
        None, envvar="SOJOURN_API_KEY", help="One key for everybody, where there is no file of tenants"
    ),
    engine_key: str | None = typer.Option(
        None, envvar="SOJOURN_ENGINE_KEY", help="Key shown to engines in place of the client's own"
    ),
    admin_key: str | None = typer.Option(
        None,
        envvar="SOJOURN_ADMIN_KEY",
        help="Key of those who may drain replicas and see everybody's",
    ),
    max_waiting: int = typer.Option(20_000, min=1, help="Requests that may wait; more are answered with 429"),
    wait_s: float = typer.Option(600.0, min=0.1, help="Longest wait of a request for room, seconds"),
    state: Path | None = typer.Option(None, help="File to keep programs' homes in over a restart"),
    log_level: str = typer.Option("info", help="debug, info, warning or error"),
    ray: Path | None = typer.Option(
        None,
        help="YAML file: engines and gateways on a Ray cluster, all options from this file (docs/ray.md)",
    ),
) -> None:
    """Serve until stopped; requests that are on their way are finished first."""
    import importlib.util

    needed = ("aiohttp", "starlette", "uvicorn", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(f"not installed: {', '.join(missing)}", "pip install '.[gateway]' from a checkout")
    if ray is not None:
        _serve_on_ray(ray, _given(context, "ray"))
        return
    from sojourn_server.gateway.http.replicas import BadAddress, read_url

    try:
        urls = [read_url(part) for text in engines for part in text.split(",") if part.strip()]
    except BadAddress as error:
        raise CliError(str(error), "sojourn gateway --engines http://HOST:PORT,http://HOST:PORT") from None
    if not urls:
        raise CliError("no engines were named", "sojourn gateway --engines http://HOST:PORT,http://HOST:PORT")
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise CliError(f"{', '.join(twice)} is named twice", "name each engine once")
    for name, key in (("--api-key", api_key), ("--engine-key", engine_key), ("--admin-key", admin_key)):
        if key is not None and not key.strip():
            raise CliError(f"{name} is empty", "leave it out, or give a key")
    preset = _preset(policy, policy_file)
    known = _tenants(tenants, api_key)
    if log_level not in ("debug", "info", "warning", "error"):
        raise CliError(f"--log-level is {log_level!r}", "expected debug, info, warning or error")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not known.checks and not _is_loopback(host):
        console.print(
            f"[yellow]note:[/] {host} can be reached from elsewhere and no keys are checked here: whoever "
            "reaches it may use the engines. --tenants or --api-key checks keys.",
            soft_wrap=True,
        )
    _serve(urls, preset, known, host, port, engine_key, admin_key, max_waiting, wait_s, state, log_level)


def _serve(
    urls: list[str],
    preset: ClusterPreset,
    known: Tenants,
    host: str,
    port: int,
    engine_key: str | None,
    admin_key: str | None,
    max_waiting: int,
    wait_s: float,
    state: Path | None,
    log_level: str,
) -> None:
    import uvicorn

    from sojourn_server.gateway.core.limits import CoreLimits
    from sojourn_server.gateway.http.app import GatewayOptions
    from sojourn_server.gateway.http.standalone import build

    limits = CoreLimits(most_waiting=max_waiting, wait_s=wait_s)
    options = GatewayOptions(
        policy=preset.name,
        engine_key=engine_key,
        admin_key=admin_key,
        reads_prefixes=preset.routing.reads_prefixes,
    )
    _, app = build(urls, preset, known, options, limits=limits, state=state)
    _check_port(host, port)
    many = "engine" if len(urls) == 1 else "engines"
    console.print(f"policy {preset.name}: {len(urls)} {many} behind http://{host}:{port}", highlight=False)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,
        ws="none",
        # Longer than clients and load balancers keep a connection, so that they close it first.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=60,
        server_header=False,
        proxy_headers=False,
    )


def _check_port(host: str, port: int) -> None:
    """Before anything is begun: uvicorn says it late and without a way out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CliError(
                f"{host}:{port} cannot be listened at: {error.strerror}", "choose another --port"
            ) from None


def _given(context: typer.Context, but: str) -> list[str]:
    """Options on the command line; environment variables may be there for something else."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name != but}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _serve_on_ray(path: Path, others: list[str]) -> None:
    import importlib.util

    if others:
        raise CliError(
            f"--ray and {', '.join(others)} are both given",
            f"write it into {path}: docs/ray.md lists the keys",
        )
    # Not ray.serve: to look for that imports Ray, which reads the environment only then.
    if importlib.util.find_spec("ray") is None:
        raise CliError("not installed: ray", "pip install '.[gateway,ray]' from a checkout")
    from sojourn_server.gateway.ray.config import ConfigError, read_config
    from sojourn_server.gateway.ray.environment import set_environment

    try:
        config = read_config(path)
    except ConfigError as error:
        raise CliError(str(error), "docs/ray.md lists the keys") from None
    known = _preset(config.policy, Path(config.policy_file) if config.policy_file is not None else None)
    if config.tenants is not None:
        _tenants(Path(config.tenants), None)
    set_environment(config)
    from sojourn_server.gateway.ray.serving import serve_until_stopped

    console.print(f"policy {known.name} on Ray, engines run {known.engine}", highlight=False)
    try:
        # What failed may say anything, brackets too.
        serve_until_stopped(
            config, lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False)
        )
    except (RuntimeError, ConnectionError) as error:
        raise CliError(str(error).strip().splitlines()[-1], "docs/ray.md says where the logs are") from None


def _preset(policy: str, policy_file: Path | None) -> ClusterPreset:
    from sojourn_server.policy.building import PresetError
    from sojourn_server.policy.cluster_preset import load_cluster_preset, read_cluster_preset

    try:
        return load_cluster_preset(policy) if policy_file is None else read_cluster_preset(policy_file)
    except PresetError as error:
        raise CliError(str(error), "docs/gateway.md lists the cluster presets") from None


def _tenants(path: Path | None, api_key: str | None) -> Tenants:
    from sojourn_server.gateway.http.tenants import EVERYBODY, Tenants, TenantsError, read_tenants

    if path is not None and api_key is not None:
        raise CliError("--tenants and --api-key are both given", "write the key into the file of tenants")
    if path is None:
        return Tenants({api_key: EVERYBODY} if api_key else None)
    try:
        return read_tenants(path)
    except TenantsError as error:
        unset = "the environment has no" in str(error)
        how = 'write [tenants] and under it lines NAME = ["KEY", ...]'
        raise CliError(str(error), "export it, or take the line out" if unset else how) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
