"""benchmarks/dualpath: a turn by hand, nothing lost, and the paper's constants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from script_modules import load_script
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules

load_script("benchmarks/dualpath/figures.py")
cluster, simulated = sys.modules["pd_cluster"], sys.modules["pd_simulation"]
PD_MODELS, PdMachine, TurnShape = cluster.PD_MODELS, cluster.PdMachine, cluster.TurnShape

SMALL = cluster.PdModel(
    name="small", layers=10, kv_bytes_per_token=1000, local_token_flops=1000.0, spread_token_flops=1000.0,
    pair_flops=0.0, group_nodes=1, prefill_weight_bytes=0.0, decode_weight_bytes=0.0, prefill_step_s=0.5,
    decode_step_s=0.1, decode_request_s=0.01, decode_bytes_per_token=0.0,
)  # fmt: skip
ONE = PdMachine(
    devices=1, storage_nic_bytes_per_s=64_000.0, compute_nic_bytes_per_s=1e6, buffer_bytes=1e9,
    device_flops_per_s=1e6, efficiency=1.0, device_memory_bytes=1e9, memory_share=1.0, activation_bytes=1.0,
    collective_share=1e-9,
)  # fmt: skip
PAIR = cluster.PdCluster(prefill_nodes=1, decode_nodes=1, model=SMALL, machine=ONE)


def played(system: str, agents: Sequence[Any], on: Any = PAIR, arrivals_s: Sequence[float] = ()) -> Any:
    simulation = simulated.PdSimulation(
        on, simulated.PD_SYSTEMS[system], agents, list(arrivals_s), latencies_from_s=0.0
    )
    simulation.run()
    return simulation


def test_one_turn_by_hand_in_every_system() -> None:
    """1P1D, ten blocks hit, 100 tokens new, 11 written."""
    turn = TurnShape(hit_blocks=10, prompt_tokens=740, output_tokens=11, gap_s=0.0)
    # Ten blocks of 64,000 bytes: 10 s of the storage NIC. Compute: 0.5 s and 100 · 2,000 FLOPs, 0.2 s.
    # Copies beside it: 10 blocks twice out at 1 MB/s and 100 new tokens, 1.28 + 0.1 s, of which 0.63 s hide.
    first_s = 10.0 + 0.7 + (1.38 - 0.63)
    # Into the decode device 0.74 s; then ten steps of 0.1 + 0.01 s.
    after_s = 0.74 + 1.1
    for system in ("layerwise", "scheduling"):
        done = played(system, [(turn,)])
        assert done.latencies[0] == pytest.approx((first_s, 0.74 + 0.11, 0.11), abs=1e-6)
        assert done.now == pytest.approx(first_s + after_s, abs=1e-6)
    # Copies before and after: 0.64 s in, 0.74 s out.
    assert played("basic", [(turn,)]).now == pytest.approx(10 + 0.64 + 0.7 + 0.74 + after_s, abs=1e-6)
    assert played("oracle", [(turn,)]).now == pytest.approx(0.7 + 1.1, abs=1e-6)


shapes = st.lists(
    st.builds(
        TurnShape, st.integers(0, 8), st.integers(513, 900), st.integers(1, 40), st.sampled_from([0.0, 3.0])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=8), st.sampled_from(list(simulated.PD_SYSTEMS)), st.data())
def test_nothing_is_lost_and_no_nic_is_faster_than_it_can(
    agents: list[list[Any]], system: str, data: st.DataObject
) -> None:
    nodes = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    machine = replace(ONE, devices=data.draw(st.integers(1, 2)), device_memory_bytes=2.5e6, buffer_bytes=2e6)
    on = replace(PAIR, prefill_nodes=nodes[0], decode_nodes=nodes[1], machine=machine)
    done, again = (played(system, [tuple(turns) for turns in agents], on) for _ in range(2))
    assert done.turns == sum(len(turns) for turns in agents)
    assert (done.now, done.latencies) == (again.now, again.latencies)
    assert not any(device.requests or device.queue for device in done.decode_devices)
    assert not any(pool.queue or pool.free != pool.size for pool in (*done._buffers, *done._on_device))
    read = sum(sum(nic.blocks_in) for nic in done.nics)
    hits = 0 if system == "oracle" else sum(turn.hit_blocks for turns in agents for turn in turns)
    assert read == pytest.approx(hits)
    most = 1.000001 * simulated.WINDOW_S * done.nics[0].rate_blocks_per_s
    assert all(blocks <= most for nic in done.nics for blocks in nic.blocks_in)


@pytest.mark.parametrize(
    ("model", "published", "within"), [("qwen2.5-32b", (267, 117), 0.02), ("ds-660b", (36, 13), 0.2)]
)
def test_the_ratios_of_cache_to_compute_are_those_of_table_1(
    model: str, published: tuple[float, float], within: float
) -> None:
    """GB of cached KV per PFLOP at 64K and 16K; a turn of the 64K workload appends 429 tokens."""
    pd_model = PD_MODELS[model]
    found = [
        context * pd_model.kv_bytes_per_token / 1e9 / (pd_model.turn_flops(context, 429.0) / 1e15)
        for context in (64 * 1024, 16 * 1024)
    ]
    assert found == pytest.approx(published, rel=within)


def test_the_products_defaults_are_those_of_the_simulation() -> None:
    """Those of the gateway."""
    model = PD_MODELS["ds-660b"]
    rules, usual = PrefillDecodeRules(), cluster.PdCluster()
    assert (rules.short_queue_s, rules.most_tokens_s) == (usual.short_queue_s, usual.most_tokens_s)
    # 14,800 output tokens a second on a node of eight, at 21 a second for each of 88 users of a device.
    assert 8 * 88 / (model.decode_step_s + 88 * model.decode_request_s) == pytest.approx(14_800, rel=0.01)
