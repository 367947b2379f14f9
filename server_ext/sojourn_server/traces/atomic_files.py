"""Atomic writes of one or several files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def write_atomically(files: Mapping[Path, bytes]) -> None:
    """Write all of ``files`` (path → content) and missing folders; if one cannot be written, write none.

    A file keeps its mode. The target of a symbolic link is replaced. Devices, pipes and open files such as
    /dev/stdout are written directly. Raises ``OSError``; new folders may then remain."""
    partials: dict[Path, Path] = {}
    others: dict[Path, bytes] = {}
    try:
        for path, data in files.items():
            replaced = path.resolve()
            # /dev/stdout leads to a regular file if the shell redirects the output to one.
            of_system = path.absolute().is_relative_to("/dev") or path.absolute().is_relative_to("/proc")
            if of_system or (replaced.exists() and not replaced.is_file()):
                others[path] = data
                continue
            replaced.parent.mkdir(parents=True, exist_ok=True)
            partial = replaced.with_name(replaced.name + ".partial")
            partials[partial] = replaced
            partial.touch(0o600 if replaced.exists() else 0o666)
            partial.write_bytes(data)
            if replaced.exists():
                shutil.copymode(replaced, partial)
        for path, data in others.items():
            path.write_bytes(data)
        for partial, replaced in partials.items():
            partial.replace(replaced)
    except OSError:
        for partial in partials:
            partial.unlink(missing_ok=True)
        raise
