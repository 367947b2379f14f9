"""Measures prefill seconds by prompt length on a live server (Continuum §5.2), and reads its limits.

A sample is the time to first token of a prompt of new random token ids, so that no cache hits occur. Samples
run one at a time, and the server must be idle otherwise. ``lengths_up_to`` chooses the prompt lengths.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sojourn_server.metrics.vllm_metrics_page import CachePool, cache_pool, whole
from sojourn_server.policies.costs.engine_profile import EngineLimits
from sojourn_server.profiling.cost_fitting import fit_prefill_curve
from sojourn_server.replay.completions_client import Completion, CompletionsClient, ServedModel, ServerError
from sojourn_server.traces.token_ids import FIRST_ID

SHORTEST = 1000
WARM_UP_TOKENS = 64


@dataclass(kw_only=True)
class MeasurementRun:
    """Sends the requests of a profile to one server, within a time budget that starts now."""

    client: CompletionsClient
    model: str
    repeats: int
    """Most samples of one quantity; their median counts."""
    budget_s: float
    vocabulary: int
    """Upper bound of the random token ids."""
    on_sample: Callable[[str], None] = lambda what: None
    """Called before each sample."""
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    """Unseeded by default: a second profile of the same server must not hit the first one's blocks."""
    notes: list[str] = field(default_factory=list)
    """What was left out or is unreliable."""

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    def left_s(self, budget_s: float | None = None) -> float:
        """Return the seconds left of the budget, or of its first ``budget_s`` seconds."""
        return (self.budget_s if budget_s is None else budget_s) - (self.clock() - self._started_s)

    def fresh(self, tokens: int) -> list[int]:
        """Return new random token ids."""
        return self.rng.choices(range(FIRST_ID, self.vocabulary), k=tokens)

    async def ask(self, prompt: list[int], max_tokens: int = 1) -> Completion:
        """Send a request. Raises ``RequestError`` if it fails."""
        return await self.client.complete(self.model, prompt, max_tokens)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def lengths_up_to(max_tokens: int) -> list[int]:
    """Return the prompt lengths to measure: ``max_tokens``, a half of it, a quarter and so on, while they
    have ``SHORTEST`` tokens or more. Three in any case, as a quadratic fit needs."""
    count = max(3, (max_tokens // SHORTEST).bit_length())
    return sorted({max(1, max_tokens >> halvings) for halvings in range(count)})


async def measure_prefill(run: MeasurementRun, max_tokens: int, budget_s: float) -> list[tuple[int, float]]:
    """Return (prompt tokens, median seconds) for each of ``lengths_up_to(max_tokens)``, within the first
    ``budget_s`` seconds of the run.

    If a length is predicted to exceed the budget, this length and all longer ones are left out, with a note.
    """
    lengths = lengths_up_to(max_tokens)
    # The first request pays for lazy set-up, e.g. kernels that compile on first use.
    cached = (await run.ask(run.fresh(min(WARM_UP_TOKENS, lengths[0])))).cached_tokens or 0
    points: list[tuple[int, float]] = []
    for position, tokens in enumerate(lengths):
        times: list[float] = []
        for _ in range(run.repeats):
            expected_s = times[-1] if times else _predicted_prefill_s(points, tokens)
            if expected_s > run.left_s(budget_s):
                break
            run.on_sample(f"prefill of {tokens:,} tokens")
            answer = await run.ask(run.fresh(tokens))
            cached += answer.cached_tokens or 0
            times.append(answer.ttft_s)
        if not times:
            left_out = ", ".join(map(str, lengths[position:]))
            run.note(f"the time budget of {budget_s:.0f} s left out these lengths: {left_out}")
            break
        points.append((tokens, statistics.median(times)))
    if cached:
        run.note(f"{cached} prompt tokens came from a cache; the times are too low")
    return points


def _predicted_prefill_s(points: list[tuple[int, float]], tokens: int) -> float:
    """Return the prefill seconds predicted for ``tokens`` tokens. ``points``: (tokens, seconds) of shorter
    prompts; without any, the result is 0.0."""
    if not points:
        return 0.0
    longest, seconds = points[-1]
    # A quadratic through few points may predict too little; proportionality never does.
    return max(fit_prefill_curve(points).seconds(tokens), seconds * tokens / longest)


async def read_limits(client: CompletionsClient, served: ServedModel) -> tuple[EngineLimits, int | None]:
    """Return the limits of the server's engine, and the tokens per KV block by vLLM's metrics; ``None`` for
    each that the server does not report. Never raises.

    A server with sojourn reports all limits. Stock vLLM reports the size of its KV pool and its maximum
    context. Other servers report at most the maximum context.
    """
    engine = served.capabilities
    try:
        pool = cache_pool((await client.get("/metrics")).text)
    except ServerError:
        pool = CachePool()
    block_size = whole(engine.get("block_size")) or pool.block_size
    blocks = whole(engine.get("num_blocks")) or pool.num_blocks
    limits = EngineLimits(
        kv_pool_tokens=blocks * block_size if blocks and block_size else None,
        max_context_tokens=served.max_context_tokens,
        max_num_seqs=whole(engine.get("max_num_seqs")),
        max_num_batched_tokens=whole(engine.get("max_num_batched_tokens")),
        kv_bytes_per_token=whole(engine.get("kv_bytes_per_token")),
    )
    return limits, pool.block_size
