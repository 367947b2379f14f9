"""``sojourn simulate``: compare policies on one workload and hardware, in virtual time."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from sojourn.errors import install_command

from ..core.scheduler_state import SchedulerLimits
from ..simulator.latency.latency_selection import is_engine_profile
from ..simulator.parameter_sweep import ParameterSweep, read_sweep
from ..simulator.report.plot import write_plot
from ..simulator.report.results_file import SUFFIXES, Provenance, document, load_runs, made_with, save_runs
from ..simulator.report.results_table import load_label, render
from ..simulator.report.run_metrics import summarize_run
from ..simulator.report.turn_phases import ledger
from ..simulator.simulation_run import RunSpec, validate_specs
from ..simulator.simulation_suite import SuiteResult, run_suite
from ..simulator.workloads.arrival_processes import load_programs
from ..simulator.workloads.synthetic_workloads import synthetic_names
from .console import (
    CliError,
    ProgressLines,
    check_suffix,
    console,
    from_options,
    given_options,
    json_option,
    output_file,
    print_line,
    print_note,
    write_json,
)
from .explain import turn_table

DEFAULT_POLICIES = "stock, lru-offload, admit, continuum, sojourn"
CLUSTER_POLICIES = "prefix-affinity,thunderagent,saga,mori"
"""Default policies for runs with several replicas: they choose a replica for each request."""
SWEEP_POLICIES = {
    "cpu_ratio": "stock,lru-offload,thunderagent-offload,continuum+host,mori",
    "disk_ratio": "stock,continuum+host,mori",
    "replicas": CLUSTER_POLICIES,
}
"""Default policies of sweeps of a number that ``DEFAULT_POLICIES`` do not use."""
_SHOWING_OPTIONS = ("load", "warm_up_s", "json", "plot", "save", "explain")
"""Options that have an effect on runs loaded with ``--load``."""


def _workload_help() -> str:
    return f"A .jsonl or .jsonl.gz trace, or synthetic:NAME with NAME one of {', '.join(synthetic_names())}"


def simulate(
    context: typer.Context,
    workload: str | None = typer.Argument(None, help=_workload_help()),
    policy: str = typer.Option(
        DEFAULT_POLICIES,
        help="Policies separated by commas: names or TOML files of presets. With --replicas ROUTING/ENGINE, "
        "such as round-robin/stock (a routing alone has its own engines, an engine alone prefix-affinity)",
    ),
    replicas: int | None = typer.Option(
        None, min=1, help="Engines behind a gateway, each on its own --hardware. Default: one engine alone"
    ),
    hardware: str = typer.Option(
        "a100-80gb", help="Name of a profile, or a file: TOML, or from sojourn profile"
    ),
    model: str | None = typer.Option(
        None, help="Name or TOML file of a model. Default: the engine profile's, or llama-3.1-8b"
    ),
    tp: int = typer.Option(1, min=1, help="Tensor parallel size"),
    async_scheduling: bool | None = typer.Option(
        None,
        help="Plan each step before the results of the one before it, as on CUDA. Default: for a GPU, "
        "not for a file from sojourn profile",
    ),
    cpu_ratio: float = typer.Option(1.0, min=0.0, help="Host memory for KV ÷ device memory for KV"),
    disk_ratio: float = typer.Option(
        0.0, min=0.0, help="Disk for KV ÷ device memory for KV; for presets with +host, sojourn and mori"
    ),
    programs: str = typer.Option(
        "40", help="Programs at the same time on all replicas; several numbers are separated by commas"
    ),
    rate: str | None = typer.Option(None, help="Poisson arrivals per second instead, --programs in total"),
    hours: float | None = typer.Option(
        None, min=0.0, help="Virtual hours. Default: 1, or with --rate until all have finished"
    ),
    seed: int = typer.Option(0, help="Seed of the order of programs and of arrival times"),
    warm_up_s: float = typer.Option(0.0, min=0.0, help="Ignore programs of the first virtual seconds"),
    max_gap_s: float | None = typer.Option(None, min=0.0, help="Upper limit of idle times, seconds"),
    human_gaps: bool = typer.Option(True, help="Keep the response times of people"),
    pool_tokens: int | None = typer.Option(
        None, min=1, help="KV tokens on the device. Default: as many as fit"
    ),
    max_model_len: int | None = typer.Option(
        None, min=2, help="The engine's longest context, tokens. Default: the model's"
    ),
    max_context_tokens: int | None = typer.Option(
        None,
        "--max-context",
        min=2,
        help="Programs end before a turn with more tokens. Default: the engine's limit",
    ),
    hold_timeout_s: float = typer.Option(
        SchedulerLimits().hold_timeout_s,
        min=0.001,
        help="Longest wait for a place on the device, as of the server, seconds (sojourn, mori, +host)",
    ),
    sweep: str | None = typer.Option(
        None,
        metavar="NAME=V1,V2,…",
        help="Run every policy at each value of cpu_ratio, disk_ratio, pool_tokens, programs, rate_per_s, "
        "replicas or tp",
    ),
    jobs: int | None = typer.Option(None, min=1, help="Processes. Default: one per core"),
    json: str | None = json_option("the figures"),
    plot: Path | None = typer.Option(None, metavar="DIR", help="Write plots into this folder"),
    save: Path | None = typer.Option(
        None, metavar="FILE", callback=output_file, help="Save every turn: .json.gz or .json"
    ),
    load: Path | None = typer.Option(
        None, metavar="FILE", help="Show runs saved with --save instead of running"
    ),
    explain: str | None = typer.Option(None, metavar="PROGRAM", help="Print one program turn by turn"),
) -> None:
    """Compare policies on a trace in virtual time, with vLLM's own scheduler."""
    _check_outputs(plot, save)
    given = given_options(context)
    swept: ParameterSweep | None = None
    if load is not None:
        for name, option in given.items():
            if name not in _SHOWING_OPTIONS:
                raise CliError(
                    f"{option} has no effect on saved runs, which --load only shows",
                    f"leave out {option}, or run the simulation again",
                )
        result, made = _load_saved(load, warm_up_s)
    else:
        if workload is None:
            raise CliError("no workload", "name a trace, or a synthetic one: sojourn simulate synthetic:NAME")
        sweeping = _parse_sweep(sweep, given) if sweep is not None else None
        if "policy" not in given:
            policy = CLUSTER_POLICIES if replicas is not None else policy
            policy = SWEEP_POLICIES.get(sweeping.field, policy) if sweeping is not None else policy
        if async_scheduling is None:  # a file from sojourn profile does not name its device
            async_scheduling = not is_engine_profile(hardware)
        template = from_options(
            context, RunSpec, policy="", programs=1, workload=workload, async_scheduling=async_scheduling
        )
        specs = _specs(template, policy, programs, rate)
        if sweeping is not None:
            if len(loads := {(spec.programs, spec.rate_per_s) for spec in specs}) > 1:
                raise CliError(
                    f"--sweep shows one load, and --programs and --rate make {len(loads)}",
                    "give one of each, or sweep programs or rate_per_s alone",
                )
            specs = sweeping.specs(specs)
        specs = [replace(spec, until_s=_until_s(hours, spec)) for spec in specs]
        if explain is not None:
            _check_program(explain, specs[0])
        if not given.keys() & {"hours", "programs", "rate"}:
            # Only the progress lines have the estimate, since the time depends on workload and machine.
            print_note(
                "40 programs for a virtual hour may take as long here; the line of progress after "
                f"{ProgressLines.INTERVAL_S:g} s says how long. A first look: --programs 10 --hours 0.1"
            )
        result = _run_simulations(specs, jobs, warm_up_s)
        made = made_with(sys.argv)
        if sweeping is not None and not result.missing_runs:
            swept = sweeping
    _show(result, made, swept, json=json, plot=plot, save=save, explain=explain)
    if load is None and result.missing_runs:
        whole = len(result.rows) + result.missing_runs
        raise CliError(
            f"interrupted; the table and the files have {len(result.rows)} of {whole} runs",
            "run it again for all of them",
            exit_code=130,
        )


