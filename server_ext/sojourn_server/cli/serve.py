"""``sojourn serve``: ``vllm serve`` with the policy, the plugin and sane CPU defaults set up.

The process becomes vLLM (exec), so signals, exit codes and output are vLLM's own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from .console import CliError, console

if TYPE_CHECKING:
    from sojourn_server.launch.pairs import PairOptions
    from sojourn_server.launch.tiers import TierOptions

USUAL_POLICY = "continuum"
POLICY_OF_PAIRS = "observe"
"""A pair's KV is in storage when a turn ends, and the next turn may go to another engine: to hold it on the
device is of no use."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Serve MODEL like [b]vllm serve[/], with a policy. Every other flag goes to vLLM as it is.",
    )(serve)


def serve(
    context: typer.Context,
    model: str = typer.Argument(help="tiny, smol (both made on first use), a directory or a hub id"),
    policy: str | None = typer.Option(
        None,
        help="A preset's name, or stock for plain vLLM",
        show_default=f"{USUAL_POLICY}; with --role {POLICY_OF_PAIRS}",
    ),
    policy_file: Path | None = typer.Option(None, help="A TOML preset in place of a named policy"),
    sojourn_history: Path | None = typer.Option(
        None, help="File to keep what is learned of tools and lengths"
    ),
    sojourn_network: Path | None = typer.Option(None, help="File to keep tetris-learned's predictor in"),
    sojourn_profile: Path | None = typer.Option(None, help="TOML written by sojourn profile"),
    sojourn_lease_budget: float | None = typer.Option(None, help="Share of the KV cache for leases, 0 to 1"),
    sojourn_max_ttl_s: float | None = typer.Option(None, help="Longest lease a hint may ask for, seconds"),
    compute_quota_s: float | None = typer.Option(
        None, help="Attention of a step at most, seconds by --sojourn-profile", show_default="any"
    ),
    kv_host_gib: float | None = typer.Option(None, help="Host memory for KV that the device loses, GiB"),
    kv_disk: Path | None = typer.Option(None, help="Directory for KV that host memory loses"),
    kv_disk_gib: float | None = typer.Option(None, help="How much the directory may hold, GiB"),
    kv_disk_name: str | None = typer.Option(
        None, help="This engine's name there, where several share the directory and read each other's KV"
    ),
    tier_backend: str = typer.Option("sojourn", help="Whose code moves it: sojourn (CPU), vllm (CUDA)"),
    role: str | None = typer.Option(
        None,
        help="Serve as the prefill or decode engine of a pair. KV goes through --kv-store, so leases "
        "are of no use here, and the policy is observe unless you name one",
    ),
    kv_store: Path | None = typer.Option(None, help="Directory that all engines of the pair share"),
    kv_store_gib: float | None = typer.Option(
        None, help="How much this engine may write there, GiB", show_default="16"
    ),
    kv_store_name: str | None = typer.Option(
        None, help="Its name there, another for each engine", show_default="node-role-port"
    ),
    kv_listen: str | None = typer.Option(
        None,
        help="Where engines of the pair reach this one: tcp:HOST:PORT or unix:PATH; port 0 is any that is "
        "free, and engines of other machines need a HOST of their network. It asks nobody for a key",
        show_default="tcp:127.0.0.1:0",
    ),
    kv_node: str | None = typer.Option(
        None, help="The machine whose storage link it uses", show_default="host's name"
    ),
    kv_buffer_gib: float | None = typer.Option(
        None, help="Host memory for KV on its way, GiB: the longest prompt has to fit", show_default="1"
    ),
    storage_nic_gbit: float | None = typer.Option(
        None, help="Hold its link to storage to this, Gbit/s each way", show_default="as fast as it goes"
    ),
    compute_nic_gbit: float | None = typer.Option(
        None, help="Hold what it sends to other engines to this, Gbit/s", show_default="as fast as it goes"
    ),
    sojourn_option: list[str] = typer.Option([], help="Any other setting, key=value; value is JSON or text"),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the command and environment; start nothing"),
) -> None:
    """Start the server; does not return."""
    from sojourn_server.launch.command import BadOption, ServeOptions, build_command
    from sojourn_server.launch.facts import engine_facts
    from sojourn_server.launch.pairs import PairOptions
    from sojourn_server.launch.tiers import TierOptions
    from sojourn_server.models import CHAT_TEMPLATE, LOCAL_MODELS, model_directory

    if model.startswith("-"):
        raise CliError(f"{model!r} stands where the model belongs", "write: sojourn serve MODEL [flags]")
    if policy is None:
        policy = USUAL_POLICY if role is None else POLICY_OF_PAIRS
    _check_policy(policy, policy_file)
    _check_engine(policy, role)
    is_local = model in LOCAL_MODELS
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise CliError(
            f"{model} is not a directory", f"give a model directory, a hub id, or {', '.join(LOCAL_MODELS)}"
        )
    model_path = str(model_directory(model)) if is_local else model
    disk = _path(kv_disk)
    tiers = TierOptions(
        host_gib=kv_host_gib,
        disk=disk,
        disk_gib=kv_disk_gib,
        disk_name=kv_disk_name,
        backend=tier_backend,
    )
    pair = PairOptions(
        role=role,
        store=_path(kv_store),
        store_gib=kv_store_gib,
        store_name=kv_store_name,
        listen=kv_listen,
        node=kv_node,
        buffer_gib=kv_buffer_gib,
        storage_gbit=storage_nic_gbit,
        compute_gbit=compute_nic_gbit,
    )
    try:
        command = build_command(
            ServeOptions(
                model=model,
                model_path=model_path,
                policy=policy,
                policy_file=_path(policy_file, must_exist=True),
                reads_states=_reads_states(policy, policy_file),
                history_file=_path(sojourn_history),
                network_file=_path(sojourn_network),
                profile_file=_path(sojourn_profile, must_exist=True),
                lease_budget_fraction=sojourn_lease_budget,
                max_ttl_s=sojourn_max_ttl_s,
                extra=_settings(sojourn_option)
                | ({} if compute_quota_s is None else {"compute_quota_s": compute_quota_s}),
                tiers=tiers,
                pair=pair,
                chat_template=str(CHAT_TEMPLATE) if is_local else None,
                engine_args=tuple(context.args),
            ),
            engine_facts(),
            os.environ,
        )
        _print_notes(command.warnings)
        _print_notes(_check_settings(policy, command.argv, role))
        if dry_run:  # first of all: the command may be for another machine than the checks are of
            sys.stdout.write(command.as_shell() + "\n")
        if tiers.any:
            _print_notes(_check_tiers(tiers, model_path, command.argv, try_writing=not dry_run))
        if pair.any:
            _print_notes(_check_pair(pair, model_path, command.argv, try_it=not dry_run))
        if dry_run:
            return
        _check_port(context.args)
    except BadOption as error:
        usage = "sojourn serve --help lists our options, vllm serve --help vLLM's"
        raise CliError(str(error), error.next_step or usage) from None
    if is_local:
        _make_model(model)
    console.print(f"policy {policy}: {command.as_shell()}", highlight=False, soft_wrap=True, markup=False)
    sys.stdout.flush()
    os.execve(command.argv[0], list(command.argv), command.environment(os.environ))


