"""Writes down which blocks a run used when: the sequence on which eviction orders are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits.block_accesses import AccessLog, BlockAccess, BlockAccessKind

if TYPE_CHECKING:
    from ..vllm.compat import Request, SchedulerOutput


class AccessRecorder:
    """Records one engine. Call it after every planned step and at every end of a request."""

    def __init__(self, pool_blocks: int, block_size: int) -> None:
        self.log = AccessLog(pool_blocks=pool_blocks, block_size=block_size)
        self._size = block_size
        self._index: dict[str, int] = {}
        self._held: dict[str, tuple[int, int]] = {}
        """Of running requests: (blocks, tokens computed)."""
        self._reached: dict[str, int] = {}
        """Of requests in the engine, the most full blocks that each has had; preempted, it has none."""

    def step(self, planned: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Take in a planned step."""
        for request_id in sorted(planned.preempted_req_ids or ()):
            self._free(request_id)
        add = self.log.accesses.append
        for request_id in planned.num_scheduled_tokens:
            computed = requests[request_id].num_computed_tokens
            # vLLM caches a block when it plans to fill it: whoever is admitted in this step may find it.
            held, full = -(-computed // self._size), computed // self._size
            before = self._held.get(request_id)
            if before is None:
                add(BlockAccess(BlockAccessKind.ADMIT, self._number(requests[request_id]), held, full))
            elif (before[0], before[1] // self._size) != (held, full):
                add(BlockAccess(BlockAccessKind.GROW, self._index[request_id], held, full))
            self._held[request_id] = (held, computed)
            self._reached[request_id] = max(full, self._reached.get(request_id, 0))

    def finished(self, request: Request) -> None:
        """A request has left the engine; its blocks are known in full now."""
        number = self._number(request)
        if request.request_id in self._held:
            self._free(request.request_id)
        full = (request.num_tokens - 1) // self._size
        self.log.chains[number] = [
            int.from_bytes(h, "little", signed=True) for h in request.block_hashes[:full]
        ]
        del self._index[request.request_id]
        self._reached.pop(request.request_id, None)

    def close(self, requests: dict[str, Request]) -> AccessLog:
        """The record so far; requests still in the engine are in it with the most they had computed."""
        for request_id in list(self._index):
            request = requests.get(request_id)
            if request is not None:
                full = min(len(request.block_hashes), self._reached.get(request_id, 0))
                known = max(full, self.log.prompt_blocks[self._index[request_id]])
                chain = request.block_hashes[:known]
                self.log.chains[self._index[request_id]] = [
                    int.from_bytes(h, "little", signed=True) for h in chain
                ]
        return self.log

    def _free(self, request_id: str) -> None:
        blocks, computed = self._held.pop(request_id)
        del blocks
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
