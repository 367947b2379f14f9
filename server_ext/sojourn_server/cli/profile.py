"""``sojourn profile``: measure a live server once, so that policies know what a lost context costs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from .console import CliError, console, write_json
from .profile_progress import MeasuringProgress, words_of

if TYPE_CHECKING:
    from sojourn_server.policy.costs import EngineLimits, EngineProfile
    from sojourn_server.profiling.bandwidth import Bandwidth
    from sojourn_server.profiling.break_even import BreakEven
    from sojourn_server.profiling.prefill import PrefillMeasurement
    from sojourn_server.profiling.steps import StepMeasurement
    from sojourn_server.replay.client import ServedModel

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


@dataclass(slots=True)
class _Measured:
    """What is known so far: it is filled while measuring goes on, which may be stopped at any time."""

    served: ServedModel
    limits: EngineLimits
    block_size: int
    prefill: PrefillMeasurement
    steps: StepMeasurement


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
    """Without ``-o`` and ``--json`` the TOML goes to stdout.

    Whoever stops it (Ctrl-C, SIGTERM) gets what was measured so far, marked as incomplete.
    """
    from sojourn_server.policy.costs import EngineLimits
    from sojourn_server.profiling.bandwidth import Bandwidth, KvBlocks, measure_bandwidth
    from sojourn_server.profiling.break_even import Dimensions, break_even, read_dimensions
    from sojourn_server.profiling.compute import Compute, measure_compute
    from sojourn_server.replay.client import RequestError, ServerError
    from sojourn_server.traces.whole_files import write_whole

    if (layers is None) != (hidden_size is None):
        raise CliError("--layers and --hidden-size go together", "give both, or neither")
    if output is not None:
        _check_output(output)
    key = api_key or os.environ.get("SOJOURN_API_KEY") or None
    said = EngineLimits(
        kv_pool_tokens=kv_pool_tokens,
        max_context_tokens=max_context,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    so_far: list[_Measured] = []
    stopped: CliError | None = None
    try:
        asyncio.run(
            _measure(so_far, url, model, key, said, block_size, repeats, budget_s, vocabulary, decode)
        )
    except ServerError as error:
        raise CliError(error.message, error.next_step) from None
    except RequestError as error:
        stopped = CliError(f"a measurement failed: {error}", _after(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        shorter = (
            "it takes less long with --max-context TOKENS, --no-decode, --repeats 1 or --budget-s SECONDS"
        )
        stopped = CliError("interrupted", shorter, exit_code=130)
    if not so_far or not so_far[0].prefill.points:
        raise stopped or CliError("nothing was measured within the budget", "raise --budget-s", exit_code=1)
    measured = so_far[0]
    if stopped is not None:
        raise _left_in_part(measured, stopped, url, hardware, output) from None
    served, limits = measured.served, measured.limits
    local = (urlsplit(url).hostname or "") in _LOCAL_HOSTS
    dimensions = read_dimensions(served.root) if local else None
    if layers and hidden_size:
        dimensions = Dimensions(layers, hidden_size)
    if local:
        kv_bytes = limits.kv_bytes_per_token
        # In how many pieces a large block is copied matters little.
        pieces = dimensions.layers if dimensions else 1
        bandwidth = measure_bandwidth(
            blocks=KvBlocks(kv_bytes * measured.block_size, pieces) if kv_bytes else None
        )
    else:
        bandwidth = Bandwidth(None, None, "the server runs on another machine; profile it there")
    result = _profile_of(measured, bandwidth, hardware, local)
    notes = [
        *measured.prefill.notes,
        *measured.steps.notes,
        *([bandwidth.reason] if bandwidth.reason else []),
    ]
    compute = Compute(None, "the server runs on another machine")
    if local and dimensions is not None:
        compute = measure_compute()
    evens = break_even(result, dimensions, compute)
    _show(result, bandwidth)
    _show_break_even(evens, longest=measured.prefill.points[-1][0])
    for note in notes:
        console.print(f"[yellow]note:[/] {note}", soft_wrap=True)
    if output is not None:
        write_whole({output: result.to_toml().encode()})
        console.print(f"written to {output}; use it with: sojourn serve MODEL --sojourn-profile {output}")
    if json:
        residual_s = result.prefill.residual(measured.prefill.points)
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
    so_far: list[_Measured],
    url: str,
    model: str | None,
    api_key: str | None,
    said: EngineLimits,
    block_size: int | None,
    repeats: int,
    budget_s: float,
    vocabulary: int,
    decode: bool,
) -> None:
    """Puts one ``_Measured`` into ``so_far`` as soon as the server is known, and fills it."""
    from sojourn_server.policy.costs import EngineLimits
    from sojourn_server.profiling.limits import read_block_size, read_limits
    from sojourn_server.profiling.prefill import PrefillMeasurement, measure_prefill
    from sojourn_server.profiling.steps import StepMeasurement, expected_steps_s, measure_steps
    from sojourn_server.replay.client import CompletionsClient

    _cancel_on_sigterm()
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
        block_tokens = (
            block_size or served.block_size or await read_block_size(client.url, api_key=api_key) or 16
        )
        if limit is None and max_context is None:
            raise CliError(f"{client.url} doesn't tell its longest context", "say it: --max-context TOKENS")
        longest = min(n for n in (limit, max_context) if n is not None) - 1  # one token is generated
        measured = _Measured(served, limits, block_tokens, PrefillMeasurement(), StepMeasurement())
        so_far.append(measured)
        _announce(served.name, longest, budget_s, decode)
        started = time.monotonic()
        # The prefill curve serves the policies of a live engine: the decodes get what it leaves, and a half
        # where there is little.
        prefill_budget_s = budget_s / 2 if decode else budget_s
        with MeasuringProgress() as progress:

            def show_prefill(what: str, left_s: float | None) -> None:
                if left_s is not None and decode:
                    steps_s = expected_steps_s(
                        measured.prefill.points,
                        max_tokens=longest,
                        limits=limits,
                        block_size=block_tokens,
                        repeats=repeats,
                    )
                    left_s = min(left_s + steps_s, budget_s - (time.monotonic() - started))
                progress.show(what, left_s)

            await measure_prefill(
                client,
                served,
                max_tokens=longest,
                repeats=repeats,
                budget_s=prefill_budget_s,
                vocabulary=vocabulary,
                into=measured.prefill,
                on_sample=show_prefill,
            )
            points = measured.prefill.points
            if decode and points:
                await measure_steps(
                    client,
                    served,
                    points,
                    # No longer than what the budget let be prefilled.
                    max_tokens=min(longest, points[-1][0]),
                    limits=limits,
                    block_size=block_tokens,
                    repeats=repeats,
                    budget_s=budget_s - (time.monotonic() - started),
                    vocabulary=vocabulary,
                    into=measured.steps,
                    on_sample=progress.show,
                )


def _cancel_on_sigterm() -> None:
    """Let SIGTERM, which ``timeout`` and supervisors send, end the measuring as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None, "called by a coroutine"
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _announce(model: str, longest: int, budget_s: float, decode: bool) -> None:
    from rich.markup import escape

    also = ", then decodes and extended prefixes" if decode else ""
    console.print(
        escape(
            f"measuring {model}: prompts of up to {longest:,} tokens{also}; takes at most "
            f"{words_of(budget_s)} (--budget-s), and less with --max-context TOKENS or --no-decode"
        ),
        highlight=False,
        soft_wrap=True,
    )


