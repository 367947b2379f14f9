"""Builds the engine's command line and environment for ``sojourn serve``.

A flag of the user, on the command line or in a ``--config`` file, replaces a default. The module does not
import vLLM and starts no process.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..policies.preset_store import DEFAULT_PRESET
from ..vllm.compat import API_SERVER_MODULE, CLI_MODULE
from .engine_flags import EngineFlags, InvalidOption, engine_workers, own_flag, parallel_size, refuse
from .kv_options import (
    AUTO,
    OFFLOAD_CONNECTOR,
    PAIR_CONNECTOR,
    PREFILL_DECODE_CONNECTOR,
    KvOffloadOptions,
    PrefillDecodeOptions,
    host_size_gib,
    offload_transfer_config,
    prefill_decode_transfer_config,
)
from .launch_environment import LaunchEnvironment
from .redaction import redacted

STOCK_POLICY = "stock"
"""Name of the policy that runs plain vLLM, without sojourn's scheduler."""
DECODE_POLICY = "observe"
"""Default policy of a decode engine. It keeps no KV of finished turns, because prefill engines do."""
PLUGIN_NAME = "sojourn"
"""Name of sojourn's plugin in vLLM's entry-point groups and in ``VLLM_PLUGINS``."""
SERVER_MAIN_MODULE = "sojourn_server.vllm.server_main"
"""Module that runs vLLM's API server on the CPU build. It makes the imports faster. They take most of the
time that an engine on a CPU needs to start."""
SCHEDULER_CLS = "sojourn_server.vllm.scheduler.make_scheduler"
WORKER_CLS = "sojourn_server.vllm.hidden_state_worker.HiddenStateWorker"
"""vLLM's worker with hidden state capture."""
FORCED_TOKENS = "sojourn_server.vllm.forced_tokens:ForcedTokens"
"""Value of ``--logits-processors`` for forced tokens (``forced_tokens.py``) in vLLM's model runner V1."""
OWN_CONNECTORS = (OFFLOAD_CONNECTOR, PREFILL_DECODE_CONNECTOR, PAIR_CONNECTOR)
"""Sojourn's KV connectors."""
ONE_GROUP = "--disable-hybrid-kv-cache-manager"
"""vLLM's flag that puts layers with sliding windows and with full attention in one KV cache group."""
CPU_BLOCK_SIZE = 32
"""Default block size on CPUs, in tokens. vLLM's own default of 128 reuses less of a prompt, because only full
blocks are reused. Blocks below 32 are slow."""
UNCOMPILED_STAGES = '{"mode": 1, "backend": "eager"}'
"""Compilation options of pipeline stages on CPUs. No code is generated, but vLLM makes a first pass over the
model, unlike with ``--enforce-eager``. This pass allocates the memory for the data that a stage receives from
the stage before it."""
CPU_BATCHED_TOKENS = 1024
"""Default maximum number of tokens per step on CPUs. It keeps steps short: clients' events are handled only
between steps, and a small CPU prefills only about 500 tokens per second."""
GENERATED_MODEL_TOOL_PARSER = "hermes"
"""Tool parser of the models that sojourn makes."""
DEFAULT_PORT = 8000
RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""Environment variable that makes ``vllm serve`` run its HTTP server in Rust."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of one ``sojourn serve`` call. An option that is not given is ``None`` or empty. Each field
    with a flag is a plugin setting of the same name."""

    model: str
    model_path: str
    """Directory or hub id of the model that ``model`` names."""
    policy: str = own_flag(
        "--policy",
        "Name of a preset, or stock for plain vLLM",
        shown_default=f"{DEFAULT_PRESET}; with --role decode {DECODE_POLICY}",
    )
    policy_file: str | None = own_flag(
        "--policy-file",
        "TOML preset in place of a named policy. Python files that it names beside it are executed",
        is_path=True,
    )
    allow_policy_modules: str | None = own_flag(
        "--allow-policy-modules",
        "Installed packages whose classes --policy-file may name, separated by commas",
    )
    history_file: str | None = own_flag(
        "--sojourn-history", "File for the histories of tools and lengths", is_path=True
    )
    network_file: str | None = own_flag(
        "--sojourn-network", "File for the predictor of tetris-learned", is_path=True
    )
    profile_file: str | None = own_flag("--sojourn-profile", "TOML written by sojourn profile", is_path=True)
    lease_budget_fraction: float | None = own_flag(
        "--sojourn-lease-budget", "Share of the KV cache for leases, 0 to 1"
    )
    max_hinted_ttl_s: float | None = own_flag("--sojourn-max-ttl-s", "Longest lease from a hint, seconds")
    compute_quota_s: float | None = own_flag(
        "--compute-quota-s",
        "Maximum attention time per step, seconds, estimated from --sojourn-profile",
        shown_default="no limit",
    )
    session_header: str | None = own_flag(
        "--session-header", "Header in which clients name their program, besides those of known clients"
    )
    reads_hidden_states: bool = False
    """Whether the policy reads hidden states, which need sojourn's worker class."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further plugin settings: keys of ``additional_config.sojourn``."""
    tiers: KvOffloadOptions = field(default_factory=KvOffloadOptions)
    model_refusal: str = ""
    """Why no connector supports the model; empty if one does, or if that is not known yet."""
    only_vllm: str = ""
    """Why only vLLM's own connector supports the model."""
    pair: PrefillDecodeOptions = field(default_factory=PrefillDecodeOptions)
    chat_template: str | None = None
    """Chat template file; set only for the models that sojourn makes (``tiny``, ``smol``). If it is set, the
    command also enables tool calls and names the served model."""
    engine_args: tuple[str, ...] = ()
    """The user's flags for ``vllm serve``, unchanged."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The command line of an engine, and the environment variables that it needs."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Environment variables to set."""
    flags: EngineFlags
    """The engine's flags: those in ``argv``, and those of a ``--config`` file, which vLLM reads itself."""
    unset: tuple[str, ...] = ()
    """Environment variables to remove."""
    warnings: tuple[str, ...] = ()
    """One line for each option that has no effect, or less effect than the user may expect."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment ``base``, with ``env`` set and the variables in ``unset`` removed."""
        return {**{name: value for name, value in base.items() if name not in self.unset}, **self.env}

    def as_shell(self) -> str:
        """Return the command as a line for a shell, with ``***`` for the values of secret flags."""
        unset = [part for name in self.unset for part in ("-u", name)]
        assignments = [f"{name}={value}" for name, value in self.env.items()]
        prefix = ["env", *unset, *assignments] if unset or assignments else []
        return shlex.join([*prefix, *redacted(self.argv)])


