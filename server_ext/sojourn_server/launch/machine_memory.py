"""Reads how much memory an engine may use: the machine's memory, or the limit of a control group (cgroup).

The numbers come from Linux's files, because psutil does not know control groups.
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
    """Memory that a process may use, in bytes, at the time of reading."""

    total_bytes: int
    """Upper limit for this process and its children together."""
    available_bytes: int
    """Memory available now without swapping: free memory and file caches."""
    owner: str
    """Text for messages that names what limits the total: this machine or the control group."""


class _CgroupFiles(NamedTuple):
    """Names of the memory files in one version of control groups."""

    limit: str
    used: str
    cache: str
    """Field of ``memory.stat``: bytes of cached files, which the kernel reclaims first."""


_CGROUP_VERSIONS = {
    "cgroup": _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": _CgroupFiles("memory.max", "memory.current", "inactive_file"),
}
"""File system name in the mount table → files of cgroup version 1 or 2. A machine can have both mounted."""


def read_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the memory that this process and its children may use. Never raises.

    ``root``: directory that contains ``proc``. On a system without Linux's files, such as macOS, all of the
    machine's memory counts as available.
    """
    machine, available = _machine(root)
    total, owner = machine, _MACHINE
    for files, folder in _cgroups(root):
        limit = _number(folder / files.limit)
        if limit is None or limit >= machine:  # in version 1 "no limit" is a huge number
            continue
        # A parent group with a higher limit also counts, because other groups share its memory.
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
    """Yield (names of the memory files, folder) for this process's control groups and their parents. Each
    group may set a memory limit."""
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
    """Return the control group's ``path`` relative to the mount point of its file system.

    ``shown``: path of the control group that the mount point shows. In a container, ``path`` may be a path of
    the host although only the container's own group is mounted. The result is then empty.
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
    """Return the number in a file; ``None`` for "max" or a missing file."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _unescaped(field: str) -> str:
    r"""Return a name from the mount table with its octal escapes decoded, such as ``\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
