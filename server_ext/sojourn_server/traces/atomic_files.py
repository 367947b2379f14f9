"""Atomic writes of one or several files."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

_MAX_LINKS = 40
"""Maximum number of symbolic links that are followed, as on Linux."""


def file_to_replace(path: Path) -> Path | None:
    """Return the file that a write to ``path`` creates or replaces, with symbolic links followed.

    ``None`` if ``path`` is a device, a pipe or an open file such as /dev/stdout: write to such a path
    directly. Raises ``OSError`` if links form a circle.
    """
    target = path
    for _ in range(_MAX_LINKS + 1):
        folder = Path(os.path.realpath(target.parent))
        # /dev/stdout leads to a regular file if the shell redirects the output to one.
        of_system = folder in (Path("/dev"), Path("/dev/fd")) or folder.is_relative_to("/proc")
        if of_system and os.path.lexists(target):
            return None
        if not target.is_symlink():
            return target if target.is_file() or not target.exists() else None
        target = folder / target.readlink()
        target = Path(os.path.realpath(target.parent), target.name)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def write_atomically(files: Mapping[Path, bytes]) -> None:
    """Write all of ``files`` (path → content); if one cannot be written, write none. Missing folders are
    created.

    If a path is a symbolic link, the link stays, and its target is replaced. Devices, pipes and open files
    such as /dev/stdout are written directly. Raises ``OSError``; new folders may then remain.
    """
    partials: dict[Path, Path] = {}
    others: dict[Path, bytes] = {}
    try:
        for path, data in files.items():
            replaced = file_to_replace(path)
            if replaced is None:
                others[path] = data
                continue
            replaced.parent.mkdir(parents=True, exist_ok=True)
            partial = replaced.with_name(replaced.name + ".partial")
            partials[partial] = replaced
            partial.write_bytes(data)
        for path, data in others.items():
            path.write_bytes(data)
        for partial, replaced in partials.items():
            partial.replace(replaced)
    except OSError:
        for partial in partials:
            partial.unlink(missing_ok=True)
        raise
