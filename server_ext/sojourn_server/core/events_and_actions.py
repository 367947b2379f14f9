"""Events that an engine reports to ``ProgramScheduler.handle``, and the actions that this method returns.

Every engine and the simulator use the same events and actions. Events are frozen structs, tagged with their
names; a recording is a list of events with the resulting actions and decisions. Actions are plain tuples,
except ``EventOutcome``. Times are in seconds. In events, ``link`` is ``None`` without host memory of ours,
``output_tokens`` and ``most_tokens`` are the tokens that a request has generated, and the most that it may
still generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import msgspec
from sojourn.ids import ProgramId
from sojourn.wire_codec import EventOutcome
from sojourn.wire_events import AnyEvent

from ..policies.costs.reload_estimate import LinkCosts
from ..policies.placement.placement_views import Tier
from ..policies.policy_protocols import DecisionReason
from ..policies.policy_views import ReclaimRequest, RunningRequestView
from ..policies.preemption_policies import RecoveryMethod
from ..programs.tool_call_parsers import ParsedToolCall
from ..programs.windowed_history import MAX_OUTPUT_TOKENS
from .request_hints import RequestIdentity


class _Event(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base class of all events. ``gc=False`` is safe because events are never in reference cycles."""


class RequestArrived(_Event, frozen=True):
    """A request has reached the engine. Its program's running tool calls count as ended."""

    request_id: str
    identity: RequestIdentity
    prompt_tokens: int
    priority: int = 0
    """The user's priority; a larger number is less important. It counts only in an engine that schedules by
    priority, see ``ReclaimRequest.priority``."""
    block_hashes: Sequence[Any] | None = None
    """Chained hashes of the prompt's full blocks, which tell side requests from turns
    (``ProgramScheduler``). ``None``: not known, or the request names no program."""


class RequestAdmitted(_Event, frozen=True):
    """The engine gave a request its blocks; the request runs from this step on."""

    request_id: str
    cached_tokens: int
    """Prompt tokens found on the device or in a lower tier."""
    tokens: int
    """Prompt tokens plus tokens generated before a preemption."""
    block_hashes: Sequence[Any]
    """Chained hashes of the request's full blocks."""
    resumed: bool
    """Whether the request had been preempted before."""
    host_tokens: int = 0
    """Cached tokens that a KV connector loaded: from host memory, disk or another engine."""
    most_tokens: int = 0
    """0: unknown."""
    reads_cache: bool = True


class FirstToken(_Event, frozen=True):
    """A request has generated its first output token."""

    request_id: str


class RequestPreempted(_Event, frozen=True):
    """A running or loading request lost its blocks and waits again. The answer for a running one is
    ``RecoveryChosen``."""

    request_id: str
    tokens: int = 0
    """Number of tokens whose KV the request lost."""
    block_ids: Sequence[int] = ()
    """Distinct cached blocks that the request leaves, in context order."""
    copied_tokens: int = 0
    """Number of tokens whose KV is already in host memory."""
    link: LinkCosts | None = None
    loading: bool = False
    """Whether the KV was being loaded, or was loaded and the request ran no step since. The loaded KV is
    still in the lower tier."""


class TurnFinishReason(str, Enum):
    """How a request ended."""

    STOPPED = "stopped"
    LENGTH = "length"
    PREFILLED = "prefilled"
    """The prompt is computed, and another engine of a pair generates the output."""
    ABORTED = "aborted"
    ERROR = "error"


class TurnFinished(_Event, frozen=True):
    """A request has left the engine. It leaves cached blocks, on which its program may get a lease."""

    request_id: str
    outcome: TurnFinishReason
    tool_calls: tuple[ParsedToolCall, ...]
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int]
    """Distinct cached blocks that the request leaves, in context order. A lease pins them."""
    block_hashes: Sequence[Any]
    """Chained block hashes of the part of the context whose KV is in ``block_ids``."""
    plan_items: int | None = None
    """Number of open items in the to-do list that the output writes; None: it writes none."""


class ClientEventReceived(_Event, frozen=True):
    """A client reported an event. The answer is its ``EventOutcome``."""

    emitter: str
    event: AnyEvent


class Tick(_Event, frozen=True):
    """Time has passed: leases and programs may expire, and prefetches may be due.

    The engine reports it once per step and before every HTTP operation."""

    used_blocks: int | None = None
    """Number of blocks that requests use or leases hold now; None: as reported last."""


class StepCompleted(_Event, frozen=True):
    """An engine step took ``seconds`` seconds and computed ``tokens`` tokens of ``requests`` requests."""

    tokens: int
    seconds: float
    requests: int
    link: LinkCosts | None = None
    kv_tokens: int = 0
    """Tokens of the requests' contexts, including the tokens of this step; 0: unknown."""


class AdmissionRequested(_Event, frozen=True):
    """The next request in the queue is subject to admission control. The answer is ``RequestChosen`` if it
    may be admitted. Without an answer the request waits."""

    request_id: str
    need_blocks: int
    """Number of blocks that the request's context needs."""
    free_blocks: int
    anything_running: bool
    output_tokens: int = 0
    most_tokens: int = 0
    preempted: bool | None = None
    """Whether the request is in the preempted state now; None: the last reported state applies."""


class BlocksNeeded(_Event, frozen=True):
    """A block allocation failed. The returned actions are one ``RELEASE`` for each lease that ends."""

    need: ReclaimRequest


class VictimNeeded(_Event, frozen=True):
    """A running request finds no free block, so one request must be preempted. The answer is
    ``RequestChosen``. Without an answer the engine chooses."""

    running: Sequence[RunningRequestView]
    """The candidates: running requests, then requests that hold blocks into which KV is being loaded."""
    used_blocks: int = 0
    """Number of blocks in use or leased."""


