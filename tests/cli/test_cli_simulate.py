"""``sojourn simulate``: bad input is one line and a next step, good input the same figures twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cli_process
import pytest
from cli_process import COLUMNS, run_sojourn
from simulation_results import read_results
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.simulator.report.results_file import load_runs
from sojourn_server.simulator.report.run_row import WALL_CLOCK_FIELDS
from sojourn_server.simulator.simulation_run import RunSpec, validate_specs
from sojourn_server.simulator.simulation_suite import SuiteResult, run_suite
from waiting import wait_until

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="simulate runs vLLM's scheduler")

SOJOURN = [sys.executable, "-c", "from sojourn_server.cli import main; main()"]


def turn(prompt: int, output: int = 20, **fields: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "output_tokens": output, **fields}


def program(name: str, *prompts: int) -> dict[str, Any]:
    tool = {"gap_s": 1.5, "gap_kind": "tool", "tools": [{"name": "bash", "cmd": "pytest", "s": 1.5}]}
    return {"program_id": name, "turns": [turn(prompt, **tool) for prompt in prompts]}


PROGRAMS = [program(f"p{i}", 900 + 40 * i, 1070 + 40 * i, 1240 + 40 * i) for i in range(4)]


def write(path: Path, *programs: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in programs))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "mini.jsonl", *PROGRAMS)


refused = partial(cli_process.refused, "simulate")
"""What the command says; it must say it without simulating anything."""


# -- the trace -----------------------------------------------------------------------------


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """The decoder's own tests have the other faults of a line."""
    path = write(tmp_path / "bad.jsonl", PROGRAMS[0], {"program_id": "q", "turns": [turn(5, gap_s=-1)]})
    error = refused(str(path), "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "plots"))
    assert error.message.startswith(f"{path}, line 2: Expected `float` >= 0.0 - at `$.turns[0].gap_s`")
    assert "docs/traces.md" in error.next_step
    assert error.exit_code == 2
    assert [found.name for found in tmp_path.iterdir()] == ["bad.jsonl"]


def test_files_that_are_no_traces(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert refused(str(tmp_path / "empty.jsonl")).message.endswith(
        "empty.jsonl: holds no programs; expected one JSON object per line"
    )
    for name in ("none.jsonl", "x" * 300):
        error = refused(str(tmp_path / name), "--explain", "p0")
        assert error.next_step.startswith("name a trace or synthetic:NAME")
    assert "No such file" in refused(str(tmp_path / "none.jsonl")).message
    assert "Is a directory" in refused(str(tmp_path)).message
    assert "no workload" in refused().message
    assert "did you mean synthetic:continuum-bfcl?" in refused("synthetic:continuum-bfc").message


def test_contexts_that_do_not_fit(tmp_path: Path, trace: Path) -> None:
    """One that never fits is an error; one that outgrows the limit later is cut, and said."""
    whole = str(write(tmp_path / "long.jsonl", program("a", 200_000), program("b", 150_000)))
    error = refused(whole)
    assert error.message == (
        f"{whole}: no program fits a context of 131,072 tokens: the shortest first turn needs "
        "150,020 (program 'b')"
    )
    assert "--max-model-len" in error.next_step
    for option in ("--max-context", "--max-model-len", "--pool-tokens"):
        assert "mini.jsonl: no program fits a context of" in refused(str(trace), option, "500").message
    some = str(write(tmp_path / "some.jsonl", program("a", 200_000), program("b", 900, 1000, 150_000)))
    assert validate_specs([RunSpec(policy="stock", workload=some)]) == [
        "1 programs left out: their first turn is beyond the context limit of 131,072 tokens",
        "1 of 1 programs end early, before a turn beyond the context limit of 131,072 tokens",
    ]


# -- names and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy contnuum", "did you mean 'continuum'?"),
        ("--policy ,", "--policy names no policy"),
        ("--policy none.toml", "policy file none.toml: No such file"),
        ("--hardware h10", "did you mean 'h100'?"),
        ("--tp 3", "tp is 3; llama-3.1-8b has 32 heads"),
        ("--max-model-len 200000", "max_model_len is 200,000; llama-3.1-8b takes at most 131,072"),
        ("--pool-tokens 9000 --max-model-len 10000", "use a max_model_len of at most 8992"),
        ("--pool-tokens 20", "the KV pool holds 16 tokens; expected at least 32"),
        ("--programs 20,many", "'many' is not a whole number above 0"),
        ("--rate nan", "--rate nan: 'nan' is not a number above 0"),
        ("--hours 0", "--hours is 0"),
        ("--hours inf", "--hours is inf; expected a finite number"),
        ("--disk-ratio 4 --policy stock,admit", "disk_ratio is 4, but none of stock, admit has a disk"),
        ("--warm-up-s 7200", "--warm-up-s 7200 leaves nothing of 3600 virtual s"),
        ("--explain p9@0", "name one of 4, such as p"),
        ("--sweep seed=1,2", "--sweep seed=1,2: cannot sweep 'seed'; expected one of cpu_ratio, disk_ratio"),
        ("--sweep cpu_ratio=1,2 --cpu-ratio 1", "--cpu-ratio gives one value of cpu_ratio, and --sweep s"),
        ("--sweep programs=1,2 --programs 40", "remove --programs"),
        ("--sweep rate_per_s=1,2 --rate 1", "remove --rate"),
        ("--sweep cpu_ratio=1,2 --programs 20,40", "--programs and --rate make 2"),
        ("--sweep cpu_ratio=1,2 --save runs.json", "--save cannot distinguish the values of --sweep"),
        ("--sweep cpu_ratio=1,2 --explain p1", "--explain cannot distinguish the values of --sweep"),
        ("--sweep cpu_ratio=0,1 --disk-ratio 4", "disk_ratio is 4 and cpu_ratio 0, no host memory"),
        ("--sweep rate_per_s=1 --hours 0.01 --warm-up-s 99", "--warm-up-s 99 leaves nothing of 36 virtual s"),
    ],
)
def test_a_bad_option_is_named(trace: Path, arguments: str, message: str) -> None:
    error = refused(str(trace), *arguments.split())
    assert message in f"{error.message} {error.next_step}"
    assert error.exit_code == 2


