"""Events that an engine reports to ``ProgramScheduler.handle``, and the actions that are returned.

Events are frozen structs with a tag; the tags are also the record names of a recording. Actions are plain
tuples. Both are the same for every engine and the simulator. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from sojourn.ids import ProgramId
from sojourn.wire_codec import EventOutcome
from sojourn.wire_events import AnyEvent

from ..policies.placement.placement_views import Tier
from ..policies.policy_protocols import DecisionReason
from ..policies.policy_views import ReclaimRequest, RunningRequestView
from ..policies.preemption.preemption_recovery import RecoveryMethod
from ..programs.output_lengths import MAX_OUTPUT_TOKENS
from ..programs.tool_call_parsers import ParsedToolCall
from .lease_table import Lease
from .request_hints import RequestIdentity


class _Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all events. ``gc=False``: events are in no reference cycles."""


# --- requests ------------------------------------------------------------------------------------


class RequestArrived(_Event, tag="arrive", frozen=True):
    """A request has reached the engine. It ends the tool calls of its program."""

    request_id: str
    identity: RequestIdentity
    prompt_tokens: int


class UntrackedRequestArrived(_Event, tag="stranger", frozen=True):
    """A request has arrived, but reading its program failed. It has no program and is ordered by its
    arrival."""

    request_id: str


class RequestAdmitted(_Event, tag="admit", frozen=True):
    """A request got its blocks and runs from this step on."""

    request_id: str
    cached_tokens: int
    """Prompt tokens found on the device or in a lower tier."""
    tokens: int
    """Prompt tokens, plus those generated before a preemption."""
    block_hashes: Sequence[Any]
    """Chained hashes of the request's full blocks."""
    resumed: bool
    """Whether the request had been preempted before."""
    host_tokens: int = 0
    """Cached tokens that were loaded from host memory."""
    most_tokens: int = 0
    """Number of tokens that it may still generate; 0: unknown."""


class FirstToken(_Event, tag="token", frozen=True):
    """A request's first output token exists."""

    request_id: str


class RequestPreempted(_Event, tag="preempt", frozen=True):
    """A running request lost its blocks and waits again. The answer is ``RecoveryChosen``."""

    request_id: str
    tokens: int = 0
    """Number of tokens whose KV it lost."""
    copied_tokens: int = 0
    """Number of tokens whose KV is already in host memory."""
    offload_s_per_token: float | None = None
    """Measured seconds to copy a token to host memory; None before the first copy."""
    load_back_s_per_token: float | None = None
    queued_s: float = 0.0
    """Seconds until the queued copies are done."""


class LoadGivenUp(_Event, tag="unload", frozen=True):
    """A request whose KV was being loaded, or was loaded and did not run yet, lost its blocks to a running
    one. It waits again; what it loaded is still in the tier below."""

    request_id: str


class TurnFinishReason(str, Enum):
    """How a request ended."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


class TurnFinished(_Event, tag="end", frozen=True):
    """A request has left the engine. The answer is ``LeaseGranted`` if its blocks are to be held."""

    request_id: str
    outcome: TurnFinishReason
    tool_calls: tuple[ParsedToolCall, ...]
    prompt_tokens: int
    output_tokens: int
    cached_blocks: int
    """Number of full blocks that the request can leave in the prefix cache."""
    block_hashes: Sequence[Any]
    held_blocks: int | None = None
    """Number of distinct blocks that leases hold now; None: the sum over all leases."""
    unheld_blocks: int | None = None
    """Blocks of ``cached_blocks`` that no lease holds yet; None: all."""
    used_blocks: int | None = None
    """Number of blocks that requests use or leases hold now, the request's own included; None: unknown."""


class UntrackedRequestLeft(_Event, tag="left", frozen=True):
    """A request without a program has left the engine."""

    request_id: str


# --- clients and time ----------------------------------------------------------------------------


class ClientEventReceived(_Event, tag="event", frozen=True):
    """A client reported an event. The answer is ``EventAnswered``."""

    emitter: str
    event: AnyEvent


class Tick(_Event, tag="tick", frozen=True):
    """Time has passed: handle leases, prefetches and programs that are due. Reported once an engine step and
    before every HTTP operation."""


class StepCompleted(_Event, tag="step", frozen=True):
    """An engine step took ``seconds`` for ``tokens`` tokens of ``requests`` requests."""

    tokens: int
    seconds: float
    requests: int


# --- memory --------------------------------------------------------------------------------------


class AdmissionRequested(_Event, tag="enter", frozen=True):
    """A waiting request that is subject to admission is the next in the queue.

    The answer is ``RequestLetIn``; without an answer the request waits.
    """

    request_id: str
    need_blocks: int
    """Number of blocks that the request's context needs."""
    free_blocks: int
    """Number of free blocks in the pool."""
    anything_running: bool
    output_tokens: int = 0
    """Number of tokens that the request has generated."""
    most_tokens: int = 0
    """Number of tokens that it may still generate."""
    preempted: bool | None = None
    """Whether the request was preempted, according to the engine now; None: as last reported."""


class BlocksNeeded(_Event, tag="room", frozen=True):
    """An allocation failed. The actions are ``RELEASE`` for each lease that ends."""

    need: ReclaimRequest
    freed_blocks: Mapping[ProgramId, int] | None = None
    """Number of blocks that the end of each program's lease would free; None: as many as the lease holds."""


class VictimNeeded(_Event, tag="victim", frozen=True):
    """A running request finds no free block, so that one request must lose its blocks. The answer is
    ``RequestChosen``; without an answer the engine chooses."""

    short_blocks: int
    running: Sequence[RunningRequestView]
    """Candidates: those that run, then those that hold blocks for KV that is being loaded."""
    used_blocks: int = 0
    """Number of blocks in use or leased."""


class DemandSampled(_Event, tag="look", frozen=True):
    """All running requests, every few steps. The answer is ``RequestChosen`` if one of them is to be copied
    to host memory now, because it will probably be preempted soon."""

    used_blocks: int
    running: Sequence[RunningRequestView]
    offload_s_per_token: float | None = None
    """Measured seconds to copy a token to host memory; None before the first copy."""
    load_back_s_per_token: float | None = None
    queued_s: float = 0.0
    """Seconds until the queued copies are done."""


class OutputLengthPredicted(_Event, tag="guess", frozen=True):
    """A network predicts how many tokens a request will still generate."""

    request_id: str
    at_tokens: int
    """Number of tokens generated when its hidden states were read."""
    remaining: tuple[float, ...]
    """Remaining tokens: equally likely values, ascending."""
    most_tokens: int = MAX_OUTPUT_TOKENS
    """Number of tokens that the request was allowed to generate from there on."""


class BlockEvicted(_Event, tag="evict", frozen=True):
    """A cached block was reused for another request."""

    block_hash: Any
    owner: ProgramId | None
    """The program that owned the block; None: several did."""
    taker_request_id: str | None = None
    """The request that gets the block, if known."""
    score: tuple[float, ...] | None = None
    """The owner's place in the eviction order, by which the block was chosen; None: no such order."""


class CachedBlocksFound(_Event, tag="pin", frozen=True):
    """Report of a ``PIN_CACHED`` action: blocks that are still cached. The answer ``LeaseGranted`` holds
    them."""

    program_id: ProgramId
    blocks: int
    held_blocks: int | None = None
    """Number of distinct blocks that leases hold now."""
    unheld_blocks: int | None = None
    """Number of the program's blocks that no lease holds."""
    used_blocks: int | None = None
    """Number of blocks that requests use or leases hold now."""


class PrefetchStarted(_Event, tag="prefetch", frozen=True):
    """Report of a ``PREFETCH`` action: how much of the program's prefix was not on the device."""

    program_id: ProgramId
    missing_blocks: int
    coming_blocks: int = 0
    """Number of missing blocks that are read from disk."""
    lost_blocks: int | None = None
    """Number of missing blocks that are in no tier; None: all."""


class CacheReset(_Event, tag="reset", frozen=True):
    """The engine's prefix cache is about to be cleared."""


Event = (
    RequestArrived | UntrackedRequestArrived | RequestAdmitted | FirstToken | RequestPreempted | LoadGivenUp
    | TurnFinished | UntrackedRequestLeft | ClientEventReceived | Tick | StepCompleted | AdmissionRequested
    | BlocksNeeded | VictimNeeded | DemandSampled | OutputLengthPredicted | BlockEvicted | CachedBlocksFound
    | PrefetchStarted | CacheReset
)  # fmt: skip


# --- actions -------------------------------------------------------------------------------------


class EngineActionKind(str, Enum):
    """What the engine is to do with a program's KV."""

    RELEASE = "release"
    """End the hold on the program's blocks; they stay cached until reused."""
    DROP = "drop"
    """Release, and remove from the prefix cache the blocks that no other program owns."""
    PIN_CACHED = "pin_cached"
    """Hold the blocks of the program's last turn that are still cached, then report ``CachedBlocksFound``."""
    PREFETCH = "prefetch"
    """Load the blocks of its last turn that are no longer on the device, then report ``PrefetchStarted``."""
    PLACE = "place"
    """The program's KV belongs in ``tier`` from now on; park or release its waiting requests accordingly."""


class EngineAction(NamedTuple):
    """An action that the engine carries out for one program."""

    kind: EngineActionKind
    program_id: ProgramId
    reason: DecisionReason
    tier: Tier | None = None
    """Target of a ``PLACE``."""


class RequestRefused(NamedTuple):
    """The engine must end this request with an error: placement parked it for ``gate_timeout_s``."""

    request_id: str


class LeaseGranted(NamedTuple):
    """The engine holds the reported blocks until the lease is released."""

    lease: Lease


class RecoveryChosen(NamedTuple):
    """How the preempted request recovers its KV."""

    method: RecoveryMethod


class RequestLetIn(NamedTuple):
    """The waiting request may be admitted."""

    request_id: str


class RequestChosen(NamedTuple):
    """The running request that the event asks for."""

    request_id: str


class EventAnswered(NamedTuple):
    """The outcome of a client's event."""

    outcome: EventOutcome


Answer = LeaseGranted | RecoveryChosen | RequestLetIn | RequestChosen | EventAnswered
"""An action that answers the event just handled. It is always the last one of its list."""

Action = EngineAction | RequestRefused | Answer


def granted_lease(actions: Sequence[Action]) -> Lease | None:
    """The lease of a ``LeaseGranted`` answer, if any."""
    answer = actions[-1] if actions else None
    return answer.lease if isinstance(answer, LeaseGranted) else None


def chosen_request(actions: Sequence[Action]) -> str | None:
    """The request of a ``RequestChosen`` answer, if any."""
    answer = actions[-1] if actions else None
    return answer.request_id if isinstance(answer, RequestChosen) else None


def is_let_in(actions: Sequence[Action]) -> bool:
    """Whether the answer to ``AdmissionRequested`` is yes."""
    return bool(actions) and isinstance(actions[-1], RequestLetIn)
