"""Reads an engine's ``/metrics`` page: the size of vLLM's KV pool, and the start time of the process.

Any server may have written the page, so nothing raises. A missing or malformed size is ``None``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CACHE_LINE = re.compile(r"^vllm:cache_config_info\{(.*)\}\s", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED_LINE = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CachePool:
    """The KV pool of an engine, or of one of its data-parallel ranks."""

    engine: str | None = None
    """The engine's index, as vLLM writes it."""
    block_size: int | None = None
    """Tokens per block."""
    num_blocks: int | None = None
    """Blocks on the device, including the one that vLLM reserves."""


def cache_pools(page: str) -> list[CachePool]:
    """Return the KV pool of each engine on the page; empty if the page is not vLLM's."""
    found = []
    for line in _CACHE_LINE.findall(page):
        labels = dict(_LABEL.findall(line))
        blocks = whole(labels.get("num_gpu_blocks"))
        found.append(CachePool(labels.get("engine"), whole(labels.get("block_size")), blocks))
    return found


def cache_pool(page: str) -> CachePool:
    """Return the KV pool of the first engine on the page. All fields are ``None`` if the page has no pool.
    With data parallelism all pools have the same size."""
    return next(iter(cache_pools(page)), CachePool())


def process_start_time(page: str) -> str | None:
    """Return the text of the process's start time; ``None`` if the page has none. If the text changes, the
    process has restarted."""
    found = _STARTED_LINE.search(page)
    return found.group(1) if found is not None else None


def whole(value: object) -> int | None:
    """Return ``value``, a number or text, as a whole number above 0; ``None`` for anything else."""
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None
