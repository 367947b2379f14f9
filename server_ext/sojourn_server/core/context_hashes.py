"""Stores chained block hashes, of programs' last turns, of workflow steps and of placed programs, and finds
the leading blocks that contexts share, such as a system prompt.

A chained hash covers all blocks before it. So two contexts share exactly their common prefix, and a hash
stands at the same place of all contexts that have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import common_prefix_length


class ContextHashStore:
    """Stores each program's *context*: the block hashes of its last turn. A program with a context may also
    have a *branch*: the hashes of its newest side request's prompt. Keeps at most ``max_hashes`` hashes of
    all programs together, and drops the oldest contexts first.

    The hashes show whether a prompt changed or its KV was evicted. A lease that is granted some time after a
    turn uses the hashes to find the turn's blocks. If a program's context was dropped, the ledger records the
    cause ``unknown`` for its lost KV.
    """

    def __init__(self, max_hashes: int = 1_000_000) -> None:
        self.max_hashes = max_hashes
        self.hashes = 0
        self._contexts: OrderedDict[ProgramId, Sequence[Any]] = OrderedDict()
        self._branches: dict[ProgramId, Sequence[Any]] = {}

    def put(self, program_id: ProgramId, hashes: Sequence[Any]) -> None:
        """Store the newest context of the program, and drop its branch."""
        self.drop(program_id)
        self._contexts[program_id] = hashes
        self._grow(len(hashes))

    def put_branch(self, program_id: ProgramId, hashes: Sequence[Any]) -> None:
        """Store the prompt of a program's newest side request. The program must have a context."""
        more = len(hashes) - len(self.branch(program_id))
        self._branches[program_id] = hashes
        self._grow(more)

    def _grow(self, hashes: int) -> None:
        self.hashes += hashes
        while self.hashes > self.max_hashes and self._contexts:
            self.drop(next(iter(self._contexts)))

    def get(self, program_id: ProgramId) -> Sequence[Any] | None:
        """The block hashes of the program's last turn; ``None`` if none are stored."""
        return self._contexts.get(program_id)

    def branch(self, program_id: ProgramId) -> Sequence[Any]:
        """The block hashes of the program's branch; empty without one."""
        return self._branches.get(program_id, ())

    def drop(self, program_id: ProgramId) -> None:
        """Drop the program's context and branch."""
        self.hashes -= len(self._contexts.pop(program_id, ())) + len(self._branches.pop(program_id, ()))

    def programs(self) -> list[ProgramId]:
        """Programs with a context, oldest context first."""
        return list(self._contexts)

    def clear(self) -> list[ProgramId]:
        """Drop all contexts; returns their programs."""
        programs = list(self._contexts)
        self._contexts.clear()
        self._branches.clear()
        self.hashes = 0
        return programs


