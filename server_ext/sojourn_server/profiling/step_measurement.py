"""Measures the cost of engine steps on a live server over HTTP, as samples for a fit.

The fit (``cost_fitting.fit_step_costs``) needs three kinds of samples, from an otherwise idle server:

    kind       what is measured
    prefill    the prompts of ``prefill_measurement``: n new tokens, nothing cached
    extension  n new tokens after a cached prefix of c tokens. These samples separate the cost of
               attention pairs (new token × token that it attends to) from the cost of tokens
    decode     B requests with contexts of c tokens each, once for one output token and once for 33. The
               difference is the time of 32 steps. These samples separate the costs of KV reads, requests
               and steps. The time between two tokens is not used, because a busy server delivers
               several at once

A time to first token is the time of all steps of the prompt, plus the API server's share. Before a decode
sample, every prompt is sent once. So nearly all of its tokens are cached when the B requests run together.
Requests share no blocks, because reading shared blocks would be cheaper than in production.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sojourn_server.policies.costs.engine_profile import EngineLimits, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepSample
from sojourn_server.profiling.cost_fitting import fit_prefill_curve
from sojourn_server.replay.completions_client import Completion, CompletionsClient, ServedModel
from sojourn_server.traces.token_ids import FIRST_ID

DECODE_TOKENS = 33
"""Number of output tokens in a decode sample: one from the prefill and 32 from decode steps."""
DECODE_REPEATS = 2
"""Maximum number of repeats of a decode sample: few, because each is already an average over 32 steps."""
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_BATCHED_TOKENS = 2048
"""Assumed maximum number of tokens per step if the server does not report it: vLLM's smallest default."""
POOL_SHARE = 0.8
"""Maximum share of the KV pool that a sample uses. If it used more, the engine might preempt a request, which
would look like a slow step."""


@dataclass(slots=True)
class StepMeasurement:
    """Measured samples, and notes about samples that are unreliable or were left out."""

    samples: list[StepSample] = field(default_factory=list)
    decode_points: list[tuple[int, float]] = field(default_factory=list)
    """(context tokens, seconds per output token) of one request at a time."""
    notes: list[str] = field(default_factory=list)


class DecodePlan(NamedTuple):
    """One decode measurement: ``concurrency`` requests, each with a context of ``context`` tokens."""

    context: int
    concurrency: int


def prefill_sample(seconds: float, new: int, cached: int, max_num_batched_tokens: int) -> StepSample:
    """Return the sample of a prompt that was prefilled alone, in ``seconds`` seconds. After ``cached`` cached
    tokens, ``new`` tokens were computed, in chunks of at most ``max_num_batched_tokens`` tokens."""
    steps, kv_read, done = 0, 0, cached
    while done < cached + new:
        done = min(cached + new, done + max_num_batched_tokens)
        kv_read += done
        steps += 1
    pairs = new * cached + new * (new + 1) // 2
    return StepSample(seconds, steps, new, pairs, kv_read, steps, calls=1)


def decode_sample(seconds: float, context: float, concurrency: int) -> StepSample:
    """Return the sample of one step in which each of ``concurrency`` requests adds a token to a context of
    ``context`` tokens. ``seconds``: duration of the step."""
    read = concurrency * context
    return StepSample(seconds, 1, concurrency, read, read, concurrency)


