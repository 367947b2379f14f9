"""The turn ledger: where every turn's prompt tokens and seconds went, in parts that add up exactly.

For a prompt of P tokens: P = device + host + new + tail + Σ lost[cause]. For its
seconds: wall = queued + prefilling + decoding. ``unknown`` is said, never
guessed. The ring is bounded and nothing here is computed for a viewer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any


class Lost(str, Enum):
    """Why tokens that had been computed for this program had to be computed again."""

    EVICTED = "evicted"
    """Another request took the blocks while nothing held them."""
    EXPIRED = "expired"
    """The lease had run out before the program came back."""
    SILENT = "silent"
    """The lease had ended because the client gave no sign of life."""
    PRESSURE = "pressure"
    """The lease had been given up for somebody who needed the space."""
    CHANGED = "changed"
    """The prompt differs from the previous turn's from some token on."""
    DROPPED = "dropped"
    """Given up: program end, cache reset."""
    PREEMPTED = "preempted"
    """The request itself was preempted and its blocks were taken before it resumed."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What became of a cached block whose place was reused."""

    cause: Lost
    owner: str | None
    evictor: str | None
    """Program that took the place, where it is known."""
    at_s: float
    score: tuple[float, ...] | None = None
    """The owner's place in the eviction order then, lowest first, where there is such an order."""


class Graveyard:
    """Tombstones by block hash, bounded: the oldest fall out and become ``unknown``."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._stones: OrderedDict[Any, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def bury(self, block_hash: Any, stone: Tombstone) -> None:
        """Note that the block of this hash is gone."""
        self._stones[block_hash] = stone
        self._stones.move_to_end(block_hash)
        if len(self._stones) > self.capacity:
            self._stones.popitem(last=False)

    def find(self, block_hash: Any) -> Tombstone | None:
        """What is known of the block."""
        return self._stones.get(block_hash)


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Where a prompt's tokens came from. Adds up to the prompt."""

    prompt: int
    device: int
    """Reused from device memory."""
    new: int
    """Never computed for this program before."""
    tail: int
    """Computed before, but in a block that was not full: never cached."""
    lost: dict[Lost, int]
    """Computed again, by cause."""
    host: int = 0
    """Reused from host memory, where the disk may have brought it."""

    def computed(self) -> int:
        """Tokens the engine had to prefill."""
        return self.prompt - self.device - self.host

    def again(self) -> int:
        """Tokens prefilled that had been computed for this program before."""
        return self.tail + sum(self.lost.values())


