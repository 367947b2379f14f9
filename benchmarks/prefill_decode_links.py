"""Gain of reading KV through the links of both sides: two transfer managers and a store on disk.

    python benchmarks/prefill_decode_links.py --out benchmarks/results

No engines run. The benchmark measures the time until KV has reached the prefill side (*loaded*), and until
the decode side has the whole context (*complete*), without computation in between. The two sides communicate
over Unix sockets and read one store of files. Every context is compared with the stored bytes. Rate limits
slow the links down, so that one machine shows the effect. Two links should give twice the bandwidth; the
benchmark shows that the transfer managers achieve it.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from result_pages import FIRST_WORDS, made_by, marked, write_page
from rich.console import Console
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.kv_offload.block_file import KvIdentity
from sojourn_server.kv_offload.block_store import FULL_BLOCK_TOKENS
from sojourn_server.kv_offload.shared_store import SharedStore
from sojourn_server.kv_transfer.load_table import ReadingPeer
from sojourn_server.kv_transfer.transfer_limits import LinkRates, TransferLimits
from sojourn_server.kv_transfer.transfer_manager import TransferManager
from sojourn_server.policies.prefill_decode.prefill_decode_views import ReadSplit, StorageReadView
from sojourn_server.policies.prefill_decode.read_side_policies import (
    PrefillSideRead,
    ShorterQueueRead,
    WaterFillingRead,
)
from sojourn_server.policies.prefill_decode.storage_read_queues import StorageReadQueues
from sojourn_server.simulator.report.results_file import made_with

TOKEN_BYTES = 512
"""KV bytes per token of the model "tiny" in 32-bit floats."""
LAYERS = 2
BLOCK_BYTES = FULL_BLOCK_TOKENS * TOKEN_BYTES
PREFILL, DECODE = 0, 1
PATIENCE_S = 300.0

Choice = Callable[[StorageReadView], ReadSplit]
"""Function that chooses how many of a request's blocks each side reads."""

SIDES: dict[str, Choice] = {
    "prefill side": PrefillSideRead().split,
    "decode side": lambda view: ReadSplit(0, view.blocks),
    "shorter queue": ShorterQueueRead().split,
    "split": WaterFillingRead().split,
}


