"""A load whose hidden states determine output lengths: short ones point one way, long ones another.

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
"""Of an answer and of an essay, about."""


class Output(NamedTuple):
    """One that was written: how long it became, and a hidden state at each of some places."""

    request_id: str
    tokens: int
    written: list[int]
    states: torch.Tensor


def outputs(count: int, *, seed: int, flipped: bool = False, hidden: int = HIDDEN) -> Iterator[Output]:
    """``flipped``: what pointed at an answer now points at an essay."""
    draw = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    directions = torch.randn(2, hidden, generator=torch.Generator().manual_seed(99))
    for number in range(count):
        kind = draw.randrange(2)
        tokens = max(2, round(LENGTHS[kind ^ flipped] * draw.lognormvariate(0, 0.15)))
        written = sorted({0, *(draw.randrange(tokens) for _ in range(5))})
        states = 3.0 * directions[kind] + torch.randn(len(written), hidden, generator=noise)
        yield Output(f"{seed}-{number}", tokens, written, states)


def teach(student: LengthTrainer, output: Output) -> None:
    """The whole life of an output, and all the training that is due."""
    for written, state in zip(output.written, output.states, strict=True):
        student.see([(output.request_id, written)], state.unsqueeze(0), POINTS)
    student.ended(output.request_id, output.tokens)
    while student.train() is not None:
        pass


def off(student: LengthTrainer, held_back: list[Output]) -> float:
    """Mean |ln(actual ÷ guessed)| of what was left; every state has to be answered."""
    errors = []
    for output in held_back:
        for written, state in zip(output.written, output.states, strict=True):
            guesses = student.see([(output.request_id, written)], state.unsqueeze(0), POINTS)
            guessed = guesses[output.request_id][POINTS // 2]
            errors.append(abs(math.log((output.tokens - written) / guessed)))
        student.gone(output.request_id)
    return sum(errors) / len(errors)
