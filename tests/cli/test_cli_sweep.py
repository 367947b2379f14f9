"""``sojourn simulate --sweep``: errors before the first run; table, JSON and plot."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from cli_process import refused, run_sojourn
from simulation_results import read_results
from sojourn_server.simulator.report.results_file import SimulationResults
from sojourn_server.simulator.report.run_row import WALL_CLOCK_FIELDS, RunRow

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="simulate runs vLLM's scheduler")

WORKLOAD = "synthetic:continuum-bfcl"
SMALL = f"simulate {WORKLOAD} --programs 8 --hours 0.02 --pool-tokens 20000 --max-model-len 12000 --jobs 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sweep seed=1,2", "--sweep seed=1,2: cannot sweep 'seed'; expected one of cpu_ratio, disk_ratio"),
        (
            "--sweep cpu_ratio=1,2 --cpu-ratio 1",
            "--cpu-ratio gives one value of cpu_ratio, and --sweep several",
        ),
        ("--sweep programs=1,2 --programs 40", "remove --programs"),
        ("--sweep rate_per_s=1,2 --rate 1", "remove --rate"),
        ("--sweep cpu_ratio=1,2 --programs 20,40", "--programs and --rate make 2"),
        ("--sweep cpu_ratio=1,2 --save runs.json", "--save cannot distinguish the values of --sweep"),
        ("--sweep cpu_ratio=1,2 --explain p1", "--explain cannot distinguish the values of --sweep"),
        ("--sweep cpu_ratio=1,2 --policy stock,admit", "cpu_ratio changes nothing for stock, admit"),
        ("--sweep disk_ratio=0,4 --policy stock,lru-offload", "disk_ratio changes nothing for stock, lru"),
        ("--sweep cpu_ratio=0,1 --disk-ratio 4", "disk_ratio is 4 and cpu_ratio 0, no host memory"),
        ("--sweep cpu_ratio=1,2 --policy stok", "did you mean 'stock'?"),
        ("--sweep rate_per_s=1 --hours 0.01 --warm-up-s 99", "--warm-up-s 99 leaves nothing of 36 virtual s"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(arguments: str, message: str) -> None:
    error = refused("simulate", WORKLOAD, *arguments.split())
    assert error.exit_code == 2
    assert message in f"{error.message} {error.next_step}"


# -- a sweep ----------------------------------------------------------------------------------------


class Swept(NamedTuple):
    folder: Path
    said: str
    results: SimulationResults


def run(folder: Path, arguments: str) -> str:
    done = run_sojourn(*SMALL.split(), *arguments.split(), cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("swept")
    said = run(folder, "--policy stock,lru-offload --sweep cpu_ratio=0,2 --json sweep.json --plot out/plots")
    return Swept(folder, said, read_results(folder / "sweep.json"))


def figures(row: RunRow) -> dict[str, object]:
    """All that repeats, but whose it is."""
    return {**msgspec.to_builtins(row), **dict.fromkeys([*WALL_CLOCK_FIELDS, "policy", "notes"])}


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_runs_are_those_of_each_value_by_itself(swept: Swept) -> None:
    """Without host memory the offloading engine does what the plain one does; with it, what ``--cpu-ratio``
    alone gives."""
    rows = swept.results.runs
    assert [row.policy for row in rows] == ["stock", "lru-offload"] * 2
    stock, none, again, twice = rows
    assert figures(stock) == figures(none) == figures(again)
    assert stock.output_tok_per_s
    assert stock.regenerated_tokens > 0
    assert none.host_blocks == none.copied_to_host_bytes == 0
    assert twice.host_blocks == 2 * 20_000 // 16
    assert twice.host_hit_tokens > 0
    assert twice.regenerated_tokens < stock.regenerated_tokens
    run(swept.folder, "--policy lru-offload --cpu-ratio 2 --json alone.json")
    (alone,) = read_results(swept.folder / "alone.json").runs
    assert figures(alone) == figures(twice)


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_table_json_and_plot_have_the_values(swept: Swept) -> None:
    by_value = swept.results.sweep
    assert by_value is not None
    assert by_value.values == (0.0, 2.0)
    lines = [line.split() for line in swept.said.splitlines()]
    shown = [line[:3] for line in lines if line[1:2] and line[1] in ("stock", "lru-offload")]
    assert shown[:4] == [
        ["0", "stock", "–"], ["0", "lru-offload", "–"], ["2", "stock", "–"], ["2", "lru-offload", "40,000"],
    ]  # fmt: skip
    assert sorted(path.name for path in (swept.folder / "out" / "plots").iterdir()) == [
        "metrics.png", "metrics.svg",
    ]  # fmt: skip
