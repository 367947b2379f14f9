"""Prompts of the recorded lengths with the recorded prefix relations, made of synthetic token ids.

A trace holds no text. What a KV cache sees of a workload is lengths and common
prefixes, and these are kept exactly:

    append    previous prompt + previous output + fresh ids
    dropped   previous prompt + what is left of the output + fresh ids   (thinking taken out)
    reset     the first ``prefix_tokens`` of the previous prompt + fresh ids
    return    the first ``prefix_tokens_any`` of an older prompt + fresh ids   (conversations that
              interleave in one session; the trace doesn't say which prompt, so the one is taken
              that ends nearest to there)
    shared    the first ``shared_prefix_tokens`` of a first prompt are the group's, or where a
              program is a group of its own, the source's: e.g. one system prompt for all sessions
    blocks    where a trace names the content of every block, prompts are made block by block, so
              that any two share what they shared when recorded; outputs are those that the next
              prompt shows

Ids depend on program, turn and ``copy`` only, so that two runs send the same, and two copies of
one program share what they share with others: the group's prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sojourn_server.traces.hashed_blocks import (
    Runs,
    block_runs,
    common_blocks,
    count_blocks,
    has_block_ids,
    run_ids,
)
from sojourn_server.traces.schema import TraceProgram
from sojourn_server.traces.token_ids import FIRST_ID, TokenIds, seed_of

__all__ = [
    "DEFAULT_VOCABULARY",
    "FIRST_ID",
    "Outline",
    "PromptBuilder",
    "TurnPlan",
    "computed_again",
    "plan_turns",
]

DEFAULT_VOCABULARY = 8000
"""Ids stay below; every common model knows more."""
_PREFIX_SLACK_TOKENS = 64
"""Sources round common prefixes down to their blocks; less than this is no sign of a changed prompt."""


_REMEMBERED_TURNS = 12
"""How far back ``prefix_tokens_any`` looks."""


class TurnPlan(NamedTuple):
    """Lengths of one turn, all in tokens."""

    prompt_tokens: int
    output_tokens: int
    kept_tokens: int = 0
    """Leading tokens that are those of turn ``base``'s prompt and output: what a cache could spare."""
    dropped_tokens: int = 0
    """Leading tokens of the previous output that are taken out right after ``kept_tokens``."""
    base: int | None = None
    """The earlier turn whose context is continued, mostly the previous one; ``None`` for the first."""

    @property
    def new_tokens(self) -> int:
        """Tokens nobody has computed before."""
        return self.prompt_tokens - self.kept_tokens


def plan_turns(program: TraceProgram, token_scale: float = 1.0) -> list[TurnPlan]:
    """The lengths of every turn of ``program``, times ``token_scale``, each at least 1."""
    plans: list[TurnPlan] = []
    for index, turn in enumerate(program.turns):
        output = _scaled(turn.output_tokens, token_scale)
        if index == 0:
            plans.append(TurnPlan(_scaled(turn.prompt_tokens, token_scale), output))
            continue
        changed = _changed_prompt(program, index)
        if changed is not None:
            base, kept = changed
            context = plans[base].prompt_tokens + plans[base].output_tokens
            prompt = _scaled(turn.prompt_tokens, token_scale)
            kept = min(round(kept * token_scale), context, prompt - 1)
            plans.append(TurnPlan(prompt, output, kept, 0, base))
            continue
        recorded, before = program.turns[index - 1], plans[-1]
        append = turn.append_tokens
        if append is None:
            append = turn.prompt_tokens - recorded.prompt_tokens - recorded.output_tokens + turn.out_dropped
        dropped = min(round(turn.out_dropped * token_scale), before.output_tokens)
        context = before.prompt_tokens + before.output_tokens
        kept = before.prompt_tokens if dropped else context
        prompt = context - dropped + max(0, round(append * token_scale))
        plans.append(TurnPlan(prompt, output, kept, dropped, index - 1))
    return plans


