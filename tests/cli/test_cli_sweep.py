"""``sojourn simulate --sweep``: errors before the first run; table, JSON and plot."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_process import refused, run_sojourn
from simulation_results import read_results

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="simulate runs vLLM's scheduler")

WORKLOAD = "synthetic:continuum-bfcl"
SMALL = f"simulate {WORKLOAD} --programs 8 --hours 0.02 --pool-tokens 20000 --max-model-len 12000 --jobs 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sweep seed=1,2", "--sweep seed=1,2: cannot sweep 'seed'; expected one of cpu_ratio, disk_ratio"),
        ("--sweep cpu_ratio=1,2 --cpu-ratio 1", "--cpu-ratio gives one value of cpu_ratio, and --sweep s"),
        ("--sweep programs=1,2 --programs 40", "remove --programs"),
        ("--sweep rate_per_s=1,2 --rate 1", "remove --rate"),
        ("--sweep cpu_ratio=1,2 --programs 20,40", "--programs and --rate make 2"),
        ("--sweep cpu_ratio=1,2 --save runs.json", "--save cannot distinguish the values of --sweep"),
        ("--sweep cpu_ratio=1,2 --explain p1", "--explain cannot distinguish the values of --sweep"),
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


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_table_json_and_plot_have_a_run_of_each_policy_at_each_value(tmp_path: Path) -> None:
    options = "--policy stock,lru-offload --sweep cpu_ratio=0,2 --json sweep.json --plot out/plots"
    done = run_sojourn(*SMALL.split(), *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = read_results(tmp_path / "sweep.json")
    assert results.sweep is not None
    assert results.sweep.values == (0.0, 2.0)
    stock, none, again, twice = results.runs
    assert [row.policy for row in results.runs] == ["stock", "lru-offload"] * 2
    same = ("host_blocks", "computed_tokens", "regenerated_tokens", "virtual_s", "completion_s")
    for name in same:  # without host memory the offloading engine does what the plain one does
        assert getattr(stock, name) == getattr(none, name) == getattr(again, name)
    assert twice.host_blocks == 2 * 20_000 // 16
    assert twice.regenerated_tokens < stock.regenerated_tokens
    lines = [line.split() for line in done.stderr.splitlines()]
    shown = [line[:3] for line in lines if line[1:2] and line[1] in ("stock", "lru-offload")]
    assert shown[:4] == [
        ["0", "stock", "–"], ["0", "lru-offload", "–"], ["2", "stock", "–"], ["2", "lru-offload", "40,000"],
    ]  # fmt: skip
    plots = tmp_path / "out" / "plots"
    assert sorted(path.name for path in plots.iterdir()) == ["metrics.png", "metrics.svg"]
