"""The store on a disk that works: what is kept, for how long, in which order, and for whom."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from faulty_file_system import (
    BLOCK_BYTES,
    FILE_BYTES,
    FaultyFiles,
    files_below,
    get,
    identity,
    key,
    open_store,
    payload,
    put,
)
from sojourn_server.kv_offload.block_file import FORMAT_VERSION, BlockCorrupt, BlockDefect
from sojourn_server.kv_offload.disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError
from sojourn_server.kv_offload.file_system import LocalFileSystem
from sojourn_server.kv_offload.store_folder import MANIFEST, IncompatibleStore, StoreInUse

KEYS = [key(number) for number in range(10)]


def block_file(store: DiskStore, key: bytes) -> Path:
    return store.path / key.hex()[:2] / f"{key.hex()}.kv"


def test_layers_go_in_and_come_out_each_in_its_own_buffer(tmp_path: Path) -> None:
    data = payload(KEYS[0])
    layers = [bytearray(32) for _ in range(3)]
    with open_store(tmp_path) as store:
        assert (
            store.put(KEYS[0], [data[:32], memoryview(data)[32:64], bytearray(data[64:])])
            is PutOutcome.STORED
        )
        store.get_into(KEYS[0], layers)
    assert [bytes(layer) for layer in layers] == [data[:32], data[32:64], data[64:]]


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
        written = block_file(store, KEYS[0]).stat().st_ino
        assert store.put(KEYS[0], [bytes(BLOCK_BYTES)]) is PutOutcome.ALREADY
        assert block_file(store, KEYS[0]).stat().st_ino == written
        assert get(store, KEYS[0]) == payload(KEYS[0])
        assert len(store) == 1


@pytest.mark.parametrize("size", [16, 20, 32, 64])
@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"/", b".", b"\n"])
def test_any_bytes_make_a_key(tmp_path: Path, size: int, fill: bytes) -> None:
    name = fill * size
    with open_store(tmp_path) as store:
        assert put(store, name) is PutOutcome.STORED
    with open_store(tmp_path) as store:
        assert get(store, name) == payload(name)
        assert store.drop(name)
        assert files_below(store.path) == []


def test_mistakes_of_the_caller_change_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget of -1"):
        DiskStore.open(tmp_path, identity(), budget_bytes=-1)
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
        for name in (b"x" * 15, b"x" * 65, b""):
            with pytest.raises(ValueError, match="16 to 64 bytes"):
                put(store, name)
        with pytest.raises(ValueError, match="95 bytes; expected 96"):
            store.put(KEYS[1], [bytes(95)])
        with pytest.raises(ValueError, match="97 bytes; expected 96"):
            store.get_into(KEYS[0], [bytearray(97)])
        with pytest.raises(ValueError, match="writable"):
            store.get_into(KEYS[0], [bytes(BLOCK_BYTES)])
        assert get(store, KEYS[0]) == payload(KEYS[0])
        assert (store.keys(), store.used_bytes) == ([KEYS[0]], FILE_BYTES)
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        put(store, KEYS[1])


def test_what_was_never_put_or_was_dropped_is_missing(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
        assert store.drop(KEYS[0])
        assert not store.drop(KEYS[0])
        assert not store.has(KEYS[0])
        for name in KEYS[:2]:
            with pytest.raises(BlockNotFound, match=name.hex()):
                get(store, name)
        assert store.used_bytes == 0
        assert put(store, KEYS[0]) is PutOutcome.STORED


def test_the_budget_is_kept_to_the_byte(tmp_path: Path) -> None:
    budget = 3 * FILE_BYTES
    with DiskStore.open(tmp_path, identity(), budget_bytes=budget) as store:
        assert [put(store, name) for name in KEYS[:4]] == [PutOutcome.STORED] * 3 + [PutOutcome.FULL]
        assert store.used_bytes == budget
        assert len(files_below(store.path)) == 3
        assert put(store, KEYS[0]) is PutOutcome.ALREADY
        store.drop(KEYS[1])
        assert put(store, KEYS[3]) is PutOutcome.STORED
    # One byte less holds one block less; the least recently used goes.
    with DiskStore.open(tmp_path, identity(), budget_bytes=budget - 1) as store:
        assert store.keys() == [KEYS[0], KEYS[3]]
        assert files_below(store.path) == sorted(f"{name.hex()}.kv" for name in (KEYS[0], KEYS[3]))
        assert put(store, KEYS[1]) is PutOutcome.FULL
    with DiskStore.open(tmp_path, identity(), budget_bytes=0) as store:
        assert len(store) == store.used_bytes == 0
        assert put(store, KEYS[1]) is PutOutcome.FULL


def test_the_order_is_that_of_last_use_and_outlives_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in KEYS[:5]:
            put(store, name)
        get(store, KEYS[1])
        put(store, KEYS[0])
        store.has(KEYS[2])  # to ask is no use
        order = [KEYS[2], KEYS[3], KEYS[4], KEYS[1], KEYS[0]]
        assert store.keys() == order
    with open_store(tmp_path) as store:
        assert store.keys() == order
        assert all(get(store, name) == payload(name) for name in order)


def test_a_clock_that_jumps_back_or_stands_still_does_not_reorder(tmp_path: Path) -> None:
    times = iter([5_000, 5_000, 100, 7_000, 0, 0])
    with open_store(tmp_path, clock_ns=lambda: next(times)) as store:
        for name in KEYS[:4]:
            put(store, name)
        assert store.keys() == KEYS[:4]
    with open_store(tmp_path, clock_ns=lambda: next(times)) as store:
        assert store.keys() == KEYS[:4]
        put(store, KEYS[4])
        get(store, KEYS[0])
    with open_store(tmp_path) as store:
        assert store.keys() == [*KEYS[1:5], KEYS[0]]


def test_a_damaged_block_is_refused_once_and_gone(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in KEYS[:3]:
            put(store, name)
        file = block_file(store, KEYS[0])
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
        with pytest.raises(BlockCorrupt) as caught:
            get(store, KEYS[0])
        assert caught.value.reason is BlockDefect.CHECKSUM
        # A good block, of another key.
        shutil.copy(block_file(store, KEYS[2]), block_file(store, KEYS[1]))
        with pytest.raises(BlockCorrupt) as caught:
            get(store, KEYS[1])
        assert caught.value.reason is BlockDefect.KEY
        assert files_below(store.path) == [f"{KEYS[2].hex()}.kv"]
        assert (store.keys(), store.used_bytes) == ([KEYS[2]], FILE_BYTES)
        with pytest.raises(BlockNotFound):
            get(store, KEYS[0])
        assert put(store, KEYS[0]) is PutOutcome.STORED
        assert get(store, KEYS[0]) == payload(KEYS[0])


def test_a_block_from_another_models_store_is_refused(tmp_path: Path) -> None:
    """The tokens are the same, so the key is, and so may be the size."""
    with (
        open_store(tmp_path) as store,
        open_store(tmp_path, model=identity(model="tiny@2"), alongside=True) as other,
    ):
        put(store, KEYS[0])
        other.put(KEYS[0], [bytes(BLOCK_BYTES)])
        shutil.copy(block_file(other, KEYS[0]), block_file(store, KEYS[0]))
        with pytest.raises(BlockCorrupt) as caught:
            get(store, KEYS[0])
        assert caught.value.reason is BlockDefect.IDENTITY


def test_files_that_somebody_removed_are_missing(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
        block_file(store, KEYS[0]).unlink()
        block_file(store, KEYS[0]).parent.rmdir()
        with pytest.raises(BlockNotFound):
            get(store, KEYS[0])
        assert (len(store), store.used_bytes) == (0, 0)
        assert put(store, KEYS[0]) is PutOutcome.STORED
        put(store, KEYS[1])
        block_file(store, KEYS[1]).unlink()
        assert store.drop(KEYS[1])
        shutil.rmtree(store.path)
        # Nothing is written into a folder that has no manifest and that another process may make its own.
        with pytest.raises(StoreError, match="No such file"):
            put(store, KEYS[2])
        assert not store.path.exists()


def test_opening_takes_up_whole_blocks_only_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in KEYS[:4]:
            put(store, name)
        os.truncate(block_file(store, KEYS[0]), FILE_BYTES - 1)
        with block_file(store, KEYS[1]).open("ab") as file:
            file.write(b"\0")
        block_file(store, KEYS[5]).parent.mkdir(exist_ok=True)
        block_file(store, KEYS[5]).with_suffix(".partial").write_bytes(b"half")
        block_file(store, KEYS[2]).with_suffix(".partial").write_bytes(
            b"half"
        )  # and one beside a whole block
        folder = block_file(store, KEYS[2]).parent
        theirs = [
            store.path / "README",
            folder / "notes.txt",
            folder / f"{KEYS[2].hex()}.kv.bak",
            folder / f"{KEYS[2].hex()}0.kv",
            folder / "abc.kv",
            folder / f"{bytes(15).hex()}.kv",
            store.path / f"{KEYS[0].hex()}.kv",
        ]
        for path in theirs:
            path.write_bytes(b"x" * FILE_BYTES)
        wrong_folder = store.path / f"{(KEYS[6][0] + 1) % 256:02x}"
        wrong_folder.mkdir(exist_ok=True)
        theirs.append(wrong_folder / f"{KEYS[6].hex()}.kv")
        theirs[-1].write_bytes(b"x" * FILE_BYTES)
        theirs.append(block_file(store, KEYS[7]))
        theirs[-1].parent.mkdir(exist_ok=True)
        theirs[-1].symlink_to(theirs[0])
    with open_store(tmp_path) as store:
        assert store.keys() == KEYS[2:4]
        assert store.used_bytes == 2 * FILE_BYTES
        assert all(get(store, name) == payload(name) for name in KEYS[2:4])
        assert all(path.exists() for path in theirs)
        left = {path for path in tmp_path.rglob("*") if path.is_file()} - set(theirs)
        assert left == {
            store.path / MANIFEST, store.path / "lock", block_file(store, KEYS[2]), block_file(store, KEYS[3])
        }  # fmt: skip


def test_a_name_that_goes_while_its_folder_is_looked_through_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "goes").mkdir()
    (tmp_path / "stays").mkdir()
    with os.scandir(tmp_path) as entries:
        seen = nullcontext(list(entries))
    (tmp_path / "goes").rmdir()
    monkeypatch.setattr(os, "scandir", lambda path: seen)
    assert [entry.name for entry in LocalFileSystem().scan(tmp_path)] == ["stays"]


def test_opening_reads_no_payload(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for name in KEYS:
            put(store, name)
    opened: list[str] = []
    files = FaultyFiles(lambda name, path: opened.append(path.suffix) if name == "open" else None)
    with open_store(tmp_path, files=files) as store:
        assert len(store) == 10
    assert set(opened) == {".json"}


def test_a_block_is_under_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    steps: list[str] = []

    def watch(name: str, path: Path) -> None:
        steps.append(name)
        if name in ("create", "writev", "fsync", "replace"):
            assert not block_file(store, KEYS[0]).exists()

    files = FaultyFiles(max_bytes=50)
    with open_store(tmp_path, files=files) as store:
        put(store, KEYS[1])
        block_file(store, KEYS[0]).parent.mkdir(exist_ok=True)
        files.before = watch
        assert put(store, KEYS[0]) is PutOutcome.STORED
        assert steps == ["create", *["writev"] * 5, "close", "replace", "set_mtime"]


def test_only_the_owner_can_read_blocks(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store:
        put(store, KEYS[0])
        for path in (store.path, *store.path.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


CHANGES = {
    "model": "tiny@2",
    "kv_dtype": "fp8",
    "block_tokens": 32,
    "block_bytes": 2 * BLOCK_BYTES,
    "layers": 4,
    "hash_scheme": "sha256/seed=1/16",
    "vllm_version": "0.33.0",
    "tp_size": 2,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_restart_with_something_else_is_refused_and_explained(tmp_path: Path, field: str) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
    before = sorted(tmp_path.rglob("*"))
    changed = identity(**{field: CHANGES[field]})
    with pytest.raises(IncompatibleStore) as caught:
        open_store(tmp_path, model=changed)
    was, now = getattr(identity(), field), CHANGES[field]
    assert caught.value.differences == ((field, was, now),)
    message = str(caught.value)
    assert (
        f"{store.path} is for another model or configuration ({field}: found {was!r}, expected {now!r})"
        in message
    )
    assert "Name another directory, or delete that store" in message
    assert sorted(tmp_path.rglob("*")) == before
    with open_store(tmp_path) as store:
        assert get(store, KEYS[0]) == payload(KEYS[0])


def test_several_models_side_by_side_where_that_is_meant(tmp_path: Path) -> None:
    other = identity(model="tiny@2")
    with open_store(tmp_path) as store, open_store(tmp_path, model=other, alongside=True) as beside:
        put(store, KEYS[0])
        assert not beside.has(KEYS[0])
        put(beside, KEYS[1])
    # Both are known now.
    with open_store(tmp_path) as store, open_store(tmp_path, model=other) as beside:
        assert (store.keys(), beside.keys()) == ([KEYS[0]], [KEYS[1]])
    with pytest.raises(IncompatibleStore) as caught:
        open_store(tmp_path, model=identity(model="tiny@2", kv_dtype="fp8"))
    assert [difference.field for difference in caught.value.differences] == ["kv_dtype"], "not the nearest"


def test_the_ranks_of_one_server_need_not_be_told_of_each_other(tmp_path: Path) -> None:
    with open_store(tmp_path, model=identity(tp_size=2)) as first:
        put(first, KEYS[0])
        with open_store(tmp_path, model=identity(tp_size=2, tp_rank=1)) as second:
            assert not second.has(KEYS[0])
    with pytest.raises(IncompatibleStore, match="tp_size"):
        open_store(tmp_path)


@pytest.mark.parametrize("alongside", [False, True])
def test_the_manifest_decides_and_not_the_name(tmp_path: Path, alongside: bool) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
    other = identity(block_tokens=32)
    renamed = store.path.rename(tmp_path / other.digest().hex()[:16])
    with pytest.raises(IncompatibleStore, match="block_tokens: found 64, expected 32") as caught:
        open_store(tmp_path, model=other, alongside=alongside)
    assert "side by side" not in str(caught.value), "that would not help here"
    assert files_below(renamed) == [f"{KEYS[0].hex()}.kv"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "manifest.json: found ''"),
        (b"{ this is not JSON", "manifest.json: found '{ this is not"),
        (b"[" * 60_000, r"manifest.json: found '\[\["),
        (b"\xff\xfe", "manifest.json: found"),
        (b'["a list"]', "manifest.json: found"),
        (b'{"name": "a web app"}', "manifest.json: found"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    with open_store(tmp_path) as store:
        put(store, KEYS[0])
    (store.path / MANIFEST).write_bytes(content)
    for options in ({}, {"alongside": True}):
        with pytest.raises(IncompatibleStore, match=says):
            open_store(tmp_path, **options)
    with pytest.raises(IncompatibleStore, match=says):
        open_store(tmp_path, model=identity(layers=4))
    assert files_below(store.path) == [f"{KEYS[0].hex()}.kv"]
    assert (store.path / MANIFEST).read_bytes() == content


def test_another_format_and_fields_we_do_not_know_are_named(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    manifest = tmp_path / identity().digest().hex()[:16] / MANIFEST
    content = json.loads(manifest.read_text())
    content["format"] = FORMAT_VERSION + 1
    content["sinks"] = 4
    manifest.write_text(json.dumps(content))
    with pytest.raises(IncompatibleStore) as caught:
        open_store(tmp_path)
    assert caught.value.differences == (("format", 2, 1), ("sinks", 4, None))


def test_a_folder_of_the_right_name_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / identity().digest().hex()[:16]
    folder.mkdir()
    (folder / "thesis.tex").write_text("text")
    with pytest.raises(IncompatibleStore, match=r"manifest.json: found 'none'"):
        open_store(tmp_path)
    assert (folder / "thesis.tex").read_text() == "text"
    # Where only the manifest is missing because the last opener died before it wrote one, all is well.
    (folder / "thesis.tex").unlink()
    (folder / f"{MANIFEST}.partial").write_text("{")
    with open_store(tmp_path) as store:
        assert put(store, KEYS[0]) is PutOutcome.STORED


def test_other_things_in_the_root_are_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "old-store").mkdir()
    (tmp_path / "old-store" / MANIFEST).write_text("{}")
    (tmp_path / "file").write_text("x")
    open_store(tmp_path).close()


def test_a_root_that_cannot_be_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Not a directory"):
        open_store(tmp_path / "file")
    with open_store(tmp_path / "several" / "new" / "folders") as store:
        put(store, KEYS[0])


def test_one_opener_at_a_time_in_one_process_too(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "root")
    with open_store(tmp_path / "root"):
        for root in (tmp_path / "root", tmp_path / "link"):
            with pytest.raises(StoreInUse, match="in use by this process itself") as caught:
                open_store(root)
            assert f"another than {tmp_path / 'root'}, or stop the engine" in caught.value.advice
            assert "one of its workers" not in caught.value.advice
    store = open_store(tmp_path / "root")
    store.close()
    store.close()
    with open_store(tmp_path / "link"):
        store.close()  # again, and it must not let go of another's lock
        with pytest.raises(StoreInUse):
            open_store(tmp_path / "root")
