"""The turn ledger records where the KV of each turn's prompt came from, and where the turn's time went.

The tokens of a prompt are device + host + new + tail + Σ lost[cause] (``TokenSplit``). The seconds of a turn
are queued + prefilling + decoding. Both sums are exact. A loss without a known cause is recorded as
``unknown``. The memory is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, TypedDict, cast

import msgspec


class LossCause(str, Enum):
    """Why KV that was computed for this program was lost and recomputed."""

    EVICTED = "evicted"
    """Another request took the blocks while no lease held them."""
    EXPIRED = "expired"
    """The lease had expired before the program returned."""
    SILENT = "silent"
    """The lease had ended because the client stopped sending heartbeats."""
    PRESSURE = "pressure"
    """The lease was reclaimed for another request."""
    CHANGED = "changed"
    """The prompt repeats the previous turn's context only up to some token. The KV after that token cannot be
    reused."""
    DROPPED = "dropped"
    """The KV was dropped at the program's end or by a cache reset."""
    PREEMPTED = "preempted"
    """The request itself was preempted, and its blocks were taken before it resumed."""
    UNREAD = "unread"
    """The request may not read cached KV, for example because it asks for the logprobs of its prompt. Nothing
    was lost."""
    UNKNOWN = "unknown"


class EvictedBlock(NamedTuple):
    """Why a cached block was evicted, and by which program."""

    cause: LossCause
    evictor: str | None
    """Program whose request took the block, if known."""
    score: tuple[float, ...] | None = None
    """Eviction score of the block's owner at the time; ``None`` if the eviction policy has no scores. Blocks
    with the lowest score are evicted first."""


class EvictionLog:
    """The last ``capacity`` evicted blocks, by hash. The log forgets blocks that were evicted earlier. The
    cause of their loss is then recorded as ``unknown``."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._evicted_blocks: OrderedDict[Any, EvictedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evicted_blocks)

    def add(self, block_hashes: Iterable[Any], evicted_block: EvictedBlock) -> None:
        """Record the eviction of the blocks with these hashes."""
        for block_hash in block_hashes:
            self._evicted_blocks[block_hash] = evicted_block
            self._evicted_blocks.move_to_end(block_hash)
        while len(self._evicted_blocks) > self.capacity:
            self._evicted_blocks.popitem(last=False)

    def find(self, block_hash: Any) -> EvictedBlock | None:
        """Return the entry of this block; ``None`` if the log does not have it."""
        return self._evicted_blocks.get(block_hash)


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """How many of a prompt's tokens came from each source. The numbers add up to the prompt's length.
    ``TurnTokens`` describes the fields."""

    prompt: int
    device: int
    new: int
    tail: int
    lost: dict[LossCause, int]
    host: int = 0


def common_prefix_length(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Return the length of the common prefix of two chained hash lists, in O(log n).

    A chained hash covers all blocks before it. So if two hashes at one index are equal, the lists are equal
    up to this index. Bisection finds the last such index.
    """
    length = min(len(before), len(now))
    return bisect_left(range(length), True, key=lambda index: before[index] != now[index])


