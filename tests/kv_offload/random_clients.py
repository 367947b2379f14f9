"""The clients of the random lives: programs on a few chains, on a device that is too small for them."""

from __future__ import annotations

import random
from typing import Any

DEVICE_BLOCKS = 12
HOST_SLOTS = 7
DISK_BLOCKS = 6
CHAINS = 4
CHAIN_BLOCKS = 6


def key_of(chain: int, index: int) -> bytes:
    return b"chain%02d-block%03d" % (chain, index)


class RandomClients:
    """Base of a random life, which has these attributes."""

    draw: random.Random
    planner: Any
    requests: int
    waiting: dict[str, int]
    """By request that waits for the disk, its chain."""
    cached: dict[bytes, int]
    taken: set[int]

    def _serve(self, asked: list[tuple[str, int, int]]) -> None:
        raise NotImplementedError

    def turns(self) -> None:
        """One or two requests that are admitted by the same step."""
        asked = []
        for chain in self.draw.sample(range(CHAINS), self.draw.choice([1, 1, 2])):
            self.requests += 1
            asked.append((f"r{self.requests}", chain, self.draw.randint(1, CHAIN_BLOCKS)))
        self._serve(asked)

    def a_client_goes(self) -> None:
        if self.waiting:
            request_id = min(self.waiting)
            del self.waiting[request_id]
            self.planner.abandon(request_id)

    def _chain(self) -> list[bytes]:
        chain = self.draw.randrange(CHAINS)
        return [key_of(chain, index) for index in range(CHAIN_BLOCKS)]

    def _take_block(self, in_use: dict[bytes, int]) -> int:
        """A block of the device for something else: its content is evicted first."""
        used = {*self.cached.values(), *in_use.values(), *self.taken}
        free = [block_id for block_id in range(DEVICE_BLOCKS) if block_id not in used]
        if free:
            block_id = free[0]
        else:
            key = self.draw.choice(list(self.cached))
            block_id = self.cached.pop(key)
            self.planner.evicted(key, block_id, self.draw.choice([0, 1, 2]))
        self.taken.add(block_id)
        return block_id
