"""Configuration of ``sojourn gateway --ray FILE``: YAML, checked completely before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from sojourn.errors import InputError, install_command

from ...routing.routing_from_preset import READ_SIDE_POLICIES
from ...routing.routing_limits import SILENT_PROGRAM_S
from .engine_autoscaler import AutoscaleLimits

Section = TypeVar("Section")
_PREFILL_DECODE_KEYS = ("prefill", "decode", "pairs")
_KEYS_WITHOUT_PREFILL_DECODE = {
    "engines": "prefill and decode replace engines",
    "policy": "pairs are chosen by load alone",
    "policy_file": "pairs are chosen by load alone",
    "allow_policy_modules": "pairs are chosen by load alone",
}
"""Keys that must be absent if ``prefill`` and ``decode`` are present, with the reasons."""
_RESERVED_FLAGS = ("--role", "--kv-store", "--kv-store-name", "--kv-node")
"""Flags of prefill and decode engines that ``args`` must not have, since the gateway sets them."""


class RayConfigError(InputError):
    """The configuration is invalid. The text names the key and the value, and says what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesConfig:
    """Section ``engines``, ``prefill`` or ``decode``: the engines of one role. Each engine is a process."""

    min: int = 1
    """Minimum number of engines."""
    max: int | None = None
    """Maximum number of engines; ``None``: always ``min`` engines."""
    num_cpus: float = 1.0
    """Number of CPUs that Ray reserves per engine; the engine may use more."""
    num_gpus: float = 0.0
    """Number of GPUs that Ray reserves per engine."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources that Ray reserves per engine, by name."""
    args: tuple[str, ...] = ()
    """Arguments of ``sojourn serve`` after the model. ``{engine}``, ``{host}`` and ``{port}`` stand for the
    engine's id and address. ``{rank}`` stands for the engine's number within this section; an engine that
    replaces another gets the same number."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that are added for the engines."""
    command: tuple[str, ...] = ()
    """Command that starts an engine, instead of ``sojourn serve MODEL --host {host} --port {port}`` with
    ``args``; empty: ``sojourn serve``."""
    start_timeout_s: float = 1800.0
    """Maximum seconds until a started engine answers."""
    drain_s: float = 120.0
    """Maximum seconds for running turns to end when an engine stops."""
    log_dir: str | None = None
    """Folder of the engines' logs; ``None``: ``deployments.log_dir``."""
    target_use: float = 0.8
    shrink_below_use: float = 0.6
    shrink_after_s: float = 300.0
    """``AutoscaleLimits`` describes this field and the two before it."""

    @property
    def scales(self) -> bool:
        """Whether the number of engines follows demand, between ``min`` and ``max``."""
        return self.max is not None and self.max > self.min

    @property
    def autoscale(self) -> AutoscaleLimits:
        """The coordinator's limits on the number of engines."""
        return AutoscaleLimits(
            min_engines=self.min,
            max_engines=self.max if self.max is not None else self.min,
            target_use=self.target_use,
            shrink_below_use=self.shrink_below_use,
            shrink_after_s=self.shrink_after_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsConfig:
    """Section ``pairs``: common settings of prefill and decode engines."""

    store: str | None = None
    """Directory of stored KV that all prefill and decode engines share, on every node. ``None`` is allowed
    only if all engines have a ``command``."""
    read_side: str = "shorter"
    """Policy that chooses which engine's node reads stored KV; a key of ``READ_SIDE_POLICIES``."""
    short_queue_s: float = 3.0
    """DualPath's α: the longest storage read queue, in seconds, that counts as short."""
    most_prefill_s: float = 5.0
    """DualPath's β, as seconds: a prefill engine with more unfinished tokens than it computes in this time
    gets no new request."""
    high_tokens_ratio: float = 1.05
    """DualPath's Z, as a ratio. A decode engine counts as highly loaded if it has more tokens than this
    multiple of its group's mean."""


class EngineGroup(NamedTuple):
    """The engines of one role."""

    name: str
    """Name of the engines' deployment on Serve."""
    role: str | None
    """``prefill`` or ``decode``; ``None``: each engine does both."""
    engines: EnginesConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """Section ``keys``: names of environment variables that contain the keys, on every node. The file itself
    contains no keys. ``None``: there is no such key."""

    api: str | None = None
    """Variable with the single key of all clients, if ``tenants`` is not set."""
    engine: str | None = None
    """Variable with the key that is sent to engines instead of the client's own."""
    admin: str | None = None
    """Variable with the admin key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The configuration of gateways on Ray Serve and of their engines, as in the file of ``--ray``."""

    model: str
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
    gateways: int = 2
    """Number of gateways."""
    host: str = "127.0.0.1"
    """Address at which Serve's proxies and the gateways listen."""
    port: int = 8100
    """Port of Serve's proxies, one on each node with a gateway."""
    direct_port: int | None = None
    """Port at which clients reach the gateways directly. The gateways of a node share it. ``None``: gateways
    are reached only through Serve's proxies. A gateway adds one millisecond to a request, Serve's proxy about
    nine more."""
    metrics_port: int | None = None
    """First port for gateways' own metrics. Each gateway of a node takes the next free port from here on.
    ``None``: there are no such ports. If there are several gateways, their own metrics are then served
    nowhere, because the gateways share all other ports."""
    tenants: str | None = None
    """Tenants file; ``None``: all clients are one tenant."""
    keys: KeysConfig = KeysConfig()
    max_waiting: int = 20_000
    """Maximum number of waiting requests (``RoutingLimits.most_waiting``)."""
    wait_s: float = 600.0
    """Maximum seconds that a request waits; then it is rejected."""
    silent_program_s: float = SILENT_PROGRAM_S
    """Seconds without an event after which a program without open requests is forgotten."""
    address: str = "local"
    """Address of a running Ray cluster. ``local``: start a cluster on this machine, and end it with the
    command."""
    loopback_only: bool | None = None
    """Whether all ports listen only on the loopback interface. ``None``: True on a local cluster, False
    elsewhere."""
    dashboard: bool = False
    """Whether a local cluster runs Ray's dashboard."""
    usage_statistics: bool = False
    """Whether Ray may send its usage statistics."""
    checkpoint: str | None = None
    """The coordinator's checkpoint file; with several nodes, on a disk that all of them see. ``None``: no
    checkpoint is written."""
    name: str = "sojourn"
    """Name of the Serve application. It also names the coordinator's namespace."""

    @property
    def is_local(self) -> bool:
        """Whether the command starts its own cluster on this machine."""
        return self.address == "local"

    @property
    def on_loopback(self) -> bool:
        """Whether all ports listen only on the loopback interface."""
        return self.is_local if self.loopback_only is None else self.loopback_only

    @property
    def namespace(self) -> str:
        """Ray namespace in which the coordinator is named."""
        return f"{self.name}-gateway"

    @property
    def in_pairs(self) -> bool:
        """Whether the engines are prefill and decode engines, so that a request needs one of each."""
        return self.prefill is not None

    @property
    def groups(self) -> tuple[EngineGroup, ...]:
        """The engines, grouped by role."""
        if self.prefill is None or self.decode is None:
            return (EngineGroup("Engine", None, self.engines),)
        return (EngineGroup("Prefill", "prefill", self.prefill), EngineGroup("Decode", "decode", self.decode))

    @property
    def total_min_engines(self) -> int:
        """Minimum number of engines in all groups together."""
        return sum(group.engines.min for group in self.groups)

    @property
    def autoscale(self) -> AutoscaleLimits:
        """The coordinator's limits on the number of engines. For prefill and decode engines the number is
        fixed."""
        if not self.in_pairs:
            return self.engines.autoscale
        return AutoscaleLimits(min_engines=self.total_min_engines, max_engines=self.total_min_engines)

    def plain(self) -> dict[str, Any]:
        """Return the configuration as plain data, such as lists and mappings, which ``parse_config``
        reads."""
        document = dataclasses.asdict(self)
        for key in _KEYS_WITHOUT_PREFILL_DECODE if self.in_pairs else _PREFILL_DECODE_KEYS:
            del document[key]
        for key in ("engines", "prefill", "decode"):
            for name in ("args", "command") if key in document else ():
                document[key][name] = list(document[key][name])
        return document


MAX_CONFIG_CHARS = 64 * 1024
"""Maximum number of characters of a configuration file. YAML's parser takes long for longer files."""


def read_config(path: Path) -> RayConfig:
    """Read a configuration from a YAML file. Raises ``RayConfigError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RayConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > MAX_CONFIG_CHARS:
        raise RayConfigError(f"{path}: {len(text)} characters; expected at most {MAX_CONFIG_CHARS}")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise RayConfigError(
            f"{path}: PyYAML is not installed; expected {install_command('gateway,ray')}"
        ) from None
    try:
        document = yaml.safe_load(text)
    except RecursionError:
        raise RayConfigError(f"{path}: not YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # dates and integers with 5,000 digits raise ValueError
        raise RayConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        raise RayConfigError(f"{path}: the file is empty; expected at least a line such as model: tiny")
    return parse_config(document, source=str(path))


def parse_config(document: object, *, source: str) -> RayConfig:
    """Build a configuration from a parsed YAML document. ``source`` names the document in errors. Raises
    ``RayConfigError``."""
    if isinstance(document, Mapping):
        _check_groups(document, source)
    config = _section(RayConfig, document, source, "")
    _check_config(config, source)
    return config


def _check_groups(document: Mapping[Any, Any], source: str) -> None:
    """Check that the document has both ``prefill`` and ``decode``, or neither. With both, it must not have
    keys such as ``engines`` and ``policy``; with neither, it must not have ``pairs``. Raises
    ``RayConfigError``."""
    there = [key for key in ("prefill", "decode") if key in document]
    if not there:
        if "pairs" in document:
            raise RayConfigError(
                f"{source}: pairs is there without prefill and decode; expected both, or none"
            )
        return
    if len(there) == 1:
        absent = "decode" if there == ["prefill"] else "prefill"
        raise RayConfigError(
            f"{source}: {there[0]} is there without {absent}; expected both: a request needs one of each"
        )
    for key, why in _KEYS_WITHOUT_PREFILL_DECODE.items():
        if key in document:
            raise RayConfigError(f"{source}: {key} and prefill are both set; expected only one: {why}")


def _section(kind: type[Section], document: object, source: str, prefix: str) -> Section:
    """Build a section, the dataclass ``kind``, from its part of the document. ``prefix``: the keys that lead
    to the section, for errors. Raises ``RayConfigError``."""
    where = prefix.rstrip(".") or "the file"
    if not isinstance(document, Mapping):
        raise RayConfigError(f"{source}: {where} is {_format_value(document)}; expected keys and values")
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(sorted(names))}"
            raise RayConfigError(f"{source}: there is no key {prefix}{key}; {hint}")
        values[key] = _value(hints[key], value, source, f"{prefix}{key}")
    for one in fields(kind):  # type: ignore[arg-type]
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and one.name not in values:
            raise RayConfigError(f"{source}: {prefix}{one.name} is missing; expected a text")
    return kind(**values)


def _value(kind: Any, value: object, source: str, key: str) -> Any:
    """Convert one value to the annotated type ``kind``. Raises ``RayConfigError`` for another type."""
    if isinstance(kind, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
        if value is None and not dataclasses.is_dataclass(kind):
            return None
    if dataclasses.is_dataclass(kind):
        return _section(kind, value if value is not None else {}, source, f"{key}.")  # type: ignore[arg-type]
    wrong = RayConfigError(f"{source}: {key} is {_format_value(value)}; expected {_expected_type(kind)}")
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if get_origin(kind) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in value):
            return tuple(str(one) for one in value)
        raise wrong
    # YAML reads words such as true, on and no as booleans, whose text would differ from the file.
    if get_origin(kind) is dict and isinstance(value, Mapping) and not _has_boolean(value):
        of = get_args(kind)[1]
        if of is str and all(isinstance(one, (str, int, float)) for one in value.values()):
            return {str(name): str(one) for name, one in value.items()}
        if of is float and all(isinstance(one, (int, float)) for one in value.values()):
            return {str(name): float(one) for name, one in value.items()}
    raise wrong


def _has_boolean(value: Mapping[Any, Any]) -> bool:
    """Whether a name or a value of a mapping is a boolean."""
    return any(isinstance(one, bool) for pair in value.items() for one in pair)


def _check_config(config: RayConfig, source: str) -> None:
    """Check the values of a configuration whose types are right. Raises ``RayConfigError``."""

    def wrong(key: str, value: object, expected: str) -> RayConfigError:
        return RayConfigError(f"{source}: {key} is {_format_value(value)}; expected {expected}")

    if not config.model.strip():
        raise wrong("model", config.model, "a model's name or directory")
    for group in config.groups:
        _check_engines(group, wrong)
    if config.in_pairs:
        _check_pairs(config, wrong)
    if config.gateways < 1:
        raise wrong("gateways", config.gateways, "at least 1; 2 so that one may fail")
    if not 1 <= config.port <= 65535:
        raise wrong("port", config.port, "1 to 65535")
    direct = config.direct_port
    if direct is not None and (not 1 <= direct <= 65535 or direct == config.port):
        raise wrong("direct_port", direct, f"1 to 65535 and not port, {config.port}")
    if (own := config.metrics_port) is not None and (not 1 <= own <= 65535 or own in (config.port, direct)):
        raise wrong("metrics_port", own, "1 to 65535, and neither port nor direct_port")
    if config.max_waiting < 1:
        raise wrong("max_waiting", config.max_waiting, "at least 1")
    if not config.wait_s > 0:
        raise wrong("wait_s", config.wait_s, "more than 0")
    if not config.silent_program_s > 0:
        raise wrong("silent_program_s", config.silent_program_s, "more than 0")
    if not config.address.strip():
        raise wrong("address", config.address, "local, auto, or HOST:PORT of a running cluster")
    if not config.name.replace("-", "").replace("_", "").isalnum() or not config.name.isascii():
        raise wrong("name", config.name, "letters, digits, - and _")
    if config.keys.api is not None and config.tenants is not None:
        raise wrong("keys.api", config.keys.api, "none where tenants is given: the keys are in that file")
    if config.on_loopback and config.host not in ("127.0.0.1", "::1", "localhost"):
        raise wrong("host", config.host, "127.0.0.1, or loopback_only: false")
    if config.loopback_only and not config.is_local:
        raise wrong("loopback_only", True, "address: local; a running cluster has its own addresses")


Wrong = Callable[[str, object, str], RayConfigError]
"""Function that builds an error from a key, its value, and what was expected."""


def _check_engines(group: EngineGroup, wrong: Wrong) -> None:
    """Check the section of one group of engines. Raises the errors that ``wrong`` builds."""
    engines, key = group.engines, group.role or "engines"
    if engines.min < 1:
        raise wrong(f"{key}.min", engines.min, "at least 1")
    if engines.max is not None and engines.max < engines.min:
        raise wrong(f"{key}.max", engines.max, f"at least {key}.min, {engines.min}")
    for name in ("num_cpus", "num_gpus", "drain_s", "shrink_after_s"):
        if not getattr(engines, name) >= 0:
            raise wrong(f"{key}.{name}", getattr(engines, name), "at least 0")
    if not engines.start_timeout_s > 0:
        raise wrong(f"{key}.start_timeout_s", engines.start_timeout_s, "more than 0")
    if not 0 < engines.shrink_below_use < engines.target_use <= 1:
        raise wrong(
            f"{key}.shrink_below_use",
            engines.shrink_below_use,
            f"between 0 and {key}.target_use, {engines.target_use}, which is at most 1",
        )
    if engines.command and not any("{port}" in part for part in engines.command):
        raise wrong(f"{key}.command", list(engines.command), "{port} in place of the port's number")
    for flag in ("--port", "--host"):
        if any(part == flag or part.startswith(f"{flag}=") for part in engines.args):
            raise wrong(f"{key}.args", list(engines.args), f"no {flag}: each engine gets its own")


def _check_pairs(config: RayConfig, wrong: Wrong) -> None:
    """Check the settings of prefill and decode engines. Raises the errors that ``wrong`` builds."""
    pairs = config.pairs
    if pairs.read_side not in READ_SIDE_POLICIES:
        raise wrong("pairs.read_side", pairs.read_side, ", ".join(READ_SIDE_POLICIES))
    if not pairs.short_queue_s >= 0:
        raise wrong("pairs.short_queue_s", pairs.short_queue_s, "seconds ≥ 0")
    for name in ("most_prefill_s", "high_tokens_ratio"):
        if not getattr(pairs, name) > 0:
            raise wrong(f"pairs.{name}", getattr(pairs, name), "a number above 0")
    if pairs.store is not None and not os.path.isabs(pairs.store):
        raise wrong("pairs.store", pairs.store, "an absolute path, the same on every node")
    for group in config.groups:
        engines = group.engines
        if engines.scales:
            raise wrong(
                f"{group.role}.max",
                engines.max,
                f"{group.role}.min, {engines.min}: the numbers of prefill and decode engines are fixed",
            )
        if not engines.command and pairs.store is None:
            raise wrong("pairs.store", None, "the directory that engines of all pairs share")
        for flag in _RESERVED_FLAGS:
            if any(part == flag or part.startswith(f"{flag}=") for part in engines.args):
                raise wrong(f"{group.role}.args", list(engines.args), f"no {flag}: each engine gets its own")


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


def _format_value(value: object) -> str:
    """Return a value of the configuration as text for an error message, at most 80 characters."""
    # Whole floats are shown as integers, so that -1 looks as it was written.
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    text = repr(int(value) if whole else value)  # type: ignore[call-overload]
    return text if len(text) <= 80 else f"{text[:77]}..."


def _expected_type(kind: Any) -> str:
    """Return the annotated type ``kind`` in words, for an error message."""
    plain = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is tuple:
        return "a list of texts"
    expected = "names and numbers" if get_args(kind)[1] is float else "names and texts"
    return f"{expected}; put words such as true in quotes"


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
