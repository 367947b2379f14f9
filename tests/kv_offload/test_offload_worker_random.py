"""Random life of the tiers with the real mover, disk and threads: whatever is loaded is what was asked for.

What ends when is the machine's to say, so a seed repeats what is asked for and not what happens: only
contents are compared, and what is left when all has come to rest. Each life is led by an engine that plans a
step when it knows what became of the one before, and by one that plans it while that is still to be computed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from block_contexts import as_context
from fake_cuda import FakeCuda
from faulty_file_system import WRITES, FaultyFiles, files_below
from offload_harness import Engine, check_accounts, nothing_is_pinned
from sojourn_server.kv_offload.offload_jobs import OffloadJobs

pytestmark = [
    pytest.mark.filterwarnings("default"),  # torch warns about itself
    pytest.mark.filterwarnings("error:::sojourn"),
]

DEVICE_BLOCKS = 12
HOST_SLOTS = 7
DISK_BLOCKS = 6
CHAINS = 4
CHAIN_BLOCKS = 6
OPERATIONS = 1500
MOST_LIVES = 20
"""A life goes on so often, until everything has happened in it."""
MOST_S = 6.0
"""A machine that is busy with other things leads a shorter life."""
READS = frozenset({"read"})


def key_of(chain: int, index: int) -> bytes:
    return b"chain%02d-block%03d" % (chain, index)


@dataclass
class Loading:
    """A request whose blocks are being loaded. It holds these blocks, and the cached blocks before them."""

    local: list[bytes]
    keys: list[bytes]
    block_ids: list[int]
    aborted: bool = False


class Dead(Exception):
    """What a device that fails says."""


class Faults:
    """Of the device and the disk; asked from the lanes' threads."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lock = threading.Lock()
        self.disk: tuple[frozenset[str], int] | None = None
        self.device: str | None = None
        self.killed = False
        self.slow = False

    def of_disk(self, name: str, path: Path) -> None:
        if self.killed:
            raise OSError(errno.EIO, "the process is dead", str(path))
        with self.lock:
            happens, pause_s = self.draw.random() < 0.5, self.draw.random() * 0.003
        if self.slow and name in ("read", "write", "unlink"):
            time.sleep(pause_s)
        fault = self.disk
        if fault is not None and name in fault[0] and happens:
            raise OSError(fault[1], os.strerror(fault[1]), str(path))

    def of_device(self, name: str) -> None:
        with self.lock:
            happens, pause_s = self.draw.random() < 0.5, self.draw.random() * 0.0005
        if self.slow:
            time.sleep(pause_s)
        if name == self.device and happens:
            raise Dead(name)


