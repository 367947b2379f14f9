"""Prompts of synthetic token ids with the recorded lengths and common prefixes. A prompt is:

    append    previous prompt + previous output + fresh ids
    dropped   previous prompt + rest of the output + fresh ids   (thinking removed)
    reset     the first ``prefix_tokens`` of the previous prompt + fresh ids
    return    the first ``prefix_tokens_any`` of an older prompt + fresh ids   (interleaved conversations;
              the trace does not name the older prompt, so the one with the nearest length is used)
    shared    the first ``shared_prefix_tokens`` of a first prompt, such as a system prompt, are the same for
              all programs of a group; programs without a group count as one group per source
    blocks    if the trace has block ids, prompts are built block by block, so any two prompts share the
              same prefix as in the recording; an output is taken from the next prompt, which repeats it

Token ids depend only on program, turn and ``copy``, the number of a program's replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .token_ids import TokenIdGenerator, seed_from_text
from .trace_schema import TraceProgram

DEFAULT_VOCABULARY = 8000
"""Token ids are below this number. Common models have larger vocabularies."""
_PREFIX_SLACK_TOKENS = 64
"""Tokens of the previous prompt that a recorded common prefix may lack: traces round down to whole blocks."""
MIN_CONTINUED = 0.98
"""A prompt shorter than this fraction of the previous one, without a recorded reason, is a reset."""
_HISTORY_TURNS = 12
"""Number of earlier turns whose prompts a turn may continue in place of the previous one."""

BlockRuns = tuple[tuple[int, int], ...]
"""Ids of a prompt's full blocks, as runs of consecutive ids: (first, count) of each run. A trace has them as
the first ``hash_lcp`` ids of the previous prompt, then ``hash_runs``."""


class TurnPlan(NamedTuple):
    """Lengths of one turn, all in tokens."""

    prompt_tokens: int
    output_tokens: int
    reused_tokens: int = 0
    """Number of leading prompt tokens that repeat turn ``base``: its prompt, then its output."""
    dropped_tokens: int = 0
    """Tokens at the start of ``base``'s output (thinking) that are omitted; the rest follows the reused."""
    base: int | None = None
    """Index of the earlier turn that this turn continues; ``None`` for the first turn."""

    @property
    def new_tokens(self) -> int:
        """Number of prompt tokens after the reused ones. Even a perfect cache lacks them."""
        return self.prompt_tokens - self.reused_tokens


def plan_turns(
    program: TraceProgram, token_scale: float = 1.0, blocks: Sequence[BlockRuns] = ()
) -> list[TurnPlan]:
    """Return the plan of every turn, with the recorded lengths times ``token_scale``. Prompts and outputs
    have at least one token. ``blocks`` are those of each prompt, if recorded; the scale is then 1.

    Without blocks, a prompt that is shorter than the previous prompt and output omits the beginning of that
    output, if it is no reset."""
    plans: list[TurnPlan] = []
    for index, turn in enumerate(program.turns):
        prompt = max(1, round(turn.prompt_tokens * token_scale))
        output = max(1, round(turn.output_tokens * token_scale))
        if index == 0:
            plans.append(TurnPlan(prompt, output))
            continue
        changed = _changed_blocks(program, index, blocks) if blocks else _changed_prompt(program, index)
        if changed is not None:
            base, kept = changed
            context = plans[base].prompt_tokens + plans[base].output_tokens
            kept = min(round(kept * token_scale), context, prompt - 1)
            plans.append(TurnPlan(prompt, output, kept, 0, base))
            continue
        recorded, before = program.turns[index - 1], plans[-1]
        lacking = recorded.prompt_tokens + recorded.output_tokens - turn.prompt_tokens
        if blocks:  # without a reason, the prompt has only the beginning of the previous output
            lacking = 0 if lacking > turn.out_dropped else min(turn.out_dropped, before.output_tokens)
        else:
            lacking = round(max(lacking, turn.out_dropped) * token_scale)
        dropped = min(lacking, before.output_tokens)
        # Missing tokens beyond that output are missing at the end of the previous prompt.
        kept = max(0, before.prompt_tokens - (lacking - dropped))
        kept = min(kept if dropped else before.prompt_tokens + before.output_tokens, prompt)
        # After rounding, the kept tokens of prompt and output may exceed this prompt by a token.
        dropped = max(dropped, kept + before.output_tokens - prompt) if dropped else 0
        plans.append(TurnPlan(prompt, output, kept, dropped, index - 1))
    return plans


