"""benchmarks/gpu/roofline.py without a GPU: it runs, its profile loads, and its arithmetic is right."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script
from sojourn_server.simulator.latency.latency_models import StepWork
from sojourn_server.simulator.latency.latency_profiles import load_hardware_profile, load_model_shape
from sojourn_server.simulator.latency.latency_selection import load_latency_model

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/gpu/roofline.py")


def test_a_smoke_run_writes_a_profile_that_a_simulation_takes(script: ModuleType, tmp_path: Path) -> None:
    profile = tmp_path / "smoke.toml"
    document = script.measure(profile, None, smoke=True)
    hardware = load_hardware_profile(str(profile))
    assert "not a measurement" in hardware.title
    sources = dict(hardware.sources)
    assert "gpu/roofline.py" in sources["linear_efficiency"]
    # What was not measured stays as the data sheet, or the guess, has it.
    assert sources["expert_efficiency"] == dict(load_hardware_profile("h100").sources)["expert_efficiency"]
    assert "expert_efficiency" in hardware.estimates
    assert "linear_efficiency" not in hardware.estimates
    latency, _ = load_latency_model(str(profile), "llama-3.1-8b", kv_pool_tokens=10_000, max_model_len=8000)
    assert latency.step_s(StepWork(1, 1, 1, 1, 1)) > 0
    assert [row["tokens"] for row in document["layer"]] == [1, 8, 64]
    assert all(row["attention_s"] > 0 for row in document["decode_attention"])


def test_curves_made_of_known_efficiencies_give_them_back(script: ModuleType) -> None:
    base, model = load_hardware_profile("h100"), load_model_shape("llama-3.1-8b")
    parameters = model.attention_parameters + model.mlp_parameters
    flops, bandwidth = base.bf16_flops_per_s, base.memory_bandwidth_bytes_per_s
    gemm_one_s = 2 * parameters / (0.8 * bandwidth)
    layers = [{"tokens": 1, "layer_s": gemm_one_s + 17e-6, "gemm_s": gemm_one_s}]
    layers += [
        {"tokens": n, "layer_s": 2 * parameters * n / (0.6 * flops), "gemm_s": 1.0} for n in (512, 4096, 8192)
    ]
    layers[1]["layer_s"] *= 2  # short prompts do worse and do not count
    prefills = [
        {"tokens": n, "pairs": n * n, "attention_s": 4 * 32 * 128 * n * n / (0.4 * flops)}
        for n in (2048, 4096)
    ]
    decodes = [{"kv_bytes": b, "attention_s": b / (0.7 * bandwidth)} for b in (10**9, 10**10)]
    copies = {"host_to_device_bytes_per_s": 5e10, "both_ways_bytes_per_s": 8e10}
    found = script.constants(base, model, layers, prefills, decodes, copies, 1.5e11)
    assert found == pytest.approx(
        {
            "linear_efficiency": 0.6,
            "attention_efficiency": 0.4,
            "weight_read_efficiency": 0.8,
            "kv_read_efficiency": 0.7,
            "layer_overhead_s": 17e-6,
            "host_to_device_bytes_per_s": 5e10,
            "memory_bytes": 1.5e11,
        }
    )
