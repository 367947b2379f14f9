"""The store against a dict, on a disk that sometimes fails; and under several threads."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES, WRITES, FailAt, FaultyFiles, broken, files_below
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_blocks import BLOCK_BYTES, identity, key, payload
from sojourn_server.kv_offload.block_file import BlockCorrupt
from sojourn_server.kv_offload.disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError

KEYS = [key(number, size) for number, size in enumerate((16, 20, 32, 32, 32, 64))]


@dataclass
class Kept:
    """What the model knows of one block."""

    used: int
    """When it was last used, counted in uses."""
    damaged: bool = False
    cut_off: bool = False


class StoreAgainstDict(RuleBasedStateMachine):
    keys = st.sampled_from(KEYS)

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.files = FaultyFiles(max_bytes=70)
        self.blocks = 4
        self.store = self._open()
        self.model: dict[bytes, Kept] = {}
        self.aside: dict[bytes, Kept] = {}
        """Could not be read, in the order in which that was found."""
        self.uses = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def _open(self) -> DiskStore:
        return DiskStore.open(self.root, identity(), budget_bytes=self.blocks * FILE_BYTES, files=self.files)

    def _used(self, key: bytes) -> None:
        self.uses += 1
        self.model[key].used = self.uses

    @contextmanager
    def _fault(self, fault: FailAt) -> Iterator[None]:
        self.files.before = fault
        try:
            yield
        finally:
            self.files.before = lambda name, path: None

    def _file(self, key: bytes) -> Path:
        return self.store.path / key.hex()[:2] / f"{key.hex()}.kv"

    @rule(key=keys, at=st.none() | st.integers(0, 8))
    def put(self, key: bytes, at: int | None) -> None:
        """``at``: the disk is full from that write on."""
        fault = FailAt(WRITES, errno.ENOSPC, at=sys.maxsize if at is None else at)
        with self._fault(fault):
            outcome = self.store.put(key, [payload(key)[:40], payload(key)[40:]])
        if key in self.model:
            assert outcome is PutOutcome.ALREADY
            return self._used(key)
        self.aside.pop(key, None)
        if len(self.model) + len(self.aside) >= self.blocks:
            if not self.aside:
                assert outcome is PutOutcome.FULL
                return None
            del self.aside[next(iter(self.aside))]
        if fault.fired:
            assert outcome is PutOutcome.DISK_FULL
        else:
            assert outcome is PutOutcome.STORED
            self.model[key] = Kept(0)
            self._used(key)

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        found = [bytearray(BLOCK_BYTES - 7), bytearray(7)]
        kept = self.model.get(key)
        if kept is None:
            with pytest.raises(BlockNotFound):
                self.store.get_into(key, found)
        elif kept.damaged or kept.cut_off:
            with pytest.raises(BlockCorrupt):
                self.store.get_into(key, found)
            del self.model[key]
        else:
            self.store.get_into(key, found)
            assert b"".join(found) == payload(key)
            self._used(key)

    @rule(key=keys)
    def fail_to_read(self, key: bytes) -> None:
        kept = self.model.get(key)
        if kept is None or kept.cut_off:  # its length is looked at before it is read
            return
        with self._fault(broken("readv")), pytest.raises(StoreError):
            self.store.get_into(key, [bytearray(BLOCK_BYTES)])
        self.aside[key] = self.model.pop(key)

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        known = key in self.model or key in self.aside
        assert self.store.drop(key) is known
        self.model.pop(key, None)
        self.aside.pop(key, None)

    @rule(key=keys, position=st.integers(0, FILE_BYTES - 1), bit=st.integers(0, 7))
    def damage(self, key: bytes, position: int, bit: int) -> None:
        kept = self.model.get(key)
        if kept is None or kept.damaged or kept.cut_off:
            return
        content = bytearray(self._file(key).read_bytes())
        content[position] ^= 1 << bit
        self._rewrite(key, bytes(content))
        kept.damaged = True

    @rule(key=keys, length=st.integers(0, FILE_BYTES - 1))
    def cut_off(self, key: bytes, length: int) -> None:
        kept = self.model.get(key)
        if kept is not None and not kept.cut_off:
            self._rewrite(key, self._file(key).read_bytes()[:length])
            kept.cut_off = True

    def _rewrite(self, key: bytes, content: bytes) -> None:
        """As the disk would: it does not tell the file's time."""
        file = self._file(key)
        time_ns = file.stat().st_mtime_ns
        file.write_bytes(content)
        os.utime(file, ns=(time_ns, time_ns))

    @rule(blocks=st.integers(0, 6))
    def reopen(self, blocks: int) -> None:
        self.store.close()
        self.blocks = blocks
        self.store = self._open()
        self.model.update(self.aside)
        self.aside.clear()
        order = sorted((kept.used, key) for key, kept in self.model.items() if not kept.cut_off)
        last = order[max(0, len(order) - blocks) :]
        self.model = {key: self.model[key] for _, key in last}

    @invariant()
    def agree(self) -> None:
        order = sorted(self.model, key=lambda key: self.model[key].used)
        assert self.store.keys() == order
        assert [key for key in KEYS if self.store.has(key)] == [key for key in KEYS if key in self.model]
        files = {*self.model, *self.aside}
        assert len(self.store) == len(self.model)
        assert self.store.used_bytes == len(files) * FILE_BYTES <= self.blocks * FILE_BYTES
        assert files_below(self.store.path) == sorted(f"{key.hex()}.kv" for key in files)
        assert self.files.paths == {}, "a descriptor was left open"


