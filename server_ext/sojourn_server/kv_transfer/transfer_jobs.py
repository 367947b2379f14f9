"""The jobs of one step for the worker, and the worker's results.

An *ask* is one attempt to get a request's KV from storage or a peer. The planner gives each ask a number that
is never reused, and ignores results of asks that have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple


class FetchJob(NamedTuple):
    """Find out which of these blocks are stored, and read them. The result is in
    ``TransferResults.ready``."""

    ask: int
    keys: list[bytes]
    """Keys of consecutive Full Blocks of a context."""
    decode_share: float = 0.0
    """Share of the stored blocks that the decode engine, a peer, reads."""
    peer: str = ""
    context: str = ""
    total: int = 0
    """Number of Full Blocks of the whole context."""
    epoch: str | None = None


class StreamJob(NamedTuple):
    """Fill blocks with the result of an ask, layer by layer while this step computes. The job ends the
    ask."""

    ask: int
    skip: int
    """Number of leading engine blocks of the result to leave out."""
    block_ids: list[int]


class ExpectJob(NamedTuple):
    """Wait for a context that is pushed to this engine. The result is in ``TransferResults.prompts``."""

    ask: int
    context: str
    epoch: str | None = None


class FillJob(NamedTuple):
    """Fill blocks with a complete context while other requests compute. The job ends the ask; vLLM is
    notified when the request has its KV."""

    ask: int
    request: str
    skip: int
    """Number of leading engine blocks of the context to leave out."""
    block_ids: list[int]


class PushJob(NamedTuple):
    """Send a prompt's KV to the peer while this step computes the prompt's last tokens."""

    request: str
    context: str
    address: str
    epoch: str | None
    keys: list[bytes]
    block_ids: list[int]


class SaveJob(NamedTuple):
    """Store a Full Block that this step fills. If the request is in ``TransferJobs.holds``, the block is full
    already and may be stored in a later step."""

    request: str
    place: int
    """Index of the Full Block in the request's context."""
    key: bytes
    parent: bytes
    block_ids: list[int]
    before: list[int]
    """Engine blocks of the context before this Full Block: if one of them was not filled, this block is bad
    too."""


@dataclass(slots=True)
class TransferJobs:
    """The jobs of one step, in the order in which they are carried out."""

    ends: list[int] = field(default_factory=list)
    """Asks whose results are not needed any more."""
    wants: list[str] = field(default_factory=list)
    """Contexts that queued requests will ask for. The worker keeps them until they are in ``expects`` or
    ``drops``, or until the engine takes no step for the length of a lease."""
    drops: list[ExpectJob] = field(default_factory=list)
    """Contexts pushed to this engine that no request will ask for."""
    aborts: list[str] = field(default_factory=list)
    """Requests whose push is cancelled."""
    fetches: list[FetchJob] = field(default_factory=list)
    expects: list[ExpectJob] = field(default_factory=list)
    streams: list[StreamJob] = field(default_factory=list)
    not_filled: list[int] = field(default_factory=list)
    """Blocks that a request relies on and that no job fills."""
    pushes: list[PushJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    takes: list[FillJob] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    """Finished requests whose blocks are kept until their push has ended, or until the store has accepted
    their ``saves``; the worker then reports them as sent."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(slots=True)
class TransferResults:
    """Results of the jobs of earlier steps."""

    ready: dict[int, int] = field(default_factory=dict)
    """Number of leading blocks that have arrived or will arrive, for each fetch that can be streamed."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Number of Full Blocks of each expected context; 0: the context will never be complete."""
    stored: dict[str, int] = field(default_factory=dict)
    """Request → index of its first Full Block that the store did not accept this time."""

    def __bool__(self) -> bool:
        return bool(self.ready or self.prompts or self.stored)
