"""``sojourn profile`` against a server whose prefill costs a known time for each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_completions_server import FakeServer
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.profiling import machine_speed
from sojourn_server.profiling.offload_break_even import offload_break_even
from sojourn_server.profiling.prefill_measurement import lengths_up_to
from typer.testing import CliRunner


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(), ["profile", *arguments])


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies so small that they take almost no time, since the tests do not measure this machine."""
    monkeypatch.setattr(machine_speed.measure_bandwidth, "__defaults__", (1 << 20, None))


def test_lengths_double_up_to_the_longest() -> None:
    assert lengths_up_to(16_000) == [1000, 2000, 4000, 8000, 16_000]
    assert lengths_up_to(7999) == [1999, 3999, 7999]
    assert lengths_up_to(2048) == [512, 1024, 2048]
    assert lengths_up_to(1) == [1]


def test_a_profile_is_measured_written_and_readable(tmp_path: Path) -> None:
    target = tmp_path / "profile.toml"
    with FakeServer(seconds_per_token=5e-5, max_model_len=4001, sojourn=True, block_size=32) as server:
        result = invoke(
            "--url", server.url, "-o", str(target), "--repeats", "2", "--json", "-", "--no-decode"
        )
        assert result.exception is None, result.output
        prompts = [request["prompt"] for request in server.requests]
    profile = EngineProfile.from_toml(target.read_text())
    assert [tokens for tokens, _ in profile.points] == [1000, 2000, 4000]
    assert all(seconds >= tokens * 5e-5 for tokens, seconds in profile.points)
    # The fake sleeps in proportion; HTTP and JSON add to that, more on a busy machine.
    assert 4000 * 5e-5 * 0.9 <= profile.prefill.seconds(4000) <= 4000 * 5e-5 * 5
    assert (profile.model, profile.engine, profile.block_size) == ("fake", "fake 1.2", 32)
    assert profile.hardware
    assert profile.measured_at.endswith("Z")
    assert len({tuple(prompt[:32]) for prompt in prompts}) == len(prompts) == 7
    document = json.loads(result.stdout)
    assert document["prefill"]["b_s_per_token"] == profile.prefill.b_s_per_token
    assert document["residual_s"] >= 0
    assert profile.steps is None


def test_each_failure_says_what_to_do_next() -> None:
    with FakeServer(api_key="k", max_model_len=None, status=500) as server:
        assert "--api-key" in invoke("--url", server.url).exception.next_step
        unknown = invoke("--url", server.url, "--api-key", "k").exception
        assert isinstance(unknown, CliError)
        assert "--max-context" in unknown.next_step
        broken = invoke("--url", server.url, "--api-key", "k", "--max-context", "100").exception
        assert "HTTP 500" in broken.message
        gone = server.url
    assert "sojourn serve" in invoke("--url", gone).exception.next_step


# -- Recompute or offload: what ``sojourn profile`` says of it.


def profile(
    b_s: float = 0.0, c_s: float = 1e-8, *, kv_bytes: int | None = 1000, bytes_per_s: float | None = 1e6
) -> EngineProfile:
    """Copying takes 2 ms a token."""
    return EngineProfile(
        model="m", hardware="h", engine="e", block_size=16, prefill=PrefillCurve(0.0, b_s, c_s),
        points=((4000, 1.0),), device_to_host_bytes_per_s=bytes_per_s,
        host_to_device_bytes_per_s=bytes_per_s, limits=EngineLimits(kv_bytes_per_token=kv_bytes),
    )  # fmt: skip


def test_the_measured_curve_crosses_where_both_take_the_same_time() -> None:
    found = offload_break_even(profile(b_s=5e-4, c_s=1e-6))
    assert found.copy_s_per_token == pytest.approx(2e-3)
    assert found.tokens == pytest.approx(1500.0)  # 5e-4 S + 1e-6 S² = 2e-3 S
    assert offload_break_even(profile(b_s=3e-3))[:2] == ("always", 0.0)
    assert offload_break_even(profile(b_s=1e-3, c_s=0.0))[:2] == ("never", None)
    assert offload_break_even(profile(b_s=1e-3, c_s=0.0)).words(4000) == "never"
    assert "sojourn serve does" in offload_break_even(profile(kv_bytes=None)).why
    assert offload_break_even(profile(bytes_per_s=None)).words(4000) == "not known, no copies were measured"


def test_a_profile_tells_the_break_even_in_words_and_json() -> None:
    pytest.importorskip("torch")
    with FakeServer(
        seconds_per_token=5e-5, max_model_len=401, sojourn=True, block_size=32,
        engine={"kv_bytes_per_token": "256"},
    ) as server:  # fmt: skip
        result = invoke("--url", server.url, "--repeats", "1", "--no-decode", "--json", "-")
    assert result.exception is None, result.output
    found = json.loads(result.stdout)
    faster = found["break_even"]["faster"]  # which of them depends on what else the machine does
    assert faster in ("always", "from", "never")
    copies = 256 / found["device_to_host_bytes_per_s"] + 256 / found["host_to_device_bytes_per_s"]
    assert found["break_even"]["copy_s_per_token"] == pytest.approx(copies)
    assert any("in blocks of 8,192 bytes" in note for note in found["notes"])
    said = " ".join(result.stderr.split())
    assert (
        "prompts of up to 400 tokens; takes at most 540 s (--budget-s), and less with --max-context" in said
    )
    assert "prefill of 100 tokens" in said
    assert f"faster than computing it {faster}" in said


def test_a_profile_that_cannot_be_written_goes_to_stdout() -> None:
    with FakeServer(max_model_len=401) as server:
        result = invoke("--url", server.url, "--repeats", "1", "--no-decode", "-o", "/dev/full")
    assert isinstance(result.exception, CliError), result.exception
    assert "/dev/full: No space left on device" in f"{result.exception}{result.exception.next_step}"
    assert result.exception.next_step.startswith("the profile is on stdout")
    assert result.exception.exit_code == 1
    assert EngineProfile.from_toml(result.stdout).points
