"""Configuration of ``sojourn gateway --ray FILE``: YAML, checked completely before anything starts."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta
from sojourn.errors import InputError, install_command

from ...routing.routing_limits import SILENT_PROGRAM_S

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Word = str | int | float
"""A word of a command. YAML reads some words as numbers."""

_ONLY_WITHOUT_PAIRS = {
    "engines": "prefill and decode replace engines",
    "policy": "pairs have one rule: the engine that is done soonest",
    "policy_file": "pairs have one rule: the engine that is done soonest",
    "allow_policy_modules": "pairs have one rule: the engine that is done soonest",
}
"""Keys that must be absent if ``prefill`` and ``decode`` are present, with the reasons."""
_OWN_FLAGS = ("--port", "--host")
"""Flags that ``args`` must not have, since each engine gets its own."""
_OWN_PAIR_FLAGS = ("--role", "--kv-store", "--kv-store-name")
"""Further such flags of prefill and decode engines."""


class RayConfigError(InputError):
    """The configuration is invalid. The text names the key and the value, and says what was expected."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of the file's sections."""


class EnginesConfig(_Section, frozen=True, kw_only=True):
    """Section ``engines``, ``prefill`` or ``decode``: the engines of one role. Each engine is a process."""

    min: Count = 1
    """Minimum number of engines."""
    max: Count | None = None
    """Maximum number of engines; ``None``: always ``min`` engines."""
    num_cpus: NotNegative = 1.0
    """Number of CPUs that Ray reserves per engine; the engine may use more."""
    num_gpus: NotNegative = 0.0
    """Number of GPUs that Ray reserves per engine."""
    resources: dict[str, float] = {}
    """Custom resources that Ray reserves per engine, by name."""
    args: tuple[Word, ...] = ()
    """Arguments of ``sojourn serve`` after the model. ``{engine}``, ``{host}`` and ``{port}`` stand for the
    engine's id and address. ``{rank}`` stands for the engine's number within this section; an engine that
    replaces another gets the same number."""
    environment: dict[str, Word] = {}
    """Environment variables that are added for the engines."""
    command: tuple[Word, ...] = ()
    """Command that starts an engine, instead of ``sojourn serve MODEL --host {host} --port {port}`` with
    ``args``; empty: ``sojourn serve``."""
    start_timeout_s: Positive = 1800.0
    """Maximum seconds until a started engine answers."""
    drain_s: NotNegative = 120.0
    """Maximum seconds for running turns to end when an engine stops."""
    log_dir: str | None = None
    """Folder of the engines' logs; ``None``: a temporary one."""
    target_use: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Used fraction of the engines' KV memory at which Serve has enough engines."""
    shrink_after_s: NotNegative = 300.0
    """Seconds for which fewer engines must be enough before Serve stops one. Engines take minutes to start,
    and lose their KV when they stop."""

    @property
    def scales(self) -> bool:
        """Whether the number of engines follows demand, between ``min`` and ``max``."""
        return self.max is not None and self.max > self.min


class PairsConfig(_Section, frozen=True, kw_only=True):
    """Section ``pairs``: common settings of prefill and decode engines."""

    store: str | None = None
    """Directory of stored KV that all prefill and decode engines share, on every node. ``None`` is allowed
    only if all engines have a ``command``."""
    read_side: Literal["shorter", "prefill"] = "shorter"
    """Policy that chooses which engine's node reads stored KV; a key of ``READ_SIDE_POLICIES``."""
    short_queue_s: NotNegative = 3.0
    """DualPath's α: the longest storage read queue, in seconds, that counts as short."""
    most_prefill_s: Positive = 5.0
    """DualPath's β, as seconds: a prefill engine with more unfinished tokens than it computes in this time
    gets no new request."""
    high_tokens_ratio: Positive = 1.05
    """DualPath's Z, as a ratio. A decode engine counts as highly loaded if it has more tokens than this
    multiple of its group's mean."""


class EngineGroup(NamedTuple):
    """The engines of one role."""

    name: str
    """Name of the engines' deployment on Serve."""
    role: str | None
    """``prefill`` or ``decode``; ``None``: each engine does both."""
    engines: EnginesConfig


class KeysConfig(_Section, frozen=True, kw_only=True):
    """Section ``keys``: names of environment variables that contain the keys, on every node. The file itself
    contains no keys. ``None``: there is no such key."""

    api: str | None = None
    """Variable with the single key of all clients, if ``tenants`` is not set."""
    engine: str | None = None
    """Variable with the key that is sent to engines instead of the client's own."""
    admin: str | None = None
    """Variable with the admin key."""


