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
import statistics
from collections.abc import Awaitable, Callable
from functools import partial

from sojourn_server.policies.costs.engine_profile import EngineLimits, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepSample
from sojourn_server.profiling.cost_fitting import fit_prefill_curve
from sojourn_server.profiling.prefill_measurement import MeasurementRun

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


def prefill_sample(seconds: float, new: int, cached: int, max_num_batched_tokens: int) -> StepSample:
    """Return the sample of a prompt that was prefilled alone, in ``seconds`` seconds. After ``cached`` cached
    tokens, ``new`` tokens were computed, in chunks of at most ``max_num_batched_tokens`` tokens."""
    ends = [*range(cached + max_num_batched_tokens, cached + new, max_num_batched_tokens), cached + new]
    pairs = new * cached + new * (new + 1) // 2
    return StepSample(seconds, len(ends), new, pairs, sum(ends), len(ends), calls=1)


def decode_sample(seconds: float, context: float, concurrency: int) -> StepSample:
    """Return the sample of one step in which each of ``concurrency`` requests adds a token to a context of
    ``context`` tokens. ``seconds``: duration of the step."""
    read = concurrency * context
    return StepSample(seconds, 1, concurrency, read, read, concurrency)


def decode_plan(longest: int, limits: EngineLimits, block_size: int = 1) -> list[tuple[int, int]]:
    """Return pairs (context tokens, concurrent requests) to measure, cheapest first: single requests at
    several contexts up to ``longest`` tokens, and batches at a short and at a longer context.

    The largest batch has 64 requests, or fewer if the engine's limit is lower. A batch that does not fit in
    the KV pool gets shorter contexts or is left out. Only large batches show the cost per request.
    """
    room = longest - DECODE_TOKENS
    contexts = sorted({max(1, room * part // 8) for part in (1, 2, 4, 8)})
    plan = [(context, 1) for context in contexts]
    pool = (limits.kv_pool_tokens or longest) * POOL_SHARE
    most = limits.max_num_seqs or CONCURRENCIES[-1]
    short, longer = min(256, contexts[0]), contexts[min(1, len(contexts) - 1)]
    for batch in sorted({*(b for b in CONCURRENCIES[1:] if b <= most), min(most, CONCURRENCIES[-1])} - {1}):
        # A request takes whole blocks, including one for its output.
        fitting = int(pool / batch) // block_size * block_size - DECODE_TOKENS
        if min(short, fitting) >= block_size:
            plan.append((min(short, fitting), batch))
        if longer <= fitting:
            plan.append((longer, batch))
    return sorted(set(plan), key=lambda point: (point[0] * point[1], point))


def extension_plan(longest: int) -> list[tuple[int, int]]:
    """Return pairs (tokens of a cached prefix, new tokens) to measure, cheapest first. They combine short and
    long prefixes, up to ``longest`` tokens in all, with few and many new tokens."""
    pairs = {(longest * part // 8, max(1, longest * new // 64)) for part in (2, 4, 6) for new in (1, 4, 12)}
    return sorted(pairs, key=lambda pair: (pair[0] + pair[1], pair))


def decode_prompt_tokens(context: int, block_size: int) -> int:
    """Return the prompt length of a decode sample: whole blocks and one token, so that all but the last token
    can be cached."""
    return max(1, context // block_size) * block_size + 1


class StepMeasurement:
    """Measures extension and decode samples with the requests of ``run``, and collects them."""

    def __init__(self, run: MeasurementRun, limits: EngineLimits, block_size: int) -> None:
        self.samples: list[StepSample] = []
        self.decode_points: list[tuple[int, float]] = []
        """(context tokens, seconds per output token) of one request at a time."""
        self._run, self._limits, self._block_size = run, limits, block_size
        self._batched = limits.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        self._token_s = 0.0
        """Seconds of the slowest step so far."""

    async def measure(self, points: list[tuple[int, float]], max_tokens: int) -> None:
        """Measure samples with contexts of up to ``max_tokens``, cheapest first, so that a short budget
        allows some of both kinds. Those that are predicted to exceed the budget are skipped, with a note.
        Prefill samples are computed from ``points``, the measured (prompt tokens, seconds)."""
        run = self._run
        if self._limits.max_num_batched_tokens is None:
            run.note(
                f"the server does not report the maximum tokens of a step; {self._batched} were assumed "
                "(option: --max-num-batched-tokens)"
            )
        self.samples += [prefill_sample(s, n, 0, self._batched) for n, s in points if s > 0]
        left_out: list[str] = []
        for prefill_s, decoded, name, sample in self._jobs(max_tokens, fit_prefill_curve(points)):
            # Twice the slowest step so far: an upper bound for a batch twice as large.
            if prefill_s + 2 * self._token_s * decoded > run.left_s():
                left_out.append(name)
                continue
            run.on_sample(name)
            await sample()
        if left_out:
            run.note(f"the time budget left out: {'; '.join(left_out)}")
        self.decode_points.sort()

    def _jobs(
        self, longest: int, curve: PrefillCurve
    ) -> list[tuple[float, int, str, Callable[[], Awaitable[None]]]]:
        """Return (predicted seconds of the prompts, number of decode steps, name, what measures it) of each
        sample, cheapest first."""
        size, repeats = self._block_size, self._run.repeats
        jobs: list[tuple[float, int, str, Callable[[], Awaitable[None]]]] = []
        for context, batch in decode_plan(longest, self._limits, size):
            if decode_prompt_tokens(context, size) + DECODE_TOKENS <= longest + 1:
                steps = min(repeats, DECODE_REPEATS) * DECODE_TOKENS
                name = f"decode of {batch} × {context:,} tokens"
                jobs.append(
                    (batch * curve.seconds(context), steps, name, partial(self._decode, context, batch))
                )
        for cached, new in extension_plan(longest):
            if cached >= size:
                before_s = curve.seconds(cached)
                expected_s = before_s + repeats * (curve.seconds(cached + new) - before_s)
                name = f"prefill of {new:,} tokens after {cached:,}"
                jobs.append((expected_s, 0, name, partial(self._extension, cached, new)))
        return sorted(jobs, key=lambda job: (job[0], job[2]))

    async def _decode(self, context: int, concurrency: int) -> None:
        run = self._run
        prompt_tokens = decode_prompt_tokens(context, self._block_size)
        prompts = [run.fresh(prompt_tokens) for _ in range(concurrency)]
        for prompt in prompts:
            await run.ask(prompt)
        times: list[float] = []
        for _ in range(min(run.repeats, DECODE_REPEATS)):
            short = await asyncio.gather(*(run.ask(prompt) for prompt in prompts))
            answers = await asyncio.gather(*(run.ask(prompt, DECODE_TOKENS) for prompt in prompts))
            once_s, took_s = (statistics.median(a.latency_s for a in each) for each in (short, answers))
            if took_s > once_s:
                times.append((took_s - once_s) / (DECODE_TOKENS - 1))
        if not times:
            run.note("33 tokens took no longer than one: no decode step could be timed")
            return
        middle, seconds = prompt_tokens + DECODE_TOKENS / 2, statistics.median(times)
        self.samples.append(decode_sample(seconds, middle, concurrency))
        if concurrency == 1:
            self.decode_points.append((round(middle), seconds))
        self._token_s = max(self._token_s, seconds)

    async def _extension(self, cached: int, new: int) -> None:
        run = self._run
        prefix = run.fresh(cached // self._block_size * self._block_size)
        # One more token, otherwise the last block of the prefix would not be cached.
        await run.ask([*prefix, *run.fresh(1)])
        times: list[float] = []
        reused = len(prefix)
        for _ in range(run.repeats):
            answer = await run.ask([*prefix, *run.fresh(new)])
            if answer.cached_tokens is not None:
                reused = min(reused, answer.cached_tokens)
            else:
                run.note("the server does not report cached tokens; prefixes were assumed to be cached")
            times.append(answer.ttft_s)
        if reused < len(prefix):
            run.note(
                "the server reused less of a prefix than it had just computed; "
                "the sample counts only the reused part as cached"
            )
        seconds = statistics.median(times)
        if seconds > 0:
            self.samples.append(prefill_sample(seconds, len(prefix) + new - reused, reused, self._batched))
