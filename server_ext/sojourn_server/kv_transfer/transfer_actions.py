"""The core's output: actions for the manager to carry out, and events for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .transfer_wire import WireMessage


class DialPeer(NamedTuple):
    """Connect to a peer. Answered by ``dialled`` or ``dial_failed``, perhaps after the core has given it
    up."""

    address: str
    number: int
    """Unique per engine."""


class SendMessage(NamedTuple):
    """Send a message. With ``item``, call ``sent`` once the payload's memory is no longer read."""

    conn: int
    message: WireMessage
    payload: Sequence[memoryview] = ()
    item: int | None = None


class CloseConnection(NamedTuple):
    """Close a connection once its queued messages are sent, ``patience_s`` later at the latest."""

    conn: int


class ReadBlock(NamedTuple):
    """Read a block from the store; answered by ``read_done``."""

    item: int
    key: bytes
    into: Sequence[memoryview]


class WriteBlock(NamedTuple):
    """Write a block to the store; answered by ``write_done``."""

    item: int
    key: bytes
    parent: bytes
    content: Sequence[memoryview]


TransferAction = DialPeer | SendMessage | CloseConnection | ReadBlock | WriteBlock


class LayerLoaded(NamedTuple):
    """This layer of all blocks that the load will bring has arrived. Layers arrive in order."""

    load: str
    layer: int


class LoadEnded(NamedTuple):
    """A load is over: its first ``good`` blocks have arrived and no others will. ``why``: the reason if some
    are missing."""

    load: str
    good: int
    why: str = ""


class PushEnded(NamedTuple):
    """The peer has all offered blocks, or the push has failed because of ``why``. Their memory may be
    reused."""

    transfer: str
    complete: bool
    why: str = ""


class PromptTransferEnded(NamedTuple):
    """The whole prompt of a transfer has arrived, or never will because of ``why``."""

    transfer: str
    complete: bool
    why: str = ""


class BlockStoreEnded(NamedTuple):
    """A block's write has ended. ``outcome`` is a ``PutOutcome`` value, ``failed``, or ``stalled`` for a
    write that was given up before it began. Its memory may be reused."""

    request: str
    key: bytes
    outcome: str


TransferEvent = LayerLoaded | LoadEnded | PushEnded | PromptTransferEnded | BlockStoreEnded
