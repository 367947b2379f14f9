"""The roofline obeys what any step obeys: more work never takes less time, and splitting it never helps."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.simulator.latency.latency_profiles import (
    LatencyProfileError,
    load_hardware_profile,
    load_model_shape,
    shipped_profile_names,
)
from sojourn_server.simulator.latency.latency_protocol import StepWork
from sojourn_server.simulator.latency.roofline_latency import RooflineLatency

ROOFLINES = [
    RooflineLatency(load_hardware_profile(hardware), load_model_shape(model), tp)
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


@given(st.sampled_from(ROOFLINES), st.integers(1, 10**12), st.integers(1, 10**12), st.booleans())
def test_copies_grow_with_their_bytes(roofline: RooflineLatency, few: int, more: int, to_host: bool) -> None:
    assert 0 < roofline.copy_s(few, to_host=to_host) < roofline.copy_s(few + more, to_host=to_host)
    assert roofline.copy_s(0, to_host=to_host) == 0.0


def test_a_step_takes_few_calls_however_many_requests_it_has() -> None:
    roofline = ROOFLINES[2]

    def calls(requests: int) -> int:
        work, events = work_of([(1, 5000)] * requests), []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            roofline.step_s(work)
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    assert calls(1) == calls(64) < 20


def test_decoding_reads_weights_and_prefill_computes() -> None:
    a100, h200 = (
        RooflineLatency(load_hardware_profile(name), load_model_shape("llama-3.1-8b"))
        for name in ("a100-80gb", "h200")
    )
    decode, prefill = work_of([(1, 1000)]), work_of([(8192, 0)])
    # Bandwidth grew 2.35 times, compute 3.17 times.
    assert 1.8 < a100.step_s(decode) / h200.step_s(decode) < 2.35
    assert 2.7 < a100.step_s(prefill) / h200.step_s(prefill) < 3.2
    # Thirty-two more requests read the same weights.
    assert a100.step_s(work_of([(1, 100)] * 32)) < 1.3 * a100.step_s(work_of([(1, 100)]))


def test_a_mixture_reads_more_experts_the_more_tokens_it_sees() -> None:
    roofline = RooflineLatency(load_hardware_profile("h200"), load_model_shape("qwen3-30b-a3b"))
    model, hardware = roofline.model, roofline.hardware
    all_weights_s = model.weights_bytes / (
        hardware.memory_bandwidth_bytes_per_s * hardware.weight_read_efficiency
    )
    one, many = (roofline.step_s(work_of([(1, 0)] * batch)) for batch in (1, 256))
    # Eight of 128 experts for one token; 256 tokens use nearly all.
    assert one < 0.35 * all_weights_s
    assert many > 0.9 * all_weights_s
    dense = RooflineLatency(load_hardware_profile("h200"), load_model_shape("qwen2.5-32b"))
    assert roofline.step_s(work_of([(4096, 0)])) < 0.5 * dense.step_s(work_of([(4096, 0)]))


def test_tensor_parallelism_helps_less_than_its_devices() -> None:
    one, four = (
        RooflineLatency(load_hardware_profile("h100"), load_model_shape("llama-3.1-8b"), tp) for tp in (1, 4)
    )
    for requests in ([(8192, 0)], [(1, 1000)], [(1, 8000)] * 64):
        speedup = one.step_s(work_of(requests)) / four.step_s(work_of(requests))
        assert 1.5 < speedup < 4
    assert one.copy_s(10**10, to_host=True) > 3.9 * four.copy_s(10**10, to_host=True)
    with pytest.raises(LatencyProfileError, match="tp is 5"):
        RooflineLatency(load_hardware_profile("h100"), load_model_shape("llama-3.1-8b"), 5)
