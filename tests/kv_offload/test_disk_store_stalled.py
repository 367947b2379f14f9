"""The store on a disk that no longer answers, or from which nothing can be removed."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES, FaultyFiles, broken, get, open_store, put
from kv_blocks import key, payload
from sojourn_server.kv_offload.disk_store import PutOutcome
from sojourn_server.kv_offload.store_folder import StoreInUse

KEYS = [key(number) for number in range(10)]


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
