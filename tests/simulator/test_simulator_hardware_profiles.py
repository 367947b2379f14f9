"""Hardware and model profiles: complete, sourced, self-consistent; a wrong one is told in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.simulator.latency.latency_models import DeviceShape, FittedLatency
from sojourn_server.simulator.latency.latency_profiles import (
    SHIPPED_PROFILES,
    LatencyProfileError,
    load_hardware_profile,
    load_model_shape,
    shipped_profile_names,
)
from sojourn_server.simulator.latency.latency_selection import load_latency_model


@pytest.mark.parametrize("name", shipped_profile_names("hardware"))
def test_constants_have_a_source_and_what_the_vendor_publishes_is_no_guess_of_ours(name: str) -> None:
    hardware = load_hardware_profile(name)
    assert hardware.name == name
    assert all(len(source) > 15 for _, source in hardware.sources)
    published = {"memory_bytes", "bf16_flops_per_s", "memory_bandwidth_bytes_per_s"}
    assert not published & set(hardware.estimates)


@pytest.mark.parametrize(
    ("name", "parameters", "active", "kv_bytes"),
    [
        # Totals of the hub's safetensors metadata; Qwen3's page says 3.3 B activated.
        ("llama-3.1-8b", 8_030_261_248, None, 131_072),
        ("llama-3.1-70b", 70_553_706_496, None, 327_680),
        ("qwen2.5-7b", 7_615_616_512, None, 57_344),
        ("qwen2.5-32b", 32_763_876_352, None, 262_144),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9, 98_304),
    ],
)
def test_a_shape_adds_up_to_the_published_parameters(
    name: str, parameters: int, active: float | None, kv_bytes: int
) -> None:
    model = load_model_shape(name)
    assert model.parameters == parameters
    assert model.kv_bytes_per_token() == kv_bytes
    if active is not None:
        found = model.layers * model.active_layer_parameters + 2 * model.head_parameters
        assert found == pytest.approx(active, rel=0.03)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(LatencyProfileError, match=r"unknown hardware 'a100'.*did you mean 'a100-80gb'"):
        load_hardware_profile("a100")
    with pytest.raises(LatencyProfileError, match=r"unknown model 'lama-3.1-8b'.*mean 'llama-3.1-8b'"):
        load_model_shape("lama-3.1-8b")


BROKEN = {
    "hardware/a100-80gb": [
        ("version = 1", "version = 7", "version is 7; expected 1"),
        ("[linear_efficiency]", "[linear_eficiency]", "'linear_eficiency'; did you mean 'linear_efficiency'"),
        ("value = 0.67", "value = 1.67", "linear_efficiency.value is 1.67; expected a number from"),
        ("value = 0.67", 'value = "0.67"', "linear_efficiency.value is '0.67'"),
        ("value = 0.67\nsource", "value = 0.67\norigin", "unknown field 'origin'"),
        ("value = 2.039e12", "value = -2.039e12", "memory_bandwidth_bytes_per_s.value is -2039"),
        ("version = 1", "version = ", "not TOML"),
    ],
    "models/qwen3-30b-a3b": [
        ("layers = 48\n", "", "layers is None; expected a whole number"),
        ("layers = 48", "layers = 0", "layers is 0; expected a whole number ≥ 1"),
        ("kv_heads = 4", "kv_heads = 5", "kv_heads is 5; expected a divisor of heads, 32"),
        ("experts_per_token = 8", "experts_per_token = 0", "experts is 128 and experts_per_token 0"),
        ("qk_norm = true", "qk_norm = 1", "qk_norm is 1; expected true or false"),
        ("experts = 128", "expert = 128", "unknown field 'expert'; did you mean 'experts'"),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"), [(name, *each) for name, cases in BROKEN.items() for each in cases]
)
def test_a_broken_file_says_what_and_where(
    tmp_path: Path, name: str, old: str, new: str, reason: str
) -> None:
    text = (SHIPPED_PROFILES / f"{name}.toml").read_text()
    assert old in text
    broken = tmp_path / "broken.toml"
    broken.write_text(text.replace(old, new, 1))
    load = load_hardware_profile if name.startswith("hardware") else load_model_shape
    with pytest.raises(LatencyProfileError, match=reason) as error:
        load(str(broken))
    assert str(error.value).startswith(str(broken))
    assert "\n" not in str(error.value)


def device_shape(hardware: str, model: str, tp: int = 1, **options: Any) -> DeviceShape:
    return load_latency_model(hardware, model, tp, **options)[1]


def test_the_pool_is_what_memory_leaves() -> None:
    """Probe and papers work with about 25,000 blocks of 16 on an A100-80GB with an 8B model."""
    shape = device_shape("a100-80gb", "llama-3.1-8b", cpu_ratio=2.0)
    assert 25_000 <= shape.kv_pool_tokens // 16 <= 30_000
    assert shape.kv_pool_tokens % shape.block_size == 0
    assert shape.host_kv_tokens == 2 * shape.kv_pool_tokens
    assert (shape.max_num_seqs, shape.max_num_batched_tokens) == (256, 2048)
    assert shape.max_context_tokens == 131_072


def test_more_devices_leave_more_room_and_the_same_kv_a_token() -> None:
    four, eight = (device_shape("h100", "llama-3.1-70b", tp) for tp in (4, 8))
    assert eight.kv_pool_tokens > 2 * four.kv_pool_tokens
    assert eight.kv_bytes_per_token == four.kv_bytes_per_token == 327_680
    assert eight.hardware == "8x h100"
    # With more devices than KV heads every one holds a copy: 8 heads on 16 devices are 16.
    assert device_shape("h100", "llama-3.1-70b", 16).kv_bytes_per_token == 2 * 327_680


def test_a_model_that_does_not_fit_is_told_how_far_off_and_what_would_do() -> None:
    with pytest.raises(LatencyProfileError, match=r"does not fit on 1 × a100-80gb: \d+\.\d GiB .*use tp 4"):
        device_shape("a100-80gb", "llama-3.1-70b")
    with pytest.raises(LatencyProfileError, match=r"use tp 2, or a max_model_len of at most (\d+)") as error:
        device_shape("h100", "qwen2.5-32b")
    longest = int(str(error.value).rsplit(" ", 1)[1])
    fits = device_shape("h100", "qwen2.5-32b", max_model_len=longest)
    assert fits.max_context_tokens + 16 == longest <= fits.kv_pool_tokens, "without the null block"
    with pytest.raises(LatencyProfileError, match="does not fit"):
        device_shape("h100", "qwen2.5-32b", max_model_len=longest + 1)


# -- From names and files to a latency model and its device: shipped, own, measured; what is refused.


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


def test_options_override_what_vllm_would_choose() -> None:
    device = load_latency_model(
        "a100-80gb", "llama-3.1-8b", kv_pool_tokens=50_005, max_model_len=40_000, cpu_ratio=0.5
    )[1]
    assert device[3:] == (50_000, 40_000, 256, 2048, 16, 25_000 // 16 * 16)
    with pytest.raises(LatencyProfileError, match="one request would not fit"):
        load_latency_model("a100-80gb", "llama-3.1-8b", kv_pool_tokens=1000, max_model_len=2000)


def test_an_engine_profile_brings_its_own_model_and_limits(tmp_path: Path) -> None:
    latency, device = load_latency_model(written(tmp_path, PROFILE), cpu_ratio=2.0)
    assert isinstance(latency, FittedLatency)
    assert latency.costs == PROFILE.steps
    assert device == ("2 cores", "tiny", 1024, 10_000, 8000, 16, 2048, 16, 20_000)
    assert latency.copy_s(4_000_000_000, to_host=True) == 2.0
    assert latency.copy_s(4_000_000_000, to_host=False) == 1.0
    _, device = load_latency_model(written(tmp_path, PROFILE), kv_pool_tokens=4005)
    assert (device.kv_pool_tokens, device.max_context_tokens, device.host_kv_tokens) == (4000, 3984, 0)


def test_a_model_tells_the_size_of_kv_where_the_server_did_not(tmp_path: Path) -> None:
    file = written(tmp_path, without(kv_bytes_per_token=None))
    assert load_latency_model(file)[1].kv_bytes_per_token == 0
    assert load_latency_model(file, "qwen2.5-7b")[1].kv_bytes_per_token == 57_344
    with pytest.raises(LatencyProfileError, match=r"kv_bytes_per_token is missing.*name the model"):
        load_latency_model(file, cpu_ratio=1.0)


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(LatencyProfileError, match="max_num_seqs, max_num_batched_tokens are not in the prof"):
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
    with pytest.raises(LatencyProfileError, match=r"engine\.toml: the engine profile holds no step costs"):
        load_latency_model(written(tmp_path, dataclasses.replace(PROFILE, steps=None)))
    broken = tmp_path / "broken.toml"
    broken.write_text(PROFILE.to_toml().replace("\na_s = ", "\na_s = -1"))
    with pytest.raises(LatencyProfileError, match=r"broken\.toml: engine profile: .*`\$\.prefill\.a_s`"):
        load_latency_model(str(broken))
