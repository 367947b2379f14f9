"""Messages between engines (peers), the frames that carry them, and the version of the wire format.

A frame is a head of 12 bytes, then a message, then a payload. The head, with numbers in little-endian:

    offset  size  content (offset and size in bytes)
         0     2  "SJ"
         2     1  version of the wire format
         3     1  0
         4     4  length of the message in bytes
         8     4  length of the payload in bytes

A message is a msgpack array that begins with the message's name. Most messages have the id of a transfer,
which both sides and the router know:

    side that connects                  answer of the side that accepts
    Hello     my name and kind of KV    Welcome; or Refused, and the connection ends
    Read      read these blocks         Data, Data, …; or Failed from some block on
    Offer     I have these blocks       Need: I lack these blocks
    Data, Data, …                       Complete, once all offered blocks have arrived

Both sides may send Abort to end a transfer. A side that waits for the other sends Ping, which is answered.
``docs/kv-transfer.md`` describes the exchange. Any change to the messages needs a new version.
"""

from __future__ import annotations

import struct

import msgspec
from sojourn.errors import InputError

WIRE_VERSION = 2
HEAD_BYTES = 12
MAX_MESSAGE_BYTES = 8 << 20
"""Maximum bytes of a message, enough for more than 100,000 keys of 64 bytes."""
MAX_PAYLOAD_BYTES = 64 << 20

_HEAD = struct.Struct("<2sBBII")
_MAGIC = b"SJ"


class PeerWireError(InputError):
    """Raised for a frame or message that is invalid or too large. The text says what was expected."""


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


class HelloMessage(WireMessage, frozen=True, tag="hello"):
    """The first message of the side that connects: its name and the kind of its KV."""

    name: str
    kv: dict[str, str | int]
    """All fields of the sender's ``KvIdentity``, by name."""


class WelcomeMessage(WireMessage, frozen=True, tag="welcome"):
    """Accepts a ``HelloMessage``, because both sides have the same kind of KV."""


class RefusedMessage(WireMessage, frozen=True, tag="refused"):
    """Rejects a ``HelloMessage``, because the two sides' KV differs in kind. The rejecting side closes the
    connection."""

    reason: str


class TransferMessage(WireMessage, frozen=True):
    """Base of the messages about a transfer."""

    transfer: str


class ReadMessage(TransferMessage, frozen=True, tag="read"):
    """Asks the peer to read the blocks ``keys`` from storage, keep them for the transfer, and return their
    layers."""

    keys: list[bytes]
    total: int
    """Number of blocks of the whole prompt. The peer reserves buffers for all of them."""


class OfferMessage(TransferMessage, frozen=True, tag="offer"):
    """Offers a transfer's blocks, named by their keys in order. The peer answers with a ``NeedMessage``."""

    keys: list[bytes]


class NeedMessage(TransferMessage, frozen=True, tag="need"):
    """Asks for those offered blocks that the sender of this message lacks. If a block that the sender
    expected from storage does not arrive, the sender asks for it with a further ``NeedMessage``."""

    indices: list[int]
    """Positions of the blocks in the ``keys`` of the ``OfferMessage``."""


class DataMessage(TransferMessage, frozen=True, tag="data"):
    """Carries one layer of the blocks ``indices`` in its payload. The layers of a block are sent in order."""

    layer: int
    indices: list[int]
    """Positions of the blocks in the ``keys`` of the transfer's ``ReadMessage`` or ``OfferMessage``."""


class FailedMessage(TransferMessage, frozen=True, tag="failed"):
    """Reports that the blocks of a ``ReadMessage`` from position ``index`` on will not be sent. From the side
    that asked for them: that it does not need them any more."""

    index: int
    reason: str


class CompleteMessage(TransferMessage, frozen=True, tag="complete"):
    """Reports that all offered blocks have arrived."""


class AbortMessage(TransferMessage, frozen=True, tag="abort"):
    """Ends the transfer. The sender of this message neither sends nor accepts more data for it."""

    reason: str


class PingMessage(WireMessage, frozen=True, tag="ping"):
    """Asks whether the peer is alive. It answers with the same message and ``is_answer`` true."""

    is_answer: bool = False


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
    | PingMessage
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyWireMessage] = msgspec.msgpack.Decoder(AnyWireMessage)


def encode(message: WireMessage, payload_bytes: int = 0) -> bytes:
    """Return the head and the message of a frame that is followed by ``payload_bytes`` bytes of payload.
    Raises ``PeerWireError`` if a part is too large."""
    body = _encoder.encode(message)
    _check_lengths(len(body), payload_bytes)
    return _HEAD.pack(_MAGIC, WIRE_VERSION, 0, len(body), payload_bytes) + body


def decode_head(data: bytes) -> tuple[int, int]:
    """Return the lengths of the message and of the payload that follow the head of a frame. Raises
    ``PeerWireError`` for an invalid head, another wire version, or lengths above the limits."""
    magic, version, _, message_bytes, payload_bytes = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise PeerWireError(f"not a peer of sojourn: it sent {bytes(data[:4])!r}, expected {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise PeerWireError(
            f"the peer has wire version {version}; expected {WIRE_VERSION}. Run the same sojourn release on "
            "all engines"
        )
    _check_lengths(message_bytes, payload_bytes)
    return message_bytes, payload_bytes


def decode(data: bytes) -> AnyWireMessage:
    """Decode one message and return it. Raises ``PeerWireError`` if it is invalid."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerWireError(f"not a message of this protocol: {error}") from error


def _check_lengths(message_bytes: int, payload_bytes: int) -> None:
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise PeerWireError(
            f"a message of {message_bytes} bytes and {payload_bytes} of payload is too long; expected at "
            f"most {MAX_MESSAGE_BYTES} and {MAX_PAYLOAD_BYTES}"
        )