def policies() -> tuple[str, ...]:
    """``stock`` and the names of the presets that are shipped."""
    from importlib.resources import files

    from sojourn_server.launch.command import STOCK

    presets = files("sojourn_server.policy").joinpath("presets")
    names = {entry.name.removesuffix(".toml") for entry in presets.iterdir() if entry.name.endswith(".toml")}
    return (STOCK, *sorted(names - {STOCK}))


def _check_policy(policy: str, policy_file: Path | None) -> None:
    known = policies()
    if policy_file is None and policy not in known:
        raise CliError(
            f"there is no policy {policy!r}", f"choose one of {', '.join(known)}, or give --policy-file"
        )


def _reads_states(policy: str, policy_file: Path | None) -> bool:
    from sojourn_server.launch.command import STOCK
    from sojourn_server.policy.preset import PresetError, load_preset, read_preset

    if policy == STOCK:
        return False
    try:
        preset = load_preset(policy) if policy_file is None else read_preset(policy_file)
    except (PresetError, OSError) as error:
        raise CliError(str(error), "sojourn serve --help lists our options") from None
    return preset.remaining.reads_states


def _check_engine(policy: str, role: str | None) -> None:
    from sojourn_server.launch.command import STOCK
    from sojourn_server.launch.versions import UnsupportedEngine, check_vllm, installed_vllm

    version = installed_vllm()
    if version is None:
        raise CliError(
            "vLLM is not installed in this environment",
            "run make setup for the CPU engine, or pip install '.[vllm]' in a checkout on a CUDA machine",
        )
    if policy == STOCK and role is None:
        return  # plain vLLM: nothing of ours depends on the release
    try:
        check_vllm(version)
    except UnsupportedEngine as error:
        message, _, next_step = str(error).partition(". ")
        raise CliError(message, next_step) from None


