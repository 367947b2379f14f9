"""Clients for random tests. Their programs share a few chains, on a device that is too small for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from block_contexts import as_context

DEVICE_BLOCKS = 12
HOST_SLOTS = 7
DISK_BLOCKS = 6
CHAINS = 4
CHAIN_BLOCKS = 6


def key_of(chain: int, index: int) -> bytes:
    return b"chain%02d-block%03d" % (chain, index)


@dataclass
class Loading:
    """A request whose blocks are being loaded. It holds these blocks, and the cached blocks before them."""

    local: list[bytes]
    keys: list[bytes]
    block_ids: list[int]
    aborted: bool = False


class RandomClients:
    """Base class of a random test, which sets these attributes."""

    draw: random.Random
    planner: Any
    requests: int
    waiting: dict[str, int]
    """Chain of each request that waits for the disk, for another request's load or for space."""
    cached: dict[bytes, int]
    taken: set[int]
    """Blocks that this step computes."""
    loading: dict[str, Loading]
    done: Counter[str]

    def _now(self) -> float:
        raise NotImplementedError

    def _step(self, writes: dict[int, bytes]) -> None:
        """Run a step that computes these blocks."""
        raise NotImplementedError

    def _check(self, block_id: int, key: bytes) -> None:
        """Check that the device's block has this content."""
        raise NotImplementedError

    def _serve(self, asked: list[tuple[str, int, int]]) -> None:
        in_use: dict[bytes, int] = {}
        writes: dict[int, bytes] = {}
        for request_id, number, blocks in asked:
            self._admit(request_id, [key_of(number, index) for index in range(blocks)], in_use, writes)
        self._step(writes)
        self.cached.update(in_use)

    def _admit(
        self, request_id: str, keys: list[bytes], in_use: dict[bytes, int], writes: dict[int, bytes]
    ) -> None:
        local = 0
        while local < len(keys) and keys[local] in self.cached:
            local += 1
        found = self.planner.lookup(request_id, as_context(keys[local:]), self._now())
        assert found is not None or local < len(keys)
        fits = len(keys) - local <= DEVICE_BLOCKS - len(self._held({*keys[:local]}) | {*in_use.values()})
        if found is None or not fits or self.draw.random() < 0.1:
            self.done["shared a load"] += found is None and any(
                keys[local] in other.keys for other in self.loading.values()
            )
            self.waiting[request_id] = int(keys[0][5:7])
            return
        self.waiting.pop(request_id, None)
        # A request that loads computes nothing yet. A later turn of its program computes the rest.
        new = keys[local : local + found] if found else keys[local:]
        used = {**in_use, **{key: self.cached[key] for key in keys[:local]}}
        block_ids: list[int] = []
        for key in new:
            if key in self.cached:  # a later part that was cached without its beginning
                self.planner.plan_save(key, self.cached.pop(key))
            block_ids.append(self._take_block({**used, **dict(zip(new, block_ids, strict=False))}))
        self.planner.load(request_id, new[:found], block_ids[:found])
        if found:
            self.loading[request_id] = Loading(keys[:local], new, block_ids)
        else:
            in_use.update(zip(new, block_ids, strict=True))
            writes.update(zip(block_ids, new, strict=True))
            self.taken.update(block_ids)
        if self.draw.random() < 0.5:
            self.planner.abandon(request_id)
            if found:
                self.loading[request_id].aborted = True

    def _arrived(self, request_id: str, not_filled: Collection[int]) -> None:
        """Handle the worker's report that the load has ended."""
        load = self.loading.pop(request_id)
        ended = self.planner.end_loads([request_id], set(not_filled))
        filled = [block_id not in not_filled for block_id in load.block_ids]
        arrived = [*filled, False].index(False)
        assert ended.failed == ({request_id} if not all(filled) and not load.aborted else set())
        assert ended.done == {request_id} - ended.failed
        for key, block_id, is_filled in zip(load.keys, load.block_ids, filled, strict=True):
            if is_filled:
                self._check(block_id, key)
        self.done["invalid"] += filled.count(False)
        # If the request's client has gone, the blocks are free again. So are blocks that another request
        # computed meanwhile.
        if self.draw.random() < 0.8:
            for key, block_id in list(zip(load.keys, load.block_ids, strict=True))[:arrived]:
                self.cached.setdefault(key, block_id)
        else:
            self.planner.abandon(request_id)

    def _held(self, local: Collection[bytes] = ()) -> set[int]:
        """Blocks that no other request may get now."""
        held = {self.cached[key] for key in local} | self.taken
        for load in self.loading.values():
            held.update(load.block_ids, (self.cached[key] for key in load.local))
        return held

    def turns(self) -> None:
        """Send one or two requests, which the same step admits."""
        asked = []
        for number in self.draw.sample(range(CHAINS), self.draw.choice([1, 1, 2])):
            self.requests += 1
            asked.append((f"r{self.requests}", number, self.draw.randint(1, CHAIN_BLOCKS)))
        self._serve(asked)

    def a_client_goes(self) -> None:
        if self.waiting:
            request_id = min(self.waiting)
            del self.waiting[request_id]
            self.planner.abandon(request_id)

    def ask_again(self) -> None:
        if self.waiting:
            request_id = self.draw.choice(sorted(self.waiting))
            self._serve([(request_id, self.waiting[request_id], CHAIN_BLOCKS)])

    def store_ahead(self) -> None:
        blocks = [(key, self.cached[key]) for key in self._chain() if key in self.cached]
        self.planner.store(blocks, self.draw.choice([0, 1, 2]))

    def fetch_ahead(self) -> None:
        self.planner.disk.fetch(self._chain(), 2)

    def relabel(self) -> None:
        self.planner.set_rank(self._chain(), self.draw.choice([0, 1, 2]))

    def step(self) -> None:
        self._step({})

    def _chain(self) -> list[bytes]:
        number = self.draw.randrange(CHAINS)
        return [key_of(number, index) for index in range(CHAIN_BLOCKS)]

    def _take_block(self, in_use: dict[bytes, int]) -> int:
        """Take a device block for new content. If none is free, evict a cached block."""
        held = self._held() | {*in_use.values()}
        free = [
            block_id for block_id in range(DEVICE_BLOCKS) if block_id not in {*self.cached.values(), *held}
        ]
        if free:
            return free[0]
        key = self.draw.choice([key for key, block_id in self.cached.items() if block_id not in held])
        block_id = self.cached.pop(key)
        self.planner.plan_save(key, block_id, self.draw.choice([0, 1, 2]))
        return block_id