def _profile_of(
    measured: _Measured, bandwidth: Bandwidth, hardware: str | None, local: bool
) -> EngineProfile:
    from sojourn_server.policy.costs import EngineProfile, PrefillCurve
    from sojourn_server.policy.step_costs import fit_step_costs
    from sojourn_server.profiling.bandwidth import describe_hardware

    served, prefill, steps = measured.served, measured.prefill, measured.steps
    return EngineProfile(
        model=served.name,
        hardware=hardware or (describe_hardware() if local else "unknown (remote server)"),
        engine=served.engine,
        block_size=measured.block_size,
        prefill=PrefillCurve.fit(prefill.points),
        points=tuple((tokens, round(seconds, 6)) for tokens, seconds in prefill.points),
        device_to_host_bytes_per_s=_rounded(bandwidth.device_to_host_bytes_per_s),
        host_to_device_bytes_per_s=_rounded(bandwidth.host_to_device_bytes_per_s),
        decode_points=tuple((tokens, round(seconds, 6)) for tokens, seconds in steps.decode_points),
        limits=measured.limits,
        steps=fit_step_costs(steps.samples) if steps.samples else None,
        step_samples=tuple(steps.samples),
        measured_at=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=_versions(served.engine, local),
    )


def _left_in_part(
    measured: _Measured, stopped: CliError, url: str, hardware: str | None, output: Path | None
) -> CliError:
    """Write what was measured before it ``stopped``; the error that says where."""
    from sojourn_server.profiling.bandwidth import Bandwidth
    from sojourn_server.traces.whole_files import write_whole

    lengths = ", ".join(f"{tokens:,}" for tokens, _ in measured.prefill.points)
    if output is None:
        what = f"no -o was given: what was measured, prefill of {lengths} tokens, is lost"
        return CliError(stopped.message, f"{what}; {stopped.next_step}", exit_code=stopped.exit_code)
    if not measured.steps.decode_points:
        # Costs of a step that were fitted to prompts alone tell nothing of decodes.
        measured.steps.samples.clear()
    local = (urlsplit(url).hostname or "") in _LOCAL_HOSTS
    result = _profile_of(measured, Bandwidth(None, None), hardware, local)
    has = f"prefill of {lengths} tokens, {len(result.step_samples)} samples of steps"
    # An earlier one may be whole.
    path = output.with_name(f"{output.stem}.incomplete{output.suffix}") if output.exists() else output
    write_whole({path: f"# incomplete: {has}, no copies\n{result.to_toml()}".encode()})
    return CliError(
        stopped.message,
        f"{path} has what was measured: {has}; {stopped.next_step}",
        exit_code=130 if stopped.exit_code == 130 else 1,
    )


def _check_output(path: Path) -> None:
    """Fail now rather than after minutes."""
    if path.is_dir():
        raise CliError(
            f"--output {path} is a directory; expected a file", f"for example {path / 'profile.toml'}"
        )
    there = next(each for each in path.absolute().parents if each.exists())
    if not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise CliError(f"--output {path} cannot be written", "name a file that this user can write")


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
