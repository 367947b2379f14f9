"""Counts the blocks of the contexts in each tier. A prefix that several contexts share counts once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import countOf
from typing import Any

from sojourn.ids import ProgramId

from ..policies.placement.placement_views import Tier
from .context_hashes import ContextHashStore
from .placed_programs import PlacedProgram
from .request_table import RequestState
from .scheduler_state import KVPoolConfig
from .shared_prefixes import SharedPrefixes

MAX_LEARNED = 1024
"""Maximum number of kinds of programs for which an expected prefix is remembered."""
MAX_EXPECTED_TO_SHARE = 8
"""Maximum number of new programs of one kind that are expected to share a prefix at the same time."""


class SharedBlockAccounting:
    """The block hashes of the contexts in each tier, and of running requests without a placed program.

    A new program's hashes are unknown until its first request is admitted. Until then, the program is
    expected to share as many leading hashes as the last new program of its *kind* did. Programs of one kind
    have the same tenant and agent type.
    """

    def __init__(
        self, pool: KVPoolConfig, contexts: ContextHashStore, on_device: Mapping[ProgramId, PlacedProgram]
    ) -> None:
        """``contexts``: hashes of each program's last turn, also of programs whose KV was dropped.
        ``on_device``: the programs on the device, which the caller keeps up to date."""
        self._pool = pool
        self._contexts = contexts
        self._on_device = on_device
        self._tiers = {tier: SharedPrefixes() for tier in Tier if tier is not Tier.WAITING}
        self._stale: set[Hashable] = set()
        """Keys of contexts whose own hashes (see ``SharedPrefixes``) changed when another context was stored
        or removed."""
        self._expected: OrderedDict[Hashable, int] = OrderedDict()
        """Kind → number of leading hashes that the last new program of the kind shared with other contexts.
        The next new program is expected to share as many."""
        self.expectations_changed: set[Hashable] = set()
        """Kinds whose expected prefix has changed since ``take_changed``."""
        self._expected_to_share: dict[ProgramId, Hashable] = {}
        """New programs that are expected to share a prefix → their kind, which may have changed since."""
        self._others: dict[str, int] = {}
        """Running request without a placed program → its prompt tokens."""

    # -- programs -------------------------------------------------------------------

    def first_admitted(self, place: PlacedProgram, chain: Sequence[Any]) -> None:
        """Learn the length of the prefix that new programs of this kind share. ``chain``: block hashes of the
        program's first prompt; nothing is learned if it is empty (the prompt is shorter than a block)."""
        if chain:
            kind, shared = _kind(place), self._tiers[Tier.DEVICE].common(chain)
            if self._expected.get(kind, 0) != shared:
                self.expectations_changed.add(kind)
            self._expected[kind] = shared
            self._expected.move_to_end(kind)
            if len(self._expected) > MAX_LEARNED:
                self._expected.popitem(last=False)
        self._stop_expecting(place)

    def begin(self, place: PlacedProgram, request_state: RequestState, chain: Sequence[Any]) -> None:
        """Record that a request of a program begins to run. ``chain``: hashes of the request's blocks. The
        program's context is the longest prompt of its running requests."""
        # A copy of what the prompt covers: the engine appends to its list while the request runs.
        prompt = chain[: self._hashes_of(request_state.prompt_tokens)]
        place.chains[request_state.request_id] = prompt
        if len(place.chains) == 1 or len(prompt) >= self._length(place):
            self.store(place, prompt)

    def end(self, place: PlacedProgram, request_id: str) -> None:
        """Record that a request of a program no longer runs. The program's context is then the longest prompt
        of its other running requests, or the last turn's context if no other request runs."""
        ended = place.chains.pop(request_id, ())
        if not place.chains:
            self.store(place, self._of_last_turn(place))
        elif len(ended) >= self._length(place):
            self.store(place, max(place.chains.values(), key=len))

    def store(self, place: PlacedProgram, chain: Sequence[Any]) -> None:
        """Store the hashes of a program's context in the program's tier. For a program in the tier WAITING,
        no hashes are stored."""
        if place.tier is not Tier.WAITING:
            self._stale |= self._tiers[place.tier].put(place.program.id, chain)

    def take(self, place: PlacedProgram) -> Sequence[Any]:
        """Remove a program's context from its tier, and return its hashes. For a program in the tier WAITING,
        return the hashes of its last turn; empty if unknown."""
        program_id = place.program.id
        if place.tier is Tier.WAITING:
            return self._of_last_turn(place)
        chain = self._tiers[place.tier].chain(program_id)
        self._stale |= self._tiers[place.tier].remove(program_id)
        return chain

    def removed(self, place: PlacedProgram) -> None:
        """Remove a program that is no longer placed. From then on, its running requests count as requests
        without a placed program."""
        self._stop_expecting(place)
        self.take(place)
        for request_id, request_state in place.running.items():
            self.add_other(request_id, request_state.prompt_tokens, place.chains.get(request_id, ()))

    def shared_hashes(self, place: PlacedProgram) -> tuple[int, int]:
        """Return the present values of ``PlacedProgram.in_tier`` and ``PlacedProgram.on_device``."""
        program_id, device, kind = place.program.id, self._tiers[Tier.DEVICE], _kind(place)
        if self._expected_to_share.get(program_id, kind) != kind:
            self._stop_expecting(place)  # its kind has changed since it was expected to share a prefix
        if place.tier is Tier.DEVICE and program_id in device:
            own = device.shared_hashes(program_id)
            return own, own
        if place.tier in (Tier.HOST, Tier.DISK):
            below = self._tiers[place.tier]
            return below.shared_hashes(program_id), device.common(below.chain(program_id))
        chain = self._contexts.get(program_id)
        if chain:
            return 0, device.common(chain)
        expected = 0 if place.returning else self._expected.get(kind, 0)
        if not expected or kind not in (_kind(one) for one in self._on_device.values() if one.returning):
            return 0, 0
        expecting = self._expected_to_share
        if program_id not in expecting and countOf(expecting.values(), kind) < MAX_EXPECTED_TO_SHARE:
            expecting[program_id] = kind
        return 0, expected if program_id in expecting else 0

    def take_stale(self) -> set[Hashable]:
        """Return the keys of the contexts whose own hashes changed since the last call: program ids, and keys
        of requests without a placed program."""
        stale, self._stale = self._stale, set()
        return stale

    def take_changed(self, places: Iterable[PlacedProgram]) -> Iterator[PlacedProgram]:
        """Return the programs in ``places`` that have not run yet, and whose expected prefix has changed
        since the last call."""
        changed, self.expectations_changed = self.expectations_changed, set()
        return (place for place in places if not place.returning and _kind(place) in changed)

    def _stop_expecting(self, place: PlacedProgram) -> None:
        """No longer expect that this program shares a prefix. Another new program of its kind may replace
        it."""
        kind = self._expected_to_share.pop(place.program.id, None)
        if kind is not None:
            self.expectations_changed.add(kind)

    def _of_last_turn(self, place: PlacedProgram) -> Sequence[Any]:
        """Hashes of the context that the program's last turn left; empty if they are unknown."""
        return self._contexts.get(place.program.id) or () if place.context_blocks else ()

    def _length(self, place: PlacedProgram) -> int:
        """Number of hashes of the program that are stored in its tier."""
        return len(self._tiers[place.tier].chain(place.program.id)) if place.tier is not Tier.WAITING else 0

    def _hashes_of(self, tokens: int) -> int:
        """Number of block hashes of a prompt."""
        return tokens // self._pool.block_size

    # -- requests without a placed program ---------------------------------------------

    @property
    def others(self) -> Iterable[str]:
        """Ids of running requests without a placed program."""
        return self._others.keys()

    def add_other(self, request_id: str, tokens: int, chain: Sequence[Any]) -> None:
        """Count a running request without a placed program. ``tokens``: number of its prompt tokens."""
        self._others[request_id] = tokens
        # Only the prompt's hashes: a resumed request also has hashes of output tokens, which do not count.
        prompt = chain[: self._hashes_of(tokens)]
        self._stale |= self._tiers[Tier.DEVICE].put(("request", request_id), prompt)

    def remove_other(self, request_id: str) -> bool:
        """Stop counting the request. Returns whether it was counted."""
        if self._others.pop(request_id, None) is None:
            return False
        self._stale |= self._tiers[Tier.DEVICE].remove(("request", request_id))
        return True

    def untracked_blocks(self) -> int:
        """Number of blocks counted for requests without a placed program. A prefix that they share with other
        contexts counts once, for the first context in the order of ``SharedPrefixes``."""
        device = self._tiers[Tier.DEVICE]
        own = (
            max(0, tokens - device.shared_hashes(("request", request_id)) * self._pool.block_size)
            for request_id, tokens in self._others.items()
        )
        return math.ceil(sum(own) / self._pool.tokens_per_block)

    def clear(self) -> None:
        """Forget all contexts and requests."""
        for prefixes in self._tiers.values():
            prefixes.clear()
        self._others.clear()
        self._stale.clear()
        self._expected_to_share.clear()


def _kind(place: PlacedProgram) -> tuple[str | None, str | None]:
    return place.program.tenant, place.program.agent_type
