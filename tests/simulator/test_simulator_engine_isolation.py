"""The bare engine: what one engine's user changes is no other engine's."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions


def test_engines_share_no_configuration() -> None:
    one, other = (
        SimulatedEngine(SimulatedEngineOptions(), lambda: 0.0).scheduler.vllm_config for _ in range(2)
    )
    longest = other.model_config.max_model_len
    one.model_config.max_model_len = 640
    assert other.model_config.max_model_len == longest
