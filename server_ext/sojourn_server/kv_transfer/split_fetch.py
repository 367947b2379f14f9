"""One context's blocks on their way into the buffers: a part read here, a part read by the peer.

What storage has is cut in two by the share that the router chose, the first part for this side (DualPath
reads a request by one of the two; both is its future work). Where the peer fails before a layer of its part
is here, that part is read here, in the same buffers: nothing is asked for while a half is held. Later, what
came is gone on with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .load_table import ReadingPeer
from .transfer_jobs import FetchJob

if TYPE_CHECKING:
    from .transfer_handles import LoadHandle
    from .transfer_manager import TransferManager


@dataclass(slots=True, eq=False)
class FetchPart:
    """Some blocks of a fetch, and the load that brings them."""

    load: LoadHandle
    first: int
    """Place of its first block among those of the fetch."""
    count: int
    by_peer: bool
    claimed: bool = False

    @property
    def good(self) -> int:
        """Leading blocks that came, or may still come."""
        outcome = self.load.outcome
        return self.count if outcome is None else min(self.count, outcome.good)


class SplitFetch:
    """Of a fetch. One thread at a time."""

    def __init__(self, traffic: TransferManager, fetch: FetchJob) -> None:
        self.pieces: list[FetchPart] = []
        self._traffic = traffic
        self._fetch = fetch
        self._name = f"{fetch.context}#{fetch.ask}"

    def begin(self, stored: int) -> None:
        """Have its first ``stored`` blocks brought: those that are in the store."""
        fetch = self._fetch
        theirs = round(stored * fetch.decode_share) if fetch.peer else 0
        self._begin(0, stored - theirs)
        if self.blocks == stored - theirs:
            self._begin(stored - theirs, stored, by_peer=True)

    @property
    def blocks(self) -> int:
        """Leading blocks that are here or on their way."""
        found = 0
        for piece in self.pieces:
            if piece.first > found:
                break
            found = piece.first + piece.good
            if piece.good < piece.count:
                break
        return found

    def ready(self, layerwise: bool = True) -> int | None:
        """How many leading blocks can be streamed now; ``None``: wait. From storage a block comes whole, so
        that its layers come all at once; from the peer the first layer is enough, if ``layerwise``."""
        self._claim()
        for piece in self.pieces:
            streams = layerwise and piece.by_peer and piece.load.layers_loaded
            if piece.load.outcome is None and not streams:
                return None
            if piece.good < piece.count:
                break
        return self.blocks

    @property
    def streamed_s(self) -> float:
        """Over which layers came in so far, from the first to the last."""
        return sum(piece.load.streamed_s for piece in self.pieces)

    def layer(self, layer: int, timeout_s: float) -> list[memoryview]:
        """One layer of the leading blocks that have come, once it is here."""
        found: list[memoryview] = []
        for piece in self.pieces:
            views: list[memoryview] = []
            if piece.count and piece.load.wait_layer(layer, timeout_s):
                try:
                    views = piece.load.layer(layer)[: piece.count]
                except ValueError:  # it was given up meanwhile
                    views = []
            found += views
            if len(views) < piece.count:
                break
        return found

    def end(self) -> None:
        """Its buffers are others'."""
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            piece.load.end()

    def _begin(self, first: int, end: int, by_peer: bool = False) -> None:
        fetch = self._fetch
        keys = fetch.keys[first:end]
        if not keys:
            return
        peer = None
        if by_peer:
            peer = ReadingPeer(
                address=fetch.peer,
                transfer=fetch.context,
                total=max(fetch.total, len(keys)),
                epoch=fetch.epoch,
                or_read_locally=True,
            )
        try:
            load = self._traffic.load(f"{self._name}.{len(self.pieces)}", keys, peer=peer)
        except ValueError:  # such as a transfer of that name
            if by_peer:
                self._begin(first, end)
            return
        self.pieces.append(FetchPart(load, first, load.requested_blocks, by_peer))

    def _claim(self) -> None:
        """Nobody takes back what has come."""
        for piece in self.pieces:
            if not piece.claimed and piece.load.outcome is not None and piece.good:
                piece.claimed = True
                try:
                    piece.load.blocks()
                except ValueError:
                    piece.count = 0