class Pair:
    """A prefill side and a decode side that share a store."""

    def __init__(self, folder: Path, rate: float, slots: int) -> None:
        self.identity = KvIdentity(
            model="tiny",
            kv_dtype="float32",
            block_tokens=FULL_BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES,
            layers=LAYERS,
            hash_scheme="benchmark",
            vllm_version="none",
        )
        self.rate = rate
        self.stores = [
            SharedStore.open(folder / "store", self.identity, name=name, budget_bytes=1 << 40)
            for name in ("prefill", "decode")
        ]
        limits, rates = TransferLimits(slots=slots), LinkRates(storage_read=rate)
        self.decode = TransferManager(
            self.stores[1], limits, rates, name="decode", listen=[f"unix:{folder}/decode.sock"]
        )
        self.prefill = TransferManager(self.stores[0], limits, rates, name="prefill")
        self.runs = 0

    def close(self) -> None:
        ended = [self.prefill.close(), self.decode.close()]
        for store in self.stores:
            store.close()
        if not all(ended):
            raise RuntimeError("a thread of a traffic manager has not ended")

    def store(self, contexts: Sequence[Sequence[bytes]]) -> None:
        """Store the contexts of earlier turns: each side writes every other context."""
        for number, keys in enumerate(contexts):
            parent = b""
            for key in keys:
                self.stores[number % 2].put(key, [content(key)], parent=parent)
                parent = key

    def run(self, choose: Choice, contexts: Sequence[Sequence[bytes]]) -> dict[str, Any]:
        """Request all contexts at once. Returns the seconds until they were loaded on the prefill side, the
        seconds until they were complete on the decode side, and the bytes that each side read."""
        self.runs += 1
        queues = StorageReadQueues()
        for node in (PREFILL, DECODE):
            queues.add(node, BLOCK_BYTES / self.rate)
        moved = [self._read_bytes(side) for side in (self.prefill, self.decode)]
        loaded, complete = [0.0] * len(contexts), [0.0] * len(contexts)
        failures: list[BaseException] = []
        began = time.monotonic()

        def turn(number: int, split: ReadSplit) -> None:
            try:
                self._turn(f"{self.runs}/{number}", contexts[number], split, loaded, complete, number, began)
            except BaseException as error:
                failures.append(error)

        threads = []
        for number, keys in enumerate(contexts):
            now = time.monotonic()
            view = StorageReadView(
                blocks=len(keys),
                prefill_queue_s=queues.queue_s(PREFILL, now),
                decode_queue_s=queues.queue_s(DECODE, now),
                prefill_block_s=queues.block_s(PREFILL),
                decode_block_s=queues.block_s(DECODE),
            )
            split = choose(view)
            for node, blocks in ((PREFILL, split.prefill_blocks), (DECODE, split.decode_blocks)):
                if blocks:
                    queues.add_read(node, blocks, now)
            threads.append(threading.Thread(target=turn, args=(number, split)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        read = [
            self._read_bytes(side) - before
            for side, before in zip((self.prefill, self.decode), moved, strict=True)
        ]
        if sum(read) != sum(map(len, contexts)) * BLOCK_BYTES:
            raise RuntimeError(f"{read} bytes were read: not every block once")
        return {
            "loaded_s": max(loaded),
            "mean_loaded_s": statistics.mean(loaded),
            "complete_s": max(complete),
            "read_bytes": read,
            "max_over_mean": max(read) / statistics.mean(read),
        }

    def _turn(
        self,
        transfer: str,
        keys: Sequence[bytes],
        split: ReadSplit,
        loaded: list[float],
        complete: list[float],
        number: int,
        began: float,
    ) -> None:
        """Run one request: read its context, compare it, push it with one new block, and compare again."""
        (address,) = self.decode.addresses
        cut = split.prefill_blocks
        whole = [*keys, f"tail of {transfer}".encode()]
        loads = []
        if cut:
            loads.append(self.prefill.load(f"{transfer} here", keys[:cut]))
        if cut < len(keys):
            peer = ReadingPeer(address=address, transfer=transfer, total=len(whole), epoch=self.decode.epoch)
            loads.append(self.prefill.load(f"{transfer} there", keys[cut:], peer=peer))
        at = 0
        for load in loads:
            outcome = load.wait(PATIENCE_S)
            if outcome is None or outcome.good < load.requested_blocks:
                raise RuntimeError(f"{transfer}: {outcome}")
        loaded[number] = time.monotonic() - began
        for load in loads:
            for block in load.blocks():
                check(block, keys[at])
                at += 1
            load.end()
        push = self.prefill.offer(transfer, address, whole, epoch=self.decode.epoch)
        blocks = [np.frombuffer(content(key), np.uint8).reshape(LAYERS, -1) for key in whole]
        for layer in range(LAYERS):
            push.give(layer, [memoryview(block[layer]) for block in blocks])
        prompt = self.decode.expect(transfer, epoch=self.decode.epoch)
        outcome_there = prompt.wait(PATIENCE_S)
        if outcome_there is None or not outcome_there.complete:
            raise RuntimeError(f"{transfer}: {outcome_there}")
        complete[number] = time.monotonic() - began
        for block, key in zip(prompt.blocks(), whole, strict=True):
            check(block, key)
        prompt.end()
        push.wait(PATIENCE_S)

    @staticmethod
    def _read_bytes(side: TransferManager) -> int:
        return side.core.ctx.reads.moved_bytes


def content(key: bytes) -> bytes:
    """Return the content of a block. It differs for each key, so that a mix-up is detected."""
    return hashlib.shake_128(key).digest(64) * (BLOCK_BYTES // 64)


def check(block: memoryview, key: bytes) -> None:
    if bytes(block) != content(key):
        raise RuntimeError(f"block {key.hex()} is not what was stored")


def keys_of(name: str, blocks: int) -> list[bytes]:
    return [hashlib.blake2b(f"{name}/{at}".encode(), digest_size=32).digest() for at in range(blocks)]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each way of reading, in a burst and alone. Return medians over rounds; ways alternate in a
    round."""
    cases = {
        "burst": [
            keys_of(f"burst {number}", options.tokens // FULL_BLOCK_TOKENS)
            for number in range(options.requests)
        ],
        "alone": [keys_of("alone", options.alone_tokens // FULL_BLOCK_TOKENS)],
    }
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        slots = sum(len(keys) + 1 for keys in cases["burst"]) + len(cases["alone"][0]) + 1
        pair = Pair(Path(folder), options.megabytes_s * 1e6, slots)
        try:
            for contexts in cases.values():
                pair.store(contexts)
            for _ in range(options.rounds):
                for case, contexts in cases.items():
                    for name, choose in SIDES.items():
                        found.setdefault((case, name), []).append(pair.run(choose, contexts))
            stats = [side.stats() for side in (pair.prefill, pair.decode)]
        finally:
            pair.close()
    for side in stats:
        if side["slots_used"] or side["leases"]:
            raise RuntimeError(f"buffers have leaked: {side}")
    rows = []
    for (case, name), rounds in found.items():
        row: dict[str, Any] = {"case": case, "read by": name, "requests": len(cases[case]), "rounds": rounds}
        for column in ("loaded_s", "mean_loaded_s", "complete_s", "max_over_mean"):
            row[column] = statistics.median(each[column] for each in rounds)
        rows.append(row)
    basis = {row["case"]: row["loaded_s"] for row in rows if row["read by"] == "prefill side"}
    for row in rows:
        row["times_as_fast"] = basis[row["case"]] / row["loaded_s"]
    return rows


HEAD = ("reads", "read by", "all loaded s", "mean s", "complete s", "times as fast", "links max / mean")


def cells(row: dict[str, Any]) -> list[str]:
    what = "one alone" if row["case"] == "alone" else f"{row['requests']} at once"
    numbers = [row["loaded_s"], row["mean_loaded_s"], row["complete_s"], row["times_as_fast"]]
    return [what, row["read by"], *(f"{number:.2f}" for number in numbers), f"{row['max_over_mean']:.2f}"]


def page(rows: Sequence[dict[str, Any]], options: argparse.Namespace, made: Any, wall_s: float) -> str:
    """Return the result as Markdown."""
    blocks = options.tokens // FULL_BLOCK_TOKENS
    return (
        "# Reading through the links of both sides\n\n"
        "Generated by the command below, but for what is between the marks.\n\n"
        f"{made_by(made, wall_s)}\n\n"
        f"{options.requests} requests at once with {blocks} stored Full Blocks each ({options.tokens:,} "
        f"tokens of {TOKEN_BYTES} bytes, as the model `tiny` has), and one alone of {options.alone_tokens:,} "
        f"tokens. Two storage links of {options.megabytes_s:g} MB/s; between the two sides sockets of one "
        f"machine. Medians of {options.rounds} rounds. No engine: *loaded* is when the KV is at the prefill "
        "side, *complete* when the decode side has the whole context. How many times as fast is of *all "
        "loaded*.\n\n"
        f"{marked(HEAD, map(cells, rows))}\n\n{{by hand}}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        help="write prefill_decode_links.json and prefill_decode_links.md into this folder",
    )
    parser.add_argument("--requests", type=int, default=20, help="at once")
    parser.add_argument("--tokens", type=int, default=6_000, help="of each request that are stored")
    parser.add_argument("--alone-tokens", type=int, default=8_000, help="the same of the one that is alone")
    parser.add_argument("--megabytes-s", type=float, default=4.0, help="of each storage link")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if min(options.requests, options.rounds) < 1:
        parser.error("expected at least one request and one round")
    if min(options.tokens, options.alone_tokens) < 2 * FULL_BLOCK_TOKENS:
        parser.error(f"expected at least {2 * FULL_BLOCK_TOKENS} tokens: two Full Blocks")
    begin = time.monotonic()
    made = made_with(sys.argv)
    rows = measure(options)
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)
    if options.out is not None:
        result = {
            "command": f"python benchmarks/{made.command}",
            "machine": made.machine,
            "versions": made.versions,
            **{name: getattr(options, name) for name in ("tokens", "alone_tokens", "megabytes_s")},
            "rows": rows,
        }
        write_json(result, options.out / "prefill_decode_links.json")
        write_page(
            options.out / "prefill_decode_links.md",
            page(rows, options, made, time.monotonic() - begin),
            FIRST_WORDS,
        )


if __name__ == "__main__":
    main()
