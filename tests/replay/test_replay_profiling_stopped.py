"""``sojourn profile`` while it measures: what it says on the way, and what is left when it is stopped."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_completions_server import FakeServer
from profile_command import invoke, measure_little
from rich.console import Console
from sojourn_server.cli import profile as profile_module
from sojourn_server.cli.console import CliError
from sojourn_server.policies.costs.engine_profile import EngineProfile
from sojourn_server.profiling import step_measurement as steps_module
from sojourn_server.profiling.step_measurement import StepMeasurement, decode_sample, prefill_sample
from sojourn_server.replay.completions_client import Completion, CompletionsClient, RequestError
from sojourn_server.traces import atomic_files


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What goes to a stderr that is no terminal."""
    text = io.StringIO()
    console = Console(file=text, width=200)
    monkeypatch.setattr(profile_module, "console", console)
    monkeypatch.setattr("sojourn_server.cli.console.console", console)
    return text


def after(count: int, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``what`` before the request after the first ``count``."""
    complete = CompletionsClient.complete
    asked = 0

    async def counting(self: CompletionsClient, *args: Any, **kwargs: Any) -> Completion:
        nonlocal asked
        asked += 1
        if asked == count + 1:
            await what()
        return await complete(self, *args, **kwargs)

    monkeypatch.setattr(CompletionsClient, "complete", counting)


async def stopped() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)


async def interrupted() -> None:
    raise KeyboardInterrupt


async def failed() -> None:
    raise RequestError("connection lost", "gone")


def test_it_says_at_the_start_how_long_it_may_take_and_then_about_how_long(said: io.StringIO) -> None:
    with FakeServer(max_model_len=4001) as server:
        result = invoke("--url", server.url, "--repeats", "2", "--budget-s", "300")
    assert result.exception is None, result.output
    lines = said.getvalue().splitlines()
    assert "up to 4,000 tokens" in lines[0]
    assert "at most 300 s" in lines[0]
    assert "--budget-s" in lines[0]
    assert "--max-context" in lines[0]
    assert "prefill of 1,000 tokens" in lines[1]


@pytest.mark.parametrize("stop", [stopped, interrupted, failed])
def test_what_was_measured_is_written_when_it_is_stopped(
    stop: Any, tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "profile.toml"
    after(1 + 2 * 2 + 1, stop, monkeypatch)  # within the third length
    with FakeServer(max_model_len=4001) as server:
        error = invoke("--url", server.url, "--repeats", "2", "-o", str(target)).exception
    assert isinstance(error, CliError)
    assert error.exit_code == (1 if stop is failed else 130)
    assert str(target) in error.next_step
    text = target.read_text()
    assert text.startswith("# incomplete: ")
    assert "1,000, 2,000" in text.splitlines()[0]
    profile = EngineProfile.from_toml(text)
    assert [tokens for tokens, _ in profile.points] == [1000, 2000]
    assert profile.steps is None


@pytest.mark.parametrize(("decodes", "samples"), [(2, 5), (0, 0)])
def test_steps_are_in_what_is_left_as_soon_as_there_are_decodes(
    decodes: int, samples: int, tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(*args: Any, into: StepMeasurement, **options: Any) -> None:
        into.samples += [prefill_sample(0.1 * n, n, 0, 2048) for n in (100, 200, 400)]
        for context in range(100, 100 + decodes):
            into.samples.append(decode_sample(0.01, context, 1))
            into.decode_points.append((context, 0.01))
        await stopped()

    monkeypatch.setattr(steps_module, "measure_steps", measure)
    target = tmp_path / "profile.toml"
    with FakeServer(max_model_len=401) as server:
        assert invoke("--url", server.url, "--repeats", "1", "-o", str(target)).exception is not None
    text = target.read_text()
    assert f"{samples} samples of steps" in text.splitlines()[0]
    part = EngineProfile.from_toml(text)
    assert [tokens for tokens, _ in part.points] == [100, 200, 400]
    assert (part.steps is not None, len(part.step_samples)) == (samples > 0, samples)


@pytest.mark.parametrize(("stop", "why"), [(None, ""), (stopped, "interrupted"), (failed, "connection lost")])
def test_a_profile_that_cannot_be_written_after_all_goes_to_stdout(
    stop: Any, why: str, tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "write_atomically", full)
    if stop is not None:
        after(6, stop, monkeypatch)
    with FakeServer(max_model_len=4001) as server:
        result = invoke("--url", server.url, "--repeats", "2", "-o", str(tmp_path / "profile.toml"))
    assert isinstance(result.exception, CliError), result.exception
    assert "profile.toml: No space left on device" in f"{result.exception}{result.exception.next_step}"
    assert result.exception.next_step.startswith("the profile is on stdout")
    assert why in result.exception.message.partition("profile.toml")[0]
    assert result.exception.exit_code == (130 if stop is stopped else 1)
    assert EngineProfile.from_toml(result.stdout).points
