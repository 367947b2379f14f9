"""What ``build_command`` must know about this machine, read in one place and without importing vLLM."""

from __future__ import annotations

import os
import socket
import sys
from importlib import metadata

from .command import PLUGIN, EngineFacts
from .versions import is_cpu_build

_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


def engine_facts() -> EngineFacts:
    """The facts of this interpreter and this machine."""
    plugins = {entry.name for group in _GROUPS for entry in metadata.entry_points(group=group)}
    return EngineFacts(
        python=sys.executable,
        cpu_build=is_cpu_build(),
        has_vllm_cli=_has_distribution("vllm"),
        plugins=tuple(sorted(plugins - {PLUGIN})),
        hostname=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
    )


def _has_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
