"""Recompute or offload: what ``sojourn profile`` says of it."""

from __future__ import annotations

import json
import math

import pytest
from fake_completions_server import FakeServer
from profile_command import invoke, measure_little
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.profiling.machine_speed import measure_bandwidth
from sojourn_server.profiling.offload_break_even import offload_break_even


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)


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
    assert offload_break_even(profile(b_s=3e-3)).tokens == 0.0
    assert offload_break_even(profile(b_s=1e-3, c_s=0.0)).tokens == math.inf
    assert "sojourn serve does" in offload_break_even(profile(kv_bytes=None)).why
    assert offload_break_even(profile(bytes_per_s=None)).words(4000) == "not known, no copies were measured"


def test_the_movers_own_copies_are_timed() -> None:
    pytest.importorskip("torch")
    measured = measure_bandwidth(1 << 20, 8192)
    for rate in measured[:2]:
        assert rate is not None
        assert 1e6 < rate < 1e14
    assert "8,192 bytes a block" in measured.reason
    # One block is copied where all there is to copy is smaller.
    assert measure_bandwidth(100, 8192).device_to_host_bytes_per_s


def test_a_profile_tells_the_break_even_in_words_and_json() -> None:
    pytest.importorskip("torch")
    with FakeServer(
        seconds_per_token=5e-5, max_model_len=401, sojourn=True, block_size=32,
        facts={"kv_bytes_per_token": "256"},
    ) as server:  # fmt: skip
        result = invoke("--url", server.url, "--repeats", "1", "--no-decode", "--json", "-")
    assert result.exception is None, result.output
    found = json.loads(result.stdout)
    assert (found["break_even"]["faster"], found["break_even"]["tokens"]) == ("always", 0.0)
    copies = 256 / found["device_to_host_bytes_per_s"] + 256 / found["host_to_device_bytes_per_s"]
    assert found["break_even"]["copy_s_per_token"] == pytest.approx(copies)
    assert any("8,192 bytes a block" in note for note in found["notes"])
    assert "faster than computing it always" in result.stderr
