"""Other engines' stores beside one's own: what is found in them, and that nothing of theirs is touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from faulty_file_system import FILE_BYTES, FaultyFiles
from kv_blocks import BLOCK_BYTES, identity, key, payload
from sojourn_server.kv_offload.block_file import BlockCorrupt, BlockDefect
from sojourn_server.kv_offload.disk_planner import TierLimits
from sojourn_server.kv_offload.disk_store import BlockNotFound, DiskStore, block_path
from sojourn_server.kv_offload.offload_jobs import ProbeResult
from sojourn_server.kv_offload.shared_store import SEARCH_S, SiblingStores
from sojourn_server.kv_offload.store_folder import (
    MANIFEST,
    StoreInUse,
    is_store_name,
)

KEYS = [key(number) for number in range(10)]


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
        open_store(tmp_path, "a", *KEYS[:3]),
        open_store(tmp_path, None, *KEYS[3:5], KEYS[7]),
        open_store(tmp_path, "b", KEYS[5]) as own,
    ):
        before = tree(tmp_path)
        sibling_stores = of(own)
        assert sibling_stores.leading(KEYS) == ProbeResult(5, 2), "its own it need not ask others for"
        assert sibling_stores.leading(KEYS[7:]) == ProbeResult(1, 2)
        assert sibling_stores.leading(KEYS[5:6]) == ProbeResult(0, 2)
        assert sibling_stores.leading([]) == ProbeResult(0, 2)
        for block in (*KEYS[:5], KEYS[7]):
            assert read(sibling_stores, block) == payload(block)
        with pytest.raises(BlockNotFound):
            read(sibling_stores, KEYS[5])
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
    with open_store(tmp_path, "b") as own, open_store(tmp_path, "a", *KEYS[:3], **changed) as other:
        assert of(own).leading(KEYS) == ProbeResult(0, 0)
        # Nor one that was given the name of one of ours: its manifest tells.
        disguised = tmp_path / f"{identity().digest().hex()[:16]}-a"
        shutil.copytree(other.path, disguised)
        assert of(own).leading(KEYS) == ProbeResult(0, 0)
        # Nor, if that is wrong too, are its blocks ours: each says what it is of.
        shutil.copy(own.path / MANIFEST, disguised / MANIFEST)
        sibling_stores = of(own)
        assert sibling_stores.leading(KEYS) == ProbeResult(3, 1)
        with pytest.raises(BlockCorrupt) as caught:
            read(sibling_stores, KEYS[0])
        assert caught.value.reason is BlockDefect.IDENTITY
        assert block_path(disguised, KEYS[0]).exists(), "it is not ours to remove"
