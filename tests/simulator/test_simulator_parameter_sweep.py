"""A sweep: what is asked for is understood or refused, planned once a run, and told by value."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from simulator_run_logs import BLOCK, HOST_BLOCKS, synthetic_run_log
from sojourn_server.simulator.latency.latency_profiles import LatencyProfileError
from sojourn_server.simulator.parameter_sweep import (
    SWEEP_PARAMETERS,
    SweepError,
    kv_bytes_per_token,
    read_sweep,
)
from sojourn_server.simulator.report.comparison_plots import P95, THROUGHPUT, metric_value
from sojourn_server.simulator.report.plot_files import plot_sweep, write_sweep_plot
from sojourn_server.simulator.report.plot_styles import styles_by_policy
from sojourn_server.simulator.report.results_file import Provenance, document, read_results
from sojourn_server.simulator.report.run_metrics import bound_row, summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.report.sweep_results import SweepRuns, render_sweep, sweep_runs
from sojourn_server.simulator.run_cache import RunCache, RunOutcome
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.simulator.simulation_suite import planned_runs
from sojourn_server.simulator.simulator_policies import PolicyError

# -- what is asked for ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cpu_ratio=0,1,2,4", (0.0, 1.0, 2.0, 4.0)),
        ("cpu_ratio= 4 , .5 ", (4.0, 0.5)),
        ("cpu_ratio=-0", (0.0,)),
        ("pool_tokens=20000", (20_000,)),
        ("programs=20,10", (20, 10)),
        ("rate_per_s=0.1,2e-1", (0.1, 0.2)),
        ("tp=1,2", (1, 2)),
        ("replicas=1,4", (1, 4)),
    ],
)
def test_names_and_values_in_the_order_named(text: str, values: tuple[float, ...]) -> None:
    sweep = read_sweep(text)
    assert (sweep.field.name, sweep.values) == (text.split("=")[0], values)
    assert "-" not in str(sweep.values)
    assert all(isinstance(value, int if sweep.field.whole else float) for value in sweep.values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cpu-ratio=1",
            "cpu-ratio=1: cannot sweep 'cpu-ratio'; expected one of cpu_ratio, disk_ratio, "
            "pool_tokens, programs, rate_per_s, tp, replicas; did you mean 'cpu_ratio'?",
        ),
        ("seed=1,2", "cannot sweep 'seed'; expected one of cpu_ratio"),
        ("", "cannot sweep ''"),
        ("cpu_ratio", "cpu_ratio: no values; expected cpu_ratio=V1,V2,…"),
        ("cpu_ratio=", "cpu_ratio=: '' is not a finite number of 0 or more"),
        ("cpu_ratio=0,,1", "'' is not a finite number of 0 or more"),
        ("cpu_ratio=0,two", "'two' is not a finite number of 0 or more"),
        ("cpu_ratio=0,-1", "'-1' is not a finite number of 0 or more"),
        ("cpu_ratio=nan", "'nan' is not a finite number"),
        ("cpu_ratio=1" + "0" * 400, "is not a finite number"),
        ("cpu_ratio=1,inf", "'inf' is not a finite number"),
        ("cpu_ratio=1,2,1.0", "'1.0' is repeated"),
        ("cpu_ratio=0,-0", "'-0' is repeated"),
        ("programs=2.5", "'2.5' is not a whole number above 0"),
        ("programs=0,1", "'0' is not a whole number above 0"),
        ("pool_tokens=1e5", "'1e5' is not a whole number above 0"),
        ("rate_per_s=0", "'0' is not a finite number above 0"),
        ("tp=-2", "'-2' is not a whole number above 0"),
    ],
)
def test_what_cannot_be_swept_is_told_with_what_can(text: str, message: str) -> None:
    with pytest.raises(SweepError) as error:
        read_sweep(text)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{text}: ")


def test_the_fields_are_numbers_of_a_run() -> None:
    kinds = {field.name: field.type for field in dataclasses.fields(RunSpec)}
    for name, field in SWEEP_PARAMETERS.items():
        assert field.name == name
        assert kinds[name] in (("int", "int | None") if field.whole else ("float", "float | None"))


# -- what is run ------------------------------------------------------------------------------------


def specs(*policies: str) -> list[RunSpec]:
    return [RunSpec(policy=name, workload="synthetic:continuum-bfcl", programs=7) for name in policies]


def test_every_policy_is_there_at_every_value() -> None:
    swept = read_sweep("pool_tokens=4000,2000").specs(specs("stock", "admit"))
    assert [(spec.pool_tokens, spec.policy) for spec in swept] == [
        (4000, "stock"), (4000, "admit"), (2000, "stock"), (2000, "admit"),
    ]  # fmt: skip
    assert {spec.programs for spec in swept} == {7}
    assert len(planned_runs(swept)) == 4


def test_who_has_no_host_memory_is_run_once_whatever_it_costs() -> None:
    """The specification is the same, and so is what the suite gives for it."""
    swept = read_sweep("cpu_ratio=0,1,2").specs(specs("stock", "continuum+host", "free-io", "belady"))
    assert [spec.cpu_ratio for spec in swept] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0]
    planned = [(spec.policy, spec.cpu_ratio) for spec in planned_runs(swept)]
    assert planned == [
        ("stock", 0), ("continuum+host", 0), ("free-io", 0), ("continuum+host", 1), ("continuum+host", 2),
    ]  # fmt: skip


def test_only_who_has_tiers_of_ours_has_a_disk_to_sweep() -> None:
    swept = read_sweep("disk_ratio=0,4").specs(specs("stock", "lru-offload", "continuum+host", "mori"))
    assert [spec.disk_ratio for spec in swept] == [0, 0, 0, 0, 0, 0, 4, 4]
    assert {spec.cpu_ratio for spec in swept} == {1}
    assert len(planned_runs(swept)) == 6
    with pytest.raises(SweepError, match=r"disk_ratio changes nothing for stock, lru-offload; .* or mori"):
        read_sweep("disk_ratio=0,4").specs(specs("stock", "lru-offload"))


def test_a_sweep_without_any_effect_is_refused() -> None:
    with pytest.raises(SweepError, match=r"cpu_ratio changes nothing for stock, free-io; expected a policy"):
        read_sweep("cpu_ratio=0,1").specs(specs("stock", "free-io"))
    with pytest.raises(PolicyError, match="did you mean 'continuum'"):
        read_sweep("cpu_ratio=0,1").specs(specs("contnuum"))


def test_runs_are_called_by_their_value() -> None:
    sweep = read_sweep("cpu_ratio=0.5,2")
    assert [sweep.label(spec) for spec in sweep.specs(specs("stock", "lru-offload"))] == [
        "stock", "lru-offload @ cpu_ratio 0.5", "stock", "lru-offload @ cpu_ratio 2",
    ]  # fmt: skip


def test_kept_runs_tell_the_values_apart(tmp_path: Path) -> None:
    kept = RunCache(tmp_path, code="any")
    one, two = read_sweep("cpu_ratio=1,2").specs(specs("lru-offload"))
    outcome = RunOutcome(log=synthetic_run_log("lru-offload", 2, virtual_s=60.0))
    kept.put(one, outcome)
    assert kept.get(one) == outcome
    assert kept.get(two) is None
    kept.put(two, RunOutcome(log=synthetic_run_log("stock", 2, virtual_s=60.0)))
    assert kept.get(one) == outcome


def test_the_size_of_a_token() -> None:
    (spec,) = specs("stock")
    assert kv_bytes_per_token(spec) == 131_072
    both = dataclasses.replace(spec, model="qwen2.5-32b", hardware="h100", tp=2)
    assert kv_bytes_per_token(both) == 262_144
    with pytest.raises(LatencyProfileError, match="unknown hardware"):
        kv_bytes_per_token(dataclasses.replace(spec, hardware="h10"))


# -- what is told -----------------------------------------------------------------------------------

STOCK = summarize_run(synthetic_run_log("stock", 4, virtual_s=600.0))
OFFLOAD = summarize_run(synthetic_run_log("lru-offload", 4, virtual_s=600.0))
MORE = summarize_run(synthetic_run_log("mori", 4, virtual_s=600.0))


def named(row: RunRow, policy: str, **changes: object) -> RunRow:
    return msgspec.structs.replace(row, policy=policy, **changes)


ROWS = [
    STOCK, named(STOCK, "lru-offload"), bound_row(STOCK, "belady", regenerated_tokens=9),
    STOCK, OFFLOAD, bound_row(STOCK, "belady", regenerated_tokens=9),
    STOCK, named(MORE, "lru-offload", host_blocks=2 * HOST_BLOCKS),
    bound_row(STOCK, "belady", regenerated_tokens=9),
]  # fmt: skip
TOKENS = HOST_BLOCKS * BLOCK


def by_value(kv_bytes: int | None = 131_072) -> SweepRuns:
    return sweep_runs(
        "cpu_ratio", "host memory", (0.0, 1.0, 2.0), ROWS, is_host_sweep=True, kv_bytes_per_token=kv_bytes
    )


def test_rows_belong_to_values() -> None:
    swept = by_value()
    assert [value.runs for value in swept.values] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert [value.host_tokens for value in swept.values] == [0, TOKENS, 2 * TOKENS]
    assert [value.host_bytes for value in swept.values] == [0, TOKENS * 131_072, 2 * TOKENS * 131_072]
    assert [value.host_text for value in swept.values] == ["0 GiB", "48.8 GiB", "97.7 GiB"]
    assert [value.host_text for value in by_value(None).values] == [
        "0 tokens",
        "400,000 tokens",
        "800,000 tokens",
    ]
    assert swept.rows_of(swept.values[1], ROWS) == ROWS[3:6]
    with pytest.raises(ValueError, match="9 rows at 2 values"):
        sweep_runs("tp", "devices", (1, 2), ROWS)


def test_host_memory_is_told_only_where_it_is_swept() -> None:
    swept = sweep_runs("pool_tokens", "KV tokens", (20_000, 40_000, 60_000), ROWS, kv_bytes_per_token=131_072)
    assert {(value.host_tokens, value.host_bytes, value.host_text) for value in swept.values} == {
        (None, None, None)
    }
    assert [value.text for value in swept.values] == ["20,000", "40,000", "60,000"]


def test_the_limits_own_memory_is_nobodys_to_buy() -> None:
    rows = [named(OFFLOAD, "free-io", limit=True, host_blocks=10**6), OFFLOAD]
    swept = sweep_runs("cpu_ratio", "host memory", (1.0,), rows, is_host_sweep=True)
    assert [value.host_tokens for value in swept.values] == [TOKENS]


def test_the_document_keeps_the_runs_where_they_were(tmp_path: Path) -> None:
    made = Provenance(command="sojourn simulate")
    path = tmp_path / "out.json"
    path.write_bytes(msgspec.json.encode(document(ROWS, made, by_value())))
    found = read_results(path)
    assert found.sweep == by_value()
    assert found.runs == ROWS
    assert "sweep" not in document(ROWS, made)


def told(swept: SweepRuns, rows: list[RunRow], width: int = 220) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render_sweep(swept, rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_a_line_a_value_and_policy_compared_at_the_same_value() -> None:
    lines = told(by_value(), ROWS).splitlines()
    assert [line.split()[:4] for line in lines if " GiB " in line] == [
        [value, host, "GiB", policy]
        for value, host in (("0", "0"), ("1", "48.8"), ("2", "97.7"))
        for policy in ("stock", "lru-offload", "belady")
    ]
    better = f"{OFFLOAD.output_tok_per_s / STOCK.output_tok_per_s:.2f}×"  # type: ignore[operator]
    at_one = next(line for line in lines if line.split()[:1] == ["1"] and "lru-offload" in line)
    at_none = next(line for line in lines if line.split()[:1] == ["0"] and "lru-offload" in line)
    assert better in at_one
    assert "1.00×" in at_none


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_tells_the_rows_apart_stands_in_every_piece(width: int) -> None:
    text = told(by_value(), ROWS, width)
    heading = [line for line in text.splitlines() if line.startswith("cpu_ratio  host memory  policy")]
    lines = [line for line in text.splitlines() if " GiB " in line]
    assert len(lines) == len(ROWS) * len(heading)
    assert len(heading) > 1
    table = text.split("* best of")[0]
    assert "…" not in table
    assert all(f"{row.output_tok_per_s:,.0f}" in table for row in ROWS if row.output_tok_per_s is not None)


def test_a_column_has_the_same_decimals_at_all_values() -> None:
    rows = [named(STOCK, "stock", output_tok_per_s=number) for number in (1.25, 1000.0)]
    text = told(sweep_runs("tp", "devices", (1, 2), rows), rows)
    assert "1.25 " in text
    assert "1,000.00 " in text


def test_a_note_says_at_which_values_it_holds() -> None:
    rows = [
        named(STOCK, "stock", notes=("everywhere", "short")),
        named(STOCK, "stock", notes=("everywhere",)),
        named(STOCK, "stock", notes=("everywhere", "short")),
    ]
    lines = told(sweep_runs("programs", "programs", (10, 20, 40), rows), rows).splitlines()
    assert [line for line in lines if line.startswith("note:")] == [
        "note: everywhere",
        "note: programs 10, 40: short",
    ]


# -- the plot ---------------------------------------------------------------------------------------


def looks(rows: list[RunRow]):
    return styles_by_policy(row.policy for row in rows)


def test_two_panels_hold_the_figures() -> None:
    figure = plot_sweep(by_value(), ROWS, looks(ROWS))
    for axis, metric in zip(figure.axes, (THROUGHPUT, P95), strict=True):
        lines = {line.get_label(): line for line in axis.get_lines()}
        for place, policy in enumerate(("stock", "lru-offload")):
            assert list(lines[policy].get_xdata()) == [0.0, 1.0, 2.0]
            assert list(lines[policy].get_ydata()) == [metric_value(row, metric) for row in ROWS[place::3]]
        assert "belady" not in lines
        assert [text.get_text() for text in axis.get_xticklabels()] == [
            "0\n0 GiB", "1\n48.8 GiB", "2\n97.7 GiB",
        ]  # fmt: skip
        assert axis.get_ylim()[0] == 0
        assert axis.get_ylim()[1] > max(max(line.get_ydata(), default=0) for line in axis.get_lines())
        assert axis.get_xscale() == "linear"
    assert "P95, est. of all" in figure.axes[1].get_title()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((1, 2, 8), "linear"),
        ((1, 2, 16), "log"),
        ((0, 0.5, 8), "symlog"),
        ((0,), "linear"),
        ((8, 0, 1), "linear"),
    ],
)
def test_small_values_keep_their_place(values: tuple[float, ...], scale: str) -> None:
    rows = [STOCK] * len(values)
    swept = sweep_runs("cpu_ratio", "host memory", values, rows, is_host_sweep=True)
    figure = plot_sweep(swept, rows, looks(rows))
    assert {axis.get_xscale() for axis in figure.axes} == {scale}


def test_what_is_known_from_below_is_hollow() -> None:
    bound = msgspec.structs.replace(STOCK.completion_estimate_s, at_least=("p95",))
    rows = [STOCK, named(STOCK, "stock", completion_estimate_s=bound)]
    figure = plot_sweep(sweep_runs("tp", "devices", (1, 2), rows), rows, looks(rows))
    hollow = [
        [list(line.get_xdata()) for line in axis.get_lines() if line.get_markerfacecolor() == "white"]
        for axis in figure.axes
    ]
    assert hollow == [[[]], [[2]]]


def test_the_files_and_their_bytes(tmp_path: Path) -> None:
    first, second = (write_sweep_plot(by_value(), ROWS, tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["sweep.png", "sweep.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG\r\n")
    assert ">lru-offload" in first[1].read_text().replace("> ", ">")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_limits_alone_are_nothing_to_draw(tmp_path: Path) -> None:
    rows = [ROWS[2]]
    with pytest.raises(ValueError, match="no runs to draw"):
        write_sweep_plot(sweep_runs("cpu_ratio", "host memory", (1.0,), rows), rows, tmp_path / "out")
    assert not (tmp_path / "out").exists()
