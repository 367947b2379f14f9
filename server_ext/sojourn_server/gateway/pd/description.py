"""What an engine that is to be one of a pair tells of itself, and whether it fits the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..http.watch import Description, describe
from .facts import EngineSeen, NicTold, Role
from .told import STORAGE_READ, LinkTold, NotOfAPair, PathsTold, read_paths

Kind = tuple[str, int, int, str]
"""What both engines of a pair have alike: the model's name, bytes and tokens of a Full Block, and a digest of
all that KV depends on; that one is empty where an engine does not tell it."""


@dataclass(frozen=True, slots=True)
class PairDescription(Description):
    """An engine that is to be one of a pair."""

    paths: PathsTold | None = None
    unfit: str = ""
    """Why it can be in no pair; empty: it can."""

    @property
    def kind(self) -> Kind | None:
        """``None``: it can be in no pair."""
        return kind_of(self, self.paths) if self.paths is not None else None


def describe_pair(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
) -> PairDescription:
    """As ``describe``, and what belongs to pairs."""
    told = describe(capabilities, metrics, models, life)
    values = {field.name: getattr(told, field.name) for field in dataclasses.fields(told)}
    try:
        paths = read_paths(capabilities)
    except NotOfAPair as error:
        return PairDescription(**values, unfit=str(error))
    # A traffic manager that began anew has nothing of what it had, whatever its process says.
    values["instance"] = f"{told.instance} {paths.epoch}"
    ranks = "it has data-parallel ranks, which share one address of KV; expected one engine"
    return PairDescription(**values, paths=paths, unfit=ranks if told.ranks > 1 else "")


def kind_of(told: Description, paths: PathsTold) -> Kind:
    """Of an engine."""
    return told.model, paths.block_bytes, paths.block_tokens, paths.kv


def unlike(kind: Kind, ours: Kind) -> str:
    """Why an engine of this kind is in no pair with ours; empty: they are alike."""
    (model, size, tokens, kv), (our_model, our_size, our_tokens, our_kv) = kind, ours
    if kind[:3] == ours[:3]:
        if kv == our_kv or not kv or not our_kv:
            return ""
        return (
            "its KV is of another kind than the others', which they would refuse: weights, block size of the "
            "engine (--block-size), data type of KV, hash seed or release differ; expected engines that are "
            "started alike, from the same weights"
        )
    if model != our_model:
        return f"it serves {model!r}; expected {our_model!r}, as the others do"
    return (
        f"its Full Blocks are of {size:,} bytes and {tokens} tokens; expected {our_size:,} and "
        f"{our_tokens}, as the others have"
    )


def leading(engines: Iterable[tuple[Kind, Role]], ours: Kind | None) -> Kind | None:
    """Of all that are there, the kind that is to be served; ``None``: there are none.

    The one of most engines, of those with both roles: no pair could be made of others. ``ours``, which is
    served now, where it is as good as any, and where no kind has both roles.
    """
    roles: dict[Kind, list[Role]] = {}
    for kind, role in engines:
        roles.setdefault(kind, []).append(role)

    def weight(kind: Kind) -> tuple[bool, int, bool, int]:
        mine = roles[kind]
        pairs = len(set(mine)) == len(Role)
        return pairs, len(mine) if pairs else 0, kind == ours, len(mine)

    return max(roles, key=weight, default=None)


def seen_as(replica_id: str, told: Description, paths: PathsTold) -> EngineSeen:
    """The fact that it is there."""
    return EngineSeen(
        replica_id,
        told.instance,
        paths.role,
        paths.node,
        told.capacity_tokens,
        paths.block_s,
        paths.peer,
        told.max_context_tokens,
        paths.epoch,
        told.max_running,
    )


def nic_told(node: str, engines: Iterable[Mapping[str, LinkTold]]) -> NicTold | None:
    """Links of a node's engines: they read through one NIC, and what waits for it is what waits at all of
    them. ``None``: none of them tells, or one does not know; then what was given to the node counts on."""
    told = [links[STORAGE_READ].queued_s for links in engines if STORAGE_READ in links]
    known = [seconds for seconds in told if seconds is not None]
    return NicTold(node, sum(known)) if told and len(known) == len(told) else None
