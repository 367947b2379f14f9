"""Prompts of three programs with three turns each. The last turn may run on another engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

PROGRAMS = ("P0", "P1", "P2")
FIRST_TOKENS, TOOL_TOKENS, OUTPUT_TOKENS = 600, 60, 40
PATIENCE_S = 240.0


class Turn(NamedTuple):
    """Result of a turn."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int


def words(program: str, turn: int, count: int) -> list[int]:
    """``count`` made-up tokens, spread over the vocabulary."""
    first = 1 + PROGRAMS.index(program) * 7 + turn
    return [10 + (7919 * first * (index + 3) + 104_729 * index * index) % 4000 for index in range(count)]


def contexts_after_two_turns(speak: Callable[[str, list[int]], list[int]]) -> dict[str, list[int]]:
    """Context of each program after two turns, with which the third turn's prompt begins."""
    contexts = {}
    for program in PROGRAMS:
        context = words(program, 0, FIRST_TOKENS)
        context += [*speak(program, context), *words(program, 1, TOOL_TOKENS)]
        contexts[program] = [*context, *speak(program, context)]
    return contexts


def third(program: str, context: list[int]) -> list[int]:
    return [*context, *words(program, 2, TOOL_TOKENS)]
