"""``sojourn serve`` as a pure function: options in, the engine's command line and environment out.

What the user wrote always wins; a default is only added where the user said nothing.
No vLLM import, no process, no file: the tests read the result.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BadOption as BadOption
from .pairs import PairOptions, check_block_size, pair_config
from .redaction import redacted
from .tiers import TierOptions, hash_seed, transfer_config

STOCK = "stock"
"""The policy that is plain vLLM: none of our code is loaded."""

PLUGIN = "sojourn"
"""Our name in both entry-point groups, and so in ``VLLM_PLUGINS``."""

SCHEDULER_CLS = "sojourn_server.vllm.scheduler.make_scheduler"
WORKER_CLASSES = {
    "cpu": "sojourn_server.vllm.worker_cpu.TappingCpuWorker",
    "cuda": "sojourn_server.vllm.worker_gpu.TappingGpuWorker",
}
"""For ``--worker-cls``: vLLM's own workers, from which hidden states can be read."""
FORCED_TOKENS = "sojourn_server.vllm.forced_tokens:ForcedTokens"
"""For ``--logits-processors``: makes requests that carry ``replay_ids`` follow them."""

CPU_BLOCK_SIZE = 32
"""Tokens. The CPU default is 128, and a block that is not full is never reused; less than 32 is slow."""

CPU_BATCHED_TOKENS = 1024
"""Tokens a step. Events wait for the current step; a small CPU prefills about 500 tokens a second."""

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the command depends on besides the options; read from the machine by ``launch.facts``."""

    python: str
    cpu_build: bool
    has_vllm_cli: bool
    """Whether ``vllm serve`` works; the CPU build's lacks metadata it asks for."""
    plugins: tuple[str, ...] = ()
    """Names of the installed general and platform plugins that vLLM loads by default."""
    cpus: tuple[int, ...] = ()
    """CPU ids this process may run on."""
    hostname: str = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One ``sojourn serve`` invocation."""

    model: str
    model_path: str
    """What ``model`` resolved to: a directory or a hub id."""
    policy: str
    policy_file: str | None = None
    reads_states: bool = False
    """The policy reads hidden states."""
    history_file: str | None = None
    network_file: str | None = None
    profile_file: str | None = None
    lease_budget_fraction: float | None = None
    """Share of the KV cache that leases may hold, 0 to 1."""
    max_ttl_s: float | None = None
    """The longest lease a client's hint may ask for."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``additional_config.sojourn``."""
    tiers: TierOptions = field(default_factory=TierOptions)
    pair: PairOptions = field(default_factory=PairOptions)
    chat_template: str | None = None
    """Given for the models that are made here: they also get tool calling and a served name."""
    engine_args: tuple[str, ...] = ()
    """``vllm serve`` flags, as the user wrote them."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A command line and what it changes in the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables to set."""
    unset: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What of the options will have no effect, one line each."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with the changes made."""
        return {**{name: value for name, value in base.items() if name not in self.unset}, **self.env}

    def as_shell(self) -> str:
        """The command as a line for a shell, to be shown: the values of secret flags read ``***``."""
        unset = [part for name in self.unset for part in ("-u", name)]
        assignments = [f"{name}={value}" for name, value in self.env.items()]
        prefix = ["env", *unset, *assignments] if unset or assignments else []
        return shlex.join([*prefix, *redacted(self.argv)])


