"""benchmarks/simulator_validation.py: its arithmetic, its workload, and a small run of both worlds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sojourn_server.traces.prompt_builder import PromptBuilder, plan_turns, recomputed_tokens
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BLOCK = 16


@pytest.fixture(scope="module")
def truth() -> Iterator[ModuleType]:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    import simulator_validation

    yield simulator_validation
    patch.undo()


def chain() -> TraceProgram:
    """Appends; then is cut back to 100 tokens; then goes on."""
    return TraceProgram(
        program_id="p",
        turns=(
            TraceTurn(prompt_tokens=100, output_tokens=10),
            TraceTurn(prompt_tokens=150, output_tokens=10),
            TraceTurn(prompt_tokens=120, output_tokens=10, prefix_tokens=50, reset=True),
            TraceTurn(prompt_tokens=200, output_tokens=10),
        ),
    )


def test_what_is_computed_again_are_whole_blocks_of_the_kept_prefix() -> None:
    plans = plan_turns(chain())
    # Nothing before the first; 109 of 110 tokens have KV; 50 are kept; 129 of 130 have KV.
    assert [recomputed_tokens(plans, turn, 0, BLOCK) for turn in range(4)] == [0, 96, 48, 128]
    assert [recomputed_tokens(plans, turn, 64, BLOCK) for turn in range(4)] == [0, 32, 0, 64]


def test_the_last_token_of_a_prompt_is_never_spared() -> None:
    turns = (TraceTurn(prompt_tokens=100, output_tokens=12), TraceTurn(prompt_tokens=112, output_tokens=1))
    plans = plan_turns(TraceProgram(program_id="p", turns=turns))
    assert plans[1].prompt_tokens == 7 * BLOCK
    assert recomputed_tokens(plans, 1, 6 * BLOCK, BLOCK) == 0


def test_the_lab_and_a_replay_count_the_same_by_it() -> None:
    """A cache without end finds exactly what the rule says can be found."""
    builder = PromptBuilder(chain())
    seen: set[tuple[int, ...]] = set()
    for turn, plan in enumerate(builder.plans):
        prompt = builder.prompt(turn)
        found = 0
        while found + BLOCK < len(prompt) and tuple(prompt[: found + BLOCK]) in seen:
            found += BLOCK
        assert recomputed_tokens(builder.plans, turn, found, BLOCK) == 0
        if found:
            assert recomputed_tokens(builder.plans, turn, found - BLOCK, BLOCK) == BLOCK
        context = [*prompt, *builder.planned_output(turn)]
        seen.update(
            tuple(context[:end]) for end in range(BLOCK, plan.prompt_tokens + plan.output_tokens, BLOCK)
        )


def test_the_figures_of_a_run(truth: ModuleType) -> None:
    from validation_runs import RunMeasurements, TurnMeasurement

    played = RunMeasurements(completions_s=[4.0, 8.0], wall_s=9.0, preemptions=2)
    played.turns = [
        TurnMeasurement("p", 0, 0.0, 0.25, 1.0, 100, 0, 10),
        TurnMeasurement("p", 1, 2.0, 0.75, 2.0, 150, 64, 10),
    ]
    assert truth.figures(played, {"p": plan_turns(chain())}, BLOCK) == {
        "completion_mean_s": 6.0,
        "completion_p95_s": pytest.approx(7.8),
        "ttft_mean_s": 0.5,
        "regenerated_tokens": 32,
        "computed_tokens": 186,
        "prompt_tokens": 250,
        "output_tokens": 20,
        "preemptions": 2,
        "wall_s": 9.0,
    }


@pytest.mark.parametrize(
    ("lab", "real", "error"), [(110, 100, 0.1), (90, 100, -0.1), (0, 0, 0.0), (0, 5, -1.0), (5, 0, None)]
)
def test_an_error_is_relative_to_what_is_real(
    truth: ModuleType, lab: float, real: float, error: float | None
) -> None:
    assert truth.relative_error(lab, real) == (error if error is None else pytest.approx(error))


def run(truth: ModuleType, **figures: float) -> dict[str, float]:
    return {**dict.fromkeys(truth.FIGURES, 100.0), **figures}


@pytest.mark.parametrize(
    ("completion", "regenerated", "agrees"),
    [(109, 104, [True, True]), (89, 104, [False, True]), (91, 106, [True, False]), (111, 94, [False, False])],
)
def test_completion_is_held_to_ten_percent_and_regenerated_tokens_to_five(
    truth: ModuleType, completion: float, regenerated: float, agrees: list[bool]
) -> None:
    lab = run(truth, completion_mean_s=completion, regenerated_tokens=regenerated)
    found = truth.compare([run(truth)], [lab])
    assert list(found["agrees"].values()) == agrees
    assert found["error"]["completion_mean_s"] == pytest.approx(completion / 100 - 1)


def test_medians_are_compared(truth: ModuleType) -> None:
    real = [run(truth, wall_s=wall_s) for wall_s in (90, 100, 900)]
    lab = [run(truth, wall_s=wall_s) for wall_s in (1, 120, 130)]
    found = truth.compare(real, lab)
    assert (found["real"]["wall_s"], found["lab"]["wall_s"]) == (100, 120)
    assert found["error"]["wall_s"] == pytest.approx(0.2)
    assert found["real_range"]["wall_s"] == [90, 900]
    assert truth.medians([{"a": 1}, {"a": 3, "b": 4}, {"a": 2}]) == {"a": 2, "b": 0}


def test_the_programs_fit_the_engine_and_are_the_seeds(truth: ModuleType) -> None:
    from sojourn_server.traces.trace_schema import TraceError
    from validation_runs import Scenario, plans_of, programs_of

    scenario = Scenario()
    programs = programs_of(scenario)
    assert len(programs) == scenario.programs
    assert programs == programs_of(scenario)
    for plans in plans_of(programs, scenario).values():
        assert all(plan.prompt_tokens + plan.output_tokens <= scenario.max_model_len for plan in plans)
    with pytest.raises(TraceError, match="expected 9999"):
        programs_of(Scenario(programs=9999))


def test_orderly_programs_take_turns_and_outgrow_the_pool(truth: ModuleType) -> None:
    from validation_runs import SMOKE, plans_of, programs_of

    plans = plans_of(programs_of(SMOKE), SMOKE).values()
    pool = (SMOKE.blocks - 1) * SMOKE.block_size
    assert sum(program[0].prompt_tokens for program in plans) < pool * 0.6
    assert sum(program[-1].prompt_tokens for program in plans) > pool * 1.5


def test_noise_changes_steps_and_not_their_mean(truth: ModuleType) -> None:
    from validation_runs import Noisy

    class Flat:
        call_s = 0.01

        def step_s(self, work: object) -> float:
            return 2.0

        def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
            return 3.0

    noisy = Noisy(Flat(), 0.2, "seed")
    steps = [noisy.step_s(None) for _ in range(4000)]
    assert sum(steps) / len(steps) == pytest.approx(2.0, rel=0.02)
    assert max(steps) > 2.4
    assert steps[:9] == [again.step_s(None) for again in [Noisy(Flat(), 0.2, "seed")] for _ in range(9)]
    assert (noisy.call_s, noisy.copy_s(1, to_host=True)) == (0.01, 3.0)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_both_worlds_lose_the_same_tokens(
    truth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    result = tmp_path / "truth.json"
    monkeypatch.setattr(sys, "argv", ["simulator_validation.py", "--smoke", "--json", str(result)])
    # Three servers are started: without a process of its own for the worker, in two thirds of the time.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Its exit code speaks of seconds too, which this machine may not keep to.
    with pytest.raises(SystemExit) as end:
        truth.main()
    assert result.exists(), end.value.code
    for found in json.loads(result.read_text())["results"]:
        assert found["real"]["regenerated_tokens"] > 1000
        assert found["agrees"]["regenerated_tokens"], found
        assert found["error"]["prompt_tokens"] == found["error"]["output_tokens"] == 0.0
    policies = [found["policy"] for found in json.loads(result.read_text())["results"]]
    assert policies == ["stock", "continuum"]
