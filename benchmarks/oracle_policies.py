"""Policies that know what no real server can know. They show how much could be gained by better predictions.

``sojourn-oracle`` is ``sojourn`` with the remaining work of each program. ``PRESET+oracle`` knows the lengths
of outputs, and ``PRESET+erring=0.5`` knows them with a random error: the mean of |ln(actual ÷ predicted)|.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import exp, pi, sqrt
from statistics import NormalDist

from sojourn_server.policies.forecasting import (
    QUANTILE_POINTS,
    OutputLengthView,
    RemainingTokens,
    RemainingTokensPolicy,
)
from sojourn_server.policies.placement.placement_plan import SortKey
from sojourn_server.policies.placement.placement_views import ProgramTierView
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement
from sojourn_server.simulator.latency.latency_models import isolated_turns_s
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation

WORK_ORACLE = "sojourn-oracle"
MIN_LEFT_S = 0.25
"""Minimum for a program's remaining seconds of service, so that its worth is finite."""


def oracle_row(spec: RunSpec) -> RunRow:
    """The metrics of a run whose policy may be one of these oracles."""
    plain, prepare = spec.policy, None
    if spec.policy == WORK_ORACLE:
        plain, prepare = "sojourn", know_work
    elif spec.policy.endswith("+oracle"):
        plain, prepare = spec.policy.removesuffix("+oracle"), know_lengths
    elif "+erring=" in spec.policy:
        plain, _, error = spec.policy.partition("+erring=")
        prepare = partial(know_lengths, error=float(error))
    log = run_simulation(replace(spec, policy=plain), prepare=prepare)
    if prepare is not None:
        log.policy = spec.policy
    return summarize_run(log)


def know_work(simulation: Simulation) -> None:
    """Give the placement policy of ``simulation`` the work that each program has left."""
    work = ProgramWork(simulation)
    for replica in simulation.replicas:
        replica.engine.adapter.program_scheduler.tiers.policy = OraclePlacement(work=work)


def know_lengths(simulation: Simulation, error: float | None = None) -> None:
    """Give the predictor of ``simulation`` the lengths of all outputs, exactly or with a mean error."""
    for replica in simulation.replicas:
        live, scheduler = replica.account.live, replica.engine.adapter.program_scheduler
        scheduler.forecaster.predictor = LengthOracle(
            length=lambda request_id, live=live: live[request_id].log.output_tokens,
            error=error,
            unseen=scheduler.forecaster.predictor,
        )


class ProgramWork:
    """Seconds of service that active programs have left, computed from their plans. Service is the time of
    their requests alone on an engine, without waiting and tools."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        batched = simulation.replicas[0].engine.options.max_num_batched_tokens
        self._turns_s = partial(isolated_turns_s, latency=simulation.latency, max_batched_tokens=batched)
        self._left_s: dict[str, Sequence[float]] = {}
        """Program → for each turn, the seconds of service of this and all later turns."""
        self._total_s = 0.0

    @property
    def mean_s(self) -> float:
        """Mean total service of the programs that were asked for so far; 1 before the first."""
        return self._total_s / len(self._left_s) if self._left_s else 1.0

    def left_s(self, program_id: str) -> float | None:
        """Seconds of service of the program's current turn and all later ones; ``None`` if it is over."""
        active = self._simulation.clients.active.get(program_id)
        if active is None:
            return None
        left_s = self._left_s.get(program_id)
        if left_s is None:
            left_s = self._left_s[program_id] = list(accumulate(reversed(self._turns_s(active.plan))))[::-1]
            self._total_s += left_s[0]
        return max(MIN_LEFT_S, left_s[active.turn])


@dataclass(frozen=True, kw_only=True)
class OraclePlacement(ResidencyPricePlacement):
    """The placement policy of the preset ``sojourn``, with exact remaining work instead of predictions."""

    work: ProgramWork

    def worth(self, program: ProgramTierView) -> float:
        """Mean total service of a program ÷ the service that ``program`` has left; 1 if it is over."""
        left_s = self.work.left_s(program.program_id)
        return 1.0 if left_s is None else self.work.mean_s / left_s

    def promotion_order(self, ready: Sequence[ProgramTierView]) -> list[ProgramTierView]:
        """Return ready programs in ascending order of device blocks × service left."""
        return sorted(ready, key=self._left_key)

    def _left_key(self, program: ProgramTierView) -> SortKey:
        left_s = self.work.left_s(program.program_id) or 0.0
        return (0, program.device_blocks * left_s, program.waiting_since_s, program.program_id)


_NORMAL_SCORES = tuple(
    NormalDist().inv_cdf((point + 0.5) / QUANTILE_POINTS) for point in range(QUANTILE_POINTS)
)


@dataclass(frozen=True, kw_only=True)
class LengthOracle:
    """Predicts the remaining tokens of an output exactly or, with ``error``, times e^x for a normally
    distributed x with mean 0.

    With an error it models a predictor that reads hidden states. A request without output has none, so
    ``unseen`` predicts its length. x is drawn with the request's id as seed, and again each time the output
    has doubled in length, so errors at neighbouring tokens are correlated. The quantiles have the same spread
    as the errors.
    """

    length: Callable[[str], int]
    error: float | None
    unseen: RemainingTokensPolicy
    seed: int = 0
    predicts: bool = True
    reads_hidden_states: bool = False

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        if self.error is not None and view.output_tokens == 0:
            return self.unseen.remaining(view, now)
        left = max(1, self.length(view.request_id) - view.output_tokens)
        if self.error is None:
            return (float(left),)
        drawn = random.Random(f"{self.seed}/{view.request_id}/{view.output_tokens.bit_length()}")
        deviation = self.error / sqrt(2 / pi)  # of a normal x, from the mean of |x|
        middle = left * exp(drawn.gauss(0.0, deviation))
        return tuple(
            min(float(view.most_tokens), max(1.0, middle * exp(score * deviation)))
            for score in _NORMAL_SCORES
        )