def build_command(options: ServeOptions, facts: EngineFacts, environ: Mapping[str, str]) -> EngineCommand:
    """The engine's command for ``options``. Raises ``BadOption``."""
    flags = Flags(options.engine_args)
    env: dict[str, str] = {}
    added: list[str] = []

    def default(flag: str, *values: str) -> None:
        if not flags.has(flag):
            added.extend([flag, *values])

    if flags.has("--model"):
        raise BadOption("--model is the first argument here; write: sojourn serve MODEL --other-flags")
    if options.policy != STOCK:
        if flags.has("--scheduler-cls"):
            raise BadOption(
                f"--scheduler-cls is how policy {options.policy!r} is installed; "
                "drop it, or serve with --policy stock"
            )
        added += ["--scheduler-cls", SCHEDULER_CLS]
        if options.reads_states:
            if flags.has("--worker-cls"):
                raise BadOption(
                    f"--worker-cls is how policy {options.policy!r} reads hidden states; "
                    "drop it, or choose a policy that reads none"
                )
            added += ["--worker-cls", WORKER_CLASSES["cpu" if facts.cpu_build else "cuda"]]
            _check_network(options.network_file)
        elif options.network_file is not None:
            raise BadOption(
                f"--sojourn-network is for policies that read hidden states; {options.policy!r} reads none"
            )
        flags, merged = flags.pop_json("--additional-config")
        merged[PLUGIN] = _sojourn_config(options, merged.get(PLUGIN, {}))
        added += ["--additional-config", json.dumps(merged)]
    elif _sojourn_config(options, {}) != {"policy": STOCK}:
        raise BadOption("policy stock is plain vLLM and takes no --sojourn options")
    if options.tiers.any:
        if flags.has("--kv-transfer-config"):
            raise BadOption(
                "--kv-transfer-config is how tiers are installed; give it or --kv-host-gib, not both"
            )
        stock = options.policy == STOCK
        config = transfer_config(options.tiers, cpu_build=facts.cpu_build, stock=stock)
        if options.tiers.backend == "sojourn":
            _check_served(flags, "tiers below the device")
        added += ["--kv-transfer-config", json.dumps(config)]
        if options.tiers.disk is not None:
            env.update(hash_seed(environ))
    if options.pair.any:
        config = _pair_config(options, flags, facts)
        added += ["--kv-transfer-config", json.dumps(config)]
        env.update(hash_seed(environ))
    # A member of a pair tells gateways of itself, whoever schedules.
    env["VLLM_PLUGINS"] = _plugins(options.policy != STOCK or options.pair.any, facts, environ)
    # A report, not a behaviour: without it an answer does not say how much of the prompt was reused.
    default("--enable-prompt-tokens-details")

    if options.chat_template is not None:
        default("--served-model-name", options.model)
        default("--chat-template", options.chat_template)
        default("--enable-auto-tool-choice")
        default("--tool-call-parser", "hermes")
    if facts.cpu_build:
        default("--block-size", str(CPU_BLOCK_SIZE))
        default("--max-num-batched-tokens", str(CPU_BATCHED_TOKENS))
        if not (flags.has("--compilation-config") or flags.has("-cc") or flags.has("-O")):
            default("--enforce-eager")  # compiling needs a C++ compiler and a minute
        env.update(_cpu_environment(flags, facts, environ))

    argv = [facts.python, *_entry(options, facts), *added, *flags.args]
    return EngineCommand(
        argv=tuple(argv),
        env=env,
        # Without byte code each of the engine's processes compiles all imports again.
        unset=("PYTHONDONTWRITEBYTECODE",) if "PYTHONDONTWRITEBYTECODE" in environ else (),
        warnings=_warnings(flags, facts),
    )


