"""Types of the answers of ``EngineService``, which the HTTP routes of an engine pass on as JSON."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..metrics.decision_log import DecisionRecord
from ..metrics.live_frame import EngineRow, ProgramSummary
from ..metrics.turn_ledger import TurnEntry
from ..programs.program_status import ProgramOutcome


class TierCapacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity of host memory or disk for KV."""

    blocks: int | None
    """Number of blocks; ``null``: unknown."""
    bytes: int
    shared: bool = False
    """Whether other engines read this disk."""


class TierCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """KV storage below the device."""

    connector: str
    """The connector that moves KV; ``SojournConnector`` is sojourn's."""
    on: bool
    """Whether KV is saved and loaded; always true for connectors other than ``SojournConnector``."""
    off_because: str | None
    host: TierCapacity | None
    disk: TierCapacity | None


class MissingTiers(msgspec.Struct, frozen=True):
    """The mechanisms of a policy that are off, because sojourn does not manage the engine's host memory."""

    mechanisms: list[str]
    """Names of the mechanisms."""
    because: str

    def __str__(self) -> str:
        return f"off: {', '.join(self.mechanisms)}, because {self.because}"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine understands, and how it is configured."""

    name: Literal["sojourn", "vllm"] = "sojourn"
    """``vllm`` for an engine of a pair that runs vLLM's own scheduler. Clients send events and hints only
    to engines named ``sojourn``."""
    version: str = version("sojourn")
    """Version of sojourn."""
    wire: list[int]
    """Versions of the wire format."""
    policy: str
    events: list[str] = []
    """Types of events that the engine accepts."""
    unused_hints: list[str] = []
    """Fields of hints and of events (``tool_start.expected_s``) that the policy does not use."""
    engine: dict[str, str]
    """Version of vLLM, and sizes and limits of the engine."""
    tiers: TierCapabilities | None = None
    """KV storage below the device; ``null``: none. With several engines, the entry of the first engine whose
    tiers are off, or else of the first engine."""
    missing: MissingTiers | None = None
    paths: dict[str, Any] | UnsetType | None = UNSET
    """Role and address of an engine of a prefill/decode pair. A gateway's answer does not have this field."""


class PolicyState(msgspec.Struct, frozen=True):
    """The policy of an engine, after a switch."""

    policy: str
    """``off`` while the policy is switched off."""
    started_with: str
    """The policy with which the engine started."""


class ProgramList(msgspec.Struct, frozen=True, kw_only=True):
    """The newest programs of an engine."""

    now_s: float
    """Time of the answer, on the engine's clock, as the other times."""
    programs: list[ProgramSummary]
    shown: int
    total: int
    """If a status was requested, number of programs with this status; else number of all programs that the
    engine knows. With several engines, a lower bound."""


class LinkStats(msgspec.Struct, frozen=True):
    """Current state of one link of an engine of a pair, to storage or to other engines."""

    queued_bytes: int = 0
    """Bytes that wait to be moved."""
    queued_s: float | None = None
    """Seconds until the link's queue is empty; ``None``: unknown."""
    moved_bytes: int = 0
    """Bytes moved so far."""


class ResidentProgram(msgspec.Struct, frozen=True, omit_defaults=True):
    """A program whose KV is in the engine, in any tier."""

    program_id: str
    tokens: int
    """Number of the context's tokens whose KV is there."""
    context_tokens: int
    idle_s: float = 0.0
    """Seconds since the program's last contact."""
    steps_left: float | None = None
    """Expected number of further turns, by the client's hint; ``None``: unknown."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine, or of one data-parallel rank, and its programs with KV."""

    requests: int = 0
    """Number of requests in the engine."""
    request_tokens: int = 0
    """Prompt tokens of these requests."""
    free_tokens: int = 0
    """Tokens of KV for which the device has free blocks; cached blocks of no running request count."""
    programs: list[ResidentProgram] = []
    """The latest contact first."""
    complete: bool = True
    """Whether ``programs`` has all programs with KV."""
    waiting: list[str] = []
    """Programs that wait with a request, and whose KV placement keeps in no tier until it has room."""
    links: dict[str, LinkStats] = {}
    """Links of an engine of a pair, by name."""
    epoch: str = ""
    """Instance of the KV transfer manager of an engine of a pair."""


class ProgramDetail(ProgramSummary, frozen=True, kw_only=True):
    """One program with the ledger of its turns and the decisions about the program."""

    now_s: float
    """Time of the answer, on the clock of all other times in it."""
    outcome: ProgramOutcome | None
    """How the program ended; ``None`` if the program goes on. The client reports ok, error and cancelled. The
    other values name what the client did before it fell silent: final (it announced its last request as
    final), disconnected (it closed the connection of its last request), lost (its heartbeats stopped), idle
    (it sent no heartbeats)."""
    agent_type: str | None
    node: str | None
    """Node of the program's execution graph."""
    graph_hash: str | None
    expected_steps_left: float | None
    """Number of further turns that the client expects."""
    tools_running: int
    ledger: list[TurnEntry]
    unfinished: list[TurnEntry]
    """Turns in progress, oldest first. Their numbers are those of now."""
    decisions: list[DecisionRecord]
    decisions_since_s: float | None
    """Time of the oldest decision that the log keeps; ``None``: it has dropped none."""
    max_hinted_ttl_s: float | None
    """Longest TTL that a hint can get; ``None``: the policy ignores hinted TTLs."""
    max_hinted_ttl_from: str
    """What limits this TTL."""


class PersistProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the KV of a program's last turn is written to disk."""

    program_id: str
    state: Literal["writing", "done", "unsupported"]
    """If ``writing``, ask again later. If ``unsupported``, nothing is written, and ``reason`` says why."""
    reason: str | None
    """Why nothing is written, or why not all of the context: the disk is too small for it, for instance."""
    turns: int
    """Number of the program's finished turns. Of several engines, the one with the most answers."""
    context_tokens: int
    stored_tokens: int
    """Number of leading tokens of the context that are on disk, up to the first block that is not."""
    pending_tokens: int
    compute_s: float | None
    """Estimated seconds for this engine to compute the context again, from the engine's profile or measured
    steps; ``None``: unknown."""


class EngineStats(EngineRow, frozen=True, kw_only=True):
    """Current counters and gauges of one engine. An engine of a pair that runs vLLM's own scheduler (policy
    ``stock``) fills only ``paths``."""

    tiers: dict[str, Any] = msgspec.field(default_factory=dict)
    """Blocks of host memory and disk by state, ``moves`` by result and the ``traffic`` of copies; empty
    without tiers."""
    paths: dict[str, Any] | None
    """Links and requests of an engine of a prefill/decode pair."""
    placed: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of programs by the tier in which the policy places them."""
    output_lengths: dict[str, Any] = msgspec.field(default_factory=dict)
    """``outputs``: number of learned output lengths. ``network_off`` and ``without_off``: mean |ln(actual ÷
    predicted)| of predictions with and without the neural network; ``null``: too few outputs were checked.
    ``network``: state of the network; ``null`` without one."""


class DecisionPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of an engine's decision log."""

    decisions: list[DecisionRecord]
    next: int
    """``since`` of the next request."""
