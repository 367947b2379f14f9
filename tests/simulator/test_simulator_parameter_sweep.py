"""Sweeps: what can be swept, what is run, and the table with a line for each value and policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from simulation_results import read_results
from simulator_run_logs import rendered, small_run
from sojourn_server.simulator.parameter_sweep import SWEEP_FIELDS, SweepError, read_sweep
from sojourn_server.simulator.report.plot import write_plot
from sojourn_server.simulator.report.results_file import Provenance, document
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.simulator.simulator_policies import PolicyError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cpu_ratio= 4 , .5 ,0", (4.0, 0.5, 0.0)),
        ("cpu_ratio=-0", (0.0,)),
        ("programs=20,10", (20, 10)),
        ("rate_per_s=0.1,2e-1", (0.1, 0.2)),
    ],
)
def test_names_and_values_in_the_order_named(text: str, values: tuple[float, ...]) -> None:
    sweep = read_sweep(text)
    assert (sweep.field, sweep.values) == (text.split("=")[0], values)
    assert "-" not in str(sweep.values)
    assert all(type(value) is SWEEP_FIELDS[sweep.field][1] for value in sweep.values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu-ratio=1", "cannot sweep 'cpu-ratio'; expected one of cpu_ratio, disk_ratio, pool_tokens"),
        ("seed=1,2", "cannot sweep 'seed'; expected one of cpu_ratio"),
        ("cpu_ratio=0,,1", "'' is not a finite number of 0 or more"),
        ("cpu_ratio=0,-1", "'-1' is not a finite number of 0 or more"),
        ("cpu_ratio=1,inf", "'inf' is not a finite number"),
        ("cpu_ratio=1,2,1.0", "'1.0' is not a finite number of 0 or more, each once"),
        ("programs=2.5", "'2.5' is not a whole number above 0"),
        ("rate_per_s=0", "'0' is not a finite number above 0"),
    ],
)
def test_what_cannot_be_swept_is_told_with_what_can(text: str, message: str) -> None:
    with pytest.raises(SweepError) as error:
        read_sweep(text)
    assert message in str(error.value)


def specs(*policies: str) -> list[RunSpec]:
    return [RunSpec(policy=name, workload="synthetic:continuum-bfcl", programs=7) for name in policies]


def test_every_policy_is_there_at_every_value_and_run_once_where_the_value_is_nothing_to_it() -> None:
    kinds = {field.name: field.type for field in dataclasses.fields(RunSpec)}
    for name, (_, kind, _) in SWEEP_FIELDS.items():
        assert kinds[name].removesuffix(" | None") == kind.__name__
    swept = read_sweep("pool_tokens=4000,2000").specs(specs("stock", "admit"))
    assert [(spec.pool_tokens, spec.policy) for spec in swept] == [
        (4000, "stock"), (4000, "admit"), (2000, "stock"), (2000, "admit"),
    ]  # fmt: skip
    swept = read_sweep("cpu_ratio=0,1,2").specs(specs("stock", "continuum+host", "free-io"))
    assert [spec.cpu_ratio for spec in swept] == [0, 0, 0, 0, 1, 0, 0, 2, 0]
    swept = read_sweep("disk_ratio=0,4").specs(specs("stock", "lru-offload", "continuum+host", "mori"))
    assert [spec.disk_ratio for spec in swept] == [0, 0, 0, 0, 0, 0, 4, 4]
    with pytest.raises(SweepError, match=r"cpu_ratio changes nothing for stock, free-io; expected a policy"):
        read_sweep("cpu_ratio=0,1").specs(specs("stock", "free-io"))
    with pytest.raises(PolicyError, match="did you mean 'continuum'"):
        read_sweep("cpu_ratio=0,1").specs(specs("contnuum"))


def named(row: RunRow, policy: str, **changes: object) -> RunRow:
    return msgspec.structs.replace(row, policy=policy, **changes)


STOCK = summarize_run(small_run())
OFFLOAD = named(STOCK, "lru-offload", host_blocks=100, output_tok_per_s=2.5)
ROWS = [
    STOCK, named(STOCK, "lru-offload"), STOCK, OFFLOAD, STOCK, named(OFFLOAD, "lru-offload", host_blocks=200)
]  # fmt: skip


SWEEP = read_sweep("cpu_ratio=0,1,2")


def test_rows_belong_to_values(tmp_path: Path) -> None:
    assert SWEEP.groups(ROWS) == [ROWS[:2], ROWS[2:4], ROWS[4:]]
    path = tmp_path / "out.json"
    path.write_bytes(msgspec.json.encode(document(ROWS, Provenance(command="sojourn simulate"), SWEEP)))
    found = read_results(path)
    assert (found.sweep, found.runs) == (SWEEP, ROWS)


def test_a_line_a_value_and_policy_compared_at_the_same_value() -> None:
    lines = rendered(ROWS, 300, SWEEP).splitlines()
    shown = [line.split()[:3] for line in lines if "stock " in line or "lru-offload " in line]
    assert shown == [
        ["0", "stock", "–"], ["0", "lru-offload", "–"], ["1", "stock", "–"],
        ["1", "lru-offload", "1,600"], ["2", "stock", "–"], ["2", "lru-offload", "3,200"],
    ]  # fmt: skip
    assert "2.50×" in next(line for line in lines if line.split()[:2] == ["1", "lru-offload"])
    assert "…" not in rendered(ROWS, 80, SWEEP).split("* best of")[0]


@pytest.mark.slow
def test_the_plot_has_a_line_a_policy_and_the_same_bytes_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = (write_plot(ROWS, tmp_path / name, SWEEP) for name in ("a", "b"))
    assert [path.name for path in first] == ["metrics.png", "metrics.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG\r\n")
    drawn = first[1].read_text()
    for text in ("lru-offload", "host memory", "output throughput, tokens/s", "P95, est. of all"):
        assert text in drawn
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    loads = [named(row, row.policy, programs=programs) for programs in (20, 40) for row in (STOCK, OFFLOAD)]
    assert "programs at once" in write_plot(loads, tmp_path / "c")[1].read_text()
    unmeasured = named(STOCK, "b", ttft_s=msgspec.structs.replace(STOCK.ttft_s, mean=None))
    assert len(write_plot([STOCK, unmeasured], tmp_path / "d")) == 2
