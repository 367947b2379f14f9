"""Reads properties of this machine and this Python environment, without importing vLLM.

Memory is the machine's, or the limit of a control group (cgroup v2). It comes from Linux's files,
because psutil does not know control groups.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ..vllm.compat import SELECTABLE_PLUGIN_GROUPS, is_cpu_build


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """Properties of the machine and the Python environment on which the engine's command depends."""

    python: str
    """Path of the Python interpreter."""
    cpu_build: bool
    has_vllm_cli: bool
    """Whether the command ``vllm serve`` works. It fails in the CPU build, which lacks package metadata."""
    plugins: tuple[str, ...] = ()
    """Names of the installed general and platform plugins that vLLM loads by default."""
    cpus: tuple[int, ...] = ()
    """Ids of the CPUs that this process may use."""
    memory_nodes: int = 1
    """Number of NUMA nodes whose memory this process may use."""
    shared_memory_bytes: int | None = None
    """Free bytes of ``/dev/shm``; ``None`` if it is not there."""
    hostname: str = "localhost"
    available_bytes: int | None = None
    """Memory that the engine may use; ``None`` if it is not known."""
    unified_memory: bool = False
    """Whether the GPU has no memory of its own."""


def detect_launch_environment() -> LaunchEnvironment:
    """Return the properties of machine and Python environment that ``build_command`` needs."""
    groups = (metadata.entry_points(group=group) for group in SELECTABLE_PLUGIN_GROUPS)
    return LaunchEnvironment(
        python=sys.executable,
        cpu_build=is_cpu_build(),
        has_vllm_cli=bool(installed_versions("vllm")),
        plugins=tuple(sorted({entry.name for entries in groups for entry in entries})),
        hostname=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        memory_nodes=count_memory_nodes(),
        available_bytes=read_memory().available_bytes,
        unified_memory=shares_memory_with_gpu(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
    )


def count_memory_nodes(status: Path = Path("/proc/self/status")) -> int:
    """Return the number of NUMA nodes whose memory this process may use; 1 if it is unknown. ``status``: file
    to read it from."""
    listed = re.search(r"^Mems_allowed_list:(.*)$", _text(status), re.MULTILINE)
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed[1]) if listed is not None else []
    return sum(int(last or first) - int(first) + 1 for first, last in ranges) or 1


def emulates_bfloat16(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an x86 processor without AVX-512, on which PyTorch multiplies matrices in
    bfloat16 several times slower than in float32. False if the file ``processor`` cannot be read."""
    words = _text(processor).split()
    return "sse2" in words and "avx512f" not in words


def installed_versions(*distributions: str) -> dict[str, str]:
    """Return distribution → version for those of ``distributions`` that are installed."""
    found = {}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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
    for folder in _cgroups(root):
        limit = _text(folder / "memory.max").strip()
        if not limit.isdecimal() or int(limit) >= machine:
            continue
        used = int(_text(folder / "memory.current").strip() or 0)
        cached = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
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


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents. A container sees its own group as
    the top, whatever its path on the host is."""
    top = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    folder = top / own[1] if own and ".." not in own[1].split("/") else top
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