def build_command(
    options: ServeOptions, facts: LaunchEnvironment, environ: Mapping[str, str]
) -> EngineCommand:
    """Return the engine's command for ``options``. ``facts``: properties of the machine. ``environ``: the
    caller's environment. Raises ``InvalidOption`` for options, flags or files that cannot be used."""
    flags = EngineFlags.read(options.engine_args)
    tiers, lines = _resolve_tiers(options, flags, facts, environ)
    pair, stock = options.pair, options.policy == STOCK_POLICY
    _check_flags(options, tiers, flags)
    env: dict[str, str] = {}
    added: list[str] = []

    def default(flag: str, *values: str) -> None:
        if not flags.has(flag):
            added.extend([flag, *values])

    if not stock:
        added += ["--scheduler-cls", SCHEDULER_CLS]
        if options.reads_hidden_states:
            added += ["--worker-cls", WORKER_CLS]
        flags, merged = flags.pop_json("--additional-config")
        given = merged.get(PLUGIN_NAME, {})
        if not isinstance(given, dict):
            raise InvalidOption(f"--additional-config: {PLUGIN_NAME} is not an object")
        merged[PLUGIN_NAME] = {**_tool_parser_config(options, flags), **given, **_own_settings(options)}
        added += ["--additional-config", json.dumps(merged)]
    transfer: dict[str, Any] = {}
    if tiers.any:
        # A pair has not the layout with blocks outermost, since both engines need the same one.
        no_layout, available_bytes = facts.cpu_build or pair.any, facts.available_bytes or 0
        transfer = offload_transfer_config(
            tiers, cpu_build=no_layout, stock=stock, flags=flags, available_bytes=available_bytes
        )
    if pair.any:
        address = listen_address(flags)
        port = None if address is None else address[1]
        transfer = prefill_decode_transfer_config(pair, hostname=facts.hostname, port=port, host=transfer)
    if transfer:
        added += ["--kv-transfer-config", json.dumps(transfer)]
    stores = pair.any or tiers.disk is not None
    if stores and environ.get("PYTHONHASHSEED") in (None, "random"):
        env["PYTHONHASHSEED"] = "0"  # equal block hashes in every process, and after a restart
    stages = parallel_size(flags, "--pipeline-parallel-size")
    # Under auto the engine does without host memory rather than change the model's groups.
    on_host_alone = tiers.any and not stores and (stages <= 1 or tiers.host_gib == AUTO)
    if replace(flags, args=(*added, *flags.args)).kv_connector() in OWN_CONNECTORS and not on_host_alone:
        # Host memory supports several groups of KV caches; a disk, pairs and pipeline parallel do not.
        default(ONE_GROUP)
    # An engine of a pair needs the plugin with any scheduler, to report its status to gateways.
    env["VLLM_PLUGINS"] = _plugins(not stock or pair.any, facts, environ)
    # This changes only the answers: they report how much of the prompt was reused.
    default("--enable-prompt-tokens-details")

    if options.chat_template is not None:
        default("--served-model-name", options.model)
        default("--chat-template", options.chat_template)
        default("--enable-auto-tool-choice")
        default("--tool-call-parser", GENERATED_MODEL_TOOL_PARSER)
    if facts.cpu_build:
        default("--block-size", str(CPU_BLOCK_SIZE))
        default("--max-num-batched-tokens", str(CPU_BATCHED_TOKENS))
        if flags.names.isdisjoint(("--compilation-config", "--optimization-level")):
            # Compiling needs a C++ compiler and a minute.
            if stages <= 1:
                default("--enforce-eager")
            else:
                default("--compilation-config", UNCOMPILED_STAGES)
        env.update(_cpu_environment(flags, facts, environ))

    # vLLM reads the --config file itself and puts the file's flags before ours. So the values in the file,
    # which may be secrets, stay off the command line.
    flags = replace(flags, args=(*added, *flags.args))
    return EngineCommand(
        argv=(facts.python, *_entry_command(options, facts), *flags.args),
        env=env,
        flags=flags,
        # Without byte code files, every process of the engine compiles all imports again.
        unset=("PYTHONDONTWRITEBYTECODE",) if "PYTHONDONTWRITEBYTECODE" in environ else (),
        warnings=(*lines, *_warnings(options, flags, facts, environ)),
    )


