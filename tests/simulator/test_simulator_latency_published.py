"""The roofline beside what others measured.

Operators: microsoft/vidur (MIT), data/profiling/compute: medians over a layer's projections, norms, rotary
embedding, activation and adds, summed; embedding and attention left out.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.simulator.latency.latency_models import RooflineLatency, StepWork
from sojourn_server.simulator.latency.latency_profiles import (
    LatencyProfileError,
    ModelShape,
    load_hardware_profile,
    load_model_shape,
    shipped_profile_names,
)

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


def roofline_of(hardware: str, model: str = "llama-3.1-8b", tp: int = 1) -> RooflineLatency:
    return RooflineLatency(load_hardware_profile(hardware), load_model_shape(model), tp)


def layer_ms(roofline: RooflineLatency, tokens: int) -> float:
    """One layer without attention: the step without its pairs, reads, head and fixed share."""
    hardware, layers = roofline.hardware, roofline.model.layers
    step_s = roofline.step_s(StepWork(0, tokens, 0, 0, 0)) - hardware.step_overhead_s
    return step_s / layers * 1e3


TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
A100_MS = (0.303, 0.312, 0.341, 0.351, 0.412, 0.609, 1.083, 2.348, 4.431, 8.529, 16.956, 33.836)
"""a100/meta-llama/Meta-Llama-3-8B/mlp.csv"""
H100_MS = (0.175, 0.172, 0.181, 0.183, 0.199, 0.286, 0.375, 0.657, 1.26, 2.60)
"""h100/meta-llama/Llama-2-7b-hf/mlp.csv"""


def test_a_layer_takes_as_long_as_its_operators() -> None:
    a100, h100 = roofline_of("a100-80gb"), RooflineLatency(load_hardware_profile("h100"), LLAMA_2_7B)
    assert [layer_ms(a100, tokens) for tokens in TOKENS] == pytest.approx(A100_MS, rel=0.15)
    assert [layer_ms(h100, tokens) for tokens in TOKENS[:10]] == pytest.approx(H100_MS, rel=0.2)


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
    step_s = roofline_of("a100-80gb").step_s(StepWork(1, 500, pairs, 500, 1))
    assert 0.65 * 48.3e-3 < step_s < 48.3e-3


# -- The roofline obeys what any step obeys: more work never takes less time, and splitting it never helps.


ROOFLINES = [
    roofline_of(hardware, model, tp)
    for hardware in shipped_profile_names("hardware")
    for model, tp in (("llama-3.1-8b", 1), ("llama-3.1-70b", 4), ("qwen3-30b-a3b", 1))
]
REQUESTS = st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 131_072)), min_size=1, max_size=64)


def work_of(requests: list[tuple[int, int]]) -> StepWork:
    """(new tokens, context) of each request."""
    return StepWork(
        requests=len(requests),
        tokens=sum(n for n, _ in requests),
        attention_pairs=sum(n * c + n * (n + 1) // 2 for n, c in requests),
        kv_tokens_read=sum(n + c for n, c in requests),
        sampled=len(requests),
    )


@given(st.sampled_from(ROOFLINES), REQUESTS, st.sampled_from(StepWork._fields), st.integers(1, 100_000))
def test_more_of_anything_never_takes_less_time(
    roofline: RooflineLatency, requests: list[tuple[int, int]], field: str, more: int
) -> None:
    work = work_of(requests)
    grown = work._replace(**{field: getattr(work, field) + more})
    assert 0 < roofline.step_s(work) <= roofline.step_s(grown) < math.inf


@given(st.sampled_from(ROOFLINES), REQUESTS, REQUESTS)
def test_two_steps_take_at_least_as_long_as_one_with_both(
    roofline: RooflineLatency, first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    together = roofline.step_s(work_of(first + second))
    apart = roofline.step_s(work_of(first)) + roofline.step_s(work_of(second))
    assert together <= apart * (1 + 1e-9)


def test_a_mixture_reads_more_experts_the_more_tokens_it_sees() -> None:
    roofline = roofline_of("h200", "qwen3-30b-a3b")
    model, hardware = roofline.model, roofline.hardware
    all_weights_s = model.weights_bytes / (
        hardware.memory_bandwidth_bytes_per_s * hardware.weight_read_efficiency
    )
    one, many = (roofline.step_s(work_of([(1, 0)] * batch)) for batch in (1, 256))
    # Eight of 128 experts for one token; 256 tokens use nearly all.
    assert one < 0.35 * all_weights_s
    assert many > 0.9 * all_weights_s
    dense = roofline_of("h200", "qwen2.5-32b")
    assert roofline.step_s(work_of([(4096, 0)])) < 0.5 * dense.step_s(work_of([(4096, 0)]))


def test_tensor_parallelism_helps_less_than_its_devices() -> None:
    one, four = (roofline_of("h100", tp=tp) for tp in (1, 4))
    for requests in ([(8192, 0)], [(1, 1000)], [(1, 8000)] * 64):
        speedup = one.step_s(work_of(requests)) / four.step_s(work_of(requests))
        assert 1.5 < speedup < 4
    assert one.copy_s(10**10, to_host=True) > 3.9 * four.copy_s(10**10, to_host=True)
    with pytest.raises(LatencyProfileError, match="tp is 5"):
        roofline_of("h100", tp=5)