def common_prefix(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Length of the common prefix of two chained hash lists.

    A chained hash covers all that precedes it, so equality at one place means
    equality before it, and bisection finds the end in O(log n).
    """
    low, high = 0, min(len(before), len(now))
    while low < high:
        middle = (low + high + 1) // 2
        if before[middle - 1] == now[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def split_tokens(
    *,
    prompt: int,
    device: int,
    block_size: int,
    before_tokens: int,
    before_full_blocks: int,
    shared_blocks: int | None,
    cause: Lost,
    dropped_hit_blocks: int = 0,
) -> TokenSplit:
    """Split a prompt of ``prompt`` tokens of which ``device`` were found in the cache.

    ``before_tokens`` is the program's context after its previous turn (0 for the
    first), ``before_full_blocks`` how many full blocks that had, ``shared_blocks``
    how many of them the new prompt begins with, ``cause`` why the first of these
    that is missing is missing. The last prompt token is always computed, so a
    full hit stops one block short. ``shared_blocks`` None: the previous context
    itself is no longer known, and all that it may have held is lost by ``cause``.
    ``dropped_hit_blocks`` at a hit's end the engine computes anew on purpose: ``tail``.
    """
    if shared_blocks is None:
        again = max(0, min(before_tokens, prompt) - device)
        return TokenSplit(prompt, device, prompt - device - again, 0, {cause: again} if again else {})
    reusable = min(shared_blocks, max(0, prompt - 1) // block_size)
    usable = max(0, reusable - dropped_hit_blocks) * block_size
    lost: dict[Lost, int] = {}
    if usable > device:
        lost[cause] = usable - device
    rest = prompt - max(device, usable)
    known = max(0, min(before_tokens, prompt) - max(device, usable))
    if shared_blocks < min(before_full_blocks, prompt // block_size):
        changed = min(rest, known)
        if changed:
            lost[Lost.CHANGED] = lost.get(Lost.CHANGED, 0) + changed
        tail = 0
    else:
        changed = 0
        tail = min(rest, known)
    return TokenSplit(prompt, device, rest - changed - tail, tail, lost)


@dataclass(slots=True)
class TurnRecord:
    """One turn. Times are seconds on the engine's monotonic clock."""

    program_id: str
    turn: int
    request_id: str
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    tokens: TokenSplit | None = None
    output_tokens: int = 0
    recomputed_after_preemption: int = 0
    preemptions: int = 0
    evictor: str | None = None
    """Who took the first missing block."""
    evicted_score: tuple[float, ...] | None = None
    """The program's place in the eviction order when it was taken, lowest first; ``None``: no such order."""
    goes_on: float | None = None
    """Probability that another turn would follow, as it was seen when this one ended."""
    tier: str | None = None
    """What ``goes_on`` was taken from."""
    p_reuse: float | None = None
    """``goes_on`` times the share of the next prompt that was expected to be found."""
    tool_before: str | None = None
    gap_s: float | None = None
    """Idle time between the previous turn's end and this arrival."""
    leased: bool = False
    """The program's KV was held when the request arrived."""
    client_request_id: str | None = None
    """The client's own name for the logical request, by which it finds its turn here."""
    lease_ttl_s: float | None = None
    """TTL of the lease granted when the turn ended; ``None`` where none was."""
    outcome: str = "running"

    def seconds(self) -> dict[str, float]:
        """The seconds of a finished turn by what they were spent on; they add up to ``wall``."""
        end = self.finished_s if self.finished_s is not None else self.arrived_s
        admitted = self.admitted_s if self.admitted_s is not None else end
        first = self.first_token_s if self.first_token_s is not None else end
        return {
            "wall": end - self.arrived_s,
            "queued": admitted - self.arrived_s,
            "prefilling": first - admitted,
            "decoding": end - first,
        }

    def as_dict(self) -> dict[str, Any]:
        """Flat JSON."""
        document: dict[str, Any] = {
            "program_id": self.program_id,
            "turn": self.turn,
            "request_id": self.client_request_id,
            "outcome": self.outcome,
            "arrived_s": round(self.arrived_s, 6),
            "gap_s": self.gap_s,
            "tool_before": self.tool_before,
            "leased": self.leased,
            "lease_ttl_s": self.lease_ttl_s,
            "preemptions": self.preemptions,
            "recomputed_after_preemption_tokens": self.recomputed_after_preemption,
            "output_tokens": self.output_tokens,
            "evictor": self.evictor,
            "evicted_score": self.evicted_score,
            "goes_on": self.goes_on,
            "tier": self.tier,
            "p_reuse": self.p_reuse,
            "seconds": {name: round(value, 6) for name, value in self.seconds().items()},
        }
        if self.tokens is not None:
            document["tokens"] = {
                "prompt": self.tokens.prompt,
                "device": self.tokens.device,
                "host": self.tokens.host,
                "new": self.tokens.new,
                "tail": self.tokens.tail,
                "lost": {cause.value: count for cause, count in self.tokens.lost.items()},
            }
        return document


@dataclass(slots=True)
class LedgerTotals:
    """Sums over all turns ever recorded."""

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
        """Count a finished turn."""
        self.turns += 1
        self.output_tokens += record.output_tokens
        self.recomputed_after_preemption_tokens += record.recomputed_after_preemption
        if record.tokens is not None:
            self.prompt_tokens += record.tokens.prompt
            self.device_tokens += record.tokens.device
            self.host_tokens += record.tokens.host
            self.new_tokens += record.tokens.new
            self.tail_tokens += record.tokens.tail
            for cause, count in record.tokens.lost.items():
                self.lost_tokens[cause.value] = self.lost_tokens.get(cause.value, 0) + count


class Ledger:
    """The last ``capacity`` finished turns and the sums over all."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.totals = LedgerTotals()
        self._ring: deque[TurnRecord] = deque(maxlen=capacity)

    def close(self, record: TurnRecord) -> None:
        """Take in a finished turn."""
        self.totals.add(record)
        self._ring.append(record)

    def of_program(self, program_id: str, limit: int = 200) -> list[TurnRecord]:
        """The program's newest finished turns, oldest first."""
        found = islice((r for r in reversed(self._ring) if r.program_id == program_id), limit)
        return list(found)[::-1]