def _check_settings(policy: str, argv: Sequence[str], role: str | None) -> list[str]:
    """What the engine would refuse to start with, after a minute. Raises ``CliError``; returns notes."""
    from sojourn_server.launch.command import STOCK, Flags
    from sojourn_server.policy.preset import PresetError
    from sojourn_server.policy.retention import NoRetention
    from sojourn_server.vllm.settings import Settings, SettingsError, check_scheduling

    if policy == STOCK:
        return []
    flags = Flags(tuple(argv))
    try:
        settings = Settings.read(json.loads(flags.value("--additional-config") or "{}"))
        settings.attention_costs(chunked=not flags.has("--no-enable-chunked-prefill"))
        preset = settings.preset()
        check_scheduling(preset, flags.value("--scheduling-policy") or "")
    except (SettingsError, PresetError) as error:
        raise CliError(str(error), "sojourn serve --help lists our options") from None
    notes = []
    if role is not None and (preset.placement.places or not isinstance(preset.retention, NoRetention)):
        notes.append(
            f"policy {preset.name} keeps KV of finished turns on this {role} engine, whose room that takes: "
            "what a pair computes is in its store, and the next turn may go to another engine; "
            f"{POLICY_OF_PAIRS}, which --role takes by itself, keeps none"
        )
    if preset.placement.places and not flags.has("--kv-transfer-config"):
        notes.append(
            f"policy {preset.name} has no memory below the device: whose KV leaves it is computed again; "
            "give some with --kv-host-gib"
        )
    if flags.has("--no-enable-prefix-caching"):
        notes.append("without prefix caching every turn is computed whole, and nothing of ours helps")
    return notes


def _check_tiers(tiers: TierOptions, model_path: str, argv: Sequence[str], *, try_writing: bool) -> list[str]:
    """Fail now rather than after minutes. Raises ``BadOption``; returns notes."""
    from sojourn_server.launch.command import Flags
    from sojourn_server.launch.tier_checks import check_tiers
    from sojourn_server.launch.versions import installed_vllm
    from sojourn_server.launch.weights import known_weights

    block_size = Flags(tuple(argv)).value("--block-size") or ""
    return check_tiers(
        tiers,
        vllm_version=installed_vllm(),
        weights=known_weights(model_path),
        block_tokens=int(block_size) if block_size.isdecimal() else None,
        try_writing=try_writing,
    )


def _check_pair(pair: PairOptions, model_path: str, argv: Sequence[str], *, try_it: bool) -> list[str]:
    """As ``_check_tiers``."""
    from sojourn_server.launch.command import Flags
    from sojourn_server.launch.pair_checks import check_pair, keeps_block_size
    from sojourn_server.launch.versions import installed_vllm
    from sojourn_server.launch.weights import known_weights

    flags = Flags(tuple(argv))
    config = json.loads(flags.value("--kv-transfer-config") or "{}")
    block_size = flags.value("--block-size") or ""
    return check_pair(
        pair,
        config["kv_connector_extra_config"]["store_name"],
        vllm_version=installed_vllm(),
        weights=known_weights(model_path),
        block_tokens=int(block_size) if block_size.isdecimal() else None,
        block_tokens_certain=keeps_block_size(model_path),
        try_it=try_it,
    )


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)


def _check_port(engine_args: list[str]) -> None:
    """Fail now rather than after the model has been loaded."""
    from sojourn_server.launch.command import listen_address

    address = listen_address(engine_args)
    if address is None:
        return
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CliError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror}",
                "another server may be running there; choose a free one with --port",
            ) from None


def _make_model(model: str) -> None:
    from sojourn_server.models import ModelError, resolve_model

    try:
        resolve_model(model)
    except ModelError as error:
        raise CliError(f"cannot make the model {model!r}: {error.message}", error.next_step) from None
    except OSError as error:
        raise CliError(
            f"cannot make the model {model!r}: {error}", "set SOJOURN_CACHE to a directory with 300 MB free"
        ) from None


def _path(path: Path | None, *, must_exist: bool = False) -> str | None:
    if path is None:
        return None
    if must_exist and not path.is_file():
        raise CliError(f"{path} is not a file", "give the path of a file that exists")
    return str(path.expanduser().absolute())  # the engine's processes may run elsewhere


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise CliError(f"--sojourn-option {pair!r} is not key=value", "for example max_programs=500")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings
