"""Checks of KV offload before an engine starts, on real folders and beside a second process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR

import pytest
from sojourn_server.kv_offload.block_file import HEADER_BYTES, KvIdentity
from sojourn_server.kv_offload.disk_store import DiskStore, PutOutcome
from sojourn_server.kv_offload.store_folder import MANIFEST, StoreInUse, StoreLock
from sojourn_server.launch import kv_offload_checks
from sojourn_server.launch.kv_offload_options import GIB, KvOffloadOptions
from sojourn_server.launch.launch_errors import InvalidOption
from sojourn_server.launch.machine_memory import MachineMemory

BLOCK_BYTES = 1000
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def identity(**changed):
    fields = {
        "model": "/models/a [('w', 1, 2)] torch.float32 abc None auto",
        "kv_dtype": "float32",
        "block_tokens": 32,
        "block_bytes": BLOCK_BYTES,
        "layers": 3,
        "hash_scheme": "sha256/seed=0/32",
        "vllm_version": "0.32.0",
    }
    return KvIdentity(**{**fields, **changed})


WEIGHTS = "/models/a [('w', 1, 2)]"


def make_store(
    root: Path, blocks: int = 0, alongside: bool = False, name: str | None = None, **changed
) -> Path:
    model = identity(**changed)
    with DiskStore.open(root, model, budget_bytes=GIB, alongside=alongside, name=name) as store:
        for number in range(blocks):
            assert store.put(bytes([number] * 32), [bytes(BLOCK_BYTES)]) is PutOutcome.STORED
        return store.path


def tree(root: Path) -> dict[str, tuple[int, int] | None]:
    """Not the content: to close a lock's file is to let go of the lock."""
    found = {str(path): path.lstat() for path in root.rglob("*")}
    return {name: None if S_ISDIR(s.st_mode) else (s.st_ino, s.st_mtime_ns) for name, s in found.items()}


def check(
    disk: Path,
    gib: float = 1e-6,
    *,
    version="0.32.0",
    weights=WEIGHTS,
    tokens=32,
    name: str | None = None,
    workers=1,
) -> list[str]:
    """The notes. Whatever the answer, nothing may be left or changed."""
    before = tree(disk.parent) if disk.parent.is_dir() and disk.parent != Path("/proc") else None
    options = KvOffloadOptions(host_gib=1e-6, disk=str(disk), disk_gib=gib, disk_name=name)
    try:
        return kv_offload_checks.check_kv_offload(
            options, vllm_version=version, weights=weights, block_tokens=tokens, workers=workers
        )
    finally:
        assert before is None or tree(disk.parent) == before


def refused(disk: Path, **options) -> InvalidOption:
    with pytest.raises(InvalidOption) as caught:
        check(disk, **options)
    assert str(disk) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.next_step
    return caught.value


# -- a dry run -------------------------------------------------------------------------


@linux
def test_a_dry_run_asks_the_same_and_makes_nothing_for_a_moment_either(tmp_path, monkeypatch):
    def dry(disk):
        options = KvOffloadOptions(host_gib=1e-6, disk=str(disk), disk_gib=1e-6)
        return kv_offload_checks.check_kv_offload(
            options, vllm_version="0.32.0", weights=WEIGHTS, block_tokens=32, try_writing=False
        )

    monkeypatch.setattr(
        kv_offload_checks.tempfile, "mkdtemp", lambda **options: pytest.fail("made something")
    )
    assert dry(tmp_path / "new") == []
    (note,) = dry(tmp_path / "new" / "folders")
    assert note.endswith(f"does not exist: the start makes it and its parents in {tmp_path}")
    assert list(tmp_path.iterdir()) == []
    store = make_store(tmp_path / "kv")
    assert dry(tmp_path / "kv") == []
    with held(store) as holder, pytest.raises(InvalidOption, match=f"in use by process {holder.pid}\\b"):
        dry(tmp_path / "kv")
    monkeypatch.setattr(kv_offload_checks.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(InvalidOption, match=r"cannot be made in .*: Permission denied; expected a directory"):
        dry(tmp_path / "new")


# -- the path --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new", "several/new/folders", "there", "link", "link to nowhere"])
def test_a_folder_that_is_there_or_can_be_made_is_fine(tmp_path, name):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "link to nowhere").symlink_to(tmp_path / "target")
    assert len(check(tmp_path / name)) == (name == "several/new/folders")
    with DiskStore.open(tmp_path / name, identity(), budget_bytes=0):
        pass  # and the engine agrees


def test_a_file_is_no_folder_and_has_none_below_it(tmp_path):
    (tmp_path / "file").write_text("text")
    assert f"--kv-disk {tmp_path / 'file'} is not a directory" in str(refused(tmp_path / "file"))
    error = refused(tmp_path / "file" / "below" / "it")
    assert f"cannot be made in {tmp_path / 'file'}, which is not a directory" in str(error)


@linux
def test_where_even_root_can_make_nothing(tmp_path):
    assert "cannot be made in /proc: " in str(refused(Path("/proc/sojourn")))
    (tmp_path / "link").symlink_to("/proc/self")
    assert f"--kv-disk {tmp_path / 'link'} cannot be written: " in str(refused(tmp_path / "link"))


def test_links_in_a_circle_and_names_that_are_too_long(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for disk in (tmp_path / "a" / "c", tmp_path / ("x" * 300)):
        assert "cannot be re" in str(refused(disk))


def refuse_to_write(monkeypatch, code):
    def refuse(**options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_the_systems_error_is_in_the_message(tmp_path, monkeypatch, code):
    make_store(tmp_path / "kv")
    refuse_to_write(monkeypatch, code)
    error = refused(tmp_path / "kv")
    assert f"cannot be written: {os.strerror(code)}; expected a directory" in str(error)
    assert f"cannot be made in {tmp_path}: {os.strerror(code)}" in str(refused(tmp_path / "new"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_fine_for_a_store_that_is_there_and_for_no_other(tmp_path, monkeypatch, code):
    make_store(tmp_path / "kv")
    refuse_to_write(monkeypatch, code)
    assert check(tmp_path / "kv") == []
    assert os.strerror(code) in str(refused(tmp_path / "new"))


# -- the lock --------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from sojourn_server.kv_offload.store_folder import StoreLock
from pathlib import Path
lock = StoreLock(Path(sys.argv[1]))
if len(sys.argv) > 2:
    os.truncate(Path(sys.argv[1]) / "lock", 0)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def held(store: Path, *arguments: str):
    command = [sys.executable, "-c", HOLDER, str(store), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            yield holder
        finally:
            holder.kill()


@linux
def test_a_live_engine_is_named_and_keeps_its_lock(tmp_path):
    store = make_store(tmp_path / "kv")
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with held(store) as holder:
        for disk in (tmp_path / "kv", tmp_path / "link"):
            error = refused(disk)
            assert f"in use by process {holder.pid}" in str(error)
            assert "a directory of its own" in error.next_step
        with pytest.raises(StoreInUse, match=f"process {holder.pid}\\b"):
            DiskStore.open(tmp_path / "kv", identity(), budget_bytes=0)
    assert (store / "lock").exists(), "this shows nothing"
    assert check(tmp_path / "kv") == [], "it has died"
    with DiskStore.open(tmp_path / "kv", identity(), budget_bytes=0):
        pass  # and no lock was left


@linux
def test_the_system_knows_the_holder_that_could_not_write_its_number(tmp_path):
    store = make_store(tmp_path / "kv")
    with held(store, "and forget its number") as holder:
        assert StoreLock.holder(store) == f"process {holder.pid}"


@linux
def test_a_check_in_the_process_that_has_the_store_open_lets_go_of_nothing(tmp_path):
    with DiskStore.open(tmp_path / "kv", identity(), budget_bytes=0) as store:
        assert "this process itself" in str(refused(tmp_path / "kv"))
        script = (
            "import sys; from pathlib import Path; "
            "from sojourn_server.kv_offload.store_folder import StoreLock"
        )
        asked = [
            sys.executable,
            "-c",
            f"{script}; print(StoreLock.holder(Path(sys.argv[1])))",
            str(store.path),
        ]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True)
        assert answer.stdout == f"process {os.getpid()}\n"


@linux
def test_a_free_store_beside_one_in_use_may_be_the_engines(tmp_path):
    first = make_store(tmp_path / "kv")
    second = make_store(tmp_path / "kv", alongside=True, layers=4)
    with held(first):
        assert check(tmp_path / "kv") == []
        with held(second):
            assert "in use" in str(refused(tmp_path / "kv"))


@linux
@pytest.mark.parametrize("first", [None, "a"])
def test_engines_with_names_of_their_own_share_a_directory(tmp_path, first):
    store = make_store(tmp_path / "kv", name=first)
    with held(store) as holder:
        error = refused(tmp_path / "kv", name=first)
        assert f"in use by process {holder.pid}" in str(error)
        wanted = "a name of its own" if first is None else "another name"
        assert f"Give this one {wanted} (--kv-disk-name)" in error.next_step
        assert check(tmp_path / "kv", name="b") == [], "nor is it told that other things lie there"
        assert check(tmp_path / "kv", name="b", tokens=16) != [], "but not with blocks of another size"
        if first is not None:
            assert check(tmp_path / "kv") == [], "without a name it is another store too"
    assert check(tmp_path / "kv", name=first) == []
    assert "vllm_version: found '0.32.0'" in str(refused(tmp_path / "kv", name="b", version="0.33.0"))


@linux
def test_an_incompatible_store_in_use_does_not_matter(tmp_path):
    make_store(tmp_path / "kv")
    other = make_store(tmp_path / "kv", alongside=True, vllm_version="0.31.0")
    with held(other):
        assert check(tmp_path / "kv") == []


# -- what lies there -------------------------------------------------------------------


def change_manifest(store: Path, **changed) -> None:
    path = store / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_another_format_is_named(tmp_path):
    change_manifest(make_store(tmp_path / "kv"), format=99, sinks=4)
    error = refused(tmp_path / "kv")
    assert "format: found 99, expected 1; sinks: found 4" in str(error)
    assert "Name another directory" in error.next_step


def test_the_store_of_another_vllm_is_named(tmp_path):
    make_store(tmp_path / "kv")
    assert "vllm_version: found '0.32.0', expected '0.33.0'" in str(
        refused(tmp_path / "kv", version="0.33.0")
    )
    assert check(tmp_path / "kv", version=None) == []


@pytest.mark.parametrize(
    "other", ["/models/b [('w', 1, 2)]", "/models/a [('w', 1, 3)]", "/models/a [('w', 1, 2"]
)
def test_the_store_of_other_weights_is_named(tmp_path, other):
    make_store(tmp_path / "kv")
    assert f"model: found {identity().model!r}, expected {other + ' …'!r}" in str(
        refused(tmp_path / "kv", weights=other)
    )
    assert check(tmp_path / "kv", weights=None) == [], "a hub id"


def test_one_possibly_matching_store_is_enough(tmp_path):
    change_manifest(make_store(tmp_path / "kv", layers=5), format=99)
    make_store(tmp_path / "kv", alongside=True)
    make_store(tmp_path / "kv", alongside=True, model="org/name@None torch.float32")
    assert check(tmp_path / "kv") == []


def test_the_nearest_of_several_is_reported(tmp_path):
    make_store(tmp_path / "kv", vllm_version="0.31.0", model="/models/b []")
    near = make_store(tmp_path / "kv", alongside=True, vllm_version="0.31.0", layers=4)
    assert str(near) in str(refused(tmp_path / "kv"))


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not JSON"])
def test_something_elses_manifest_where_a_store_would_be(tmp_path, content):
    folder = tmp_path / "kv" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(content)
    assert f"manifest.json: found {content!r}, expected 'that of a sojourn KV store'" in str(
        refused(tmp_path / "kv")
    )


def test_other_files_are_reported_if_there_is_no_store(tmp_path):
    disk = tmp_path / "home"
    (disk / "lost+found").mkdir(parents=True)
    assert check(disk) == []
    for name in ("thesis.tex", "0123456789abcdef", "b", "a"):
        (disk / name).mkdir()
    (note,) = check(disk)
    assert "0123456789abcdef, a, b, …" in note
    make_store(disk)
    assert check(disk) == []


def test_another_block_size_is_reported_and_left_to_the_engine(tmp_path):
    make_store(tmp_path / "kv")
    (note,) = check(tmp_path / "kv", tokens=64)
    assert "has blocks of 32 tokens, and --block-size is 64" in note
    assert check(tmp_path / "kv", tokens=None) == []
    assert check(tmp_path / "new", tokens=64) == []


# -- sizes -----------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_too_little_free_space_is_reported(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        kv_offload_checks.shutil,
        "disk_usage",
        lambda path: asked.append(path) or Usage(9 * GIB, 7 * GIB, 2 * GIB),
    )
    (note,) = check(tmp_path / "new", 2.5)
    assert "--kv-disk-gib is 2.5, but 2.00 GiB are free" in note
    assert asked == [tmp_path], "the nearest folder that is there"
    assert check(tmp_path / "new", 2) == []


def test_what_a_store_has_already_is_not_asked_for_again(tmp_path, monkeypatch):
    file_bytes = BLOCK_BYTES + HEADER_BYTES
    make_store(tmp_path / "kv", blocks=3)
    make_store(tmp_path / "kv", blocks=1, alongside=True, layers=4)
    monkeypatch.setattr(kv_offload_checks.shutil, "disk_usage", lambda path: Usage(GIB, GIB, file_bytes))
    assert check(tmp_path / "kv", 4 * file_bytes / GIB) == []
    (note,) = check(tmp_path / "kv", (4 * file_bytes + 1) / GIB)
    assert "of blocks already" in note


def test_each_of_several_workers_has_a_folder_of_stores(tmp_path, monkeypatch):
    file_bytes = BLOCK_BYTES + HEADER_BYTES
    for rank in range(2):
        make_store(tmp_path / "kv" / f"rank{rank}of2", blocks=3, tp_rank=rank, tp_size=2)
    monkeypatch.setattr(kv_offload_checks.shutil, "disk_usage", lambda path: Usage(GIB, GIB, file_bytes))
    assert check(tmp_path / "kv", 7 * file_bytes / GIB, workers=2) == []
    (note,) = check(tmp_path / "kv", (7 * file_bytes + 1) / GIB, workers=2)
    assert "of blocks already" in note
    error = refused(tmp_path / "kv", version="0.33.0", workers=2)
    assert "0.32.0" in str(error)


def test_a_file_system_without_figures_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_offload_checks.shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    assert check(tmp_path / "kv", 5) == []


MEMORY = MachineMemory(total_bytes=4 * GIB, available_bytes=3 * GIB, owner="this machine")


def test_more_host_memory_than_there_is_is_refused():
    assert kv_offload_checks.check_host_memory(3, MEMORY) == []
    with pytest.raises(
        InvalidOption, match=r"^--kv-host-gib is 4.001; expected at most the 4.00 GiB"
    ) as caught:
        kv_offload_checks.check_host_memory(4.001, MEMORY)
    assert "of this machine" in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize("gib", [3.001, 4])
def test_too_little_host_memory_is_reported(gib):
    (note,) = kv_offload_checks.check_host_memory(gib, MEMORY)
    assert f"--kv-host-gib is {gib}, but 3.00 GiB of the 4.00 GiB of this machine are available" in note


def test_memory_is_checked_for_every_connector():
    options = KvOffloadOptions(host_gib=1e9, backend="vllm")
    with pytest.raises(InvalidOption, match="--kv-host-gib is 1e"):
        kv_offload_checks.check_kv_offload(options, vllm_version=None, weights=None, block_tokens=None)


def test_checking_loads_no_engine():
    script = (
        "import sys, sojourn_server.launch.kv_offload_checks, sojourn_server.launch.weights_fingerprint;"
        "print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