def _check_flags(options: ServeOptions, tiers: KvOffloadOptions, flags: EngineFlags) -> None:
    """Raise ``InvalidOption`` for options and flags that contradict each other."""
    stock, hidden, pair = options.policy == STOCK_POLICY, options.reads_hidden_states, options.pair
    own, ranks = f"policy {options.policy!r}", flags.value("--data-parallel-size")
    by_hash, by_name = "--no-enable-prefix-caching", "--enable-lora"
    unfit = {
        "--speculative-config": "pairs do not support speculative decoding",
        by_name: "KV of an adapter is identified by the adapter's name and not by its weights",
        by_hash: _NO_HASHES,
    }
    refuse({
        # A file may name a model; vLLM prefers the first argument.
        "the model is the first argument, not --model; write: sojourn serve MODEL [flags]":
            EngineFlags(flags.args).has("--model"),
        f"{own} sets --scheduler-cls; remove the flag, or serve with --policy stock":
            not stock and flags.has("--scheduler-cls"),
        f"{own} sets --worker-cls to read hidden states; remove the flag, or choose a policy that reads none":
            not stock and hidden and flags.has("--worker-cls"),
        f"--sojourn-network is for policies that read hidden states; {options.policy!r} reads none":
            not stock and not hidden and options.network_file is not None,
        "policy stock is plain vLLM and takes no --sojourn options":
            stock and _own_settings(options) != {"policy": STOCK_POLICY},
        "tiers set --kv-transfer-config; give either that flag or --kv-host-gib":
            tiers.any and flags.has("--kv-transfer-config"),
        f"{by_hash}: {_NO_HASHES}; leave out {by_hash} or --kv-host-gib": tiers.any and flags.is_set(by_hash),
        f"{by_name}: {unfit[by_name]}, and the disk may hold KV of other weights; leave out {by_name} or "
        "--kv-disk":
            tiers.disk is not None and flags.has(by_name),
    })  # fmt: skip
    if pair.any:
        refuse({
            "--kv-disk: the disk of a pair is --kv-store":
                tiers.disk is not None or tiers.disk_gib is not None,
            "--kv-host-gib and --role decode: prefill engines keep the contexts; give it to these":
                tiers.any and pair.role == "decode",
            "--tier-backend vllm and --role: host memory of a pair is sojourn's": tiers.backend == "vllm",
            "--role sets --kv-transfer-config; give one of the two": flags.has("--kv-transfer-config"),
            **{
                f"{flag}: {why}; start an engine of a pair without it": flag in flags.names
                for flag, why in unfit.items()
            },
            f"--data-parallel-size is {ranks}; an engine of a pair needs a server of its own":
                ranks not in (None, "1"),
        })  # fmt: skip


