"""``sojourn serve``: run ``vllm serve`` with sojourn's plugin, a policy, and default settings for CPUs.

The process becomes vLLM (exec), so signals, exit codes and output are vLLM's own.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import typer

from ..kv_transfer.peer_transport import parse_address
from ..launch import serve_command
from ..launch.engine_flags import EngineFlags, InvalidOption, engine_workers, flag_name
from ..launch.kv_options import KvOffloadOptions, PrefillDecodeOptions, check_machine
from ..launch.launch_environment import detect_launch_environment
from ..launch.model_config import check_layers, connector_refusal, only_vllm_refusal, read_model_config
from ..models import CHAT_TEMPLATE, LOCAL_MODELS, ModelError, is_cached, model_directory, resolve_model
from ..policies.preset import Preset, load_preset, preset_names, read_preset
from ..policies.preset_store import DEFAULT_PRESET
from ..policies.retention_policies import RetentionPolicy
from ..policies.toml_document import did_you_mean
from ..vllm import compat
from ..vllm.plugin_settings import PluginSettings, check_scheduling, missing_tiers
from .console import CliError, check_free_port, print_line, print_note

_OPTION_CLASSES = (serve_command.ServeOptions, KvOffloadOptions, PrefillDecodeOptions)
_POLICY_OPTIONS = ("policy", "policy_file", "allow_policy_modules")
"""Options that other settings may give too."""
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _declared_options() -> Iterator[inspect.Parameter]:
    """Yield an option of the command for each field that is declared with ``own_flag``."""
    for kind in _OPTION_CLASSES:
        hints = get_type_hints(kind)
        for each in fields(kind):
            if declared := each.metadata:
                option = typer.Option(
                    each.default,
                    declared["flag"],
                    help=declared["help"],
                    show_default=declared["shown_default"] or True,
                    metavar="PATH" if declared["is_path"] else None,
                )
                yield inspect.Parameter(
                    each.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hints[each.name]
                )


def serve(
    context: typer.Context,
    model: str = typer.Argument(help="tiny or smol (made on first use), a directory or a hub id"),
    *,
    sojourn_option: list[str] = typer.Option([], help="Any other setting, key=value; value is JSON or text"),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the command and environment; start nothing"),
    **options: Any,
) -> None:
    """Serve MODEL like [b]vllm serve[/], with a policy. All other flags go to vLLM unchanged."""
    own_flags = [name for option in context.command.params for name in option.opts if name.startswith("--")]
    model, engine_args = _model_and_flags(model, context.args, own_flags)
    settings = _settings(sojourn_option)
    options |= serve_command.policy_settings(
        {name: options[name] for name in _POLICY_OPTIONS}, settings, engine_args
    )
    for name in ("policy_file", "profile_file"):
        if options[name] is not None and not Path(options[name]).is_file():
            raise CliError(f"{options[name]} is not a file", "give the path of a file that exists")
    role = options["role"]
    policy = options["policy"] or (serve_command.DECODE_POLICY if role == "decode" else DEFAULT_PRESET)
    options["policy"] = policy
    preset = _preset(policy, options["policy_file"], options["allow_policy_modules"])
    _check_engine(policy, role, dry_run=dry_run)
    is_local = model in LOCAL_MODELS
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise CliError(
            f"{model} is not a directory", f"give a model directory, a hub id, or {', '.join(LOCAL_MODELS)}"
        )
    if not is_local and not Path(model).exists() and (hint := did_you_mean(model, LOCAL_MODELS)):
        print_note(f"{model} is taken for a hub id{hint}")
    model_path = str(model_directory(model)) if is_local else model
    tiers = KvOffloadOptions(**_fields_of(KvOffloadOptions, options))
    pair = PrefillDecodeOptions(**_fields_of(PrefillDecodeOptions, options))
    given = EngineFlags.read(engine_args)
    is_changed = any(map(given.has, ("--hf-overrides", "--hf-config-path")))
    config = None if is_changed else read_model_config(model_path, given.value("--revision"))
    own = _fields_of(serve_command.ServeOptions, options)
    is_printed = False
    try:
        command = serve_command.build_command(
            serve_command.ServeOptions(
                **own,
                model=model,
                model_path=model_path,
                reads_hidden_states=preset is not None and preset.output_length.reads_hidden_states,
                model_refusal=connector_refusal(model_path, config or {}),
                only_vllm=only_vllm_refusal(model_path, config or {}),
                extra=settings,
                tiers=tiers,
                pair=pair,
                chat_template=str(CHAT_TEMPLATE) if is_local else None,
                engine_args=tuple(engine_args),
            ),
            detect_launch_environment(),
            os.environ,
        )
        print_note(*command.warnings, *_check_settings(preset, command.flags, role))
        if config is not None and command.flags.kv_connector() in serve_command.OWN_CONNECTORS:
            no_disk = "without --kv-disk and with --tier-backend auto, which has host memory for most models"
            next_step = f"serve it {no_disk if role is None else 'without --role'}"
            in_one_group = command.flags.is_set(serve_command.ONE_GROUP)
            print_note(*check_layers(model_path, config, next_step, in_one_group=in_one_group))
        address = serve_command.listen_address(command.flags)
        if dry_run:  # before the checks of this machine, since the command may be for another one
            sys.stdout.write(command.as_shell() + "\n")
            is_printed = True
        files = {"--sojourn-history": own["history_file"], "--sojourn-network": own["network_file"]}
        facts = compat.installed_vllm(), model_path, engine_workers(command.flags)
        print_note(*check_machine(tiers, pair, files, *facts))
        if dry_run:
            return
        if address is not None:
            check_free_port(*address, "another server may run there; choose a free port with --port")
        if pair.any and not isinstance(listens := parse_address(pair.listen), str):
            check_free_port(*listens, "give a free port and an address of this machine with --kv-listen")
    except InvalidOption as error:
        next_step = error.next_step or "see sojourn serve --help and vllm serve --help"
        if is_printed:
            next_step += "; the command above is for a machine that passes this check"
        raise CliError(str(error), next_step) from None
    if is_local:
        make_model(model)
    print_line(f"policy {policy}; vLLM starts, which takes a while: {command.as_shell()}")
    sys.stdout.flush()
    os.execve(command.argv[0], list(command.argv), command.environment(os.environ))


_context, _model, *_own, _ = inspect.signature(serve, eval_str=True).parameters.values()
# Typer reads a command's options from its signature.
serve.__signature__ = inspect.Signature([_context, _model, *_declared_options(), *_own])  # type: ignore[attr-defined]


def _fields_of(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared fields of the class ``kind`` from ``options``, with absolute paths."""
    declared = {each.name: each.metadata for each in fields(kind) if each.metadata}
    return {
        name: serve_command.absolute_path(options[name])
        if flag["is_path"] and options[name] is not None
        else options[name]
        for name, flag in declared.items()
    }


