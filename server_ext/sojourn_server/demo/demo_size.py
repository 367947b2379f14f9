"""Size of the demo: the number of programs and turns that this machine finishes in time."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from .demo_tasks import FINAL_TURNS, OPENING_TOKENS

FULL_PROGRAMS = 8
FULL_TURNS = 10
MIN_PROGRAMS = 3
MIN_TURNS = FINAL_TURNS + 2
MIN_RESIDENT = 1.5
"""Smallest size of the KV pool, as a multiple of a program's final context. It holds a running program and
half of an evicted one."""
DEFAULT_BUDGET_S = 600.0

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 33
ROUNDS = 3
"""Number of measurements. The fastest one counts, because other work on the machine only adds time."""

_TOKENS_PER_TURN = 288
"""Mean growth of a context in one turn."""
_OUTPUT_TOKENS_PER_TURN = 61
_COMPUTED_SHARE = {"stock": 0.83, "sojourn": 0.20}
"""By arm: share of all prompt tokens that are computed. The rest is in the prefix cache."""
_PREFILL_FACTOR = 1.35
"""Prefill time per token in the demo ÷ the time that ``measure_speed`` measures with a single prompt of
``PROMPT_TOKENS``. Above 1, because the demo's contexts are longer."""
_DECODE_FACTOR = 0.4
"""Time per output token in the demo ÷ the time that ``measure_speed`` measures with a single sequence. Below
1, because the demo decodes in batches."""
_CHECKS_S = 10.0
"""Seconds per arm for the repositories' tests and for the requests before and after the programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Speed of one idle engine."""

    prefill_s_per_token: float
    decode_s_per_token: float
    start_s: float = 0.0
    """Seconds from the server's start to its first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """The chosen number of programs and turns, and the expected duration."""

    programs: int
    turns: int
    expected_s: float
    """Expected seconds for server starts and all arms."""
    reason: str

    @property
    def is_full(self) -> bool:
        """Whether this is the full-size demo."""
        return (self.programs, self.turns) == (FULL_PROGRAMS, FULL_TURNS)

    def resident(self, full_resident: float) -> float:
        """Return the size of the KV pool, as a multiple of a program's final context.

        The full number of programs gets ``full_resident``. With fewer programs the pool shrinks in
        proportion, down to ``MIN_RESIDENT``.
        """
        if self.programs >= FULL_PROGRAMS:
            return full_resident
        return max(min(MIN_RESIDENT, full_resident), full_resident * self.programs / FULL_PROGRAMS)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for the demo's JSON."""
        return {**asdict(self), "expected_s": round(self.expected_s, 1)}


QUICK = DemoSize(
    programs=4,
    turns=MIN_TURNS,
    expected_s=120.0,
    reason=f"a smoke run: 4 programs of {MIN_TURNS} turns; about two minutes, most of them for server starts",
)
"""Size of ``sojourn demo --quick``. It shows that everything works. It measures nothing, because its model
*tiny* recomputes a context in almost no time."""


def choose_size(speed: EngineSpeed, arms: Sequence[str], budget_s: float = DEFAULT_BUDGET_S) -> DemoSize:
    """Return the largest demo that is expected to end within ``budget_s`` seconds. If even the smallest demo
    takes longer, return the smallest.

    Turns are reduced before programs, because the demo is about programs that run at the same time.
    """
    turn_counts = (FULL_TURNS, FULL_TURNS - 2, MIN_TURNS)
    candidates = [(FULL_PROGRAMS, turns) for turns in turn_counts]
    candidates += [(programs, MIN_TURNS) for programs in range(FULL_PROGRAMS - 1, MIN_PROGRAMS - 1, -1)]
    times_s = [expected_s(speed, arms, programs, turns) for programs, turns in candidates]
    fits = (index for index, seconds in enumerate(times_s) if seconds <= budget_s)
    chosen = next(fits, len(candidates) - 1)
    programs, turns = candidates[chosen]
    measured = (
        f"this machine prefills {1 / speed.prefill_s_per_token:,.0f} and decodes "
        f"{1 / speed.decode_s_per_token:,.0f} tokens/s"
    )
    reason = f"{programs} programs of {turns} turns: {measured}; expected time {_minutes(times_s[chosen])}"
    if chosen:
        reason += f" (the full size of {FULL_PROGRAMS} x {FULL_TURNS} would take {_minutes(times_s[0])})"
    if times_s[chosen] > budget_s:
        reason += f", more than the {_minutes(budget_s)} allowed, but there is no smaller demo"
    return DemoSize(programs=programs, turns=turns, expected_s=times_s[chosen], reason=reason)


def expected_s(speed: EngineSpeed, arms: Sequence[str], programs: int, turns: int) -> float:
    """Return the expected seconds for all server starts, the speed measurement and all arms.

    The speed is measured on a server with the KV pool of the full demo. A smaller demo needs another pool, so
    it starts one more server.
    """
    prompt = programs * sum(OPENING_TOKENS + _TOKENS_PER_TURN * turn for turn in range(turns))
    output = programs * turns * _OUTPUT_TOKENS_PER_TURN
    starts = len(arms) + ((programs, turns) != (FULL_PROGRAMS, FULL_TURNS))
    total_s = speed.start_s * starts + measurement_s(speed)
    for arm in arms:
        computed = prompt * _COMPUTED_SHARE[arm]
        total_s += computed * speed.prefill_s_per_token * _PREFILL_FACTOR
        total_s += output * speed.decode_s_per_token * _DECODE_FACTOR + _CHECKS_S
    return total_s


def measurement_s(speed: EngineSpeed) -> float:
    """Return the seconds that ``measure_speed`` takes on an engine of this ``speed``."""
    return ROUNDS * (
        PROMPT_TOKENS * speed.prefill_s_per_token + (OUTPUT_TOKENS + 1) * speed.decode_s_per_token
    )


def measure_speed(
    url: str, model: str, headers: Mapping[str, str] | None = None, *, start_s: float = 0.0
) -> EngineSpeed:
    """Measure the prefill and decode speed of the idle engine at ``url``; takes seconds.

    The prompts are random tokens, so they share no prefix with other prompts. ``start_s`` is copied to the
    result. Raises ``httpx.HTTPError`` if the engine does not answer.
    """
    draw = random.Random(0)

    def seconds(client: httpx.Client, prompt_tokens: int, output_tokens: int) -> float:
        body = {
            "model": model,
            "prompt": [draw.randrange(100, 20_000) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        began_s = time.monotonic()
        client.post("/v1/completions", json=body).raise_for_status()
        return time.monotonic() - began_s

    prefill, first, whole = [], [], []
    with httpx.Client(base_url=url, headers=headers, timeout=300.0, trust_env=False) as client:
        for _ in range(ROUNDS):
            prefill.append(seconds(client, PROMPT_TOKENS, 1))
            first.append(seconds(client, 8, 1))
            whole.append(seconds(client, 8, OUTPUT_TOKENS))
    decode_s = max(min(whole) - min(first), 1e-6) / (OUTPUT_TOKENS - 1)
    return EngineSpeed(
        prefill_s_per_token=max(min(prefill), 1e-6) / PROMPT_TOKENS,
        decode_s_per_token=decode_s,
        start_s=start_s,
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