def test_an_engine_profile_needs_no_model_and_host_memory_only_for_policies_that_have_it(
    tmp_path: Path, trace: Path
) -> None:
    profile = EngineProfile(
        model="their-model", hardware="their-box", engine="vllm 0.32.0", block_size=16,
        prefill=PrefillCurve(a_s=0.01, b_s_per_token=1e-4, c_s_per_token2=0.0),
        points=((100, 0.02), (200, 0.03)),
        limits=EngineLimits(
            kv_pool_tokens=4096, max_context_tokens=2048, max_num_seqs=8, max_num_batched_tokens=512
        ),
        steps=StepCosts(0.01, 1e-4, 1e-9, 1e-8, request_s=1e-4, call_s=0.002),
    )  # fmt: skip
    path = tmp_path / "engine.toml"
    path.write_text(profile.to_toml())
    for policy in ("stock", "continuum", "free-io"):
        assert validate_specs([RunSpec(policy=policy, workload=str(trace), hardware=str(path))]) == []
    error = refused(str(trace), "--hardware", str(path), "--policy", "stock,lru-offload")
    assert f"{path}: limits.kv_bytes_per_token is missing" in error.message


@pytest.mark.parametrize(
    ("arguments", "ahead"),
    [
        ("", True),
        ("--hardware h100", True),
        ("--no-async-scheduling", False),
        ("--hardware measured.toml", False),
        ("--hardware measured.toml --async-scheduling", True),
    ],
)
def test_steps_are_planned_ahead_on_gpus(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, ahead: bool
) -> None:
    planned: list[RunSpec] = []
    run = "sojourn_server.cli.simulate._run_simulations"
    monkeypatch.setattr(run, lambda specs, *rest: [planned.extend(specs), 1 / 0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured.toml").write_text("[prefill]\n")
    cli_process.invoke("simulate", str(trace), "--policy", "stock", *arguments.split())
    assert [spec.async_scheduling for spec in planned] == [ahead]


@pytest.mark.parametrize(("given", "noted"), [("", True), ("--hours 0.1", False), ("--programs 4", False)])
def test_a_run_without_bounds_says_that_it_may_be_long(
    trace: Path, monkeypatch: pytest.MonkeyPatch, given: str, noted: bool
) -> None:
    monkeypatch.setattr("sojourn_server.cli.simulate._run_simulations", lambda *_: 1 / 0)
    said = cli_process.invoke("simulate", str(trace), *given.split()).stderr
    assert ("A first look: --programs 10 --hours 0.1" in said) is noted


# -- outputs -------------------------------------------------------------------------------------


def test_unwritable_outputs_are_refused_before_the_run(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is a folder" in refused(str(trace), "--json", str(tmp_path)).message
    assert "is a file" in refused(str(trace), "--plot", str(trace)).message
    assert "expected a name ending in" in refused(str(trace), "--save", str(tmp_path / "runs.txt")).message
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert "cannot write into" in refused(str(trace), "--save", str(tmp_path / "runs.json")).message
    assert [path.name for path in tmp_path.iterdir()] == ["mini.jsonl"]


def test_kept_runs_that_cannot_be_shown(tmp_path: Path, trace: Path) -> None:
    assert "No such file" in refused("--load", str(tmp_path / "none.json")).message
    (tmp_path / "odd.json").write_text("{}")
    error = refused("--load", str(tmp_path / "odd.json"))
    assert "odd.json: " in error.message
    assert "--save" in error.next_step
    assert "workload has no effect" in refused(str(trace), "--load", str(tmp_path / "odd.json")).message
    swept = refused("--load", "runs.json", "--sweep", "cpu_ratio=0,1")
    assert "--sweep has no effect on saved runs" in swept.message


# -- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, subprocess.CompletedProcess[str]]]:
    """The same command in two folders and two processes."""
    results = []
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        write(folder / "mini.jsonl", *PROGRAMS)
        command = (
            "simulate mini.jsonl --programs 3 --hours 0.01 --pool-tokens 3000 "
            "--policy stock,continuum,unlimited --json - --plot plots --save runs.json.gz --explain p0"
        )
        if name == "first":
            line = [*SOJOURN, *command.split()]
            wide = {**os.environ, "COLUMNS": str(COLUMNS)}
            result = subprocess.run(line, cwd=folder, env=wide, capture_output=True, text=True, timeout=500)
        else:
            result = run_sojourn(*command.split(), cwd=folder)
        results.append((folder, result))
    return results


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_same_command_gives_the_same_bytes(
    twice: list[tuple[Path, subprocess.CompletedProcess[str]]],
) -> None:
    documents = []
    for _, result in twice:
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        del document["made_with"]
        for run in document["runs"]:
            for field in WALL_CLOCK_FIELDS:
                del run[field]
        documents.append(json.dumps(document))
    assert documents[0] == documents[1]
    assert [run["policy"] for run in document["runs"]] == ["stock", "continuum", "unlimited"]
    for run in document["runs"][:2]:
        assert run["programs_finished"] > 0
        assert run["regenerated_tokens"] > 0
    for name in ("metrics.svg", "metrics.png"):
        first, second = ((folder / "plots" / name).read_bytes() for folder, _ in twice)
        assert first == second
    assert sorted(path.name for path in twice[0][0].iterdir()) == ["mini.jsonl", "plots", "runs.json.gz"]


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_kept_runs_are_shown_again(
    twice: list[tuple[Path, subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    folder, run = twice[0]
    again = tmp_path / "again.json"
    load = partial(cli_process.invoke, "simulate", "--load", str(folder / "runs.json.gz"))
    refused_to_load = partial(refused, "--load", str(folder / "runs.json.gz"))
    result = load("--json", str(again))
    assert result.exit_code == 0, result.exception
    assert json.loads(again.read_text()) == json.loads(run.stdout)
    later = tmp_path / "later.json"
    result = load("--warm-up-s", "10", "--json", str(later))
    assert result.exit_code == 0, result.exception
    rows = read_results(later).runs
    assert [(row.policy, row.since_s) for row in rows] == [
        (run, 10.0) for run in ("stock", "continuum", "unlimited")
    ]
    failed = refused_to_load("--warm-up-s", "9000")
    assert "--warm-up-s 9000" in failed.message
    assert "use a shorter warm-up" in failed.next_step
    for option, value in (("--hardware", "h100"), ("--policy", "stock"), ("--pool-tokens", "5000")):
        assert f"{option} has no effect on saved runs" in refused_to_load(option, value).message
    assert refused_to_load("--explain", "p7").exit_code == 1


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_a_sweep_has_a_run_of_each_policy_at_each_value(tmp_path: Path) -> None:
    small = "synthetic:continuum-bfcl --programs 8 --hours 0.02 --pool-tokens 20000 --max-model-len 12000"
    options = "--jobs 2 --policy stock,lru-offload --sweep cpu_ratio=0,2 --json sweep.json --plot out/plots"
    done = run_sojourn("simulate", *small.split(), *options.split(), cwd=tmp_path)
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
    assert "lru-offload" in done.stderr
    assert (tmp_path / "out" / "plots" / "metrics.svg").exists()


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_policy_of_ones_own_that_fails_is_no_result(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def keep(self, turn, now):\n        return now / (now - now)\n"
    )
    (tmp_path / "broken.toml").write_text('extends = "continuum-paper"\nretention = "broken:Broken"\n')
    out = tmp_path / "out.json"
    policies = f"stock,{tmp_path}/broken.toml"
    command = [*SOJOURN, "simulate", trace, "--programs", "1", "--hours", "0.01", "--policy", policies]
    result = subprocess.run([*command, "--json", out], capture_output=True, text=True, timeout=500)
    assert result.returncode == 1, result.stderr[-3000:]
    assert "hooks of policy broken raised errors, so these figures are wrong" in " ".join(
        result.stderr.split()
    )
    assert "ZeroDivisionError" in result.stderr
    assert read_results(out).runs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_writes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches all processes of the terminal at once, and a supervisor's SIGTERM one of them."""
    command = (
        "simulate synthetic:continuum-swe-bench --hours 999 --policy stock,admit --save runs.json --plot p"
    )
    with subprocess.Popen(
        [*SOJOURN, *command.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:

        def descendants() -> set[int]:
            return {child.pid for child in psutil.Process(process.pid).children(recursive=True)}

        def alive() -> set[int]:
            found = psutil.process_iter(["status"])
            return {one.pid for one in found if one.info["status"] != psutil.STATUS_ZOMBIE}

        try:
            # Two workers, and two processes of multiprocessing's own.
            wait_until(lambda: process.poll() is not None or len(descendants()) >= 4, within_s=120)
            assert process.poll() is None
            born = descendants()
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            _, said = process.communicate(timeout=120)
        except BaseException:
            process.kill()  # else leaving the block would wait for it
            raise
    assert process.returncode == 130
    assert said.strip().splitlines()[-2:] == ["error: interrupted", "next: nothing was written; run it again"]
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not born & alive())


def test_an_interrupt_keeps_the_runs_that_have_finished(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, on_done: Callable[[int], None], **options: Any) -> SuiteResult:
        def done(number: int) -> None:
            on_done(number)
            if number == 2:
                raise KeyboardInterrupt

        return run_suite(*arguments, on_done=done, **options)

    monkeypatch.setattr("sojourn_server.cli.simulate.run_suite", interrupted)
    out, saved = tmp_path / "out.json", tmp_path / "saved.json.gz"
    options = f"--policy stock,admit,continuum,mori --programs 1 --explain p0 --save {saved}"
    error = refused(str(trace), "--hours", "0.01", "--jobs", "1", "--json", str(out), *options.split())
    assert "have 3 of 4 runs" in error.message
    assert error.exit_code == 130
    written = read_results(out)
    assert [row.policy for row in written.runs] == ["stock", "admit", "continuum"]
    assert written.missing_runs == load_runs(saved).missing_runs == 1


def test_a_process_that_dies_is_an_error_and_ends_the_others(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn_server.simulator.simulation_suite._run_in_process", _die)
    error = refused(str(trace), "--policy", "stock,admit", "--programs", "1", "--jobs", "2")
    assert "process died; was it short of memory?" in error.message


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
