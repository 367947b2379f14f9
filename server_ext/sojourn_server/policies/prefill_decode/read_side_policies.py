"""Read-side policies: which node reads a request's KV from storage (DualPath §6.1; mechanism D6)?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .prefill_decode_views import StorageReadView


class ReadSidePolicy(Protocol):
    """Chooses the engine whose node reads all of a request's stored blocks."""

    def decode_reads(self, view: StorageReadView) -> bool:
        """Return whether the decode engine's node reads the blocks. If not, the prefill engine's node
        does."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillSideRead:
    """The prefill engine's node reads everything: one path, as in systems before DualPath."""

    def decode_reads(self, view: StorageReadView) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ShorterQueueRead:
    """The side with the shorter read queue reads everything (DualPath §6.1).

    If neither side has queued reads, the side that has been idle longer reads. The prefill side reads if both
    sides are equal, or if both engines are on one node.

    The paper does not say which of two idle sides reads. A fixed choice would give one side all reads of a
    lightly loaded fleet.
    """

    def decode_reads(self, view: StorageReadView) -> bool:
        return view.decode_queue_s < view.prefill_queue_s and not view.one_node