def listen_address(engine_args: Sequence[str]) -> tuple[str, int] | None:
    """Host and port the server will bind, or ``None`` for a unix socket. Raises ``BadOption``."""
    flags = Flags(tuple(engine_args))
    if flags.has("--uds"):
        return None
    port = flags.value("--port") or str(DEFAULT_PORT)
    if not port.isdigit() or int(port) > 65535:
        raise BadOption(f"--port {port} is not a port number")
    return flags.value("--host") or "", int(port)


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags as vLLM reads them: ``--a-b``, ``--a_b`` and ``--a-b=value`` name the same one."""

    args: tuple[str, ...]

    def has(self, flag: str) -> bool:
        """Whether the flag, or its ``--no-`` form, is given."""
        negated = "--no-" + flag.removeprefix("--")
        return any(_name(arg) in (flag, negated) for arg in self.args)

    def value(self, flag: str) -> str | None:
        """The value the last occurrence of the flag gives it."""
        found = None
        for index, arg in enumerate(self.args):
            if _name(arg) == flag:
                if "=" in arg:
                    found = arg.split("=", 1)[1]
                elif index + 1 < len(self.args):
                    found = self.args[index + 1]
        return found

    def pop_json(self, flag: str) -> tuple[Flags, dict[str, Any]]:
        """The flags without ``flag``, and the JSON object it gave ({} where it was not given)."""
        if any(_name(arg).startswith(f"{flag}.") for arg in self.args):
            raise BadOption(f"{flag} is merged with ours: give it as one JSON object, not as {flag}.key")
        text = self.value(flag)
        if text is None:
            return self, {}
        try:
            document = json.loads(text)
        except ValueError as error:
            raise BadOption(f"{flag} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise BadOption(f"{flag} is a JSON {type(document).__name__}; expected an object")
        rest: list[str] = []
        skip_value = False
        for arg in self.args:
            if skip_value:
                skip_value = False
            elif _name(arg) == flag:
                skip_value = "=" not in arg
            else:
                rest.append(arg)
        return Flags(tuple(rest)), document


def _name(arg: str) -> str:
    """``--A_b=c`` → ``--A-b``; anything else than a long flag stays what it is."""
    if not arg.startswith("--"):
        return arg
    return arg.split("=", 1)[0].replace("_", "-")


def _entry(options: ServeOptions, facts: EngineFacts) -> list[str]:
    if facts.has_vllm_cli:
        return ["-m", "vllm.entrypoints.cli.main", "serve", options.model_path]
    # Deprecated in favour of the command above, says the module each time it runs.
    quiet = ["-W", "ignore::DeprecationWarning:__main__"]
    return [*quiet, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model_path]


def _warnings(flags: Flags, facts: EngineFacts) -> tuple[str, ...]:
    if facts.has_vllm_cli:
        return ()
    for flag in ("--api-server-count", "-asc"):
        count = flags.value(flag)
        if count not in (None, "1"):
            return (f"{flag} {count} has no effect: the CPU build of vLLM runs one API server",)
    return ()


def _check_network(network_file: str | None) -> None:
    """Refuse now what the engine would only when it has loaded the model."""
    if network_file is None:
        return
    from ..learned.file_format import WeightsError, told

    try:
        told(Path(network_file))
    except WeightsError as error:
        raise BadOption(f"--sojourn-network: {error}") from None


def _sojourn_config(options: ServeOptions, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadOption(f"--additional-config: {PLUGIN} is a {type(given).__name__}; expected an object")
    budget, max_ttl_s = options.lease_budget_fraction, options.max_ttl_s
    if budget is not None and not 0 <= budget <= 1:
        raise BadOption(f"--sojourn-lease-budget is {budget}; expected a share of the KV cache, 0 to 1")
    if max_ttl_s is not None and not 0 <= max_ttl_s < float("inf"):
        raise BadOption(f"--sojourn-max-ttl-s is {max_ttl_s}; expected seconds ≥ 0")
    own = {
        "policy": options.policy,
        "policy_file": options.policy_file,
        "history_file": options.history_file,
        "network_file": options.network_file,
        "profile_file": options.profile_file,
        "lease_budget_fraction": budget,
        "max_hinted_ttl_s": max_ttl_s,
    }
    return {**given, **options.extra, **{key: value for key, value in own.items() if value is not None}}


def _pair_config(options: ServeOptions, flags: Flags, facts: EngineFacts) -> dict[str, Any]:
    """For ``--kv-transfer-config``. Raises ``BadOption``."""
    pair = options.pair
    address = listen_address(options.engine_args)
    port = None if address is None else address[1]
    config = pair_config(pair, cpu_build=facts.cpu_build, hostname=facts.hostname, port=port)
    if options.tiers.any:
        raise BadOption(
            f"--role {pair.role} and --kv-host-gib both say where KV lies below the device; give one: what a "
            "pair computes is in --kv-store"
        )
    if flags.has("--kv-transfer-config"):
        raise BadOption("--kv-transfer-config is how --role is installed; give one of the two, not both")
    for flag, why in _NOT_OF_PAIRS.items():
        if any(_name(arg) == flag for arg in flags.args):
            raise BadOption(f"{flag}: {why}; start an engine of a pair without it")
    ranks = flags.value("--data-parallel-size") or flags.value("-dp")
    if ranks not in (None, "1"):
        raise BadOption(f"--data-parallel-size is {ranks}; each engine of a pair has a server of its own")
    _check_served(flags, "the paths of a pair")
    check_block_size(flags.value("--block-size"))
    return config


_NOT_OF_PAIRS = {
    "--speculative-config": "the paths of a pair do not serve engines that guess tokens ahead so far",
    "--enable-lora": "an adapter's KV is told apart by the adapter's name and not by its weights",
    "--no-enable-prefix-caching": "stored KV is found by the names that prefix caching gives it",
}


def _plugins(ours: bool, facts: EngineFacts, environ: Mapping[str, str]) -> str:
    """``VLLM_PLUGINS`` is an allow-list: naming ours alone would switch the user's other plugins off."""
    listed = environ.get("VLLM_PLUGINS")
    names = facts.plugins if listed is None else tuple(name.strip() for name in listed.split(","))
    kept = [name for name in dict.fromkeys(names) if name and name != PLUGIN]
    return ",".join([*kept, PLUGIN] if ours else kept)


_OF_SEVERAL_WORKERS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")


def _check_served(flags: Flags, what: str) -> None:
    """Our connectors refuse such engines themselves, but after minutes. Raises ``BadOption``."""
    for flag in _OF_SEVERAL_WORKERS:
        count = flags.value(flag)
        if count not in (None, "1"):
            raise BadOption(f"{flag} is {count}; {what} serve engines of one worker so far")
    if any(_name(arg) == "--async-scheduling" for arg in flags.args):
        raise BadOption(f"--async-scheduling: {what} need one step at a time so far")


def _cpu_environment(flags: Flags, facts: EngineFacts, environ: Mapping[str, str]) -> dict[str, str]:
    wanted: dict[str, str] = {}
    if not flags.has("--kv-cache-memory-bytes"):
        # GiB. The default takes, and asks for, a share of all memory, even where the number of blocks is set.
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
    # vLLM wants a list of cores for each worker.
    several = any(map(flags.has, ("--data-parallel-size", "-dp", *_OF_SEVERAL_WORKERS)))
    if len(facts.cpus) == 2 and not several:
        # "auto" keeps one core for the server, which on two costs half the prefill (331 against 665
        # tokens a second at 4k, smol). On both cores, threads that spin while they wait starve the server
        # and slow decoding (11 against 33 tokens a second); so let them sleep.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, facts.cpus))
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
    return {name: value for name, value in wanted.items() if name not in environ}
