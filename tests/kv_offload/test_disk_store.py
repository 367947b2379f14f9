"""The store on a disk that works: what is kept, for how long, in which order, and for whom."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES, FaultyFiles, files_below, get, open_store, put
from kv_blocks import BLOCK_BYTES, identity, key, payload
from sojourn_server.kv_offload.block_file import BlockCorrupt, BlockDefect
from sojourn_server.kv_offload.disk_store import DiskStore, PutOutcome, StoreError
from sojourn_server.kv_offload.store_folder import MANIFEST, IncompatibleStore

KEYS = [key(number) for number in range(10)]


def block_file(store: DiskStore, key: bytes) -> Path:
    return store.path / key.hex()[:2] / f"{key.hex()}.kv"


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


def test_a_root_that_cannot_be_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Not a directory"):
        open_store(tmp_path / "file")
    with open_store(tmp_path / "several" / "new" / "folders") as store:
        put(store, KEYS[0])