def recomputed_tokens(plans: Sequence[TurnPlan], index: int, cached_tokens: int, block_size: int) -> int:
    """Return the number of prompt tokens of turn ``index`` that the server recomputed: those of all whole
    blocks of the reused prefix, minus the ``cached_tokens`` that the server reported. The last token of the
    prompt is always computed, and the last generated token has no KV."""
    plan = plans[index]
    if plan.base is None:
        return 0
    before = plans[plan.base]
    whole = min(plan.reused_tokens, before.prompt_tokens + before.output_tokens - 1, plan.prompt_tokens - 1)
    return max(0, whole // block_size * block_size - cached_tokens)


class PromptPlan:
    """Plan and recorded blocks of every turn, the same for all copies of a program. A ``token_scale`` other
    than 1 ignores recorded blocks, because block sizes do not scale."""

    def __init__(self, program: TraceProgram, token_scale: float = 1.0) -> None:
        """Raises ``ValueError`` for a scale that is not positive."""
        if not token_scale > 0:
            raise ValueError(f"token_scale is {token_scale}; expected > 0")
        self.program = program
        self.token_scale = token_scale
        self.runs = block_runs(program) if token_scale == 1.0 and program.has_block_ids else []
        """Blocks of each prompt; empty if they are not recorded."""
        self.plans = plan_turns(program, token_scale, self.runs)
        self.last_use = list(range(len(self.plans)))
        """For each turn, the index of the last turn that continues it, or its own index if no turn does."""
        for index, plan in enumerate(self.plans):
            if plan.base is not None:
                self.last_use[plan.base] = index


class PromptBuilder:
    """Builds the token ids of one program's prompts and outputs, turn after turn."""

    def __init__(
        self,
        program: TraceProgram,
        *,
        copy: int = 0,
        system_blocks: frozenset[int] = frozenset(),
        outline: PromptPlan | None = None,
        ids: TokenIdGenerator | None = None,
    ) -> None:
        """Each ``copy`` of a program has its own tokens, except ``system_blocks``, which are recorded; copy 0
        is the recorded program. Builders of one program may share ``outline``, any builders ``ids``."""
        self._outline = outline or PromptPlan(program)
        self._ids = ids or TokenIdGenerator(DEFAULT_VOCABULARY)
        self.plans = self._outline.plans
        self._program, self._runs = program, self._outline.runs
        self._name = program.program_id if copy == 0 else f"{program.program_id}#{copy}"
        scope = "" if program.hash_scope == "global" else program.program_id
        self._public_seed = seed_from_text(f"blocks/{scope}")
        self._private_seed = self._public_seed if copy == 0 else seed_from_text(f"blocks/{scope}#{copy}")
        self._system = system_blocks
        self._contexts: dict[int, tuple[list[int], list[int]]] = {}
        """Turn → its (prompt, output), for the newest turn and for turns that a later turn continues."""

    def prompt(self, index: int) -> list[int]:
        """Return a new list of turn ``index``'s prompt ids. Call this for the turns in order."""
        plan = self.plans[index]
        ids: list[int] = []
        if plan.base is not None:
            prompt, output = self._contexts[plan.base]
            ids = prompt[: plan.reused_tokens] + output[: max(0, plan.reused_tokens - len(prompt))]
            if plan.dropped_tokens:
                ids += output[plan.dropped_tokens :]
        if self._runs:
            ids += self._from_blocks(index, len(ids), plan.prompt_tokens)
        elif plan.base is None:
            ids += self._shared_ids(plan.prompt_tokens)
        ids += self._draw(f"{self._name}/{index}", plan.prompt_tokens - len(ids))
        last_use = self._outline.last_use
        self._contexts = {turn: kept for turn, kept in self._contexts.items() if last_use[turn] > index}
        # The planned output is used until ``replace_output`` replaces it.
        self._contexts[index] = ids, self.planned_output(index)
        return list(ids)

    def planned_output(self, index: int) -> list[int]:
        """Return the token ids that the server shall generate as the output of turn ``index``."""
        plan = self.plans[index]
        following = self.plans[index + 1] if index + 1 < len(self.plans) else None
        if not self._runs or following is None or not _continues(plan, following, index):
            return self._draw(f"{self._name}/{index}/output", plan.output_tokens)
        # A trace may drop more tokens than the output has, and the next prompt may end within this output.
        dropped = following.dropped_tokens
        shown = min(plan.prompt_tokens + plan.output_tokens - dropped, following.prompt_tokens)
        ids = self._draw(f"{self._name}/{index}/output", dropped)
        ids += self._from_blocks(index + 1, plan.prompt_tokens, shown)
        return ids + self._draw(f"{self._name}/{index}/unshown", plan.output_tokens - len(ids))

    def replace_output(self, output_ids: Sequence[int]) -> bool:
        """Use the server's real output of the last turn in later prompts, instead of the planned output.
        Returns False and changes nothing if the two have different lengths."""
        last = max(self._contexts)
        prompt, output = self._contexts[last]
        if len(output_ids) != len(output):
            return False
        self._contexts[last] = prompt, list(output_ids)
        return True

    def _shared_ids(self, at_most: int) -> list[int]:
        program = self._program
        shared = min(round((program.shared_prefix_tokens or 0) * self._outline.token_scale), at_most)
        alone = program.group is None or program.group == program.program_id
        return self._draw(f"shared/{program.source if alone else program.group}", shared)

    def _from_blocks(self, index: int, start: int, end: int) -> list[int]:
        """Return ids ``start`` to ``end - 1`` of turn ``index``'s prompt, made from its recorded blocks."""
        if start >= end:
            return []
        runs, size = self._runs[index], self._program.block_size or 1
        first, full = start // size, count_blocks(runs)
        ids = [one for block in run_ids(runs, first, -(-end // size)) for one in self._block(block, size)]
        if end > full * size:
            ids += self._last_block(index, full, size)
        return ids[start - first * size : end - first * size]

    def _last_block(self, index: int, place: int, size: int) -> list[int]:
        """Return the ids of turn ``index``'s incomplete last block: of the turn that completes it, if any."""
        while index + 1 < len(self.plans) and _continues(self.plans[index], self.plans[index + 1], index):
            index += 1
            block = next(run_ids(self._runs[index], place, place + 1), None)
            if block is not None:
                return self._block(block, size)
        return self._draw(f"{self._name}/{index}/end", size)

    def _block(self, block: int, size: int) -> list[int]:
        seed = self._public_seed if block in self._system else self._private_seed
        return self._ids.draw(block ^ seed, size)

    def _draw(self, seed: str, count: int) -> list[int]:
        return self._ids.draw(seed_from_text(seed), count) if count > 0 else []


def _continues(plan: TurnPlan, following: TurnPlan, index: int) -> bool:
    """Return whether the turn after ``index`` begins with the whole prompt of turn ``index``."""
    return following.base == index and following.reused_tokens >= plan.prompt_tokens


def _changed_prompt(program: TraceProgram, index: int) -> tuple[int, int] | None:
    """Return (turn that turn ``index`` continues, tokens kept); ``None`` if it extends the previous one."""
    turn, before, kept = program.turns[index], program.turns[index - 1], program.turns[index].prefix_tokens
    if kept is None:
        continues = bool(turn.out_dropped) or turn.prompt_tokens >= MIN_CONTINUED * before.prompt_tokens
    else:
        continues = kept >= before.prompt_tokens - _PREFIX_SLACK_TOKENS
    if continues and not turn.reset:
        return None
    kept = (program.shared_prefix_tokens or 0) if kept is None else kept
    kept = min(kept, before.prompt_tokens + before.output_tokens)
    longest = turn.prefix_tokens_any
    if longest is not None and longest > kept + _PREFIX_SLACK_TOKENS:
        lengths = [turn.prompt_tokens + turn.output_tokens for turn in program.turns[:index]]
        older = [j for j in range(max(0, index - _HISTORY_TURNS), index - 1) if lengths[j] >= longest]
        if older:
            return min(older, key=lambda j: (abs(program.turns[j].prompt_tokens - longest), -j)), longest
    return index - 1, kept


def _changed_blocks(program: TraceProgram, index: int, blocks: Sequence[BlockRuns]) -> tuple[int, int] | None:
    """As ``_changed_prompt``, but determined from recorded blocks."""
    turn, before, own = program.turns[index], program.turns[index - 1], blocks[index]
    whole = common_blocks(blocks[index - 1], own) == count_blocks(blocks[index - 1])
    if whole and turn.prompt_tokens >= before.prompt_tokens:
        return None
    older = range(max(0, index - _HISTORY_TURNS), index)
    same, base = max((common_blocks(blocks[j], own), j) for j in older)
    return base, same * (program.block_size or 1)


def block_runs(program: TraceProgram) -> list[BlockRuns]:
    """Return the block ids of each turn's prompt, as runs. Runs that continue one another are merged."""
    prompts: list[BlockRuns] = [()]
    for turn in program.turns:
        left, runs = turn.hash_lcp or 0, list[tuple[int, int]]()
        for start, count in prompts[-1]:
            runs.append((start, max(0, min(count, left))))
            left -= count
        merged: list[tuple[int, int]] = []
        for start, count in (*runs, *(turn.hash_runs or ())):
            if count and merged and sum(merged[-1]) == start:
                merged[-1] = merged[-1][0], merged[-1][1] + count
            elif count:
                merged.append((start, count))
        prompts.append(tuple(merged))
    return prompts[1:]


def run_ids(runs: BlockRuns, first: int, last: int) -> Iterator[int]:
    """Return the ids of the blocks at positions ``first`` to ``last - 1``."""
    ids = itertools.chain.from_iterable(range(start, start + count) for start, count in runs)
    return itertools.islice(ids, first, max(0, last))


def count_blocks(runs: BlockRuns) -> int:
    """Return the number of blocks in all runs."""
    return sum(count for _, count in runs)


def common_blocks(a: BlockRuns, b: BlockRuns) -> int:
    """Return the number of leading blocks that two prompts have in common. Both must have merged runs, as
    from ``block_runs``."""
    same = 0
    for (start_a, count_a), (start_b, count_b) in zip(a, b, strict=False):
        same += min(count_a, count_b) if start_a == start_b else 0
        # Runs are merged as far as possible, so the blocks after a shorter run differ.
        if (start_a, count_a) != (start_b, count_b):
            break
    return same


def system_blocks(programs: Sequence[TraceProgram]) -> frozenset[int]:
    """Return the block ids of all shared prefixes (``shared_prefix_tokens``), such as system prompts."""
    found: set[int] = set()
    for program in programs:
        if program.shared_prefix_tokens and program.block_size and program.has_block_ids:
            runs: BlockRuns = program.turns[0].hash_runs or ()
            found.update(run_ids(runs, 0, program.shared_prefix_tokens // program.block_size))
    return frozenset(found)
