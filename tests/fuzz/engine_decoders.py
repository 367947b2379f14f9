"""Decoders of what clients, models, peers and disks give an engine, and of its operator's settings."""

from __future__ import annotations

import json
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from decoder import Decoder, in_file, json_bytes, of_text
from kv_blocks import BLOCK_BYTES, identity
from sojourn.aeg import END, START
from sojourn.wire_codec import (
    EventBatch,
    WireError,
    decode_batch,
    decode_context,
    decode_event,
    decode_outcomes,
    encode,
)
from sojourn.wire_events import AegReport, ProgramEnd, ToolStart, ToolStop
from sojourn_server.core.request_hints import read_identity
from sojourn_server.kv_offload.shared_store import HEADER_BYTES, BlockCorrupt, SharedStore, header
from sojourn_server.kv_transfer.peer_transport import parse_address
from sojourn_server.kv_transfer.transfer_request import parse_transfer_params
from sojourn_server.kv_transfer.transfer_wire import HEAD_BYTES, PeerWireError, decode, decode_head
from sojourn_server.kv_transfer.transfer_wire import encode as encode_message
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.policies.preset import preset_text, read_preset
from sojourn_server.policies.preset_store import PresetError
from sojourn_server.programs.declared_graphs import GraphError, GraphStore
from sojourn_server.programs.tool_call_parsers import MAX_CALLS, parse_tool_calls
from sojourn_server.vllm.history_file import HistoryFile
from virtual_engine import VirtualEngine, prompt