class RayConfig(_Section, frozen=True, kw_only=True):
    """The configuration of gateways on Ray Serve and of their engines, as in the file of ``--ray``."""

    model: Annotated[str, Meta(pattern=r"\S")]
    """Model name or directory."""
    policy: str = "sojourn"
    """Name of the cluster preset, if ``policy_file`` is not set."""
    policy_file: str | None = None
    """File with a cluster preset."""
    allow_policy_modules: str = ""
    """Installed packages whose classes the policy file may name, separated by commas."""
    engines: EnginesConfig = EnginesConfig()
    prefill: EnginesConfig | None = None
    """Prefill engines. Used together with ``decode``, instead of ``engines``."""
    decode: EnginesConfig | None = None
    pairs: PairsConfig = PairsConfig()
    gateways: Count | None = None
    """Number of gateways; ``None``: ``number_of_gateways``."""
    host: str = "127.0.0.1"
    """Address at which Serve's proxies and the gateways listen."""
    port: Port = 8100
    """Port of Serve's proxies, one on each node with a gateway."""
    direct_port: Port | None = None
    """Port at which clients reach the gateways directly. The gateways of a node share it. ``None``: gateways
    are reached only through Serve's proxies. A gateway adds one millisecond to a request, Serve's proxy about
    nine more."""
    metrics_port: Port | None = None
    """First port for the gateways' own addresses, at which each has its own ``/metrics`` and the other
    gateways reach it. Each gateway of a node takes the next free port from here on. ``None``: any free
    ports."""
    tenants: str | None = None
    """Tenants file; ``None``: all clients are one tenant."""
    keys: KeysConfig = KeysConfig()
    max_waiting: Count = 20_000
    """Maximum number of waiting requests of each gateway (``RoutingLimits.most_waiting``)."""
    wait_s: Positive = 600.0
    """Maximum seconds that a request waits; then it is rejected."""
    silent_program_s: Positive = SILENT_PROGRAM_S
    """Seconds without an event after which a program without open requests is forgotten."""
    max_body_mib: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Maximum size of a request's body, in MiB."""
    session_header: str | None = None
    """Header that names the program (``GatewayOptions.session_header``)."""
    address: Annotated[str, Meta(pattern=r"\S")] = "local"
    """Address of a running Ray cluster. ``local``: start a cluster on this machine, and end it with the
    command."""
    loopback_only: bool | None = None
    """Whether all ports listen only on the loopback interface. ``None``: True on a local cluster, False
    elsewhere."""
    dashboard: bool = False
    """Whether a local cluster runs Ray's dashboard."""
    usage_statistics: bool = False
    """Whether Ray may send its usage statistics."""
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]*[A-Za-z0-9][A-Za-z0-9_-]*$")] = "sojourn"
    """Name of the Serve application."""

    @property
    def is_local(self) -> bool:
        """Whether the command starts its own cluster on this machine."""
        return self.address == "local"

    @property
    def on_loopback(self) -> bool:
        """Whether all ports listen only on the loopback interface."""
        return self.is_local if self.loopback_only is None else self.loopback_only

    @property
    def in_pairs(self) -> bool:
        """Whether the engines are prefill and decode engines, so that a request needs one of each."""
        return self.prefill is not None

    @property
    def number_of_gateways(self) -> int:
        """Number of gateways. By default one for pairs: one decides about all of them, and others would only
        pass requests on to it. If a single one dies, none is left until Serve restarts it."""
        return self.gateways or (1 if self.in_pairs else 2)

    @property
    def groups(self) -> tuple[EngineGroup, ...]:
        """The engines, grouped by role."""
        if self.prefill is None or self.decode is None:
            return (EngineGroup("Engine", None, self.engines),)
        return (EngineGroup("Prefill", "prefill", self.prefill), EngineGroup("Decode", "decode", self.decode))


