"""A hostile user of the machine plants links and folders where a store will be: nothing outside changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES, identity, key, payload
from sojourn_server.kv_offload.disk_store import DiskStore, PutOutcome, StoreError
from sojourn_server.kv_offload.file_system import LocalFileSystem
from sojourn_server.kv_offload.shared_store import SiblingStores
from sojourn_server.kv_offload.store_folder import folder_name

KEY = key(1)
NAME = KEY.hex()
SECRET = b"not of the store"


def open_store(root: Path, name: str | None = None) -> DiskStore:
    return DiskStore.open(root, identity(), budget_bytes=8 * FILE_BYTES, name=name)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder of a store, empty but for what a test plants."""
    path = tmp_path / "root" / folder_name(identity(), None)
    path.mkdir(parents=True, mode=0o700)
    return path


def test_a_planted_lock_is_not_followed(store: Path, outside: Path) -> None:
    (store / "lock").symlink_to(outside)
    with pytest.raises(StoreError, match=r"lock is a symbolic link; expected none in a store"):
        open_store(store.parent)
    (store / "lock").unlink()
    (store / "lock").hardlink_to(outside)
    with pytest.raises(StoreError, match="lock is not a regular file with exactly one name"):
        open_store(store.parent)
    assert outside.read_bytes() == SECRET


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_planted_partial_files_are_replaced(
    store: Path, outside: Path, plant: Callable[[Path, Path], None]
) -> None:
    plant(store / "manifest.json.partial", outside)
    with open_store(store.parent) as opened:
        (store / NAME[:2]).mkdir(mode=0o700)
        plant(store / NAME[:2] / f"{NAME}.partial", outside)
        assert opened.put(KEY, [payload(KEY)]) is PutOutcome.STORED
        found = bytearray(payload(KEY))
        opened.get_into(KEY, [found])
        assert found == payload(KEY)
    assert outside.read_bytes() == SECRET


def test_a_planted_manifest_or_block_is_not_read(store: Path, outside: Path) -> None:
    (store / "manifest.json").symlink_to(outside)
    with pytest.raises(StoreError, match=r"manifest\.json is a symbolic link"):
        open_store(store.parent)
    (store / "manifest.json").unlink()
    with open_store(store.parent) as opened:
        opened.put(KEY, [payload(KEY)])
        block = store / NAME[:2] / f"{NAME}.kv"
        block.rename(store.parent / "moved")
        block.symlink_to(store.parent / "moved")
        with pytest.raises(StoreError, match="is a symbolic link"):
            opened.get_into(KEY, [bytearray(payload(KEY))])


def test_a_pipe_in_a_files_place_holds_up_nobody(store: Path) -> None:
    os.mkfifo(store / "manifest.json")
    with pytest.raises(Exception, match=r"manifest\.json"):
        open_store(store.parent)


def test_a_planted_folder_of_blocks_is_refused(store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    with open_store(store.parent) as opened:
        (store / NAME[:2]).symlink_to(elsewhere)
        with pytest.raises(StoreError, match=f"{NAME[:2]} is a symbolic link"):
            opened.put(KEY, [payload(KEY)])
        with pytest.raises(StoreError, match=f"{NAME[:2]} is a symbolic link"):
            opened.put(KEY, [payload(KEY)])
    with pytest.raises(StoreError, match=f"{NAME[:2]} is not a folder; expected one of blocks"):
        open_store(store.parent)
    assert list(elsewhere.iterdir()) == []


def test_a_planted_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root = tmp_path / "root"
    root.mkdir()
    (root / folder_name(identity(), None)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a symbolic link"):
        open_store(root)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_links_above_the_root_are_the_operators(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    with open_store(tmp_path / "kv") as opened:
        assert opened.put(KEY, [payload(KEY)]) is PutOutcome.STORED


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o1777])
@pytest.mark.parametrize("what", ["store", "blocks"])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int, what: str) -> None:
    with open_store(tmp_path) as opened:
        opened.put(KEY, [payload(KEY)])
        folder = opened.path if what == "store" else opened.path / NAME[:2]
    folder.chmod(mode)
    with pytest.raises(StoreError, match=rf"{folder} has mode {mode:04o}; expected .*chmod go-w {folder}"):
        open_store(tmp_path)
    folder.chmod(0o755)
    with open_store(tmp_path) as opened:
        assert opened.has(KEY)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as opened:
        path = opened.path
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StoreError, match=rf"{path} belongs to user {owner}; expected one of"):
        open_store(tmp_path)


def test_blocks_of_another_users_store_are_not_read(tmp_path: Path) -> None:
    with open_store(tmp_path, "theirs") as theirs, open_store(tmp_path, "ours") as ours:
        theirs.put(KEY, [payload(KEY)])
        siblings = SiblingStores(ours.path, identity())
        assert siblings.leading([KEY]).found == 1
        theirs.path.chmod(0o777)
        assert siblings.leading([KEY]).found == 0
        assert not siblings.has(KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize(
    ("owner", "mode", "usable"),
    [
        (0, 0o1777, True),  # /tmp
        (0, 0o777, True),  # a volume of a container
        (12345, 0o1777, True),
        (12345, 0o755, True),  # a user's folder in root's container
        (12345, 0o777, False),
        (12345, 0o775, False),
    ],
)
def test_which_roots_are_used(tmp_path: Path, owner: int, mode: int, usable: bool) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, owner, owner)
    root.chmod(mode)
    if usable:
        open_store(root).close()
        return
    with pytest.raises(StoreError, match=rf"{root} belongs to user 12345 and has mode {mode:04o}; expected"):
        open_store(root)
    assert list(root.iterdir()) == []


def test_names_are_looked_up_in_the_folder_that_was_checked(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is exchanged for a link between the look at it and the opening of a file in it."""
    files = LocalFileSystem(tmp_path / "root")
    folder = tmp_path / "root" / "ab"
    files.mkdir(folder, parents=True)
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "file").write_bytes(SECRET)
    check, exchanged = os.fstat, []

    def exchange(fd: int) -> os.stat_result:
        status = check(fd)
        if not exchanged and status.st_ino == os.stat(folder).st_ino:
            exchanged.append(folder.rename(tmp_path / "moved"))
            folder.symlink_to(tmp_path / "trap")
        return status

    monkeypatch.setattr(os, "fstat", exchange)
    files.close(files.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert exchanged
    assert (tmp_path / "moved" / "file").exists()
    assert (tmp_path / "trap" / "file").read_bytes() == SECRET
