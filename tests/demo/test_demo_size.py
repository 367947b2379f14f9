"""The size of the demo as a function of the engine's speed, and the measurement of that speed."""

from __future__ import annotations

import pytest
from echo_engine import EchoEngine
from sojourn_server.demo.demo_size import (
    PROMPT_TOKENS,
    ROUNDS,
    DemoSize,
    EngineSpeed,
    choose_size,
    expected_s,
    measure_speed,
)

BOTH = ("stock", "sojourn")
AVX512 = EngineSpeed(prefill_s_per_token=0.98e-3, decode_s_per_token=0.042, start_s=35.0)
"""Two cores with AVX-512, as in benchmarks/results/break_even.json."""


def slower(factor: float, decode_factor: float = 1.0) -> EngineSpeed:
    return EngineSpeed(
        prefill_s_per_token=AVX512.prefill_s_per_token * factor,
        decode_s_per_token=AVX512.decode_s_per_token * decode_factor,
        start_s=AVX512.start_s * decode_factor,
    )


def test_estimates_of_the_arms_are_those_of_the_measured_demo() -> None:
    """benchmarks/results/demo.json: 278 to 287 s on stock, 128 to 141 s with sojourn."""
    rest_s = AVX512.start_s + 15.0
    assert expected_s(AVX512, ["stock"], 8, 10) - rest_s == pytest.approx(277, rel=0.05)
    assert expected_s(AVX512, ["sojourn"], 8, 10) - rest_s == pytest.approx(131, rel=0.05)


@pytest.mark.parametrize(
    ("speed", "programs", "turns"),
    [
        (slower(0.1), 8, 10),
        (AVX512, 8, 10),
        (slower(1.2), 8, 10),  # other work on the machine
        (slower(1.6), 8, 8),
        (slower(2.5), 8, 6),
        (slower(3.5, 1.5), 6, 6),  # AVX2
        (slower(50.0), 3, 6),
    ],
)
def test_size_by_speed(speed: EngineSpeed, programs: int, turns: int) -> None:
    size = choose_size(speed, BOTH)
    assert (size.programs, size.turns) == (programs, turns)
    assert size.is_full == ((programs, turns) == (8, 10))
    assert size.reason.startswith(f"{programs} programs of {turns} turns: this machine prefills ")
    assert ("the full size of 8 x 10 would take" in size.reason) == (not size.is_full)
    assert ("there is no smaller demo" in size.reason) == (size.expected_s > 600)
    assert size.expected_s == expected_s(speed, BOTH, programs, turns)
    assert "\n" not in size.reason


def test_a_slower_machine_never_gets_a_larger_demo() -> None:
    sizes = [choose_size(slower(factor / 4), BOTH) for factor in range(1, 80)]
    work = [(size.programs, size.turns) for size in sizes]
    assert work == sorted(work, reverse=True)
    assert all(size.expected_s <= 600 for size in sizes if (size.programs, size.turns) != (3, 6))


def test_one_arm_alone_or_more_time_allows_a_larger_demo() -> None:
    assert choose_size(slower(2.5), ["sojourn"]).is_full
    assert choose_size(slower(2.5), BOTH, budget_s=3600.0).is_full


def test_the_pool_holds_the_same_share_of_the_programs() -> None:
    def resident(programs: int, full: float = 3.0) -> float:
        return DemoSize(programs=programs, turns=6, expected_s=1.0, reason="").resident(full)

    assert [resident(programs) for programs in (8, 6, 3)] == [3.0, 2.25, 1.5]
    assert resident(3, 1.0) == 1.0


def test_speed_is_measured_with_prompts_of_their_own() -> None:
    with EchoEngine(seconds_per_token=2e-4) as engine:
        speed = measure_speed(engine.url, "m", start_s=3.0)
    assert speed.start_s == 3.0
    # The echo engine takes its time for prompt and output tokens alike.
    assert speed.prefill_s_per_token >= 2e-4
    assert speed.decode_s_per_token > 0
    prompts = [tuple(body["prompt"]) for body in engine.bodies]
    assert len(set(prompts)) == len(prompts) == 3 * ROUNDS
    assert [len(prompt) for prompt in prompts].count(PROMPT_TOKENS) == ROUNDS
    assert all(body["ignore_eos"] for body in engine.bodies)
