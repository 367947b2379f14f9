"""``sojourn simulate``: compare policies on one workload and hardware, in virtual time."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from sojourn.errors import install_command

from .console import CliError, is_given, json_option, print_note
from .simulate_outputs import SimulateOutputs
from .sweep_options import expand_specs, group_by_value, parse_sweep, sweep_policies, whole_values

if TYPE_CHECKING:
    from sojourn_server.simulator.parameter_sweep import ParameterSweep
    from sojourn_server.simulator.report.results_file import Provenance
    from sojourn_server.simulator.report.sweep_results import SweepRuns
    from sojourn_server.simulator.simulation_run import RunSpec
    from sojourn_server.simulator.simulation_suite import SuiteResult

DEFAULT_POLICIES = "stock,admit,continuum,sojourn"
CLUSTER_POLICIES = "prefix-affinity,thunderagent,saga,mori"
"""Default policies for runs with several replicas. They choose a replica for each request. The policies in
``DEFAULT_POLICIES`` do not choose replicas."""
_RUN_OPTIONS = (
    "policy", "replicas", "hardware", "model", "tp", "async_scheduling", "cpu_ratio", "disk_ratio",
    "programs", "rate", "hours", "seed", "max_gap_s", "human_gaps", "pool_tokens", "max_model_len",
    "max_context", "sweep", "jobs",
)  # fmt: skip
"""Options that define the runs. With ``--load`` they have no effect."""


def next_step_for(workload: str) -> str:
    """Return the next step for an error message about ``workload``, a trace or workload that the user
    named."""
    from sojourn_server.simulator.workloads.synthetic_workloads import SYNTHETIC_PREFIX

    if workload.startswith(SYNTHETIC_PREFIX):
        return "docs/traces.md lists the synthetic workloads"
    if not os.path.exists(workload):  # pathlib would raise for a name that is too long
        return "name a trace file, or a synthetic workload: synthetic:NAME"
    return "check the file; docs/traces.md has the format of traces"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("simulate", help="Compare policies on a trace in virtual time, with vLLM's own scheduler.")(
        simulate
    )


def _workload_help() -> str:
    from sojourn_server.simulator.workloads.synthetic_workloads import synthetic_names

    return f"A .jsonl or .jsonl.gz trace, or synthetic:NAME with NAME one of {', '.join(synthetic_names())}"


def simulate(
    context: typer.Context,
    workload: str | None = typer.Argument(None, help=_workload_help()),
    policy: str = typer.Option(
        DEFAULT_POLICIES,
        help="Policies separated by commas: names or TOML files of presets. With --replicas ROUTING/ENGINE, "
        "for example round-robin/stock; a routing alone has its own engines, an engine alone prefix-affinity",
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
    max_context: int | None = typer.Option(
        None, min=2, help="Programs end before a turn with more tokens. Default: the engine's limit"
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
    save: Path | None = typer.Option(None, metavar="FILE", help="Save every turn: .msgpack.gz or .json.gz"),
    load: Path | None = typer.Option(
        None, metavar="FILE", help="Show runs saved with --save instead of running"
    ),
    explain: str | None = typer.Option(None, metavar="PROGRAM", help="Print one program turn by turn"),
) -> None:
    """Run the simulations, or load saved ones, and print the results."""
    from sojourn_server.simulator.report.results_file import made_with

    for option, number in (("--hours", hours), ("--warm-up-s", warm_up_s)):
        if number is not None and not math.isfinite(number):
            raise CliError(f"{option} is {number}; expected a finite number", f"for example {option} 0.5")
    outputs = SimulateOutputs(json=json, plot=plot, save=save, explain=explain)
    outputs.check()
    swept: SweepRuns | None = None
    if load is not None:
        if workload is not None:
            raise CliError(f"--load shows saved runs, and {workload} would be run", "leave out one of them")
        _check_unused(context)
        result, made = _load_saved(load, warm_up_s)
    else:
        if workload is None:
            raise CliError("no workload", "name a trace, or a synthetic one: sojourn simulate synthetic:NAME")
        sweeping = parse_sweep(sweep, context) if sweep is not None else None
        if sweeping is not None:
            policy = sweep_policies(sweeping, policy, context)
        if (replicas is not None or _is_replica_sweep(sweeping)) and not is_given(context, "policy"):
            policy = CLUSTER_POLICIES
        specs = _specs(workload, policy, programs, rate)
        if async_scheduling is None:
            async_scheduling = _is_gpu(hardware)
        specs = [
            replace(
                spec, hardware=hardware, model=model, tp=tp, cpu_ratio=cpu_ratio, disk_ratio=disk_ratio,
                async_scheduling=async_scheduling, replicas=replicas, seed=seed, max_gap_s=max_gap_s,
                human_gaps=human_gaps, pool_tokens=pool_tokens, max_model_len=max_model_len,
                max_context_tokens=max_context,
            )
            for spec in specs
        ]  # fmt: skip
        if sweeping is not None:
            specs = expand_specs(sweeping, specs)
        specs = [replace(spec, until_s=_until_s(hours, spec)) for spec in specs]
        if explain is not None:
            _check_program(explain, specs)
        if (explain is not None or save is not None) and replicas is None:
            specs = [replace(spec, record_accesses=True) for spec in specs]  # for the comparison with Bélády
        try:
            result = _run_simulations(specs, jobs, warm_up_s, sweeping)
        except KeyboardInterrupt as interrupt:
            sweeping, specs, result = _finished_part(interrupt, specs, sweeping)
        made = made_with(sys.argv)
        if sweeping is not None:
            swept = group_by_value(sweeping, specs, result.rows)
    outputs.show(result, made, swept)
    if load is None and result.missing_runs:
        whole = len(result.rows) + result.missing_runs
        raise CliError(
            f"interrupted; the table and the files have {len(result.rows)} of {whole} runs",
            "run it again for all of them",
            exit_code=130,
        )


def _finished_part(
    interrupt: KeyboardInterrupt, specs: Sequence[RunSpec], sweep: ParameterSweep | None
) -> tuple[ParameterSweep | None, list[RunSpec], SuiteResult]:
    """Return the part of an interrupted suite that can be shown: its sweep, specifications and result. Raises
    ``CliError`` if no run has finished."""
    from sojourn_server.simulator.simulation_suite import SuiteInterrupted

    if isinstance(interrupt, SuiteInterrupted):
        finished = interrupt.finished
        if sweep is not None:
            sweep, finished = whole_values(sweep, specs, finished)
        if finished:
            return sweep, finished, interrupt.result(finished)
    raise CliError("interrupted", "nothing was written; run it again", exit_code=130)


def _is_gpu(hardware: str) -> bool:
    """Return whether ``hardware`` counts as a GPU. A file from ``sojourn profile`` does not count, because it
    does not name its device. All other hardware counts, even a file that cannot be read; the run reports the
    error."""
    from sojourn_server.simulator.latency.latency_profiles import LatencyProfileError
    from sojourn_server.simulator.latency.latency_selection import is_engine_profile

    try:
        return not is_engine_profile(hardware)
    except LatencyProfileError:
        return True


def _is_replica_sweep(sweep: ParameterSweep | None) -> bool:
    return sweep is not None and sweep.field.name == "replicas"


def _check_unused(context: typer.Context) -> None:
    """Raise ``CliError`` if the user gave an option that has no effect on runs loaded with ``--load``."""
    for name in _RUN_OPTIONS:
        if is_given(context, name):
            option = "--" + name.replace("_", "-")
            raise CliError(
                f"{option} has no effect on saved runs, which --load only shows",
                f"leave out {option}, or run the simulation again",
            )


def _until_s(hours: float | None, spec: RunSpec) -> float | None:
    if hours is None:
        return None if spec.rate_per_s is not None else 3600.0
    if hours == 0:
        raise CliError("--hours is 0; expected more", "for example --hours 0.25")
    return hours * 3600.0


def _specs(workload: str, policies: str, programs: str, rate: str | None) -> list[RunSpec]:
    from sojourn_server.simulator.simulation_run import RunSpec

    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise CliError("--policy names no policy", f"for example --policy {DEFAULT_POLICIES}")
    counts = _numbers("--programs", programs, int)
    rates: Sequence[float | None] = _numbers("--rate", rate, float) if rate is not None else [None]
    loads = [(count, per_s) for count in counts for per_s in rates]
    return [
        RunSpec(policy=name, workload=workload, programs=count, rate_per_s=per_s)
        for count, per_s in loads
        for name in dict.fromkeys(names)
    ]


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    numbers = []
    for part in text.split(","):
        try:
            number = kind(part)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise CliError(
                f"{option} {text}: {part.strip()!r} is not {what} above 0",
                f"for example {option} {'20,40' if kind is int else '0.1,0.2'}",
            )
        numbers.append(number)
    return numbers


def _check_program(name: str, specs: Sequence[RunSpec]) -> None:
    """Raise ``CliError`` if none of the runs can contain the program ``name``."""
    from sojourn_server.simulator.simulation_run import SimulatorError, workload_program_ids
    from sojourn_server.traces.trace_schema import TraceError

    try:
        known = workload_program_ids(specs[0])
    except (SimulatorError, TraceError) as error:
        raise CliError(str(error), next_step_for(specs[0].workload)) from None
    wanted, at, copy = name.rpartition("@")
    if name in known or not (at and copy.isdecimal()):
        wanted = name
    if wanted in known and any(spec.rate_per_s is None for spec in specs):
        return  # a closed loop repeats its programs until the end of the simulation
    coming = _certain_programs(specs)
    if wanted in coming or (wanted in known and not coming):
        return
    near = difflib.get_close_matches(wanted, coming or known, n=3, cutoff=0.5) or (coming or known)[:3]
    if wanted in known:
        raise CliError(
            f"--explain {name}: it is not among the {len(coming)} of {specs[0].workload} that arrive",
            f"let more arrive: --programs {len(known)}; or name one of these, such as {', '.join(near)}",
        )
    raise CliError(
        f"--explain {name}: {specs[0].workload} has no such program",
        f"name one of its {len(known)}, such as {', '.join(near)}",
    )


def _certain_programs(specs: Sequence[RunSpec]) -> list[str]:
    """Return the ids of programs that are certain to arrive in at least one run. The list is empty if these
    programs cannot be determined."""
    from sojourn_server.simulator.simulation_run import first_program_ids

    loads = {(spec.programs, spec.rate_per_s): spec for spec in specs}
    try:
        return list(dict.fromkeys(name for spec in loads.values() for name in first_program_ids(spec)))
    except ValueError:
        return []  # planning the runs reports the error


def _run_simulations(
    specs: list[RunSpec], jobs: int | None, warm_up_s: float, sweep: ParameterSweep | None
) -> SuiteResult:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise CliError(
            "simulate runs vLLM's own scheduler, and vLLM is not installed here", install_command("cpu")
        )
    from sojourn_server.simulator.process_pool import WorkerDiedError
    from sojourn_server.simulator.simulation_run import validate_specs
    from sojourn_server.simulator.simulation_suite import planned_runs

    from .suite_progress import run_with_progress

    try:
        planned = planned_runs(specs)
        for spec in planned:
            if spec.until_s is not None and warm_up_s >= spec.until_s:
                raise CliError(
                    f"--warm-up-s {warm_up_s:g} leaves nothing of {spec.until_s:g} virtual s",
                    "use a shorter warm-up or more --hours",
                )
        notes = validate_specs(specs)
    except ValueError as error:
        raise CliError(str(error), _next_step(error, specs[0].workload)) from None
    for note in notes:
        print_note(note)
    try:
        return run_with_progress(
            specs,
            processes=jobs,
            since_s=warm_up_s,
            name=sweep.label if sweep is not None else lambda spec: spec.label,
        )
    except ValueError as error:
        raise CliError(str(error), _next_step(error, specs[0].workload)) from None
    except WorkerDiedError as error:
        raise CliError(str(error), "nothing was written; try --jobs 1", exit_code=1) from None


def _next_step(error: ValueError, workload: str) -> str:
    from sojourn_server.simulator.latency.latency_profiles import LatencyProfileError
    from sojourn_server.simulator.simulator_policies import PolicyError
    from sojourn_server.simulator.workloads.program_plans import NoProgramFitsError
    from sojourn_server.traces.trace_schema import TraceError

    steps: tuple[tuple[type[ValueError], str], ...] = (
        (
            NoProgramFitsError,
            "allow more: --max-context, --max-model-len, --pool-tokens, or larger --hardware",
        ),
        (TraceError, next_step_for(workload)),
        (PolicyError, "docs/simulator.md lists the policies"),
        (LatencyProfileError, "set --hardware, --model, --tp, --max-model-len or --pool-tokens"),
    )
    return next((step for kind, step in steps if isinstance(error, kind)), "see docs/simulator.md")


def _load_saved(path: Path, warm_up_s: float) -> tuple[SuiteResult, Provenance]:
    from sojourn_server.simulator.report.results_file import ResultsError, load_runs
    from sojourn_server.simulator.report.run_metrics import summarize_run
    from sojourn_server.simulator.simulation_suite import SuiteResult

    try:
        saved = load_runs(path)
        rows = saved.rows
        if not rows:
            raise ResultsError(f"{path}: holds no runs")
        if warm_up_s:
            logs = iter(saved.runs)
            # Rows without a log, such as limits, cover the whole run, so they are left out.
            rows = [
                summarize_run(
                    next(logs),
                    since_s=warm_up_s,
                    regenerated_over_belady=row.regenerated_over_belady,
                    limit=row.limit,
                )
                for row in rows
                if row.output_tok_per_s is not None
            ]
    except ResultsError as error:
        raise CliError(str(error), "name a file written by sojourn simulate --save") from None
    except ValueError as error:
        raise CliError(
            f"--warm-up-s {warm_up_s:g}: {error}", "leave out less than the duration of the shortest run"
        ) from None
    return SuiteResult(rows=rows, logs=saved.runs, missing_runs=saved.missing_runs), saved.made_with
