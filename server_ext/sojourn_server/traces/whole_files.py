"""Files that appear whole or not at all, several of them together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_whole(files: Mapping[Path, bytes], *, make_folders: bool = True) -> None:
    """Write all of ``files``. Where one cannot be written, none appears.

    What is no plain file, such as /dev/stdout or a pipe, is written into and never replaced. Raises
    ``OSError``; what is left then is folders at most.
    """
    partials: dict[Path, Path] = {}
    others: dict[Path, bytes] = {}
    try:
        for path, data in files.items():
            if path.exists() and not path.is_file():
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