class Life:
    """A device that caches chains of blocks, and loses some; requests that ask for chains."""

    def __init__(self, seed: int, folder: Path, ahead: bool, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.draw = random.Random(seed)
        self.faults = Faults(seed)
        self.folder = folder
        self.ahead = ahead
        self.done: Counter[str] = Counter()
        self.stores = 0
        self.weights = 0
        self.requests = 0
        self.cached: dict[bytes, int] = {}
        self.waiting: dict[str, int] = {}
        self.taken: set[int] = set()
        self.loading: dict[str, Loading] = {}
        self.planned: list[tuple[OffloadJobs, dict[int, bytes]]] = []
        self._start()

    def _start(self) -> None:
        self.weights = 0
        self.cached.clear()
        self.waiting.clear()
        self.taken.clear()
        self.loading.clear()
        self.planned.clear()
        self.faults.killed = False
        self.engine = Engine(
            self.folder / f"store{self.stores}",
            files=FaultyFiles(self.faults.of_disk),
            blocks=DEVICE_BLOCKS,
            slots=HOST_SLOTS,
            disk_blocks=DISK_BLOCKS,
            max_spilling=3,
            cuda=FakeCuda(self.draw.randrange(1 << 30)) if self.on_cuda else None,
        )
        self.engine.device.before = self.faults.of_device
        self.planner = self.engine.planner

    # -- steps

    def _step(self, writes: dict[int, bytes]) -> None:
        """Plan one; carry out that, or the one before."""
        self.planned.append((self.planner.take_jobs(), writes))
        if len(self.planned) > self.ahead:
            self._carry_out()
        # What a step still to be carried out will compute is nobody else's.
        self.taken = {block_id for _, writes in self.planned for block_id in writes}

    def _carry_out(self) -> None:
        jobs, writes = self.planned.pop(0)
        engine = self.engine
        with contextlib.suppress(Dead):
            engine.mover.begin_step(jobs)
        for block_id, key in writes.items():
            engine.write(block_id, key, self.weights)
        if engine.cuda is not None:
            engine.cuda.run_some(30)
        self._take_loaded()
        self.planner.take_results(engine.mover.take_results())
        check_accounts(self.planner)

    def _take_loaded(self) -> None:
        loaded, not_filled = self.engine.mover.take_loaded()
        for request_id in sorted(loaded):
            self._arrived(request_id, not_filled)

    def _check(self, block_id: int, key: bytes) -> None:
        assert self.engine.holds(block_id, key, weights=self.weights), "a wrong token would follow"

    def _catch_up(self) -> None:
        """Whatever is planned or loading ends."""
        while self.planned:
            self._carry_out()
        self.engine.mover.wait_for_loads()
        self._take_loaded()
        self.taken.clear()

    # -- clients

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
        found = self.planner.lookup(request_id, as_context(keys[local:]), self.engine.now)
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
        done, failed, _ = self.planner.end_loads([request_id], set(not_filled))
        filled = [block_id not in not_filled for block_id in load.block_ids]
        arrived = [*filled, False].index(False)
        assert failed == ({request_id} if not all(filled) and not load.aborted else set())
        assert done == {request_id} - failed
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

    # -- what happens

    def steps(self) -> None:
        """Long enough for the lanes to come to something."""
        for _ in range(5):
            time.sleep(0.001)
            self._step({})

    def time_passes(self) -> None:
        self.engine.now += self.draw.choice([0.1, 5.0, 60.0, -30.0])

    def the_disk_fails(self) -> None:
        self.faults.disk = self.draw.choice(
            [
                (WRITES, errno.ENOSPC),
                (WRITES, errno.EIO),
                (READS, errno.EIO),
                (READS | WRITES | {"unlink", "set_mtime"}, errno.EIO),
                (READS, errno.EMFILE),
            ]
        )

    def the_device_fails(self) -> None:
        """What fails to reach host memory breaks the worker, so that a restart must follow."""
        self.faults.device = self.draw.choice(["to_host", "to_device", "slot"])

    def all_goes_slowly(self) -> None:
        self.faults.slow = not self.faults.slow

    def all_works(self) -> None:
        self.faults.disk = self.faults.device = None

    def a_file_is_damaged(self) -> None:
        files = sorted(self.folder.glob(f"store{self.stores}/*/*/*.kv"))
        if files:
            file = self.draw.choice(files)
            if self.draw.random() < 0.5:
                file.unlink(missing_ok=True)
                return
            try:
                content = bytearray(file.read_bytes())
            except FileNotFoundError:
                return
            content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
            file.write_bytes(content)

    def new_weights(self) -> None:
        """What was computed by the old ones must not be found any more, wherever it is."""
        self._catch_up()
        self.weights += 1
        self.cached.clear()
        self.waiting.clear()
        self.planner.forget()

    def restart(self) -> None:
        """Memory is gone and files are there: all that were begun, or as many as a killed process had. The
        engine has the first weights again, which the store's identity names."""
        self.faults.killed = self.draw.random() < 0.5
        self._end()
        if self.draw.random() < 0.3:
            self.stores += 1
        self.faults.disk = self.faults.device = None
        self._start()

    def _end(self) -> None:
        self.done.update(self.planner.counts)
        self.done["restarts"] += 1
        self.engine.close()

    def lead(self, operations: int) -> None:
        """Live for so many operations, or for the longest time."""
        until = time.monotonic() + MOST_S
        for _ in range(operations):
            (operation,) = self.draw.choices(list(OFTEN), list(OFTEN.values()))
            operation(self)
            if time.monotonic() > until:
                break

    # -- the end

    def it_comes_to_rest(self) -> None:
        if self.engine.mover.is_broken:
            self.restart()
        self.all_works()
        for request_id in list(self.waiting):
            self.planner.abandon(request_id)
        self._catch_up()
        self.engine.rest()
        assert nothing_is_pinned(self.planner)
        assert len(files_below(self._folder())) <= DISK_BLOCKS

    def all_that_is_on_disk_is_what_it_is_called(self) -> None:
        self._end()
        self._start()
        for name in files_below(self._folder()):
            key = bytes.fromhex(name.split(".")[0])
            if self.engine.wait_for([key], "last"):
                self.engine.load([key], "last")
            self.planner.abandon("last")

    def _folder(self) -> Path:
        assert self.engine.disk is not None
        return self.engine.disk.path


OFTEN: dict[Callable[[Life], None], float] = {
    Life.turns: 40,
    Life.ask_again: 12,
    Life.store_ahead: 10,
    Life.step: 4,
    Life.steps: 3,
    Life.fetch_ahead: 3,
    Life.relabel: 3,
    Life.a_client_goes: 2,
    Life.time_passes: 6,
    Life.the_disk_fails: 1.5,
    Life.the_device_fails: 0.5,
    Life.all_works: 3,
    Life.all_goes_slowly: 1,
    Life.a_file_is_damaged: 2,
    Life.new_weights: 0.2,
    Life.restart: 0.6,
}
"""How often each operation is drawn."""

HAPPENS = (
    "kept",
    "saved",
    "stored",
    "loaded",
    "spilled",
    "staged",
    "stage_corrupt",
    "stage_missing",
    "stage_failed",
    "dropped",
    "restarts",
    "invalid",
    "shared a load",
)


@pytest.mark.parametrize("ahead", [False, True], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_what_is_loaded_is_right(
    seed: int, ahead: bool, on_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unexpected: list[Any] = []

    def report(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, Dead):
            unexpected.append(args.exc_value)

    monkeypatch.setattr(threading, "excepthook", report)
    life = Life(seed, tmp_path, ahead, on_cuda)
    try:
        for _ in range(MOST_LIVES):
            life.lead(OPERATIONS)
            if all(life.done[what] or life.planner.counts[what] for what in HAPPENS):
                break
        life.it_comes_to_rest()
        life.all_that_is_on_disk_is_what_it_is_called()
    finally:
        life._end()
    assert unexpected == []
    for what in HAPPENS:
        assert life.done[what], f"nothing was ever {what}: the life is too quiet to tell anything"
