"""Transfer jobs of one step, which the planner gives the worker, and the worker's results.

An *ask* is one attempt to get a request's KV from storage or a peer. The planner gives each ask a number that
is never reused, and ignores results of asks that have ended. A *context* is a prompt whose KV one engine
sends to another. Jobs name it by its ``transfer_request.context_name``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple


class FetchJob(NamedTuple):
    """Find out how many leading ``keys`` are stored, and read these blocks. Without keys: wait for a context
    that a peer pushes to this engine."""

    ask: int
    keys: list[bytes]
    """Keys of consecutive Full Blocks of a context."""
    context: str = ""
    peer: str = ""
    """Address of the peer that reads the blocks and sends them; empty if this engine reads them."""
    total: int = 0
    """Number of Full Blocks of the whole context, for the peer."""


class FillJob(NamedTuple):
    """Fill a request's blocks with a complete context, or with fetched KV. The job ends the ask."""

    ask: int
    """If it is 0, there is no KV, and the worker reports the blocks as not filled."""
    request: str
    skip: int
    """Number of leading engine blocks of the context or the fetched KV to leave out."""
    block_ids: list[int]


class PushJob(NamedTuple):
    """Send a prompt's KV to the peer at ``address`` while this step computes the prompt's last tokens."""

    request: str
    context: str
    address: str
    keys: list[bytes]
    block_ids: list[int]


class AbortJob(NamedTuple):
    """End the push of a context, or tell the peer, which may have read for it, that there will be none."""

    context: str
    address: str


class SaveJob(NamedTuple):
    """Store a Full Block that this step fills, or one of a finished request (``TransferJobs.holds``), unless
    it is known to be stored."""

    request: str
    place: int
    """Index of the Full Block in the request's context."""
    key: bytes
    parent: bytes
    block_ids: list[int]


@dataclass(slots=True)
class TransferJobs:
    """The jobs of one step. The worker starts them when the step begins, except two kinds: when the step
    ends, it copies the blocks of ``saves`` and starts ``fills``."""

    fetches: list[FetchJob] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Numbers of asks whose results are not needed any more. They may be asks of the same step."""
    aborts: list[AbortJob] = field(default_factory=list)
    streams: list[FillJob] = field(default_factory=list)
    """Blocks that are filled layer by layer while this step computes."""
    not_filled: list[int] = field(default_factory=list)
    """Ids of blocks that a request needs but no job fills. The worker reports them to vLLM as not filled."""
    pushes: list[PushJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    fills: list[FillJob] = field(default_factory=list)
    """Blocks that are filled while other requests compute. The worker tells vLLM of the end of each."""
    holds: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until this step has copied them for ``saves``. The worker
    then reports these requests to vLLM as sent. A push needs no hold: its step has copied the blocks."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(slots=True)
class TransferResults:
    """Results of the jobs of earlier steps."""

    ready: dict[int, int] = field(default_factory=dict)
    """Ask that has a result → number of leading blocks that have arrived or will arrive. For an expected
    context that has failed, it is 0."""
    stored: dict[str, int] = field(default_factory=dict)
    """Request → index of the first Full Block of its context that the last step did not save."""

    def __bool__(self) -> bool:
        return bool(self.ready or self.stored)
