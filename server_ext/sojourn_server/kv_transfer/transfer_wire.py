"""What peers say to each other: messages, frames and the version, nothing else.

A frame is a head of 12 bytes, little-endian, a message, and the bytes that the message is about:

      0   2  "SJ"
      2   1  version of the wire
      3   1  0
      4   4  length of the message
      8   4  length of the bytes that follow it

A message is msgpack, an array that begins with its name. Every transfer has an id that both sides and the
router know, and messages are about one:

    dialled                     answered
    Hello                       Welcome, or Refused and the end
    Read    bring these blocks  Data, Data, …; or Failed from some block on
    Offer   I have these        Need: these I have not
    Data, Data, …               Complete
    Progress                    Progress: what goes on here, while somebody waits
    Abort                       Abort: nothing more comes of it

``docs/kv-transfer.md`` tells it as a story. A message that is added or changed is a new version.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from .transfer_link import TrafficClass

WIRE_VERSION = 1
HEAD_BYTES = 12
MAX_MESSAGE_BYTES = 8 << 20
"""A context of 64-byte keys of more than 100,000 blocks."""
MAX_PAYLOAD_BYTES = 64 << 20
MAX_ID_BYTES = 256
MAX_KEYS = 1 << 17

_HEAD = struct.Struct("<2sBBII")
_MAGIC = b"SJ"


class PeerWireError(ValueError):
    """The bytes are no message of this wire; the text says what was wrong and what was expected."""


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """What all messages are."""


class HelloMessage(WireMessage, frozen=True, tag="hello"):
    """The first word of whoever dials: who it is, and whose KV it has."""

    name: str
    epoch: str
    """One life of one process: what it had in its buffers before, it has not now."""
    kv: dict[str, str | int]
    """Every field of its ``KvIdentity``."""


class WelcomeMessage(WireMessage, frozen=True, tag="welcome"):
    """The answer to ``HelloMessage`` from one with KV of the same kind."""

    name: str
    epoch: str


class RefusedMessage(WireMessage, frozen=True, tag="refused"):
    """The answer to ``HelloMessage`` from one with KV of another kind, before it hangs up."""

    reason: str


class ReadMessage(WireMessage, frozen=True, tag="read"):
    """Read these blocks from storage, keep them for the transfer, and send me their layers."""

    transfer: str
    keys: list[bytes]
    total: int
    """Blocks that the transfer will have in all: room for those is kept."""
    traffic_class: TrafficClass


class OfferMessage(WireMessage, frozen=True, tag="offer"):
    """The transfer's blocks are these, in this order; which do you need?"""

    transfer: str
    keys: list[bytes]
    traffic_class: TrafficClass


class NeedMessage(WireMessage, frozen=True, tag="need"):
    """Of the blocks that were offered, send these. May be said again, where others were expected from
    elsewhere and did not come."""

    transfer: str
    indices: list[int]


class DataMessage(WireMessage, frozen=True, tag="data"):
    """One layer of some blocks: Layer Blocks follow, one after the other. Layers come in order."""

    transfer: str
    layer: int
    indices: list[int]
    """Into the keys of the ``ReadMessage`` or ``OfferMessage`` that it answers."""
    traffic_class: TrafficClass


class FailedMessage(WireMessage, frozen=True, tag="failed"):
    """Of the blocks that were to be read, those from ``index`` on will not come."""

    transfer: str
    index: int
    reason: str


class CompleteMessage(WireMessage, frozen=True, tag="complete"):
    """Every block that was offered is here, whole."""

    transfer: str


class AbortMessage(WireMessage, frozen=True, tag="abort"):
    """Nothing more will be sent or taken of this transfer."""

    transfer: str
    reason: str


class ProgressMessage(WireMessage, frozen=True, tag="progress"):
    """Of these transfers nothing was said for a while, and they are not forgotten: so much has been done
    here since the start. Who sees it grow waits on."""

    transfers: list[str]
    done: int


AnyWireMessage = (
    HelloMessage
    | WelcomeMessage
    | RefusedMessage
    | ReadMessage
    | OfferMessage
    | NeedMessage
    | DataMessage
    | FailedMessage
    | CompleteMessage
    | AbortMessage
    | ProgressMessage
)
MESSAGES: tuple[type[WireMessage], ...] = (
    HelloMessage,
    WelcomeMessage,
    RefusedMessage,
    ReadMessage,
    OfferMessage,
    NeedMessage,
    DataMessage,
    FailedMessage,
    CompleteMessage,
    AbortMessage,
    ProgressMessage,
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyWireMessage)


class FrameHead(NamedTuple):
    """What follows."""

    message_bytes: int
    payload_bytes: int


def encode(message: WireMessage, payload_bytes: int = 0) -> bytes:
    """Head and message; ``payload_bytes`` of payload are to follow. Raises ``PeerWireError`` for too much."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise PeerWireError(
            f"a message of {len(body)} bytes with {payload_bytes} behind it is too long to send"
        )
    return _HEAD.pack(_MAGIC, WIRE_VERSION, 0, len(body), payload_bytes) + body


def decode_head(data: bytes) -> FrameHead:
    """Raises ``PeerWireError``."""
    magic, version, _, message_bytes, payload_bytes = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise PeerWireError(f"this is no peer: it began with {bytes(data[:4])!r}, expected {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise PeerWireError(
            f"wire version {version} is not spoken here, expected {WIRE_VERSION}; run one release everywhere"
        )
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise PeerWireError(f"a message of {message_bytes} bytes with {payload_bytes} behind it is too long")
    return FrameHead(message_bytes, payload_bytes)


def decode(data: bytes) -> AnyWireMessage:
    """One message, bounded. Raises ``PeerWireError``."""
    try:
        message: AnyWireMessage = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerWireError(f"not a message of this wire: {error}") from error
    transfer = getattr(message, "transfer", "")
    if len(transfer.encode()) > MAX_ID_BYTES:
        raise PeerWireError(f"the id of a transfer is longer than {MAX_ID_BYTES} bytes")
    if isinstance(message, (ReadMessage, OfferMessage)) and len(message.keys) > MAX_KEYS:
        raise PeerWireError(f"{len(message.keys)} keys in one message; at most {MAX_KEYS} are accepted")
    return message
