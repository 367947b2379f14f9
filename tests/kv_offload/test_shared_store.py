"""The shared store returns right bytes or an error and keeps its budget, also if engines are killed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from faulty_file_system import (
    FILE_BYTES,
    WRITES,
    FailAt,
    FaultyFiles,
    broken,
    files_below,
    get,
    open_store,
    put,
)
from kv_blocks import identity, keys, payload
from sojourn_server.kv_offload.shared_store import (
    COUNT_NS,
    MANIFEST,
    TEMPORARY_NS,
    BlockCorrupt,
    IncompatibleStore,
    KvIdentity,
    PutOutcome,
    SharedStore,
    blocks_per_full,
    header,
)

STORED, ALREADY, FULL = PutOutcome
KEYS = keys(*range(12))
S = 10**9


class Clock:
    def __init__(self) -> None:
        self.ns = 1_800_000_000 * S

    def __call__(self) -> int:
        self.ns += 1_000_000  # a millisecond for each look at it
        return self.ns


def stored(store: SharedStore) -> list[int]:
    return [number for number, each in enumerate(KEYS) if store.has(each)]


# -- random lives


class Life:
    """Engines that use one folder in turns, on disks that sometimes fail."""

    BUDGET = 6

    def __init__(self, seed: int, root: Path) -> None:
        self.draw = random.Random(seed)
        self.root = root
        self.clock = Clock()
        self.done: set[str] = set()
        self.engines = [self._open() for _ in range(3)]
        self.folder = self.engines[0].path

    def _open(self) -> SharedStore:
        return open_store(self.root, self.BUDGET, files=FaultyFiles(), clock_ns=self.clock)

    def _use(self, engine: SharedStore, call: Any, *arguments: Any) -> Any:
        """Make a call, during which an operation may fail. ``None`` if the call has failed too."""
        files = engine._files
        assert isinstance(files, FaultyFiles)
        if self.draw.random() < 0.3:
            names = self.draw.choice([WRITES, frozenset({"read", "stat"}), frozenset({"unlink", "scan"})])
            code = self.draw.choice([errno.ENOSPC, errno.EIO, errno.EMFILE])
            files.before = FailAt(names, code, self.draw.randrange(6))
        try:
            return call(*arguments)
        except OSError as error:
            self.done.add(type(error).__name__)
        finally:
            files.before = lambda name, path: None

    def write(self) -> None:
        engine, context = self.draw.choice(self.engines), self.draw.randrange(3)
        chain = KEYS[4 * context : 4 * context + self.draw.randint(1, 4)]
        for block, parent in zip(chain, [b"", *chain], strict=False):
            outcome = self._use(engine, put, engine, block, parent)
            self.done.add(str(outcome))
            if outcome is STORED:
                assert get(self.draw.choice(self.engines), block) == payload(block)

    def read(self) -> None:
        engine, block = self.draw.choice(self.engines), self.draw.choice(KEYS)
        found = self._use(engine, get, engine, block)
        assert found in (None, payload(block))
        self.done.add("read" if found else "not read")

    def look(self) -> None:
        engine = self.draw.choice(self.engines)
        found = self._use(engine, engine.leading, KEYS)
        assert found is not None
        self._use(engine, engine.touch, KEYS)

    def a_file_is_damaged(self) -> None:
        files = sorted(self.folder.glob("*/*.kv"))
        if files:
            file = self.draw.choice(files)
            content = bytearray(file.read_bytes())
            place = self.draw.randrange(len(content) or 1)
            content[place : place + 1] = self.draw.choice([b"", b"\0", b"x", b"longer"])
            file.write_bytes(content)

    def an_engine_dies(self) -> None:
        """In the middle of a write, after which it does nothing more."""
        engine = self.draw.choice(self.engines)
        assert isinstance(engine._files, FaultyFiles)
        at, seen = self.draw.randrange(8), itertools.count()

        def die(name: str, path: Path) -> None:
            if name != "close" and next(seen) >= at:
                raise OSError(errno.EIO, "dead")

        engine._files.before = die
        for block in KEYS:
            try:
                put(engine, block)
            except OSError:
                self.done.add("died")
        self.engines.remove(engine)
        self.engines.append(self._open())

    def time_passes(self) -> None:
        self.clock.ns += self.draw.choice([S, COUNT_NS, TEMPORARY_NS, -S])

    def check(self) -> None:
        assert len(sorted(self.folder.glob("*/*.kv"))) <= self.BUDGET + len(self.engines)

    def rest(self) -> None:
        self.clock.ns += 2 * TEMPORARY_NS
        last = self._open()
        left = files_below(self.folder)
        assert len(left) <= self.BUDGET
        assert all(name.endswith(".kv") for name in left), "what dead writers left is swept"
        for block in KEYS:
            try:
                assert get(last, block) == payload(block)
            except (FileNotFoundError, BlockCorrupt):
                assert put(last, block) is STORED
                assert get(last, block) == payload(block)


@pytest.mark.parametrize("seed", range(6))
def test_random_engines_on_one_folder(seed: int, tmp_path: Path) -> None:
    life = Life(seed, tmp_path)
    acts = {Life.write: 8, Life.read: 6, Life.look: 1, Life.a_file_is_damaged: 3, Life.an_engine_dies: 0.5,
            Life.time_passes: 3}  # fmt: skip
    for _ in range(700):
        (act,) = life.draw.choices(list(acts), list(acts.values()))
        act(life)
        life.check()
    life.rest()
    expected = {*map(str, PutOutcome), "read", "died", "FileNotFoundError", "BlockCorrupt", "OSError"}
    assert life.done >= expected, f"too quiet: {expected - life.done}"


# -- the file of a block


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> tuple[SharedStore, Path, bytes]:
    """A store, the file of its block ``KEYS[0]``, and its good content. The tests write others into it."""
    store = open_store(tmp_path_factory.mktemp("block"))
    put(store, KEYS[0])
    (path,) = store.path.glob("*/*.kv")
    return store, path, path.read_bytes()


def refused(block: tuple[SharedStore, Path, bytes], content: bytes, why: str = "") -> None:
    store, path, _ = block
    path.write_bytes(content)
    with pytest.raises(BlockCorrupt, match=rf"{path} .*{why}"):
        get(store, KEYS[0])
    assert not path.exists(), "it would never be written again"


def test_the_format_is_what_it_was() -> None:
    """A store outlives releases: whoever changes these bytes raises FORMAT_VERSION."""
    assert header(bytes(range(20)), b"d" * 16, [b"pay", b"load"]).hex() == (
        "736a726e4b560d0a" + "0100" + "1400" + "156a2c42" + "0700000000000000" + "64" * 16
        + bytes(range(20)).hex() + "00" * 44 + "00" * 20 + "60eeedbb"
    )  # fmt: skip


def test_every_byte_of_a_file_is_guarded(block: tuple[SharedStore, Path, bytes]) -> None:
    store, path, good = block
    for position in range(FILE_BYTES):
        refused(block, good[:position] + bytes([good[position] ^ 0x40]) + good[position + 1 :])
    path.write_bytes(good)
    assert get(store, KEYS[0]) == payload(KEYS[0])


def test_a_file_cut_off_anywhere_is_refused(block: tuple[SharedStore, Path, bytes]) -> None:
    *_, good = block
    for length in range(FILE_BYTES):
        refused(block, good[:length], "cut off, or longer")
        # As a machine leaves it that died before the data was on the disk: the length right, the rest zeros.
        if good[:length].ljust(FILE_BYTES, b"\0") != good:
            refused(block, good[:length].ljust(FILE_BYTES, b"\0"))
    refused(block, good + b"\0", "cut off, or longer")


@pytest.mark.parametrize(
    ("key", "model"),
    [
        (KEYS[1], identity()),
        (KEYS[0][:31], identity()),  # the header pads keys with zeros
        (KEYS[0] + b"\0", identity()),
        (KEYS[0], identity(kv_dtype="fp8")),
    ],
)
def test_a_good_file_of_something_else_is_refused(
    block: tuple[SharedStore, Path, bytes], key: bytes, model: KvIdentity
) -> None:
    content = payload(KEYS[0])
    refused(block, header(key, model.digest(), [content]) + content, "another")


def test_the_digest_is_the_same_in_every_process_and_differs_with_every_field() -> None:
    """Pinned: a digest that changed would lose every store there is."""
    assert identity().digest().hex() == "a42f4cdb9a71d04defce67351b798aac"
    changes = {
        "model": "smol@1", "kv_dtype": "fp8", "block_tokens": 32, "block_bytes": 1, "layers": 4,
        "hash_scheme": "xxhash", "vllm_version": "0.33.0", "tp_size": 2,
    }  # fmt: skip
    digests = {identity(**{name: value}).digest() for name, value in changes.items()}
    digests |= {identity().digest(), identity(tp_size=2, tp_rank=1).digest()}
    assert len(digests) == len(changes) + 2


# -- what is kept, for whom


def test_what_one_engine_writes_the_others_read_and_a_second_write_is_none(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    text = payload(KEYS[0])
    assert one.put(KEYS[0], [text[:32], text[32:]]) is STORED
    assert put(two, KEYS[0]) is ALREADY
    assert [put(two, each) for each in (KEYS[1], KEYS[3])] == [STORED] * 2
    assert [one.leading(each) for each in (KEYS, KEYS[2:], [])] == [2, 0, 0]
    pieces = [bytearray(size) for size in (1, 31, 64)]
    two.get_into(KEYS[0], pieces)
    assert b"".join(pieces) == text
    for path in (one.path, *one.path.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert json.loads((one.path / MANIFEST).read_text())["model"] == "tiny@1"


def test_the_ends_of_the_longest_unused_contexts_go_first(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, 7, clock_ns=clock)

    def write(*numbers: int) -> None:
        for at, number in enumerate(numbers):
            put(store, KEYS[number], KEYS[numbers[at - 1]] if at else b"")

    write(0, 1, 2)
    clock.ns += 60 * S
    write(3, 4, 5)
    clock.ns += 60 * S
    assert get(store, KEYS[0]) == payload(KEYS[0])
    write(6, 7)
    assert stored(store) == [0, 1, 3, 4, 5, 6, 7]
    write(8)
    assert stored(store) == [0, 3, 4, 5, 6, 7, 8], "of 0 to 2 only the beginning was used again"
    store.touch(KEYS[3:5])
    write(9)
    assert stored(store) == [0, 3, 4, 6, 7, 8, 9]
    clock.ns += 3600 * S
    assert put(store, KEYS[5], KEYS[4]) is STORED, "the context is in use, though its beginning is unread"
    for number in (10, 11, 1, 2):
        write(number)
    assert {3, 4, 5} <= set(stored(store))


def test_a_full_disk_leaves_nothing_at_any_operation(tmp_path: Path) -> None:
    for code in (errno.ENOSPC, errno.EDQUOT):
        files, clock = FaultyFiles(), Clock()
        store = open_store(tmp_path / str(code), files=files, clock_ns=clock)
        for full in range(20):
            put(store, KEYS[0])
            files.before = FailAt(WRITES, code, at=full)
            outcome = put(store, KEYS[1])
            files.before = lambda name, path: None
            if outcome is STORED:
                break
            assert outcome is FULL
            assert list(store.path.rglob(f"{KEYS[1].hex()}*")) == []
            assert put(store, KEYS[2]) is FULL, "other data takes the room: nothing is deleted for a minute"
            clock.ns += COUNT_NS if full % 2 else -3600 * S  # a clock that was wrong is set back
        assert full > 4
        assert get(store, KEYS[1]) == payload(KEYS[1])


def test_a_disk_that_is_full_below_the_budget_keeps_what_was_used_last(tmp_path: Path) -> None:
    def fill(name: str, path: Path) -> None:
        if name == "write" and path.suffix == ".tmp" and len([*tmp_path.rglob("*.kv")]) >= 6:
            raise OSError(errno.ENOSPC, "no space left")

    store = open_store(tmp_path, 100, files=FaultyFiles(fill), clock_ns=Clock())
    assert [put(store, each) for each in KEYS] == [STORED] * 12
    assert stored(store) == list(range(6, 12))


@pytest.mark.parametrize(
    ("code", "stays"), [(errno.EIO, False), (errno.EMFILE, True)], ids=["medium", "process"]
)
def test_a_file_that_cannot_be_read_is_removed(tmp_path: Path, code: int, stays: bool) -> None:
    """Otherwise it would be found and not read, and never be written again. A process without file
    descriptors says nothing about the file."""
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    put(store, KEYS[0])
    files.before = broken("read", code=code)
    with pytest.raises(OSError, match=os.strerror(code)):
        get(store, KEYS[0])
    assert store.has(KEYS[0]) == stays


# -- identities and folders


def test_a_root_of_another_identity_is_refused_and_explained(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, KEYS[0])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(IncompatibleStore) as caught:
        open_store(tmp_path, model=identity(kv_dtype="fp8"))
    was = identity().kv_dtype
    assert caught.value.differences == (("kv_dtype", was, "fp8"),)
    said = f"{store.path} is for another model or configuration (kv_dtype: found {was!r}, expected 'fp8')"
    assert said in str(caught.value)
    assert "Name another directory, or delete that store" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert get(open_store(tmp_path), KEYS[0]) == payload(KEYS[0])


@pytest.mark.parametrize("name", ["mkdir", "create", "write", "close", "replace", "scan"])
def test_opening_on_a_broken_disk_says_so_and_leaves_nothing_in_the_way(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        open_store(tmp_path, files=FaultyFiles(broken(name)))
    assert list(tmp_path.rglob("*.tmp")) == []
    assert put(open_store(tmp_path), KEYS[0]) is STORED
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="Not a directory"):
        open_store(tmp_path / "file")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / identity().digest().hex()[:16]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"is a link of .*; expected a folder"):
        open_store(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = open_store(tmp_path).path
    folder.chmod(mode)
    said = rf"{folder} is a folder .* mode {mode:04o}; expected .*chmod go-w {folder}"
    with pytest.raises(OSError, match=said):
        open_store(tmp_path)
    folder.chmod(0o755)
    open_store(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, owner = open_store(tmp_path).path, os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OSError, match=f"{path} is a folder of user {owner} .*; expected a folder of user"):
        open_store(tmp_path)


@pytest.mark.parametrize(("engine", "full"), [(48, 64), (128, 64), (0, 64), (-1, 64)])
def test_a_full_block_is_a_whole_number_of_engine_blocks(engine: int, full: int) -> None:
    with pytest.raises(ValueError, match="not a whole number of engine blocks"):
        blocks_per_full(engine, full)