def split_tokens(
    *,
    prompt: int,
    device: int,
    block_size: int,
    before_tokens: int,
    before_full_blocks: int,
    shared_blocks: int | None,
    cause: LossCause,
    dropped_hit_blocks: int = 0,
) -> TokenSplit:
    """Return how many tokens of a prompt come from each source.

    ``prompt``: tokens of the prompt. ``device``: tokens of the prompt that the prefix cache held.
    ``before_tokens``: tokens of the program's context after its previous turn; 0 for the first turn.
    ``before_full_blocks``: full blocks of that context. ``shared_blocks``: how many of these blocks the new
    prompt starts with. If it is ``None`` (unknown), all tokens of the context beyond ``device`` count as
    lost. ``cause``: why the first missing shared block is missing. ``dropped_hit_blocks``: number of cached
    blocks at the end of a prefix cache hit that the engine recomputes on purpose. They count as ``tail``. The
    engine always computes the last prompt token, so the block of that token is never part of a hit.
    """
    if shared_blocks is None:
        again = max(0, min(before_tokens, prompt) - device)
        return TokenSplit(prompt, device, prompt - device - again, 0, {cause: again} if again else {})
    reusable = min(shared_blocks, max(0, prompt - 1) // block_size)
    usable = max(0, reusable - dropped_hit_blocks) * block_size
    lost: dict[LossCause, int] = {}
    if usable > device:
        lost[cause] = usable - device
    rest = prompt - max(device, usable)
    known = min(rest, max(0, min(before_tokens, prompt) - max(device, usable)))
    if shared_blocks >= min(before_full_blocks, prompt // block_size):
        return TokenSplit(prompt, device, rest - known, known, lost)
    if known:
        lost[LossCause.CHANGED] = lost.get(LossCause.CHANGED, 0) + known
    return TokenSplit(prompt, device, rest - known, 0, lost)


class TurnSeconds(TypedDict):
    """Seconds of a turn: queued + prefilling + decoding = wall."""

    wall: float
    queued: float
    prefilling: float
    decoding: float


class TurnTokens(TypedDict):
    """Tokens of a turn's prompt by source: device + host + new + tail + the sum of lost = prompt."""

    prompt: int
    device: int
    """Reused from device memory."""
    host: int
    """Loaded by a KV connector: from host memory, disk or another engine."""
    new: int
    """Never computed for this program before."""
    tail: int
    """Computed before and recomputed although nothing was lost. These tokens are in a partial block, which is
    never cached, or in a cached block that the engine recomputes on purpose."""
    lost: dict[str, int]
    """Computed before and computed again, by cause."""


class TurnEntry(TypedDict):
    """One turn of a program in the ledger."""

    program_id: str
    turn: int
    """Number of the turn, from 1."""
    request_id: str | None
    """The client's own id of the request; ``None``: not given."""
    outcome: str
    """If ``running``, the turn has not ended, and its numbers are those of now."""
    arrived_s: float
    """Arrival of the request, in seconds on the engine's monotonic clock."""
    gap_s: float | None
    """Seconds from the end of the previous turn to the arrival of this turn; ``None``: there was no gap."""
    tool_before: str | None
    """History key of the tool of this gap: of the calls that the client reported, the one that began last, or
    else the tool that the output called."""
    tool_s: float | None
    """Seconds of the gap in which tools ran, by the client's reports. Of calls at once the time counts once.
    ``None``: there was no gap, the client reported no call, or a call had not ended."""
    leased: bool
    """Whether the program had a lease when the request arrived."""
    lease_ttl_s: float | None
    """TTL of the lease granted at the end of the turn; ``None``: no lease."""
    preemptions: int
    recomputed_after_preemption_tokens: int
    output_tokens: int
    evictor: str | None
    """Program whose request took the first missing block of the prompt; ``None``: unknown or no loss."""
    evicted_score: tuple[float, ...] | None
    """Eviction score of the owner of the first missing block, at the eviction; the lowest is evicted first.
    ``None``: no loss is known, or the eviction policy has no scores."""
    goes_on: float | None
    """Probability of another turn, predicted at the end of this turn; ``None``: not predicted."""
    tier: str | None
    """Source of ``goes_on``: hints, inferred or cold. It is not a memory tier."""
    p_reuse: float | None
    """``goes_on`` times the expected cached share of the next prompt; ``None``: not predicted."""
    seconds: TurnSeconds
    tokens: TurnTokens | None
    """``None``: the request was never admitted."""
    recompute_estimate_s: float | None
    """Estimated seconds that computing the lost tokens again took; ``None``: unknown."""
    saved_estimate_s: float | None
    """Estimated seconds that computing the reused tokens would have taken; ``None``: unknown."""


@dataclass(slots=True)
class TurnRecord:
    """Times, tokens and outcome of one turn. Times are seconds on the engine's monotonic clock. ``TurnEntry``
    describes the fields that have no description here."""

    program_id: str
    turn: int
    request_id: str | None
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    tokens: TokenSplit | None = None
    output_tokens: int = 0
    recomputed_after_preemption_tokens: int = 0
    preemptions: int = 0
    evictor: str | None = None
    evicted_score: tuple[float, ...] | None = None
    goes_on: float | None = None
    tier: str | None = None
    """A ``PredictionSource``."""
    p_reuse: float | None = None
    tool_before: str | None = None
    tool_s: float | None = None
    gap_s: float | None = None
    leased: bool = False
    lease_ttl_s: float | None = None
    outcome: str = "running"

    def seconds(self) -> TurnSeconds:
        """Return the seconds of a finished turn. ``wall`` is the whole turn; the other entries are its phases
        and add up to ``wall``."""
        end = self.finished_s if self.finished_s is not None else self.arrived_s
        admitted = self.admitted_s if self.admitted_s is not None else end
        first = self.first_token_s if self.first_token_s is not None else end
        return {
            "wall": end - self.arrived_s,
            "queued": admitted - self.arrived_s,
            "prefilling": first - admitted,
            "decoding": end - first,
        }

    def as_dict(self, compute_s: Callable[[int], float] | None = None) -> TurnEntry:
        """Return the record as flat JSON data. ``compute_s`` estimates the seconds to compute a number of
        tokens; ``None``: unknown."""
        tokens = self.tokens
        known = compute_s if tokens is not None else None
        lost = sum(tokens.lost.values()) if tokens is not None else 0
        reused = tokens.device + tokens.host if tokens is not None else 0
        entry = {name: getattr(self, name, None) for name in TurnEntry.__annotations__}
        entry |= {
            "arrived_s": round(self.arrived_s, 6),
            "tool_s": None if self.tool_s is None else round(self.tool_s, 6),
            "seconds": {name: round(cast("float", one), 6) for name, one in self.seconds().items()},
            "tokens": msgspec.to_builtins(tokens),
            "recompute_estimate_s": round(known(lost), 6) if known else None,
            "saved_estimate_s": round(known(reused), 6) if known else None,
        }
        return cast("TurnEntry", entry)


@dataclass(slots=True)
class LedgerTotals:
    """Sums over all turns since the engine's start."""

    turns: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    new_tokens: int = 0
    tail_tokens: int = 0
    output_tokens: int = 0
    recomputed_after_preemption_tokens: int = 0
    lost_tokens: dict[str, int] = field(default_factory=dict)

    def add(self, record: TurnRecord) -> None:
        """Add a finished turn."""
        self.turns += 1
        self.output_tokens += record.output_tokens
        self.recomputed_after_preemption_tokens += record.recomputed_after_preemption_tokens
        if record.tokens is not None:
            self.prompt_tokens += record.tokens.prompt
            self.device_tokens += record.tokens.device
            self.host_tokens += record.tokens.host
            self.new_tokens += record.tokens.new
            self.tail_tokens += record.tokens.tail
            for cause, count in record.tokens.lost.items():
                self.lost_tokens[cause.value] = self.lost_tokens.get(cause.value, 0) + count


class TurnLedger:
    """The last ``capacity`` finished turns, and the sums over all turns."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.totals = LedgerTotals()
        self._ring: deque[TurnRecord] = deque(maxlen=capacity)

    def close(self, record: TurnRecord) -> None:
        """Add the record of a turn that has just finished, and add its numbers to the totals."""
        self.totals.add(record)
        self._ring.append(record)

    def of_program(self, program_id: str, limit: int = 200) -> list[TurnRecord]:
        """Return the last ``limit`` kept turns of a program, oldest first."""
        found = islice((r for r in reversed(self._ring) if r.program_id == program_id), limit)
        return list(found)[::-1]
