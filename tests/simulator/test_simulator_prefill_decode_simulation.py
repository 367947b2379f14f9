"""The simulated cluster: a turn by hand, nothing lost, the same again, and never faster than its links."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS
from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import (
    PD_MODELS,
    PdCluster,
    PdMachine,
    PdModel,
)
from sojourn_server.simulator.prefill_decode.prefill_decode_simulation import PdSimulation
from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS
from sojourn_server.simulator.prefill_decode.trajectories import Trajectory, TurnShape

SMALL = PdModel(
    name="small", title="a model for sums in the head", layers=10, kv_bytes_per_token=1000,
    local_token_flops=1000.0, spread_token_flops=1000.0, pair_flops=0.0, group_nodes=1,
    prefill_weight_bytes=0.0, decode_weight_bytes=0.0, prefill_step_s=0.5, decode_step_s=0.1,
    decode_request_s=0.01, decode_bytes_per_token=0.0,
)  # fmt: skip
ONE = PdMachine(
    devices=1, storage_nic_bytes_per_s=64_000.0, compute_nic_bytes_per_s=1e6, buffer_bytes=1e9,
    device_flops_per_s=1e6, efficiency=1.0, device_memory_bytes=1e9, memory_share=1.0, activation_bytes=1.0,
    collective_share=1e-9,
)  # fmt: skip
PAIR = PdCluster(prefill_nodes=1, decode_nodes=1, model=SMALL, machine=ONE)


def played(system: str, agents: list[Trajectory], cluster: PdCluster = PAIR) -> PdSimulation:
    simulation = PdSimulation(cluster, PD_SYSTEMS[system], agents, latencies_from_s=0.0)
    simulation.run()
    return simulation


def test_one_turn_layer_by_layer_by_hand() -> None:
    """1P1D, ten blocks hit, 100 tokens new, 11 written."""
    turn = TurnShape(hit_blocks=10, prompt_tokens=740, output_tokens=11, gap_s=0.0)
    # Ten blocks of 64,000 bytes: 10 s of the storage NIC. Compute: 0.5 s and 100 · 2,000 FLOPs, 0.2 s.
    # Copies beside it: 10 blocks twice out at 1 MB/s and 100 new tokens, 1.28 + 0.1 s, of which 0.63 s hide.
    first_s = 10.0 + 0.7 + (1.38 - 0.63)
    # Into the decode device 0.74 s; then ten steps of 0.1 + 0.01 s.
    for system in ("layerwise", "scheduling"):
        done = played(system, [(turn,)])
        assert done.latencies is not None
        assert done.latencies.first_token_s[0] == pytest.approx(first_s, abs=1e-6)
        assert done.latencies.second_token_s[0] == pytest.approx(0.74 + 0.11, abs=1e-6)
        assert done.latencies.per_token_s[0] == pytest.approx(0.11, abs=1e-6)
        assert done.now == pytest.approx(first_s + 0.74 + 1.1, abs=1e-6)


def test_the_same_turn_in_the_other_systems() -> None:
    turn = TurnShape(hit_blocks=10, prompt_tokens=740, output_tokens=11, gap_s=0.0)
    after_s = 0.74 + 1.1
    # Copies before and after: 0.64 s in, 0.74 s out.
    assert played("basic", [(turn,)]).now == pytest.approx(10 + 0.64 + 0.7 + 0.74 + after_s, abs=1e-6)
    # Half a read each; out of the NIC go five blocks twice, into it ten.
    copies_s = 0.64 + 0.1
    assert played("split", [(turn,)]).now == pytest.approx(
        5 + 0.7 + max(0.0, copies_s - 0.63) + after_s, abs=1e-6
    )
    assert played("oracle", [(turn,)]).now == pytest.approx(0.7 + 1.1, abs=1e-6)


def test_two_nics_read_for_two_agents() -> None:
    turn = TurnShape(hit_blocks=10, prompt_tokens=641, output_tokens=1, gap_s=0.0)
    agents: list[Trajectory] = [(turn,)] * 2
    one, both = played("layerwise", agents), played("scheduling", agents)
    assert [nic.blocks for nic in one.nics] == [20, 0]
    assert [nic.blocks for nic in both.nics] == [10, 10]
    assert one.now > 20 > both.now > 10


def test_a_quota_cuts_a_long_prompt_into_steps() -> None:
    turn = TurnShape(hit_blocks=0, prompt_tokens=1000, output_tokens=1, gap_s=0.0)
    done = played("scheduling", [(turn,)])
    # 300 ms of a millisecond a token are four blocks; 256 + 256 + 256 + 232.
    assert done.groups[0].steps == 4
    assert done.groups[0].tokens == 1000
    by_tokens = played("scheduling", [(turn,)], replace(PAIR, step_tokens=500))
    assert by_tokens.groups[0].steps == 2


def test_gaps_and_arrivals_take_time() -> None:
    turns = (TurnShape(0, 64, 1, 5.0), TurnShape(1, 128, 1, 0.0))
    at_once = PdSimulation(PAIR, PD_SYSTEMS["oracle"], [turns])
    at_once.run()
    later = PdSimulation(PAIR, PD_SYSTEMS["oracle"], [turns], [100.0])
    later.run()
    assert at_once.now > 5.0
    assert later.now == pytest.approx(at_once.now + 100.0)
    assert later.turns == 2


def test_engines_that_fetch_assign_requests_between_their_steps() -> None:
    """A computes from 0.0 to 0.7 s. B arrives at 0.1 s; its read of 2 s begins then, or after A's step."""
    agents: list[Trajectory] = [(TurnShape(0, 100, 2, 0.0),), (TurnShape(2, 228, 2, 0.0),)]
    first_s = []
    for fetches in (False, True):
        cluster = replace(PAIR, fetch_between_steps=fetches)
        done = PdSimulation(cluster, PD_SYSTEMS["scheduling"], agents, [0.0, 0.1], latencies_from_s=0.0)
        done.run()
        assert done.turns == 2
        assert done.latencies is not None
        first_s.append(sorted(done.latencies.first_token_s))
    assert first_s[1][0] == first_s[0][0]
    assert first_s[1][1] - first_s[0][1] == pytest.approx(0.6, abs=1e-6)


