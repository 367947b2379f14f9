"""``sojourn gateway``: one address for several engines, or for pairs of prefill and decode engines.

The gateway sends the turns of a program to the engine that holds the program's KV, of pairs the prefill
engine, unless another one is done sooner.
"""

from __future__ import annotations

import gc
import ipaddress
import logging
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from sojourn.config import local_url
from sojourn.errors import InputError, install_command

from ..gateway.http.replica_addresses import parse_engine_url
from ..gateway.ray.ray_config import RayConfig, RayConfigError, read_config, read_key, set_ray_environment
from ..policies import cluster_preset
from ..policies.cluster_preset import ClusterPreset, with_waiting_order
from ..policies.prefill_decode.engine_pair_scheduler import READ_SIDE_POLICIES, PrefillDecodeRules
from ..policies.preset import preset_names
from ..policies.preset_store import PresetError
from ..routing.routing_events import PairRole
from ..routing.routing_limits import RoutingLimits
from .console import CliError, check_free_port, from_options, given_options, print_line, print_note

if TYPE_CHECKING:
    from sojourn_server.gateway.http.peers import Peers
    from sojourn_server.gateway.http.tenant_keys import TenantKeys

_ENGINES = "sojourn gateway --engines http://HOST:PORT,http://HOST:PORT"
_PAIRS = "sojourn gateway --prefill http://HOST:PORT --decode http://HOST:PORT,http://HOST:PORT"
_PEERS = "sojourn gateway --engines ... --peers http://HOST:PORT,http://HOST:PORT --own-url http://HOST:PORT"
_WAITING_ORDERS = ("arrival", "idleness", "largest-first")
_STOP_GRACE_S = 60
"""Seconds that running requests have to finish after SIGTERM or Ctrl-C."""


