"""How fast programs could be if no KV were ever lost.

Two bounds on completion, of which neither needs an eviction order:

- Play the workload with the untouched scheduler and a pool that never fills
  (``unbounded_pool_blocks``). Nothing is lost, but programs still share the device:
  a reference for what memory can buy, not a bound in the strict sense, since
  another order of service may finish some programs, or most, sooner.
- ``completion_lower_bound``: one program alone on the device, every token that was computed
  once still there. No policy on this device finishes the program sooner, as long
  as the latency model is monotone (a step that does more takes no less) and
  gains nothing by cutting a prefill into smaller chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...traces.prompt_builder import TurnPlan
from ..latency.latency_model import LatencyModel, StepWork


class CompletionLowerBound(NamedTuple):
    """The least a program takes from its arrival to its last token, in seconds."""

    prefill_s: float
    """Steps that end with each turn's first token."""
    decode_s: float
    gaps_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s + self.gaps_s


def completion_lower_bound(
    plans: Sequence[TurnPlan],
    gaps_s: Sequence[float],
    model: LatencyModel,
    *,
    block_size: int,
    chunk_tokens: int,
    shared_tokens: int = 0,
) -> CompletionLowerBound:
    """The least time of a program of these turns, alone on the device, with a cache without end.

    ``gaps_s`` has the client's seconds after every turn but the last; more are
    ignored. ``chunk_tokens`` is the engine's token budget of a step.
    ``shared_tokens`` leading tokens of a prompt that continues none may have been
    computed by others; programs that share more than that with others, which a
    plan does not say, can be faster still.

    Raises ``ValueError`` for too few gaps, or a block size or budget below 1.
    """
    if len(gaps_s) < len(plans) - 1:
        raise ValueError(f"{len(gaps_s)} gaps for {len(plans)} turns; expected one after each but the last")
    _check_positive(block_size=block_size, chunk_tokens=chunk_tokens)
    prefill_s = decode_s = 0.0
    for turn, plan in enumerate(plans):
        reused = _reused_blocks(plans, turn, block_size, shared_tokens) * block_size
        prefill_s += sum(map(model.step_s, _prefill_steps(reused, plan.prompt_tokens, chunk_tokens)))
        decode_s += sum(map(model.step_s, _decode_steps(plan.prompt_tokens, plan.output_tokens)))
    return CompletionLowerBound(prefill_s, decode_s, float(sum(gaps_s[: max(0, len(plans) - 1)])))


def unbounded_pool_blocks(programs: Iterable[Sequence[TurnPlan]], block_size: int) -> int:
    """Blocks of a pool, the null block included, in which these programs lose nothing and wait for no space.

    Every block that any turn adds stays to the end, so it suffices whatever the
    order and however many run at once. What programs share counts once for each.

    Raises ``ValueError`` for a block size below 1.
    """
    _check_positive(block_size=block_size)
    blocks = 1
    for plans in programs:
        for turn, plan in enumerate(plans):
            held = -(-(plan.prompt_tokens + plan.output_tokens) // block_size)
            blocks += held - _reused_blocks(plans, turn, block_size, 0)
    return blocks


def max_programs_started(least_s: Iterable[float], at_once: int, until_s: float) -> int:
    """How many programs can have begun before ``until_s`` in a closed loop of ``at_once``.

    ``least_s`` has the least time of each in the order in which they come, and
    may be endless. If programs take longer, the n-th begins no sooner, so with
    those that this counts ``unbounded_pool_blocks`` is enough for the whole run.

    Raises ``ValueError`` for an ``at_once`` below 1, or a time that is not above 0.
    """
    _check_positive(at_once=at_once)
    ends = [0.0] * at_once
    begun = 0
    for took_s in least_s:
        if ends[0] >= until_s:
            break
        if not took_s > 0:
            raise ValueError(f"program {begun} takes {took_s} s at least; expected more than 0")
        begun += 1
        heapq.heapreplace(ends, ends[0] + took_s)
    return begun


def _reused_blocks(plans: Sequence[TurnPlan], turn: int, block_size: int, shared_tokens: int) -> int:
    """Blocks that a cache without end holds of a turn's prompt when it comes."""
    plan = plans[turn]
    if plan.base is None:
        known = shared_tokens
    else:
        base = plans[plan.base]
        # The last token of an output is never computed: nothing was generated from it.
        known = min(plan.reused_tokens, base.prompt_tokens + base.output_tokens - 1)
    # At least the last token of a prompt is computed.
    return max(0, min(known, plan.prompt_tokens - 1)) // block_size


def _prefill_steps(reused: int, prompt_tokens: int, chunk_tokens: int) -> Iterator[StepWork]:
    for start in range(reused, prompt_tokens, chunk_tokens):
        new = min(chunk_tokens, prompt_tokens - start)
        yield _single_request_step(new, start, last=start + new == prompt_tokens)


def _decode_steps(prompt_tokens: int, output_tokens: int) -> Iterator[StepWork]:
    """The first token comes with the prefill."""
    for context in range(prompt_tokens, prompt_tokens + output_tokens - 1):
        yield _single_request_step(1, context, last=True)


def _single_request_step(new: int, context: int, *, last: bool) -> StepWork:
    """A request alone adds ``new`` tokens to ``context``."""
    pairs = new * context + new * (new + 1) // 2
    several = new > 1
    return StepWork(
        requests=1,
        tokens=new,
        prefill_tokens=new if several else 0,
        attention_pairs=pairs,
        prefill_attention_pairs=pairs if several else 0,
        kv_tokens_read=context + new,
        sampled=int(last),
    )


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
