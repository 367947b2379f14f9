"""Whether a silent replica is dead: the gateways look, and one that sees it live is believed first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

TRIAL_S = 20.0
"""Gateways that have not said by then what they found are not waited for."""


@dataclass(slots=True)
class _Trial:
    instance: str
    asked: frozenset[str]
    began_s: float
    failed: set[str] = field(default_factory=set)


class Trials:
    """Those that are going on, by replica."""

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}

    def begin(self, replica_id: str, instance: str, gateways: Collection[str], now: float) -> bool:
        """Gateways are asked to look; False: they are looking already, or there is none."""
        trial = self._trials.get(replica_id)
        if not gateways or (
            trial is not None and trial.instance == instance and now - trial.began_s < TRIAL_S
        ):
            return False
        self._trials[replica_id] = _Trial(instance, frozenset(gateways), now)
        return True

    def heard(self, replica_id: str, instance: str, gateway_id: str, alive: bool) -> None:
        """One has looked."""
        trial = self._trials.get(replica_id)
        if trial is None or trial.instance != instance:
            return
        if alive:
            del self._trials[replica_id]
        else:
            trial.failed.add(gateway_id)

    def over(self, replica_id: str) -> None:
        """It is known otherwise what it is."""
        self._trials.pop(replica_id, None)

    def lost(self, gateways: Collection[str], now: float) -> list[tuple[str, str]]:
        """Replicas and instances that nobody reaches of those who looked and are still there."""
        found = []
        for replica_id, trial in list(self._trials.items()):
            still_there = trial.asked & set(gateways)
            late = now - trial.began_s >= TRIAL_S
            if trial.failed and (late or still_there <= trial.failed):
                del self._trials[replica_id]
                found.append((replica_id, trial.instance))
            elif late or not still_there:
                del self._trials[replica_id]
        return found
