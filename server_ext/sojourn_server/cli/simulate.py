"""``sojourn simulate``: what each policy would do for a workload on some hardware, in virtual time."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .console import CliError, console
from .outputs import Outputs
from .sweep import given, policies_of, spread, swept_by, swept_runs_of

if TYPE_CHECKING:
    from sojourn_server.lab.report.results import MadeWith
    from sojourn_server.lab.report.swept import SweptRuns
    from sojourn_server.lab.run import RunSpec
    from sojourn_server.lab.suite import SuiteResult
    from sojourn_server.lab.sweep import Sweep

DEFAULT_POLICIES = "stock,admit,continuum"
CLUSTER_POLICIES = "prefix-affinity,thunderagent,saga,mori"
"""In place of the usual ones where there are several replicas: those name no routing."""
_OF_A_RUN = (
    "policy", "replicas", "hardware", "model", "tp", "cpu_ratio", "disk_ratio", "programs", "rate", "hours",
    "seed", "max_gap_s", "human_gaps", "pool_tokens", "max_model_len", "max_context", "sweep", "jobs",
)  # fmt: skip
"""Parameters that say what is run."""
NEXT_TRACE = "check the file; docs/traces.md says what a trace holds"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("simulate", help="Compare policies on a trace in virtual time, with vLLM's own scheduler.")(
        simulate
    )


def simulate(
    context: typer.Context,
    workload: str | None = typer.Argument(None, help="A .jsonl or .jsonl.gz trace, or synthetic:NAME"),
    policy: str = typer.Option(
        DEFAULT_POLICIES,
        help="Names with commas between; a preset's TOML file is one too. With --replicas ROUTING/ENGINE, "
        "such as round-robin/stock; a routing alone takes its own engines, an engine alone prefix-affinity",
    ),
    replicas: int | None = typer.Option(
        None, min=1, help="Engines behind a gateway, each with --hardware of its own; else one by itself"
    ),
    hardware: str = typer.Option(
        "a100-80gb", help="A profile's name, or a file: TOML, or from sojourn profile"
    ),
    model: str | None = typer.Option(
        None, help="A model's name or TOML file; else that of an engine profile, or llama-3.1-8b"
    ),
    tp: int = typer.Option(1, min=1, help="Tensor parallel size"),
    cpu_ratio: float = typer.Option(1.0, min=0.0, help="Host memory for KV, as a multiple of the device's"),
    disk_ratio: float = typer.Option(
        0.0, min=0.0, help="Disk for KV below host memory, likewise: presets with +host, and mori"
    ),
    programs: str = typer.Option(
        "40", help="Programs at once, on all replicas together; several numbers with commas between"
    ),
    rate: str | None = typer.Option(
        None, help="Poisson arrivals a second instead: --programs in all, then the end"
    ),
    hours: float | None = typer.Option(
        None, min=0.0, help="Virtual hours; 1, or with --rate until all have finished"
    ),
    seed: int = typer.Option(0, help="Order of programs and times of arrival"),
    warm_up_s: float = typer.Option(0.0, min=0.0, help="Leave out what began in the first virtual seconds"),
    max_gap_s: float | None = typer.Option(None, min=0.0, help="Cut longer idle times to this"),
    human_gaps: bool = typer.Option(True, help="Keep the time people took to answer"),
    pool_tokens: int | None = typer.Option(None, min=1, help="KV tokens on the device; else what fits"),
    max_model_len: int | None = typer.Option(
        None, min=2, help="The engine's longest context; else the model's own"
    ),
    max_context: int | None = typer.Option(
        None, min=2, help="Programs end before a turn that needs more tokens; else where the engine's ends"
    ),
    sweep: str | None = typer.Option(
        None,
        metavar="NAME=V1,V2,…",
        help="Every policy at each value of cpu_ratio, disk_ratio, pool_tokens, programs, rate_per_s, "
        "replicas or tp",
    ),
    jobs: int | None = typer.Option(None, min=1, help="Processes; else one a core"),
    json: str | None = typer.Option(None, metavar="FILE|-", help="Write the figures as JSON, - for stdout"),
    plot: Path | None = typer.Option(None, metavar="DIR", help="Write plots into this folder"),
    save: Path | None = typer.Option(None, metavar="FILE", help="Keep every turn: .msgpack.gz, or .json.gz"),
    load: Path | None = typer.Option(
        None, metavar="FILE", help="Show runs kept with --save instead of running"
    ),
    explain: str | None = typer.Option(
        None, metavar="PROGRAM", help="Print one program's life, turn by turn"
    ),
) -> None:
    """Run the simulations and show them; where no program finished, what there is."""
    for option, number in (("--hours", hours), ("--warm-up-s", warm_up_s)):
        if number is not None and not math.isfinite(number):
            raise CliError(f"{option} is {number}; expected a finite number", f"for example {option} 0.5")
    outputs = Outputs(json=json, plot=plot, save=save, explain=explain)
    outputs.check()
    swept: SweptRuns | None = None
    if load is not None:
        if workload is not None:
            raise CliError(f"--load shows kept runs, and {workload} would be run", "leave out one of them")
        _check_unused(context)
        result, made = _loaded(load, warm_up_s)
    else:
        if workload is None:
            raise CliError("no workload", "name a trace, or a synthetic one: sojourn simulate synthetic:NAME")
        sweeping = swept_by(sweep, context) if sweep is not None else None
        if sweeping is not None:
            policy = policies_of(sweeping, policy, context)
        if (replicas is not None or _sweeps_replicas(sweeping)) and not given(context, "policy"):
            policy = CLUSTER_POLICIES
        specs = _specs(workload, policy, programs, rate)
        specs = [
            replace(
                spec, hardware=hardware, model=model, tp=tp, cpu_ratio=cpu_ratio, disk_ratio=disk_ratio,
                replicas=replicas, seed=seed, max_gap_s=max_gap_s, human_gaps=human_gaps,
                pool_tokens=pool_tokens, max_model_len=max_model_len, max_context_tokens=max_context,
            )
            for spec in specs
        ]  # fmt: skip
        if sweeping is not None:
            specs = spread(sweeping, specs)
        specs = [replace(spec, until_s=_until_s(hours, spec)) for spec in specs]
        if explain is not None:
            _check_program(explain, specs)
        if (explain is not None or save is not None) and replicas is None:
            specs = [replace(spec, record_accesses=True) for spec in specs]  # for what Bélády would have done
        try:
            result, made = _simulated(specs, jobs, warm_up_s, sweeping)
        except KeyboardInterrupt:
            raise CliError("interrupted", "nothing was written; run it again", exit_code=130) from None
        if sweeping is not None:
            swept = swept_runs_of(sweeping, specs, result.rows)
    outputs.show(result, made, swept)


def _sweeps_replicas(sweep: Sweep | None) -> bool:
    return sweep is not None and sweep.field.name == "replicas"


def _check_unused(context: typer.Context) -> None:
    """Kept runs are shown as they were run: an option that would have changed them must not seem to."""
    for name in _OF_A_RUN:
        if given(context, name):
            option = "--" + name.replace("_", "-")
            raise CliError(
                f"{option} has no effect on kept runs, which --load only shows",
                f"leave out {option}, or run the simulation again",
            )


def _until_s(hours: float | None, spec: RunSpec) -> float | None:
    if hours is None:
        return None if spec.rate_per_s is not None else 3600.0
    if hours == 0:
        raise CliError("--hours is 0", "simulate some time: --hours 0.25")
    return hours * 3600.0


def _specs(workload: str, policies: str, programs: str, rate: str | None) -> list[RunSpec]:
    from sojourn_server.lab.run import RunSpec

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
    """Whether the program can be in the run, as far as that is known before anything is run."""
    from sojourn_server.lab.run import LabError, program_ids
    from sojourn_server.traces.schema import TraceError

    try:
        known = program_ids(specs[0])
    except (LabError, TraceError) as error:
        raise CliError(str(error), NEXT_TRACE) from None
    wanted, at, copy = name.rpartition("@")
    if name in known or not (at and copy.isdecimal()):
        wanted = name
    if wanted in known and any(spec.rate_per_s is None for spec in specs):
        return  # a closed loop goes on for as long as it is simulated
    coming = _coming(specs)
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


def _coming(specs: Sequence[RunSpec]) -> list[str]:
    """Programs that surely come in one of the runs; none where that cannot be told."""
    from sojourn_server.lab.run import first_program_ids

    loads = {(spec.programs, spec.rate_per_s): spec for spec in specs}
    try:
        return list(dict.fromkeys(name for spec in loads.values() for name in first_program_ids(spec)))
    except ValueError:
        return []  # what is wrong is said when the runs are planned


def _simulated(
    specs: list[RunSpec], jobs: int | None, warm_up_s: float, sweep: Sweep | None
) -> tuple[SuiteResult, MadeWith]:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise CliError(
            "simulate runs vLLM's own scheduler, and vLLM is not installed here", 'pip install "sojourn[cpu]"'
        )
    from rich.markup import escape

    from sojourn_server.lab.report.results import made_with
    from sojourn_server.lab.run import check
    from sojourn_server.lab.suite import plan
    from sojourn_server.lab.workers import WorkerDied

    from .suite_progress import run_with_progress

    try:
        planned = plan(specs)
        for spec in planned:
            if spec.until_s is not None and warm_up_s >= spec.until_s:
                raise CliError(
                    f"--warm-up-s {warm_up_s:g} leaves nothing of {spec.until_s:g} virtual s",
                    "use less, or more --hours",
                )
        notes = check(specs)
    except ValueError as error:
        raise CliError(str(error), _next_step(error)) from None
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)
    try:
        result = run_with_progress(
            specs,
            processes=jobs,
            since_s=warm_up_s,
            name=sweep.label if sweep is not None else lambda spec: spec.label,
        )
    except ValueError as error:
        raise CliError(str(error), _next_step(error)) from None
    except WorkerDied as error:
        raise CliError(str(error), "nothing was written; try --jobs 1", exit_code=1) from None
    return result, made_with(sys.argv)


def _next_step(error: ValueError) -> str:
    from sojourn_server.lab.latency.profile_files import LatencyProfileError
    from sojourn_server.lab.policies import PolicyError
    from sojourn_server.lab.workloads.players import NothingFits
    from sojourn_server.traces.schema import TraceError

    steps: tuple[tuple[type[ValueError], str], ...] = (
        (NothingFits, "allow more: --max-context, --max-model-len, --pool-tokens, or larger --hardware"),
        (TraceError, NEXT_TRACE),
        (PolicyError, "docs/lab.md says what each policy is"),
        (LatencyProfileError, "set --hardware, --model, --tp, --max-model-len or --pool-tokens"),
    )
    return next((step for kind, step in steps if isinstance(error, kind)), "see docs/lab.md")


def _loaded(path: Path, warm_up_s: float) -> tuple[SuiteResult, MadeWith]:
    from sojourn_server.lab.report.measure import measure
    from sojourn_server.lab.report.results import ResultsError
    from sojourn_server.lab.report.saved_runs import load_runs
    from sojourn_server.lab.suite import SuiteResult

    try:
        saved = load_runs(path)
        rows = saved.rows
        if not rows:
            raise ResultsError(f"{path}: holds no runs")
        if warm_up_s:
            logs = iter(saved.runs)
            # What was only counted has no log, and is of the whole run.
            rows = [
                measure(
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
            f"--warm-up-s {warm_up_s:g}: {error}", "leave out less than the shortest run lasted"
        ) from None
    return SuiteResult(rows=rows, logs=saved.runs), saved.made_with