# -- what to run ---------------------------------------------------------------------------------


def _until_s(hours: float | None, spec: RunSpec) -> float | None:
    if hours is None:
        return None if spec.rate_per_s is not None else 3600.0
    if not 0 < hours < math.inf:
        raise CliError(f"--hours is {hours:g}; expected a finite number above 0", "for example --hours 0.25")
    return hours * 3600.0


def _specs(template: RunSpec, policies: str, programs: str, rate: str | None) -> list[RunSpec]:
    names = dict.fromkeys(name.strip() for name in policies.split(",") if name.strip())
    if not names:
        raise CliError("--policy names no policy", "for example --policy stock,sojourn")
    counts = _numbers("--programs", programs, int)
    rates = [None] if rate is None else _numbers("--rate", rate, float)
    return [
        replace(template, policy=name, programs=count, rate_per_s=per_s)
        for count in counts
        for per_s in rates
        for name in names
    ]


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    numbers = []
    for part in text.split(","):
        try:
            number = kind(part)
        except ValueError:
            number = 0
        if not 0 < number < math.inf:
            what, such = ("a whole number", "20,40") if kind is int else ("a number", "0.1,0.2")
            wrong = f"{option} {text}: {part.strip()!r} is not {what} above 0"
            raise CliError(wrong, f"for example {option} {such}")
        numbers.append(number)
    return numbers


