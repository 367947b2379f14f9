"""What is told of several replicas: the figures by hand, the tables, the command and what it keeps."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.testing
from cli_process import COLUMNS, run_sojourn
from rich.console import Console
from simulation_results import read_results
from simulator_run_logs import synthetic_run_log
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.simulator.report.program_explanation import explain_program
from sojourn_server.simulator.report.results_file import Provenance, document
from sojourn_server.simulator.report.results_table import render, title
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import WALL_CLOCK_FIELDS, RunRow
from sojourn_server.simulator.run_log import REPLICA_STEP_OFFSET, ProgramLog, ReplicaLog, RunLog, TurnLog
from sojourn_server.simulator.simulation_run import RunSpec, validate_specs
from sojourn_server.simulator.simulation_suite import read_sweep

SOJOURN = [sys.executable, "-c", "from sojourn_server.cli import main; main()"]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="simulate runs vLLM's scheduler")

# -- figures ----------------------------------------------------------------------------------------


def life(name: str, at: str, **more: Any) -> ProgramLog:
    """Turns of 100 tokens and 10 in answer, a second each, on the replicas whose numbers ``at`` lists; a
    dot is a turn that was promised one, and never began."""
    turns = []
    for number, place in enumerate(at):
        begun = place != "."
        turns.append(
            TurnLog(
                program_id=name,
                turn=number,
                submitted_s=float(number),
                entered_s=float(number),
                admitted_s=float(number) if begun else None,
                first_token_s=number + 0.5 if begun else None,
                finished_s=number + 1.0 if begun else None,
                prompt_tokens=100,
                output_tokens=10,
                computed_tokens=100,
                regenerated={"moved": 20} if begun and number and at[number - 1] != place else {},
                replica=f"r{place}" if begun else "r9",
            )
        )
    told: dict[str, Any] = {"trace_id": name, "arrived_s": 0.0, "turns_total": len(at), "turns": turns}
    return ProgramLog(program_id=name, **(told | more))


def log(
    *programs: ProgramLog, busy_s: tuple[float, ...] = (50.0, 80.0), policy: str = "random/stock"
) -> RunLog:
    return RunLog(
        policy=policy,
        programs_wanted=len(programs),
        hardware="h",
        model="m",
        trace="t",
        seed=0,
        loop="closed",
        pool_blocks=100,
        virtual_s=100.0,
        steps=30,
        busy_s=sum(busy_s) / len(busy_s),
        programs=list(programs),
        preemption_steps=[3, REPLICA_STEP_OFFSET + 5, REPLICA_STEP_OFFSET + 6],
        replicas=[ReplicaLog(replica=f"r{n}", steps=10 + n, busy_s=s) for n, s in enumerate(busy_s)],
        routes={"random": 9},
    )


def test_a_change_is_counted_where_turns_were_computed() -> None:
    row = summarize_run(log(life("a", "0110"), life("b", "000"), life("c", "1."), life("d", ".")))
    # Of a, b and c, of which something was computed; c was only promised another replica.
    assert row.replica_changes.programs_share == pytest.approx(1 / 3)
    assert row.replica_changes.per_program == pytest.approx(2 / 3)
    assert summarize_run(log(life("d", "."))).replica_changes is None


def test_utilisation_is_busy_time_over_all_time() -> None:
    row = summarize_run(log(life("a", "0"), busy_s=(50.0, 80.0, 20.0)))
    assert msgspec.to_builtins(row.utilisation) == {"min": 0.2, "mean": 0.5, "max": 0.8}
    assert row.device_busy_fraction == pytest.approx(0.5)
    assert row.replicas == 3


def test_each_replica_has_a_row() -> None:
    first, second = summarize_run(log(life("a", "0110"), life("b", "00"))).per_replica
    assert (first.replica, first.steps, first.busy_s) == ("r0", 10, 50.0)
    assert (first.turns, first.output_tokens, first.computed_tokens) == (4, 40, 400)
    assert first.regenerated_tokens == 20
    assert (second.replica, second.turns, second.regenerated_tokens) == ("r1", 2, 20)


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


def test_preemptions_of_two_replicas_are_no_cascade() -> None:
    row = summarize_run(log(life("a", "0")))
    assert (row.preemptions, row.cascades) == (3, 1)


def test_one_engine_by_itself_has_none_of_this() -> None:
    row = summarize_run(synthetic_run_log("stock", 3, virtual_s=300.0))
    assert row.replicas is None
    assert row.replica_changes is row.utilisation is row.slo_attainment is None
    assert row.per_replica == ()
    text = shown([row])
    assert "replica" not in text
    assert "moved" not in text


# -- tables -----------------------------------------------------------------------------------------


def shown(rows: list[RunRow]) -> str:
    console = Console(file=io.StringIO(), width=300, color_system=None)
    console.print(render(rows))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tables_tell_of_replicas_where_there_are_several() -> None:
    run = log(
        life("a", "0110", finished_s=4.0, expected_s=3.0),
        life("b", "000", finished_s=9.0, expected_s=3.0),
        policy="saga/saga",
    )
    other = log(
        life("a", "0000", finished_s=8.0), life("b", "000", finished_s=8.0), policy="prefix-affinity/stock"
    )
    rows = [summarize_run(run), summarize_run(other)]
    text = shown(rows)
    assert "2 programs at once, 2 replicas" in text
    assert "KV pool 1,600 tokens each" in text
    assert "times better than prefix-affinity/stock" in text
    for name in ("least used", "most used", "moved", "moves", "in time"):
        assert name in text
    lines = text.splitlines()
    place = {line.split()[0]: number for number, line in enumerate(lines) if line.strip()}
    # What others are compared with comes first, and has no factor.
    assert place["prefix-affinity/stock"] < place["saga/saga"]
    assert "×" not in lines[place["prefix-affinity/stock"]]
    assert "×" in lines[place["saga/saga"]]
    assert "N× times better than prefix-affinity/stock" in text


def test_nobody_is_compared_with_who_was_not_run() -> None:
    run = log(life("a", "0110", finished_s=4.0, expected_s=3.0), policy="saga/saga")
    other = log(life("a", "0000", finished_s=8.0), policy="round-robin/stock")
    of_one_engine = [
        summarize_run(synthetic_run_log(name, 3, virtual_s=300.0)) for name in ("infercept", "continuum")
    ]
    for rows in ([summarize_run(run), summarize_run(other)], of_one_engine):
        assert "times better" not in shown(rows)
        assert "* best of the policies; ≥ at least" in shown(rows)


def test_one_replica_behind_a_gateway_takes_no_columns() -> None:
    text = shown([summarize_run(log(life("a", "0", finished_s=2.0, expected_s=2.0), busy_s=(50.0,)))])
    assert "1 programs at once, 1 replica\n" in text or "1 replica ·" in text
    assert "moved" not in text
    assert "in time" not in text


def test_different_numbers_of_replicas_are_not_compared() -> None:
    two, three = log(life("a", "0")), log(life("a", "0"), busy_s=(1.0, 2.0, 3.0))
    assert summarize_run(two).workload != summarize_run(three).workload
    assert "replicas" not in title([summarize_run(two), summarize_run(three)])


def test_a_programs_life_names_its_replicas() -> None:
    console = Console(file=io.StringIO(), width=300, color_system=None)
    run = log(life("a", "011", finished_s=3.0))
    console.print(explain_program(run, run.programs[0]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "replica" in text
    assert "r1" in text
    assert "moved: it had been computed, but on another replica" in text


def test_results_are_read_back(tmp_path: Path) -> None:
    row = summarize_run(log(life("a", "0110", finished_s=4.0, expected_s=3.0, tenant="x")))
    plain = document([row], Provenance(command="c"))
    assert plain["runs"][0]["replica_changes"] == {"programs_share": 1.0, "per_program": 2.0}
    assert set(plain["runs"][0]["utilisation"]) == {"min", "mean", "max"}
    assert plain["runs"][0]["slo_attainment"] == {"overall": 1.0, "x": 1.0}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(plain))
    assert read_results(path).runs == [row]


# -- the benchmark's page ---------------------------------------------------------------------------


def test_the_benchmarks_page_has_a_line_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import cluster_simulation

    options = cluster_simulation.arguments(["--workloads", "synthetic:dualpath-32k", "--each", "2", "5"])
    specs = cluster_simulation.mori_specs(options)
    assert [spec.programs for spec in specs] == [6] * 4 + [15] * 4
    validate_specs(specs)
    validate_specs([cluster_simulation.scale_spec(options)])
    tenants = {
        *cluster_simulation.AT_MOST_POLICIES,
        *cluster_simulation.TENANT_POLICIES,
        *cluster_simulation.ENGINE_POLICIES,
    }
    validate_specs([cluster_simulation.tenant_spec(options, policy, 0.5) for policy in sorted(tenants)])

    runs = {
        policy: log(
            life("a", "0110", finished_s=4.0, expected_s=3.0, tenant="heavy-1"),
            life("b", "00", finished_s=9.0, expected_s=3.0, tenant="light-2"),
            policy=policy,
        )
        for policy in cluster_simulation.MORI_POLICIES
    }
    rows = [summarize_run(run) for run in runs.values()]
    lines = cluster_simulation.mori_section(rows)[-1].splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].count("+0%") == 2
    assert lines[3].count("+0%") == 1  # against the other baseline only
    assert "20.0%, 65.0%" not in lines[2]
    assert "50.0%, 65.0%" in lines[2]
    assert "50.0%; 1.00" in lines[2]
    text = "\n".join(cluster_simulation.tenant_section(rows, 0.8, 0.25))
    assert text.count("| 50.0% | 100.0% | – | 0.0% |") == len(rows)
    assert "0.25 programs a second" in text
    whole_text = "\n".join(cluster_simulation.at_most_section(rows))
    assert whole_text.count("| +0% |") == len(rows)
    assert cluster_simulation.rate_of(rows, 0.5) == pytest.approx(
        (rows[0].programs_per_hour or 0.0) / 7200, abs=1e-6
    )
    whole, part = "saga/saga", "saga-no-shares/saga"
    means = {whole: 10.0, part: 12.0}
    ablation = [msgspec.structs.replace(rows[0], policy=name) for name in (whole, part)]
    assert cluster_simulation._against_whole(part, means) == "+20%"
    assert cluster_simulation._against_whole(whole, means) == ""
    assert cluster_simulation._against_whole("saga/saga-no-ttl", means) == "", "its whole was not run"
    assert "| +0% |" in "\n".join(cluster_simulation.tenant_section(ablation, 0.8, 0.25))
    assert "2 replicas, 2 programs at once" in "\n".join(
        cluster_simulation.scale_section(msgspec.structs.replace(rows[0], wall_s=2.0))
    )
    cluster_simulation.draw({"mori": rows, "tenants": rows}, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


# -- the command ------------------------------------------------------------------------------------


def refused(*arguments: str) -> CliError:
    result = typer.testing.CliRunner().invoke(build_app(), ["simulate", *arguments])
    assert isinstance(result.exception, CliError), (result.output, result.exception)
    return result.exception


@needs_vllm
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("sagga/stock", "unknown routing 'sagga'"),
        ("random/stok", "unknown policy 'stok'"),
        ("saga,saga/saga", "saga and saga/saga would both be called 'saga/saga'; expected one of them"),
    ],
)
def test_a_policy_that_no_cluster_has_is_refused_before_anything_runs(policy: str, message: str) -> None:
    error = refused("synthetic:continuum-bfcl", "--replicas", "2", "--policy", policy)
    assert message in error.message
    assert error.next_step


@needs_vllm
def test_a_routing_needs_replicas() -> None:
    error = refused("synthetic:continuum-bfcl", "--policy", "saga/stock")
    assert error.message.startswith("saga/stock is a cluster's policy: it routes")
    error = refused("synthetic:continuum-bfcl", "--policy", "round-robin")
    assert error.message.startswith("round-robin is a cluster's policy")
    assert "expected --replicas" in error.message


@needs_vllm
@pytest.mark.parametrize("path", ["x/y.jsonl", "/tmp/y.jsonl", "./traces/y.jsonl"])
def test_a_path_is_no_routing(path: str) -> None:
    error = refused("synthetic:continuum-bfcl", "--policy", path)
    assert error.message.startswith(f"unknown policy {path!r}; expected one of")


@needs_vllm
def test_kept_runs_have_the_replicas_they_had(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    assert "--replicas has no effect on saved runs" in refused("--load", str(kept), "--replicas", "2").message


def test_replicas_are_swept_as_other_numbers_are() -> None:
    sweep = read_sweep("replicas=1,2,4")
    specs = sweep.specs([RunSpec(policy="saga", workload="w"), RunSpec(policy="stock", workload="w")])
    assert [(spec.policy, spec.replicas) for spec in specs] == [
        ("saga", 1), ("stock", 1), ("saga", 2), ("stock", 2), ("saga", 4), ("stock", 4),
    ]  # fmt: skip


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
    documents = []
    wide = {**os.environ, "COLUMNS": str(COLUMNS)}
    other = subprocess.run(
        [*SOJOURN, *command.split()], cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=500
    )
    for result in (other, run_sojourn(*command.split(), cwd=tmp_path)):
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        del document["made_with"]
        for run in document["runs"]:
            for field in WALL_CLOCK_FIELDS:
                del run[field]
        documents.append(document)
    assert documents[0] == documents[1]
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
