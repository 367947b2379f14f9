"""Plots: the same files with the same bytes every time, all or none, readable for a dozen policies."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_run_logs import POLICY_BEHAVIORS, synthetic_run_log
from sojourn_server.simulator.report.comparison_plots import pareto_frontier
from sojourn_server.simulator.report.plot_files import PlotError, binned_samples, write_plots
from sojourn_server.simulator.report.plot_styles import cause_colours, place_labels, styles_by_policy
from sojourn_server.simulator.report.run_metrics import bound_row, summarize_run
from sojourn_server.simulator.run_log import RunLog

RUNS = [synthetic_run_log(name, 4, virtual_s=600.0) for name in ("stock", "mori")]
NAMES = [
    f"{name}.{form}"
    for name in ("completion_cdf", "load", "regenerated", "pareto", "occupancy-4")
    for form in ("png", "svg")
]


def draw(runs: list[RunLog], folder: Path) -> list[Path]:
    return write_plots(runs, [summarize_run(run) for run in runs], folder)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    draw(RUNS, folder / "deep" / "er")
    return folder / "deep" / "er"


def test_the_files_have_stable_names_and_are_what_they_are_called(drawn: Path) -> None:
    assert sorted(path.name for path in drawn.iterdir()) == sorted(NAMES)
    for path in drawn.iterdir():
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n" if path.suffix == ".png" else b"<?xml"), path
        assert len(data) > 5_000


def test_the_same_runs_give_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    again = draw(RUNS, tmp_path)
    assert [path.name for path in again] == NAMES
    for path in again:
        assert path.read_bytes() == (drawn / path.name).read_bytes(), path.name


def test_every_policy_is_named_in_every_plot(drawn: Path) -> None:
    for path in drawn.glob("*.svg"):
        for run in RUNS:
            assert f">{run.policy}" in path.read_text().replace("> ", ">"), path


def test_loads_share_plots_and_traces_have_folders(tmp_path: Path) -> None:
    runs = [synthetic_run_log("stock", n, virtual_s=300.0) for n in (2, 4)]
    runs.append(synthetic_run_log("stock", 2, virtual_s=300.0, trace="dir/other one.jsonl.gz"))
    paths = [str(path.relative_to(tmp_path)) for path in draw(runs, tmp_path)]
    trae, other = (
        "isobench_trae-a100-80gb-llama-3.1-8b-closed-seed1",
        "other-one-a100-80gb-llama-3.1-8b-closed-seed1",
    )
    assert {path.split("/")[0] for path in paths} == {trae, other}
    assert f"{trae}/occupancy-2.png" in paths
    assert f"{trae}/occupancy-4.png" in paths
    assert f"{other}/occupancy-4.png" not in paths


def test_rows_alone_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    rows = [summarize_run(run) for run in RUNS]
    rows.append(bound_row(rows[0], "belady", regenerated_tokens=10))
    names = {path.stem for path in write_plots([], rows, tmp_path)}
    assert names == {"load", "regenerated", "pareto"}
    assert "belady" in (tmp_path / "regenerated.svg").read_text()
    only_limit = write_plots([], rows[-1:], tmp_path / "limit")
    assert {path.stem for path in only_limit} == {"regenerated"}


def test_a_run_in_which_nothing_happened_is_drawn_without_warning(tmp_path: Path) -> None:
    runs = [synthetic_run_log(name, 2, virtual_s=1.0) for name in ("stock", "admit")]
    for run in runs:
        run.programs, run.occupancy, run.preemption_steps = [], [], []
    names = {path.stem for path in draw(runs, tmp_path)}
    assert names == {"completion_cdf", "load", "regenerated"}


def test_an_open_loop_cut_off_is_drawn_without_warning(tmp_path: Path) -> None:
    runs = [
        synthetic_run_log(name, 10, virtual_s=700.0, rate_per_s=rate)
        for name in ("stock", "admit")
        for rate in (0.02, 0.2)
    ]
    names = {path.stem for path in draw(runs, tmp_path)}
    assert {"occupancy-0.02", "occupancy-0.2", "pareto"} <= names


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs to draw"):
        write_plots([], [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plot_that_fails_leaves_the_old_ones_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "load.png").write_bytes(b"old")

    def fail(*args: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr("sojourn_server.simulator.report.plot_files.plot_pareto", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        draw(RUNS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["load.png"]
    assert (tmp_path / "load.png").read_bytes() == b"old"


def test_a_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PlotError, match=r"pip install '\.\[demo\]'"):
        draw(RUNS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_callers_own_settings_neither_matter_nor_change(drawn: Path, tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30.0, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        draw(RUNS, tmp_path)
        assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or matplotlib.get_backend()
    assert (tmp_path / "pareto.png").read_bytes() == (drawn / "pareto.png").read_bytes()


def test_a_dozen_policies_and_more_all_look_different() -> None:
    names = [*POLICY_BEHAVIORS, "saga", "mori-lazy", "tetris", "sojourn"]
    looks = styles_by_policy(names, ["free-io"])
    assert len({(look.colour, str(look.dash)) for look in looks.values()}) == len(names)
    assert looks["stock"].colour == "#000000"
    assert looks["thunderagent"].colour == looks["thunderagent-offload"].colour
    assert len({looks[name].colour for name in ("lru-offload", "admit", "autellix", "continuum")}) == 4
    assert styles_by_policy(names, ["free-io"]) == looks


def test_causes_differ_in_colour_and_in_print() -> None:
    causes = ["evicted", "preempted", "expired", "pressure", "silent", "changed", "novel", "other"]
    assert len(set(cause_colours(causes).values())) == len(causes)
    assert len({hatch for _, hatch in cause_colours(causes).values()}) == len(causes)


points = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


@given(points)
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    expected = {
        (x, y) for x, y in points if not any((a <= x and b >= y) and (a, b) != (x, y) for a, b in points)
    }
    found = pareto_frontier([(float(x), float(y)) for x, y in points])
    assert found == sorted(expected)


def test_names_beside_crowded_points_do_not_cover_each_other() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    crowd = [(100.0 + i % 4, 50.0 + i // 4, f"policy-{i}", "#0072B2") for i in range(12)]
    axis.plot([x for x, *_ in crowd], [y for _, y, *_ in crowd], "o")
    axis.set_xlim(60, 140)
    axis.set_ylim(30, 70)
    place_labels(figure, [(axis, crowd)])
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axis.texts]
    assert [text.get_text() for text in axis.texts] == [name for *_, name, _ in crowd]
    for place, box in enumerate(boxes):
        assert not [other for other in boxes[place + 1 :] if box.overlaps(other)]


def test_a_long_occupancy_is_thinned_without_losing_its_level() -> None:
    run = synthetic_run_log("stock", 4, virtual_s=3600.0)
    assert len(run.occupancy) > 700
    times, groups = binned_samples(run)
    assert len(times) == len(groups) <= 300
    assert sum(len(group) for group in groups) == len(run.occupancy)
    assert times == sorted(times)


def test_importing_the_report_loads_neither_matplotlib_nor_an_engine() -> None:
    names = (
        "program_explanation",
        "run_metrics",
        "comparison_plots",
        "results_file",
        "results_table",
    )
    imports = "; ".join(f"import sojourn_server.simulator.report.{name}" for name in names)
    check = f"{imports}; import sys; print([m for m in ('matplotlib', 'vllm', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
