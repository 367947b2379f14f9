"""An access log made ready for replays: checked, with dense block ids, and what each admission asks for.

Dense ids are handed out in order of first appearance, so that everything a
replay keeps of a block is a place in a flat list.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from .block_accesses import AccessLog, BlockAccessKind


class AccessLogError(ValueError):
    """A log that cannot have happened; the text names entry or request, field, and what was expected."""


class SequenceEntry(NamedTuple):
    """One access, with what follows from those before it."""

    kind: BlockAccessKind
    request: int
    held: int
    """Blocks the request holds from now on; of a FREE, what it held until now."""
    full: int
    """Full blocks of these. Neither shrinks while the request stays admitted."""
    ask: int
    """Leading blocks that were looked up when it was admitted. What is computed of these is prefill;
    everything behind is written by decoding, and no cache could have spared it."""


@dataclass(frozen=True, slots=True)
class AccessSequence:
    """The fixed sequence that every eviction order is replayed on."""

    pool_blocks: int
    block_size: int
    blocks: int
    """Distinct block ids; they are 0 to ``blocks`` - 1."""
    chains: list[array[int]]
    owner_of: list[int]
    """Of each request, index into ``owners``."""
    owners: list[str]
    """In order of first admission: the index is the program's rank."""
    entries: list[SequenceEntry]
    last_entry: list[int]
    """Of each owner, its last entry."""


def prepare_access_sequence(log: AccessLog) -> AccessSequence:
    """Check a log and make it ready. O(blocks of all chains + entries).

    A request that resumes asks for everything that it had computed before it
    was preempted, generated blocks included: vLLM looks up all tokens but the
    last (``get_computed_blocks``), and until a request is preempted all but its
    last have been computed.

    Raises ``AccessLogError``.
    """
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
    count = len(log.chains)
    asked = list(log.prompt_blocks)
    held_now = [-1] * count
    """Blocks held; -1 where the request is not admitted."""
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
            # Its last block may have become full without another having been needed.
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
