"""Parses the ``paths`` part of an engine's reports: its role, its address for peers, its links.

``/sojourn/v1/capabilities`` has role, peer, node, epoch and the sizes of a Full Block;
``/sojourn/v1/stats`` has the queues of links. All of it is untrusted and checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...routing.routing_events import PairRole
from ...routing.routing_status import LinkStats

STATS_PATH = "/sojourn/v1/stats"
STORAGE_READ = "storage read"
"""The link whose queue decides which side reads."""
DEFAULT_BLOCK_S = 0.001
"""Seconds per Full Block for engines that have not measured their link: the same for all."""
MAX_LINKS = 16
MAX_TEXT_BYTES = 4096


class InvalidPairEngine(ValueError):
    """An engine cannot be one of a pair: the text says what it reported, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCapabilities:
    """An engine's role and addresses, and the form of its KV."""

    role: PairRole
    peer: str
    node: str
    epoch: str
    block_s: float
    block_bytes: int
    block_tokens: int
    kv: str = ""
    """Digest, equal for engines that accept each other's KV; empty: unknown."""


def parse_pair_capabilities(capabilities: Mapping[str, Any]) -> PairCapabilities:
    """From the answer to ``/capabilities``. Raises ``InvalidPairEngine``."""
    told = capabilities.get("paths")
    if not isinstance(told, Mapping):
        raise InvalidPairEngine("it reports no KV paths; expected an engine started with --role")
    roles = [role for role in PairRole if role.value == told.get("role")]
    if not roles:
        raise InvalidPairEngine(f"its role is {told.get('role')!r:.80}; expected prefill or decode")
    peer, node, epoch = (_text(told, name) for name in ("peer", "node", "epoch"))
    sizes = [told.get(name) for name in ("block_bytes", "block_tokens")]
    for name, size in zip(("block_bytes", "block_tokens"), sizes, strict=True):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidPairEngine(f"its {name} is {size!r:.80}; expected a number above 0")
    block_s = _seconds(told.get("block_s"))
    return PairCapabilities(
        role=roles[0],
        peer=peer,
        node=node,
        epoch=epoch,
        block_s=block_s or DEFAULT_BLOCK_S,
        block_bytes=int(sizes[0] or 0),
        block_tokens=int(sizes[1] or 0),
        kv=_text(told, "kv") if told.get("kv") else "",
    )


def parse_link_stats(stats: Mapping[str, Any]) -> dict[str, LinkStats] | None:
    """Links by name, from the answer to ``/stats``. ``None``: missing or invalid."""
    told = stats.get("paths")
    links = told.get("links") if isinstance(told, Mapping) else None
    if not isinstance(links, Mapping) or len(links) > MAX_LINKS:
        return None
    found = {}
    for name, link in links.items():
        if not isinstance(link, Mapping):
            return None
        queued_s, queued, moved = (link.get(key) for key in ("queued_s", "queued_bytes", "moved_bytes"))
        seconds = _seconds(queued_s)
        if seconds is None and queued_s is not None:
            return None
        found[str(name)] = LinkStats(_count(queued), seconds, _count(moved))
    return found


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value.encode(errors="replace")) > MAX_TEXT_BYTES
    ):
        raise InvalidPairEngine(
            f"its {name} is {value!r:.80}; expected a text of at most {MAX_TEXT_BYTES} bytes"
        )
    return value


def _seconds(value: object) -> float | None:
    """A finite number, at least 0; ``None`` for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
