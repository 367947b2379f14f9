"""Messages between peers, their frames and the wire's version.

A frame is a head of 12 bytes, little-endian, a message, and a payload:

      0   2  "SJ"
      2   1  version of the wire
      3   1  0
      4   4  length of the message
      8   4  length of the payload

A message is a msgpack array that begins with the message's name. Most messages concern a transfer, whose id
both sides and the router know:

    dialled                      answered
    Hello                        Welcome; or Refused, then the end
    Read    read these blocks    Data, Data, …; or Failed from some block on
    Offer   I have these         Need: I lack these
    Data, Data, …                Complete
    Progress                     Progress: a progress counter, for a peer that waits
    Abort                        Abort: the transfer has ended

``docs/kv-transfer.md`` describes the exchange. Any change of the messages is a new version.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec
from sojourn.errors import InputError

from .transfer_link import TrafficClass

WIRE_VERSION = 1
HEAD_BYTES = 12
MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of a message, enough for more than 100,000 keys of 64 bytes."""
MAX_PAYLOAD_BYTES = 64 << 20
MAX_ID_BYTES = 256
MAX_KEYS = 1 << 17

_HEAD = struct.Struct("<2sBBII")
_MAGIC = b"SJ"


class PeerWireError(InputError):
    """The bytes are not a valid frame or message; the text says what was expected."""


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


class HelloMessage(WireMessage, frozen=True, tag="hello"):
    """The dialling side's first message: its name and its KV."""

    name: str
    epoch: str
    """Identifies one run of the process: buffers are empty after a restart."""
    kv: dict[str, str | int]
    """All fields of the sender's ``KvIdentity``."""


class WelcomeMessage(WireMessage, frozen=True, tag="welcome"):
    """The answer to a ``HelloMessage`` from a peer with KV of the same kind."""

    name: str
    epoch: str


class RefusedMessage(WireMessage, frozen=True, tag="refused"):
    """The answer to a ``HelloMessage`` from a peer with KV of another kind; the connection is then closed."""

    reason: str


class ReadMessage(WireMessage, frozen=True, tag="read"):
    """Read these blocks from storage, keep them for the transfer, and send their layers."""

    transfer: str
    keys: list[bytes]
    total: int
    """Number of blocks of the whole transfer, for which the peer reserves buffers."""
    traffic_class: TrafficClass


class OfferMessage(WireMessage, frozen=True, tag="offer"):
    """Keys of the transfer's blocks, in order; the answer names those that the peer needs."""

    transfer: str
    keys: list[bytes]
    traffic_class: TrafficClass


class NeedMessage(WireMessage, frozen=True, tag="need"):
    """Send these of the offered blocks. May be sent again if a block that was expected from another source
    does not arrive."""

    transfer: str
    indices: list[int]


class DataMessage(WireMessage, frozen=True, tag="data"):
    """One layer of some blocks; the payload is the sequence of their Layer Blocks. Layers arrive in order."""

    transfer: str
    layer: int
    indices: list[int]
    """Indices into the keys of the ``ReadMessage`` or ``OfferMessage`` to which the data belong."""
    traffic_class: TrafficClass


class FailedMessage(WireMessage, frozen=True, tag="failed"):
    """The blocks of a ``ReadMessage`` from ``index`` on will not arrive."""

    transfer: str
    index: int
    reason: str


class CompleteMessage(WireMessage, frozen=True, tag="complete"):
    """All offered blocks have arrived."""

    transfer: str


class AbortMessage(WireMessage, frozen=True, tag="abort"):
    """The transfer has ended: nothing more is sent or accepted."""

    transfer: str
    reason: str


class ProgressMessage(WireMessage, frozen=True, tag="progress"):
    """Transfers that are still open. ``done`` grows with any progress of the sender: while it grows, the peer
    keeps waiting."""

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
    """The lengths of the message and the payload that follow."""

    message_bytes: int
    payload_bytes: int


def encode(message: WireMessage, payload_bytes: int = 0) -> bytes:
    """Head and message of a frame with ``payload_bytes`` of payload. Raises ``PeerWireError`` if a part is
    too large."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise PeerWireError(
            f"a message of {len(body)} bytes and {payload_bytes} of payload is too long to send"
        )
    return _HEAD.pack(_MAGIC, WIRE_VERSION, 0, len(body), payload_bytes) + body


def decode_head(data: bytes) -> FrameHead:
    """Decode the head of a frame. Raises ``PeerWireError``."""
    if len(data) != HEAD_BYTES:
        raise PeerWireError(f"a head of {len(data)} bytes; expected {HEAD_BYTES}")
    magic, version, _, message_bytes, payload_bytes = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise PeerWireError(f"not a peer of sojourn: it sent {bytes(data[:4])!r}, expected {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise PeerWireError(
            f"wire version {version} is not spoken here, expected {WIRE_VERSION}; run one release everywhere"
        )
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise PeerWireError(f"a message of {message_bytes} bytes and {payload_bytes} of payload is too long")
    return FrameHead(message_bytes, payload_bytes)


def decode(data: bytes) -> AnyWireMessage:
    """Decode one message. Raises ``PeerWireError``."""
    try:
        message: AnyWireMessage = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerWireError(f"not a message of this protocol: {error}") from error
    transfer = getattr(message, "transfer", "")
    if len(transfer.encode()) > MAX_ID_BYTES:
        raise PeerWireError(f"the id of a transfer is longer than {MAX_ID_BYTES} bytes")
    if isinstance(message, (ReadMessage, OfferMessage)) and len(message.keys) > MAX_KEYS:
        raise PeerWireError(f"{len(message.keys)} keys in one message; at most {MAX_KEYS} are accepted")
    return message
