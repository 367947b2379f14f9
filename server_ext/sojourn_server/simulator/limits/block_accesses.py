"""Records the block accesses of one run in a log. Turns the log into a checked sequence, on which other
eviction orders are replayed (``eviction_replay``, ``belady``)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from sojourn_server.vllm.compat import Request, SchedulerOutput


class BlockAccessKind(IntEnum):
    """What happened to a request's blocks."""

    ADMIT = 0
    """The request got its first blocks and reuses cached leading blocks."""
    GROW = 1
    """The request holds more blocks, or more full blocks, than before."""
    FREE = 2
    """The request freed all its blocks: it finished, or was aborted or preempted. Full blocks stay cached
    until the pool reuses their memory."""


class BlockAccess(NamedTuple):
    """One entry of a log."""

    kind: BlockAccessKind
    request: int
    """Index into ``AccessLog.chains``."""
    held_blocks: int
    """Number of blocks that the request holds after the access, including incomplete ones."""
    full_blocks: int
    """Number of the request's full blocks with complete KV, which a cache may keep."""


class AccessLog(msgspec.Struct, kw_only=True):
    """Input of an eviction replay. A request is identified by its index in ``chains``, ``prompt_blocks``,
    ``owners`` and ``requests``, which have one element per request."""

    pool_blocks: int
    """Blocks of the KV pool, without vLLM's null block."""
    block_size: int
    chains: list[list[int]] = msgspec.field(default_factory=list)
    """Ids of each request's full blocks, in the order of their tokens. Equal ids mean equal content and equal
    preceding blocks."""
    prompt_blocks: list[int] = msgspec.field(default_factory=list)
    """Number of each request's full prompt blocks that the cache lookup covers."""
    owners: list[str] = msgspec.field(default_factory=list)
    """Program of each request; "" for a request without a program."""
    requests: list[str] = msgspec.field(default_factory=list)
    """Id of each request; not used by replays."""
    accesses: list[BlockAccess] = msgspec.field(default_factory=list)


