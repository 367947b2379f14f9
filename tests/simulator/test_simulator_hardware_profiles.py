"""Hardware and model profiles: complete, sourced, self-consistent; a wrong one is told in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sojourn_server.simulator.latency.latency_profiles import (
    SHIPPED_PROFILES,
    HardwareProfile,
    LatencyProfileError,
    load_hardware_profile,
    load_model_shape,
)
from sojourn_server.simulator.latency.latency_selection import device_shape

HARDWARE = ("a100-80gb", "b200", "h100", "h200", "h200-80gb")


UNSOURCED = {"name", "title", "sources", "estimates"}


@pytest.mark.parametrize("name", HARDWARE)
def test_every_constant_has_a_source(name: str) -> None:
    hardware = load_hardware_profile(name)
    constants = {field.name for field in dataclasses.fields(HardwareProfile)} - UNSOURCED
    assert hardware.name == name
    assert {constant for constant, source in hardware.sources if len(source) > 15} == constants
    assert set(hardware.estimates) <= constants
    # What the vendor publishes is never a guess of ours.
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
    with pytest.raises(
        LatencyProfileError, match=r"unknown model 'lama-3.1-8b'.*did you mean 'llama-3.1-8b'"
    ):
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


def test_the_pool_is_what_memory_leaves() -> None:
    """Probe and papers work with about 25,000 blocks of 16 on an A100-80GB with an 8B model."""
    shape = device_shape(load_hardware_profile("a100-80gb"), load_model_shape("llama-3.1-8b"), cpu_ratio=2.0)
    assert 25_000 <= shape.kv_pool_tokens // 16 <= 30_000
    assert shape.kv_pool_tokens % shape.block_size == 0
    assert shape.host_kv_tokens == 2 * shape.kv_pool_tokens
    assert (shape.max_num_seqs, shape.max_num_batched_tokens) == (256, 2048)
    assert shape.max_context_tokens == 131_072


def test_more_devices_leave_more_room_and_the_same_kv_a_token() -> None:
    hardware, model = load_hardware_profile("h100"), load_model_shape("llama-3.1-70b")
    four, eight = device_shape(hardware, model, 4), device_shape(hardware, model, 8)
    assert eight.kv_pool_tokens > 2 * four.kv_pool_tokens
    assert eight.kv_bytes_per_token == four.kv_bytes_per_token == 327_680
    assert eight.hardware == "8x h100"
    # With more devices than KV heads every one holds a copy: 8 heads on 16 devices are 16.
    assert device_shape(hardware, model, 16).kv_bytes_per_token == 2 * 327_680


def test_a_model_that_does_not_fit_is_told_how_far_off_and_what_would_do() -> None:
    with pytest.raises(LatencyProfileError, match=r"does not fit on 1 × a100-80gb: \d+\.\d GiB .*use tp 4"):
        device_shape(load_hardware_profile("a100-80gb"), load_model_shape("llama-3.1-70b"))
    with pytest.raises(LatencyProfileError, match=r"use tp 2, or a max_model_len of at most (\d+)") as error:
        device_shape(load_hardware_profile("h100"), load_model_shape("qwen2.5-32b"))
    longest = int(str(error.value).rsplit(" ", 1)[1])
    fits = device_shape(load_hardware_profile("h100"), load_model_shape("qwen2.5-32b"), max_model_len=longest)
    assert fits.max_context_tokens == longest <= fits.kv_pool_tokens
    with pytest.raises(LatencyProfileError, match="does not fit"):
        device_shape(
            load_hardware_profile("h100"), load_model_shape("qwen2.5-32b"), max_model_len=longest + 1
        )
