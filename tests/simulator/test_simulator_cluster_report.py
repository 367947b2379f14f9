"""What is told of several replicas: the figures by hand, the tables, the command and what it keeps."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_process import refused, run_sojourn
from simulator_run_logs import program_log, run_log, turn_log
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.run_log import ProgramLog, ReplicaLog, RunLog

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="simulate runs vLLM's scheduler")

# -- figures ----------------------------------------------------------------------------------------


def life(name: str, at: str, **more: Any) -> ProgramLog:
    """Turns of 100 tokens and 10 in answer, a second each, on the replicas whose numbers ``at`` lists; a
    dot is a turn that was promised one, and never began."""
    turns = []
    for number, place in enumerate(at):
        begun = place != "."
        turns.append(
            turn_log(
                name,
                number,
                *((float(number),) * (3 if begun else 2)),
                *((number + 0.5, number + 1.0) if begun else ()),
                prompt_tokens=100,
                output_tokens=10,
                computed_tokens=100,
                regenerated={"moved": 20} if begun and number and at[number - 1] != place else {},
                replica=f"r{place}" if begun else "r9",
            )
        )
    return program_log(name, turns, **more)


def log(*programs: ProgramLog, busy_s: tuple[float, ...] = (50.0, 80.0)) -> RunLog:
    return run_log(
        *programs,
        policy="random/stock",
        busy_s=sum(busy_s) / len(busy_s),
        replicas=[ReplicaLog(replica=f"r{n}", steps=10 + n, busy_s=s) for n, s in enumerate(busy_s)],
    )


def test_changes_utilisation_and_each_replicas_row_counted_by_hand() -> None:
    lives = life("a", "0110"), life("b", "000"), life("c", "1."), life("d", ".")
    row = summarize_run(log(*lives, busy_s=(50.0, 80.0, 20.0)))
    # Of a, b and c, of which something was computed; c was only promised another replica.
    assert row.replica_changes == pytest.approx({"programs_share": 1 / 3, "per_program": 2 / 3})
    assert row.utilisation == {"min": 0.2, "mean": 0.5, "max": 0.8}
    assert row.device_busy_fraction == pytest.approx(0.5)
    assert [
        (each.replica, each.steps, each.busy_s, each.turns, each.output_tokens, each.regenerated_tokens)
        for each in row.per_replica
    ] == [("r0", 10, 50.0, 5, 50, 20), ("r1", 11, 80.0, 3, 30, 20), ("r2", 12, 20.0, 0, 0, 0)]
    assert row.per_replica[0].computed_tokens == 500
    assert summarize_run(log(life("d", "."))).replica_changes is None


def test_in_time_is_by_tenant_and_who_may_still_be_in_time_does_not_count() -> None:
    row = summarize_run(
        log(
            life("a", "0", finished_s=10.0, expected_s=8.0, tenant="x"),
            life("b", "0", finished_s=13.0, expected_s=8.0, tenant="x"),
            life("c", "0", finished_s=12.0, expected_s=8.0, tenant="y"),
            life("d", "0", finished_s=30.0, expected_s=8.0),
            # The run ends after 100 s: one is late already, the other is not.
            life("e", "0", expected_s=60.0, tenant="y"),
            life("f", "0", expected_s=70.0, tenant="y"),
        )
    )
    assert row.slo_attainment == {"overall": 2 / 5, "x": 1 / 2, "y": 1 / 2}
    assert summarize_run(log(life("a", "0"))).slo_attainment is None


# -- tables -----------------------------------------------------------------------------------------


def test_policies_that_no_cluster_has_or_that_have_one_name_are_refused_before_anything_runs() -> None:
    for policy, message in (
        ("sagga/stock", "unknown routing 'sagga'"),
        ("saga,saga/saga", "saga and saga/saga would both be called 'saga/saga'; expected one of them"),
    ):
        error = refused("simulate", "synthetic:continuum-bfcl", "--replicas", "2", "--policy", policy)
        assert message in error.message


def turn(prompt: int) -> dict[str, Any]:
    tool = {"gap_s": 1.5, "gap_kind": "tool", "tools": [{"name": "bash", "cmd": "pytest", "s": 1.5}]}
    return {"prompt_tokens": prompt, "output_tokens": 20, **tool}


@needs_vllm
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_command_runs_several_replicas(tmp_path: Path) -> None:
    programs = [
        {
            "program_id": f"p{number}",
            "tenant": f"t{number % 2}",
            "turns": [turn(900 + 40 * number + 170 * step) for step in range(3)],
        }
        for number in range(4)
    ]
    (tmp_path / "mini.jsonl").write_text("".join(json.dumps(line) + "\n" for line in programs))
    command = (
        "simulate mini.jsonl --replicas 2 --programs 6 --hours 0.01 --pool-tokens 3000 "
        "--policy round-robin,saga,thunderagent-offload --json - --plot plots --save runs.json.gz "
        "--explain p0"
    )
    result = run_sojourn(*command.split(), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    runs = {run["policy"]: run for run in document["runs"]}
    assert list(runs) == ["round-robin/stock", "saga/saga", "thunderagent/thunderagent-offload"]
    for run in runs.values():
        assert run["replicas"] == 2
        assert run["programs_finished"] > 0
        assert set(run["slo_attainment"]) == {"overall", "t0", "t1"}
        assert [row["replica"] for row in run["per_replica"]] == ["r0", "r1"]
        assert 0 < run["utilisation"]["min"] <= run["utilisation"]["mean"] <= run["utilisation"]["max"] <= 1
    assert 0 < runs["round-robin/stock"]["replica_changes"]["programs_share"] <= 1
    assert runs["round-robin/stock"]["regenerated_by"]["moved"] > 0
    assert runs["saga/saga"]["routes"]["home"] > 0
    assert "2 replicas" in result.stderr
    assert "p0@0 under round-robin/stock" in result.stderr
    assert (tmp_path / "plots" / "metrics.png").exists()
    again = run_sojourn("simulate", "--load", "runs.json.gz", "--json", "-", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [run["per_replica"] for run in json.loads(again.stdout)["runs"]] == [
        run["per_replica"] for run in document["runs"]
    ]
