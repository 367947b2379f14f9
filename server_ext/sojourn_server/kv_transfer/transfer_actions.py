"""What the core has done for it (actions), and what it tells the engine (events)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .transfer_wire import WireMessage


class DialPeer(NamedTuple):
    """Connect to a peer; answered by ``dialled`` or ``undialable``, perhaps after it has been given up."""

    address: str
    number: int
    """No other dial of this engine has it."""


class SendMessage(NamedTuple):
    """Say something; where ``item`` is given, ``sent`` when its bytes are out."""

    conn: int
    message: WireMessage
    payload: Sequence[memoryview] = ()
    item: int | None = None


class CloseConnection(NamedTuple):
    """End a connection once what was said before is out, or ``patience_s`` later."""

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
    """Of all blocks of a load that will come, this layer is there; layers come in order."""

    load: str
    layer: int


class LoadEnded(NamedTuple):
    """A load is over: its first ``good`` blocks are there, and no others will be; ``why`` not, if not all."""

    load: str
    good: int
    why: str = ""


class PushEnded(NamedTuple):
    """Every block that was offered is at the peer, or not, and ``why``. Its memory is the engine's again."""

    transfer: str
    complete: bool
    why: str = ""


class PromptTransferEnded(NamedTuple):
    """The whole context of a transfer is in the buffers here, or never will be, and ``why``."""

    transfer: str
    complete: bool
    why: str = ""


class BlockStoreEnded(NamedTuple):
    """What became of a block that was to be stored: ``outcome`` is what the store said, ``failed``, or
    ``stalled`` for one that never came to it. Its memory is free again."""

    request: str
    key: bytes
    outcome: str


TransferEvent = LayerLoaded | LoadEnded | PushEnded | PromptTransferEnded | BlockStoreEnded
