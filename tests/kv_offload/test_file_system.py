"""A store's folder that another user of the machine could change is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES
from kv_blocks import identity, key, payload
from sojourn_server.kv_offload.disk_store import DiskStore, StoreError
from sojourn_server.kv_offload.store_folder import folder_name

KEY = key(1)


def open_store(root: Path, name: str | None = None) -> DiskStore:
    return DiskStore.open(root, identity(), budget_bytes=8 * FILE_BYTES, name=name)


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / folder_name(identity(), None)).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="is a symbolic link; expected none in a store"):
        open_store(tmp_path / "root")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    with open_store(tmp_path) as opened:
        opened.put(KEY, [payload(KEY)])
        folder = opened.path
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
