"""Memory that an engine may use on this machine: the machine's memory, or the limit of a control group
(cgroup).

It is read from Linux's files, because psutil does not know control groups.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MACHINE = "this machine"
_CGROUP = "the control group of this process"


class MachineMemory(NamedTuple):
    """Sizes in bytes, at the time of reading."""

    total_bytes: int
    """Upper limit for this process and its children."""
    available_bytes: int
    """Memory available now without swapping: free memory and file caches."""
    owner: str
    """What sets the total, for messages: the machine or a control group."""


class _CgroupFiles(NamedTuple):
    """File names of one version of control groups."""

    limit: str
    used: str
    cache: str
    """Field of ``memory.stat``: bytes of cached files, which the kernel reclaims first."""


_CGROUP_VERSIONS = {
    "cgroup": _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": _CgroupFiles("memory.max", "memory.current", "inactive_file"),
}
"""Files of cgroup versions 1 and 2, by file system name in the mount table. A machine can have both
mounted."""


def read_memory(root: Path = Path("/")) -> MachineMemory:
    """Memory of this process and its children; never raises. ``root`` is the folder that contains ``proc``.

    On a system without such files, like macOS, all of the machine's memory counts as available.
    """
    machine, available = _machine(root)
    total, owner = machine, _MACHINE
    for files, folder in _cgroups(root):
        limit = _number(folder / files.limit)
        if limit is None or limit >= machine:  # in version 1 "no limit" is a huge number
            continue
        # A parent group with a higher limit counts too, because other groups share it.
        available = min(available, _available_bytes(files, folder, limit))
        if limit < total:
            total, owner = limit, _CGROUP
    return MachineMemory(total, max(0, min(available, total)), owner)


def _machine(root: Path) -> tuple[int, int]:
    found: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
        match = re.fullmatch(r"(MemTotal|MemAvailable):\s*(\d+) kB", line)
        if match:
            found[match[1]] = int(match[2]) * 1024
    total = found.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, found.get("MemAvailable", total)


def _cgroups(root: Path) -> Iterator[tuple[_CgroupFiles, Path]]:
    """Folders of this process's control groups and their parents; each of them may set a limit that
    applies."""
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
            yield _CGROUP_VERSIONS[name], group
            if group == top:
                break


def _below(path: str, shown: str) -> str:
    """The path of a control group relative to a mount that shows the group ``shown`` at its top.

    In a container, ``path`` can be the host's path while only the container's own group is mounted.
    """
    shown = shown.rstrip("/")
    inside = path == shown or path.startswith(f"{shown}/")
    return path[len(shown) :].lstrip("/") if inside and ".." not in path.split("/") else ""


def _available_bytes(files: _CgroupFiles, folder: Path, limit: int) -> int:
    used = _number(folder / files.used) or 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == files.cache and value.isdecimal():
            used -= int(value)
    return limit - max(0, used)


def _number(path: Path) -> int | None:
    """The number in a file; ``None`` for "max" or a missing file."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _unescaped(field: str) -> str:
    r"""A name from the mount table, with ``\040`` replaced by a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
