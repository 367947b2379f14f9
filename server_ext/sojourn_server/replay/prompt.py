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

Ids are drawn from a generator seeded by program and turn, so that two runs send the same.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sojourn_server.traces.schema import TraceProgram

FIRST_ID = 300
"""Ids below may be special tokens or single bytes in common vocabularies."""
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


class PromptBuilder:
    """The token ids of one program, turn after turn."""

    def __init__(
        self, program: TraceProgram, *, token_scale: float = 1.0, vocabulary: int = DEFAULT_VOCABULARY
    ) -> None:
        """Raises ``ValueError`` for a vocabulary too small to draw from or a scale that is not positive."""
        if vocabulary < FIRST_ID + 100:
            raise ValueError(f"vocabulary is {vocabulary}; expected at least {FIRST_ID + 100} ids")
        if not token_scale > 0:
            raise ValueError(f"token_scale is {token_scale}; expected > 0")
        self.plans = plan_turns(program, token_scale)
        self._program = program
        self._scale = token_scale
        self._ids = range(FIRST_ID, vocabulary)
        self._contexts: deque[tuple[list[int], list[int]]] = deque(maxlen=_REMEMBERED_TURNS)
        """(prompt, output) of the last turns, newest last."""

    def prompt(self, index: int) -> list[int]:
        """The prompt of turn ``index``; turns must be asked for in order. The caller owns the list."""
        plan = self.plans[index]
        if plan.base is None:
            ids = self._shared_ids(plan.prompt_tokens)
        else:
            prompt, output = self._contexts[plan.base - index]
            ids = (prompt + output)[: plan.kept_tokens]
            if plan.dropped_tokens:
                ids += output[plan.dropped_tokens :]
        ids += self._draw(f"{self._program.program_id}/{index}", plan.prompt_tokens - len(ids))
        # Until the server says otherwise, what is to come is taken to have come.
        self._contexts.append((ids, self.planned_output(index)))
        return list(ids)

    def planned_output(self, index: int) -> list[int]:
        """The ids to force on turn ``index``."""
        return self._draw(f"{self._program.program_id}/{index}/output", self.plans[index].output_tokens)

    def answered(self, output_ids: Sequence[int]) -> bool:
        """Continue from what the server really generated; False, and no change, where the length differs."""
        prompt, output = self._contexts[-1]
        if len(output_ids) != len(output):
            return False
        self._contexts[-1] = prompt, list(output_ids)
        return True

    def _shared_ids(self, at_most: int) -> list[int]:
        program = self._program
        shared = min(round((program.shared_prefix_tokens or 0) * self._scale), at_most)
        alone = program.group is None or program.group == program.program_id
        return self._draw(f"shared/{program.source if alone else program.group}", shared)

    def _draw(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(self._ids, k=count) if count > 0 else []


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
