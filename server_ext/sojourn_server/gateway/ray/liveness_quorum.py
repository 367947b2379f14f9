"""Votes of gateways on whether a silent replica is dead; one gateway that reaches it is enough."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

VOTE_TIMEOUT_S = 20.0
"""Gateways that have not voted by then are ignored."""


@dataclass(slots=True)
class _LivenessVote:
    instance: str
    asked: frozenset[str]
    began_s: float
    failed: set[str] = field(default_factory=set)


class LivenessQuorum:
    """Running votes, by replica."""

    def __init__(self) -> None:
        self._liveness_votes: dict[str, _LivenessVote] = {}

    def begin(self, replica_id: str, instance: str, gateways: Collection[str], now: float) -> bool:
        """Start a vote; False: one is running already, or there is no gateway."""
        trial = self._liveness_votes.get(replica_id)
        if not gateways or (
            trial is not None and trial.instance == instance and now - trial.began_s < VOTE_TIMEOUT_S
        ):
            return False
        self._liveness_votes[replica_id] = _LivenessVote(instance, frozenset(gateways), now)
        return True

    def heard(self, replica_id: str, instance: str, gateway_id: str, alive: bool) -> None:
        """Record a gateway's vote."""
        trial = self._liveness_votes.get(replica_id)
        if trial is None or trial.instance != instance:
            return
        if alive:
            del self._liveness_votes[replica_id]
        else:
            trial.failed.add(gateway_id)

    def over(self, replica_id: str) -> None:
        """Cancel a vote: the state is known otherwise."""
        self._liveness_votes.pop(replica_id, None)

    def lost(self, gateways: Collection[str], now: float) -> list[tuple[str, str]]:
        """Replicas and instances that no remaining voter reaches."""
        found = []
        for replica_id, trial in list(self._liveness_votes.items()):
            still_there = trial.asked & set(gateways)
            late = now - trial.began_s >= VOTE_TIMEOUT_S
            if trial.failed and (late or still_there <= trial.failed):
                del self._liveness_votes[replica_id]
                found.append((replica_id, trial.instance))
            elif late or not still_there:
                del self._liveness_votes[replica_id]
        return found
