"""What a coordinator needs of the core that decides, whichever it is, beside facts in and actions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core import facts
from ..core.journal import Changes, StateJournal
from ..core.state import CoreState
from .autoscale import Need
from .messages import Place, Registration, State
from .register import Register


class Seen(NamedTuple):
    """A replica as the core knows it."""

    instance: str
    heard_s: float
    in_flight: int


class Deciding(ABC):
    """A core and what belongs to it. One life of it."""

    core: Any
    journal: StateJournal
    """Of homes."""

    @abstractmethod
    def restore(self, kept: CoreState, now: float, elapsed_s: float) -> int:
        """Go on from what another one left ``elapsed_s`` ago; how many programs have a home. Raises
        ``ValueError``, ``TypeError``, ``KeyError``: then it is of no more use."""

    @abstractmethod
    def snapshot(self, now: float) -> CoreState | None:
        """For another one; ``None``: that needs nothing."""

    @abstractmethod
    def why_not(self, told: Registration) -> str:
        """Why an engine is sent nothing; empty: it is taken."""

    @abstractmethod
    def turned(self) -> Sequence[facts.ReplicaDrains | facts.ReplicaStays]:
        """Replicas that are there and are to be left, or no longer, since engines came of which
        ``why_not`` was asked."""

    @abstractmethod
    def seen_as(self, place: Place) -> facts.Fact:
        """The fact that it is there."""

    @abstractmethod
    def told(self, told: Registration, now: float) -> Sequence[facts.AnyAction]:
        """What an engine that is taken says beside that it is there; what comes of it."""

    @abstractmethod
    def replica(self, replica_id: str) -> Seen | None:
        """``None``: there is none."""

    @abstractmethod
    def drains(self, place: Place) -> facts.ReplicaDrains | None:
        """What to say so that nobody is sent there any more; ``None``: nothing, also not once it is seen."""

    @abstractmethod
    def look(self, register: Register, now: float) -> bool:
        """Whether gateways are to be shown other places than before."""

    @abstractmethod
    def knows(self, request_id: str) -> bool:
        """A request is not over."""

    @abstractmethod
    def sent(self, request_id: str) -> facts.Send | None:
        """Where a request was sent; ``None``: it waits, or is not known."""

    @abstractmethod
    def need(self, engines: int) -> Need:
        """Of room, where there are so many engines."""

    @abstractmethod
    def changes_since(self, version: int, life: str) -> Changes:
        """Homes that a copy as of ``version`` of this ``life`` lacks."""

    @abstractmethod
    def flush(self, now: float) -> Changes | None:
        """Changed homes that are due."""

    @abstractmethod
    async def onto(self, state: State) -> State:
        """With all that is known of programs and replicas."""
