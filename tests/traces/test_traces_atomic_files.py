"""Atomic files appear whole or not at all; other paths stay unchanged."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from sojourn_server.traces.atomic_files import write_atomically


def test_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_bytes(b"before")
    with pytest.raises(OSError, match="folder"):
        write_atomically({tmp_path / "old": b"after", tmp_path / "folder": b"no file"})
    assert (tmp_path / "old").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "old"]
    write_atomically({tmp_path / "old": b"after", tmp_path / "new" / "deep": b"x"})
    assert (tmp_path / "old").read_bytes() == b"after"
    assert (tmp_path / "new" / "deep").read_bytes() == b"x"


def test_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    """As root, ``--json /dev/stdout`` would have made a plain file of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically({pipe: b"told"})
    reader.join(10.0)
    assert read == [b"told"]
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_to_a_file_stays_a_link_and_a_full_disk_leaves_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(Path("there", "target"))
    write_atomically({link: b"before"})
    assert (link.is_symlink(), target.read_bytes()) == (True, b"before")
    write_bytes = Path.write_bytes

    def full(path: Path, _: bytes) -> int:
        write_bytes(path, b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically({link: b"after"})
    assert target.read_bytes() == b"before"
    assert [path.name for path in target.parent.iterdir()] == ["target"]
