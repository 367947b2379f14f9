"""Reads how much memory an engine may use: the machine's memory, or the limit of a control group (cgroup v1
or v2).

The numbers come from Linux's files, because psutil does not know control groups.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class MachineMemory(NamedTuple):
    """Memory that a process may use, in bytes, at the time of reading."""

    total_bytes: int
    """Upper limit for this process and its children together."""
    available_bytes: int
    """Memory available now without swapping: free memory and file caches."""
    owner: str
    """Text for messages that names what limits the total: this machine or the control group."""


def read_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the memory that this process and its children may use. Never raises.

    ``root``: directory that contains ``proc`` and ``sys``. On a system without Linux's files, such as macOS,
    all of the machine's memory counts as available.
    """
    found = dict(re.findall(r"^(\w+):\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    machine = int(found.get("MemTotal", 0)) * 1024
    machine = machine or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = int(found.get("MemAvailable", machine // 1024)) * 1024
    total, owner = machine, "this machine"
    for folder, (limit_name, used_name, cached_name) in _cgroups(root):
        limit = _text(folder / limit_name).strip()
        if not limit.isdecimal() or int(limit) >= machine:
            continue
        used = int(_text(folder / used_name).strip() or 0)
        cached = re.search(rf"^{cached_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        # A parent group with a higher limit also counts, because other groups share its memory.
        available = min(available, int(limit) - max(0, used - int(cached[1] if cached else 0)))
        if int(limit) < total:
            total, owner = int(limit), "the control group of this process"
    return MachineMemory(total, max(0, min(available, total)), owner)


def shares_memory_with_gpu(root: Path = Path("/")) -> bool:
    """Return whether this machine's GPU has no memory of its own, as in NVIDIA's Jetson and DGX Spark (GB10).
    ``root``: as in ``read_memory``."""
    texts = [_text(path) for path in (root / "proc/driver/nvidia/gpus").glob("*/information")]
    texts.append(_text(root / "proc/device-tree/compatible"))
    return any(re.search(r"nvidia,tegra|^Model:.*\bGB10\b", text, re.MULTILINE) for text in texts)


_CGROUP_FILES = (
    ("sys/fs/cgroup", r"^0::/(.*)$", ("memory.max", "memory.current", "inactive_file")),
    (
        "sys/fs/cgroup/memory",
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)
"""For cgroup v2 and v1: folder of all groups, the own group in ``/proc/self/cgroup``, and names of the limit,
the use, and the file caches in ``memory.stat``."""


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's control groups and of their parents, and the names of their files.
    A container sees its own group as the top, whatever its path on the host is."""
    groups = _text(root / "proc/self/cgroup")
    for place, pattern, names in _CGROUP_FILES:
        top = root / place
        own = re.search(pattern, groups, re.MULTILINE)
        folder = top / own[1] if own and ".." not in own[1].split("/") else top
        while folder != top:
            yield folder, names
            folder = folder.parent
        yield top, names


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
