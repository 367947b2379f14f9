"""From names and files to a latency model and its device: shipped, own, measured; what is refused."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.simulator.latency.fitted_latency import FittedLatency
from sojourn_server.simulator.latency.latency_profiles import LatencyProfileError
from sojourn_server.simulator.latency.latency_protocol import StepWork
from sojourn_server.simulator.latency.latency_selection import load_latency_model
from sojourn_server.simulator.latency.roofline_latency import RooflineLatency

PROFILE = EngineProfile(
    model="tiny",
    hardware="2 cores",
    engine="vllm 0.32.0",
    block_size=16,
    prefill=PrefillCurve(0.02, 1e-4, 5e-9),
    points=((1000, 0.12),),
    device_to_host_bytes_per_s=2e9,
    host_to_device_bytes_per_s=4e9,
    decode_points=((1000, 0.012), (5000, 0.016)),
    limits=EngineLimits(
        kv_pool_tokens=10_007,
        max_context_tokens=8000,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        kv_bytes_per_token=1024,
    ),
    steps=StepCosts(0.01, 1e-4, 2e-9, 1e-7, 1e-5, 5e-3),
)


def written(tmp_path: Path, profile: EngineProfile) -> str:
    path = tmp_path / "engine.toml"
    path.write_text(profile.to_toml())
    return str(path)


def without(**limits: Any) -> EngineProfile:
    return dataclasses.replace(PROFILE, limits=dataclasses.replace(PROFILE.limits, **limits))


def test_names_give_a_roofline() -> None:
    latency, device = load_latency_model("h100", "llama-3.1-70b", 4, cpu_ratio=1.0)
    assert isinstance(latency, RooflineLatency)
    assert (device.hardware, device.model, device.max_num_batched_tokens) == (
        "4x h100",
        "llama-3.1-70b",
        8192,
    )
    assert device.host_kv_tokens == device.kv_pool_tokens > device.max_context_tokens


def test_options_override_what_vllm_would_choose() -> None:
    device = load_latency_model(
        "a100-80gb", "llama-3.1-8b", kv_pool_tokens=50_005, max_model_len=40_000, cpu_ratio=0.5
    )[1]
    assert device[3:] == (50_000, 40_000, 256, 2048, 16, 25_000 // 16 * 16)
    with pytest.raises(LatencyProfileError, match="one request would not fit"):
        load_latency_model("a100-80gb", "llama-3.1-8b", kv_pool_tokens=1000, max_model_len=2000)


def test_an_engine_profile_brings_its_own_model_and_limits(tmp_path: Path) -> None:
    latency, device = load_latency_model(written(tmp_path, PROFILE), cpu_ratio=2.0)
    assert latency == FittedLatency(PROFILE.steps or StepCosts(*[0.0] * 6), 2e9, 4e9)
    assert device == ("2 cores", "tiny", 1024, 10_000, 8000, 16, 2048, 16, 20_000)
    assert latency.copy_s(4_000_000_000, to_host=True) == 2.0
    assert latency.copy_s(4_000_000_000, to_host=False) == 1.0
    _, device = load_latency_model(written(tmp_path, PROFILE), kv_pool_tokens=4005)
    assert (device.kv_pool_tokens, device.max_context_tokens, device.host_kv_tokens) == (4000, 4000, 0)


def test_a_model_tells_the_size_of_kv_where_the_server_did_not(tmp_path: Path) -> None:
    file = written(tmp_path, without(kv_bytes_per_token=None))
    assert load_latency_model(file)[1].kv_bytes_per_token == 0
    assert load_latency_model(file, "qwen2.5-7b")[1].kv_bytes_per_token == 57_344
    with pytest.raises(LatencyProfileError, match=r"kv_bytes_per_token is missing.*name the model"):
        load_latency_model(file, cpu_ratio=1.0)


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        LatencyProfileError, match="max_num_seqs, max_num_batched_tokens are not in the profile"
    ):
        load_latency_model(written(tmp_path, without(max_num_seqs=None, max_num_batched_tokens=None)))
    with pytest.raises(LatencyProfileError, match=r"tp is 2.*leave tp at 1"):
        load_latency_model(written(tmp_path, PROFILE), tp=2)
    assert load_latency_model("h100")[1].model == "llama-3.1-8b"
    no_copies = dataclasses.replace(PROFILE, device_to_host_bytes_per_s=None)
    latency, _ = load_latency_model(written(tmp_path, no_copies))
    with pytest.raises(LatencyProfileError, match="no copy bandwidth"):
        latency.copy_s(1, to_host=True)
    with pytest.raises(LatencyProfileError, match="no copy bandwidth"):
        load_latency_model(written(tmp_path, no_copies), cpu_ratio=1.0)
    broken = tmp_path / "broken.toml"
    broken.write_text(PROFILE.to_toml().replace("token_s = 0.0001", "token_s = -1"))
    with pytest.raises(LatencyProfileError, match=r"broken\.toml: engine profile: .*`\$\.steps\.token_s`"):
        load_latency_model(str(broken))


def test_a_profile_without_step_costs_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.toml"
    version_one = dataclasses.replace(PROFILE, steps=None)
    old.write_text(version_one.to_toml().replace("version = 2", "version = 1"))
    with pytest.raises(LatencyProfileError, match=r"old\.toml: the engine profile holds no step costs"):
        load_latency_model(str(old), kv_pool_tokens=10_000, max_model_len=8000)


@given(
    st.tuples(*[st.floats(0, 1)] * 6),
    st.tuples(*[st.integers(0, 10**6)] * 5),
    st.sampled_from(StepWork._fields),
    st.integers(1, 10**6),
)
def test_a_fitted_step_never_falls_when_work_grows(
    costs: tuple[float, ...], counts: tuple[int, ...], field: str, more: int
) -> None:
    fitted = FittedLatency(StepCosts(*costs), None, None)
    work = StepWork(*counts)
    grown = work._replace(**{field: getattr(work, field) + more})
    assert fitted.step_s(work) <= fitted.step_s(grown)
    assert pickle.loads(pickle.dumps(fitted)) == fitted