_NO_HASHES = "stored KV is found by the block hashes of prefix caching"


def _resolve_tiers(
    options: ServeOptions, flags: EngineFlags, facts: LaunchEnvironment, environ: Mapping[str, str]
) -> tuple[KvOffloadOptions, list[str]]:
    """Return (the options of host memory and disk with the backend chosen, lines for the user that say what
    was chosen by ``auto`` and why). A missing ``--kv-host-gib`` is ``auto`` on CUDA. ``auto`` is no host
    memory where that cannot be; a disk, which needs it, then fails like any other option."""
    tiers, stock, line = options.tiers, options.policy == STOCK_POLICY, "no host memory for KV ({}): {}"
    only_vllm, auto = _only_vllm(options, flags), "--kv-host-gib auto"
    if tiers.host_gib is None:
        on_cuda = not facts.cpu_build and facts.available_bytes is not None
        other_places = ("--kv-transfer-config", "--kv-offloading-size")  # they set a KV connector
        if on_cuda and not (stock or options.pair.any or any(map(flags.has, other_places))):
            if facts.unified_memory and tiers.disk is None:
                why = "the GPU's memory is this machine's; give a size if you want some"
                return tiers, [line.format(auto, why)]
            tiers = replace(tiers, host_gib=AUTO)
    elif host_size_gib(tiers.host_gib) == 0:
        tiers = replace(tiers, host_gib=None)
    backend, because = tiers.backend, ""
    if backend == AUTO:
        backend, because = "sojourn", "it serves this model"
        if tiers.disk is not None:
            because = "vLLM's has no disk"
        elif stock and not options.pair.any:
            backend, because = "vllm", "policy stock is vLLM's own scheduler"
        elif only_vllm and not options.pair.any:
            backend, because = "vllm", only_vllm
    if tiers.host_gib == AUTO:
        why = options.model_refusal or (only_vllm if backend == "sojourn" else "")
        if flags.is_set("--no-enable-prefix-caching"):
            why = _NO_HASHES
        elif "expandable_segments:True" in environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            why = "vLLM allows no KV connector with expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
        if why and tiers.disk is None:
            return KvOffloadOptions(), [line.format(auto, why)]
    if not tiers.any:
        return tiers, []
    connector = "sojourn's" if backend == "sojourn" else "vLLM's"
    chosen = f"host memory by {connector} connector (--tier-backend auto): {because}"
    return replace(tiers, backend=backend), [chosen] if because and not options.pair.any else []


