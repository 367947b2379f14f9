"""Estimates of programs' sizes, turns and durations, learned from ended programs."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from ..policies.forecasting import OutputLengthView, SurvivalPrediction
from .routing_records import RoutedProgram

MIN_FINISHED_PROGRAMS = 16
"""Minimum number of finished programs before their contexts and turns serve as an estimate."""
WINDOW = 64
"""Number of latest programs or turns that a statistic covers."""
MAX_STATISTICS = 1024
"""Maximum number of statistics, by tenant and agent type. The least recently used ones are forgotten, because
clients can invent types without limit."""
MAX_TURNS_LEFT = 10_000
"""Maximum of an estimated number of turns."""

StatisticsKey = tuple[str | None, str | None]
"""Tenant (``None``: all tenants) and agent type (``None``: all types)."""
ProgramStatistics = defaultdict[str, deque[Any]]
"""The latest programs of one key. Of ended programs: ``peak_tokens`` (longest contexts), ``turns`` (their
numbers), ``life_s`` (from the first request to the end). ``turn_s``: from sending to the answer's end."""


class ProgramEstimator:
    """Estimates for programs, from the statistics of their tenant and agent type. With too few ended programs
    of the type, those of all the tenant's types serve; then those of the type of all tenants, then all.
    ``quantile``: desired probability that a program stays at or below its estimated size and turns."""

    def __init__(self, quantile: float = 0.5) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; expected between 0 and 1")
        self._quantile = quantile
        self._predictor = SurvivalPrediction(min_outputs=MIN_FINISHED_PROGRAMS, hints=False)
        self._statistics: OrderedDict[StatisticsKey, ProgramStatistics] = OrderedDict()

    def ended(self, program: RoutedProgram, now: float) -> None:
        """Learn from a program that ended at ``now``. A program without answered turns is ignored."""
        if program.turns:
            for known in self._observed(program):
                known["peak_tokens"].append(max(1, program.context_tokens))
                known["turns"].append(program.turns)
                known["life_s"].append(max(0.0, now - program.began_s))

    def observe_turn(self, program: RoutedProgram, seconds: float) -> None:
        """Learn from an answered turn; ``seconds``: time from sending the request to the end of its
        answer."""
        for known in self._observed(program):
            known["turn_s"].append(max(0.0, seconds))

    def size_tokens(self, program: RoutedProgram, context_tokens: int, most_tokens: int) -> int:
        """Return the longest context, in tokens, that a program is expected to reach: at least
        ``context_tokens``, its present context. ``most_tokens``: longest context that a replica can
        compute."""
        left = self._left(program, "peak_tokens", context_tokens, max(1, most_tokens - context_tokens))
        return context_tokens + round(left or 0.0)

    def turns_left(self, program: RoutedProgram) -> float | None:
        """Return the expected number of turns that the program has left; ``None``: unknown. Without a
        declared graph or an agent type, the number is always unknown: a client that states no agent type
        may not report the program's end either."""
        if program.steps_left is None and program.agent_type is None:
            return None
        return self._turns_left(program)

    def work_s(self, program: RoutedProgram) -> float:
        """Return the expected time, in seconds, that replicas still need for the program (SAGA §6.1,
        W_remain): the number of turns left times the mean duration of a turn. The pending nodes of a
        declared graph are the turns left. An unknown number of turns counts as 1. The result is 0 if the
        duration is unknown."""
        return (self._turns_left(program) or 1.0) * (self._mean(program, "turn_s") or 0.0)

    def _turns_left(self, program: RoutedProgram) -> float | None:
        if program.steps_left is not None:
            return program.steps_left
        return self._left(program, "turns", program.turns, MAX_TURNS_LEFT)

    def life_s(self, program: RoutedProgram) -> float | None:
        """Return the mean time from first request to end of programs like this one, in seconds; ``None``:
        unknown."""
        return self._mean(program, "life_s")

    def _observed(self, program: RoutedProgram) -> Iterator[ProgramStatistics]:
        """Yield the statistics to update for a program, from the most general to its own."""
        for key in reversed(_keys(program)):
            known = self._statistics.get(key)
            if known is None:
                known = self._statistics[key] = defaultdict(lambda: deque(maxlen=WINDOW))
                if len(self._statistics) > MAX_STATISTICS:
                    self._statistics.popitem(last=False)
            self._statistics.move_to_end(key)
            yield known

    def _known(self, program: RoutedProgram, name: str, least: int = 1) -> Sequence[Any]:
        """Return the values ``name`` of programs like this one, of the first key with at least ``least`` of
        them; empty: there is none."""
        found = (self._statistics[key][name] for key in _keys(program) if key in self._statistics)
        return next((values for values in found if len(values) >= least), ())

    def _mean(self, program: RoutedProgram, name: str) -> float | None:
        """Return the mean of the values ``name`` for programs like this one; ``None``: unknown."""
        found = self._known(program, name)
        return fmean(found) if found else None

    def _left(self, program: RoutedProgram, name: str, so_far: int, most: int) -> float | None:
        """Predict how much the length ``name`` of a program will grow, at most by ``most``. ``so_far``: the
        present length. Returns ``None`` if too few lengths of ended programs like this one are known."""
        known = sorted(self._known(program, name, MIN_FINISHED_PROGRAMS))
        left = self._predictor.remaining(OutputLengthView("", so_far, most, known), 0.0) if known else None
        return left[min(len(left) - 1, math.floor(len(left) * self._quantile))] if left else None


def _keys(program: RoutedProgram) -> tuple[StatisticsKey, ...]:
    """Return the keys of a program's statistics, its own first."""
    tenant, kind = program.tenant, program.agent_type
    if kind is None:
        return (tenant, None), (None, None)
    return (tenant, kind), (tenant, None), (None, kind), (None, None)
