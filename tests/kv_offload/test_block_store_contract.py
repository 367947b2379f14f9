"""What a ``SharedStore`` does, and how it handles full, torn or shared folders."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from faulty_file_system import FILE_BYTES, WRITES, FailAt, FaultyFiles, broken
from kv_blocks import BLOCK_BYTES, identity, key, payload
from sojourn_server.kv_offload.block_file import BlockCorrupt, BlockDefect
from sojourn_server.kv_offload.disk_store import DiskStore, PutOutcome, StoreError
from sojourn_server.kv_offload.shared_store import SharedStore, blocks_per_full

KEYS = [key(number) for number in range(12)]


def shared(root: Path, name: str = "one", blocks: int = 10, **options: Any) -> SharedStore:
    files = options.pop("files", None)
    own = DiskStore.open(
        root, identity(), name=name, budget_bytes=blocks * FILE_BYTES, files=files, **options
    )
    return SharedStore(own, files=files)


def put(store: SharedStore, key: bytes, parent: bytes = b"") -> PutOutcome:
    return store.put(key, [payload(key)], parent=parent)


def get(store: SharedStore, key: bytes) -> bytes:
    found = bytearray(BLOCK_BYTES)
    store.get_into(key, [found])
    return bytes(found)


def put_context(store: SharedStore, *numbers: int) -> list[PutOutcome]:
    outcomes = []
    parent = b""
    for number in numbers:
        outcomes.append(put(store, KEYS[number], parent))
        parent = KEYS[number]
    return outcomes


def the_file(root: Path, key: bytes) -> Path:
    (found,) = root.rglob(f"{key.hex()}.*")
    return found


def test_what_was_put_is_got_in_whatever_pieces(tmp_path: Path) -> None:
    store = shared(tmp_path)
    text = payload(KEYS[0])
    assert store.put(KEYS[0], [text[:32], text[32:]]) is PutOutcome.STORED
    assert put(store, KEYS[0]) is PutOutcome.ALREADY
    pieces = [bytearray(size) for size in (1, 31, 64)]
    store.get_into(KEYS[0], pieces)
    assert b"".join(pieces) == text
    store.close()


def test_the_leading_ones_end_at_the_first_gap(tmp_path: Path) -> None:
    store = shared(tmp_path)
    assert put_context(store, 0, 1, 3) == [PutOutcome.STORED] * 3
    assert store.leading(KEYS[:5]) == 2
    assert store.leading(KEYS[2:]) == 0
    assert store.leading([]) == 0
    store.close()


@pytest.mark.parametrize("change", ["cut", "longer", "empty"])
def test_a_file_of_the_wrong_size_is_never_returned_and_its_place_is_free(
    tmp_path: Path, change: str
) -> None:
    store = shared(tmp_path)
    put(store, KEYS[0])
    path = the_file(tmp_path, KEYS[0])
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-1], "longer": content + b"!", "empty": b""}[change])
    with pytest.raises(BlockCorrupt) as caught:
        get(store, KEYS[0])
    assert caught.value.reason is BlockDefect.LENGTH
    assert store.leading(KEYS[:1]) == 0
    assert put(store, KEYS[0]) is PutOutcome.STORED
    assert get(store, KEYS[0]) == payload(KEYS[0])
    store.close()


def test_a_disk_that_cannot_be_read_fails(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = shared(tmp_path, files=files)
    put(store, KEYS[0])
    files.before = broken("readv")
    with pytest.raises(StoreError):
        get(store, KEYS[0])
    assert files.paths == {}, "a descriptor was left open"
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_at_any_operation(tmp_path: Path, code: int) -> None:
    files = FaultyFiles(max_bytes=40)
    store = shared(tmp_path, files=files)
    put(store, KEYS[0])
    full = 0
    while True:
        files.before = FailAt(WRITES, code, at=full)
        outcome = put(store, KEYS[1], KEYS[0])  # its parent makes no room for it
        files.before = lambda name, path: None
        if outcome is PutOutcome.STORED:
            break
        assert outcome is PutOutcome.DISK_FULL
        full += 1
        assert [path.name for path in tmp_path.rglob(f"{KEYS[1].hex()}*")] == []
        assert store.leading([KEYS[1]]) == 0
        assert files.paths == {}
    assert full >= 4  # to make it, to write, to close, to rename
    assert (get(store, KEYS[0]), get(store, KEYS[1])) == (payload(KEYS[0]), payload(KEYS[1]))
    store.close()


def test_engines_that_share_a_file_system_read_each_others(tmp_path: Path) -> None:
    one, two = shared(tmp_path, name="one"), shared(tmp_path, name="two")
    put_context(one, 0, 1)
    put_context(two, 2)
    assert two.leading(KEYS[:4]) == 3
    assert [get(two, key) for key in KEYS[:3]] == [payload(key) for key in KEYS[:3]]
    one.close()
    two.close()


# -- our own files: checked, bounded -----------------------------------------------------------


def test_room_is_made_from_the_ends_of_the_longest_unused_contexts(tmp_path: Path) -> None:
    store = shared(tmp_path, blocks=4)
    put_context(store, 0, 1, 2)
    put_context(store, 5)
    get(store, KEYS[2])
    get(store, KEYS[5])
    assert put_context(store, 6, 7) == [PutOutcome.STORED] * 2
    # 2 was used after 0 and 1, but without it nothing is lost that anyone could find.
    assert [number for number in range(12) if store.leading([KEYS[number]])] == [0, 5, 6, 7]
    assert store._own.used_bytes <= 4 * FILE_BYTES
    store.close()


def test_a_store_smaller_than_a_context_keeps_its_beginning_and_says_that_it_is_full(tmp_path: Path) -> None:
    store = shared(tmp_path, blocks=3)
    assert put_context(store, 0, 1, 2, 3, 4) == [PutOutcome.STORED] * 3 + [PutOutcome.FULL] * 2
    assert store.leading(KEYS) == 3
    assert put_context(store, 7) == [PutOutcome.STORED]  # another context's beginning takes an end's place
    assert store.leading(KEYS) == 2
    store.close()


def test_a_disk_that_is_full_below_the_budget_keeps_what_was_used_last(tmp_path: Path) -> None:
    """It used to keep what it had when the disk became full, for ever."""
    files = FaultyFiles()

    def fill(name: str, path: Path) -> None:
        if name == "writev" and path.suffix == ".partial" and len([*tmp_path.rglob("*.kv")]) >= 6:
            raise OSError(errno.ENOSPC, "no space left")

    store = shared(tmp_path, blocks=100, files=files)
    files.before = fill
    for context in ((0, 1, 2), (3, 4, 5), (6, 7, 8)):
        assert put_context(store, *context) == [PutOutcome.STORED] * 3
    assert [store.leading(KEYS[start : start + 3]) for start in (0, 3, 6)] == [0, 3, 3]
    store.close()


def test_who_follows_whom_outlives_the_process(tmp_path: Path) -> None:
    store = shared(tmp_path, blocks=3)
    put_context(store, 0, 1, 2)
    get(store, KEYS[2])
    store.close()
    again = shared(tmp_path, blocks=3)
    assert put(again, KEYS[9]) is PutOutcome.STORED
    assert again.leading(KEYS) == 2
    again.close()


def test_a_full_store_never_exceeds_its_budget_whoever_writes(tmp_path: Path) -> None:
    store = shared(tmp_path, blocks=4)

    def write(start: int) -> None:
        for round_ in range(10):
            put_context(store, *((start + round_ + step) % 12 for step in range(3)))

    threads = [threading.Thread(target=write, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(list(tmp_path.rglob("*.kv"))) <= 4
    assert store._own.used_bytes <= 4 * FILE_BYTES
    store.close()


# -- Full Blocks of engine blocks --------------------------------------------------------------


@pytest.mark.parametrize(("engine", "full"), [(48, 64), (128, 64), (0, 64), (-1, 64)])
def test_a_full_block_is_a_whole_number_of_engine_blocks(engine: int, full: int) -> None:
    with pytest.raises(ValueError, match="not a whole number of engine blocks"):
        blocks_per_full(engine, full)
