"""``sojourn doctor``: checks of this environment and of a server, with the next step for each fault."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path

import typer
from rich.console import Console
from sojourn.errors import install_command

from ..vllm import compat
from .console import DEFAULT_URL, api_key_option, console, json_option, key_source, url_option, write_json
from .doctor_server import Check, server_checks
from .live_client import http_client

_TIMEOUT_S = 20.0
_IMPORT_TIMEOUT_S = 120.0
_ENTRY_POINTS = ((compat.GENERAL_PLUGINS, "sojourn"), (compat.ENDPOINT_PLUGINS, "sojourn"))
_ROCM_DEVICE = Path("/dev/kfd")
_IMPORT_ENGINE = "from transformers import LlamaConfig; import torch; print(torch.cuda.device_count())"
_COMPANIONS = ("torch", "openai", "mini-swe-agent", "matplotlib")


def doctor(
    context: typer.Context,
    url: str | None = url_option("A server to check, for example http://127.0.0.1:8000", None),
    api_key: str | None = api_key_option("The server's API key, or a gateway's"),
    json_output: str | None = json_option("the report"),
) -> None:
    """Check this environment and, with --url, a running server."""
    # The report is the result, so it goes to stdout, unless the JSON goes to stdout.
    report = console if json_output == "-" else Console()
    checks: list[Check] = []
    found = iter(()) if url is None else _url_checks(url, api_key, key_source(context))
    # With a URL the report is about that server, which has imported its engine already.
    for check in itertools.chain(found, environment_checks(import_engine=url is None)):
        checks.append(check)
        _print(check, report)
    failed = [check for check in checks if check.ok is False]
    if url is None:
        report.print("[dim]no server was checked; pass --url to check one[/]")
    report.print(f"[bold red]{len(failed)} to fix[/]" if failed else "[bold green]nothing to fix[/]")
    if json_output is not None:
        write_json({"ok": not failed, "checks": [asdict(check) for check in checks]}, json_output)
    raise typer.Exit(1 if failed else 0)


def _announce(what: str) -> None:
    if console.is_terminal:
        console.print(f"[dim]… {what}[/]", highlight=False, soft_wrap=True)


def _url_checks(url: str, api_key: str | None, key_source: str) -> Iterator[Check]:
    try:
        client = http_client(url, api_key, _TIMEOUT_S)
    except ValueError as error:
        yield Check("server", False, f"{url}: {error}", f"give a URL like {DEFAULT_URL}")
        return
    with client:
        _announce(f"asking {url}, up to {_TIMEOUT_S:g} s for each answer")
        yield from server_checks(client, key_source)


def _print(check: Check, report: Console) -> None:
    ok, wrong, neither = ("ok", "x", "-") if report.options.ascii_only else ("✓", "✗", "–")
    mark = {True: f"[green]{ok}[/]", False: f"[red]{wrong}[/]", None: f"[dim]{neither}[/]"}[check.ok]
    report.print(mark, end=" ")
    report.print(f"{check.name}: {check.detail}", highlight=False, markup=False, soft_wrap=True)
    if check.next_step:
        report.print(f"    next: {check.next_step}", highlight=False, markup=False, soft_wrap=True)


# --- this environment ---------------------------------------------------------------------------


def environment_checks(*, import_engine: bool = True) -> Iterator[Check]:
    """Yield the checks of this environment: Python, packages, vLLM, memory, entry points and models.

    ``import_engine``: also import the engine's model library, which takes seconds."""
    from sojourn_server.launch.launch_environment import installed_versions

    yield Check("python", True, f"{platform.python_version()} at {sys.executable}")
    versions = installed_versions("sojourn", *_COMPANIONS)
    if version := versions.get("sojourn"):
        yield Check("sojourn", True, version)
    else:
        said = "not installed as a distribution, so vLLM cannot find the plugin"
        yield Check("sojourn", False, said, f"run {install_command('server')}")
    yield from _engine_checks(import_engine)
    yield _memory_check()
    for name in _COMPANIONS:
        version = versions.get(name)
        yield Check(name, True if version else None, version or "not installed; only some commands need it")
    for group, name in _ENTRY_POINTS:
        found = [entry.value for entry in metadata.entry_points(group=group) if entry.name == name]
        said = found[0] if found else "not visible to this interpreter"
        step = "" if found else f"in the environment that runs vLLM: {install_command('server')}"
        yield Check(f"entry point {group}", bool(found), said, step)
    yield from _model_checks()


