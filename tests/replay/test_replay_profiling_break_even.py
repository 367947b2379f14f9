"""Recompute or offload: what ``sojourn profile`` and the benchmark say of it."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_completions_server import FakeServer
from profile_command import invoke, measure_little
from script_modules import benchmark
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.profiling import machine_speed
from sojourn_server.profiling.machine_speed import (
    ComputeThroughput,
    CopyBandwidth,
    KvBlockLayout,
    measure_bandwidth,
    measure_compute,
)
from sojourn_server.profiling.offload_break_even import (
    ContextThreshold,
    ModelDimensions,
    offload_break_even,
    read_dimensions,
)

DIMENSIONS = ModelDimensions(layers=32, hidden=4096)


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


# -- the two answers


def test_the_measured_curve_crosses_where_both_take_the_same_time() -> None:
    break_even_points = offload_break_even(profile(b_s=5e-4, c_s=1e-6), None, ComputeThroughput(None))
    assert break_even_points.copy_s_per_token == pytest.approx(2e-3)
    # 5e-4 S + 1e-6 S² = 2e-3 S
    assert break_even_points.measured.tokens == pytest.approx(1500.0)
    assert offload_break_even(profile(b_s=3e-3), None, ComputeThroughput(None)).measured.tokens == 0.0
    assert (
        offload_break_even(profile(b_s=1e-3, c_s=0.0), None, ComputeThroughput(None)).measured.tokens
        == math.inf
    )


def test_ways_of_different_speed_are_both_counted() -> None:
    different = EngineProfile(
        model="m", hardware="h", engine="e", block_size=16, prefill=PrefillCurve(0.0, 0.0, 1e-6),
        points=((4000, 1.0),), device_to_host_bytes_per_s=1e6, host_to_device_bytes_per_s=5e5,
        limits=EngineLimits(kv_bytes_per_token=1000),
    )  # fmt: skip
    break_even_points = offload_break_even(different, DIMENSIONS, ComputeThroughput(1e12))
    assert break_even_points.measured.tokens == pytest.approx(3000.0)
    # What it takes to copy a token both ways is the same, so its one speed lies between them.
    assert break_even_points.closed_form.tokens == pytest.approx(3e-3 * 1e12 / (4 * 32 * 4096) - 6 * 4096)


def test_the_closed_form_is_the_papers_for_keys_and_values_without_groups() -> None:
    kv_bytes = 4 * DIMENSIONS.layers * DIMENSIONS.hidden
    break_even_points = offload_break_even(
        profile(kv_bytes=kv_bytes, bytes_per_s=25e9), DIMENSIONS, ComputeThroughput(500e12)
    )
    assert break_even_points.closed_form.tokens == pytest.approx(2 * 500e12 / 25e9 - 6 * 4096)


@pytest.mark.parametrize(
    ("known", "dimensions", "compute", "measured", "closed"),
    [
        (
            {"kv_bytes": None},
            DIMENSIONS,
            ComputeThroughput(1e12),
            "--kv-bytes-per-token",
            "--kv-bytes-per-token",
        ),
        ({"bytes_per_s": None}, DIMENSIONS, ComputeThroughput(1e12), "no copies", "no copies"),
        ({}, None, ComputeThroughput(1e12), "", "--layers"),
        ({}, DIMENSIONS, ComputeThroughput(None, "torch is away"), "", "torch is away"),
    ],
)
def test_what_is_not_known_says_why(
    known: dict[str, Any],
    dimensions: ModelDimensions | None,
    compute: ComputeThroughput,
    measured: str,
    closed: str,
) -> None:
    break_even_points = offload_break_even(profile(**known), dimensions, compute)
    for threshold, why in ((break_even_points.measured, measured), (break_even_points.closed_form, closed)):
        assert (threshold.tokens is None) == bool(why)
        assert why in threshold.why
    assert (
        json.loads(json.dumps(break_even_points.as_json(), allow_nan=False))["closed_form"]["faster"]
        == "not known"
    )


def test_a_threshold_in_words_and_in_json() -> None:
    words = [ContextThreshold(tokens).words(4000) for tokens in (-5.0, 0.0, 1234.2, 5000.0, math.inf)]
    assert words == [
        "always", "always", "from 1,235 tokens on", "from 5,000 tokens on, beyond the 4,000 measured",
        "never",
    ]  # fmt: skip
    assert ContextThreshold(None, "nobody looked").words(4000) == "not known, nobody looked"
    assert ContextThreshold(-5.0).as_json() == {"faster": "always", "tokens": 0.0}
    assert ContextThreshold(12.5).as_json() == {"faster": "from", "tokens": 12.5}
    assert ContextThreshold(math.inf).as_json() == {"faster": "never", "tokens": None}


# -- what it is made from


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 32, "hidden_size": 4096}, DIMENSIONS),
        ({"text_config": {"num_hidden_layers": 32, "hidden_size": 4096}, "hidden_size": 1}, DIMENSIONS),
        ({"num_hidden_layers": 32}, None),
        ({"num_hidden_layers": "32", "hidden_size": 4096}, None),
        ({"num_hidden_layers": 0, "hidden_size": 4096}, None),
        ({"text_config": []}, None),
        ([], None),
    ],
)
def test_dimensions_are_those_of_the_models_folder(
    tmp_path: Path, config: Any, expected: ModelDimensions | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_dimensions(str(tmp_path)) == expected


def test_without_a_readable_config_there_are_no_dimensions(tmp_path: Path) -> None:
    assert read_dimensions(None) is None
    assert read_dimensions("somebody/some-model") is None
    (tmp_path / "config.json").write_text("{")
    assert read_dimensions(str(tmp_path)) is None


def test_the_movers_own_copies_are_timed() -> None:
    pytest.importorskip("torch")
    measured = measure_bandwidth(1 << 20, KvBlockLayout(block_bytes=8192, layers=2))
    for rate in measured[:2]:
        assert rate is not None
        assert 1e6 < rate < 1e14
    assert "8,192 bytes a block" in measured.reason
    # One block is copied where all there is to copy is smaller.
    assert measure_bandwidth(100, KvBlockLayout(8192, 2)).device_to_host_bytes_per_s


def test_a_mover_that_fails_is_no_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend

    def fail(*given: object) -> None:
        raise OSError("no more")

    for way in ("to_device", "to_host"):
        monkeypatch.setattr(CpuDeviceBackend, way, fail)
        measured = measure_bandwidth(1 << 20, KvBlockLayout(8192, 2))
        assert measured[:2] == (None, None)
        assert "the copy failed" in measured.reason


def test_compute_is_timed_or_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    measured = measure_compute().flops_per_s
    assert measured is not None
    assert 1e5 < measured < 1e16
    monkeypatch.setattr(machine_speed, "CPU_SIDE", -1)
    assert measure_compute().flops_per_s is None
    assert "failed" in measure_compute().reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert measure_compute() == ComputeThroughput(None, "torch is not installed here")


@pytest.mark.parametrize("faster", ["bfloat16", "float32"])
def test_a_cpu_is_timed_in_the_type_that_it_multiplies_faster(
    monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    """A CPU without instructions for bfloat16 multiplied for six minutes."""
    torch = pytest.importorskip("torch")
    asked: list[tuple[str, int]] = []

    def rate(dtype: object, side: int, device: str) -> float:
        asked.append((str(dtype), side))
        return 2e9 if dtype is getattr(torch, faster) else 1e9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_speed, "_matmul_rate", rate)
    assert measure_compute() == ComputeThroughput(2e9)
    large = [dtype for dtype, side in asked if side == machine_speed.CPU_SIDE]
    assert large == [f"torch.{faster}"]


# -- the command


def test_a_profile_tells_the_break_even_in_words_and_json(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 64}))
    with FakeServer(
        seconds_per_token=5e-5, max_model_len=401, sojourn=True, block_size=32, root=str(tmp_path),
        facts={"kv_bytes_per_token": "256"},
    ) as server:  # fmt: skip
        result = invoke("--url", server.url, "--repeats", "1", "--no-decode", "--json", "-")
    assert result.exception is None, result.output
    found = json.loads(result.stdout)
    assert found["break_even"]["measured"] == {"faster": "always", "tokens": 0.0}
    assert (found["break_even"]["layers"], found["break_even"]["hidden_size"]) == (2, 64)
    assert found["break_even"]["closed_form"]["tokens"] is not None
    copies = 256 / found["device_to_host_bytes_per_s"] + 256 / found["host_to_device_bytes_per_s"]
    assert found["break_even"]["copy_s_per_token"] == pytest.approx(copies)
    assert any("8,192 bytes a block" in note for note in found["notes"])
    assert "faster than computing it always (measured curve)" in result.stderr


def test_a_server_that_does_not_tell_is_no_error() -> None:
    with FakeServer(max_model_len=401) as server:
        result = invoke("--url", server.url, "--repeats", "1", "--no-decode", "--json", "-")
        told = invoke(
            "--url", server.url, "--repeats", "1", "--no-decode", "--json", "-",
            "--kv-bytes-per-token", "256", "--layers", "2", "--hidden-size", "64",
        )  # fmt: skip
        alone = invoke("--url", server.url, "--layers", "2").exception
    assert result.exception is None, result.output
    assert "not known" in result.stderr
    assert "--kv-bytes-per-token" in result.stderr
    assert told.exception is None, told.output
    assert json.loads(told.stdout)["break_even"]["hidden_size"] == 64
    assert "go together" in alone.message


def test_nothing_is_said_of_a_machine_that_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn_server.cli.profile._LOCAL_HOSTS", frozenset())
    with FakeServer(max_model_len=401, sojourn=True, facts={"kv_bytes_per_token": "256"}) as server:
        result = invoke(
            "--url", server.url, "--repeats", "1", "--no-decode", "--json", "-", "--layers", "2",
            "--hidden-size", "64",
        )  # fmt: skip
    found = json.loads(result.stdout)
    assert found["break_even"]["measured"]["why"] == "no copies were measured"
    assert CopyBandwidth(found["device_to_host_bytes_per_s"], None) == CopyBandwidth(None, None)
    assert any("another machine" in note for note in found["notes"])


# -- the benchmark


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark("break_even") as module:
        yield module


@pytest.mark.parametrize(
    ("reloaded", "expected", "words"),
    [
        ((0.5, 0.5, 0.5), ("from the shortest", 100), "at or below 100 tokens, the shortest measured"),
        ((2.0, 1.0, 1.0), ("from", 150.0), "150 tokens"),
        ((2.0, 1.0, 5.0), ("not measured", None), "above 400 tokens, the longest measured"),
        ((0.5, 3.0, 3.0), ("from", 300.0), "300 tokens"),
    ],
)
def test_the_crossing_is_where_reloading_wins_for_good(
    script: ModuleType, reloaded: tuple[float, ...], expected: tuple[str, float | None], words: str
) -> None:
    points = [
        script.Point(tokens, computed, seconds, 0.0)
        for tokens, computed, seconds in zip((100, 200, 400), (1.0, 2.0, 4.0), reloaded, strict=True)
    ]
    found = script.crossing(points, lambda point: point.offloaded_s)
    assert (found["faster"], found["tokens"]) == expected
    assert script.words(found) == words
    later = [point._replace(out_s=10.0) for point in points]
    assert script.crossing(later, lambda point: point.offloaded_s)["tokens"] is None


def test_a_plan_has_room_for_its_longest_context_and_one_token(script: ModuleType) -> None:
    made = script.plan(2048)
    assert made.lengths == (1, 2, 4, 8, 16, 32, 64)
    assert made.pool > made.lengths[-1] + 1
    assert script.plan(100).lengths == (1, 2)
    assert script.plan(1).lengths == (1,)
    flags = made.serve_args()
    assert int(flags[flags.index("--max-model-len") + 1]) == made.pool * script.BLOCK_TOKENS
