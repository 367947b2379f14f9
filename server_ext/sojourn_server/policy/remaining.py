"""How many tokens a running request will yet generate: the question behind every forecast (Tetris §2.2)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, Protocol

POINTS = 8
"""Equally likely remaining lengths that a prediction names."""

MIN_OUTPUTS = 16
"""Outputs that have to be known of an agent's kind before its next ones are predicted."""

MIN_TAIL = 4
"""The longest outputs that are enough to tell how fast lengths fall off."""

LEAST_OFF = 0.001
"""No hint is taken for closer to the mark than that, however exact those before it were."""


Remaining = tuple[float, ...]
"""Equally likely numbers of tokens yet to come, ascending, at least one, each ≥ 1."""


class LengthView(NamedTuple):
    """A running request, for the remaining question: how much will it yet write?"""

    request_id: str
    output_tokens: int
    """Generated so far."""
    most_tokens: int
    """It may generate so many more: an upper bound, and no estimate."""
    lengths: Sequence[int] = ()
    """Of finished outputs of its kind, in tokens, ascending."""
    hinted_tokens: int | None = None
    """How long its client said that the whole output will be."""
    hint_off: float | None = None
    """By how much hints of its agent type were off: mean |ln(actual ÷ hinted)|; ``None``: too few are."""
    guess: Remaining | None = None
    """What a network made of its hidden states, less what it has written since; what it has passed is left
    out."""
    guess_off: float | None = None
    """By how much such guesses were off: mean |ln(actual ÷ guessed)| of what was left; ``None``: too few."""
    known_off: float | None = None
    """The same of what was answered without them, of the same outputs at the same places."""


class RemainingPolicy(Protocol):
    """How many tokens a request will yet generate; ``None``: nothing is known. ``predicts`` False: never
    asked, and outputs' lengths are not noted. ``reads_states`` True: it is of use only with ``guess``,
    which the engine has to be started for."""

    predicts: bool
    reads_states: bool

    def remaining(self, view: LengthView, now: float) -> Remaining | None: ...


_SHARES = tuple((point + 0.5) / POINTS for point in range(POINTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPrediction:
    """Nobody knows."""

    predicts: bool = False
    reads_states: bool = False

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLength:
    """The mean of its kind, less what it has written: the baseline that every other has to beat.

    Whoever has outgrown the mean is expected to end with the next token, as long as it lives. Raises
    ``ValueError`` for ``min_outputs`` below 1.
    """

    min_outputs: int = MIN_OUTPUTS
    predicts: bool = True
    reads_states: bool = False

    def __post_init__(self) -> None:
        if not self.min_outputs >= 1:
            raise ValueError(f"min_outputs is {self.min_outputs}; expected ≥ 1")

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        if len(view.lengths) < self.min_outputs:
            return None
        mean = math.fsum(view.lengths) / len(view.lengths)
        return (bounded(mean - view.output_tokens, view),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What outputs of its kind that came so far had yet to come: P(length | length > so far).

    Of n that came so far the next one is as likely to end in any of the n + 1 gaps between them. In the
    last, beyond the longest that was seen, lengths of answers fall off like a power of their length
    rather than faster: the longer such a one is, the more is expected of it (Hill's estimate of the
    exponent, from the longest ``tail_share`` of the outputs). ``min_outputs`` have to be known at all.

    With ``hints`` a client's own word is taken instead where that of its agent type was closer to the
    mark than what is known without it. Raises ``ValueError`` for numbers that make no sense.
    """

    min_outputs: int = MIN_OUTPUTS
    tail_share: float = 0.1
    hints: bool = True
    predicts: bool = True
    reads_states: bool = False

    def __post_init__(self) -> None:
        if not self.min_outputs >= 1 or not 0 < self.tail_share <= 1:
            raise ValueError(
                f"min_outputs {self.min_outputs}, tail_share {self.tail_share}; "
                "expected ≥ 1, and above 0 up to 1"
            )

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        lengths, so_far = view.lengths, view.output_tokens
        known = len(lengths) >= self.min_outputs
        if self.hints and view.hinted_tokens is not None:
            told = _as_told(view, _scatter(lengths) if known else math.inf)
            if told is not None:
                return told
        if not known:
            return None
        ended = bisect_right(lengths, so_far)
        came = len(lengths) - ended
        longest = max(so_far, lengths[-1])
        exponent = 0.0  # which few need, and which takes longer than all else
        left: list[float] = []
        for share in _SHARES:
            # The length that this share of those that came so far does not exceed.
            place = share * (came + 1)
            gap = int(place)
            if gap == came:
                exponent = exponent or tail_exponent(lengths, self.tail_share)
                length = longest * (1 - (place - gap)) ** (-1 / exponent)
            else:
                begin, end = lengths[ended + gap - 1] if gap else so_far, lengths[ended + gap]
                length = begin + (end - begin) * (place - gap)
            left.append(bounded(length - so_far, view))
        return tuple(left)


def tail_exponent(lengths: Sequence[int], share: float) -> float:
    """α of P(length > x) ~ x^-α by Hill's estimate from the longest ``share`` of ascending ``lengths``; from
    1 to 8, since a heavier tail has no mean and a lighter one is none."""
    count = min(len(lengths) - 1, max(MIN_TAIL, round(len(lengths) * share)))
    if count < 2:
        return 1.0
    edge = lengths[-count - 1]
    # The mean of ln(length / edge), by one logarithm in place of fifty: integers multiply exactly.
    spread = math.log(math.prod(lengths[-count:])) / count - math.log(edge)
    return min(8.0, max(1.0, 1 / spread)) if spread > 0 else 8.0


def _as_told(view: LengthView, off_without: float) -> Remaining | None:
    """As the client said, spread by how far such hints were off, and given that it came so far; ``None``: it
    said nothing, is not believed, since what is known without it is ``off_without``, or is refuted."""
    hinted, off, so_far = view.hinted_tokens, view.hint_off, view.output_tokens
    if hinted is None or hinted < 1 or off is None or not off < off_without:
        return None
    # Mean |x| of a normal is 0.8 of its deviation.
    told = NormalDist(math.log(hinted), max(off / 0.8, LEAST_OFF))
    ended = told.cdf(math.log(so_far)) if so_far > 0 else 0.0
    left = 1.0 - ended
    if left < 0.5 / POINTS:
        return None  # it has come further than the longest that such a hint lets one expect
    longest = math.log(max(1, so_far + view.most_tokens))
    return tuple(
        bounded(math.exp(min(longest, told.inv_cdf(ended + left * (point + 0.5) / POINTS))) - so_far, view)
        for point in range(POINTS)
    )


def _scatter(lengths: Sequence[int]) -> float:
    """By how much the median of these is off: mean |ln(length ÷ median)|, of about a hundred of them."""
    stride = max(1, len(lengths) // 100)
    some = lengths[stride // 2 :: stride]
    middle = lengths[len(lengths) // 2]
    return math.fsum(abs(math.log(length / middle)) for length in some) / len(some)


def bounded(tokens: float, view: LengthView) -> float:
    """What it can still write of that: at least the next token, at most what it may."""
    return max(1.0, min(tokens, float(view.most_tokens)))
