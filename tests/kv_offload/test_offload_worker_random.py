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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fake_cuda import FakeCuda
from faulty_file_system import WRITES, FaultyFiles, files_below
from offload_harness import Engine, check_accounts, nothing_is_pinned
from random_clients import DEVICE_BLOCKS, DISK_BLOCKS, HOST_SLOTS, Loading, RandomClients
from sojourn_server.kv_offload.offload_jobs import OffloadJobs

pytestmark = [
    pytest.mark.filterwarnings("default"),  # torch warns about itself
    pytest.mark.filterwarnings("error:::sojourn"),
]

OPERATIONS = 1500
MOST_LIVES = 5
"""A life goes on so often, until everything has happened in it."""
MOST_S = 6.0
"""A machine that is busy with other things leads a shorter life."""
READS = frozenset({"read"})


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


class Life(RandomClients):
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

    def _now(self) -> float:
        return self.engine.now

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
    Life.the_disk_fails: 0.7,
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
