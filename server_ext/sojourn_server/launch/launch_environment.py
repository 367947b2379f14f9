"""Reads properties of this machine and this Python environment, without importing vLLM."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from ..vllm.compat import SELECTABLE_PLUGIN_GROUPS, is_cpu_build
from .machine_memory import read_memory, shares_memory_with_gpu
from .serve_command import PLUGIN_NAME, LaunchEnvironment


def detect_launch_environment() -> LaunchEnvironment:
    """Return the properties of machine and Python environment that ``build_command`` needs."""
    plugins = {
        entry.name for group in SELECTABLE_PLUGIN_GROUPS for entry in metadata.entry_points(group=group)
    }
    return LaunchEnvironment(
        python=sys.executable,
        cpu_build=is_cpu_build(),
        has_vllm_cli=bool(installed_versions("vllm")),
        plugins=tuple(sorted(plugins - {PLUGIN_NAME})),
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
    with suppress(OSError):
        listed = re.search(r"^Mems_allowed_list:(.*)$", status.read_text(), re.MULTILINE)
        if listed is not None:
            ranges = re.findall(r"(\d+)(?:-(\d+))?", listed[1])
            return sum(int(last or first) - int(first) + 1 for first, last in ranges) or 1
    return 1


def emulates_bfloat16(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an x86 processor without AVX-512, on which PyTorch multiplies matrices in
    bfloat16 several times slower than in float32. False if the file ``processor`` cannot be read."""
    words: set[str] = set()
    with suppress(OSError):
        words.update(processor.read_text().split())
    return "sse2" in words and "avx512f" not in words


def installed_versions(*distributions: str) -> dict[str, str]:
    """Return distribution → version for those of ``distributions`` that are installed."""
    found = {}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
