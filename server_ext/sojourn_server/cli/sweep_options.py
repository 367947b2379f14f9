"""``sojourn simulate --sweep``: every policy at several values of one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from .console import CliError, is_given

if TYPE_CHECKING:
    from sojourn_server.simulator.parameter_sweep import ParameterSweep
    from sojourn_server.simulator.report.run_row import RunRow
    from sojourn_server.simulator.report.sweep_results import SweepRuns
    from sojourn_server.simulator.simulation_run import RunSpec

HOST_POLICIES = "stock,lru-offload,thunderagent-offload,continuum+host,mori"
"""Default policies for a sweep of host memory, since ``simulate.DEFAULT_POLICIES`` do not use host memory."""
DISK_POLICIES = "stock,continuum+host,mori"
"""Default policies for a sweep of disk sizes."""
SWEEP_EXAMPLE = "for example --sweep cpu_ratio=0,1,2,4"
_EXCLUDED_OPTIONS = {
    "save": "run the value to save without --sweep",
    "explain": "run the value to explain without --sweep",
}


def parse_sweep(text: str, context: typer.Context) -> ParameterSweep:
    """Parse the value of ``--sweep``. Raises ``CliError`` if it is invalid or contradicts another option."""
    from sojourn_server.simulator.parameter_sweep import SweepError, read_sweep

    try:
        sweep = read_sweep(text)
    except SweepError as error:
        raise CliError(f"--sweep {error}", SWEEP_EXAMPLE) from None
    if is_given(context, sweep.field.option):
        option = "--" + sweep.field.option.replace("_", "-")
        raise CliError(
            f"{option} gives one value of {sweep.field.name}, and --sweep several", f"remove {option}"
        )
    for name, instead in _EXCLUDED_OPTIONS.items():
        if is_given(context, name):
            raise CliError(f"--{name} cannot distinguish the values of --sweep", instead)
    return sweep


def sweep_policies(sweep: ParameterSweep, asked_for: str, context: typer.Context) -> str:
    """Return ``asked_for`` if the user gave ``--policy``, else the default policies for this sweep."""
    from sojourn_server.simulator.parameter_sweep import DISK, HOST_MEMORY

    instead = {HOST_MEMORY: HOST_POLICIES, DISK: DISK_POLICIES}.get(sweep.field)
    return asked_for if instead is None or is_given(context, "policy") else instead


def expand_specs(sweep: ParameterSweep, specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return each of ``specs`` once per value of the sweep. Raises ``CliError`` if the specs have different
    loads or the sweep changes nothing."""
    from sojourn_server.simulator.parameter_sweep import SweepError
    from sojourn_server.simulator.simulator_policies import PolicyError

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
        raise CliError(str(error), "docs/simulator.md lists the policies") from None


def whole_values(
    sweep: ParameterSweep, specs: Sequence[RunSpec], finished: Sequence[RunSpec]
) -> tuple[ParameterSweep, list[RunSpec]]:
    """Reduce an interrupted sweep to the values that have finished under every policy. Returns the smaller
    sweep and its specifications. ``specs``: the result of ``expand_specs`` for the whole sweep. ``finished``:
    those of ``specs`` whose runs have finished."""
    policies = len(specs) // len(sweep.values)
    parts = [specs[start : start + policies] for start in range(0, len(specs), policies)]
    whole = [
        (value, part)
        for value, part in zip(sweep.values, parts, strict=True)
        if all(spec in finished for spec in part)
    ]
    kept = replace(sweep, values=tuple(value for value, _ in whole))
    return kept, [spec for _, part in whole for spec in part]


def group_by_value(sweep: ParameterSweep, specs: Sequence[RunSpec], rows: Sequence[RunRow]) -> SweepRuns:
    """Return ``rows`` grouped by the value of the sweep. ``specs`` is the result of ``expand_specs``."""
    from sojourn_server.simulator.parameter_sweep import HOST_MEMORY, kv_bytes_per_token
    from sojourn_server.simulator.report.sweep_results import sweep_runs

    is_host_sweep = sweep.field is HOST_MEMORY
    return sweep_runs(
        sweep.field.name,
        sweep.field.meaning,
        sweep.values,
        rows,
        is_host_sweep=is_host_sweep,
        kv_bytes_per_token=kv_bytes_per_token(specs[0]) if is_host_sweep else None,
    )