def _engine_checks(import_engine: bool) -> Iterator[Check]:
    version = compat.installed_vllm()
    if version is None:
        cpu_engine = "make setup" if _is_checkout() else install_command("cpu")
        step = f"to serve from here: {cpu_engine}, or on a CUDA machine {install_command('vllm')}"
        yield Check("vllm", None, "not installed; serve, demo and the engine tests need it", step)
        return
    build = "CPU build" if compat.is_cpu_build() else "not a CPU build"
    if compat.is_tested(version):
        without = version.split("+", 1)[0] in compat.TESTED_WITHOUT_ENGINE
        how = ", its scheduler only: it has no CPU build to run whole engines" if without else ""
        yield Check("vllm", True, f"{version}, {build}, tested with this sojourn{how}")
    else:
        said = f"{version}, {build}; tested with this sojourn: {', '.join(compat.TESTED_VLLM)}"
        yield Check("vllm", False, said, "install a tested release, or serve with --policy stock")
    if not import_engine:
        return
    _announce(f"importing the engine's models, up to {_IMPORT_TIMEOUT_S:g} s")
    yield from _import_checks(needs_gpu=not compat.is_cpu_build() and not _ROCM_DEVICE.exists())


def _import_checks(*, needs_gpu: bool) -> Iterator[Check]:
    """Yield a check that the engine's model library can be imported, in a process of its own. A slow import
    is no fault, because the first import reads hundreds of files. With ``needs_gpu``, the same process counts
    the devices that torch finds."""
    name = "engine imports"
    again = "run make setup again" if _is_checkout() else f"run {install_command('vllm')} again"
    if util.find_spec("transformers") is None:
        yield Check(name, False, "transformers is not installed", again)
        return
    try:
        run = subprocess.run(
            [sys.executable, "-c", _IMPORT_ENGINE], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        why = "first import, slow disk or busy machine"
        yield Check(name, None, f"not finished after {_IMPORT_TIMEOUT_S:g} s ({why})", "run doctor again")
        return
    if run.returncode:
        said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        step = "the usual cause is a torchvision built for another torch, which text models do not need: "
        yield Check(name, False, said, f"{again}; {step}pip uninstall torchvision")
        return
    yield Check(name, True, "transformers loads its models")
    if needs_gpu:
        if devices := int(run.stdout.split()[-1]):
            yield Check("gpu", True, f"{devices} for CUDA")
            return
        # No fault: vLLM's scheduler, and so sojourn simulate, runs without a GPU.
        said = "torch finds none; vLLM's build for CUDA cannot start an engine here"
        step = "give the container its GPUs, install the driver, or use vLLM's CPU build"
        yield Check("gpu", None, said, step)


def _is_checkout() -> bool:
    """Return whether this package lies in a checkout, where ``make setup`` works."""
    return (Path(__file__).parents[3] / "Makefile").is_file()


def _memory_check() -> Check:
    from sojourn_server.launch.launch_environment import read_memory

    memory, gib = read_memory(), 1 << 30
    said = f"{memory.available_bytes / gib:.2f} GiB available of {memory.total_bytes / gib:.2f} GiB of "
    return Check("memory", True, f"{said}{memory.owner}, for model, KV cache and --kv-host-gib")


def _model_checks() -> Iterator[Check]:
    from sojourn_server.models import LOCAL_MODELS, ModelError, is_cached, model_directory
    from sojourn_server.models.gguf_source import find_gguf

    for name in LOCAL_MODELS:
        if is_cached(name):
            yield Check(f"model {name}", True, f"present in {model_directory(name)}")
            continue
        try:
            find_gguf()
        except ModelError as error:
            yield Check(f"model {name}", None, f"cannot be made: {error.message}", error.next_step)
        else:
            yield Check(f"model {name}", True, "will be made on first use")