def test_agents_come_in_any_order() -> None:
    agents: list[Trajectory] = [(TurnShape(0, 640, 20, 0.0),), (TurnShape(2, 200, 5, 0.0),)] * 2
    at_s = [7.0, 1.0, 30.0, 1.0]
    told = PdSimulation(PAIR, PD_SYSTEMS["scheduling"], agents, at_s, latencies_from_s=0.0)
    told.run()
    order = sorted(range(4), key=lambda agent: at_s[agent])
    in_order = PdSimulation(
        PAIR, PD_SYSTEMS["scheduling"], [agents[agent] for agent in order], sorted(at_s), latencies_from_s=0.0
    )
    in_order.run()
    assert told.finished_s == in_order.finished_s
    assert told.now > 30.0


@pytest.mark.parametrize("system", ["basic", "scheduling"])
def test_who_waits_in_line_is_not_among_the_events(system: str) -> None:
    """What a heap of all reads costs grows with the agents; NICs and devices are what it is to grow with."""
    agents: list[Trajectory] = [(TurnShape(10, 741, 20, 0.0),)] * 500
    machine = replace(ONE, devices=2, device_memory_bytes=1e9)
    busy = PdSimulation(
        replace(PAIR, machine=machine, most_tokens_s=1e6), PD_SYSTEMS[system], agents, [0.0] * len(agents)
    )
    busy.run(until_s=0.0)
    assert sum(len(nic.queue) for nic in busy.nics) == len(agents)
    assert len(busy._queue._events) <= len(busy.nics)
    busy.run()
    assert busy.turns == len(agents)


def test_only_the_oracle_of_lengths_is_given_them() -> None:
    """Two workloads whose outputs differ, with the same longest output and context: what a router sees of
    their first turns is the same."""
    short: list[Trajectory] = [(TurnShape(0, 640, 5, 0.0), TurnShape(10, 700, 60, 0.0))]
    long: list[Trajectory] = [(TurnShape(0, 640, 60, 0.0), TurnShape(10, 700, 60, 0.0))]
    for system in PD_SYSTEMS.values():
        seen = []
        for agents in (short, long):
            simulation = PdSimulation(PAIR, system, agents)
            submit, told = simulation.pairs.submit, []
            simulation.pairs.submit = lambda request, submit=submit, told=told: (  # type: ignore[method-assign]
                told.append(request),
                submit(request),
            )[1]
            simulation.run()
            seen.append(told)
        assert (seen[0] == seen[1]) == (system.name != "oracle-lengths")


def test_a_shared_lane_costs_steps_time() -> None:
    agents: list[Trajectory] = [(TurnShape(100, 6401, 20, 0.0),) * 3] * 8
    machine = replace(ONE, collective_share=0.3, storage_nic_bytes_per_s=1e9, compute_nic_bytes_per_s=1e8)
    own = replace(PAIR, machine=machine)
    shared = replace(own, isolated=False)
    assert played("scheduling", agents, shared).now > played("scheduling", agents, own).now
    assert played("oracle", agents, shared).now == played("oracle", agents, own).now


