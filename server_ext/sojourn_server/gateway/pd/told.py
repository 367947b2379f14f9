"""What an engine of a pair tells of itself under ``paths``: its role, where peers reach it, how its links do.

``/sojourn/v1/capabilities`` has role, peer, node, epoch and what a Full Block is; ``/sojourn/v1/stats`` has
the links' queues. Nothing of it is believed before it has been checked: it is another program's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .facts import Role

STATS_PATH = "/sojourn/v1/stats"
STORAGE_READ = "storage read"
"""The link whose queue decides which side reads."""
UNKNOWN_BLOCK_S = 0.001
"""Seconds for a Full Block where an engine knows no speed of its link yet: the same for all of them."""
MOST_LINKS = 16
MAX_TEXT_BYTES = 4096


class NotOfAPair(ValueError):
    """An engine cannot be one of a pair: the text says what it told, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathsTold:
    """What it is."""

    role: Role
    peer: str
    node: str
    epoch: str
    block_s: float
    block_bytes: int
    block_tokens: int
    kv: str = ""
    """Equal for engines that take each other's KV; empty: it does not say."""


class LinkTold(msgspec.Struct, frozen=True):
    """One link, now."""

    queued_bytes: int
    queued_s: float | None
    """``None``: there is a queue, and how long it takes is not known."""
    moved_bytes: int


def read_paths(capabilities: Mapping[str, Any]) -> PathsTold:
    """Of the answer to ``/capabilities``. Raises ``NotOfAPair``."""
    told = capabilities.get("paths")
    if not isinstance(told, Mapping):
        raise NotOfAPair("it tells of no paths; expected an engine that was started with --role")
    roles = [role for role in Role if role.value == told.get("role")]
    if not roles:
        raise NotOfAPair(f"its role is {told.get('role')!r:.80}; expected prefill or decode")
    peer, node, epoch = (_text(told, name) for name in ("peer", "node", "epoch"))
    sizes = [told.get(name) for name in ("block_bytes", "block_tokens")]
    for name, size in zip(("block_bytes", "block_tokens"), sizes, strict=True):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise NotOfAPair(f"its {name} is {size!r:.80}; expected a number above 0")
    block_s = _seconds(told.get("block_s"))
    return PathsTold(
        role=roles[0],
        peer=peer,
        node=node,
        epoch=epoch,
        block_s=block_s or UNKNOWN_BLOCK_S,
        block_bytes=int(sizes[0] or 0),
        block_tokens=int(sizes[1] or 0),
        kv=_text(told, "kv") if told.get("kv") else "",
    )


def read_links(stats: Mapping[str, Any]) -> dict[str, LinkTold] | None:
    """Of the answer to ``/stats``, links by name. ``None``: it does not say, or nothing that can be read."""
    told = stats.get("paths")
    links = told.get("links") if isinstance(told, Mapping) else None
    if not isinstance(links, Mapping) or len(links) > MOST_LINKS:
        return None
    found = {}
    for name, link in links.items():
        if not isinstance(link, Mapping):
            return None
        queued_s, queued, moved = (link.get(key) for key in ("queued_s", "queued_bytes", "moved_bytes"))
        seconds = _seconds(queued_s)
        if seconds is None and queued_s is not None:
            return None
        found[str(name)] = LinkTold(_count(queued), seconds, _count(moved))
    return found


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value.encode(errors="replace")) > MAX_TEXT_BYTES
    ):
        raise NotOfAPair(f"its {name} is {value!r:.80}; expected a text of at most {MAX_TEXT_BYTES} bytes")
    return value


def _seconds(value: object) -> float | None:
    """Finite and not below 0; ``None`` for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