def _parse_sweep(text: str, given: Mapping[str, str]) -> ParameterSweep:
    sweep = read_sweep(text)
    if option := given.get("rate" if sweep.field == "rate_per_s" else sweep.field):
        raise CliError(f"{option} gives one value of {sweep.field}, and --sweep several", f"remove {option}")
    for name in ("save", "explain"):
        if name in given:
            raise CliError(f"--{name} cannot distinguish the values of --sweep", f"run one value to {name}")
    return sweep


def _check_program(name: str, spec: RunSpec) -> None:
    """Raise ``CliError`` if the workload has no program ``name``. A closed loop repeats programs as
    ``ID@N``."""
    known = [program.program_id for program in load_programs(spec.workload, spec.seed)]
    if name not in known and name.rpartition("@")[0] not in known:
        raise _unknown_program(f"--explain {name}: {spec.workload} has no such program", known)


def _unknown_program(message: str, known: list[str], exit_code: int = 2) -> CliError:
    next_step = f"name one of {len(known)}, such as {', '.join(known[:3])}"
    return CliError(message, next_step, exit_code=exit_code)


def _check_warm_up(warm_up_s: float, shortest_s: float) -> None:
    if 0 < shortest_s <= warm_up_s:
        raise CliError(
            f"--warm-up-s {warm_up_s:g} leaves nothing of {shortest_s:g} virtual s",
            "use a shorter warm-up, or simulate more --hours",
        )


# -- running -------------------------------------------------------------------------------------


def _run_simulations(specs: list[RunSpec], jobs: int | None, warm_up_s: float) -> SuiteResult:
    if find_spec("vllm") is None:
        missing = "simulate runs vLLM's own scheduler, and vLLM is not installed here"
        raise CliError(missing, install_command("cpu"))

    _check_warm_up(warm_up_s, min((spec.until_s for spec in specs if spec.until_s is not None), default=0.0))
    print_note(*validate_specs(specs))
    print_line(_announcement(specs))
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # supervisors send it
    planned, lines = list(dict.fromkeys(specs)), ProgressLines()
    runs, parts = len(planned), [0.0] * len(planned)

    def move(number: int, now: float, finished: int) -> None:
        spec = planned[number]
        parts[number] = min(1.0, now / spec.until_s if spec.until_s is not None else finished / spec.programs)
        done = max(1e-3, sum(parts) / runs)
        share, left = f"{100 * done:.0f}% of {runs} runs", (1.0 / done - 1.0) / 60
        # Until then the time is that of starting processes, and an estimate from it would be hours.
        is_known = done >= 0.02
        lines.show(lambda passed_s: f"{share}, about {passed_s * left:,.0f} min left" if is_known else share)

    def end(number: int) -> None:
        parts[number] = 1.0

    try:
        result = run_suite(specs, processes=jobs, since_s=warm_up_s, on_progress=move, on_done=end)
    except BrokenProcessPool:
        died = "a simulation's process died; was it short of memory?"
        raise CliError(died, "nothing was written; try --jobs 1", exit_code=1) from None
    if not result.rows:
        raise CliError("interrupted", "nothing was written; run it again", exit_code=130)
    return result


