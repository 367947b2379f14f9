"""The store on a disk that is full, broken or slow, and under a process that is killed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty_file_system import FILE_BYTES, FaultyFiles, broken, files_below, get, open_store, put
from kv_blocks import identity, key, payload
from sojourn_server.kv_offload.disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError
from sojourn_server.kv_offload.store_folder import StoreInUse

KEYS = [key(number) for number in range(10)]


@contextmanager
def failing(files: FaultyFiles, fault: Callable[[str, Path], None]) -> Iterator[None]:
    files.before = fault
    try:
        yield
    finally:
        files.before = lambda name, path: None


@pytest.mark.parametrize("name", ["open", "size", "readv", "close"])
def test_a_block_that_cannot_be_read_is_put_aside_and_kept(tmp_path: Path, name: str) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, KEYS[0])
        put(store, KEYS[1])
        with failing(files, broken(name)), pytest.raises(StoreError) as caught:
            get(store, KEYS[0])
        assert caught.value.errno == errno.EIO
        assert not store.has(KEYS[0])
        with pytest.raises(BlockNotFound):
            get(store, KEYS[0])
        assert files_below(store.path) == sorted(f"{name.hex()}.kv" for name in KEYS[:2])
        assert (store.keys(), store.used_bytes, files.paths) == ([KEYS[1]], 2 * FILE_BYTES, {})
    with open_store(tmp_path) as store:  # the cable was loose
        assert store.keys() == KEYS[:2]
        assert get(store, KEYS[0]) == payload(KEYS[0])


def test_opening_on_a_broken_disk_says_so_and_lets_go_of_the_lock(tmp_path: Path) -> None:
    for name in ("mkdir", "create", "writev", "fsync", "close", "replace", "scan", "open"):
        root = tmp_path / name
        with pytest.raises(StoreError) as caught:
            open_store(root, files=FaultyFiles(broken(name)))
        assert caught.value.errno == errno.EIO, name
        assert list(root.rglob("*.partial")) == []
        with open_store(root) as store:  # nothing it left is in the way
            put(store, KEYS[0])
        with open_store(root) as store:
            assert store.has(KEYS[0])


@pytest.mark.parametrize("slow", ["writev", "readv", "unlink", "replace", "close", "create", "set_mtime"])
def test_a_slow_disk_keeps_nobody_waiting_who_only_asks(tmp_path: Path, slow: str) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def stall(name: str, path: Path) -> None:
        if name == slow:
            arrived.set()
            assert go_on.wait(60.0)

    files = FaultyFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, KEYS[0])
        put(store, KEYS[1])
        with failing(files, stall):
            worker = threading.Thread(target=_work, args=(store,))
            worker.start()
            assert arrived.wait(60.0)
            answers: list[Any] = []
            asker = threading.Thread(
                target=lambda: answers.append(
                    (store.has(KEYS[1]), store.keys(), len(store), store.used_bytes)
                )
            )
            asker.start()
            asker.join(10.0)
            answered = list(answers)
            go_on.set()
            worker.join()
            asker.join()
        assert answered, "the lock was held while the disk worked"
        assert answered[0][0]
        assert KEYS[1] in answered[0][1]


def _work(store: DiskStore) -> None:
    """One of everything."""
    put(store, KEYS[2])
    get(store, KEYS[0])
    store.drop(KEYS[0])


# Processes that die

PRELUDE = f"""
import os, random, sys, time
sys.path[:0] = {sys.path!r}
from faulty_file_system import FaultyFiles
from kv_blocks import identity, key, payload
from sojourn_server.kv_offload.disk_store import DiskStore, PutOutcome
root, blocks = sys.argv[1], 40
size = 1 << 16
model = identity(block_bytes=size)
store = DiskStore.open(root, model, budget_bytes=blocks * (size + 128), files=FaultyFiles(max_bytes=9000))
print("ready", flush=True)
"""

WRITER = """
while True:
    name = key(random.randrange(200))
    outcome = store.put(name, [payload(name, size)])
    if outcome is PutOutcome.FULL:
        for old in store.keys()[: random.randrange(1, 4)]:
            store.drop(old)
