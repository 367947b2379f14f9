"""``sojourn simulate-pd``: simulate prefill and decode nodes with one or two paths to storage."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from sojourn.errors import install_command

from .console import (
    CliError,
    check_output_file,
    console,
    is_given,
    json_option,
    print_line,
    print_note,
    write_json,
)
from .simulate import next_step_for

if TYPE_CHECKING:
    from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import PdOutcome
    from sojourn_server.simulator.prefill_decode.prefill_decode_run import PdSpec

_HOUR_S = 3600.0
_EXAMPLES = {
    "--rate": "0.4", "--hours": "0.5", "--append-scale": "1", "--output-scale": "1",
    "--storage-nic-gbit": "400", "--compute-nic-gbit": "400", "--device-memory-gb": "141",
    "--efficiency": "0.31",
}  # fmt: skip
"""Examples of valid values, for error messages."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "simulate-pd",
        help="Simulate prefill and decode nodes that read KV from storage, with a thousand devices or more. "
        "docs/prefill-decode.md explains the figures.",
    )(simulate_pd)


def simulate_pd(
    context: typer.Context,
    workload: str = typer.Argument(
        "synthetic:dualpath-64k", help="A .jsonl or .jsonl.gz trace, or synthetic:NAME"
    ),
    system: str = typer.Option(
        "basic,layerwise,dual-path,scheduling,oracle",
        metavar="NAMES",
        show_default="all but split and oracle-lengths",
        help="Names separated by commas: basic, layerwise, dual-path, scheduling (DualPath as published), "
        "split (both sides read), oracle-lengths (scheduling that knows how long outputs will be), oracle "
        "(reads and copies are free)",
    ),
    model: str = typer.Option("ds-660b", metavar="NAME", help="ds-660b, ds-27b or qwen2.5-32b"),
    prefill_nodes: int = typer.Option(2, min=1, metavar="N", help="Number of prefill nodes"),
    decode_nodes: int = typer.Option(4, min=1, metavar="N", help="Number of decode nodes"),
    programs: int = typer.Option(1000, min=1, metavar="N", help="Agents, all present from the start"),
    rate: float | None = typer.Option(
        None, metavar="N", help="Poisson arrivals of agents per second instead, for --hours"
    ),
    hours: float = typer.Option(
        1.0, metavar="N", help="With --rate: virtual hours; the second half is measured"
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of trajectories, their agents and arrival times"),
    append_scale: float = typer.Option(1.0, metavar="N", help="Factor of the tokens that each turn appends"),
    output_scale: float = typer.Option(1.0, metavar="N", help="Factor of the output tokens of each turn"),
    max_context: int | None = typer.Option(
        None,
        min=2,
        metavar="N",
        help="Agents end before a turn with more tokens. Default: the workload's end",
    ),
    max_gap_s: float | None = typer.Option(None, metavar="N", help="Upper limit of idle times, seconds"),
    storage_nic_gbit: float = typer.Option(400.0, metavar="N", help="Storage NIC of a node, Gbit/s"),
    compute_nic_gbit: float = typer.Option(400.0, metavar="N", help="Compute NIC of a device, Gbit/s"),
    device_memory_gb: float = typer.Option(141.0, metavar="N", help="Memory of a device, GB"),
    efficiency: float | None = typer.Option(
        None,
        metavar="N",
        help="Share of the FLOP peak that prefill achieves, up to 1. Default: 0.31, fitted to the paper",
    ),
    step_tokens: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        help="New tokens of a device per prefill step, instead of the quota of attention",
    ),
    shared_lane: bool = typer.Option(
        False,
        "--shared-lane",
        help="No traffic classes: KV and the model's messages share the compute network",
    ),
    jobs: int | None = typer.Option(None, min=1, metavar="N", help="Processes. Default: one per core"),
    json: str | None = json_option("the figures"),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Write a picture: .svg or .png"),
) -> None:
    """Simulate each of the named systems and print a comparison."""
    from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import (
        CALIBRATED_EFFICIENCY,
        PdMachine,
    )
    from sojourn_server.simulator.prefill_decode.prefill_decode_run import PdSpec
    from sojourn_server.simulator.prefill_decode.trajectories import load_trajectories
    from sojourn_server.traces.trace_schema import TraceError

    _check_plot(plot)
    _check_numbers(
        {
            "--rate": rate, "--hours": hours, "--append-scale": append_scale, "--output-scale": output_scale,
            "--storage-nic-gbit": storage_nic_gbit, "--compute-nic-gbit": compute_nic_gbit,
            "--device-memory-gb": device_memory_gb, "--efficiency": efficiency,
        }
    )  # fmt: skip
    if max_gap_s is not None and not max_gap_s >= 0:
        raise CliError(f"--max-gap-s is {max_gap_s:g}; expected at least 0", "for example --max-gap-s 30")
    _check_load(context, rate, hours)
    names = [name.strip() for name in system.split(",") if name.strip()]
    if not names:
        raise CliError("--system is empty", "for example --system basic,scheduling")
    until_s = None if rate is None else hours * _HOUR_S
    try:
        machine = PdMachine(
            storage_nic_bytes_per_s=storage_nic_gbit * 1e9 / 8,
            compute_nic_bytes_per_s=compute_nic_gbit * 1e9 / 8,
            device_memory_bytes=device_memory_gb * 1e9,
            efficiency=CALIBRATED_EFFICIENCY if efficiency is None else efficiency,
        )
        specs = [
            PdSpec(
                system=name, model=model, workload=workload, prefill_nodes=prefill_nodes,
                decode_nodes=decode_nodes, agents=programs if rate is None else 10**9, rate_per_s=rate,
                until_s=until_s, warm_up_s=0.0 if until_s is None else until_s / 2, seed=seed,
                append_scale=append_scale, output_scale=output_scale, max_context_tokens=max_context,
                max_gap_s=max_gap_s, isolated=not shared_lane, step_tokens=step_tokens, machine=machine,
            )
            for name in dict.fromkeys(names)
        ]  # fmt: skip
        cluster = specs[0].cluster
        longest = max(
            turn.prompt_tokens + turn.output_tokens
            for trajectory in load_trajectories(workload, specs[0].shaping, seed)
            for turn in trajectory
        )
        room = machine.decode_kv_tokens(cluster.model)
        if longest > room:
            raise CliError(
                f"a turn needs {longest:,} tokens of KV, and a device of {device_memory_gb:g} GB holds "
                f"{room:,} of {model}",
                "cut contexts with --max-context, or give more --device-memory-gb",
            )
    except TraceError as error:
        raise CliError(str(error), next_step_for(workload)) from None
    except ValueError as error:
        raise CliError(str(error), _next_step(str(error), names, model)) from None
    outcomes = _run(specs, jobs)
    _show(outcomes, json, plot)


