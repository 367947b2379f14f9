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

from collections.abc import Sequence
from typing import NamedTuple

from .hashed_blocks import BlockRuns, block_runs, common_blocks, count_blocks, has_block_ids, run_ids
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


class TurnPlan(NamedTuple):
    """Lengths of one turn, all in tokens."""

    prompt_tokens: int
    output_tokens: int
    reused_tokens: int = 0
    """Number of leading prompt tokens that repeat turn ``base``: its prompt, then its output."""
    dropped_tokens: int = 0
    """Number of tokens at the start of the output of turn ``base`` (thinking) that this prompt omits. The
    rest of that output follows the reused tokens."""
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

    Without blocks, a prompt that is shorter than ``MIN_CONTINUED`` × the previous one, without a recorded
    reason, is a reset. Another that is shorter than the previous prompt and output omits the beginning of
    that output.
    """
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
    """Return the number of prompt tokens of turn ``index`` that the server recomputed; 0 for a first turn.

    They are the tokens of all whole blocks of the reused prefix, minus the ``cached_tokens`` that the server
    reported. The last token of the prompt is always computed, and the last generated token has no KV.
    """
    plan = plans[index]
    if plan.base is None:
        return 0
    before = plans[plan.base]
    whole = min(plan.reused_tokens, before.prompt_tokens + before.output_tokens - 1, plan.prompt_tokens - 1)
    return max(0, whole // block_size * block_size - cached_tokens)


class PromptPlan:
    """Plan and recorded blocks of every turn, the same for all copies of a program.

    With a ``token_scale`` other than 1, recorded blocks are ignored, because block sizes do not scale.
    """

    def __init__(self, program: TraceProgram, token_scale: float = 1.0) -> None:
        """Raises ``ValueError`` for a scale that is not positive."""
        if not token_scale > 0:
            raise ValueError(f"token_scale is {token_scale}; expected > 0")
        self.program = program
        self.token_scale = token_scale
        self.runs = block_runs(program) if token_scale == 1.0 and has_block_ids(program) else []
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
        """Return the token ids of turn ``index``'s prompt. Call this for the turns in order. The caller may
        change the list."""
        plan = self.plans[index]
        ids: list[int] = []
        if plan.base is not None:
            prompt, output = self._contexts[plan.base]
            ids = prompt[: plan.reused_tokens] + output[: max(0, plan.reused_tokens - len(prompt))]
            if plan.dropped_tokens:
                ids += output[plan.dropped_tokens :]
        ids += self._fresh(index, len(ids))
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

    def _fresh(self, index: int, start: int) -> list[int]:
        """Return the new ids of turn ``index``'s prompt, from position ``start`` to its end."""
        plan = self.plans[index]
        if self._runs:
            return self._from_blocks(index, start, plan.prompt_tokens)
        shared: list[int] = []
        if plan.base is None:
            program = self._program
            recorded = round((program.shared_prefix_tokens or 0) * self._outline.token_scale)
            alone = program.group is None or program.group == program.program_id
            name = program.source if alone else program.group
            shared = self._draw(f"shared/{name}", min(recorded, plan.prompt_tokens))
        return shared + self._draw(f"{self._name}/{index}", plan.prompt_tokens - start - len(shared))

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
        """Return the ids of block ``place``, the incomplete last block of turn ``index``'s prompt: those of
        the later turn that completes it, if any."""
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
    """Return (index of the earlier turn that turn ``index`` continues, number of tokens that it keeps), or
    ``None`` if it extends the previous prompt."""
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
