"""How much memory an engine started here could have: the machine's, or what a control group allows of it.

Read from Linux's files, since psutil, which does not know control groups, is no dependency of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MACHINE = "this machine"
_GROUP = "the control group of this process"


class Memory(NamedTuple):
    """Bytes, at the moment they were read."""

    total_bytes: int
    """The most that can be had."""
    available_bytes: int
    """What can be had now without swapping: what is free, and what only caches files."""
    owner: str
    """Whose the total is, to be put before "has"."""


class _Files(NamedTuple):
    """What one version of control groups calls its files."""

    limit: str
    used: str
    cache: str
    """In ``memory.stat``: bytes of files that the kernel takes back first."""


_VERSIONS = {
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
}
"""By the file system's name in the table of mounts: versions 1 and 2. A machine can have both mounted."""


def read_memory(root: Path = Path("/")) -> Memory:
    """What this process and its children can have. ``root`` is where ``proc`` lies and mounts begin.

    Where the system has no such files, as macOS, the machine's memory counts as available. Raises nothing.
    """
    machine, available = _machine(root)
    total, owner = machine, _MACHINE
    for files, folder in _groups(root):
        limit = _number(folder / files.limit)
        if limit is None or limit >= machine:  # version 1 says "none" by a number above any machine's
            continue
        # Also of a group above that allows more than ours: others use it with us.
        available = min(available, _left(files, folder, limit))
        if limit < total:
            total, owner = limit, _GROUP
    return Memory(total, max(0, min(available, total)), owner)


def _machine(root: Path) -> tuple[int, int]:
    found: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
        match = re.fullmatch(r"(MemTotal|MemAvailable):\s*(\d+) kB", line)
        if match:
            found[match[1]] = int(match[2]) * 1024
    total = found.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, found.get("MemAvailable", total)


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """Folders of the groups that this process is in: a limit of each of them holds."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):  # 4:memory:/a/b in version 1, 0::/a/b in version 2
        number, controllers, path = line.split(":", 2)
        if (number, controllers) == ("0", ""):
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        name, _, options = kind.split(" ", 2)
        if name not in paths or (name == "cgroup" and "memory" not in options.split(",")):
            continue
        shown, point = (_unescaped(field) for field in mount.split(" ")[3:5])
        top = root / point.lstrip("/")
        folder = top / _below(paths[name], shown)
        for group in (folder, *folder.parents):
            yield _VERSIONS[name], group
            if group == top:
                break


def _below(path: str, shown: str) -> str:
    """Where in a mount that shows the group ``shown`` and those below it the group ``path`` lies.

    In a container the paths can be the host's while only the container's own group is mounted.
    """
    shown = shown.rstrip("/")
    inside = path == shown or path.startswith(f"{shown}/")
    return path[len(shown) :].lstrip("/") if inside and ".." not in path.split("/") else ""


def _left(files: _Files, folder: Path, limit: int) -> int:
    used = _number(folder / files.used) or 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == files.cache and value.isdecimal():
            used -= int(value)
    return limit - max(0, used)


def _number(path: Path) -> int | None:
    """What a file says, or ``None`` for "max" and where there is none."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _unescaped(field: str) -> str:
    r"""Names in the table of mounts have spaces as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
