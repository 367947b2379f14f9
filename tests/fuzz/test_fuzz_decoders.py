"""Any bytes from outside end in a value or in a documented, short error; nothing else happens.

By default some 60 examples of each kind of input are tried, the same in each run of CI. Longer:

    python -m pytest tests/fuzz --hypothesis-profile=long
"""

from __future__ import annotations

import ast
import re
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decoder import MAX_MESSAGE_CHARS, Decoder
from file_decoders import FILE_DECODERS
from hostile_input import large_inputs, mutated_bytes, mutated_document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from watched_effects import watched_effects
from wire_decoders import WIRE_DECODERS

DECODERS: dict[str, Decoder] = {**WIRE_DECODERS, **FILE_DECODERS}
ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "sdk", ROOT / "server_ext", ROOT / "integrations")

READING = re.compile(
    r"(^|\.)(json\.loads?|json\.decode|msgpack\.decode|msgspec\.convert|Decoder|JSONDecoder|raw_decode"
    r"|safe_load|tomllib\.loads|load_toml|read_records|unpack|unpack_from|safe_open|b64decode|decompress|decompressobj"
    r"|pickle\.loads|frombuffer|gzip\.open)$"
)
"""Calls that make values of bytes."""
TRUSTED = {
    "sojourn/testing/fake_server.py": "a fake server for tests",
    "sojourn_integrations/litellm.py": "the agent's own request; its sender catches and counts every error",
    "sojourn_integrations/otel/outcome_fetcher.py": "its caller catches every error and counts it",
    "sojourn_server/api/engine_rpc.py": "this server's own engine",
    "sojourn_server/api/live_stream.py": "this server's own engine",
    "sojourn_server/api/prometheus_bridge.py": "this server's own engine",
    "sojourn_server/api/response_merging.py": "this server's own engine",
    "sojourn_server/api/routes.py": "orders of a gateway; every other body is answered 400",
    "sojourn_server/vllm/release_surface.py": "a file of this package",
    "sojourn_server/vllm/endpoint.py": "this server's own engine",
    "sojourn_server/cli/serve.py": "flags that the command composed; an option that is not JSON is text",
    "sojourn_server/cli/doctor_server.py": "the server that the user names; other documents are reported",
    "sojourn_server/cli/live_client.py": "the server that the user names; others are an error",
    "sojourn_server/gateway/http/status_routes.py": "its own engines; other documents are answered 502",
    "sojourn_server/gateway/http/live_engines.py": "the gateway's own engines; other documents are left out",
    "sojourn_server/demo/demo_agent.py": "answers of the demo's own engine",
    "sojourn_server/demo/demo_tasks.py": "files of this package",
    "sojourn_server/gateway/ray/coordinator_messages.py": "gateways and coordinator of one cluster, over Ray",
    "sojourn_server/kv_offload/cpu_device_backend.py": "the engine's own memory",
    "sojourn_server/kv_offload/cuda_block_arrays.py": "blocks whose size was checked; others raise",
    "sojourn_server/models/chat_format.py": "tool calls of the demo's own agent",
    "sojourn_server/predictors/weights_file.py": "read after its metadata, which have an entry",
    "sojourn_server/simulator/process_pool.py": "what this process has pickled",
    "sojourn_server/simulator/simulated_engine.py": "the simulator's own engine",
    "sojourn_server/simulator/simulation_suite.py": "processes of this one",
}
"""Modules with such a call whose bytes come from this package itself, and why no others do."""


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return DECODERS[request.param]


class Trial:
    """Decodes in a folder that is emptied each time, and checks what comes of it."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder = decoder
        self.folder = folder / "decoded"

    def __call__(self, data: bytes, *, valid: bool = False) -> Any:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        with watched_effects(self.folder) as effects:
            try:
                value = self.decoder.decode(data, self.folder)
            except self.decoder.errors as error:
                if valid:
                    raise
                value, text = None, str(error)
            else:
                text = "fine"
        assert text.strip(), "an error without a text"
        assert len(text) <= MAX_MESSAGE_CHARS, f"{len(text)} characters: {text[:300]}…"
        assert effects == []
        return value


def trial_inputs(decoder: Decoder) -> st.SearchStrategy[bytes]:
    """Random bytes, and examples that were changed before or after they are wrapped."""
    changed = mutated_bytes(decoder.examples + decoder.refused)
    if decoder.documents:
        assert decoder.pack is not None
        changed |= mutated_document(decoder.documents).map(decoder.pack)
    if decoder.wrap is not None:
        wrapped = tuple(map(decoder.wrap, decoder.examples))
        return (
            changed.map(decoder.wrap)
            | changed.map(decoder.wrap)
            | mutated_bytes(wrapped)
            | st.binary(max_size=300)
        )
    return changed | changed | changed | st.binary(max_size=300)


def trials(decoder: Decoder, folder: Path) -> None:
    trial = Trial(decoder, folder)

    @settings(suppress_health_check=list(HealthCheck), max_examples=max(1, settings().max_examples * 6 // 10))
    @given(trial_inputs(decoder))
    def run(data: bytes) -> None:
        value = trial(data)
        if value is not None and decoder.encode is not None:
            again = trial(decoder.encode(value))
            assert again == value or repr(again) == repr(value), "NaN differs from itself"

    run()


def test_valid_input_is_read(decoder: Decoder, tmp_path: Path) -> None:
    trial = Trial(decoder, tmp_path)
    for example in decoder.examples:
        data = decoder.wrap(example) if decoder.wrap is not None else example
        if decoder.encode is not None:
            value = trial(data, valid=True)
            assert trial(decoder.encode(value), valid=True) == value
        else:
            trial(data, valid=True)


def test_any_input_ends_in_a_value_or_a_documented_error(decoder: Decoder, tmp_path: Path) -> None:
    trials(decoder, tmp_path)


MAX_LARGE_S = 10.0
"""CPU seconds for an input of 64 KiB. The slowest takes a tenth; work in its square would take minutes."""
MAX_LARGE_BYTES = 100 << 20


def test_large_input_takes_bounded_time_and_memory(decoder: Decoder, tmp_path: Path) -> None:
    trial = Trial(decoder, tmp_path)
    for name, data in large_inputs(decoder.examples[0], decoder.large_bytes).items():
        data = decoder.wrap(data) if decoder.wrap is not None else data
        began = time.process_time()
        trial(data)
        assert time.process_time() - began < MAX_LARGE_S, name
        tracemalloc.start()
        try:
            trial(data)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < MAX_LARGE_BYTES, name


# -- no decoder is missing ---------------------------------------------------------------------------


def modules_that_read() -> Iterator[tuple[str, str]]:
    """Modules with a call that makes values of bytes, and that call."""
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            module = path.relative_to(root).as_posix()
            if "demo/tasks/" in module:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and READING.search(ast.unparse(node.func)):
                    yield module, ast.unparse(node.func)


def test_each_module_that_reads_bytes_has_an_entry_or_a_reason() -> None:
    tested = {module for decoder in DECODERS.values() for module in decoder.modules}
    reading: dict[str, str] = dict(modules_that_read())
    missing = {module: call for module, call in reading.items() if module not in tested | TRUSTED.keys()}
    assert not missing, "expected an entry in DECODERS, or a reason in TRUSTED"
    assert not TRUSTED.keys() - reading.keys(), "these read nothing any more"
    assert not TRUSTED.keys() & tested
    for module in tested | TRUSTED.keys():
        assert any((root / module).is_file() for root in SOURCES), module
