"""A suite that was interrupted goes on where it stopped, but never with runs of other code or files."""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sojourn_server
from simulator_run_logs import synthetic_run_log
from sojourn_server.simulator import simulation_suite
from sojourn_server.simulator.limits.eviction_replay import EvictionReplayResult
from sojourn_server.simulator.run_cache import RunCache, RunOutcome, code_digest
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.simulator.simulator_policies import find_policy


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    trace = tmp_path / "mine.jsonl"
    trace.write_text(json.dumps({"program_id": "p", "turns": [{"prompt_tokens": 9, "output_tokens": 2}]}))
    return RunSpec(policy="stock", workload=str(trace), programs=2)


RUN = synthetic_run_log("stock", 3, virtual_s=300.0)
OUTCOME = RunOutcome(log=RUN, orders={"lru": EvictionReplayResult(order="lru", regenerated_tokens=7)})


def test_what_was_kept_comes_back(tmp_path: Path, spec: RunSpec) -> None:
    folder = tmp_path / "kept"
    assert RunCache(folder).get(spec) is None
    RunCache(folder).put(spec, OUTCOME)
    assert RunCache(folder).get(spec) == OUTCOME
    assert RunCache(folder).get(replace(spec, seed=1)) is None
    (found,) = folder.iterdir()
    assert found.name.startswith("mine.jsonl-stock-2-")


def test_other_code_and_changed_files_are_other_runs(tmp_path: Path, spec: RunSpec) -> None:
    RunCache(tmp_path / "kept", code="before").put(spec, OUTCOME)
    assert RunCache(tmp_path / "kept", code="after").get(spec) is None
    kept = RunCache(tmp_path / "kept", code="before")
    assert kept.get(spec) == OUTCOME
    Path(spec.workload).write_text("changed")
    assert kept.get(spec) is None
    assert len(code_digest()) == 12


def test_all_code_that_a_run_is_made_by_counts(tmp_path: Path) -> None:
    """Whatever the lab's run imports, however far away, and each of these rooms by itself."""
    package = Path(sojourn_server.__file__).parent
    rooms = {module.split(".")[1] for module in imported(package, "sojourn_server.simulator.simulation_run")}
    assert {"simulator", "kv_offload", "vllm"} <= rooms
    for room in rooms:
        (tmp_path / room).mkdir()
        (tmp_path / room / "x.py").write_text("before")
    for room in rooms:
        before = code_digest(tmp_path)
        (tmp_path / room / "x.py").write_text("after")
        assert code_digest(tmp_path) != before, f"kept runs outlive a change of {room}"


def test_a_change_of_one_policy_leaves_the_runs_of_others(tmp_path: Path) -> None:
    package = tmp_path / "sojourn_server"
    shutil.copytree(
        Path(sojourn_server.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    names = ("stock", "thunderagent-offload", "unlimited", "mori", "mori+host", "continuum", "sojourn")

    before = {name: code_digest(package, find_policy(name)) for name in names}

    def changed_by(file: str) -> set[str]:
        path = package / file
        text = path.read_text()
        path.write_text(text + "# changed\n")
        changed = {name for name in names if code_digest(package, find_policy(name)) != before[name]}
        path.write_text(text)
        return changed

    presets = {"mori", "mori+host", "continuum", "sojourn"}
    assert changed_by("policies/placement/residency_price.py") == {"sojourn"}
    assert changed_by("policies/placement/relative_idleness.py") == {"mori", "mori+host"}
    assert changed_by("policies/placement/placement_plan.py") == presets - {"continuum"}, "both import it"
    assert changed_by("policies/presets/mori.toml") == {"mori", "mori+host"}
    assert changed_by("core/tier_manager.py") == presets
    assert changed_by("simulator/simulation.py") == set(names)
    assert changed_by("policies/costs/step_costs.py") == set(names)


def imported(package: Path, start: str) -> set[str]:
    """Our modules that ``start`` imports, and those that these import."""

    def file_of(module: str) -> Path | None:
        path = package.joinpath(*module.split(".")[1:])
        return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)

    found: set[str] = set()
    ahead = [start]
    while ahead:
        module = ahead.pop()
        file = file_of(module) if module.startswith(f"{package.name}.") else None
        if file is None or module in found:
            continue
        found.add(module)
        above = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = above[: len(above) + 1 - node.level] if node.level else []
                name = ".".join([*base, *([node.module] if node.module else [])])
                ahead += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    return found


def test_a_damaged_file_counts_as_absent(tmp_path: Path, spec: RunSpec) -> None:
    kept = RunCache(tmp_path / "kept")
    kept.put(spec, OUTCOME)
    (path,) = (tmp_path / "kept").iterdir()
    for damage in (path.read_bytes()[:-9], b"", b"hello"):
        path.write_bytes(damage)
        assert kept.get(spec) is None


def test_a_suite_takes_from_it_and_puts_into_it(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of stock and belady the recorded stock run is all there is to run; kept, nothing is."""
    ran: list[RunSpec] = []

    def pretend(work, tasks, processes, *, on_start, on_done, **callbacks):
        for place, task in enumerate(tasks):
            ran.append(task)
            on_start(place, task)
            on_done(place, simulation_suite.msgspec.msgpack.encode(RunOutcome(log=RUN, orders=orders)))

    orders = {
        name: EvictionReplayResult(order=name, regenerated_tokens=5, over_belady=1.0)
        for name in ("belady", "lru")
    }
    monkeypatch.setattr(simulation_suite, "run_in_processes", pretend)
    kept = RunCache(tmp_path / "kept")
    done: list[int] = []
    specs = [spec, replace(spec, policy="belady"), replace(spec, policy="admit")]
    first = simulation_suite.run_suite(specs, cache=kept, on_done=done.append)
    assert ran == [replace(spec, record_accesses=True), replace(spec, policy="admit")]
    assert sorted(done) == [0, 1]
    again = simulation_suite.run_suite(specs, cache=kept, on_done=done.append)
    assert len(ran) == 2
    assert sorted(done) == [0, 0, 1, 1]
    assert again == first
    assert [row.regenerated_over_belady for row in first.rows] == [1.0, 1.0, None]
    more = simulation_suite.run_suite([*specs, replace(spec, policy="continuum")], cache=kept)
    assert [task.policy for task in ran[2:]] == ["continuum"]
    assert more.rows[:3] == first.rows