def _model_and_flags(model: str, args: list[str], own_flags: Sequence[str]) -> tuple[str, list[str]]:
    """Return the model and vLLM's flags. ``model`` is the first argument of the command, ``args`` are the
    following ones. If ``model`` is a flag, the model comes from the ``--config`` file."""
    is_named = not model.startswith("-")
    engine_args = args if is_named else [model, *args]
    from_file = EngineFlags.read(engine_args).from_file
    for flag in map(flag_name, from_file):
        if flag in own_flags:
            raise CliError(
                f"{flag} is a flag of sojourn, and the --config file holds vLLM's",
                f"give {flag} on the command line",
            )
    if is_named:
        return model, engine_args
    model_of_file = EngineFlags(from_file).value("--model")
    if not model_of_file:
        raise CliError(f"expected a model, got {model!r}", "write: sojourn serve MODEL [flags]")
    return model_of_file, engine_args


def _preset(policy: str, file: str | None, allowed_modules: str | None) -> Preset | None:
    """Return the policy's preset; ``None`` for stock."""
    known = (serve_command.STOCK_POLICY, *preset_names())
    if file is None and policy not in known:
        raise CliError(
            f"unknown policy {policy!r}{did_you_mean(policy, known)}",
            f"choose one of {', '.join(known)}, or give --policy-file",
        )
    if policy == serve_command.STOCK_POLICY:
        return None
    if file is None:
        return load_preset(policy)
    return read_preset(Path(file), allowed_modules=allowed_modules or "")


def missing_vllm() -> CliError:
    """Return the error of a command that starts an engine where vLLM is not installed."""
    return CliError(
        "vLLM is not installed in this environment",
        "run make setup for the CPU engine, or pip install '.[vllm]' in a checkout on a CUDA machine",
    )


def _check_engine(policy: str, role: str | None, *, dry_run: bool) -> None:
    version = compat.installed_vllm()
    if version is None and not dry_run:
        raise missing_vllm()
    if version is None:
        print_note("vLLM is not installed here; the command is for a machine that has it")
        return
    if policy == serve_command.STOCK_POLICY and role is None:
        return  # plain vLLM works with any release
    try:
        compat.check_vllm_version(version)
    except compat.UnsupportedEngine as error:
        message, _, next_step = str(error).partition(". ")
        raise CliError(message, next_step) from None


def _check_settings(preset: Preset | None, flags: EngineFlags, role: str | None) -> list[str]:
    """Return notes for the user about the settings. Raises ``CliError`` for settings that the engine would
    reject a minute later."""
    if preset is None:
        return []
    settings = PluginSettings.read(json.loads(flags.value("--additional-config") or "{}"))
    settings.profile()
    settings.attention_costs(chunked=not flags.has("--no-enable-chunked-prefill"))
    check_scheduling(preset, flags.value("--scheduling-policy") or "")
    missing = missing_tiers(preset, flags.kv_connector(), allowed=settings.allow_missing_tiers)
    notes = []
    if role == "decode" and (preset.placement.is_used or type(preset.retention) is not RetentionPolicy):
        notes.append(
            f"policy {preset.name} keeps KV of finished turns in the memory of this decode engine, but the "
            "next turn's prompt is computed by a prefill engine; "
            f"{serve_command.DECODE_POLICY}, the default, keeps none"
        )
    if missing is not None:
        notes.append(f"policy {preset.name}: {missing}")
    if flags.has("--no-enable-prefix-caching"):
        notes.append("without prefix caching every turn is computed in full, and no policy helps")
    return notes


def make_model(name: str) -> str:
    """Return the directory of a model, which is made on first use. Raises ``CliError`` if that fails."""
    if name in LOCAL_MODELS and not is_cached(name):
        print_line(f"making the model {name}, once")
    try:
        return resolve_model(name)
    except (ModelError, OSError) as error:
        next_step = getattr(error, "next_step", "set SOJOURN_CACHE to a directory with 300 MB free")
        what = f"cannot make the model {name!r}: {getattr(error, 'message', error)}"
        raise CliError(what, next_step) from None


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise CliError(f"--sojourn-option {pair!r} is not key=value", "for example max_programs=500")
        try:
            settings[key] = json.loads(text)
        except (ValueError, RecursionError):
            settings[key] = text
    return settings
