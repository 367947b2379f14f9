"""One program's life: every second is somewhere, in phases, as a Perfetto trace and as a turn ledger."""

from __future__ import annotations

import msgspec
import pytest
from simulator_run_logs import program_log, run_log, turn_log
from sojourn_server.cli.explain import turn_table
from sojourn_server.simulator.report.turn_phases import add_run, ledger, totals, turn_phases
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.traces.perfetto_trace import PerfettoTrace


def life(*, ended_s: float | None = 40.0, **turn: object) -> RunLog:
    """One program in 100 s: a turn, a tool of 5 s, another turn that ``turn`` changes."""
    first = turn_log(
        "p", 0, 10.0, 12.0, 15.0, 16.0, 20.0,
        prompt_tokens=200, output_tokens=4, computed_tokens=200, tool="[bold]bash", gap_s=5.0,
    )  # fmt: skip
    second = turn_log(
        "p", 1, 25.0, 25.0, 30.0, 32.0, 40.0,
        prompt_tokens=300, output_tokens=8, known_tokens=208, device_tokens=8, computed_tokens=292,
        regenerated={"evicted": 200},
    )  # fmt: skip
    turns = [first, msgspec.structs.replace(second, **turn)]
    return run_log(
        program_log("p", turns, arrived_s=10.0, finished_s=ended_s),
        program_log("p/sub", [], arrived_s=12.0, parent="p", turns_total=1),
    )


def test_a_life_counted_by_hand() -> None:
    run = life()
    assert totals(run.programs[0], 100.0) == {
        "held back": 2.0,
        "queued": 3.0 + 5.0,
        "prefill": 1.0 + 2.0,
        "decode": 4.0 + 8.0,
        "preempted": 0.0,
        "tools": 5.0,
    }
    lines = turn_table(ledger(run.programs[0], run.virtual_s)).splitlines()
    assert lines[0] == "finished after 30.0 s, 2 of 2 turns, context of 300 tokens"
    found = [" ".join(line.split()) for line in lines[-2:]]
    assert found[0].startswith("1 5.0s 2.0s 8.0s 300 8 200 evicted 200, [bold]bash 5.0s")
    assert found[1].startswith("0 5.0s 1.0s 4.0s 200 0 0")
    moved = turn_table(ledger(life(replica="r1").programs[0], run.virtual_s)).splitlines()[-2]
    assert "200 on r1, evicted 200" in " ".join(moved.split())
    never = turn_table(ledger(run.programs[1], run.virtual_s))
    assert never.startswith("unfinished after 88.0 s, 0 of 1 turns")


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("until_s", [2.6, 20.0, None])
@pytest.mark.parametrize("policy", ["stock", "lru-offload", "thunderagent", "mori"])
def test_every_second_of_every_program_is_in_exactly_one_span(policy: str, until_s: float | None) -> None:
    pytest.importorskip("vllm")
    from simulator_small_runs import SmallRun
    from simulator_small_workload import CROWDED_BLOCKS, crowded_workload

    run = SmallRun(policy, crowded_workload(59)[0], blocks=CROWDED_BLOCKS, until_s=until_s).log
    for program in run.programs:
        end_s = run.virtual_s if program.finished_s is None else program.finished_s
        at_s = program.turns[0].submitted_s
        for _, phases in turn_phases(program, run.virtual_s):
            for span in phases:
                assert span.start_s == at_s
                assert span.end_s >= span.start_s
                at_s = span.end_s
        assert at_s == end_s
        assert sum(totals(program, run.virtual_s).values()) == pytest.approx(end_s - program.arrived_s)


def test_a_turn_that_never_got_in_is_queued_or_held_back() -> None:
    waiting = {"admitted_s": None, "first_token_s": None, "finished_s": None, "regenerated": {}}
    queued = life(ended_s=None, **waiting)
    assert totals(queued.programs[0], 100.0)["queued"] == 3.0 + 75.0
    held = life(ended_s=None, **waiting, entered_s=None)
    assert totals(held.programs[0], 100.0)["held back"] == 2.0 + 75.0


def test_the_wait_after_a_preemption_is_neither_prefill_nor_decode() -> None:
    run = life(preempted_before_first_token_s=0.5, preempted_after_s=3.0, preemptions=2)
    sums = totals(run.programs[0], 100.0)
    # The first turn took 1 s of prefill and 4 of decode, the second 2 and 8.
    assert (sums["prefill"], sums["decode"], sums["preempted"]) == (2.5, 9.0, 3.5)
    stuck = life(ended_s=None, finished_s=None, preempted_after_s=60.0)
    assert totals(stuck.programs[0], 100.0)["preempted"] == 60.0


def test_a_run_has_phases_and_exact_tools() -> None:
    trace = PerfettoTrace()
    add_run(trace, life(), "stock")
    document = trace.document()
    slices = {
        (event["name"], event["ts"]): (event["dur"], event.get("args"))
        for event in document["traceEvents"]
        if event["ph"] == "X"
    }
    assert document["otherData"]["zero_s"] == 10.0
    assert slices["turn 0", 0.0][0] == 10e6
    assert slices["held back", 0.0] == (2e6, None)
    assert slices["decode", 6e6] == (4e6, None)
    assert slices["[bold]bash", 10e6] == (5e6, {"inferred": False})
    assert slices["turn 1", 15e6][1]["regenerated"] == {"evicted": 200}
