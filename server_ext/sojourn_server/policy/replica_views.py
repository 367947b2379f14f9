"""Frozen snapshots for the questions a gateway asks: which replica, who moves, whose turn.

A replica is one engine, or one data-parallel rank of one: what has KV memory of its own. Sizes in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ReplicaView(NamedTuple):
    """A replica as the gateway knows it: by what it sent there and what came back."""

    replica_id: str
    load: float
    """Share of it that its requests use, of its device's memory or of those it computes at once, whichever is
    more: those that were sent there, and those that wait for it at the gateway. Above 1 some of them wait."""
    in_flight: int
    """Requests that were sent there and are not answered."""
    room_tokens: int
    """KV that the programs at home there leave of all its tiers, each counted at its size; negative where
    they outgrow them."""
    homed: int = 0
    """How many programs are at home there."""
    takes_new: bool = True
    """Programs may move in: it is well, and not being drained."""
    queued: int = 0
    """Requests that wait for it at the gateway."""
    memory_tokens: int = 0
    """KV that all its tiers hold."""


class Resident(NamedTuple):
    """A program that is at home at a replica, and has a request or is taken to come back; or several that
    have as many turns behind and before them, with the sums of their tokens."""

    context_tokens: int
    """Of its longest turn so far."""
    size_tokens: int
    """What it is expected to need at its longest; at least its context."""
    turns: int
    """Answered so far, by each."""
    turns_left: float
    """Expected after these; where nothing is known of its kind, as many as it has had. At least 1."""
    programs: int = 1


class RouteView(NamedTuple):
    """A request that is to be sent somewhere."""

    request_id: str
    number: int
    """How many came before it, of all."""
    context_tokens: int
    """Its prompt."""
    size_tokens: int
    """What its program is expected to need at its longest; at least the prompt."""
    home: ReplicaView | None = None
    """The replica that its program's turns went to so far; ``None``: none, or it is gone."""
    cached: bool = False
    """Nothing says that its program's KV is no longer there."""
    parent_home: ReplicaView | None = None
    """Its parent's replica, where its program is new and begins as its parent did."""
    prefix_tokens: Mapping[str, int] = {}
    """Of its prompt, how much each replica has computed lately; replicas that have nothing are left out."""
    turns_left: float = 1.0
    """Of its program, this one among them, as ``Resident`` has it."""
    residents: Mapping[str, Sequence[Resident]] = {}
    """Other programs by the replica that they are at home at; replicas without any are left out."""


class Route(NamedTuple):
    """Where to, and in the ledger why. ``replica_id`` ``None``: it waits; ``needs_tokens`` says for what."""

    replica_id: str | None
    reason: str
    needs_tokens: int = 0
    """It waits until a replica that takes new programs has so much room, or nobody at home; until then
    whoever needs as much, and has its KV nowhere, would wait too. 0: nobody else could be placed either."""
    passes: bool = False
    """It goes past those who wait for room: nothing says that it will stay."""


NOBODY = Route(None, "no_replica")


def waits_for_room(needs_tokens: int) -> Route:
    """Nowhere is room for it."""
    return Route(None, "no_room", max(1, needs_tokens))
