"""Measures prefill seconds by prompt length on a live server (Continuum §5.2).

A sample is the time to first token of a prompt of new random token ids, so that no cache hits occur. Samples
run one at a time, and the server must be idle otherwise. ``lengths_up_to`` chooses the prompt lengths.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sojourn_server.profiling.cost_fitting import fit_prefill_curve
from sojourn_server.replay.completions_client import CompletionsClient, ServedModel
from sojourn_server.traces.token_ids import FIRST_ID

FIRST_LENGTH = 1000
WARM_UP_TOKENS = 64


@dataclass(slots=True)
class PrefillMeasurement:
    """Measured prefill times, and notes about lengths that were left out or are unreliable."""

    points: list[tuple[int, float]] = field(default_factory=list)
    """(prompt tokens, median seconds) of each measured length."""
    samples: int = 0
    """Number of measured prompts."""
    notes: list[str] = field(default_factory=list)


def lengths_up_to(max_tokens: int) -> list[int]:
    """Return the prompt lengths to measure: 1000, 2000, 4000, … and ``max_tokens``. For a maximum below 4000:
    a quarter of it, half of it, and all of it.

    Below 4000, doubling from 1000 would give lengths too close together: a quadratic fit to 1000, 2000 and
    2048 would be inaccurate.
    """
    if max_tokens < 4 * FIRST_LENGTH:
        return sorted({max(1, max_tokens * part // 4) for part in (1, 2, 4)})
    lengths = []
    length = FIRST_LENGTH
    while length < max_tokens:
        lengths.append(length)
        length *= 2
    return [*lengths, max_tokens]


async def measure_prefill(
    client: CompletionsClient,
    served: ServedModel,
    *,
    max_tokens: int,
    repeats: int,
    budget_s: float,
    vocabulary: int,
    on_sample: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> PrefillMeasurement:
    """Measure the prefill seconds of several prompt lengths, within ``budget_s`` seconds in total.

    The lengths are ``lengths_up_to(max_tokens)``. The result for a length is the median of up to ``repeats``
    samples. If a length is predicted to exceed the budget, this length and all longer ones are left out, with
    a note. ``vocabulary``: upper bound of the random token ids. ``on_sample`` is called before each sample.
    Raises ``RequestError`` if a request fails.
    """
    # Unseeded by default: a second profile of the same server must not hit the first one's blocks.
    rng = rng or random.Random()
    ids = range(FIRST_ID, vocabulary)
    started = clock()
    measurement = PrefillMeasurement()
    lengths = lengths_up_to(max_tokens)
    cached = 0

    async def sample(tokens: int) -> float:
        nonlocal cached
        answer = await client.complete(served.name, rng.choices(ids, k=tokens), 1)
        cached += answer.cached_tokens or 0
        return answer.ttft_s

    # The first request pays for lazy set-up, e.g. kernels that compile on first use.
    await sample(min(WARM_UP_TOKENS, lengths[0]))
    for position, tokens in enumerate(lengths):
        times: list[float] = []
        for _ in range(repeats):
            left_s = budget_s - (clock() - started)
            expected_s = times[-1] if times else _predicted_prefill_s(measurement.points, tokens)
            if expected_s > left_s:
                break
            on_sample(f"prefill of {tokens:,} tokens")
            times.append(await sample(tokens))
            measurement.samples += 1
        if not times:
            left_out = ", ".join(str(length) for length in lengths[position:])
            measurement.notes.append(
                f"the time budget of {budget_s:.0f} s left out these lengths: {left_out}"
            )
            break
        measurement.points.append((tokens, statistics.median(times)))
    if cached:
        measurement.notes.append(f"{cached} prompt tokens came from a cache; the times are too low")
    return measurement


def _predicted_prefill_s(points: list[tuple[int, float]], tokens: int) -> float:
    """Return the prefill seconds predicted for ``tokens`` tokens. ``points``: (tokens, seconds) of shorter
    prompts; without any, the result is 0.0."""
    if not points:
        return 0.0
    longest, seconds = points[-1]
    # A quadratic through few points may predict too little; proportionality never does.
    return max(fit_prefill_curve(points).seconds(tokens), seconds * tokens / longest)
