"""What goes between a connector's two halves: orders with each step to the worker, reports back from it.

An *ask* is one attempt to have KV of a request from elsewhere. The planner numbers them and never again uses
a number; whatever comes of an ask that has been ended is of no interest to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple


class Fetch(NamedTuple):
    """Look which of these blocks are stored, and bring them here. Answered by ``Reports.ready``."""

    ask: int
    keys: list[bytes]
    """Of Full Blocks, one after the other in a context."""
    decode_share: float = 0.0
    """Of what is stored, how much the peer is to read."""
    peer: str = ""
    context: str = ""
    total: int = 0
    """Full Blocks of the whole context."""
    epoch: str | None = None


class Stream(NamedTuple):
    """Fill blocks with what an ask has brought, layer by layer while this step computes. It ends the ask."""

    ask: int
    skip: int
    """Engine blocks at the beginning of what was brought that are not wanted."""
    block_ids: list[int]


class Expect(NamedTuple):
    """Wait for a context that is pushed here. Answered by ``Reports.prompts``."""

    ask: int
    context: str
    epoch: str | None = None


class Take(NamedTuple):
    """Fill blocks with a context that is here whole, beside the computing. It ends the ask; vLLM is told when
    the request has its KV."""

    ask: int
    request: str
    skip: int
    """Engine blocks at the beginning of the context that are not wanted."""
    block_ids: list[int]


class Push(NamedTuple):
    """Send a prompt's KV to the peer as this step computes its last layers."""

    request: str
    context: str
    address: str
    epoch: str | None
    keys: list[bytes]
    block_ids: list[int]


class Save(NamedTuple):
    """Store a Full Block that is full after this step; of a request in ``Orders.holds``, in some later."""

    request: str
    place: int
    """Of the Full Block in its context."""
    key: bytes
    parent: bytes
    block_ids: list[int]
    before: list[int]
    """Blocks of its context before it: where one of them turns out to be bad, so is this."""


@dataclass(slots=True)
class Orders:
    """Of one step, carried out in this order."""

    ends: list[int] = field(default_factory=list)
    """Asks that nobody waits for any more."""
    wants: list[str] = field(default_factory=list)
    """Contexts that requests in the engine's queue will ask for: kept until one of ``expects`` or ``drops``
    has them, which each of them comes to, or until the engine takes no step for a lease."""
    drops: list[Expect] = field(default_factory=list)
    """Contexts that are pushed here and will not be asked for."""
    aborts: list[str] = field(default_factory=list)
    """Requests whose push is not wanted any more."""
    fetches: list[Fetch] = field(default_factory=list)
    expects: list[Expect] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    not_filled: list[int] = field(default_factory=list)
    """Blocks that a request counts on and that nothing fills."""
    pushes: list[Push] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    takes: list[Take] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    """Finished requests whose blocks are kept until their push is over, or until the store has been given
    what ``saves`` has of them; which is to be told then."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(slots=True)
class Reports:
    """What has come of orders."""

    ready: dict[int, int] = field(default_factory=dict)
    """Of a fetch that can be streamed, its leading blocks that are here or on their way."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Of a context that was expected, its Full Blocks; 0: it never will be whole."""
    stored: dict[str, int] = field(default_factory=dict)
    """Of a request, the place of the first Full Block that could not be given to the store this time."""

    def __bool__(self) -> bool:
        return bool(self.ready or self.prompts or self.stored)
