"""Outputs of ``sojourn simulate``: files, tables and explanations."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.errors import install_command

from .console import (
    CliError,
    check_output_file,
    check_output_folder,
    console,
    print_line,
    print_note,
    write_json,
)

if TYPE_CHECKING:
    from sojourn_server.simulator.report.results_file import Provenance
    from sojourn_server.simulator.report.sweep_results import SweepRuns
    from sojourn_server.simulator.run_log import RunLog
    from sojourn_server.simulator.simulation_suite import SuiteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOutputs:
    """Output options of ``sojourn simulate``. An option that is ``None`` produces no output."""

    json: str | None
    """File for the figures, or ``-`` for stdout."""
    plot: Path | None
    """Folder for the plots."""
    save: Path | None
    explain: str | None
    """Name of the program to explain."""

    def check(self) -> None:
        """Raise ``CliError`` if ``plot`` or ``save`` cannot be written. Call this before minutes of
        simulation. The option ``--json`` checks its own file."""
        from sojourn_server.simulator.report.results_file import SUFFIXES

        plot, save = self.plot, self.save
        if save is not None and not save.name.endswith(SUFFIXES):
            raise CliError(
                f"--save {save}: expected a name ending in {' or '.join(SUFFIXES)}", "name it runs.msgpack.gz"
            )
        if plot is not None and plot.exists() and not plot.is_dir():
            raise CliError(f"--plot {plot} is a file", "name a folder")
        if save is not None:
            check_output_file(save)
        if plot is not None:
            check_output_folder(plot)
            if find_spec("matplotlib") is None:
                raise CliError("--plot needs matplotlib", install_command("demo"))

    def show(self, result: SuiteResult, made: Provenance, swept: SweepRuns | None) -> None:
        """Print the table, write the files, and explain the program that ``--explain`` names.

        Raises ``CliError`` if a file cannot be written or a policy failed during a run.
        """
        from sojourn_server.simulator.report.results_table import render
        from sojourn_server.simulator.report.sweep_results import render_sweep

        console.print(render(result.rows) if swept is None else render_sweep(swept, result.rows))
        try:
            for path in self._write(result, made, swept):
                print_line(f"wrote {path}")
        except OSError as error:
            where = error.filename2 or error.filename or "the output"
            raise CliError(
                f"{where}: {error.strerror or error}",
                "make room or name another place, and run it again",
                exit_code=1,
            ) from None
        # Comes last, so that the files are written even if the program is unknown.
        if self.explain is not None:
            _explain(result, self.explain)
        _check_figures(result)

    def _write(self, result: SuiteResult, made: Provenance, swept: SweepRuns | None) -> list[str | Path]:
        """Write all files and return their paths."""
        from sojourn_server.simulator.report.plot_files import write_plots, write_sweep_plot
        from sojourn_server.simulator.report.results_file import document, save_runs

        written: list[str | Path] = []
        if self.json is not None:
            write_json(document(result.rows, made, swept, result.missing_runs), self.json)
            written += [self.json] if self.json != "-" else []
        if self.save is not None:
            save_runs(self.save, result.logs, made, result.rows, result.missing_runs)
            written.append(self.save)
        if self.plot is not None:
            if swept is None:
                written += write_plots(result.logs, result.rows, self.plot)
            else:
                written += write_sweep_plot(swept, result.rows, self.plot)
        return written


def _check_figures(result: SuiteResult) -> None:
    if failed := sorted({log.policy for log in result.logs if log.hook_failures}):
        raise CliError(
            f"hooks of policy {', '.join(failed)} raised errors, so these figures are wrong",
            "see the errors above, fix the policy and run it again",
            exit_code=1,
        )


def _explain(result: SuiteResult, program_id: str) -> None:
    from sojourn_server.simulator.report.program_explanation import UnknownProgramError, explain_program

    unknown: UnknownProgramError | None = None
    shown = False
    for log in result.logs:
        try:
            console.print(explain_program(log, _first_instance(log, program_id)))
            shown = True
        except UnknownProgramError as error:
            unknown = error
    if shown or unknown is None:
        return
    if not result.missing_runs:
        raise CliError(str(unknown), "name one of these with --explain", exit_code=1)
    print_note(f"{unknown}; it may be in a run that an interrupt left out")


def _first_instance(log: RunLog, name: str) -> str:
    """Return the id of the first simulated program that repeats the trace's program ``name``. Returns
    ``name`` unchanged if it is already the id of a simulated program, or if it is unknown."""
    known = [program.program_id for program in log.programs]
    if name in known:
        return name
    return next((p.program_id for p in log.programs if p.trace_id == name), name)
