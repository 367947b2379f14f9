"""``sojourn trace``: traces of agent runs for ``simulate`` and ``replay``, and files for Perfetto."""

from __future__ import annotations

import shlex
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from ..policies.toml_document import did_you_mean
from ..simulator.report.results_file import load_runs
from ..simulator.report.turn_phases import add_run
from ..traces.imports import IMPORT_FORMATS
from ..traces.perfetto_trace import PerfettoTrace, add_ledger_program, write_perfetto
from ..traces.trace_file import write_trace
from ..traces.trace_schema import TraceError
from .console import CliError, api_key_option, check_suffix, output_file, print_line, print_note, url_option
from .live_client import LiveClient

_MAX_PROGRAMS = 1000
_DECISIONS_AT_ONCE = 5000


trace = typer.Typer(help="Make and export traces of agent runs.", no_args_is_help=True)


@trace.command("import")
def import_(
    files: list[Path] = typer.Argument(
        help="Files or folders to read, plain or gzipped; they become one trace"
    ),
    source: str = typer.Option(
        ...,
        "--from",
        help="claude-code, codex, opencode, pi: session files; openai: logs of requests; otel: spans in OTLP "
        "JSON or in the format of Python's exporters; langfuse, langsmith: exports; sojourn: answers of GET "
        "/sojourn/v1/programs/{id}",
    ),
    output: Path = typer.Option(
        ..., "-o", "--output", callback=output_file, help="The trace, .jsonl or .jsonl.gz"
    ),
) -> None:
    """Make a trace from session files of coding agents, spans, or ledgers."""
    read = IMPORT_FORMATS.get(source)
    if read is None:
        message = f"--from {source} is unknown{did_you_mean(source, IMPORT_FORMATS)}"
        raise CliError(message, f"use one of {', '.join(IMPORT_FORMATS)}")
    check_suffix("-o", output, (".jsonl", ".jsonl.gz"))
    try:
        imported = read(files)
    except TraceError as error:
        raise CliError(str(error), f"docs/traces.md says what --from {source} reads") from None
    count = write_trace(output, imported.programs)
    turns = sum(len(program.turns) for program in imported.programs)
    print_line(f"{output}: {count} programs, {turns} turns")
    print_note(*imported.notes)
    roots = sum(program.parent is None for program in imported.programs)
    print_line(
        f"What would sojourn bring? sojourn simulate {shlex.quote(str(output))} --programs {min(roots, 40)} "
        "--hours 0.25 --max-gap-s 600 --policy stock,lru-offload,sojourn"
    )


@trace.command()
def export(
    runs: list[Path] = typer.Argument(None, help="Files of sojourn simulate --save; none: ask --url"),
    perfetto: Path = typer.Option(
        ..., "--perfetto", callback=output_file, help="The file to write, .json or .json.gz"
    ),
    url: str = url_option("The engine to ask"),
    api_key: str | None = api_key_option("The engine's API key"),
    last_s: float = typer.Option(900.0, "--last", min=1.0, help="Seconds of the engine's past to export"),
    max_events: int = typer.Option(
        200_000, min=1000, help="Maximum number of events; older events are left out, with a note"
    ),
) -> None:
    """Write a run of an engine or of the simulator for ui.perfetto.dev."""
    check_suffix("--perfetto", perfetto, (".json", ".json.gz"))
    trace = PerfettoTrace()
    if runs:
        notes = _add_saved_runs(trace, runs)
    else:
        with closing(LiveClient(url, api_key)) as client:
            notes = _add_engine(trace, client, last_s)
    document = trace.document(max_events=max_events, notes=notes)
    write_perfetto(perfetto, document)
    cut = document["otherData"]["cut_events"]
    print_line(f"{perfetto}: {len(document['traceEvents'])} events; open it at https://ui.perfetto.dev")
    if cut:
        print_note(f"{cut} older events are left out; raise --max-events")


def _add_saved_runs(trace: PerfettoTrace, paths: list[Path]) -> dict[str, Any]:
    for path in paths:
        for log in load_runs(path).runs:
            add_run(trace, log, f"{log.policy} {log.programs_wanted} programs, seed {log.seed}, {log.trace}")
    return {"source": "simulator", "clock": "virtual seconds"}


def _add_engine(trace: PerfettoTrace, client: LiveClient, last_s: float) -> dict[str, Any]:
    listed = client.programs(_MAX_PROGRAMS)
    programs = []
    for summary in listed["programs"]:
        program = client.find_program(summary["program_id"])
        if program is None:  # forgotten since it was listed
            continue
        if "ledger" not in program:
            raise CliError(
                f"{client.url} is a gateway and has no ledger", "export from each engine with --url"
            )
        programs.append(program)
    ends = [turn["arrived_s"] + turn["seconds"]["wall"] for one in programs for turn in one["ledger"]]
    since_s = max(ends, default=0.0) - last_s
    processes: dict[str | None, int] = {}
    for program in sorted(programs, key=lambda one: [turn["arrived_s"] for turn in one["ledger"][:1]]):
        tenant = program.get("tenant")
        process = processes[program["program_id"]] = trace.process(
            f"tenant {tenant}" if tenant else "programs"
        )
        add_ledger_program(trace, process, program, since_s=since_s)
    engine = trace.process(f"engine {client.shown_url}")
    decisions = _add_decisions(trace, client, engine, processes, since_s)
    return {
        "source": client.shown_url,
        "clock": "engine's monotonic seconds",
        "exported_unix_s": round(time.time(), 3),
        "last_s": last_s,
        "programs": len(programs),
        "programs_known": listed.get("total"),
        "decisions": decisions,
    }


def _add_decisions(
    trace: PerfettoTrace, client: LiveClient, engine: int, processes: dict[str | None, int], since_s: float
) -> int:
    """Add the decisions since ``since_s`` of all engines of a server, each to its program's thread in
    ``processes``, others to the process ``engine``. Return the number of decisions."""
    added, first = 0, client.decisions(0, 1)
    for name in (None, *(one for one in first.get("engines", ()) if one != first.get("engine"))):
        number, more = 0, {} if name is None else {"engine": name}
        while True:
            answer = client.decisions(number, _DECISIONS_AT_ONCE, **more)
            recent = [one for one in answer["decisions"] if one["at_s"] >= since_s]
            for decision in recent:
                process = processes.get(decision["program_id"])
                thread = None if process is None else decision["program_id"]
                trace.add_instant(process or engine, thread, decision["kind"], decision["at_s"], decision)
            added += len(recent)
            if len(answer["decisions"]) < _DECISIONS_AT_ONCE or answer["next"] <= number:
                break
            number = answer["next"]
    return added