class DemandSampled(_Event, frozen=True):
    """The engine reports all running requests every few steps. The answer is ``RequestChosen`` if the engine
    must copy one request's KV to host memory now, because that request will probably be preempted soon."""

    used_blocks: int
    running: Sequence[RunningRequestView]
    link: LinkCosts | None = None


class OutputLengthPredicted(_Event, frozen=True):
    """A neural network predicts how many tokens a request will still generate."""

    request_id: str
    at_tokens: int
    """Number of tokens that the request had generated when its hidden states were read."""
    remaining: tuple[float, ...]
    """The prediction: equally likely numbers of tokens still to come, ascending."""
    most_tokens: int = MAX_OUTPUT_TOKENS


class BlocksEvicted(_Event, frozen=True):
    """Cached blocks were reused for another request."""

    taker_request_id: str | None
    """The request that gets the blocks, if known."""
    blocks: Sequence[tuple[int, Any]]
    """(Id of a block, its content hash). Blocks that never had an owner are left out."""
    score: tuple[float, ...] | None = None
    """The owners' eviction score, by which the blocks were chosen; None: eviction is not by program."""


class PrefetchStarted(_Event, frozen=True):
    """Result of a ``PREFETCH`` action: how many blocks of ``prefetch_keys`` were not on the device.

    The answer ``LoadAheadChosen``, if any, makes the engine load some of the missing blocks into spare
    blocks."""

    program_id: ProgramId
    missing_blocks: int
    coming_blocks: int = 0
    """Number of missing blocks that are read from disk."""
    lost_blocks: int | None = None
    """Number of missing blocks that are in no tier; None: all."""
    host_blocks: int = 0
    """Number of leading missing blocks that are in host memory, ready to be loaded."""
    spare_blocks: int = 0
    """Number of the device's blocks that can be taken without evicting KV of a living program. Counting stops
    when further blocks would not change the answer."""


class CacheResetStarted(_Event, frozen=True):
    """The engine is about to clear its prefix cache, which requires that no lease holds blocks and no request
    runs."""


class CacheReset(_Event, frozen=True):
    """The tiers below the device were cleared. The prefix cache on the device may have been cleared too."""

    device: bool = True
    """Whether the prefix cache on the device was cleared too."""


class PolicySwitched(_Event, frozen=True):
    """The operator switched the policy off or on again. While it is off, the engine decides as stock vLLM."""

    on: bool


Event = (
    RequestArrived | RequestAdmitted | FirstToken | RequestPreempted | TurnFinished
    | ClientEventReceived | Tick | StepCompleted | AdmissionRequested | BlocksNeeded | VictimNeeded
    | DemandSampled | OutputLengthPredicted | BlocksEvicted | PrefetchStarted | CacheResetStarted | CacheReset
    | PolicySwitched
)  # fmt: skip


class EngineActionKind(str, Enum):
    """What the engine must do with a program's KV."""

    RELEASE = "release"
    """Stop holding the program's blocks. They stay cached until they are reused."""
    DROP = "drop"
    """The program is over: release its blocks. Blocks that only this program used are evicted next."""
    PREFETCH = "prefetch"
    """Begin to read blocks from disk into host memory, then report ``PrefetchStarted``. The blocks are those
    of ``ProgramScheduler.prefetch_keys`` that are only on disk."""
    PLACE = "place"
    """Treat the program's KV as belonging in ``tier`` from now on. The program's requests may run only if
    ``tier`` is DEVICE."""


class EngineAction(NamedTuple):
    """An action that the engine carries out for one program."""

    kind: EngineActionKind
    program_id: ProgramId
    reason: DecisionReason
    tier: Tier | None = None
    """The tier that a ``PLACE`` names; None for other kinds."""
    block_ids: Sequence[int] = ()
    """For a ``DROP``, the blocks that have one owner or none since the program is no longer their owner, the
    last block of its context first."""


class QueuePlaceChanged(NamedTuple):
    """The engine must look up this request's place in the waiting queue again."""

    request_id: str


class LeaseGranted(NamedTuple):
    """The engine must hold these blocks for the program until it gets ``RELEASE`` or ``DROP``."""

    program_id: ProgramId
    block_ids: Sequence[int]


class RecoveryChosen(NamedTuple):
    """How the preempted request recovers its KV."""

    method: RecoveryMethod


class RequestChosen(NamedTuple):
    """The chosen request. After ``AdmissionRequested`` it may be admitted, after ``VictimNeeded`` it is
    preempted, and after ``DemandSampled`` its KV is copied to host memory."""

    request_id: str


class LoadAheadChosen(NamedTuple):
    """The engine must load the first ``blocks`` missing blocks of the prefix into spare blocks of the device.
    Loaded blocks that are unused after ``keep_s`` seconds are given up."""

    blocks: int
    keep_s: float


Answer = RecoveryChosen | RequestChosen | LoadAheadChosen | EventOutcome
"""An action that answers the event just handled. It is always the last action of the returned list."""

Action = EngineAction | LeaseGranted | QueuePlaceChanged | Answer
EventHandler = Callable[[Event, float], list[Action]]
"""``ProgramScheduler.handle``, or an engine's method that calls it and collects the actions to carry out."""
AnswerKind = TypeVar("AnswerKind", bound=Answer)


def answer_of(actions: Sequence[Action], kind: type[AnswerKind]) -> AnswerKind | None:
    """Return the answer in ``actions``, if it is of this kind; else ``None``."""
    answer = actions[-1] if actions else None
    return answer if isinstance(answer, kind) else None
