"""The disk below host memory in virtual time: its lanes, what is found there again, who has one."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from simulator_small_runs import SmallRun
from simulator_small_workload import FlatLatency, small_workload, turns
from sojourn_server.kv_offload.offload_jobs import (
    BlockCopy,
    CopyResult,
    FileCopy,
    OffloadJobs,
    OffloadResults,
)
from sojourn_server.simulator import simulation_run
from sojourn_server.simulator.latency.latency_models import RooflineLatency
from sojourn_server.simulator.latency.latency_profiles import (
    load_hardware_profile,
    load_model_shape,
    shipped_profile_names,
)
from sojourn_server.simulator.simulation_run import RunSpec, SimulatorError, run_simulation, validate_specs
from sojourn_server.simulator.simulator_policies import find_policy
from sojourn_server.simulator.tier_transfers import TierTransfers
from sojourn_server.vllm.kv_connector import StepOrders

BLOCK_BYTES = 1_000_000
"""With ``FlatLatency`` a block takes 1 s to or from the device, 20 s to the disk and 10 s from it."""


def files(*keys: bytes) -> list[FileCopy]:
    return [FileCopy(slot, key) for slot, key in enumerate(keys)]


def orders(**jobs: Any) -> StepOrders[OffloadJobs]:
    return StepOrders(OffloadJobs(**jobs))


def told(copies: TierTransfers, now: float) -> OffloadResults | None:
    output = copies.get_finished(now)
    return None if output is None else output.kv_connector_worker_meta.results


# -- the lanes --------------------------------------------------------------------------------------


def test_each_direction_is_one_lane_first_come_first_served() -> None:
    copies = TierTransfers(FlatLatency(), BLOCK_BYTES)
    told(copies, 0.0)
    assert copies.begin_step(orders(spills=files(b"a", b"b")), 10.0) == 10.0, "no step waits for the disk"
    assert copies.next_done_s() == 50.0
    copies.begin_step(orders(spills=files(b"c")), 11.0)
    assert told(copies, 49.9) is None
    ended = told(copies, 70.0)  # the third behind the others
    assert ended is not None
    assert [*ended.spilled.items()] == [(key, CopyResult.MOVED) for key in (b"a", b"b", b"c")]
    # Another write is no hindrance to reads: that lane is free.
    copies.begin_step(orders(spills=files(b"d"), stages=files(b"a", b"b", b"c")), 80.0)
    read = told(copies, 100.0)
    assert read is not None
    assert read.staged == dict.fromkeys([b"a", b"b"], CopyResult.MOVED)
    assert read.spilled == {b"d": CopyResult.MOVED}
    assert copies.next_done_s() == 110.0
    last = told(copies, 110.0)
    assert last is not None
    assert last.staged == {b"c": CopyResult.MOVED}
    assert copies.next_done_s() == inf
    assert (copies.to_disk.moved_bytes, copies.from_disk.moved_bytes) == (4 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert (copies.to_host.moved_bytes, copies.to_device.moved_bytes) == (0, 0)


def test_what_a_step_saves_is_written_once_it_is_in_host_memory() -> None:
    copies = TierTransfers(FlatLatency(), BLOCK_BYTES)
    told(copies, 0.0)
    step = orders(saves=[BlockCopy(7, 0), BlockCopy(8, 1)], stores={1: [BlockCopy(9, 2)]}, spills=files(b"a"))
    assert copies.begin_step(step, 0.0) == 2.0
    assert copies.next_done_s() == 3.0  # the store; the spill is over later
    assert told(copies, 3.5).stored == {1: CopyResult.MOVED}  # type: ignore[union-attr]
    assert copies.next_done_s() == 22.0


# -- bandwidths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_profile_names("hardware"))
def test_the_disk_of_a_shipped_profile_is_one_drive_for_all_devices(name: str) -> None:
    hardware, model = load_hardware_profile(name), load_model_shape("llama-3.1-8b")
    assert {"disk_read_bytes_per_s", "disk_write_bytes_per_s"} <= set(hardware.estimates)
    for tp in (1, 2):
        roofline = RooflineLatency(hardware, model, tp)
        assert roofline.disk_s(6_500_000_000, to_disk=False) == 1.0
        assert roofline.disk_s(7_000_000_000, to_disk=True) == 2.0


# -- whole runs -------------------------------------------------------------------------------------


def again(made: SmallRun) -> int:
    return sum(turn.regenerated_tokens for turn in turns(made.log))


@pytest.mark.parametrize("policy", ["saga+host", "continuum+host"])
@pytest.mark.parametrize("programs", [12, 24])
def test_what_host_memory_loses_is_loaded_from_disk(policy: str, programs: int) -> None:
    loop = small_workload(seed=7, programs=programs)
    without, below = (
        SmallRun(policy, loop, host_blocks=24, disk_blocks=disk_blocks) for disk_blocks in (0, 400)
    )
    assert again(below) < again(without)
    counts = below.engine.scheduler.connector.planner.counts
    assert counts["staged"] > 0
    # In the small world a block counts as 64 bytes.
    assert below.log.copied_from_disk_bytes == 64 * counts["staged"]
    assert below.log.copied_to_disk_bytes >= 64 * counts["spilled"] > 0
    assert without.log.copied_to_disk_bytes == without.log.copied_from_disk_bytes == 0
    assert without.engine.scheduler.connector.planner.counts["dropped_on_disk"] == 0


TINY = RunSpec(
    policy="continuum+host",
    workload="synthetic:continuum-bfcl",
    programs=8,
    until_s=60.0,
    pool_tokens=8000,
    max_model_len=8000,
    cpu_ratio=0.25,
)


def test_the_ratio_is_of_the_devices_memory() -> None:
    log = run_simulation(replace(TINY, disk_ratio=4.0))
    assert (log.host_blocks, log.disk_blocks) == (125, 2000)
    assert log.copied_to_disk_bytes > log.copied_from_disk_bytes > 0
    assert log.copied_to_disk_bytes % (16 * 131_072) == 0
    assert log.hook_failures == 0
    plain = run_simulation(replace(TINY, policy="continuum", disk_ratio=4.0))
    assert (plain.host_blocks, plain.disk_blocks, plain.copied_to_disk_bytes) == (0, 0, 0)


def test_a_bound_whose_memory_fills_up_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_simulation(replace(TINY, policy="unlimited")).notes == []
    monkeypatch.setattr(simulation_run, "UNBOUNDED_HOST_TOKENS", 16)
    [note] = run_simulation(replace(TINY, policy="unlimited")).notes
    assert "unlimited is no bound here: its memory filled up" in note


# -- who has one ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policies", "ratios", "message"),
    [
        ("stock,lru-offload", (1.0, 4.0), "none of stock, lru-offload has a disk; expected a policy with"),
        ("stock,mori", (0.0, 4.0), "mori: disk_ratio is 4 and cpu_ratio 0, no host memory; expected some"),
        ("mori", (1.0, 1e-9), "disk_ratio is 1e-09, less than one block"),
        ("mori", (1.0, inf), "disk_ratio is inf; expected a number ≥ 0"),
    ],
)
def test_a_disk_that_cannot_be_is_refused(policies: str, ratios: tuple[float, float], message: str) -> None:
    specs = [
        RunSpec(policy=policy, workload=TINY.workload, cpu_ratio=ratios[0], disk_ratio=ratios[1])
        for policy in policies.split(",")
    ]
    with pytest.raises(SimulatorError) as error:
        validate_specs(specs)
    assert message in str(error.value)
    if find_policy(specs[-1].policy).own_tiers:
        with pytest.raises(SimulatorError):
            run_simulation(specs[-1])
