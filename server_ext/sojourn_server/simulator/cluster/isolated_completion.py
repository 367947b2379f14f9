"""How long a program takes alone on an empty engine: what its tenant may expect, and a deadline is set by."""

from __future__ import annotations

from ..latency.latency_model import LatencyModel, StepWork
from ..workloads.program_plans import ProgramPlan

SLO_FACTOR = 1.5
"""A program is in time that takes at most so many times what it would take alone (SAGA §9.1)."""


def isolated_completion_s(plan: ProgramPlan, latency: LatencyModel, max_batched_tokens: int) -> float:
    """Seconds from a program's arrival to its last token if nobody else were there, its tools included.

    Each prompt is computed but for what an earlier turn of the program left, in chunks of
    ``max_batched_tokens``; then a token a step. Sub-agents are programs of their own. Steps that decode are
    not worked out one by one: the first, the middle and the last are, weighed as Simpson's rule does.
    """
    total_s = 0.0
    for turn, lengths in enumerate(plan.plans):
        total_s += latency.call_s
        total_s += _prefill_s(latency, lengths.reused_tokens, lengths.prompt_tokens, max_batched_tokens)
        total_s += _decode_s(latency, lengths.prompt_tokens, lengths.output_tokens - 1)
        if turn + 1 < len(plan.plans):
            total_s += plan.gap_s(turn)
    return total_s


def _prefill_s(latency: LatencyModel, found_tokens: int, prompt_tokens: int, chunk: int) -> float:
    # At least the last token of a prompt is computed: there must be something to sample from.
    context, total_s = min(found_tokens, prompt_tokens - 1), 0.0
    while context < prompt_tokens:
        new = min(chunk, prompt_tokens - context)
        pairs = new * context + new * (new + 1) // 2
        context += new
        prefill = new if new > 1 else 0
        total_s += latency.step_s(
            StepWork(
                requests=1,
                tokens=new,
                prefill_tokens=prefill,
                attention_pairs=pairs,
                prefill_attention_pairs=pairs if prefill else 0,
                kv_tokens_read=context,
                sampled=int(context == prompt_tokens),
            )
        )
    return total_s


def _decode_s(latency: LatencyModel, prompt_tokens: int, steps: int) -> float:
    if steps < 1:
        return 0.0
    first, last = prompt_tokens + 1, prompt_tokens + steps
    at = [_token_s(latency, context) for context in (first, (first + last) // 2, last)]
    return steps * (at[0] + 4 * at[1] + at[2]) / 6


def _token_s(latency: LatencyModel, context: int) -> float:
    return latency.step_s(
        StepWork(
            requests=1,
            tokens=1,
            prefill_tokens=0,
            attention_pairs=context,
            prefill_attention_pairs=0,
            kv_tokens_read=context,
            sampled=1,
        )
    )
