"""Transfer jobs of one step, which the planner gives the worker, and the worker's results.

An *ask* is one attempt to get a request's KV from storage or a peer. The planner gives each ask a number that
is never reused, and ignores results of asks that have ended. A *context* is a prompt whose KV is transferred;
jobs name it by its ``transfer_request.context_name``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

WANT_INTERVAL_S = 0.5
"""Seconds between announcements of the contexts that queued requests will ask for. An announcement keeps a
context in the transfer buffers for ``lease_s`` seconds, which is much longer."""


class FetchJob(NamedTuple):
    """Find out which leading blocks of ``keys`` are stored, and read them. The result is in
    ``TransferResults.ready``."""

    ask: int
    keys: list[bytes]
    """Keys of consecutive Full Blocks of a context."""
    decode_share: float = 0.0
    """Share of the stored blocks that the peer, a decode engine, reads."""
    peer: str = ""
    """Address of the peer that reads the last part of the blocks; empty if there is none."""
    context: str = ""
    total: int = 0
    """Number of Full Blocks of the whole context."""
    epoch: str | None = None


class StreamJob(NamedTuple):
    """Fill a request's blocks with fetched KV, layer by layer while this step computes. The job ends the ask
    (the attempt to get KV)."""

    ask: int
    skip: int
    """Number of leading engine blocks of the fetched KV to leave out."""
    block_ids: list[int]


class ExpectJob(NamedTuple):
    """Wait for a context that a peer pushes to this engine. The result is in ``TransferResults.prompts``."""

    ask: int
    context: str
    epoch: str | None = None


class FillJob(NamedTuple):
    """Fill a request's blocks with a complete context, or with fetched KV, while other requests compute. The
    job ends the ask. The worker then tells vLLM that the request's KV has arrived."""

    ask: int
    """Number of the ask; 0 if nothing fills the blocks. The worker then reports them as not filled."""
    request: str
    skip: int
    """Number of leading engine blocks of the context or the fetched KV to leave out."""
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
    """Store a Full Block that this step fills. If the request has finished (``TransferJobs.holds``), the
    block is full already and may be stored in a later step."""

    request: str
    place: int
    """Index of the Full Block in the request's context."""
    key: bytes
    parent: bytes
    block_ids: list[int]
    before: list[int]
    """Ids of the engine blocks before this Full Block in the context. If one of them was not filled, this
    block is not stored either."""


@dataclass(slots=True)
class TransferJobs:
    """The jobs of one step. The worker starts most jobs when the step begins. When the step ends, it copies
    the blocks of ``saves`` and starts the jobs of ``fills``."""

    ends: list[int] = field(default_factory=list)
    """Numbers of asks whose results are not needed any more."""
    wants: list[str] = field(default_factory=list)
    """Contexts that queued requests will ask for, next one first: only the new ones, or all if their order
    has changed. Such a context stays in the buffers until a later step has it in ``expects`` or ``drops``. If
    the engine takes no steps, it stays for at most ``lease_s`` seconds."""
    drops: list[ExpectJob] = field(default_factory=list)
    """Contexts that peers push to this engine and that no request will ask for. Their ``ask`` is 0."""
    aborts: list[str] = field(default_factory=list)
    """Requests whose push is cancelled."""
    fetches: list[FetchJob] = field(default_factory=list)
    expects: list[ExpectJob] = field(default_factory=list)
    streams: list[StreamJob] = field(default_factory=list)
    not_filled: list[int] = field(default_factory=list)
    """Ids of blocks that a request relies on and that no job fills. The worker reports them to vLLM."""
    pushes: list[PushJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    fills: list[FillJob] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM keeps until their push has ended, or until the store has accepted
    their ``saves``. The worker then reports these requests to vLLM as sent."""
    unreported: list[str] = field(default_factory=list)
    """Finished requests that vLLM forgets when their fill job ends. The worker therefore does not report the
    end of their push to vLLM."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(slots=True)
class TransferResults:
    """Results of the jobs of earlier steps."""

    ready: dict[int, int] = field(default_factory=dict)
    """Ask → number of leading blocks that have arrived or are still arriving. Has only asks whose request can
    use the blocks now."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Ask → number of Full Blocks of the expected context; 0 if the context will never be complete."""
    stored: dict[str, int] = field(default_factory=dict)
    """Request → index of its first Full Block that the store did not accept in the last step."""

    def __bool__(self) -> bool:
        return bool(self.ready or self.prompts or self.stored)
