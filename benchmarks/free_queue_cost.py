"""Cost of the program-ordered free block queue per block, against vLLM's own queue.

    python benchmarks/free_queue_cost.py --json benchmarks/results/free_queue_cost.json

Both queues manage the same pool. A round is one turn of a program: blocks are allocated, filled, hashed and
freed, some of the program's earlier blocks are hit again, and the program's score changes. The two queues
alternate within one process. Figures are medians of thread CPU microseconds per block.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.simulator.report.results_file import made_with

TURN_BLOCKS = 100
"""Number of blocks allocated and freed per turn, which hold 1,600 tokens with 16 per block."""
FOUND_BLOCKS = 100
"""Number of blocks of the program's earlier turns that a turn hits."""


class Pool:
    """A free block queue, and random turns of programs that use it."""

    def __init__(self, blocks: int, programs: int, *, by_program: bool) -> None:
        from sojourn_server.vllm.free_block_queue import ProgramFreeBlockQueue
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

        made = [KVCacheBlock(number) for number in range(blocks)]
        self.scores = {f"p{number}": (True, float(number)) for number in range(programs)}
        self.queue: Any = FreeKVCacheBlockQueue(made)
        self.ours = by_program
        if by_program:
            self.queue = ProgramFreeBlockQueue(
                self.queue, evicted=lambda *_: None, scorer=self, failed=_raise
            )
        self.left: dict[str, list[Any]] = {name: [] for name in self.scores}
        """Blocks that each program's newest turn freed."""
        self._owner: dict[int, str] = {}
        self._random = random.Random(0)
        self._names = 0

    def standing(self, program_id: str, left: tuple[float, int] | None) -> tuple[float, ...]:
        return self.scores[program_id]

    def score(self, standing: tuple[float, ...]) -> tuple[float, ...]:
        return standing

    def turn(self) -> float:
        """Run one turn of a random program. Return the CPU seconds per block spent in the queue."""
        program = f"p{self._random.randrange(len(self.scores))}"
        found = [
            block for block in self.left[program][:FOUND_BLOCKS] if self._owner.get(block.block_id) == program
        ]
        spent = _timed(lambda: [self.queue.remove(block) for block in found])
        new: list[Any] = []
        spent += _timed(lambda: new.extend(self.queue.popleft_n(TURN_BLOCKS)))
        for block in new:
            block.reset_hash()
            self._name(block)
            self._owner[block.block_id] = program
        held = found + new
        if self.ours:
            spent += _timed(lambda: self.queue.mark_abandoned(program, 0.0))
            spent += _timed(lambda: self.queue.own(held, program))
        spent += _timed(lambda: self.queue.append_n(held[::-1]))
        self.left[program] = held
        self.scores[program] = (True, self._random.random() * len(self.scores))
        if self.ours:
            spent += _timed(lambda: self.queue.rescore(program))
        return spent / len(held)

    def _name(self, block: Any) -> None:
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        self._names += 1
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"%032d" % self._names), 0))


def _raise(error: Exception) -> None:
    raise error


def _timed(call: Callable[[], Any]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=6_000)
    options = parser.parse_args()
    pools = {
        "vllm": Pool(options.blocks, options.programs, by_program=False),
        "sojourn": Pool(options.blocks, options.programs, by_program=True),
    }
    for pool in pools.values():  # until the pool is full of blocks that programs freed
        for _ in range(options.blocks // TURN_BLOCKS):
            pool.turn()
    costs: dict[str, list[float]] = {name: [] for name in pools}
    gc.collect()
    gc.disable()
    for number in range(options.rounds):
        for name in sorted(pools, reverse=bool(number % 2)):
            costs[name].append(pools[name].turn())
    gc.enable()
    made = made_with(sys.argv)
    result: dict[str, Any] = {
        "command": f"python benchmarks/{made.command}",
        "machine": made.machine,
        "versions": made.versions,
        "blocks": options.blocks,
        "programs": options.programs,
        "rounds": options.rounds,
        "us_per_block": {name: statistics.median(found) * 1e6 for name, found in costs.items()},
    }
    added = result["us_per_block"]["sojourn"] - result["us_per_block"]["vllm"]
    result["added_us_per_block"] = added
    table = Table("queue", "µs a block", title=f"{options.programs:,} programs, {options.blocks:,} blocks")
    for name, cost in result["us_per_block"].items():
        table.add_row(name, f"{cost:.3f}")
    table.add_row("added", f"{added:.3f}")
    Console().print(table)
    if options.json:
        write_json(result, options.json)


if __name__ == "__main__":
    main()