class StepPrefixes:
    """Stores the block hashes with which prompts begin at each step of a workflow, for prefetches.

    A *step* is a graph node or a tool, as in predictions. Stored are the hashes of each program's newest turn
    at each step, and for each agent type and step the prefix that turns of different programs share there,
    such as system prompt and tools. Beyond ``max_hashes`` hashes, the least recently stored programs are
    dropped, then the least recently stored types.
    """

    def __init__(self, max_hashes: int = 1_000_000) -> None:
        self.max_hashes = max_hashes
        self.hashes = 0
        self._of_programs: dict[ProgramId, dict[str, Sequence[Any]]] = {}
        self._of_types: dict[tuple[str, str], tuple[ProgramId, bool, Sequence[Any]]] = {}
        """(agent type, step) → (last program at the step, whether several programs share the prefix,
        prefix)."""

    def learn(self, program_id: ProgramId, agent_type: str, step: str, hashes: Sequence[Any]) -> None:
        """Learn the block hashes of a turn at a step."""
        if not hashes:
            return
        steps = self._of_programs[program_id] = self._of_programs.pop(program_id, {})
        last, shared, kept = self._of_types.pop((agent_type, step), (program_id, False, ()))
        self.hashes -= len(steps.get(step, ())) + len(kept)
        steps[step] = hashes
        if last != program_id:
            kept = kept[: common_prefix_length(kept, hashes)]
            shared = bool(kept)
        elif not shared:
            kept = hashes
        kept = kept or hashes
        self._of_types[agent_type, step] = program_id, shared, kept
        self.hashes += len(hashes) + len(kept)
        # Hashes of single programs are dropped first, because they are long and serve one program only.
        while self.hashes > self.max_hashes and self._of_programs:
            self.forget(next(iter(self._of_programs)))
        while self.hashes > self.max_hashes:
            self.hashes -= len(self._of_types.pop(next(iter(self._of_types)))[2])

    def prefix(self, program_id: ProgramId, agent_type: str, step: str) -> Sequence[Any]:
        """Return the block hashes with which the program's next prompt begins, if its next step is ``step``;
        empty if unknown."""
        own = self._of_programs.get(program_id, {}).get(step)
        if own is not None:
            return own
        _, shared, kept = self._of_types.get((agent_type, step), (program_id, False, ()))
        return kept if shared else ()

    def forget(self, program_id: ProgramId) -> None:
        """Forget the turns of a program."""
        self.hashes -= sum(map(len, self._of_programs.pop(program_id, {}).values()))


class PrefixTree:
    """A set of chains that answers which prefix another chain shares with any of them. An answer takes one
    bisection for each branch on the way."""

    def __init__(self) -> None:
        self._chains: dict[Any, Sequence[Any]] = {}
        """First hash that a chain added to the tree → this chain."""

    def common(self, chain: Sequence[Any]) -> int:
        """Return the length of the longest prefix, in hashes, that ``chain`` shares with a chain of the
        tree."""
        shared = 0
        while shared < len(chain) and (other := self._chains.get(chain[shared])) is not None:
            shared = common_prefix_length(other, chain)
        return shared

    def add(self, chain: Sequence[Any]) -> int:
        """Add a chain. Returns the length of the prefix that it shares with earlier chains. So the rest of
        each chain, in order of addition, counts every distinct hash once."""
        shared = self.common(chain)
        if shared < len(chain):
            self._chains[chain[shared]] = chain
        return shared


class PlacedPrefixes:
    """Stores the keys and the retention rank of each program that is placed in a tier.

    The retention rank (``RetentionRank``) orders eviction from host memory, where blocks of lower rank are
    evicted first. If several programs share a prefix, the highest of their ranks applies to the prefix."""

    def __init__(self) -> None:
        self._of: dict[ProgramId, tuple[Sequence[Any], int]] = {}

    def keys_of(self, program_id: ProgramId) -> Sequence[Any]:
        """The program's chained block hashes; empty if none are stored."""
        known = self._of.get(program_id)
        return known[0] if known is not None else ()

    def shared_prefix_length(self, program_id: ProgramId, keys: Sequence[Any]) -> int:
        """Length of the common prefix of the program's stored keys and ``keys``."""
        return common_prefix_length(self.keys_of(program_id), keys)

    def put(self, program_id: ProgramId, keys: Sequence[Any], rank: int) -> int:
        """Store a program's keys and rank. Returns the length, in keys, of the longest prefix that the
        program shares with a program of higher rank."""
        self.forget(program_id)
        longest = 0
        for other, other_rank in self._of.values():
            # Bisect only if the other shares more than the longest prefix so far, which the next key shows.
            if other_rank > rank and longest < min(len(other), len(keys)) and other[longest] == keys[longest]:
                longest = common_prefix_length(other, keys)
        if keys:
            self._of[program_id] = keys, rank
        return longest

    def forget(self, program_id: ProgramId) -> None:
        """Remove the program."""
        self._of.pop(program_id, None)