GOLDEN = Path(__file__).parents[1] / "golden"
WIRE = {
    name: shown.encode()
    for name, shown in re.findall(
        r"<!-- example: (\w+) -->\n```json\n(.*?)\n```",
        (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
}
"""The examples of docs/wire.md, which ``tests/sdk/test_sdk_wire_doc.py`` compares with the encoder."""
EVENTS = tuple(
    WIRE[name] for name in ("program_start", "tool_start", "tool_stop", "heartbeat", "aeg", "program_end")
)
XARGS = {"session_id": "beside", "agentic_context": WIRE["riding"].decode()}
OPERATIONS = ("capabilities", "programs", "program", "stats", "decisions", "drain_metrics")
OUTPUTS = (
    b'{"type": "function_call", "name": "bash", "arguments": "{\\"command\\": \\"cd x && pytest | tail\\"}"}',
    b'<tool_call>\n{"name": "bash", "arguments": {"command": ["bash", "-lc", "ls"]}}\n</tool_call>',
    b"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value></tool_call>",
    b"<function=bash><parameter=command>\nls -l\n</parameter></function>",
    b'<invoke name="search"><parameter name="q">x</parameter></invoke>',
    b"thought</think>[search(q='a', n=1), bash(command=\"ls\")]",
    b'{"commands": [{"keystrokes": "ls\\n"}]}',
    b"Let us see.\n```bash\ntimeout 60 pytest -q <<'EOF' | tail\nx\nEOF\n```\n<|im_end|>",
)
FRAMES = tuple(path.read_bytes() for path in sorted((GOLDEN / "paths").glob("*.bin")))
MESSAGES = tuple(frame[HEAD_BYTES : HEAD_BYTES + decode_head(frame[:HEAD_BYTES])[0]] for frame in FRAMES)
PARAMS = (
    {"do_remote_decode": True, "transfer": "t", "peer": "tcp:h:1", "decode_reads": True},
    {"do_remote_prefill": True, "transfer": "t", "context": "t.0", "stored": 12},
)
IDENTITY = identity()
KEY, PAYLOAD = bytes(range(32)), bytes(range(BLOCK_BYTES))


def whole_batch(data: bytes, folder: Path) -> Any:
    batch = decode_batch(data)
    found: list[Any] = []
    for raw in batch.events:
        try:
            found.append(decode_event(raw))
        except WireError:
            continue
    return batch.emitter, batch.dropped, found


def encoded_batch(value: Any) -> bytes:
    emitter, dropped, events = value
    raw = [msgspec.Raw(encode(one)) for one in events]
    return encode(EventBatch(v=1, emitter=emitter, dropped=dropped, events=raw))


_engine = VirtualEngine()


def call_engine(data: bytes, folder: Path) -> Any:
    """Call an engine operation, which the first line names. The answer must be JSON."""
    operation, _, payload = data.decode("utf-8", "surrogateescape").partition("\n")
    return json.loads(_engine.service.call(operation, payload, _engine.now))


def identify(data: bytes, folder: Path) -> Any:
    """Identify a request by its session header and extra arguments, as the engine does."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        given = {}
    given = given if isinstance(given, dict) else {}
    xargs = given.get("vllm_xargs")
    found = read_identity(given.get("session_id"), xargs if isinstance(xargs, dict) else None)
    assert len(found.reason) < 1000
    return found


def follow_graph(data: bytes, folder: Path) -> Any:
    event = decode_event(data)
    graphs = GraphStore()
    if isinstance(event, AegReport) and graphs.follow(event.graph_hash, event.graph):
        known = graphs.get(event.graph_hash)
        assert known is not None
        for node in (START, END, *known.nodes):
            known.following(node)


def read_calls(text: str) -> Any:
    calls = parse_tool_calls(text)
    assert len(calls) <= MAX_CALLS
    assert all(len(call.key) <= 300 for call in calls)
    return calls


def read_params(data: bytes, folder: Path) -> Any:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return parse_transfer_params(found if isinstance(found, dict) else None)


def written(write: Callable[[Path], Any]) -> bytes:
    """Return the bytes that ``write`` writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "example")
        return (Path(folder) / "example").read_bytes()


def with_header_checksum(data: bytes) -> bytes:
    """Return the bytes with a valid checksum in the header."""
    if len(data) < HEADER_BYTES:
        return data
    checksum = struct.pack("<I", zlib.crc32(data[: HEADER_BYTES - 4]))
    return data[: HEADER_BYTES - 4] + checksum + data[HEADER_BYTES:]


def read_store_file(data: bytes, folder: Path) -> Any:
    store, found = SharedStore(folder / "store", IDENTITY, budget_bytes=1 << 20), bytearray(len(PAYLOAD))
    path = store.path / KEY[:1].hex() / f"{KEY.hex()}.kv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    store.get_into(KEY, [found])
    assert found == PAYLOAD, "a block with other bytes was taken for this one"
    return bytes(found)


def save_histories(path: Path) -> None:
    engine = VirtualEngine("saga")
    for turn in range(3):
        engine.turn("a", prompt(40 + 20 * turn))
        engine.send(ToolStart(program_id="a", seq=-1, call_id=f"c{turn}", tool="bash", tool_class="pytest"))
        engine.wait(2.0)
        engine.send(ToolStop(program_id="a", seq=-1, call_id=f"c{turn}", duration_s=2.0))
    engine.send(ProgramEnd(program_id="a", seq=-1))
    HistoryFile(str(path), 0.0).save(engine.program_scheduler.histories)


def use_histories(path: Path) -> Any:
    """Load a server's histories, and call the queries that policies use."""
    histories = HistoryFile(str(path), 0.0).load()
    histories.turns.mean()
    histories.turns.memoryfulness()
    histories.tools.quantiles("bash:pytest", 4)
    histories.output_lengths.sorted_lengths("coder", None, 1)
    for part in (histories.tools, histories.turns, histories.workflows, histories.output_lengths):
        json.dumps(part.snapshot(), allow_nan=False)


def profile(text: str) -> EngineProfile:
    found = EngineProfile.from_toml(text)
    found.prefill.seconds(4096)
    return found


PROFILE = EngineProfile(
    model="m",
    hardware="h",
    engine="vllm 0.32.0",
    block_size=16,
    prefill=PrefillCurve(0.01, 1e-5, 1e-10),
    points=((1000, 0.02), (2000, 0.04)),
    decode_points=((1000, 0.01),),
    versions={"vllm": "0.32.0"},
)

ENGINE_DECODERS: dict[str, Decoder] = {
    "event batch": Decoder(
        decode=whole_batch, encode=encoded_batch, examples=(WIRE["batch"],), errors=(WireError,)
    ),
    "event": Decoder(
        decode=lambda data, folder: decode_event(data),
        encode=encode,
        examples=EVENTS,
        refused=(json_bytes({"type": "x" * 5000}),),
        errors=(WireError,),
    ),
    "hint": Decoder(
        decode=lambda data, folder: decode_context(data),
        encode=encode,
        examples=(WIRE["context"], WIRE["riding"], b'{"program_id":"p"}'),
        errors=(WireError,),
    ),
    "outcomes": Decoder(
        decode=lambda data, folder: decode_outcomes(data),
        encode=encode,
        examples=(WIRE["outcomes"],),
        refused=(json_bytes({"outcomes": [{"outcome": "x" * 5000}]}),),
        errors=(WireError,),
    ),
    "engine call": Decoder(
        decode=call_engine,
        examples=(
            b"event_batches\n[" + WIRE["batch"] + b"]",
            *(
                f'{name}\n{{"limit": 3, "since": 0, "program_id": "p", "graph_hash": "h"}}'.encode()
                for name in OPERATIONS
            ),
        ),
        refused=(json_bytes(["x" * 5000]), b"event_batches\n{"),
        errors=(WireError,),
    ),
    "request identity": Decoder(
        decode=identify, examples=(json_bytes({"session_id": "s", "vllm_xargs": XARGS}),)
    ),
    "execution graph": Decoder(decode=follow_graph, examples=(WIRE["aeg"],), errors=(WireError, GraphError)),
    "model output": Decoder(decode=of_text(read_calls), examples=OUTPUTS),
    "peer frame head": Decoder(
        decode=lambda data, folder: decode_head(data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")),  # read whole
        examples=tuple(frame[:HEAD_BYTES] for frame in FRAMES),
        refused=(b"SJ\x01",),
        errors=(PeerWireError,),
    ),
    "peer message": Decoder(
        decode=lambda data, folder: decode(data),
        encode=lambda message: encode_message(message)[HEAD_BYTES:],
        examples=MESSAGES,
        refused=(msgspec.msgpack.encode(["x" * 5000]),),
        errors=(PeerWireError,),
    ),
    "peer address": Decoder(
        decode=of_text(parse_address),
        examples=(b"tcp:10.0.0.7:8500", b"tcp:[::1]:1", b"unix:/run/a"),
        refused=(b"nixl:x", b"[" * 5000 + b":x"),
        errors=(ValueError,),
    ),
    "KV transfer parameters": Decoder(
        decode=read_params,
        examples=tuple(map(json_bytes, PARAMS)),
        refused=(
            json_bytes(PARAMS[0] | {"decode_reads": 10**400}),
            json_bytes(PARAMS[1] | {"stored": "x" * 5000}),
        ),
        errors=(ValueError,),
    ),
    "block file": Decoder(
        decode=read_store_file,
        examples=(header(KEY, IDENTITY.digest(), [PAYLOAD]) + PAYLOAD,),
        wrap=with_header_checksum,
        errors=(BlockCorrupt,),
    ),
    "server history": Decoder(decode=in_file(use_histories), examples=(written(save_histories),)),
    "preset": Decoder(
        decode=in_file(read_preset, "input.toml"),
        examples=tuple(
            preset_text(name).encode() for name in ("continuum", "saga", "mori", "tetris", "sojourn")
        ),
        refused=(
            b'retention = { policy = "subprocess:Popen", args = ["touch", "x"] }\nextends = "saga"\n',
            b"name = " + b"[" * 5000,
            b"x" * 5000 + b" = 1",
        ),
        errors=(PresetError,),
    ),
    "engine profile": Decoder(
        decode=of_text(profile),
        encode=lambda found: found.to_toml().encode("utf-8", "surrogateescape"),
        examples=(PROFILE.to_toml().encode(),),
        refused=(PROFILE.to_toml().replace("0.04", "nan").encode(), b"model = " + b"[" * 5000),
        errors=(ValueError,),
    ),
}
