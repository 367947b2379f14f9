"""One program's life: every second is somewhere, and every lost token has a cause."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console
from simulator_run_logs import POLICY_BEHAVIORS, synthetic_run_log, turn_log
from sojourn_server.simulator.report.program_explanation import (
    CAUSES,
    explain_program,
    totals,
    turn_pairs,
    turn_phases,
    verdict,
)
from sojourn_server.simulator.run_log import ProgramLog, RunLog

RUNS = {name: synthetic_run_log(name, 6, virtual_s=900.0) for name in POLICY_BEHAVIORS}


def text_of(run: RunLog, program_id: str, width: int = 400) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    (program,) = (program for program in run.programs if program.program_id == program_id)
    console.print(explain_program(run, program))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


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
    program = ProgramLog(
        program_id="p",
        trace_id="t9",
        arrived_s=10.0,
        finished_s=ended_s,
        turns_total=2,
        turns=[first, msgspec.structs.replace(second, **turn)],
    )
    child = ProgramLog(
        program_id="p/sub", trace_id="t10", parent="p", arrived_s=12.0, turns_total=1, finished_s=None
    )
    return RunLog(
        policy="stock",
        programs_wanted=1,
        hardware="h",
        model="m",
        trace="t",
        seed=0,
        loop="closed",
        programs=[program, child],
        virtual_s=100.0,
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
    assert verdict(run, run.programs[0]) == (
        "finished after 30.0 s: held back 7 %, queued 27 %, prefill 10 %, decode 40 %, tools 17 %; "
        "of 492 tokens computed 200 were computed again (evicted 200), most at turn 1"
    )
    lines = text_of(run, "p").splitlines()
    assert lines[0] == "p under stock · plays t9 · arrived at 10.0 s · 2 turns · sub-agents: p/sub"
    found = [" ".join(line.split()) for line in lines]
    assert found[1] == "sent held back queued prefill decode prompt on device computed again why then"
    assert found[3] == "0 10.0 2.00 3.00 1.00 4.00 200 0 200 – all new [bold]bash 5.00"
    assert found[4] == "1 25.0 0.00 5.00 2.00 8.00 300 8 292 200 evicted 200 end"
    assert lines[5] == CAUSES["evicted"]


@pytest.mark.parametrize("name", POLICY_BEHAVIORS)
def test_every_second_of_every_program_is_in_exactly_one_span(name: str) -> None:
    run = RUNS[name]
    for program in run.programs:
        end_s = run.virtual_s if program.finished_s is None else program.finished_s
        at_s = program.turns[0].submitted_s
        for turn, next_turn in turn_pairs(program.turns):
            for span in turn_phases(program, turn, next_turn, run.virtual_s):
                assert span.start_s == at_s
                assert span.end_s >= span.start_s
                at_s = span.end_s
        assert at_s == end_s
        assert sum(totals(program, run.virtual_s).values()) == pytest.approx(end_s - program.arrived_s)


@pytest.mark.parametrize("name", POLICY_BEHAVIORS)
def test_every_verdict_adds_up(name: str) -> None:
    run = RUNS[name]
    for program in run.programs:
        text = verdict(run, program)
        percents = [int(found) for found in re.findall(r"(\d+) %", text)]
        # Each is rounded by itself.
        assert abs(sum(percents) - (100 if run.virtual_s > program.arrived_s else 0)) <= 3
        again = sum(turn.regenerated_tokens for turn in program.turns)
        assert (f" {again:,} were computed again" in text) == (again > 0)


@pytest.mark.parametrize(
    ("turn", "then", "last"),
    [
        ({"finished_s": None}, "≥68.0", "cut off by the run's end"),
        ({"finished_s": None, "first_token_s": None}, "≥70.0", "cut off by the run's end"),
        ({"finished_s": 40.0, "tool": "web"}, "8.00", "web ≥60.0"),
    ],
)
def test_what_the_runs_end_cut_off_had_lasted_at_least_so_long(
    turn: dict[str, object], then: str, last: str
) -> None:
    line = text_of(life(ended_s=None, **turn), "p").splitlines()[4]
    assert then in line.split()
    assert line.rstrip().endswith(last)


def test_a_turn_that_never_got_in_is_queued_or_held_back() -> None:
    waiting = {"admitted_s": None, "first_token_s": None, "finished_s": None, "regenerated": {}}
    queued = life(ended_s=None, **waiting)
    assert totals(queued.programs[0], 100.0)["queued"] == 3.0 + 75.0
    held = life(ended_s=None, **waiting, entered_s=None)
    assert totals(held.programs[0], 100.0)["held back"] == 2.0 + 75.0
    assert "never got blocks" in text_of(held, "p")


def test_the_wait_after_a_preemption_is_neither_prefill_nor_decode() -> None:
    run = life(preempted_before_first_token_s=0.5, preempted_after_s=3.0, preemptions=2)
    sums = totals(run.programs[0], 100.0)
    # The first turn took 1 s of prefill and 4 of decode, the second 2 and 8.
    assert (sums["prefill"], sums["decode"], sums["preempted"]) == (2.5, 9.0, 3.5)
    found = [" ".join(line.split()) for line in text_of(run, "p").splitlines()]
    assert any(line.startswith("1 25.0 0.00 5.00 1.50 5.00 3.50 300") for line in found), found
    stuck = life(ended_s=None, finished_s=None, preempted_after_s=60.0)
    assert totals(stuck.programs[0], 100.0)["preempted"] == 60.0
    assert "≥60.0" in text_of(stuck, "p")


def test_who_took_it_at_what_score_and_what_was_foreseen_are_told() -> None:
    run = life(evictor="q", evicted_score=(0.0, -0.3125), goes_on=0.75)
    assert "evicted 200 by q at score 0, -0.312" in text_of(run, "p")
    run.programs[0].turns[0].goes_on = 0.75
    assert "75% to go on" in text_of(run, "p")


def test_a_program_cut_short_and_one_that_never_sent_a_turn_say_so() -> None:
    run = life()
    run.programs[0].cut = True
    assert "(cut: its next turn would not have fitted)" in verdict(run, run.programs[0])
    assert verdict(run, run.programs[1]) == (
        "unfinished after 88.0 s, with 0 of 1 turns done: it never sent a turn"
    )
    assert "sub-agent of p" in text_of(run, "p/sub")
