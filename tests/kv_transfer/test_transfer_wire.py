"""The protocol's bytes: checked-in files that every release of this version must read and write."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
from kv_blocks import identity, keys
from sojourn_server.kv_transfer import transfer_wire
from sojourn_server.kv_transfer.peer_connection import incompatibility_reason
from sojourn_server.kv_transfer.transfer_wire import (
    HEAD_BYTES,
    AbortMessage,
    AnyWireMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    HelloMessage,
    NeedMessage,
    OfferMessage,
    PeerWireError,
    PingMessage,
    ReadMessage,
    RefusedMessage,
    WelcomeMessage,
    WireMessage,
    decode,
    decode_head,
    encode,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "paths"

PAYLOAD = bytes(range(64))
EXAMPLES: dict[str, tuple[WireMessage, bytes]] = {
    "hello": (HelloMessage(name="prefill-0", kv=asdict(identity())), b""),
    "welcome": (WelcomeMessage(), b""),
    "refused": (RefusedMessage(reason="KV of another kind cannot be used here: the model"), b""),
    "read": (ReadMessage(transfer="cmpl-1", keys=keys(0, 1), total=3), b""),
    "offer": (
        OfferMessage(transfer="cmpl-1", keys=[*keys(0, 1), b"tail of cmpl-1"]),
        b"",
    ),
    "need": (NeedMessage(transfer="cmpl-1", indices=[2]), b""),
    "data": (
        DataMessage(transfer="cmpl-1", layer=1, indices=[0, 1]),
        PAYLOAD,
    ),
    "failed": (FailedMessage(transfer="cmpl-1", index=1, reason="its payload is damaged"), b""),
    "complete": (CompleteMessage(transfer="cmpl-1"), b""),
    "abort": (AbortMessage(transfer="cmpl-1", reason="the engine has given it up"), b""),
    "ping": (PingMessage(is_answer=True), b""),
}


def test_there_is_a_golden_file_of_every_message() -> None:
    assert {type(message) for message, _ in EXAMPLES.values()} == set(get_args(AnyWireMessage))
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_and_read_are_the_golden_bytes(name: str) -> None:
    """If this fails, two releases do not understand each other: count ``WIRE_VERSION`` up."""
    message, payload = EXAMPLES[name]
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert encode(message, len(payload)) + payload == golden
    message_bytes, payload_bytes = decode_head(golden[:HEAD_BYTES])
    assert payload_bytes == len(payload)
    end = HEAD_BYTES + message_bytes
    assert decode(golden[HEAD_BYTES:end]) == message
    assert golden[end:] == payload


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"GET / HTTP/1", "not a peer of sojourn: it sent b'GET '"),
        (
            b"SJ\x01\x00" + bytes(8),
            "the peer has wire version 1; expected 2. Run the same sojourn release on all engines",
        ),
        (b"SJ\x02\x00\xff\xff\xff\xff\x00\x00\x00\x00", "a message of 4294967295 bytes"),
        (b"SJ\x02\x00\x01\x00\x00\x00\xff\xff\xff\xff", "and 4294967295 of payload is too long"),
    ],
)
def test_heads_of_something_else_are_refused(head: bytes, what: str) -> None:
    with pytest.raises(PeerWireError, match=what):
        decode_head(head)


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_wire, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(PeerWireError, match="is too long"):
        encode(NeedMessage(transfer="t", indices=list(range(100))))


def test_peers_of_one_kind_are_not_refused_and_a_field_of_a_later_release_is() -> None:
    ours = identity()
    assert incompatibility_reason(ours, asdict(identity())) == ""
    theirs = {**asdict(identity()), "pages": 2}
    assert incompatibility_reason(ours, theirs) == (
        "KV of another kind cannot be used here: pages: 2 there, 'unknown' here. Start both engines alike"
    )
    del theirs["pages"], theirs["layers"]
    why = incompatibility_reason(ours, theirs)
    assert "layers: 'not said' there, 3 here" in why