def _only_vllm(options: ServeOptions, flags: EngineFlags) -> str:
    """Return why only vLLM's own connector supports the model with these flags; empty if sojourn's does."""
    for flag in ("--decode-context-parallel-size", "--prefill-context-parallel-size"):
        if parallel_size(flags, flag) > 1:
            return f"{flag} splits the tokens of a context over workers"
    if flags.has("--kv-cache-dtype-skip-layers"):
        return "--kv-cache-dtype-skip-layers makes KV of mixed precision"
    return options.only_vllm


def policy_settings(
    flags: Mapping[str, str | None], extra: Mapping[str, Any], engine_args: Sequence[str]
) -> dict[str, str | None]:
    """Return the settings that choose the policy, by name. ``flags`` has the values of their flags. For a
    missing flag (``None``), ``extra`` (the values of ``--sojourn-option``) and ``--additional-config`` in
    ``engine_args`` count, in this order."""
    other = extra
    if STOCK_POLICY not in (flags["policy"], extra.get("policy")):  # plain vLLM ignores them
        config = EngineFlags.read(engine_args).pop_json("--additional-config")[1].get(PLUGIN_NAME)
        other = {**config, **extra} if isinstance(config, dict) else extra
    found = {key: str(other[key]) for key in flags if other.get(key) is not None}
    return {key: found.get(key) if value is None else value for key, value in flags.items()}


def absolute_path(path: str | Path) -> str:
    """Return ``path`` as an absolute path, since the engine's processes may run in another folder."""
    return str(Path(path).expanduser().absolute())


def listen_address(flags: EngineFlags) -> tuple[str, int] | None:
    """Return the server's host (empty without ``--host``) and port; ``None`` for a Unix socket. Raises
    ``InvalidOption``."""
    if flags.has("--uds"):
        return None
    port = flags.value("--port") or str(DEFAULT_PORT)
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidOption(f"--port {port} is not a port number")
    return flags.value("--host") or "", int(port)


def _entry_command(options: ServeOptions, facts: LaunchEnvironment) -> list[str]:
    if facts.has_vllm_cli:
        return ["-m", CLI_MODULE, "serve", options.model_path]
    # The module warns at every start that it is deprecated.
    quiet = ["-W", "ignore::DeprecationWarning:__main__"]
    return [*quiet, "-m", SERVER_MAIN_MODULE, API_SERVER_MODULE, "--model", options.model_path]


def _warnings(
    options: ServeOptions, flags: EngineFlags, facts: LaunchEnvironment, environ: Mapping[str, str]
) -> tuple[str, ...]:
    ranks, ours = flags.value("--data-parallel-size"), options.policy != STOCK_POLICY
    in_rust = environ.get(RUST_FRONTEND, "0") != "0"
    found = {
        f"{RUST_FRONTEND}: vLLM's server in Rust loads no plugin of ours, so it takes no events, knows no "
        "coding agents, and has neither the live page nor sojourn's metrics; unset it to have them":
            in_rust and facts.has_vllm_cli and (ours or options.pair.any),
        f"--data-parallel-size {ranks}: each rank has KV of its own, and vLLM sends a program's next "
        "request to any of them; put `sojourn gateway --engines URL` before this server, which keeps a "
        "program on its rank":
            ranks not in (None, "1") and ours and not any(map(flags.has, _ONE_RANK)),
    }  # fmt: skip
    return tuple(text for text, applies in found.items() if applies)


_ONE_RANK = [f"--data-parallel-{name}" for name in ("rank", "external-lb", "multi-port-external-lb")]
"""Flags of vLLM with which each data-parallel rank has an address of its own."""


