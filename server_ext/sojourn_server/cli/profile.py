"""``sojourn profile``: measure a live server once, so that policies know what a lost context costs."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import importlib.metadata
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from .console import CliError, console, write_json

if TYPE_CHECKING:
    from sojourn_server.policy.costs import EngineLimits, EngineProfile
    from sojourn_server.profiling.bandwidth import Bandwidth
    from sojourn_server.profiling.break_even import BreakEven
    from sojourn_server.profiling.prefill import PrefillMeasurement
    from sojourn_server.profiling.steps import StepMeasurement
    from sojourn_server.replay.client import ServedModel

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("profile", help="Measure prefill, decode and copies of a live, idle server.")(profile)


def profile(
    url: str = typer.Option(..., help="The server's root, e.g. http://127.0.0.1:8000"),
    model: str | None = typer.Option(None, help="Served model; without it the server's first"),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="Write the profile to this TOML file, for serve --sojourn-profile and simulate --hardware",
    ),
    max_context: int | None = typer.Option(
        None, min=4, help="Longest context to measure; else the server's own"
    ),
    repeats: int = typer.Option(3, min=1, help="Samples for each length; their median counts"),
    budget_s: float = typer.Option(540.0, min=1.0, help="Measure no longer than this, seconds"),
    decode: bool = typer.Option(
        True, help="Also measure decodes and extended prefixes: sojourn simulate needs them"
    ),
    vocabulary: int = typer.Option(8000, min=400, help="Use token ids below this"),
    block_size: int | None = typer.Option(
        None, min=1, help="The server's KV block size; else what it tells, or 16"
    ),
    kv_pool_tokens: int | None = typer.Option(None, min=1, help="The server's KV pool; else what it tells"),
    max_num_seqs: int | None = typer.Option(None, min=1, help="The server's limit; else what it tells"),
    max_num_batched_tokens: int | None = typer.Option(
        None, min=1, help="The server's tokens a step; else what it tells"
    ),
    kv_bytes_per_token: int | None = typer.Option(None, min=1, help="Of one token; else what it tells"),
    layers: int | None = typer.Option(None, min=1, help="Of the model; else by its config.json here"),
    hidden_size: int | None = typer.Option(None, min=1, help="Of the model; else the same"),
    hardware: str | None = typer.Option(None, help="What to call the machine; else what is found here"),
    api_key: str | None = typer.Option(None, help="The server's key; else SOJOURN_API_KEY"),
    json: bool = typer.Option(False, "--json", help="Print the profile as JSON on stdout"),
) -> None:
    """Without ``-o`` and ``--json`` the TOML goes to stdout."""
    from sojourn_server.policy.costs import EngineLimits, EngineProfile, PrefillCurve
    from sojourn_server.policy.step_costs import fit_step_costs
    from sojourn_server.profiling.bandwidth import Bandwidth, KvBlocks, describe_hardware, measure_bandwidth
    from sojourn_server.profiling.break_even import Dimensions, break_even, read_dimensions
    from sojourn_server.profiling.compute import Compute, measure_compute
    from sojourn_server.replay.client import RequestError, ServerError

    if (layers is None) != (hidden_size is None):
        raise CliError("--layers and --hidden-size go together", "give both, or neither")
    key = api_key or os.environ.get("SOJOURN_API_KEY") or None
    said = EngineLimits(
        kv_pool_tokens=kv_pool_tokens,
        max_context_tokens=max_context,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    try:
        served, limits, tokens_a_block, measured, steps = asyncio.run(
            _measure(url, model, key, said, block_size, repeats, budget_s, vocabulary, decode)
        )
    except ServerError as error:
        raise CliError(error.message, error.next_step) from None
    except RequestError as error:
        raise CliError(f"a measurement failed: {error}", _after(error)) from None
    if not measured.points:
        raise CliError("nothing was measured within the budget", "raise --budget-s", exit_code=1)
    local = (urlsplit(url).hostname or "") in _LOCAL_HOSTS
    dimensions = read_dimensions(served.root) if local else None
    if layers and hidden_size:
        dimensions = Dimensions(layers, hidden_size)
    if local:
        kv_bytes = limits.kv_bytes_per_token
        # In how many pieces a large block is copied matters little.
        pieces = dimensions.layers if dimensions else 1
        bandwidth = measure_bandwidth(
            blocks=KvBlocks(kv_bytes * tokens_a_block, pieces) if kv_bytes else None
        )
    else:
        bandwidth = Bandwidth(None, None, "the server runs on another machine; profile it there")
    result = EngineProfile(
        model=served.name,
        hardware=hardware or (describe_hardware() if local else "unknown (remote server)"),
        engine=served.engine,
        block_size=tokens_a_block,
        prefill=PrefillCurve.fit(measured.points),
        points=tuple((tokens, round(seconds, 6)) for tokens, seconds in measured.points),
        device_to_host_bytes_per_s=_rounded(bandwidth.device_to_host_bytes_per_s),
        host_to_device_bytes_per_s=_rounded(bandwidth.host_to_device_bytes_per_s),
        decode_points=tuple((tokens, round(seconds, 6)) for tokens, seconds in steps.decode_points),
        limits=limits,
        steps=fit_step_costs(steps.samples) if decode and steps.samples else None,
        step_samples=tuple(steps.samples) if decode else (),
        measured_at=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=_versions(served.engine, local),
    )
    notes = [*measured.notes, *steps.notes, *([bandwidth.reason] if bandwidth.reason else [])]
    compute = Compute(None, "the server runs on another machine")
    if local and dimensions is not None:
        compute = measure_compute()
    evens = break_even(result, dimensions, compute)
    _show(result, bandwidth)
    _show_break_even(evens, longest=measured.points[-1][0])
    for note in notes:
        console.print(f"[yellow]note:[/] {note}", soft_wrap=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(result.to_toml(), encoding="utf-8")
        console.print(f"written to {output}; use it with: sojourn serve MODEL --sojourn-profile {output}")
    if json:
        residual_s = result.prefill.residual(measured.points)
        write_json(
            {
                **dataclasses.asdict(result),
                "break_even": evens.as_json(),
                "residual_s": residual_s,
                "notes": notes,
            },
            "-",
        )
    elif output is None:
        print(result.to_toml(), end="")


async def _measure(
    url: str,
    model: str | None,
    api_key: str | None,
    said: EngineLimits,
    block_size: int | None,
    repeats: int,
    budget_s: float,
    vocabulary: int,
    decode: bool,
) -> tuple[ServedModel, EngineLimits, int, PrefillMeasurement, StepMeasurement]:
    from rich.progress import Progress

    from sojourn_server.policy.costs import EngineLimits
    from sojourn_server.profiling.limits import read_block_size, read_limits
    from sojourn_server.profiling.prefill import lengths_up_to, measure_prefill
    from sojourn_server.profiling.steps import StepMeasurement, measure_steps
    from sojourn_server.replay.client import CompletionsClient

    async with CompletionsClient(url, api_key=api_key, timeout_s=budget_s) as client:
        served = await client.discover(model)
        told = await read_limits(client.url, served, api_key=api_key)
        limit, max_context = served.max_context_tokens, said.max_context_tokens
        # What the user says of the server wins, but for the context: a short measurement changes no limit.
        limits = EngineLimits(
            **{
                known.name: getattr(said, known.name) or getattr(told, known.name)
                for known in dataclasses.fields(EngineLimits)
                if known.name != "max_context_tokens"
            },
            max_context_tokens=limit or max_context,
        )
        block_size = (
            block_size or served.block_size or await read_block_size(client.url, api_key=api_key) or 16
        )
        if limit is None and max_context is None:
            raise CliError(f"{client.url} doesn't tell its longest context", "say it: --max-context TOKENS")
        longest = min(n for n in (limit, max_context) if n is not None) - 1  # one token is generated
        started = time.monotonic()
        # The prefill curve serves the policies of a live engine: the decodes get what it leaves, and a half
        # where there is little.
        prefill_budget_s = budget_s / 2 if decode else budget_s
        steps = StepMeasurement()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("prefill", total=len(lengths_up_to(longest)) * repeats)

            def show(tokens: int, lengths: int) -> None:
                progress.update(bar, advance=1, description=f"prefill of {tokens:,} tokens")

            measured = await measure_prefill(
                client,
                served,
                max_tokens=longest,
                repeats=repeats,
                budget_s=prefill_budget_s,
                vocabulary=vocabulary,
                on_sample=show,
            )
            if decode and measured.points:
                steps = await measure_steps(
                    client,
                    served,
                    measured.points,
                    # No longer than what the budget let be prefilled.
                    max_tokens=min(longest, measured.points[-1][0]),
                    limits=limits,
                    block_size=block_size,
                    repeats=repeats,
                    budget_s=budget_s - (time.monotonic() - started),
                    vocabulary=vocabulary,
                    on_sample=lambda what: progress.update(bar, total=None, description=what),
                )
    return served, limits, block_size, measured, steps


def _show(result: EngineProfile, bandwidth: Bandwidth) -> None:
    from rich.table import Table

    table = Table(title=f"{result.model} on {result.hardware}", title_justify="left")
    for name in ("tokens", "measured, s", "fitted, s", "tokens / s"):
        table.add_column(name, justify="right")
    for tokens, seconds in result.points:
        fitted = result.prefill.seconds(tokens)
        table.add_row(f"{tokens:,}", f"{seconds:.4g}", f"{fitted:.4g}", f"{tokens / max(seconds, 1e-9):,.0f}")
    console.print(table)
    down, up = bandwidth.device_to_host_bytes_per_s, bandwidth.host_to_device_bytes_per_s
    if down and up:
        console.print(f"device to host {down / 1e9:.1f} GB/s, host to device {up / 1e9:.1f} GB/s")
    if result.steps is not None:
        _show_steps(result)


def _show_break_even(evens: BreakEven, longest: int) -> None:
    from rich.markup import escape

    measured, closed = evens.measured.words(longest), evens.closed_form.words(longest)
    if evens.measured.tokens is None:
        text = f"break-even of recomputing and offloading: {measured}"
    else:
        text = (
            "break-even: copying a context out and in again is faster than computing it "
            f"{measured} (measured curve); {closed} (closed form)"
        )
    console.print(escape(text), soft_wrap=True)


def _show_steps(result: EngineProfile) -> None:
    from rich.table import Table

    costs = result.steps
    assert costs is not None
    off = costs.relative_error(result.step_samples)
    table = Table(
        title=f"a step, within {off:.0%} of {len(result.step_samples)} samples", title_justify="left"
    )
    for name in ("what", "µs"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, cost in (
        ("a step", costs.step_s),
        ("a token", costs.token_s),
        ("1,000 attention pairs", costs.pair_s * 1000),
        ("1,000 tokens of KV read", costs.kv_token_s * 1000),
        ("a request in it", costs.request_s),
        ("the server, once for each request", costs.call_s),
    ):
        table.add_row(name, f"{cost * 1e6:,.4g}")
    console.print(table)


def _versions(engine: str, local: bool) -> dict[str, str]:
    versions = {"engine": engine}
    # torch's version is the engine's only where both share this environment.
    for package in ("sojourn", *(("torch",) if local else ())):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _rounded(value: Any) -> float | None:
    return None if value is None else float(round(value))


def _after(error: Exception) -> str:
    text = str(error)
    if "vocabulary" in text:
        return "use smaller token ids: --vocabulary N, with N at most the model's vocabulary size"
    if "context too long" in text:
        return "say the longest context the server takes: --max-context TOKENS"
    if "timeout" in text:
        return "raise --budget-s, or measure less: --max-context TOKENS"
    return "look into the server's log"