class AccessRecorder:
    """Records the accesses of one engine. Call ``step`` after every scheduled step, ``finished`` when a
    request ends, and ``close`` at the end of the run."""

    def __init__(self, pool_blocks: int, block_size: int) -> None:
        self.log = AccessLog(pool_blocks=pool_blocks, block_size=block_size)
        self._size = block_size
        self._index: dict[str, int] = {}
        self._held: dict[str, tuple[int, int]] = {}
        """(Blocks, computed tokens) of each running request."""
        self._reached: dict[str, int] = {}
        """Largest number of full blocks that each unfinished request has held."""

    def step(self, planned: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Record the accesses of one scheduled step: admissions, growth, and frees by preemption."""
        for request_id in sorted(planned.preempted_req_ids or ()):
            self._free(request_id)
        add = self.log.accesses.append
        for request_id in planned.num_scheduled_tokens:
            request = requests[request_id]
            held = -(-request.num_computed_tokens // self._size)
            # vLLM caches a block when it schedules the block's last token, so requests admitted in this step
            # may find the block. With asynchronous scheduling, a token is unknown until its step has a
            # result; unknown tokens do not count.
            computed = min(request.num_computed_tokens, request.num_tokens)
            full = computed // self._size
            before = self._held.get(request_id)
            if before is None:
                add(BlockAccess(BlockAccessKind.ADMIT, self._number(request), held, full))
            elif (before[0], before[1] // self._size) != (held, full):
                add(BlockAccess(BlockAccessKind.GROW, self._index[request_id], held, full))
            self._held[request_id] = (held, computed)
            self._reached[request_id] = max(full, self._reached.get(request_id, 0))

    def finished(self, request: Request) -> None:
        """Record the end of a request, and the ids of all its full blocks."""
        number = self._number(request)
        if request.request_id in self._held:
            self._free(request.request_id)
        full = (request.num_tokens - 1) // self._size
        self.log.chains[number] = _block_ids(request, full)
        del self._index[request.request_id]
        self._reached.pop(request.request_id, None)

    def close(self, requests: dict[str, Request]) -> AccessLog:
        """Return the log. ``requests``: the requests in the engine, by id. An unfinished request's chain in
        the log has its computed full blocks, and at least its ``prompt_blocks``."""
        for request_id in self._index:
            request = requests.get(request_id)
            if request is not None:
                full = min(len(request.block_hashes), self._reached.get(request_id, 0))
                number = self._index[request_id]
                known = max(full, self.log.prompt_blocks[number])
                self.log.chains[number] = _block_ids(request, known)
        return self.log

    def _free(self, request_id: str) -> None:
        _, computed = self._held.pop(request_id)
        self.log.accesses.append(
            BlockAccess(BlockAccessKind.FREE, self._index[request_id], 0, computed // self._size)
        )

    def _number(self, request: Request) -> int:
        number = self._index.get(request.request_id)
        if number is None:
            number = self._index[request.request_id] = len(self.log.chains)
            self.log.chains.append([])
            self.log.prompt_blocks.append((request.num_prompt_tokens - 1) // self._size)
            self.log.owners.append(request.request_id.rpartition("/")[0])
            self.log.requests.append(request.request_id)
        return number


def _block_ids(request: Request, count: int) -> list[int]:
    """Ids of the request's first ``count`` full blocks: their hashes as numbers."""
    return [int.from_bytes(h, "little", signed=True) for h in request.block_hashes[:count]]


class AccessLogError(ValueError):
    """Inconsistent log; the message names the entry or request, the field, and the expected value."""


class SequenceEntry(NamedTuple):
    """One access, with values derived from earlier accesses."""

    kind: BlockAccessKind
    request: int
    held: int
    """Number of blocks that the request holds after the access; for FREE, the number before the access."""
    full: int
    """Number of full blocks in ``held``. ``held`` and ``full`` never shrink while the request is admitted."""
    ask: int
    """Number of leading blocks of the chain that the cache lookup at admission covers. Prefill computes the
    uncached blocks among them. Decoding computes all later blocks, cached or not."""


@dataclass(frozen=True, slots=True)
class AccessSequence:
    """The fixed sequence on which eviction orders are replayed. Made by ``prepare_access_sequence``."""

    pool_blocks: int
    block_size: int
    blocks: int
    """Number of distinct block ids. The ids are 0 to ``blocks`` - 1, in order of first appearance."""
    chains: list[array[int]]
    """Block ids of each request."""
    owner_of: list[int]
    """Index into ``owners`` of each request's program; -1 if no request of the program was admitted."""
    owners: list[str]
    """Programs in order of first admission. A program's index is its rank."""
    entries: list[SequenceEntry]
    last_entry: list[int]
    """Index of each owner's last entry."""


def prepare_access_sequence(log: AccessLog | AccessSequence) -> AccessSequence:
    """Check a log and prepare it for replays, in O(blocks of all chains + entries). A prepared sequence is
    returned unchanged. Raises ``AccessLogError``.

    As in vLLM's ``get_computed_blocks``, the lookup of a resumed request covers all full blocks that the
    request had before its preemption, also those of generated tokens.
    """
    if isinstance(log, AccessSequence):
        return log
    _check_log_shape(log)
    chains, blocks = _dense_block_ids(log.chains)
    entries = _sequence_entries(log)
    owners: dict[str, int] = {}
    last: list[int] = []
    for index, entry in enumerate(entries):
        rank = owners.setdefault(log.owners[entry.request], len(owners))
        if rank == len(last):
            last.append(index)
        last[rank] = index
    return AccessSequence(
        pool_blocks=log.pool_blocks,
        block_size=log.block_size,
        blocks=blocks,
        chains=chains,
        owner_of=[owners.get(owner, -1) for owner in log.owners],
        owners=list(owners),
        entries=entries,
        last_entry=last,
    )


def _check_log_shape(log: AccessLog) -> None:
    for name in ("pool_blocks", "block_size"):
        if getattr(log, name) < 1:
            raise AccessLogError(f"access log: {name} is {getattr(log, name)}; expected at least 1")
    for name in ("prompt_blocks", "owners"):
        if len(getattr(log, name)) != len(log.chains):
            raise AccessLogError(
                f"access log: {name} has {len(getattr(log, name))} entries, chains {len(log.chains)}; "
                "expected one of each per request"
            )
    for request, (chain, asked) in enumerate(zip(log.chains, log.prompt_blocks, strict=True)):
        if not 0 <= asked <= len(chain):
            raise AccessLogError(
                f"access log, request {request}: prompt_blocks is {asked}; expected 0 to {len(chain)}, "
                "the length of its chain"
            )


def _dense_block_ids(chains: list[list[int]]) -> tuple[list[array[int]], int]:
    """Return the chains with block ids 0, 1, 2… in order of first appearance, and the number of ids. Raises
    ``AccessLogError`` if equal ids follow different blocks."""
    ids: dict[int, int] = {}
    parents: list[int] = []
    dense = []
    for request, chain in enumerate(chains):
        before = len(ids)
        mapped = array("i", [ids.setdefault(block, len(ids)) for block in chain])
        shifted = [-1, *mapped[:-1]] if chain else []
        known = len(mapped) - (len(ids) - before)
        parents.extend(shifted[known:])
        if [parents[block] for block in mapped] != shifted:
            wrong = next(
                i
                for i, block in enumerate(mapped)
                if block in mapped[:i] or (block < before and parents[block] != shifted[i])
            )
            raise AccessLogError(
                f"access log, request {request}: block {wrong} of its chain has id {chain[wrong]}, which "
                "follows another block elsewhere; expected equal ids to have equal histories"
            )
        dense.append(mapped)
    return dense, len(ids)


def _sequence_entries(log: AccessLog) -> list[SequenceEntry]:
    """Return the accesses with their derived values. Raises ``AccessLogError``."""
    count = len(log.chains)
    asked = list(log.prompt_blocks)
    held_now = [-1] * count
    """Number of blocks held; -1 for a request that is not admitted."""
    full_now = [0] * count
    entries = []
    for index, (kind, request, held, full) in enumerate(log.accesses):
        where = f"access log, entry {index}"
        if not 0 <= request < count:
            raise AccessLogError(f"{where}: request is {request}; expected 0 to {count - 1}")
        before = held_now[request]
        if (kind == BlockAccessKind.ADMIT) != (before < 0):
            state = "is admitted already" if before >= 0 else "is not admitted"
            raise AccessLogError(f"{where}: {BlockAccessKind(kind).name} of request {request}, which {state}")
        if kind == BlockAccessKind.FREE:
            # The request's last block may have become full since its last entry.
            held = before
            full = min(max(full, full_now[request]), before)
        else:
            held = max(held, before)
            full = max(full, full_now[request] if before >= 0 else 0)
        if not 0 <= full <= held:
            raise AccessLogError(f"{where}: full_blocks is {full}; expected 0 to held_blocks, {held}")
        if full > len(log.chains[request]):
            raise AccessLogError(
                f"{where}: full_blocks is {full}, but the chain of request {request} names "
                f"{len(log.chains[request])}"
            )
        entries.append(SequenceEntry(BlockAccessKind(kind), request, held, full, asked[request]))
        full_now[request] = full
        if kind == BlockAccessKind.FREE:
            held_now[request] = -1
            asked[request] = max(asked[request], full)
        else:
            held_now[request] = held
    return entries
