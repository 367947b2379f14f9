"""What stands before the engine: a router may hold requests back, the open door hands each on at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNLIMITED_S = 1e9
"""Patience of simulated clients in seconds: baselines reject no request either."""


class RoutableRequest(NamedTuple):
    """A request that waits at the door."""

    request_id: str
    program_id: str
    prompt_tokens: int
    since_s: float
    """When it came to the door."""
    turn: int
    """From 0."""


class RoutedProgramView(NamedTuple):
    """A program, as a router sees it that all of its requests and answers go through."""

    program_id: str
    state: str
    """``reasoning``: in the engine. ``waiting``: its request stands at the door. ``acting``: between two
    turns. ``over``: its last turn has just finished; said once, later views leave it out."""
    context_tokens: int
    """Prompt and output of its last finished turn; 0 before the first."""
    since_s: float
    """In this state since."""
    turns: int
    """Turns finished."""
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRouterView:
    """What is known at the door now; nothing of the future."""

    waiting: tuple[RoutableRequest, ...]
    """In order of arrival."""
    programs: tuple[RoutedProgramView, ...]
    capacity_tokens: int
    """KV tokens the device holds."""
    host_capacity_tokens: int = 0


class RequestRouter(Protocol):
    """Which waiting requests go on to the engine now.

    It may remember what it saw and did, and drops no request: what it does not
    let in now it is shown again.
    """

    is_open: bool
    """True: every request goes on at once and ``select_requests`` need not be asked."""
    tick_s: float
    """It is asked at least so often, in virtual seconds; ``inf``: only when something happened."""

    def select_requests(self, view: RequestRouterView, now: float) -> Sequence[str]:
        """Ids of waiting requests that go on now, in this order. Asked after every arrival, every finish,
        every program's end and every tick."""
        ...


class ClusterRouter(RequestRouter, Protocol):
    """A router in front of several engines."""

    def replica_of(self, program_id: str) -> int:
        """Number of the engine, from 0, for the program whose request was just admitted."""
        ...


class PassThroughRouter:
    """No router at all."""

    is_open = True
    tick_s = float("inf")

    def select_requests(self, view: RequestRouterView, now: float) -> Sequence[str]:
        return [request.request_id for request in view.waiting]