def gateway(
    context: typer.Context,
    engines: list[str] = typer.Option(
        [], help="Addresses of engines, http://HOST:PORT, separated by commas or repeated"
    ),
    prefill: list[str] = typer.Option(
        [], help="In place of --engines: addresses of engines of --role prefill (docs/prefill-decode.md)"
    ),
    decode: list[str] = typer.Option([], help="With --prefill: addresses of engines of --role decode"),
    read_side: str = typer.Option(
        "shorter",
        help="With --prefill: reader of KV from storage: shorter (the shorter queue) or prefill",
    ),
    short_queue_s: float = typer.Option(
        3.0,
        min=0.0,
        help="With --prefill, the paper's α: prefill engines on a node with more than these seconds of "
        "queued storage reads are chosen last",
    ),
    most_prefill_s: float = typer.Option(
        5.0,
        min=0.1,
        help="With --prefill, the paper's β: an engine whose unfinished prompt tokens would take more than "
        "these seconds at the measured speed gets no new request; inf: no limit",
    ),
    high_tokens_ratio: float = typer.Option(
        1.05,
        min=0.01,
        help="With --prefill, the paper's Z: decode engines above this multiple of their group's mean "
        "tokens are chosen last",
    ),
    policy: str = typer.Option("sojourn", help="Name of a cluster preset"),
    policy_file: Path | None = typer.Option(
        None,
        help="TOML cluster preset in place of a named one. Python files that it names beside it are executed",
    ),
    allow_policy_modules: str = typer.Option(
        "", help="Installed packages whose classes --policy-file may name, separated by commas"
    ),
    waiting_order: str | None = typer.Option(
        None,
        help="Which request is served first when no replica had KV capacity for it: arrival; idleness: "
        "returning programs first, the least idle, then the smallest context (MORI); or largest-first: the "
        "largest predicted peak, so small programs wait longer. In any order the oldest is served from time "
        "to time. Default: the preset's, idleness for mori and arrival for others",
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on"),
    port: int = typer.Option(8100, min=0, max=65535, help="Port to listen on; 0: any free port"),
    tenants: Path | None = typer.Option(None, help="TOML file of tenants and their keys"),
    api_key: str | None = typer.Option(
        None,
        envvar="SOJOURN_API_KEY",
        help="The key of all clients, without a file of tenants",
    ),
    engine_key: str | None = typer.Option(
        None, envvar="SOJOURN_ENGINE_KEY", help="Key sent to engines in place of the client's key"
    ),
    admin_key: str | None = typer.Option(
        None,
        envvar="SOJOURN_ADMIN_KEY",
        help="Key of administrators, who may drain replicas and see all programs",
    ),
    session_header: str | None = typer.Option(
        None, help="Header that names the program, for clients that send none that sojourn knows"
    ),
    max_body_mib: int = typer.Option(16, min=1, max=1024, help="Maximum size of a request's body, in MiB"),
    max_waiting: int = typer.Option(
        20_000, min=1, help="Maximum number of waiting requests; further requests get a 429"
    ),
    wait_s: float = typer.Option(600.0, min=0.1, help="Longest wait of a request for capacity, seconds"),
    silent_program_s: float = typer.Option(
        1800.0, min=1.0, help="Seconds until a program that sends nothing is forgotten"
    ),
    peers: list[str] = typer.Option(
        [],
        help="Addresses of all gateways of the same engines, this one included, separated by commas or "
        "repeated. Each program belongs to one, and the others pass its requests on to it",
    ),
    own_url: str | None = typer.Option(
        None,
        help="With --peers: this gateway's address there. Default: http://HOST:PORT of --host and --port",
    ),
    log_level: str = typer.Option("info", help="debug, info, warning or error"),
    ray: Path | None = typer.Option(
        None,
        help="YAML file for engines and gateways on a Ray cluster; it has all options (docs/ray.md)",
    ),
) -> None:
    """Serve one address for several engines; turns go to the engine with their KV."""
    if ray is not None:
        _serve_on_ray(ray, [option for option in given_options(context).values() if option != "--ray"])
        return
    in_pairs = _is_prefill_decode(context, prefill, decode)
    named = {"prefill": prefill, "decode": decode} if in_pairs else {"engines": engines}
    example = _PAIRS if in_pairs else _ENGINES
    urls = {role: _addresses(texts, "an engine's", example) for role, texts in named.items()}
    for role, found in urls.items():
        if not found:
            raise CliError(f"no {f'{role} engines' if in_pairs else role} were named", example)
    every = [url for found in urls.values() for url in found]
    twice = sorted({url for url in every if every.count(url) > 1})
    if twice:
        raise CliError(f"{', '.join(twice)} is given twice", "name each engine once")
    others = _peers(peers, own_url, host, port)
    for name, given, known_values in (
        ("--read-side", read_side, READ_SIDE_POLICIES),
        ("--waiting-order", waiting_order or _WAITING_ORDERS[0], _WAITING_ORDERS),
        ("--log-level", log_level, ("debug", "info", "warning", "error")),
    ):
        if given not in known_values:
            raise CliError(f"{name} is {given!r}", f"expected {', '.join(known_values)}")
    for name in ("api_key", "engine_key", "admin_key", "session_header"):
        if context.params[name] is not None and not context.params[name].strip():
            raise CliError(f"--{name.replace('_', '-')} is empty", "leave it out, or give a value")
    preset = None if in_pairs else _preset(policy, policy_file, allow_policy_modules)
    if preset is not None and waiting_order is not None:
        preset = with_waiting_order(preset, waiting_order)
    if tenants is not None and api_key is not None and "api_key" not in given_options(context):
        # The environment variable may be set for the SDK, which sends the key.
        print_note(f"SOJOURN_API_KEY is ignored: {tenants} has the keys")
        api_key = None
    known = _tenants(tenants, api_key, admin_key)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not known.checks and not _is_loopback(host):
        print_note(
            f"other machines can reach {host}, and the gateway checks no keys: every client may use the "
            "engines. Use --tenants or --api-key to check keys."
        )
    import uvicorn

    from sojourn_server.gateway.http.gateway_app import GatewayOptions, build_gateway
    from sojourn_server.gateway.http.gateway_server import GatewayServer, uvicorn_settings

    limits = from_options(context, RoutingLimits, most_waiting=max_waiting)
    options = from_options(context, GatewayOptions, max_body_bytes=max_body_mib << 20)
    roles = {url: PairRole(role) if in_pairs else None for role, found in urls.items() for url in found}
    rules = preset or PrefillDecodeRules(read_side, short_queue_s, most_prefill_s, high_tokens_ratio)
    made, app = build_gateway(roles, rules, known, options, limits=limits, peers=others)
    numbers = ", ".join(f"{len(found)} {role}" for role, found in urls.items())
    served = f"pairs: {numbers}" if preset is None else f"policy {preset.name}: {numbers}"
    check_free_port(host, port, "choose another --port")
    url = local_url(host, port)
    run = f"sojourn run --url {url} -- python agent.py"
    print_line(f"gateway at {url} for {served}, once they answer; run an agent with: {run}")
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        timeout_graceful_shutdown=_STOP_GRACE_S,
        **uvicorn_settings(max_waiting),
    )
    app.state.server = server = GatewayServer(config, made)
    # A full garbage collection would also examine all modules, and hold up all requests for 0.1 s.
    gc.collect()
    gc.freeze()
    server.run()
    if not server.started:
        raise SystemExit(3)


_ONLY_WITH_PAIRS = ("--read-side", "--short-queue-s", "--most-prefill-s", "--high-tokens-ratio")
_NOT_WITH_PAIRS = ("--engines", "--policy", "--policy-file", "--allow-policy-modules", "--waiting-order")


