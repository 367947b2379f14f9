"""The core's output: actions that the manager carries out, and events for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .transfer_wire import WireMessage


class DialPeer(NamedTuple):
    """Connect to a peer. The result is reported by ``dialled`` or ``dial_failed``, which may come after the
    core has given up the dial."""

    address: str
    number: int
    """Unique per engine."""


class SendMessage(NamedTuple):
    """Send a message. With ``item``, call ``sent`` when the payload's memory is no longer read."""

    conn: int
    message: WireMessage
    payload: Sequence[memoryview] = ()
    item: int | None = None


class CloseConnection(NamedTuple):
    """Close a connection when its queued messages are sent, at the latest after ``patience_s``."""

    conn: int


class ReadBlock(NamedTuple):
    """Read a block from the store; ``read_done`` reports the result."""

    item: int
    key: bytes
    into: Sequence[memoryview]


class WriteBlock(NamedTuple):
    """Write a block to the store; ``write_done`` reports the result."""

    item: int
    key: bytes
    parent: bytes
    content: Sequence[memoryview]


TransferAction = DialPeer | SendMessage | CloseConnection | ReadBlock | WriteBlock


class LayerLoaded(NamedTuple):
    """A layer has arrived for all blocks that the load will get. Layers arrive in order."""

    load: str
    layer: int


class LoadEnded(NamedTuple):
    """A load is over: its first ``good`` blocks have arrived and no others will. ``why``: the reason if
    blocks are missing."""

    load: str
    good: int
    why: str = ""


class PushEnded(NamedTuple):
    """A push is over: the peer has all offered blocks, or ``why`` is the reason of its failure. The memory of
    the blocks may be reused."""

    transfer: str
    complete: bool
    why: str = ""


class PromptTransferEnded(NamedTuple):
    """A prompt's transfer is over: all blocks have arrived, or ``why`` is the reason of its failure."""

    transfer: str
    complete: bool
    why: str = ""


class BlockStoreEnded(NamedTuple):
    """A block's write is over. ``outcome`` is a ``PutOutcome`` value, ``failed``, or ``stalled`` for a write
    that was given up before it began. The memory of the block may be reused."""

    request: str
    key: bytes
    outcome: str


TransferEvent = LayerLoaded | LoadEnded | PushEnded | PromptTransferEnded | BlockStoreEnded