def decode_plan(longest: int, limits: EngineLimits, block_size: int = 1) -> list[DecodePlan]:
    """Return the decode measurements to make, cheapest first: single requests at several contexts up to
    ``longest`` tokens, and batches at a short and at a longer context.

    The largest batch has 64 requests, or fewer if the engine's limit is lower. A batch that does not fit in
    the KV pool gets shorter contexts or is left out. Only large batches show the cost per request.
    """
    room = longest - DECODE_TOKENS
    contexts = sorted({max(1, room * part // 8) for part in (1, 2, 4, 8)})
    plan = [DecodePlan(context, 1) for context in contexts]
    pool = (limits.kv_pool_tokens or longest) * POOL_SHARE
    most = limits.max_num_seqs or CONCURRENCIES[-1]
    short, longer = min(256, contexts[0]), contexts[min(1, len(contexts) - 1)]
    for batch in sorted({*(b for b in CONCURRENCIES[1:] if b <= most), min(most, CONCURRENCIES[-1])} - {1}):
        # A request takes whole blocks, including one for its output.
        fitting = int(pool / batch) // block_size * block_size - DECODE_TOKENS
        if min(short, fitting) >= block_size:
            plan.append(DecodePlan(min(short, fitting), batch))
        if longer <= fitting:
            plan.append(DecodePlan(longer, batch))
    return sorted(set(plan), key=lambda point: (point.concurrency * point.context, point))


def extension_plan(longest: int) -> list[tuple[int, int]]:
    """Return pairs (tokens of a cached prefix, new tokens) to measure, cheapest first. They combine short and
    long prefixes, up to ``longest`` tokens in all, with few and many new tokens."""
    pairs = {(longest * part // 8, max(1, longest * new // 64)) for part in (2, 4, 6) for new in (1, 4, 12)}
    return sorted(pairs, key=lambda pair: (pair[0] + pair[1], pair))


async def measure_steps(
    client: CompletionsClient,
    served: ServedModel,
    points: list[tuple[int, float]],
    *,
    max_tokens: int,
    limits: EngineLimits,
    block_size: int,
    repeats: int,
    budget_s: float,
    vocabulary: int,
    on_sample: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> StepMeasurement:
    """Measure extension and decode samples within ``budget_s`` seconds, and return them with prefill samples.

    The prefill samples are computed from ``points``, the measured (prompt tokens, seconds). The cheapest
    samples are measured first. Samples that are predicted to exceed the budget are skipped, with a note.
    ``max_tokens``: longest context. ``vocabulary``: upper bound of the random token ids. ``on_sample`` is
    called before each sample. Raises ``RequestError`` if a request fails.
    """
    # Unseeded by default: a second profile of the same server must not hit the first one's blocks.
    rng = rng or random.Random()
    batched = limits.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    measurement = StepMeasurement()
    if limits.max_num_batched_tokens is None:
        measurement.notes.append(
            f"the server does not report the maximum tokens of a step; {batched} were assumed "
            "(option: --max-num-batched-tokens)"
        )
    measurement.samples += [prefill_sample(s, n, 0, batched) for n, s in points if s > 0]
    run = _MeasurementRun(client, served, measurement, range(FIRST_ID, vocabulary), rng, block_size, batched)
    curve = fit_prefill_curve(points)
    started = clock()
    left_out: list[str] = []
    token_s = 0.0
    jobs = _measurement_jobs(max_tokens, limits, block_size, curve, repeats)
    for job in jobs:
        # Twice the slowest step so far: an upper bound for a batch twice as large.
        decode_s = 2 * token_s * job.decoded
        left_s = budget_s - (clock() - started)
        if job.prefill_s + decode_s > left_s:
            left_out.append(job.name)
            continue
        on_sample(job.name)
        if isinstance(job.point, DecodePlan):
            token_s = max(token_s, await run.decode(job.point, min(repeats, DECODE_REPEATS)))
        else:
            await run.extension(*job.point, repeats)
    if left_out:
        measurement.notes.append(f"the time budget left out: {'; '.join(left_out)}")
    measurement.decode_points.sort()
    return measurement


class _MeasurementJob(NamedTuple):
    prefill_s: float
    """Predicted seconds of the prompts, without the decode steps."""
    decoded: int
    """Number of decode steps."""
    name: str
    point: DecodePlan | tuple[int, int]


def _measurement_jobs(
    longest: int, limits: EngineLimits, block_size: int, curve: PrefillCurve, repeats: int
) -> list[_MeasurementJob]:
    """Return the decode and extension samples to measure, cheapest first, so that a short budget allows some
    of both kinds."""
    jobs: list[_MeasurementJob] = []
    for point in decode_plan(longest, limits, block_size):
        if decode_prompt_tokens(point, block_size) + DECODE_TOKENS <= longest + 1:
            name = f"decode of {point.concurrency} × {point.context:,} tokens"
            steps = min(repeats, DECODE_REPEATS) * DECODE_TOKENS
            jobs.append(_MeasurementJob(point.concurrency * curve.seconds(point.context), steps, name, point))
    for cached, new in extension_plan(longest):
        if cached >= block_size:
            added_s = curve.seconds(cached + new) - curve.seconds(cached)
            expected_s = curve.seconds(cached) + repeats * added_s
            jobs.append(
                _MeasurementJob(expected_s, 0, f"prefill of {new:,} tokens after {cached:,}", (cached, new))
            )
    return sorted(jobs, key=lambda job: (job.prefill_s, job.name))


def decode_prompt_tokens(point: DecodePlan, block_size: int) -> int:
    """Return the prompt length of a decode sample: whole blocks and one token, so that all but the last token
    can be cached."""
    return max(1, point.context // block_size) * block_size + 1


class _MeasurementRun:
    """Sends the requests of one measurement."""

    def __init__(
        self,
        client: CompletionsClient,
        served: ServedModel,
        into: StepMeasurement,
        ids: range,
        rng: random.Random,
        block_size: int,
        batched: int,
    ) -> None:
        self._client = client
        self._model = served.name
        self._into = into
        self._ids = ids
        self._rng = rng
        self._block_size = block_size
        self._batched = batched

    async def decode(self, point: DecodePlan, repeats: int) -> float:
        """Measure one decode plan and add its sample. Return the seconds per step; 0.0 if no step could be
        timed."""
        prompts = [
            self._fresh(decode_prompt_tokens(point, self._block_size)) for _ in range(point.concurrency)
        ]
        for prompt in prompts:
            await self._ask(prompt, 1)
        times: list[float] = []
        for _ in range(repeats):
            short = await asyncio.gather(*(self._ask(prompt, 1) for prompt in prompts))
            answers = await asyncio.gather(*(self._ask(prompt, DECODE_TOKENS) for prompt in prompts))
            took_s = _median_completion_s(answers) - _median_completion_s(short)
            if took_s > 0:
                times.append(took_s / (DECODE_TOKENS - 1))
        if not times:
            self._note("33 tokens took no longer than one: no decode step could be timed")
            return 0.0
        context = len(prompts[0]) + DECODE_TOKENS / 2
        seconds = statistics.median(times)
        self._into.samples.append(decode_sample(seconds, context, point.concurrency))
        if point.concurrency == 1:
            self._into.decode_points.append((round(context), seconds))
        return seconds

    async def extension(self, cached: int, new: int, repeats: int) -> None:
        """Measure the prefill of ``new`` tokens after about ``cached`` cached tokens, and add the sample."""
        prefix = self._fresh(cached // self._block_size * self._block_size)
        # One more token, otherwise the last block of the prefix would not be cached.
        await self._ask([*prefix, *self._fresh(1)], 1)
        times: list[float] = []
        reused = len(prefix)
        for _ in range(repeats):
            answer = await self._ask([*prefix, *self._fresh(new)], 1)
            if answer.cached_tokens is not None:
                reused = min(reused, answer.cached_tokens)
            else:
                self._note("the server does not report cached tokens; prefixes were assumed to be cached")
            times.append(answer.ttft_s)
        if reused < len(prefix):
            self._note(
                "the server reused less of a prefix than it had just computed; "
                "the sample counts only the reused part as cached"
            )
        seconds = statistics.median(times)
        if seconds > 0:
            total = len(prefix) + new
            self._into.samples.append(prefill_sample(seconds, total - reused, reused, self._batched))

    async def _ask(self, prompt: list[int], max_tokens: int) -> Completion:
        return await self._client.complete(self._model, prompt, max_tokens)

    def _fresh(self, count: int) -> list[int]:
        return self._rng.choices(self._ids, k=count)

    def _note(self, text: str) -> None:
        if text not in self._into.notes:
            self._into.notes.append(text)


def _median_completion_s(answers: list[Completion]) -> float:
    """Return the median over ``answers`` of the seconds until the last token."""
    return statistics.median(answer.latency_s for answer in answers)