def _is_prefill_decode(context: typer.Context, prefill: list[str], decode: list[str]) -> bool:
    """Return whether prefill and decode engines are given. Raises ``CliError`` if options contradict each
    other."""
    given = {"--prefill": prefill, "--decode": decode}
    there = [flag for flag, texts in given.items() if texts]
    others = given_options(context).values()
    if len(there) == 1:
        [absent] = given.keys() - there
        raise CliError(f"{there[0]} is given without {absent}: a request needs one of each", _PAIRS)
    for flag in _NOT_WITH_PAIRS if there else _ONLY_WITH_PAIRS:
        if flag in others and there:
            why = "pairs have one rule, the engine that is done soonest, and each engine has one role"
            raise CliError(f"{flag} and --prefill are both given; {why}", f"remove {flag}")
        if flag in others:
            raise CliError(f"{flag} is given without --prefill and --decode", _PAIRS)
    return bool(there)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _peers(texts: list[str], own_url: str | None, host: str, port: int) -> Peers | None:
    """Return the other gateways; ``None``: none are named."""
    from sojourn_server.gateway.http.peers import Peers

    if not texts:
        if own_url is not None:
            raise CliError("--own-url is given without --peers", _PEERS)
        return None
    if own_url is None and port == 0:
        raise CliError("--peers and --port 0 are given without --own-url", _PEERS)
    [own, *every] = _addresses([own_url or local_url(host, port), *texts], "a gateway's", _PEERS)
    if own not in every:
        by = "--own-url" if own_url is not None else "--host and --port, without --own-url"
        raise CliError(f"--peers lacks this gateway, which is {own} by {by}", _PEERS)
    return Peers(own, every)


def _addresses(texts: list[str], whose: str, example: str) -> list[str]:
    """Return the addresses in ``texts``. A text has one address, or several separated by commas."""
    try:
        return [parse_engine_url(part) for text in texts for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise CliError(str(error).replace("an engine's", whose), example) from None


def _serve_on_ray(path: Path, others: list[str]) -> None:
    if others:
        raise CliError(
            f"--ray and {', '.join(others)} are both given",
            f"write the option into {path}: docs/ray.md lists the keys",
        )
    # Do not look for ray.serve, because that would import Ray, which reads the environment on import.
    if find_spec("ray") is None:
        raise CliError("not installed: ray", install_command("gateway,ray"))

    config = read_config(path)
    if config.in_pairs:
        summary = "pairs on Ray"
    else:
        known = _preset(config.policy, config.policy_file, config.allow_policy_modules)
        summary = f"policy {known.name} on Ray, engines run {known.engine}"
    if config.is_local:
        _check_local_cluster(config, path)
    elif config.tenants is not None:
        _tenants(config.tenants, None, None)
    set_ray_environment(config)
    from sojourn_server.gateway.ray.ray_application import serve_until_stopped

    print_line(summary)
    try:
        serve_until_stopped(config, print_line)
    except (RuntimeError, ConnectionError) as error:
        raise CliError(str(error).strip().splitlines()[-1], "docs/ray.md says where the logs are") from None


def _check_local_cluster(config: RayConfig, path: Path) -> None:
    """Raise ``CliError`` for settings that a cluster on this machine would reject after Ray has started."""
    try:
        api, _, admin = (
            read_key(getattr(config.keys, one), f"keys.{one}") for one in ("api", "engine", "admin")
        )
    except RayConfigError as error:
        raise CliError(f"{path}: {error}", "export it where this command is started") from None
    _tenants(config.tenants, api, admin)
    for name in ("port", "direct_port"):
        if (port := getattr(config, name)) is not None:
            check_free_port(config.host, port, f"choose another {name} in {path}")


def _preset(policy: str, policy_file: Path | str | None, allowed_modules: str) -> ClusterPreset:
    try:
        if policy_file is None:
            return cluster_preset.load_cluster_preset(policy)
        return cluster_preset.read_cluster_preset(Path(policy_file), allowed_modules=allowed_modules)
    except PresetError as error:
        message, next_step = str(error), "docs/gateway.md lists the cluster presets"
        if policy_file is None and policy in preset_names():
            names = cluster_preset.cluster_preset_names()
            made_for = [name for name in names if cluster_preset.load_cluster_preset(name).engine == policy]
            here = f"--policy {made_for[0]} is made for it" if made_for else "leave --policy out"
            message = f"{policy} is an engine's policy, not a cluster's; expected one of {', '.join(names)}"
            next_step = f"engines run it: sojourn serve MODEL --policy {policy}; here {here}"
        raise CliError(message, next_step) from None


def _tenants(path: Path | str | None, api_key: str | None, admin_key: str | None) -> TenantKeys:
    from sojourn_server.gateway.http.tenant_keys import load_tenant_keys

    if path is not None and api_key is not None:
        raise CliError("--tenants and --api-key are both given", "write the key into the file of tenants")
    try:
        known = load_tenant_keys(Path(path) if path is not None else None, api_key)
        known.check_admin(admin_key)
    except InputError as error:
        raise CliError(str(error), "docs/gateway.md says how tenants and the admin get keys") from None
    return known
