"""What a ``SharedStore`` does, and how it handles full, torn or shared folders."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from faulty_file_system import FILE_BYTES, WRITES, FailAt, FaultyFiles, broken
from kv_blocks import BLOCK_BYTES, identity, key, payload
from sojourn_server.kv_offload.block_file import BlockCorrupt, BlockDefect
from sojourn_server.kv_offload.disk_planner import TierLimits
from sojourn_server.kv_offload.disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError, block_path
from sojourn_server.kv_offload.offload_jobs import ProbeResult
from sojourn_server.kv_offload.shared_store import SEARCH_S, SharedStore, SiblingStores, blocks_per_full
from sojourn_server.kv_offload.store_folder import (
    MANIFEST,
    StoreInUse,
    is_store_name,
)

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


# -- Other engines' stores beside one's own: what is found in them, and that nothing of theirs is touched.


SIBLING_KEYS = [key(number) for number in range(10)]


def open_store(root: Path, name: str | None, *blocks: bytes, **options: object) -> DiskStore:
    """A store with these blocks; others' of ``changed`` identities are meant to be there."""
    model = identity(**options)
    store = DiskStore.open(root, model, budget_bytes=20 * FILE_BYTES, name=name, alongside=True)
    for block in blocks:
        store.put(block, [payload(block)])
    return store


def read(sibling_stores: SiblingStores, block: bytes) -> bytes:
    found = bytearray(BLOCK_BYTES)
    sibling_stores.get_into(block, [found])
    return bytes(found)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file's number and time of change."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()
    }


def of(store: DiskStore, files: FaultyFiles | None = None) -> SiblingStores:
    return SiblingStores(store.path, store.identity, files)


# -- names ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "..", "a b", "ä", "a\n", "x" * 65])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    assert not is_store_name(name)
    with pytest.raises(ValueError, match="cannot be named"):
        open_store(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_one_engine_at_a_time_has_a_name(tmp_path: Path) -> None:
    another = pytest.raises(StoreInUse, match=r"Give this one another name \(--kv-disk-name\)")
    with open_store(tmp_path, "a"), open_store(tmp_path, "b"), another:
        open_store(tmp_path, "b")
    with open_store(tmp_path, None), pytest.raises(StoreInUse, match="Give this one a name of its own"):
        open_store(tmp_path, None)


# -- looking and reading ------------------------------------------------------------------


def test_what_others_have_written_is_found_and_read(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, "a", *SIBLING_KEYS[:3]),
        open_store(tmp_path, None, *SIBLING_KEYS[3:5], SIBLING_KEYS[7]),
        open_store(tmp_path, "b", SIBLING_KEYS[5]) as own,
    ):
        before = tree(tmp_path)
        sibling_stores = of(own)
        assert sibling_stores.leading(SIBLING_KEYS) == ProbeResult(5, 2), "its own it need not ask others for"
        assert sibling_stores.leading(SIBLING_KEYS[7:]) == ProbeResult(1, 2)
        assert sibling_stores.leading(SIBLING_KEYS[5:6]) == ProbeResult(0, 2)
        assert sibling_stores.leading([]) == ProbeResult(0, 2)
        for block in (*SIBLING_KEYS[:5], SIBLING_KEYS[7]):
            assert read(sibling_stores, block) == payload(block)
        with pytest.raises(BlockNotFound):
            read(sibling_stores, SIBLING_KEYS[5])
        assert tree(tmp_path) == before, "a reader leaves no trace, nor a use"


def test_a_search_of_a_slow_share_ends_in_time_with_what_it_has_found(tmp_path: Path) -> None:
    """A request waits a second for it. What takes longer to look for used to be computed, all of it."""
    now = 0.0

    def slow(name: str, path: Path) -> None:
        nonlocal now
        now += 0.01 if name == "size" and path.suffix == ".kv" else 0.0

    many = [key(number) for number in range(100)]
    with (
        open_store(tmp_path, "a") as own,
        DiskStore.open(tmp_path, identity(), budget_bytes=100 * FILE_BYTES, name="b") as other,
    ):
        for block in many:
            other.put(block, [payload(block)])
        sibling_stores = SiblingStores(own.path, own.identity, FaultyFiles(slow), lambda: now)
        assert sibling_stores.leading(many) == ProbeResult(64, 1)
        assert SEARCH_S < now < TierLimits(host_slots=1).max_probe_wait_s


@pytest.mark.parametrize("changed", [{"layers": 4}, {"model": "tiny@2"}, {"hash_scheme": "sha256/seed=1/16"}])
def test_the_store_of_something_else_is_no_sibling(tmp_path: Path, changed: dict[str, object]) -> None:
    with open_store(tmp_path, "b") as own, open_store(tmp_path, "a", *SIBLING_KEYS[:3], **changed) as other:
        assert of(own).leading(SIBLING_KEYS) == ProbeResult(0, 0)
        # Nor one that was given the name of one of ours: its manifest tells.
        disguised = tmp_path / f"{identity().digest().hex()[:16]}-a"
        shutil.copytree(other.path, disguised)
        assert of(own).leading(SIBLING_KEYS) == ProbeResult(0, 0)
        # Nor, if that is wrong too, are its blocks ours: each says what it is of.
        shutil.copy(own.path / MANIFEST, disguised / MANIFEST)
        sibling_stores = of(own)
        assert sibling_stores.leading(SIBLING_KEYS) == ProbeResult(3, 1)
        with pytest.raises(BlockCorrupt) as caught:
            read(sibling_stores, SIBLING_KEYS[0])
        assert caught.value.reason is BlockDefect.IDENTITY
        assert block_path(disguised, SIBLING_KEYS[0]).exists(), "it is not ours to remove"
