"""Atomic writes of one or several files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_atomically(files: Mapping[Path, bytes], *, make_folders: bool = True) -> None:
    """Write all of ``files`` (path → content), or none of them if one cannot be written.

    A path that is a link or not a regular file, such as /dev/stdout or a pipe, is written directly and never
    replaced.
    Raises ``OSError``; new folders may then remain.
    """
    partials: dict[Path, Path] = {}
    others: dict[Path, bytes] = {}
    try:
        for path, data in files.items():
            # /dev/stdout is a link to a regular file if the shell redirects the output to one.
            if path.is_symlink() or (path.exists() and not path.is_file()):
                others[path] = data
                continue
            if make_folders:
                path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partials[partial] = path
            partial.write_bytes(data)
        for path, data in others.items():
            path.write_bytes(data)
        for partial, path in partials.items():
            partial.replace(path)
    except OSError:
        for partial in partials:
            partial.unlink(missing_ok=True)
        raise
