"""``sojourn simulate --sweep``: every policy at several values of one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from .console import CliError

if TYPE_CHECKING:
    from sojourn_server.lab.report.row import RunRow
    from sojourn_server.lab.report.swept import SweptRuns
    from sojourn_server.lab.run import RunSpec
    from sojourn_server.lab.sweep import Sweep

HOST_POLICIES = "stock,lru-offload,thunderagent-offload,continuum+host,mori"
"""In place of the usual ones where host memory is swept: none of those has any."""
DISK_POLICIES = "stock,continuum+host,mori"
"""The same for a disk."""
NEXT = "for example --sweep cpu_ratio=0,1,2,4"
_NOT_WITH_IT = {
    "save": "run the value that you would keep by itself",
    "explain": "run the value that you would have explained by itself",
}


def swept_by(text: str, context: typer.Context) -> Sweep:
    """What ``--sweep`` says. Raises ``CliError``, also where an option of the command goes against it."""
    from sojourn_server.lab.sweep import SweepError, read_sweep

    try:
        sweep = read_sweep(text)
    except SweepError as error:
        raise CliError(f"--sweep {error}", NEXT) from None
    if given(context, sweep.field.option):
        option = "--" + sweep.field.option.replace("_", "-")
        raise CliError(
            f"{option} gives one value of {sweep.field.name}, and --sweep several", f"leave out {option}"
        )
    for name, instead in _NOT_WITH_IT.items():
        if given(context, name):
            raise CliError(f"--{name} does not tell the values of --sweep apart", instead)
    return sweep


def policies_of(sweep: Sweep, asked_for: str, context: typer.Context) -> str:
    """``asked_for`` where the user did; else what the sweep can show."""
    from sojourn_server.lab.sweep import DISK, HOST_MEMORY

    instead = {HOST_MEMORY: HOST_POLICIES, DISK: DISK_POLICIES}.get(sweep.field)
    return asked_for if instead is None or given(context, "policy") else instead


def spread(sweep: Sweep, specs: Sequence[RunSpec]) -> list[RunSpec]:
    """``specs`` at every value. Raises ``CliError`` where their loads differ, or all would be alike."""
    from sojourn_server.lab.policies import PolicyError
    from sojourn_server.lab.sweep import SweepError

    loads = {(spec.programs, spec.rate_per_s) for spec in specs}
    if len(loads) > 1:
        raise CliError(
            f"--sweep shows one load, and --programs and --rate make {len(loads)}",
            "give one of each, or sweep programs or rate_per_s alone",
        )
    try:
        return sweep.specs(specs)
    except SweepError as error:
        raise CliError(f"--sweep {error}", "name one with --policy") from None
    except PolicyError as error:
        raise CliError(str(error), "docs/lab.md says what each policy is") from None


def swept_runs_of(sweep: Sweep, specs: Sequence[RunSpec], rows: Sequence[RunRow]) -> SweptRuns:
    """``rows`` of ``specs``, which ``spread`` made, by value."""
    from sojourn_server.lab.report.swept import swept_runs
    from sojourn_server.lab.sweep import HOST_MEMORY, kv_bytes_per_token

    of_host = sweep.field is HOST_MEMORY
    return swept_runs(
        sweep.field.name,
        sweep.field.meaning,
        sweep.values,
        rows,
        of_host=of_host,
        kv_bytes_per_token=kv_bytes_per_token(specs[0]) if of_host else None,
    )


def given(context: typer.Context, name: str) -> bool:
    """Whether the user named the option, whatever its value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
