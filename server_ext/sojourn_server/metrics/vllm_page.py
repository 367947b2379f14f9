"""What an engine's own ``/metrics`` page says of it: vLLM's name for its KV pool, and how its line is read.

The page is text of another program, so nothing here raises: what is not there, or is no whole number, is
``None``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

_CACHE_LINE = re.compile(r"^vllm:cache_config_info\{(.*)\}\s", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED_LINE = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CachePool:
    """The KV pool of one engine, or of one data-parallel rank of it."""

    engine: str | None = None
    """Its index, as vLLM writes it."""
    block_size: int | None = None
    """Tokens in a block."""
    num_blocks: int | None = None
    """Blocks on the device; vLLM keeps one of them for itself."""


def cache_pools(page: str) -> list[CachePool]:
    """One for each engine that the page is of; none where it is not vLLM's."""
    found = []
    for labels in _CACHE_LINE.findall(page):
        told = dict(_LABEL.findall(labels))
        found.append(
            CachePool(told.get("engine"), whole(told.get("block_size")), whole(told.get("num_gpu_blocks")))
        )
    return found


def cache_pool(page: str) -> CachePool:
    """Of the first engine: with data parallelism all have the same. Without one nothing of it is known."""
    return next(iter(cache_pools(page)), CachePool())


def started(page: str) -> str | None:
    """When the process began, in seconds as it writes them, without an exponent: another text is another
    process."""
    found = _STARTED_LINE.search(page)
    if found is None:
        return None
    try:
        seconds = Decimal(found.group(1))
    except InvalidOperation:
        return found.group(1)
    # Not of a number that only looks like a time: its zeros would fill the memory.
    return f"{seconds:f}" if seconds.is_finite() and abs(seconds.adjusted()) < 20 else found.group(1)


def whole(value: object) -> int | None:
    """A whole number above 0, which engines also write as text; ``None`` for anything else."""
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None
