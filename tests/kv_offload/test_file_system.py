"""A hostile user of the machine plants links and folders where a store will be: nothing outside changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES, identity, key, payload
from sojourn_server.kv_offload.disk_store import DiskStore, PutOutcome, StoreError
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