StoreAgainstDict.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStoreAgainstDict = StoreAgainstDict.TestCase


def test_threads_that_put_get_and_drop_the_same_blocks(tmp_path: Path) -> None:
    """Every read is right or fails, the budget holds at every moment, and at the end all agree."""
    names = [key(number) for number in range(8)]
    budget = 5 * FILE_BYTES
    failures: list[BaseException] = []
    done = threading.Event()
    counts = dict.fromkeys((*PutOutcome, "read", "missing"), 0)
    interval = sys.getswitchinterval()

    def work(store: DiskStore, seed: int) -> None:
        choose = random.Random(seed)
        found = bytearray(BLOCK_BYTES)
        try:
            for _ in range(3000):
                name = choose.choice(names)
                what = choose.randrange(4)
                if what == 0:
                    store.drop(choose.choice(store.keys()[:2] or names))
                elif what == 1:
                    counts[store.put(name, [payload(name)])] += 1
                else:
                    try:
                        store.get_into(name, [found])
                        assert found == payload(name)
                        counts["read"] += 1
                    except BlockNotFound:
                        counts["missing"] += 1
        except BaseException as failure:
            failures.append(failure)

    def ask(store: DiskStore) -> None:
        try:
            while not done.is_set():
                assert store.used_bytes <= budget
                assert len(store.keys()) <= 5
                taken = 0
                for file in store.path.glob("*/*"):
                    with contextlib.suppress(FileNotFoundError):
                        taken += file.stat().st_size
                # Files come and go while we count, each at most once more: this is no exact bound.
                assert taken <= 2 * budget
        except BaseException as failure:
            failures.append(failure)

    sys.setswitchinterval(1e-5)
    try:
        with DiskStore.open(
            tmp_path, identity(), budget_bytes=budget, files=FaultyFiles(max_bytes=64)
        ) as store:
            workers = [threading.Thread(target=work, args=(store, seed)) for seed in range(2)]
            asker = threading.Thread(target=ask, args=(store,))
            for thread in (*workers, asker):
                thread.start()
            for thread in workers:
                thread.join()
            done.set()
            asker.join()
            assert failures == []
            order = store.keys()
            assert store.used_bytes == len(order) * FILE_BYTES
            assert files_below(store.path) == sorted(f"{name.hex()}.kv" for name in order)
    finally:
        sys.setswitchinterval(interval)
    assert counts[PutOutcome.DISK_FULL] == 0
    assert all(count > 5 for what, count in counts.items() if what is not PutOutcome.DISK_FULL), counts
    with DiskStore.open(tmp_path, identity(), budget_bytes=budget) as store:
        assert sorted(store.keys()) == sorted(order)