def read_config(path: Path) -> RayConfig:
    """Read a configuration from a YAML file. Raises ``RayConfigError``."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise RayConfigError(
            f"{path}: PyYAML is not installed; expected {install_command('gateway,ray')}"
        ) from None
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RayConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date may raise ValueError
        raise RayConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        raise RayConfigError(f"{path}: the file is empty; expected at least a line such as model: tiny")
    return parse_config(document, source=str(path))


def parse_config(document: object, *, source: str) -> RayConfig:
    """Build a configuration from a parsed YAML document. ``source`` names the document in errors. Raises
    ``RayConfigError``."""
    if isinstance(document, Mapping):  # a section without keys is None in YAML
        sections = ("engines", "prefill", "decode", "pairs", "keys")
        document = {
            key: {} if key in sections and value is None else value for key, value in document.items()
        }
    try:
        config = msgspec.convert(document, RayConfig)
    except msgspec.ValidationError as error:
        raise RayConfigError(f"{source}: {_describe_error(str(error))}") from None
    for wrong in _problems(config, document):
        raise RayConfigError(f"{source}: {wrong}")
    return config


def _describe_error(text: str) -> str:
    """Return an error of msgspec with the key in front. ``text``: such as ``Expected `int` >= 1 - at
    `$.engines.min```."""
    what, _, place = text.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown is None:
        return f"{key or 'the file'}: {what[0].lower()}{what[1:]}"
    name = f"{key}.{unknown[1]}" if key else unknown[1]
    near = difflib.get_close_matches(name, ["engines", "pairs", "keys", *known_keys()], 1)
    return f"there is no key {name}; " + (f"did you mean {near[0]}?" if near else "docs/ray.md lists them")


def known_keys() -> list[str]:
    """Return all keys of the file; those of sections with the section's name in front. ``prefill`` and
    ``decode`` have the keys of ``engines``."""
    sections: dict[str, type[msgspec.Struct]]
    sections = {"": RayConfig, "engines.": EnginesConfig, "pairs.": PairsConfig, "keys.": KeysConfig}
    found = [before + one.name for before, kind in sections.items() for one in msgspec.structs.fields(kind)]
    return [name for name in found if f"{name}." not in sections]


def _problems(config: RayConfig, document: Any) -> Iterator[str]:
    """Yield what is wrong in a configuration whose single values are right."""
    if (config.prefill is None) != (config.decode is None):
        there, absent = ("prefill", "decode") if config.in_pairs else ("decode", "prefill")
        yield f"{there} is there without {absent}; expected both: a request needs one of each"
    if config.in_pairs:
        for key, why in _ONLY_WITHOUT_PAIRS.items():
            if key in document:
                yield f"{key} and prefill are both set; expected only one: {why}"
    elif "pairs" in document:
        yield "pairs is there without prefill and decode; expected both, or none"
    for group in config.groups:
        yield from _group_problems(config, group)
    ports = [port for port in (config.port, config.direct_port, config.metrics_port) if port is not None]
    if len(set(ports)) < len(ports):
        yield f"port, direct_port and metrics_port are {ports}; expected different ports"
    if config.keys.api is not None and config.tenants is not None:
        yield f"keys.api is {config.keys.api!r}; expected none where tenants is given: it has the keys"
    if config.pairs.store is not None and not os.path.isabs(config.pairs.store):
        yield f"pairs.store is {config.pairs.store!r}; expected an absolute path, the same on every node"
    if config.loopback_only and not config.is_local:
        yield "loopback_only is True; expected address: local; a running cluster has its own addresses"
    if config.on_loopback and config.host not in ("127.0.0.1", "::1", "localhost"):
        yield f"host is {config.host!r}; expected 127.0.0.1, or loopback_only: false"


def _group_problems(config: RayConfig, group: EngineGroup) -> Iterator[str]:
    """Yield what is wrong with one group of engines."""
    engines, key = group.engines, group.role or "engines"
    if engines.max is not None and engines.max < engines.min:
        yield f"{key}.max is {engines.max}; expected at least {key}.min, {engines.min}"
    if group.role is not None and engines.scales:
        yield f"{key}.max is {engines.max}; expected {key}.min: the number of engines of a role is fixed"
    if group.role is not None and not engines.command and config.pairs.store is None:
        yield "pairs.store is None; expected the directory that engines of all pairs share"
    if engines.command and not any("{port}" in str(part) for part in engines.command):
        yield f"{key}.command is {list(engines.command)}; expected {{port}} in place of the port's number"
    for flag in (*_OWN_FLAGS, *(_OWN_PAIR_FLAGS if group.role is not None else ())):
        if any(str(part).partition("=")[0] == flag for part in engines.args):
            yield f"{key}.args has {flag}; expected none: each engine gets its own"


def read_key(name: str | None, key: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Read an API key from the environment variable ``name``; ``None``: no variable is named. ``key``: key of
    the configuration, for errors. Raises ``RayConfigError``, whose text does not contain the API key."""
    if name is None:
        return None
    value = environment.get(name, "")
    if not value or value != value.strip():
        why = "its value has spaces around it" if value.strip() else f"the environment has no {name}"
        raise RayConfigError(f"{key} is {name!r}: {why}; expected the name of a variable that holds a key")
    return value


LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray. If it is 0, Ray uses 127.0.0.1 as this machine's address, on every operating
system, and its servers listen there. Ray's argument ``_node_ip_address`` is no alternative: Ray replaces a
127.0.0.1 there by an address that other machines reach."""


def set_ray_environment(config: RayConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set Ray's environment variables according to the configuration. Variables that the operator has set
    stay, except those that would open ports to other machines."""
    if not config.usage_statistics:
        environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.on_loopback:
        environment[LOOPBACK_VARIABLE] = "0"
        # HAProxy would open its metrics and statistics on all interfaces.
        environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
