"""Runs of ``prefill_decode_cluster.py``: specifications, cached results, and searches over them."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import PdOutcome
from sojourn_server.simulator.prefill_decode.prefill_decode_run import (
    PdSpec,
    calibrate,
    run_prefill_decode_suite,
)

ONLINE_S, WARM_UP_S = 7200.0, 3600.0
"""Virtual seconds of runs that find a capacity, and of their warm-up. An agent takes a quarter of an hour,
and above the capacity latencies grow slowly at first, so one hour is too short."""
HOUR = {"until_s": 3600.0, "warm_up_s": 1800.0}
"""Length and warm-up of runs that measure latencies well below the capacity."""
_RATES = tuple(round(0.05 * step, 2) for step in range(4, 23))
RATES = {"ds-660b": _RATES, "ds-27b": (*_RATES, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3)}
"""Model → rates in agents per second, among which the capacity is searched."""
COMPARED = ("basic", "scheduling", "oracle")
NODES = {"ds-660b": (2, 4), "ds-27b": (1, 1), "qwen2.5-32b": (1, 2)}
"""Model → the paper's default numbers of prefill and decode nodes."""


class Capacity(NamedTuple):
    """The maximum number of agents per second that a system serves within the service levels."""

    rate_per_s: float
    """The largest tried rate within the service levels; 0.0 if there is none."""
    above: PdOutcome | None
    """Result at the next higher rate; ``None`` if no higher rate was tried."""


class Bench:
    """Runs specifications, caches their results, and collects all results for the JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, list[PdOutcome]] = {}
        self.console = Console(stderr=True)
        self._known: dict[PdSpec, PdOutcome] = {}

    def spec(self, **told: Any) -> PdSpec:
        """Return a specification with the fields ``told``, the seed of the command line, and the number of
        agents or the duration scaled by ``--share``."""
        told = {"seed": self.options.seed, **told}
        if "nodes" in told:
            told["prefill_nodes"], told["decode_nodes"] = told.pop("nodes")
        spec = PdSpec(**told)
        share = self.options.share
        if share == 1.0:
            return spec
        if spec.until_s is None:
            return replace(spec, agents=max(2, round(spec.agents * share)))
        return replace(spec, until_s=spec.until_s * share, warm_up_s=spec.warm_up_s * share)

    def online(self, rate_per_s: float, **told: Any) -> PdSpec:
        """Return a specification with agents that arrive at ``rate_per_s``."""
        told = {"agents": 10**9, "until_s": ONLINE_S, "warm_up_s": WARM_UP_S, **told}
        return self.spec(rate_per_s=rate_per_s, **told)

    def run(self, part: str, specs: Sequence[PdSpec]) -> list[PdOutcome]:
        """Return the results of the specifications, in order. Cached ones are not run again."""
        missing = [spec for spec in dict.fromkeys(specs) if self._kept(spec) is None]

        def done(number: int, outcome: PdOutcome) -> None:
            self.console.print(
                f"{part}: {missing[number].label} {outcome.model} {outcome.virtual_s:,.0f} virtual s, "
                f"{outcome.cpu_s:,.0f} s of CPU",
                highlight=False,
            )
            self._keep(missing[number], outcome)

        if missing:
            began_s = time.monotonic()
            run_prefill_decode_suite(missing, processes=self.options.jobs, on_done=done)
            if len(missing) > 1 and len(missing) == len(set(specs)):
                self._keep_wall(specs, time.monotonic() - began_s)
        outcomes = [self._known[spec] for spec in specs]
        self.found.setdefault(part, []).extend(outcomes)
        return outcomes

    def wall_s(self, specs: Sequence[PdSpec]) -> float | None:
        """Return the wall seconds of the ``run`` call that executed all of ``specs``. ``None`` if some
        results were cached before that call, or without ``--cache``."""
        file = self._file(specs)
        return float(file.read_text()) if file is not None and file.exists() else None

    def fit(self) -> list[tuple[float, float]]:
        """Return every (efficiency, seconds) that ``calibrate`` tried. The last one is the fit."""
        return calibrate(
            PdSpec(seed=self.options.seed),
            play=lambda spec: self.run("calibrate", [spec])[0],
        )

    def capacity(self, model: str, rates: Sequence[float]) -> dict[str, Capacity]:
        """Return the capacity of each system, found by bisection of the ascending ``rates``. All systems run
        in parallel."""
        bounds = {system: (-1, len(rates)) for system in COMPARED}
        above: dict[str, PdOutcome] = {}
        while open_ := {system: sum(b) // 2 for system, b in bounds.items() if b[1] - b[0] > 1}:
            specs = [
                self.online(rates[place], system=system, model=model, nodes=NODES[model])
                for system, place in open_.items()
            ]
            for (system, place), outcome in zip(open_.items(), self.run("online", specs), strict=True):
                low, high = bounds[system]
                if outcome.seen is not None and outcome.seen.within_slo:
                    bounds[system] = (place, high)
                else:
                    bounds[system] = (low, place)
                    above[system] = outcome
        return {
            system: Capacity(rates[low] if low >= 0 else 0.0, above.get(system))
            for system, (low, _) in bounds.items()
        }

    # -- what is kept ------------------------------------------------------------------

    def _file(self, what: object) -> Path | None:
        folder = self.options.cache
        name = hashlib.sha256(repr(what).encode()).hexdigest()[:24]
        return None if folder is None else folder / f"{name}.json"

    def _kept(self, spec: PdSpec) -> PdOutcome | None:
        if spec not in self._known:
            file = self._file(spec)
            if file is not None and file.exists():
                self._known[spec] = msgspec.json.decode(file.read_bytes(), type=PdOutcome)
        return self._known.get(spec)

    def _keep(self, spec: PdSpec, outcome: PdOutcome) -> None:
        self._known[spec] = outcome
        file = self._file(spec)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_bytes(msgspec.json.encode(outcome))
            partial.replace(file)

    def _keep_wall(self, specs: Sequence[PdSpec], wall_s: float) -> None:
        file = self._file(specs)
        if file is not None:
            file.write_text(f"{wall_s:.1f}")
