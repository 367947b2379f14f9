"""The roofline beside what others measured.

Operators: microsoft/vidur (MIT), data/profiling/compute: medians over a layer's projections, norms, rotary
embedding, activation and adds, summed; embedding and attention left out.
"""

from __future__ import annotations

import dataclasses

import pytest
from sojourn_server.simulator.latency.latency_profiles import (
    ModelShape,
    load_hardware_profile,
    load_model_shape,
)
from sojourn_server.simulator.latency.latency_protocol import StepWork
from sojourn_server.simulator.latency.roofline_latency import RooflineLatency

LLAMA_2_7B = ModelShape(
    name="llama-2-7b",
    source="config.json of meta-llama/Llama-2-7b-hf on the Hugging Face hub",
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=32,
    head_size=128,
    intermediate_size=11008,
    vocabulary=32000,
    max_context_tokens=4096,
)


def layer_ms(roofline: RooflineLatency, tokens: int) -> float:
    """One layer without attention: the step without its pairs, reads, head and fixed share."""
    hardware, layers = roofline.hardware, roofline.model.layers
    step_s = roofline.step_s(StepWork(0, tokens, 0, 0, 0)) - hardware.step_overhead_s
    return step_s / layers * 1e3


@pytest.mark.parametrize(
    ("tokens", "measured_ms"),
    # a100/meta-llama/Meta-Llama-3-8B/mlp.csv
    [
        (1, 0.303),
        (8, 0.312),
        (32, 0.341),
        (64, 0.351),
        (128, 0.412),
        (256, 0.609),
        (512, 1.083),
        (1024, 2.348),
        (2048, 4.431),
        (4096, 8.529),
        (8192, 16.956),
        (16384, 33.836),
    ],
)
def test_a_layer_on_a100(tokens: int, measured_ms: float) -> None:
    roofline = RooflineLatency(load_hardware_profile("a100-80gb"), load_model_shape("llama-3.1-8b"))
    assert layer_ms(roofline, tokens) == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "measured_ms"),
    # h100/meta-llama/Llama-2-7b-hf/mlp.csv
    [
        (1, 0.175),
        (8, 0.172),
        (32, 0.181),
        (64, 0.183),
        (128, 0.199),
        (256, 0.286),
        (512, 0.375),
        (1024, 0.657),
        (2048, 1.26),
        (4096, 2.60),
    ],
)
def test_a_layer_on_h100(tokens: int, measured_ms: float) -> None:
    assert layer_ms(RooflineLatency(load_hardware_profile("h100"), LLAMA_2_7B), tokens) == pytest.approx(
        measured_ms, rel=0.2
    )


def test_one_request_decodes_as_fast_as_nvidia_says() -> None:
    """NVIDIA NIM 1.14.0, Llama 3.1 Nemotron Safety Guard 8B (Llama-3.1-8B's shape), BF16 on a GH200.

    1,000 tokens in and out, one request: 165.8 tokens/s. A GH200 (96 GB HBM3) has H100's chip and 4 TB/s.
    docs.nvidia.com/nim/llama-3-1-nemotron-safety-guard-8b/1.14.0/performance
    """
    gh200 = dataclasses.replace(load_hardware_profile("h100"), memory_bandwidth_bytes_per_s=4.0e12)
    context = 1500
    step_s = RooflineLatency(gh200, load_model_shape("llama-3.1-8b")).step_s(
        StepWork(1, 1, context, context, 1)
    )
    assert 1 / step_s == pytest.approx(165.8, rel=0.1)


def test_a_short_prompt_takes_no_longer_than_a_server_with_it() -> None:
    """NVIDIA NIM 1.10.1, the same model in BF16 on one A100 80GB SXM: 500 tokens, first token after 48.3 ms.

    The server's own share is in the figure and not in the model.
    docs.nvidia.com/nim/llama-3-1-nemotron-safety-guard-8b/1.10.1/performance
    """
    pairs = 500 * 501 // 2
    step_s = RooflineLatency(load_hardware_profile("a100-80gb"), load_model_shape("llama-3.1-8b")).step_s(
        StepWork(1, 500, pairs, 500, 1)
    )
    assert 0.65 * 48.3e-3 < step_s < 48.3e-3
