"""Interface of routers in front of simulated engines, and the views that routers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNLIMITED_S = 1e9
"""Value, in seconds, of settings that require a time limit. No simulation reaches this limit."""


class RoutableRequest(NamedTuple):
    """A request that waits at the router."""

    request_id: str
    program_id: str
    prompt_tokens: int
    since_s: float
    """Time at which the request arrived at the router."""
    turn: int
    """Number of the turn, counted from 0."""


class RoutedProgramView(NamedTuple):
    """A program, as seen by a router through which all its requests and answers pass."""

    program_id: str
    state: str
    """``reasoning``: its request was sent to the engine. ``waiting``: its request is at the router.
    ``acting``: between two turns. ``over``: its last turn has just finished; shown once."""
    context_tokens: int
    """Prompt and output tokens of the program's last finished turn; 0 before the first."""
    since_s: float
    """Time at which ``state`` began."""
    turns: int
    """Number of finished turns."""
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRouterView:
    """State that a router sees now, without any knowledge of the future."""

    waiting: tuple[RoutableRequest, ...]
    """Waiting requests in order of arrival."""
    programs: tuple[RoutedProgramView, ...]
    capacity_tokens: int
    """Tokens of the device's KV pool."""


class RequestRouter(Protocol):
    """Selects the waiting requests that enter the engine now. A request that is not selected keeps waiting,
    and is in the next view again. A router may keep state."""

    is_open: bool
    """Whether every request enters at once. If so, ``select_requests`` is not called."""
    tick_s: float
    """Virtual seconds between two ticks, which are calls of ``select_requests`` without an event; ``inf`` for
    no ticks."""

    def select_requests(self, view: RequestRouterView, now: float) -> Sequence[str]:
        """Ids of waiting requests that enter now, in this order. Called after every arrival, finished turn,
        program end and tick."""
        ...


class ClusterRouter(RequestRouter, Protocol):
    """A router in front of several engines."""

    def replica_of(self, program_id: str) -> int:
        """Number, from 0, of the engine for the program's request that was just selected."""
        ...


class PassThroughRouter:
    """Admits every request at once."""

    is_open = True
    tick_s = float("inf")

    def select_requests(self, view: RequestRouterView, now: float) -> Sequence[str]:
        return [request.request_id for request in view.waiting]
