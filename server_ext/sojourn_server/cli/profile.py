"""``sojourn profile``: measure a live server, so that policies know the cost of recomputing evicted KV."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from ..launch.launch_environment import installed_versions
from ..policies.costs.engine_profile import EngineProfile
from ..profiling.cost_fitting import fit_prefill_curve, fit_step_costs
from ..profiling.machine_speed import CopyBandwidth, describe_hardware, measure_bandwidth
from ..profiling.offload_break_even import offload_break_even
from ..profiling.prefill_measurement import MeasurementRun, measure_prefill, read_limits
from ..profiling.step_measurement import StepMeasurement
from ..replay.completions_client import CompletionsClient, RequestError
from ..replay.replay_driver import DEFAULT_BLOCK_SIZE
from .console import (
    CliError,
    ProgressLines,
    api_key_option,
    console,
    json_option,
    output_file,
    print_line,
    print_note,
    url_option,
    write_file,
    write_json,
)

_NEXT_STEPS = {
    "vocabulary": "use smaller token ids: --vocabulary N, with N at most the model's vocabulary size",
    "context too long": "give the server's longest context: --max-context TOKENS",
    "timeout": "raise --budget-s, or measure less: --max-context TOKENS",
}
"""Part of an error → next step."""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


def profile(
    url: str = url_option("The server's root, for example http://127.0.0.1:8000", ..., envvar=None),
    model: str | None = typer.Option(None, help="Served model. Default: the server's first model"),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        callback=output_file,
        help="Write the profile to this TOML file, for serve --sojourn-profile and simulate --hardware",
    ),
    max_context: int | None = typer.Option(
        None, min=4, help="Longest context to measure, tokens. Default: the server's limit"
    ),
    repeats: int = typer.Option(3, min=1, help="Samples per length; the median counts"),
    budget_s: float = typer.Option(540.0, min=1.0, help="Longest measurement, seconds"),
    decode: bool = typer.Option(
        True, help="Also measure decodes and extended prefixes, which sojourn simulate needs"
    ),
    vocabulary: int = typer.Option(8000, min=400, help="Upper bound of token ids"),
    max_num_seqs: int | None = typer.Option(
        None, min=1, help="Most requests per step. Default: the server's answer"
    ),
    max_num_batched_tokens: int | None = typer.Option(
        None, min=1, help="Most tokens per step. Default: the server's answer"
    ),
    hardware: str | None = typer.Option(None, help="Name of the machine. Default: what is found here"),
    api_key: str | None = api_key_option(),
    json: str | None = json_option("the profile"),
) -> None:
    """Measure prefill, decode and copies of a live, idle server."""
    given = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    on_sample = ProgressLines(at_once=True).show
    sampling = {"repeats": repeats, "vocabulary": vocabulary, "budget_s": budget_s, "on_sample": on_sample}
    client = CompletionsClient(url, api_key=api_key or None, timeout_s=budget_s)
    try:
        result, notes = asyncio.run(_measure(client, model, max_context, given, decode, hardware, sampling))
    except RequestError as error:
        step = next(
            (step for word, step in _NEXT_STEPS.items() if word in str(error)), "see the server's log"
        )
        raise CliError(f"a measurement failed: {error}", step) from None
    break_even = offload_break_even(result)
    _show(result)
    longest = break_even.words(result.points[-1][0])
    print_line(f"break-even: copying a context out and in again is faster than computing it {longest}")
    print_note(*notes)
    if output is not None:
        try:
            write_file(output, result.to_toml(), "the profile is on stdout; save it from there")
        except CliError:
            print(result.to_toml(), end="")
            raise
        console.print(f"written to {output}; use it with: sojourn serve MODEL --sojourn-profile {output}")
    if json is not None:
        found = {"break_even": break_even._asdict(), "residual_s": result.prefill.residual(result.points)}
        write_json({**dataclasses.asdict(result), **found, "notes": notes}, json)
    if output is None and json is None:
        print(result.to_toml(), end="")


async def _measure(
    client: CompletionsClient,
    model: str | None,
    max_context: int | None,
    given: dict[str, int | None],
    decode: bool,
    hardware: str | None,
    sampling: dict[str, Any],
) -> tuple[EngineProfile, list[str]]:
    """Return the measured profile, and notes for the user. ``sampling``: arguments of ``MeasurementRun``."""
    async with client:
        served = await client.discover(model)
        reported, reported_block_tokens = await read_limits(client, served)
        limit = served.max_context_tokens
        # The user's limits take precedence, except max_context, which only shortens the measurement.
        told = {name: number for name, number in given.items() if number is not None}
        limits = dataclasses.replace(reported, **told, max_context_tokens=limit or max_context)
        block_tokens = served.block_size or reported_block_tokens or DEFAULT_BLOCK_SIZE
        if limit is None and max_context is None:
            raise CliError(f"{client.url} does not report its longest context", "add --max-context TOKENS")
        longest = min(n for n in (limit, max_context) if n is not None) - 1  # one token is generated
        also = ", then decodes and extended prefixes" if decode else ""
        print_line(
            f"measuring {served.name}: prompts of up to {longest:,} tokens{also}; takes at most "
            f"{sampling['budget_s']:.0f} s (--budget-s), and less with --max-context TOKENS or --no-decode"
        )
        run = MeasurementRun(client=client, model=served.name, **sampling)
        # The policies of a live engine need the prefill curve, so it comes first; decodes get the rest of the
        # budget, at least half.
        points = await measure_prefill(run, longest, run.budget_s / 2 if decode else run.budget_s)
        steps = StepMeasurement(run, limits, block_tokens)
        if decode and points:  # contexts of at most the longest prompt that the budget allowed
            await steps.measure(points, min(longest, points[-1][0]))
    if not points:
        raise CliError("nothing was measured within the budget", "raise --budget-s", exit_code=1)
    local = (urlsplit(client.url).hostname or "") in _LOCAL_HOSTS
    bandwidth = CopyBandwidth(None, None, "the server runs on another machine; profile it there")
    if local:
        kv_bytes = limits.kv_bytes_per_token
        bandwidth = measure_bandwidth(block_bytes=kv_bytes * block_tokens if kv_bytes else None)
    # The torch of this environment is the engine's only if the engine runs in this environment.
    distributions = ("sojourn", "torch") if local else ("sojourn",)
    result = EngineProfile(
        model=served.name,
        hardware=hardware or (describe_hardware() if local else "unknown (remote server)"),
        engine=served.engine,
        block_size=block_tokens,
        prefill=fit_prefill_curve(points),
        points=tuple((tokens, round(seconds, 6)) for tokens, seconds in points),
        device_to_host_bytes_per_s=_rounded(bandwidth.device_to_host_bytes_per_s),
        host_to_device_bytes_per_s=_rounded(bandwidth.host_to_device_bytes_per_s),
        decode_points=tuple((tokens, round(seconds, 6)) for tokens, seconds in steps.decode_points),
        limits=limits,
        steps=fit_step_costs(steps.samples) if steps.samples else None,
        step_samples=tuple(steps.samples),
        measured_at=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions={"engine": served.engine, **installed_versions(*distributions)},
    )
    return result, [*run.notes, *([bandwidth.reason] if bandwidth.reason else [])]


def _show(result: EngineProfile) -> None:
    table = Table(title=f"{result.model} on {result.hardware}", title_justify="left")
    for name in ("tokens", "measured, s", "fitted, s", "tokens / s"):
        table.add_column(name, justify="right")
    for tokens, seconds in result.points:
        fitted = result.prefill.seconds(tokens)
        table.add_row(f"{tokens:,}", f"{seconds:.4g}", f"{fitted:.4g}", f"{tokens / max(seconds, 1e-9):,.0f}")
    console.print(table)
    down, up = result.device_to_host_bytes_per_s, result.host_to_device_bytes_per_s
    if down and up:
        console.print(f"device to host {down / 1e9:.1f} GB/s, host to device {up / 1e9:.1f} GB/s")
    if (costs := result.steps) is None:
        return
    off = costs.relative_error(result.step_samples)
    table = Table(
        title=f"a step, within {off:.0%} of {len(result.step_samples)} samples", title_justify="left"
    )
    for name in ("what", "µs"):
        table.add_column(name, justify="left" if name == "what" else "right")
    table.add_row("a step", f"{costs.step_s * 1e6:,.4g}")
    table.add_row("a token", f"{costs.token_s * 1e6:,.4g}")
    table.add_row("1,000 attention pairs", f"{costs.pair_s * 1e9:,.4g}")
    table.add_row("1,000 tokens of KV read", f"{costs.kv_token_s * 1e9:,.4g}")
    table.add_row("a request in it", f"{costs.request_s * 1e6:,.4g}")
    table.add_row("the server, once for each request", f"{costs.call_s * 1e6:,.4g}")
    console.print(table)


def _rounded(value: Any) -> float | None:
    return None if value is None else float(round(value))