def _announcement(specs: Sequence[RunSpec]) -> str:
    """The line before the first run: how many runs, their loads, and how long each lasts."""
    runs = len(set(specs))
    loads = " | ".join(dict.fromkeys(load_label(spec) for spec in specs))
    until_s = specs[0].until_s
    ends = "until all programs have finished" if until_s is None else f"{until_s / 3600:.4g} virtual hours"
    return f"{runs} run{'s' if runs > 1 else ''}: {loads}; {ends}{' each' if runs > 1 else ''}"


# -- showing -------------------------------------------------------------------------------------


def _load_saved(path: Path, warm_up_s: float) -> tuple[SuiteResult, Provenance]:
    saved = load_runs(path)
    _check_warm_up(warm_up_s, min(log.virtual_s for log in saved.runs))
    rows = [summarize_run(log, since_s=warm_up_s) for log in saved.runs]
    return SuiteResult(rows, saved.runs, saved.missing_runs), saved.made_with


def _check_outputs(plot: Path | None, save: Path | None) -> None:
    """Raise ``CliError`` for a name that cannot be written, before minutes of simulation."""
    if save is not None:
        check_suffix("--save", save, SUFFIXES)
    if plot is not None and plot.is_file():
        raise CliError(f"{plot} is a file", "name a folder")
    if plot is not None and find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib", install_command("demo"))


def _show(
    result: SuiteResult, made: Provenance, swept: ParameterSweep | None, *,
    json: str | None, plot: Path | None, save: Path | None, explain: str | None,
) -> None:  # fmt: skip
    """Print the table, write the files, and explain a program. Raises ``CliError`` if a file cannot be
    written or a policy failed during a run."""
    console.print(render(result.rows, swept))
    if save is not None:  # first, since the other files can be made from it
        save_runs(save, result.logs, made, result.missing_runs)
        print_line(f"wrote {save}")
    if json is not None:
        write_json(document(result.rows, made, swept, result.missing_runs), json)
        if json != "-":
            print_line(f"wrote {json}")
    if plot is not None:
        for path in write_plot(result.rows, plot, swept):
            print_line(f"wrote {path}")
    if explain is not None:
        _explain(result, explain)
    if failed := sorted({log.policy for log in result.logs if log.hook_failures}):
        raise CliError(
            f"hooks of policy {', '.join(failed)} raised errors, so these figures are wrong",
            "see the errors above, fix the policy and run it again",
            exit_code=1,
        )


def _explain(result: SuiteResult, name: str) -> None:
    """Explain the program ``name`` in each run. A name of the trace means the first program that repeats
    it."""
    known = list(dict.fromkeys(p.program_id for log in result.logs for p in log.programs))
    if not any(name in (p.program_id, p.trace_id) for log in result.logs for p in log.programs):
        raise _unknown_program(f"no program {name!r} in these runs", known, exit_code=1)
    for log in result.logs:
        found = sorted(log.programs, key=lambda p: (p.program_id != name, p.trace_id != name))
        for program in found[:1]:
            if name in (program.program_id, program.trace_id):
                print_line(f"{program.program_id} under {log.policy}")
                print_line(turn_table(ledger(program, log.virtual_s), last=len(program.turns)))
