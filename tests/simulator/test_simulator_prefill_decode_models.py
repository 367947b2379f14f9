"""Counted FLOPs and bytes against DualPath's Table 1, and what is left of a device's memory."""

from __future__ import annotations

import math

import pytest
from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import PD_MODELS, PdMachine

APPENDED = 429.0
"""Tokens a turn of the 64K workload appends."""


@pytest.mark.parametrize(
    ("model", "published", "within"),
    [("qwen2.5-32b", (267, 117), 0.02), ("ds-660b", (36, 13), 0.2)],
)
def test_cache_compute_ratios_are_those_of_table_1(
    model: str, published: tuple[float, float], within: float
) -> None:
    """GB of cached KV per PFLOP at 64K and 16K, the paper's bounds."""
    pd_model = PD_MODELS[model]
    found = [
        context * pd_model.kv_bytes_per_token / 1e9 / (pd_model.turn_flops(context, APPENDED) / 1e15)
        for context in (64 * 1024, 16 * 1024)
    ]
    assert found == pytest.approx(published, rel=within)


def test_pairs_are_counted_once() -> None:
    model = PD_MODELS["qwen2.5-32b"]
    whole = model.turn_flops(0, 1000)
    parts = model.turn_flops(0, 400) + model.turn_flops(400, 600)
    assert parts == pytest.approx(whole)


def test_the_660b_models_decode_step_is_that_of_deepseeks_service() -> None:
    """14,800 output tokens a second on a node of eight at 21 a second for each user."""
    model = PD_MODELS["ds-660b"]
    users = 88
    step_s = model.decode_step_s + users * model.decode_request_s
    assert 8 * users / step_s == pytest.approx(14_800, rel=0.01)


def test_memory_is_what_weights_leave() -> None:
    machine = PdMachine()
    assert {name: machine.decode_kv_tokens(model) > 65_536 for name, model in PD_MODELS.items()} == {
        "ds-660b": True, "ds-27b": True, "qwen2.5-32b": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"qwen2\.5-32b leaves"):
        PdMachine(device_memory_bytes=70e9).decode_kv_tokens(PD_MODELS["qwen2.5-32b"])
    with pytest.raises(ValueError, match="buffer_bytes is nan"):
        PdMachine(buffer_bytes=math.nan)