turns = st.builds(
    lambda hit, new, output, gap: TurnShape(hit, hit * FULL_BLOCK_TOKENS + new, output, gap),
    st.integers(0, 40),
    st.integers(1, 900),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.0, 3.0]),
)
fleets = st.lists(st.lists(turns, min_size=1, max_size=5).map(tuple), min_size=1, max_size=12)


@settings(max_examples=60)
@given(fleets, st.sampled_from(sorted(PD_SYSTEMS)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_nothing_is_lost_and_the_same_happens_again(
    agents: list[Trajectory], system: str, prefill: int, decode: int, devices: int
) -> None:
    # Memory and buffers for a few requests only, so that there are lines everywhere.
    machine = replace(ONE, devices=devices, buffer_bytes=3e6, device_memory_bytes=4.5e6)
    cluster = replace(PAIR, prefill_nodes=prefill, decode_nodes=decode, machine=machine)
    done = played(system, agents, cluster)
    every = [turn for agent in agents for turn in agent]
    assert done.turns == len(every)
    assert done.finished_agents == len(done.finished_s) == len(agents)
    assert done.prompt_tokens == sum(turn.prompt_tokens for turn in every)
    assert done.output_tokens == sum(turn.output_tokens for turn in every)
    computed = sum(turn.prompt_tokens - turn.hit_blocks * FULL_BLOCK_TOKENS for turn in every)
    assert sum(group.tokens for group in done.groups) == computed
    hits = sum(turn.hit_blocks for turn in every)
    read = sum(nic.blocks for nic in done.nics)
    assert read == (0 if system == "oracle" else hits)
    assert sum(sum(nic.blocks_in) for nic in done.nics) == pytest.approx(read, abs=1e-6)
    if system in ("basic", "layerwise"):
        assert not any(nic.blocks for nic in done.nics[prefill:])

    # All memory is free again.
    assert all(space.free == space.size and not space.queue for space in done._buffers + done._on_device)
    assert all(d.free_kv_tokens == d.kv_tokens and not d.queue and not d.ends for d in done.decode_devices)
    assert done.latencies is not None
    assert all(seconds >= 0 for seconds in done.latencies.first_token_s)
    again = played(system, agents, cluster)
    assert (again.now, again.finished_s, again.events) == (done.now, done.finished_s, done.events)


@settings(max_examples=40)
@given(fleets, st.integers(1, 3), st.integers(1, 3))
def test_no_system_beats_its_links(agents: list[Trajectory], prefill: int, decode: int) -> None:
    cluster = replace(PAIR, prefill_nodes=prefill, decode_nodes=decode)
    hits = sum(turn.hit_blocks for agent in agents for turn in agent)
    for system, nics in (
        ("layerwise", prefill),
        ("scheduling", prefill + decode),
        ("split", prefill + decode),
    ):
        assert played(system, agents, cluster).now >= hits / nics  # a block a second and NIC


@pytest.mark.parametrize("system", ["basic", "scheduling"])
def test_an_agent_that_fits_no_decode_device_is_an_error_not_an_endless_wait(system: str) -> None:
    turn = TurnShape(hit_blocks=0, prompt_tokens=1_000_000_000, output_tokens=1, gap_s=0.0)
    with pytest.raises(ValueError, match="the capacity of the largest decode engine"):
        played(system, [(turn,)])


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="no agents"):
        PdSimulation(PAIR, PD_SYSTEMS["basic"], [])
    with pytest.raises(ValueError, match="1 arrivals for 2 agents"):
        PdSimulation(PAIR, PD_SYSTEMS["basic"], [(TurnShape(0, 1, 1, 0.0),)] * 2, [0.0])
    with pytest.raises(ValueError, match="expected one at least"):
        replace(PAIR, prefill_nodes=0)
    with pytest.raises(ValueError, match="step_tokens is 0"):
        replace(PAIR, step_tokens=0)
    with pytest.raises(ValueError, match="quota_s is nan"):
        replace(PAIR, quota_s=math.nan)
    with pytest.raises(ValueError, match="expected room for a token at least"):
        PdCluster(
            prefill_nodes=1, decode_nodes=1, model=PD_MODELS["qwen2.5-32b"],
            machine=PdMachine(device_memory_bytes=60e9),
        )  # fmt: skip