"""

HOLDER = """
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
time.sleep(600)
"""


@contextmanager
def process(script: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(root)], stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield running
        finally:
            running.kill()


def stop_in_mid_write(writer: subprocess.Popen[str], folder: Path) -> None:
    """Stop the process, and again if need be, until it stands still with a file half written."""
    for _ in range(10_000):
        writer.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        if any(name.endswith(".partial") for name in files_below(folder)):
            return
        writer.send_signal(signal.SIGCONT)
        threading.Event().wait(0.001)
    raise AssertionError("it was never stopped while it wrote")


def test_a_writer_that_is_killed_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    size = 1 << 16
    model = identity(block_bytes=size)
    moments = random.Random(6)
    halves = reads = 0
    folder = tmp_path / model.digest().hex()[:16]
    for number in range(12):
        with process(WRITER, tmp_path) as writer:
            threading.Event().wait(moments.uniform(0.0, 0.15))
            if number % 3 == 2:
                stop_in_mid_write(writer, folder)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        left = files_below(folder)
        halves += sum(name.endswith(".partial") for name in left)
        with DiskStore.open(tmp_path, model, budget_bytes=40 * (size + 128)) as store:
            names = store.keys()
            assert files_below(folder) == sorted(f"{name.hex()}.kv" for name in names)
            assert [f"{name.hex()}.kv" for name in sorted(names)] == [n for n in left if n.endswith(".kv")]
            assert store.used_bytes == len(names) * (size + 128) <= store.budget_bytes
            found = bytearray(size)
            for name in names:
                store.get_into(name, [found])
                assert found == payload(name, size)
                reads += 1
            for name in names[:1]:
                store.drop(name)
            fresh = key(1000)
            assert store.put(fresh, [payload(fresh, size)]) is PutOutcome.STORED
            store.drop(fresh)
    assert halves >= 4
    assert reads > 100


def test_a_second_opener_is_refused_until_the_first_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first has left a child behind, as an engine does that is killed before its helpers."""
    model = identity(block_bytes=1 << 16)
    with process(HOLDER, tmp_path) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            for _ in range(2):  # the first refusal must not have let go of anything
                with pytest.raises(StoreInUse, match=f"in use by process {holder.pid}\\b") as caught:
                    DiskStore.open(tmp_path, model, budget_bytes=0)
            assert f"a directory of its own, another than {tmp_path}, or stop" in str(caught.value)
            assert f"process {holder.pid} is one of its workers" in str(caught.value)
            # It ends between two tries, as a start check does that has the lock for an instant.
            monkeypatch.setattr(time, "sleep", lambda seconds: (holder.kill(), holder.wait()))
            DiskStore.open(tmp_path, model, budget_bytes=0).close()
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


# -- The store on a disk that no longer answers, or from which nothing can be removed.


def test_opening_with_a_smaller_budget_keeps_what_cannot_be_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for each in KEYS:
            put(store, each)
    files = FaultyFiles(broken("unlink", code=errno.EROFS))
    with open_store(tmp_path, blocks=2, files=files) as store:
        assert store.keys() == KEYS[1:]
        assert put(store, key(99)) is PutOutcome.FULL
        assert get(store, KEYS[5]) == payload(KEYS[5])
        assert store.used_bytes == 10 * FILE_BYTES
    with open_store(tmp_path, blocks=2) as store:
        assert store.keys() == [KEYS[9], KEYS[5]]


def test_closing_does_not_wait_for_ever_and_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a read that the disk never answers. The call may yet write, so no other engine may open."""
    monkeypatch.setattr("sojourn_server.kv_offload.disk_store.CLOSE_WAIT_S", 0.05)
    arrived, go_on = threading.Event(), threading.Event()

    def hang(name: str, path: Path) -> None:
        if name == "readv":
            arrived.set()
            assert go_on.wait(60.0)

    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    put(store, KEYS[0])
    files.before = hang
    reader = threading.Thread(target=get, args=(store, KEYS[0]))
    reader.start()
    assert arrived.wait(60.0)
    closer = threading.Thread(target=store.close, daemon=True)
    closer.start()
    try:
        closer.join(20.0)
        has_closed = not closer.is_alive()
        with pytest.raises(StoreInUse):
            open_store(tmp_path)
    finally:
        go_on.set()
        reader.join()
        closer.join()
    assert has_closed
    store.close()
    with open_store(tmp_path) as reopened:
        assert reopened.keys() == [KEYS[0]]
