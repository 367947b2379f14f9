"""The store on a disk that is full, broken or slow, and under a process that is killed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from faulty_file_system import (
    BLOCK_BYTES,
    FILE_BYTES,
    WRITES,
    FailAt,
    FaultyFiles,
    broken,
    files_below,
    get,
    identity,
    key,
    open_store,
    payload,
    put,
)
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


def test_a_disk_that_is_full_at_any_write_leaves_nothing(tmp_path: Path) -> None:
    files = FaultyFiles(max_bytes=20)
    outcomes: list[PutOutcome] = []
    with open_store(tmp_path, files=files) as store:
        put(store, KEYS[0])
        while PutOutcome.STORED not in outcomes:
            for code in (errno.ENOSPC, errno.EDQUOT):
                with failing(files, FailAt(WRITES, code, at=len(outcomes) // 2)):
                    outcomes.append(put(store, KEYS[1]))
                if outcomes[-1] is PutOutcome.STORED:
                    break
                assert files_below(store.path) == [f"{KEYS[0].hex()}.kv"]
                assert not store.has(KEYS[1])
                assert (store.keys(), store.used_bytes) == ([KEYS[0]], FILE_BYTES)
                assert files.paths == {}, "a descriptor was left open"
                with suppress(FileNotFoundError):
                    (store.path / KEYS[1].hex()[:2]).rmdir()
        assert outcomes[:-1] == [PutOutcome.DISK_FULL] * (len(outcomes) - 1)
        # No folder, the folder, the file, its twelve parts, closing, renaming.
        assert len(outcomes) == 2 * 17 + 1
        assert get(store, KEYS[1]) == payload(KEYS[1])
    with open_store(tmp_path) as store:
        assert store.keys() == KEYS[:2]


@pytest.mark.parametrize("name", ["create", "writev", "close", "replace", "mkdir"])
def test_another_error_while_writing_keeps_its_number_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, files=files) as store:
        for code in (errno.EIO, errno.EROFS, errno.EMFILE):
            with failing(files, broken(name, code=code)), pytest.raises(StoreError) as caught:
                put(store, KEYS[0])
            assert caught.value.errno == code
            assert os.strerror(code) in str(caught.value)
            assert files_below(store.path) == []
            assert (len(store), store.used_bytes, files.paths) == (0, 0, {})
        assert put(store, KEYS[0]) is PutOutcome.STORED


def test_a_write_that_writes_nothing_ends(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, files=files) as store:
        files.max_bytes = 0
        with pytest.raises(StoreError, match="nothing was written"):
            put(store, KEYS[0])
        assert (files_below(store.path), store.used_bytes) == ([], 0)


def test_an_interrupted_put_leaves_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()

    def interrupt(name: str, path: Path) -> None:
        if name == "writev":
            raise KeyboardInterrupt

    with open_store(tmp_path, files=files) as store:
        with failing(files, interrupt), pytest.raises(KeyboardInterrupt):
            put(store, KEYS[0])
        assert (files_below(store.path), store.used_bytes) == ([], 0)
        assert put(store, KEYS[0]) is PutOutcome.STORED


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_what_the_kernel_says_of_a_full_disk_is_understood(tmp_path: Path) -> None:
    class Full(FaultyFiles):
        full = False

        def open(self, path: Path, flags: int) -> int:
            return super().open(Path("/dev/full") if self.full else path, flags & ~os.O_EXCL)

    files = Full()
    with open_store(tmp_path, files=files) as store:
        files.full = True
        assert put(store, KEYS[0]) is PutOutcome.DISK_FULL
        assert files_below(store.path) == []
        files.full = False
        assert put(store, KEYS[0]) is PutOutcome.STORED


def test_a_half_written_file_that_cannot_be_removed_is_counted_until_it_can(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, blocks=1, files=files) as store:
        with failing(files, broken("replace", "unlink")), pytest.raises(StoreError):
            put(store, KEYS[0])
        assert files_below(store.path) == [f"{KEYS[0].hex()}.partial"]
        assert (len(store), store.used_bytes) == (0, FILE_BYTES)
        with failing(files, broken("unlink")):
            assert put(store, KEYS[1]) is PutOutcome.FULL
        assert put(store, KEYS[1]) is PutOutcome.STORED
        assert (files_below(store.path), store.used_bytes) == ([f"{KEYS[1].hex()}.kv"], FILE_BYTES)


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


def test_a_read_error_half_way_fills_half_and_says_so(tmp_path: Path) -> None:
    files = FaultyFiles(max_bytes=50)
    found = bytearray(BLOCK_BYTES)
    with open_store(tmp_path, files=files) as store:
        put(store, KEYS[0])
        fault = FailAt(frozenset({"readv"}), errno.EIO, at=3)
        with failing(files, fault), pytest.raises(StoreError):
            store.get_into(KEYS[0], [found])
    assert found != payload(KEYS[0])
    assert any(found), "the fault came too early to show anything"


def test_a_block_put_aside_gives_way_when_its_room_is_needed(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, blocks=2, files=files) as store:
        put(store, KEYS[0])
        put(store, KEYS[1])
        with failing(files, broken("readv")), pytest.raises(StoreError):
            get(store, KEYS[0])
        assert put(store, KEYS[2]) is PutOutcome.STORED
        assert (store.keys(), store.used_bytes) == (KEYS[1:3], 2 * FILE_BYTES)
        assert files_below(store.path) == sorted(f"{name.hex()}.kv" for name in KEYS[1:3])
        assert put(store, KEYS[3]) is PutOutcome.FULL


def test_a_block_put_aside_can_be_put_anew_or_dropped(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, blocks=2, files=files) as store:
        for name in KEYS[:2]:
            put(store, name)
            with failing(files, broken("readv")), pytest.raises(StoreError):
                get(store, name)
        assert (len(store), store.used_bytes) == (0, 2 * FILE_BYTES)
        assert store.drop(KEYS[0])
        assert store.used_bytes == FILE_BYTES
        assert not store.drop(KEYS[0])
        with failing(files, broken("unlink")), pytest.raises(StoreError):
            put(store, KEYS[1])
        assert store.used_bytes == FILE_BYTES
        assert put(store, KEYS[1]) is PutOutcome.STORED
        assert get(store, KEYS[1]) == payload(KEYS[1])
        assert (store.used_bytes, files_below(store.path)) == (FILE_BYTES, [f"{KEYS[1].hex()}.kv"])


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_read_that_fails_for_want_of_something_else_costs_no_block(tmp_path: Path, code: int) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, KEYS[0])
        with failing(files, broken("open", code=code)), pytest.raises(StoreError):
            get(store, KEYS[0])
        assert get(store, KEYS[0]) == payload(KEYS[0])


def test_a_block_that_cannot_be_removed_is_gone_and_still_counted(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_store(tmp_path, blocks=1, files=files) as store:
        put(store, KEYS[0])
        with failing(files, broken("unlink", code=errno.EROFS)), pytest.raises(StoreError) as caught:
            store.drop(KEYS[0])
        assert caught.value.errno == errno.EROFS
        assert (store.has(KEYS[0]), store.used_bytes) == (False, FILE_BYTES)
        assert store.drop(KEYS[0])
        assert store.used_bytes == 0


def test_times_that_cannot_be_set_cost_nothing_but_the_order(tmp_path: Path) -> None:
    files = FaultyFiles(broken("set_mtime"))
    with open_store(tmp_path, files=files) as store:
        assert put(store, KEYS[0]) is PutOutcome.STORED
        assert put(store, KEYS[0]) is PutOutcome.ALREADY
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


def test_a_torn_file_that_cannot_be_removed_is_no_reason_not_to_open(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
        put(store, KEYS[1])
        os.truncate(store.path / KEYS[0].hex()[:2] / f"{KEYS[0].hex()}.kv", 5)
    with open_store(tmp_path, files=FaultyFiles(broken("unlink"))) as store:
        assert (store.keys(), store.used_bytes) == ([KEYS[1]], 2 * FILE_BYTES)


def test_a_store_next_door_that_cannot_be_read_is_refused_by_its_own_name(tmp_path: Path) -> None:
    other = DiskStore.open(tmp_path, identity(layers=4), budget_bytes=0)
    other.close()

    def deny(name: str, path: Path) -> None:
        if name == "open" and path.parent == other.path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(Exception, match="Permission denied") as caught:
        open_store(tmp_path, files=FaultyFiles(deny))
    assert str(other.path) in str(caught.value)
    open_store(tmp_path, alongside=True).close()


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


def test_the_same_block_put_twice_at_a_time_is_written_once(tmp_path: Path) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def stall(name: str, path: Path) -> None:
        if name == "writev":
            arrived.set()
            assert go_on.wait(60.0)

    files = FaultyFiles()
    outcomes: list[PutOutcome] = []
    with open_store(tmp_path, files=files) as store, failing(files, stall):
        threads = [threading.Thread(target=lambda: outcomes.append(put(store, KEYS[0]))) for _ in range(2)]
        threads[0].start()
        assert arrived.wait(60.0)
        assert not store.has(KEYS[0])
        assert store.used_bytes == FILE_BYTES, "what is being written must count"
        threads[1].start()
        threads[1].join(0.1)
        assert outcomes == [], "the second cannot know yet how the first ends"
        go_on.set()
        for thread in threads:
            thread.join()
    assert outcomes == [PutOutcome.STORED, PutOutcome.ALREADY]


def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def stall(name: str, path: Path) -> None:
        if name == "writev":
            arrived.set()
            assert go_on.wait(60.0)

    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    with failing(files, stall):
        writer = threading.Thread(target=put, args=(store, KEYS[0]))
        writer.start()
        assert arrived.wait(60.0)
        closer = threading.Thread(target=store.close)
        closer.start()
        closer.join(0.1)
        with pytest.raises(StoreInUse):
            open_store(tmp_path)
        go_on.set()
        closer.join()
        writer.join()
    with open_store(tmp_path) as reopened:
        assert reopened.keys() == [KEYS[0]]


# Processes that die

PRELUDE = f"""
import os, random, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from faulty_file_system import FaultyFiles, identity, key, payload
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


def test_a_second_opener_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
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
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(child, 0)  # it lives
            DiskStore.open(tmp_path, model, budget_bytes=0).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_refusal_within_a_process_keeps_the_lock_against_others(tmp_path: Path) -> None:
    """POSIX locks go when a process closes any descriptor of the file: who is refused must not have one."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from faulty_file_system import identity\n"
        "from sojourn_server.kv_offload.disk_store import DiskStore\n"
        "DiskStore.open(sys.argv[1], identity(), budget_bytes=0)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    with open_store(tmp_path):
        with pytest.raises(StoreInUse):
            open_store(tmp_path)
        refused = subprocess.run(command, capture_output=True, text=True)
        assert f"in use by process {os.getpid()}" in refused.stderr
    assert subprocess.run(command).returncode == 0