def _check_numbers(option_values: Mapping[str, float | None]) -> None:
    for option, value in option_values.items():
        most = 1.0 if option == "--efficiency" else math.inf
        if value is None or (0 < value < math.inf and value <= most):
            continue
        expected = "a share above 0, at most 1" if most == 1.0 else "a finite number above 0"
        raise CliError(
            f"{option} is {value:g}; expected {expected}", f"for example {option} {_EXAMPLES[option]}"
        )


def _check_load(context: typer.Context, rate: float | None, hours: float) -> None:
    """Raise ``CliError`` for ``--hours`` without ``--rate``, or ``--programs`` with ``--rate``."""
    if rate is None and is_given(context, "hours"):
        raise CliError(
            "--hours has no effect without --rate: a run lasts until the last agent has ended",
            f"leave out --hours, or let agents arrive: --rate 0.4 --hours {hours:g}",
        )
    if rate is not None and is_given(context, "programs"):
        raise CliError(
            "--programs has no effect with --rate: agents arrive for --hours",
            "leave out --programs, or leave out --rate",
        )


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in (".svg", ".png"):
        raise CliError(f"--plot {plot}: expected a name ending in .svg or .png", "name it pd.svg")
    if not plot.absolute().parent.is_dir():
        raise CliError(f"--plot {plot}: {plot.absolute().parent} is not a folder", "make it first")
    check_output_file(plot)
    if find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib", install_command("demo"))


def _next_step(message: str, names: Sequence[str], model: str) -> str:
    from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import PD_MODELS
    from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS

    if message.startswith("unknown"):
        wrong = next((name for name in names if name not in PD_SYSTEMS), None)
        near = difflib.get_close_matches(wrong or model, [*PD_SYSTEMS] if wrong else [*PD_MODELS], n=1)
        if near:
            return f"did you mean {near[0]}?"
        own = "" if wrong else "; other models are not supported"
        return f"docs/prefill-decode.md lists them{own}"
    if "for KV" in message:
        return "give more --device-memory-gb, or another --model"
    return "see docs/prefill-decode.md"


def _run(specs: Sequence[PdSpec], jobs: int | None) -> list[PdOutcome]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from sojourn_server.simulator.prefill_decode.prefill_decode_run import run_prefill_decode_suite
    from sojourn_server.simulator.process_pool import WorkerDiedError

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}% {task.fields[now]:>8,.0f} virtual s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bars = [progress.add_task(spec.label, total=1.0, now=0.0, start=False) for spec in specs]

        def move(number: int, now: float, finished: int) -> None:
            spec = specs[number]
            part = finished / spec.agents if spec.until_s is None else now / spec.until_s
            progress.update(bars[number], completed=min(1.0, part), now=now)

        def end(number: int, outcome: PdOutcome) -> None:
            progress.update(bars[number], completed=1.0, now=outcome.virtual_s)

        try:
            return run_prefill_decode_suite(
                specs,
                processes=jobs,
                on_start=lambda number, spec: progress.start_task(bars[number]),
                on_progress=move,
                on_done=end,
            )
        except KeyboardInterrupt:
            raise CliError("interrupted", "nothing was written; run it again", exit_code=130) from None
        except WorkerDiedError as error:
            raise CliError(str(error), "nothing was written; try --jobs 1", exit_code=1) from None


def _show(outcomes: Sequence[PdOutcome], json: str | None, plot: Path | None) -> None:
    from sojourn_server.simulator.prefill_decode.prefill_decode_report import (
        outcome_table,
        outcomes_document,
        plot_outcomes,
        storage_note,
    )
    from sojourn_server.simulator.report.results_file import made_with

    console.print(outcome_table(outcomes))
    if (remark := storage_note(outcomes)) is not None:
        print_note(remark)
    if json is not None:
        write_json(outcomes_document(outcomes, made_with(sys.argv)), json)
    if plot is not None:
        try:
            plot_outcomes(outcomes, plot)
        except OSError as error:
            raise CliError(
                f"{plot}: {error.strerror or error}",
                "make room or name another place, and run it again",
                exit_code=1,
            ) from None
    for path in (json, plot):
        if path is not None and str(path) != "-":
            print_line(f"wrote {path}")
