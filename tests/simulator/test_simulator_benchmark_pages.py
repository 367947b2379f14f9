"""What the lab's benchmarks make of rows: words that stay, factors, verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from script_modules import benchmark
from simulator_run_logs import synthetic_run_log
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow

SCRIPTS = ("result_pages", "continuum_figures", "policy_comparison")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(benchmark(name)) for name in SCRIPTS}


def row(policy: str, **changes: object) -> RunRow:
    made = summarize_run(synthetic_run_log("stock", 3, virtual_s=300.0))
    return msgspec.structs.replace(made, policy=policy, **changes)


def delay(policy: str, mean: float, rate: float = 0.1) -> RunRow:
    made = row(policy, rate_per_s=rate, loop="open")
    return msgspec.structs.replace(made, completion_s=msgspec.structs.replace(made.completion_s, mean=mean))


def test_words_written_by_hand_stay(tmp_path: Path, scripts: dict[str, ModuleType]) -> None:
    page = tmp_path / "sub" / "PAGE.md"
    write = scripts["result_pages"].write_page
    write(page, "one\n{by hand}\nend\n", "nothing yet")
    assert page.read_text() == "one\n<!-- by hand -->\nnothing yet\n<!-- /by hand -->\nend\n"
    page.write_text(page.read_text().replace("nothing yet", "what I found:\n\n- {this}"))
    write(page, "two\n{by hand}\nend\n", "nothing yet")
    assert page.read_text() == "two\n<!-- by hand -->\nwhat I found:\n\n- {this}\n<!-- /by hand -->\nend\n"
    assert [path.name for path in page.parent.iterdir()] == ["PAGE.md"]


def test_the_ablation_says_at_how_many_loads_a_step_helps(scripts: dict[str, ModuleType]) -> None:
    rows = [
        *(delay("stock", mean, rate) for mean, rate in ((100.0, 0.1), (400.0, 0.2))),
        *(delay("program-fcfs", mean, rate) for mean, rate in ((100.0, 0.1), (100.0, 0.2))),
        *(delay("continuum-paper", mean, rate) for mean, rate in ((200.0, 0.1), (50.0, 0.2))),
    ]
    (line,) = scripts["continuum_figures"].ablation(rows)
    assert "stock → program-fcfs 2.00× (better at 1 loads, worse at 0)" in line
    assert "program-fcfs → continuum-paper 1.00× (better at 1 loads, worse at 1)" in line
    found = scripts["continuum_figures"].cells(rows)
    assert scripts["continuum_figures"].factor(found[rows[0].trace, 0.2], "continuum-paper") == 8.0


def test_the_matrix_marks_the_best_policy_and_no_limit(scripts: dict[str, ModuleType]) -> None:
    rows = [
        row(policy, programs=programs, output_tok_per_s=tokens, limit=policy == "unlimited")
        for programs, speeds in ((20, (10.0, 20.0, 5.0, 90.0)), (40, (10.0, 5.0, 10.0, 90.0)))
        for policy, tokens in zip(("stock", "admit", "continuum", "unlimited"), speeds, strict=True)
    ]
    policy_comparison = scripts["policy_comparison"]
    lines = policy_comparison.matrix(rows, lambda mine, stock: mine.output_tok_per_s / stock.output_tok_per_s)
    trace = rows[0].trace
    assert lines.splitlines() == [
        f"| policy | all | {trace} 20 | {trace} 40 |",
        "| --- | --: | --: | --: |",
        "| stock | **1.00** | 1.00 | **1.00** |",
        "| admit | **1.00** | **2.00** | 0.50 |",
        "| continuum | 0.71 | 0.50 | **1.00** |",
        "| *unlimited* | 9.00 | 9.00 | 9.00 |",
    ]
    page = policy_comparison.page(rows, {trace: ["a note"]}, "made so")
    assert "{by hand}" in page
    assert f"- {trace}: a note" in page
