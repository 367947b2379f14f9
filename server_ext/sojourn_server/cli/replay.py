"""``sojourn replay``: drive a live server with a recorded workload and measure it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import typer

from ..launch.redaction import without_userinfo
from ..replay.completions_client import CompletionsClient
from ..replay.replay_driver import Replay, ReplayOptions, first_programs, reporting
from ..replay.replay_report import ReplayTally
from ..simulator.workloads.arrival_processes import load_programs
from ..traces.trace_schema import TraceProgram
from .console import (
    PASS_KEY,
    CliError,
    api_key_option,
    console,
    from_options,
    json_option,
    print_line,
    print_note,
    url_option,
    write_json,
)

_TOO_LONG = "cut programs with --max-context N, shrink them with --token-scale, or serve a longer context"
_NEXT_STEPS = {
    "context too long": _TOO_LONG,
    "max-context": _TOO_LONG,
    "vocabulary": "use smaller token ids: --vocabulary N, with N at most the model's vocabulary size",
    "key": PASS_KEY,
}
"""Part of a reason why no program finished → next step."""


def replay(
    context: typer.Context,
    trace: str = typer.Argument(
        help="A .jsonl or .jsonl.gz trace, one program per line, or synthetic:NAME as in simulate"
    ),
    url: str = url_option("The server's root, for example http://127.0.0.1:8000", ..., envvar=None),
    model: str | None = typer.Option(None, help="Served model. Default: the server's first model"),
    programs: int | None = typer.Option(
        None, min=1, help="Number of top-level programs to run, with their sub-agents. Default: all"
    ),
    concurrency: int = typer.Option(8, min=1, help="Top-level programs at the same time (closed loop)"),
    arrivals: bool = typer.Option(False, help="Start programs at their recorded times instead"),
    speed: float = typer.Option(1.0, help="Divisor of tool times, arrivals and offsets"),
    token_scale: float = typer.Option(1.0, help="Factor of all token counts"),
    max_context_tokens: int | None = typer.Option(
        None,
        "--max-context",
        min=2,
        help="Longest context in tokens; programs end before their first longer turn",
    ),
    force_tokens: bool = typer.Option(
        False, help="Force outputs, so that prefixes are exact; needs our logits processor in the server"
    ),
    oracle_lengths: bool = typer.Option(
        False,
        "--oracle-lengths",
        help="With --force-tokens: max_tokens is the output's length, which no client knows. Default: the "
        "trace's longest output",
    ),
    dialect: str = typer.Option(
        "auto", help="sojourn: report programs and tools; vllm: plain requests; auto: ask the server"
    ),
    vocabulary: int = typer.Option(8000, min=400, help="Upper bound of token ids"),
    block_size: int | None = typer.Option(
        None,
        min=1,
        help="The server's KV block size, for counting recomputed tokens. Default: the server's value, or 16",
    ),
    api_key: str | None = api_key_option(),
    json: str | None = json_option("the result"),
) -> None:
    """Replay a trace of agent runs against any OpenAI-compatible server."""
    if dialect not in ("auto", "sojourn", "vllm"):
        raise CliError(f"--dialect {dialect} is unknown", "use auto, sojourn or vllm")
    try:
        options = from_options(context, ReplayOptions)
    except ValueError as error:
        raise CliError(str(error), "see sojourn replay --help") from None
    chosen = first_programs(load_programs(trace), programs)
    # With logging set up, httpx logs every request at INFO: thousands of lines.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    tally, about = asyncio.run(_run(chosen, options, url, model, dialect, api_key or None))
    document = {"trace": Path(trace).name, **about, **tally.document()}
    console.print(tally.table())
    print_note(*tally.notes())
    if tally.finished and tally.first_error is not None:
        # The table counts the reasons; this is the server's message for the first failure.
        print_line(f"first failed request: {tally.first_error}")
    if json is not None:
        write_json(document, json)
    if not tally.finished:
        raise _nothing_finished(tally)


async def _run(
    programs: list[TraceProgram],
    options: ReplayOptions,
    url: str,
    model: str | None,
    dialect: str,
    api_key: str | None,
) -> tuple[ReplayTally, dict[str, Any]]:
    async with CompletionsClient(url, api_key=api_key) as client:
        served = await client.discover(model)
        if dialect == "auto":
            dialect = "sojourn" if served.speaks_sojourn else "vllm"
        elif dialect == "sojourn" and not served.speaks_sojourn:
            raise CliError(
                f"{client.url} does not answer /sojourn/v1/capabilities",
                "start it with sojourn serve, or use --dialect vllm",
            )
        told = client.url if dialect == "sojourn" else None
        with reporting(told, api_key), console.status("replay") as status:

            def show(tally: ReplayTally) -> None:
                ended, turns = len(tally.programs), len(tally.turns)
                failed = ended - len(tally.finished)
                status.update(f"replay: {ended} of {len(programs)} programs, {turns} turns, {failed} failed")

            run = Replay(programs, client, served, options, on_progress=show)
            tally = await run.run()
    about = {
        "url": without_userinfo(client.url),
        "model": served.name,
        "engine": served.engine,
        "dialect": dialect,
        "programs": len(programs),
        "speed": options.speed,
        "token_scale": options.token_scale,
        "force_tokens": options.force_tokens,
        "lengths": "declared" if options.force_tokens and not options.oracle_lengths else "oracle",
        "max_context": options.max_context_tokens,
        "concurrency": None if options.arrivals else options.concurrency,
        "block_size": run.block_size,
    }
    return tally, about


def _nothing_finished(tally: ReplayTally) -> CliError:
    reasons = ", ".join(tally.unfinished)
    detail = f" ({tally.first_error})" if tally.first_error else ""
    step = next((step for word, step in _NEXT_STEPS.items() if word in reasons), "see the server's log")
    return CliError(f"no program finished: {reasons}{detail}", step, exit_code=1)