def computed_again(plans: Sequence[TurnPlan], index: int, cached_tokens: int, block_size: int) -> int:
    """Prompt tokens of turn ``index`` that were computed before and not found: a server took
    ``cached_tokens`` of its prompt from a cache of whole blocks.

    What a perfect cache spares are the whole blocks of the kept prefix, but for a prompt's last token,
    which is always computed; and the last generated token never has KV.
    """
    plan = plans[index]
    if plan.base is None:
        return 0
    before = plans[plan.base]
    whole = min(plan.kept_tokens, before.prompt_tokens + before.output_tokens - 1, plan.prompt_tokens - 1)
    return max(0, whole // block_size * block_size - cached_tokens)


class Outline:
    """What all copies of a program have in common: the plan of every turn, and its blocks where recorded.

    With a ``token_scale`` other than 1, recorded blocks are not used: their
    sizes do not scale. Then only lengths and ``shared_prefix_tokens`` count.
    """

    def __init__(self, program: TraceProgram, token_scale: float = 1.0) -> None:
        """Raises ``ValueError`` for a scale that is not positive."""
        if not token_scale > 0:
            raise ValueError(f"token_scale is {token_scale}; expected > 0")
        self.program = program
        self.token_scale = token_scale
        self.runs: list[Runs] | None = None
        if token_scale == 1.0 and has_block_ids(program):
            self.runs = block_runs(program)
            self.plans = _plan_blocks(program, self.runs)
        else:
            self.plans = plan_turns(program, token_scale)
        last_use = list(range(len(self.plans)))
        for index, plan in enumerate(self.plans):
            if plan.base is not None:
                last_use[plan.base] = index
        self.last_use = last_use
        """Of every turn, the last that continues its context; itself where none does."""


class PromptBuilder:
    """The token ids of one program, turn after turn."""

    def __init__(
        self,
        program: TraceProgram,
        *,
        token_scale: float = 1.0,
        vocabulary: int = DEFAULT_VOCABULARY,
        copy: int = 0,
        system_blocks: frozenset[int] = frozenset(),
        outline: Outline | None = None,
        ids: TokenIds | None = None,
    ) -> None:
        """Raises ``ValueError`` for a vocabulary too small to draw from or a scale that is not positive.

        Copies of a program differ in ``copy`` and have private tokens of their own; copy 0 is the
        recorded one. ``system_blocks`` are the recorded blocks that all copies share. ``outline``
        and ``ids`` may be handed in where many builders share them.
        """
        self._outline = outline if outline is not None else Outline(program, token_scale)
        self._ids = ids if ids is not None else TokenIds(vocabulary)
        self.plans = self._outline.plans
        self._program = program
        self._name = program.program_id if copy == 0 else f"{program.program_id}#{copy}"
        scope = "" if program.hash_scope == "global" else program.program_id
        self._public_seed = seed_of(f"blocks/{scope}")
        self._private_seed = self._public_seed if copy == 0 else seed_of(f"blocks/{scope}#{copy}")
        self._system = system_blocks
        self._contexts: dict[int, tuple[list[int], list[int]]] = {}
        """(prompt, output) of the turns that later ones continue."""

    def prompt(self, index: int) -> list[int]:
        """The prompt of turn ``index``; turns must be asked for in order. The caller owns the list."""
        plan = self.plans[index]
        ids: list[int] = []
        if plan.base is not None:
            prompt, output = self._contexts[plan.base]
            ids = prompt[: plan.kept_tokens]
            if plan.kept_tokens > len(prompt):
                ids += output[: plan.kept_tokens - len(prompt)]
            if plan.dropped_tokens:
                ids += output[plan.dropped_tokens :]
        ids += self._fresh(index, len(ids))
        last_use = self._outline.last_use
        self._contexts = {turn: kept for turn, kept in self._contexts.items() if last_use[turn] > index}
        # Until the server says otherwise, what is to come is taken to have come.
        self._contexts[index] = ids, self.planned_output(index)
        return list(ids)

    def planned_output(self, index: int) -> list[int]:
        """The ids to force on turn ``index``."""
        plan = self.plans[index]
        following = self.plans[index + 1] if index + 1 < len(self.plans) else None
        if self._outline.runs is None or following is None or not _continues(plan, following, index):
            return self._draw(f"{self._name}/{index}/output", plan.output_tokens)
        # A source may drop more than there is; and a next prompt may end within this output.
        dropped = following.dropped_tokens
        shown = min(plan.prompt_tokens + plan.output_tokens - dropped, following.prompt_tokens)
        ids = self._draw(f"{self._name}/{index}/output", dropped)
        ids += self._from_blocks(index + 1, plan.prompt_tokens, shown)
        return ids + self._draw(f"{self._name}/{index}/unshown", plan.output_tokens - len(ids))

    def answered(self, output_ids: Sequence[int]) -> bool:
        """Continue from what the server really generated; False, and no change, where the length differs."""
        last = max(self._contexts)
        prompt, output = self._contexts[last]
        if len(output_ids) != len(output):
            return False
        self._contexts[last] = prompt, list(output_ids)
        return True

    def _fresh(self, index: int, start: int) -> list[int]:
        """The ids of the prompt from ``start`` on, which come from no earlier turn."""
        plan = self.plans[index]
        if self._outline.runs is not None:
            return self._from_blocks(index, start, plan.prompt_tokens)
        shared = self._shared_ids(plan.prompt_tokens) if plan.base is None else []
        return shared + self._draw(f"{self._name}/{index}", plan.prompt_tokens - start - len(shared))

    def _from_blocks(self, index: int, start: int, end: int) -> list[int]:
        """The ids of turn ``index``'s prompt from ``start`` to before ``end``, by its recorded blocks."""
        if start >= end:
            return []
        runs, size = self._runs(index), self._program.block_size or 1
        first, full = start // size, count_blocks(runs)
        ids: list[int] = []
        for block in run_ids(runs, first, -(-end // size)):
            ids += self._block(block, size)
        if end > full * size:
            ids += self._last_block(index, full, size)
        return ids[start - first * size : end - first * size]

    def _last_block(self, index: int, place: int, size: int) -> list[int]:
        """The block at ``place`` that turn ``index`` only begins: a later turn that goes on tells which."""
        while index + 1 < len(self.plans) and _continues(self.plans[index], self.plans[index + 1], index):
            index += 1
            if count_blocks(self._runs(index)) > place:
                return self._block(next(iter(run_ids(self._runs(index), place, place + 1))), size)
        return self._draw(f"{self._name}/{index}/end", size)

    def _block(self, block: int, size: int) -> list[int]:
        seed = self._public_seed if block in self._system else self._private_seed
        return self._ids.draw(seed ^ block, size)

    def _runs(self, index: int) -> Runs:
        assert self._outline.runs is not None
        return self._outline.runs[index]

    def _shared_ids(self, at_most: int) -> list[int]:
        program = self._program
        shared = min(round((program.shared_prefix_tokens or 0) * self._outline.token_scale), at_most)
        alone = program.group is None or program.group == program.program_id
        return self._draw(f"shared/{program.source if alone else program.group}", shared)

    def _draw(self, seed: str, count: int) -> list[int]:
        return self._ids.draw(seed_of(seed), count) if count > 0 else []


def _plan_blocks(program: TraceProgram, runs: list[Runs]) -> list[TurnPlan]:
    """As ``plan_turns``, with what each prompt keeps taken from its blocks instead of inferred."""
    size = program.block_size or 1
    plans: list[TurnPlan] = []
    for index, turn in enumerate(program.turns):
        prompt, output = turn.prompt_tokens, max(1, turn.output_tokens)
        if index == 0:
            plans.append(TurnPlan(prompt, output))
            continue
        before = plans[-1]
        same = common_blocks(runs[index - 1], runs[index])
        if same == count_blocks(runs[index - 1]) and prompt >= before.prompt_tokens:
            dropped = min(turn.out_dropped, before.output_tokens)
            context = before.prompt_tokens + before.output_tokens
            if prompt >= context - dropped:
                kept = before.prompt_tokens if dropped else context
                plans.append(TurnPlan(prompt, output, kept, dropped, index - 1))
            else:  # The output is there in part only, for reasons that the source doesn't tell.
                plans.append(TurnPlan(prompt, output, prompt, 0, index - 1))
            continue
        base = index - 1
        for older in range(index - 2, max(0, index - _REMEMBERED_TURNS) - 1, -1):
            found = common_blocks(runs[older], runs[index])
            if found > same:
                base, same = older, found
        plans.append(TurnPlan(prompt, output, same * size, 0, base))
    return plans


def _continues(plan: TurnPlan, following: TurnPlan, index: int) -> bool:
    """Whether the turn after turn ``index`` begins with its whole prompt."""
    return following.base == index and following.kept_tokens >= plan.prompt_tokens


def _changed_prompt(program: TraceProgram, index: int) -> tuple[int, int] | None:
    """Where a prompt does not simply continue the previous one: the turn it does, and the tokens kept."""
    turn, before = program.turns[index], program.turns[index - 1]
    kept = turn.prefix_tokens
    if not turn.reset and (kept is None or kept >= before.prompt_tokens - _PREFIX_SLACK_TOKENS):
        return None
    if kept is None:
        kept = program.shared_prefix_tokens or 0
    kept = min(kept, before.prompt_tokens + before.output_tokens)
    longest = turn.prefix_tokens_any
    if longest is not None and longest > kept + _PREFIX_SLACK_TOKENS:
        older = [
            j
            for j in range(max(0, index - _REMEMBERED_TURNS), index - 1)
            if program.turns[j].prompt_tokens + program.turns[j].output_tokens >= longest
        ]
        if older:
            return min(older, key=lambda j: (abs(program.turns[j].prompt_tokens - longest), -j)), longest
    return index - 1, kept


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
