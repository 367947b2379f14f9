"""Outputs of ``TransferCore``: actions that the transfer manager carries out, and events for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .transfer_wire import WireMessage


class DialPeer(NamedTuple):
    """Connect to a peer. The manager then calls ``PeerTable.dialled`` or ``dial_failed``. The core may have
    given up the dial by then."""

    address: str
    number: int
    """Number of the dial, unique within this engine."""


class SendMessage(NamedTuple):
    """Send a message on a connection. If ``item`` is given, the manager calls ``TransferContext.sent`` once
    the memory of ``payload`` is no longer read."""

    conn: int
    message: WireMessage
    payload: Sequence[memoryview] = ()
    item: int | None = None


class CloseConnection(NamedTuple):
    """Close a connection after its queued messages are sent, at the latest after ``patience_s`` seconds."""

    conn: int


class ReadBlock(NamedTuple):
    """Read a block from the store into the memory ``into``. The manager then calls ``read_done``."""

    item: int
    key: bytes
    into: Sequence[memoryview]


class WriteBlock(NamedTuple):
    """Write a block to the store. The manager then calls ``write_done``."""

    item: int
    key: bytes
    parent: bytes
    content: Sequence[memoryview]


TransferAction = DialPeer | SendMessage | CloseConnection | ReadBlock | WriteBlock


GIVEN_UP = "the engine has given it up"
"""Reason of a transfer that its engine has cancelled, for example for an aborted request."""


class LayerLoaded(NamedTuple):
    """Layer number ``layer`` has arrived for all blocks of the load, except those already given up. Layers
    are reported in order."""

    load: str
    layer: int


class LoadEnded(NamedTuple):
    """A load has ended: its first ``good`` blocks have arrived, and the other blocks will not arrive.
    ``why``: why blocks are missing; empty if all have arrived."""

    load: str
    good: int
    why: str = ""


class PushEnded(NamedTuple):
    """A push has ended, and the memory of the pushed blocks may be reused. If not ``complete``, the peer
    lacks blocks, and ``why`` is the reason."""

    transfer: str
    complete: bool
    why: str = ""


class PromptTransferEnded(NamedTuple):
    """The transfer of a prompt to this engine has ended. If not ``complete``, ``why`` is the reason."""

    transfer: str
    complete: bool
    why: str = ""


TransferEnd = LoadEnded | PushEnded | PromptTransferEnded
TransferEvent = LayerLoaded | TransferEnd
