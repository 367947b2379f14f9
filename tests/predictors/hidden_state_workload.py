"""A load whose hidden states determine output lengths. States of short and long outputs point in different
directions.

Import it after ``pytest.importorskip("torch")``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from sojourn_server.predictors.length_trainer import LengthTrainer

HIDDEN = 48
POINTS = 8
LENGTHS = (20, 2000)
"""Approximate output lengths of an answer and of an essay, in tokens."""


class Output(NamedTuple):
    """A finished output, with its length, and a hidden state at each position in ``written``."""

    request_id: str
    tokens: int
    written: list[int]
    states: torch.Tensor


def outputs(count: int, *, seed: int) -> Iterator[Output]:
    """Yield random outputs."""
    draw = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    directions = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(99))
    for number in range(count):
        kind = draw.randrange(2)
        tokens = max(2, round(LENGTHS[kind] * draw.lognormvariate(0, 0.15)))
        written = sorted({0, *(draw.randrange(tokens) for _ in range(5))})
        states = 3.0 * directions[kind] + torch.randn(len(written), HIDDEN, generator=noise)
        yield Output(f"{seed}-{number}", tokens, written, states)


def teach(student: LengthTrainer, output: Output) -> None:
    """Show the trainer one output from beginning to end, and do all training that is due."""
    for written, state in zip(output.written, output.states, strict=True):
        student.observe_and_predict([(output.request_id, written)], state.unsqueeze(0), POINTS)
    student.ended(output.request_id, output.tokens)
    while student.train() is not None:
        pass


def off(student: LengthTrainer, held_back: list[Output]) -> float:
    """Mean |ln(actual ÷ predicted)| of the remaining tokens. The trainer must predict for every state."""
    errors = []
    for output in held_back:
        for written, state in zip(output.written, output.states, strict=True):
            guesses = student.observe_and_predict([(output.request_id, written)], state.unsqueeze(0), POINTS)
            guessed = guesses[output.request_id][POINTS // 2]
            errors.append(abs(math.log((output.tokens - written) / guessed)))
        student.ended(output.request_id, None)
    return sum(errors) / len(errors)