def _own_settings(options: ServeOptions) -> dict[str, Any]:
    """Return the plugin settings that the user gives by flags."""
    own = {each.name: getattr(options, each.name) for each in fields(options) if each.metadata}
    return {**options.extra, **{key: value for key, value in own.items() if value is not None}}


def _tool_parser_config(options: ServeOptions, flags: EngineFlags) -> dict[str, str]:
    """Return the plugin settings that name the API server's tool parser, so that the engine core can use it
    too; empty without a parser."""
    default = None if options.chat_template is None else GENERATED_MODEL_TOOL_PARSER
    parser, plugin = flags.value("--tool-call-parser") or default, flags.value("--tool-parser-plugin")
    found = {"tool_call_parser": parser, "tool_parser_plugin": plugin}
    return {name: value for name, value in found.items() if value} if parser else {}


def _plugins(ours: bool, facts: LaunchEnvironment, environ: Mapping[str, str]) -> str:
    """Return the value of ``VLLM_PLUGINS``, the list of plugins that vLLM loads. It has all plugins that vLLM
    would load anyway, and sojourn only if ``ours``."""
    listed = environ.get("VLLM_PLUGINS")
    names = facts.plugins if listed is None else tuple(name.strip() for name in listed.split(","))
    kept = [name for name in dict.fromkeys(names) if name and name != PLUGIN_NAME]
    return ",".join([*kept, PLUGIN_NAME] if ours else kept)


CPU_KV_GIB = "1"
"""GiB of memory for the KV cache of an engine on CPUs, if no flag sets the size."""
_MEMORY_SIZES = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--device-memory-utilization")
"""Flags that set the size of the KV cache. vLLM ignores them if an environment variable sets the size too."""
WORKER_SHARED_MEMORY_BYTES = 256 << 20
"""Free bytes of ``/dev/shm`` with which vLLM starts a process for the worker; it checks for 240 MiB."""


def _cpu_environment(
    flags: EngineFlags, facts: LaunchEnvironment, environ: Mapping[str, str]
) -> dict[str, str]:
    wanted: dict[str, str] = {}
    if not any(map(flags.has, _MEMORY_SIZES)):
        # In GiB. vLLM's default is a share of all memory, even with a fixed number of blocks.
        wanted["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_GIB
    workers = engine_workers(flags)
    data_parallel = flags.has("--data-parallel-size")
    by_node = workers <= facts.memory_nodes or "VLLM_CPU_SIM_MULTI_NUMA" in environ
    if workers > 1 and not by_node and not data_parallel:
        # vLLM's own choice is a NUMA node for each worker. With fewer nodes than workers it does not start.
        wanted |= _cores_by_worker(facts.cpus, workers)
    elif len(facts.cpus) == 2 and workers == 1 and not data_parallel:
        # "auto" keeps one core for the server. On two cores that halves prefill (331 instead of 665 tokens
        # per second at 4k, smol). With both cores, spinning threads starve the server and slow decoding (11
        # instead of 33 tokens per second), so threads sleep while they wait.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, facts.cpus))
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
    free = facts.shared_memory_bytes
    if workers == 1 and free is not None and free < WORKER_SHARED_MEMORY_BYTES:
        # vLLM does not start with the 64 MiB of a container, unless the engine's process is the worker.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {name: value for name, value in wanted.items() if name not in environ}


def _cores_by_worker(cpus: Sequence[int], workers: int) -> dict[str, str]:
    """Return the environment variables that bind each of ``workers`` workers to an equal number of ``cpus``.
    With three or more cores per worker, one core for each worker is left to the server. With fewer cores than
    workers, no worker is bound to a core."""
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin would starve the server
    if len(cpus) < workers:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **passive}
    share = len(cpus) // workers
    used = share - 1 if share > 2 else share
    parts = (cpus[worker * used : (worker + 1) * used] for worker in range(workers))
    cores = "|".join(",".join(map(str, part)) for part in parts)
    return {**(passive if used == share else {}), "VLLM_CPU_OMP_THREADS_BIND": cores}
