"""Decoders of files: settings, stores, histories, recordings, traces, results."""

from __future__ import annotations

import gzip
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import virtual_engine
from decoder import Decoder, in_file, of_text
from hostile_input import json_bytes, msgpack_bytes
from scheduler_driver import SchedulerDriver
from sojourn import resume_file
from sojourn.errors import ArgumentError
from sojourn.learning.history_store import DurationSample, HistoryStore
from sojourn.learning.run_trace import ProgramRun
from sojourn.stats import Counters
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_server.core.engine_service import EngineService
from sojourn_server.core.scheduler_limits import SchedulerLimits
from sojourn_server.core.scheduler_state import Histories, KVPoolConfig, SchedulerState
from sojourn_server.gateway.http.engine_descriptions import EngineDescription
from sojourn_server.gateway.http.routing_state_file import RoutingStateFile
from sojourn_server.gateway.http.tenant_keys import TenantKeysError, load_tenant_keys
from sojourn_server.gateway.ray.coordinator_checkpoint import (
    CoordinatorCheckpoint,
    read_checkpoint,
    read_checkpoint_epoch,
)
from sojourn_server.gateway.ray.coordinator_messages import ReplicaInfo
from sojourn_server.gateway.ray.ray_config import RayConfigError, read_config
from sojourn_server.kv_offload.block_file import (
    HEADER_BYTES,
    BlockCorrupt,
    KvIdentity,
    OffloadError,
    read_block,
    read_parent,
    write_block,
)
from sojourn_server.kv_offload.disk_store import BlockNotFound, DiskStore, StoreError, block_path
from sojourn_server.kv_offload.file_system import LocalFileSystem
from sojourn_server.kv_offload.shared_store import SiblingStores
from sojourn_server.kv_offload.store_folder import MANIFEST, IncompatibleStore, find_stores, folder_name
from sojourn_server.kv_offload.vllm_fs_store import VllmFsLayout, VllmFsStore
from sojourn_server.launch.engine_flags import EngineFlags, read_config_file
from sojourn_server.launch.launch_errors import InvalidOption
from sojourn_server.launch.model_config import check_layers, read_model_config
from sojourn_server.launch.prefill_decode_checks import keeps_block_size
from sojourn_server.launch.weights_fingerprint import known_weights
from sojourn_server.policies.cluster_preset import (
    cluster_preset_names,
    load_cluster_preset,
    read_cluster_preset,
)
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts, StepSample
from sojourn_server.policies.preset import load_preset, preset_names, preset_text, read_preset
from sojourn_server.policies.preset_store import PresetError
from sojourn_server.predictors.weights_format import WeightsError, read_weights_metadata
from sojourn_server.profiling.offload_break_even import read_dimensions
from sojourn_server.recording import (
    RecordingError,
    RecordingFile,
    RecordingHeader,
    RecordingReader,
    RecordingScheduler,
)
from sojourn_server.routing.routing_events import ReplicaRegistered
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.routing_snapshot import RoutingState
from sojourn_server.simulator.latency.latency_profiles import (
    SHIPPED_PROFILES,
    LatencyProfileError,
    load_hardware_profile,
    load_model_shape,
)
from sojourn_server.simulator.parity_replay import replay_recording
from sojourn_server.simulator.report.results_file import ResultsError, load_runs, read_results
from sojourn_server.simulator.run_cache import RunCache
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.traces.imports.ledger_import import read_ledgers
from sojourn_server.traces.imports.otel_import import read_otel
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn
from sojourn_server.vllm.history_file import HistoryFile
from sojourn_server.vllm.plugin_settings import PluginSettings, SettingsError
from virtual_engine import VirtualEngine, prompt


def compressed(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


def written(write: Callable[[Path], Any]) -> bytes:
    """Return the bytes that ``write`` writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example"
        write(path)
        return path.read_bytes()


# -- an engine's life, for its recording and its histories --------------------------------------------


class RecordingDriver(SchedulerDriver, RecordingScheduler):
    """A recording scheduler with the methods of a test."""


def live(engine: VirtualEngine) -> None:
    engine.send(ProgramStart(program_id="a", seq=-1, agent_type="coder"))
    for turn in range(3):
        engine.turn("a", prompt(40 + 20 * turn))
        engine.send(ToolStart(program_id="a", seq=-1, call_id=f"c{turn}", tool="bash", tool_class="pytest"))
        engine.wait(2.0)
        engine.send(ToolStop(program_id="a", seq=-1, call_id=f"c{turn}", duration_s=2.0))
    engine.arrive("b", prompt(8, seed=1))
    engine.turn(None, prompt(12, seed=2), "done")
    engine.turn("a", prompt(120), "done")
    engine.send(ProgramEnd(program_id="a", seq=-1))
    engine.wait(60.0)


def record_life(path: Path) -> None:
    pool, limits, histories = KVPoolConfig(blocks=200, block_size=4), SchedulerLimits(), Histories()
    header = RecordingHeader.of(
        preset_toml=preset_text("continuum"),
        preset_source="continuum.toml",
        pool=pool,
        limits=limits,
        curve=None,
        histories=histories,
        versions={},
    )
    file = RecordingFile(path, header, warn=print)
    state = SchedulerState(load_preset("continuum"), pool, limits=limits, histories=histories)
    driver = RecordingDriver(file, state)
    engine = VirtualEngine()
    engine.program_scheduler = driver
    engine.service = EngineService(driver, engine={}, pool_state=dict)
    hashes = virtual_engine.chain
    with patch.object(
        virtual_engine,
        "chain",
        lambda tokens: [one.to_bytes(16, "little", signed=True) for one in hashes(tokens)],
    ):
        live(engine)
    driver.close_recording("the test ends")


def histories_of_a_life() -> Histories:
    engine = VirtualEngine("saga")
    live(engine)
    return engine.program_scheduler.histories


def use_histories(path: Path) -> Any:
    """Load a server's histories, and call the queries that policies use."""
    histories = HistoryFile(str(path), 0.0).load()
    histories.turns.mean_turns()
    histories.turns.memoryfulness()
    for key in (None, "bash:pytest"):
        histories.tools.quantiles(key, 4)
        histories.output_lengths.sorted_lengths("coder", key, 1)
    histories.hints_off.mean("coder", 1)
    histories.tools.observe("bash", 1.0)
    histories.turns.observe(3)
    for part in (
        histories.tools,
        histories.turns,
        histories.workflows,
        histories.output_lengths,
        histories.hints_off,
    ):
        json.dumps(part.snapshot(), allow_nan=False)
    return None


def use_client_history(path: Path) -> Any:
    stored = HistoryStore(path, Counters())
    found = stored.load()
    if found is not None:
        stored.save(found.durations[:3], found.runs[:3])
    return None


def write_client_history(path: Path) -> None:
    run = ProgramRun((("plan",), ("act",)), ("plan", None), 2, (("act", "bash"),), True, True)
    assert HistoryStore(path, Counters()).save(
        [DurationSample("bash", "pytest", 1.5, "ok")] * 3, [("coder", run)]
    )


# -- stores ---------------------------------------------------------------------------------------------

IDENTITY = KvIdentity(
    model="tiny@1 float32",
    kv_dtype="float32",
    block_tokens=64,
    block_bytes=96,
    layers=2,
    hash_scheme="sha256/seed=0/16",
    vllm_version="0.32.0",
)
KEY = bytes(range(32))
PAYLOAD = bytes(range(96))
LAYOUT = VllmFsLayout(
    model_name="org/tiny",
    dtype="torch.float32",
    engine_block_tokens=16,
    blocks_per_file=4,
    layer_names=["a", "b"],
)


def write_example_block(path: Path) -> None:
    files = LocalFileSystem()
    write_block(
        files,
        path,
        path.with_suffix(".partial"),
        KEY,
        IDENTITY.digest(),
        [memoryview(PAYLOAD)],
        parent=b"p" * 16,
    )


def with_header_checksum(data: bytes) -> bytes:
    """Return the bytes with a valid checksum in the header."""
    if len(data) < HEADER_BYTES:
        return data
    return (
        data[: HEADER_BYTES - 4]
        + struct.pack("<I", zlib.crc32(data[: HEADER_BYTES - 4]))
        + data[HEADER_BYTES:]
    )


def read_store_file(path: Path) -> Any:
    found = bytearray(len(PAYLOAD))
    read_block(LocalFileSystem(), path, KEY, IDENTITY.digest(), [memoryview(found)])
    assert found == PAYLOAD, "a block with other bytes was taken for this one"
    return bytes(found), read_parent(LocalFileSystem(), path, KEY, IDENTITY.digest())


def open_store_with_block(data: bytes, folder: Path) -> Any:
    """Read a block that was damaged while no engine ran, by its own engine and by another one."""
    path = block_path(folder / "root" / folder_name(IDENTITY, None), KEY)
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.write_bytes(data)
    (path.parent.parent / MANIFEST).write_bytes(MANIFEST_EXAMPLE)
    found = bytearray(len(PAYLOAD))
    siblings = SiblingStores(folder / "root" / folder_name(IDENTITY, "b"), IDENTITY)
    siblings.leading([KEY])
    errors: list[OffloadError] = []
    for read in (lambda: siblings.get_into(KEY, [found]), lambda: _read_own(folder / "root", found)):
        try:
            read()
            assert found == PAYLOAD
        except OffloadError as error:
            errors.append(error)
    if errors:
        raise errors[-1]


def _read_own(root: Path, found: bytearray) -> None:
    with DiskStore.open(root, IDENTITY, budget_bytes=1 << 20) as store:
        store.get_into(KEY, [found])


def open_store_with_manifest(data: bytes, folder: Path) -> Any:
    store = folder / "root" / folder_name(IDENTITY, None)
    store.mkdir(parents=True, mode=0o700)
    (store / MANIFEST).write_bytes(data)
    errors: list[OffloadError] = []
    try:
        find_stores(folder / "root", {"block_tokens": 64}, "tiny@1", None)
    except OffloadError as error:
        errors.append(error)
    SiblingStores(folder / "root" / folder_name(IDENTITY, "b"), IDENTITY).rescan()
    try:
        DiskStore.open(folder / "root", IDENTITY, budget_bytes=1 << 20).close()
    except OffloadError as error:
        errors.append(error)
    if errors:
        raise errors[-1]


def read_vllm_block(data: bytes, folder: Path) -> Any:
    store = VllmFsStore(folder / "root", IDENTITY, LAYOUT, page_bytes=128)
    path = LAYOUT.block_path(folder / "root", KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    store.get_into(KEY, [bytearray(96)])
    return None


def manifest_example() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        DiskStore.open(folder, IDENTITY, budget_bytes=1 << 20).close()
        return (Path(folder) / folder_name(IDENTITY, None) / MANIFEST).read_bytes()


MANIFEST_EXAMPLE = manifest_example()
BLOCK_EXAMPLE = written(write_example_block)

# -- settings -------------------------------------------------------------------------------------------

SETTINGS = {
    "sojourn": {
        "policy": "continuum",
        "lease_budget_fraction": 0.5,
        "max_hinted_ttl_s": 100.0,
        "max_programs": 100,
        "queue_patience_s": 5,
        "strict": True,
        "history_file": "h",
        "allow_policy_modules": "a,b",
        "compute_quota_s": 0,
    }
}


def read_settings(data: bytes, folder: Path) -> Any:
    flags = EngineFlags(("--additional-config", data.decode("utf-8", "surrogateescape")))
    _, document = flags.pop_json("--additional-config")
    settings = PluginSettings.read(document)
    # Settings name files, which are read from there. The files' contents have their own entries in the table.
    if settings.profile_file is None:
        settings.limits()
        settings.attention_costs(chunked=True)
    if settings.policy_file is None:
        settings.preset()
    return settings


def profile_example() -> EngineProfile:
    return EngineProfile(
        model="m",
        hardware="h",
        engine="vllm 0.32.0",
        block_size=16,
        prefill=PrefillCurve(0.01, 1e-5, 1e-10),
        points=((1000, 0.02), (2000, 0.04)),
        device_to_host_bytes_per_s=2e10,
        host_to_device_bytes_per_s=None,
        decode_points=((1000, 0.01),),
        measured_at="2026-01-01",
        versions={"vllm": "0.32.0"},
        limits=EngineLimits(),
        steps=StepCosts(*[1e-6] * len(StepCosts._fields)),
        step_samples=(StepSample(*[1.0] * len(StepSample._fields)),),
    )


def use_profile(text: str) -> Any:
    profile = EngineProfile.from_toml(text)
    profile.prefill.seconds(4096)
    return profile


def use_model(path: Path) -> Any:
    model = load_model_shape(str(path))
    model.kv_bytes_per_token()
    return model


def read_operator_preset(path: Path) -> Any:
    PluginSettings.read({"sojourn": {"policy_file": str(path)}}).preset()
    read_preset(path)


def shipped(kind: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((SHIPPED_PROFILES / kind).glob("*.toml"))[:2])


RAY = b"""
model: tiny
host: 127.0.0.1
port: 8000
gateways: 2
engines: {min: 2, max: 4, args: ["--max-model-len", 4096], environment: {A: 1}, num_gpus: 1}
keys: {engine: ENGINE_KEY}
checkpoint: /shared/c
"""
RAY_PAIRS = b"model: m\nprefill: {min: 1}\ndecode: {min: 2}\npairs: {store: /kv, read_side: split}\n"
TENANTS = b'[tenants]\nresearch = ["k1", "k2"]\nops = "k3"\n'
PRESETS = (
    *(preset_text(name).encode() for name in preset_names()),
    b'extends = "continuum"\nname = "mine"\npaper = ""\nretention = { policy = "fixed", ttl_s = 3.0 }\n',
)
RUNS_A_COMMAND = b'retention = { policy = "subprocess:Popen", args = ["touch", "x"] }\nextends = "saga"\n'


def cluster_examples() -> tuple[bytes, ...]:
    from importlib.resources import files

    folder = files("sojourn_server.policies") / "cluster_presets"
    return tuple((folder / f"{name}.toml").read_bytes() for name in cluster_preset_names())


# -- states of gateways ------------------------------------------------------------------------------------


def routing_state() -> Any:
    core = build_routing_core(load_cluster_preset("sojourn"))
    core.take(ReplicaRegistered("a", "1", 1000), 0.0)
    state = msgspec.to_builtins(core.snapshot(1.0))
    state["programs"] = [
        {
            "tenant": "default",
            "program_id": "p",
            "began_s": 0.5,
            "last_s": 0.75,
            "agent_type": "coder",
            "home": "a",
            "cached": True,
            "context_tokens": 100,
            "size_tokens": 200,
            "turns": 3,
            "moves": 1,
            "moved_at_turn": 2,
            "deadline_s": 9.0,
            "parent_id": "q",
        }
    ]
    return state


def restore_routing_state(path: Path) -> Any:
    core = build_routing_core(load_cluster_preset("sojourn"))
    RoutingStateFile(path, core, clock=lambda: 5.0, wall=lambda: 2.0).restore()
    core.snapshot(6.0)
    return None


STATE = {"unix_s": 1.0, "core": routing_state()}
CHECKPOINT = CoordinatorCheckpoint(
    epoch=3,
    unix_s=1.0,
    core=msgspec.convert(routing_state(), RoutingState),
    engines={
        "e": [
            ReplicaInfo(
                "a",
                "http://h:1",
                None,
                EngineDescription(1, "1", 1000, 0, 8, 4096, False, True),
                "up",
                True,
                True,
            )
        ]
    },
)


def restore_checkpoint(path: Path) -> Any:
    read_checkpoint_epoch(path)
    return read_checkpoint(path)


# -- recordings, traces, results ---------------------------------------------------------------


def read_recording(path: Path) -> Any:
    for allow_unfinished in (False, True):
        reader = RecordingReader(path, allow_unfinished=allow_unfinished)
        for _ in reader.records():
            pass
        report = replay_recording(path, allow_unfinished=allow_unfinished)
        json.dumps(report.as_dict())
    return None


TRACE = (
    TraceProgram(
        program_id="p",
        source="s",
        group="g",
        model="m",
        arrival_s=0.5,
        tenant="t",
        agent_type="coder",
        turns=(
            TraceTurn(
                prompt_tokens=64,
                output_tokens=20,
                append_tokens=64,
                tool="bash",
                tool_seconds=2.0,
                tools=(TraceToolRun(name="bash", cmd="ls", s=2.0),),
                gap_s=2.5,
                gap_kind="tool",
                t=0.0,
                llm_s=1.0,
            ),
            TraceTurn(
                prompt_tokens=100, output_tokens=8, append_tokens=16, out_dropped=4, cached_tokens=64, t=4.0
            ),
        ),
    ),
    TraceProgram(
        program_id="q",
        parent="p",
        parent_turn=0,
        start_offset_s=1.0,
        shared_prefix_tokens=16,
        block_size=16,
        hash_scope="global",
        turns=(
            TraceTurn(prompt_tokens=40, output_tokens=3, hash_lcp=0, hash_runs=((5, 2),)),
            TraceTurn(
                prompt_tokens=70, output_tokens=3, hash_lcp=2, hash_runs=((9, 2),), dt_s=3.0, reset=True
            ),
        ),
    ),
)
TRACE_TEXT = b"".join(msgspec.json.encode(program) + b"\n" for program in TRACE)


def encode_trace(programs: Any) -> bytes:
    return b"".join(msgspec.json.encode(program) + b"\n" for program in programs)


def use_trace(path: Path) -> Any:
    programs = list(read_trace(path))
    for program in programs:
        assert program.max_context_tokens > 0
        for turn in program.turns:
            assert 0 <= turn.idle_s <= 1e9
            _ = turn.tool_run
        plan_turns(program)
    return programs


def span(
    name: str, number: int, start_s: float, end_s: float, parent: int | None = None, **told: Any
) -> dict[str, Any]:
    kinds = {int: "intValue", str: "stringValue", list: "arrayValue"}
    attributes = [
        {
            "key": key.replace("__", "."),
            "value": {
                kinds[type(value)]: {"values": [{"stringValue": x} for x in value]}
                if isinstance(value, list)
                else str(value)
            },
        }
        for key, value in told.items()
    ]
    made = {
        "traceId": f"{1:032x}",
        "spanId": f"{number:016x}",
        "name": name,
        "startTimeUnixNano": str(int((1_760_000_000 + start_s) * 1e9)),
        "endTimeUnixNano": str(int((1_760_000_000 + end_s) * 1e9)),
        "attributes": attributes,
    }
    return made if parent is None else {**made, "parentSpanId": f"{parent:016x}"}


USAGE = {
    "gen_ai__operation__name": "chat",
    "gen_ai__usage__input_tokens": 1000,
    "gen_ai__usage__output_tokens": 50,
}
SPANS = [
    span(
        "invoke_agent coder",
        1,
        0,
        30,
        gen_ai__operation__name="invoke_agent",
        gen_ai__agent__name="coder",
        gen_ai__conversation__id="c",
    ),
    span("chat m", 2, 1, 3, 1, **USAGE, gen_ai__response__finish_reasons=["tool_calls"]),
    span(
        "execute_tool grep", 3, 3.5, 4, 1, gen_ai__operation__name="execute_tool", gen_ai__tool__name="grep"
    ),
    span("chat m", 4, 5, 6, 1, **USAGE, gen_ai__usage__cache_read__input_tokens=256),
]
OTLP = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": SPANS}]}]}
SDK_SPAN = {
    "name": "chat m",
    "context": {"trace_id": "0x01", "span_id": "0x02"},
    "parent_id": None,
    "start_time": "2025-01-31T12:00:00.000000Z",
    "end_time": "2025-01-31T12:00:01.000000Z",
    "attributes": {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 3,
    },
}
LEDGER = {
    "program_id": "p",
    "status": "ended",
    "agent_type": "coder",
    "tenant": "t",
    "parent_program_id": "q",
    "ledger": [
        {
            "turn": 1,
            "outcome": "stopped",
            "arrived_s": 100.0,
            "output_tokens": 20,
            "seconds": {"wall": 2.0},
            "tokens": {"prompt": 339, "device": 160, "new": 179, "lost": {}},
        },
        {
            "turn": 2,
            "outcome": "length",
            "arrived_s": 103.0,
            "output_tokens": 20,
            "seconds": {"wall": 1.0},
            "gap_s": 0.5,
            "tool_before": "bash:cat",
            "tokens": {"prompt": 507, "device": 0, "new": 148, "lost": {"changed": 20}},
        },
    ],
}


def results_example() -> Any:
    return {
        "version": 1,
        "made_with": {"command": "sojourn simulate t", "versions": {"sojourn": "1"}, "machine": {"cores": 2}},
        "runs": [],
    }


def runs_example() -> Any:
    run = {
        "policy": "stock",
        "programs_wanted": 1,
        "hardware": "h",
        "model": "m",
        "trace": "t",
        "seed": 1,
        "loop": "closed",
        "pool_blocks": 10,
        "host_blocks": 0,
        "block_size": 16,
        "virtual_s": 3.0,
        "busy_s": 1.0,
        "steps": 3,
        "scheduler_s": 0.1,
        "wall_s": 0.2,
    }
    return {**results_example(), "runs": [run], "rows": []}


def read_cached_run(data: bytes, folder: Path) -> Any:
    cache, spec = RunCache(folder, code="c"), RunSpec(policy="stock", workload="synthetic:x")
    cache._path(spec).write_bytes(data)
    return cache.get(spec)


def cached_run() -> Any:
    spec = RunSpec(policy="stock", workload="synthetic:x")
    return {
        "spec": asdict(spec),
        "made_of": RunCache("x", code="c")._entry_digest(spec),
        "outcome": {"log": runs_example()["runs"][0]},
    }


def weights_example() -> bytes:
    from safetensors.numpy import save

    return bytes(save({}, {"format": "sojourn-output-lengths", "version": "1", "model": "m"}))


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "text_config": {"num_hidden_layers": 2, "hidden_size": 64},
}


WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "text_config": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
}
HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}


def check_model_config(path: Path) -> Any:
    config = read_model_config(str(path.parent))
    return None if config is None else check_layers("model", config, "expected another model")


def use_model_folder(path: Path) -> Any:
    for folder in (str(path.parent),):
        keeps_block_size(folder)
        known_weights(folder)
        read_dimensions(folder)


RECORDING = gzip.decompress(written(record_life))
HISTORY = written(lambda path: HistoryFile(str(path), 0.0).save(histories_of_a_life()))

FILE_DECODERS: dict[str, Decoder] = {
    "preset": Decoder(
        modules=(
            "sojourn_server/policies/preset_store.py",
            "sojourn_server/policies/toml_document.py",
            "sojourn_server/policies/preset.py",
        ),
        decode=in_file(read_operator_preset, "input.toml"),
        examples=PRESETS,
        refused=(RUNS_A_COMMAND,),
        errors=(PresetError, SettingsError),
    ),
    "cluster preset": Decoder(
        modules=("sojourn_server/policies/cluster_preset.py",),
        decode=in_file(read_cluster_preset, "input.toml"),
        examples=cluster_examples(),
        errors=(PresetError,),
    ),
    "engine profile": Decoder(
        modules=("sojourn_server/policies/costs/engine_profile.py",),
        decode=of_text(use_profile),
        encode=lambda profile: profile.to_toml().encode("utf-8", "surrogateescape"),
        examples=(profile_example().to_toml().encode(),),
        errors=(ValueError,),
    ),
    "plugin settings": Decoder(
        modules=(
            "sojourn_server/vllm/plugin_settings.py",
            "sojourn_server/launch/serve_command.py",
            "sojourn_server/launch/engine_flags.py",
        ),
        decode=read_settings,
        examples=(json_bytes(SETTINGS),),
        documents=(SETTINGS,),
        pack=json_bytes,
        errors=(SettingsError, InvalidOption, PresetError),
    ),
    "configuration file of vLLM": Decoder(
        modules=("sojourn_server/launch/engine_flags.py",),
        decode=in_file(lambda path: read_config_file(str(path)), "input.yaml"),
        examples=(
            b"port: 8123\nenforce-eager: false\nserved-model-name: [a, b]\nadditional-config: {a: {b: 1}}\n",
        ),
        errors=(InvalidOption,),
        large_bytes=1024,  # PyYAML takes the square of the depth; it is the operator's own file
    ),
    "hardware profile": Decoder(
        modules=("sojourn_server/simulator/latency/latency_profiles.py",),
        decode=in_file(lambda path: load_hardware_profile(str(path)), "input.toml"),
        examples=shipped("hardware"),
        errors=(LatencyProfileError,),
    ),
    "model shape": Decoder(
        modules=("sojourn_server/simulator/latency/latency_profiles.py",),
        decode=in_file(use_model, "input.toml"),
        examples=shipped("models"),
        errors=(LatencyProfileError,),
    ),
    "tenants": Decoder(
        modules=("sojourn_server/gateway/http/tenant_keys.py",),
        decode=in_file(lambda path: load_tenant_keys(path, {}).tenant_of("Bearer x") and None),
        examples=(TENANTS,),
        errors=(TenantKeysError,),
    ),
    "Ray configuration": Decoder(
        modules=("sojourn_server/gateway/ray/ray_config.py",),
        decode=in_file(lambda path: read_config(path)),
        encode=lambda config: json_bytes(config.plain()),
        examples=(RAY, RAY_PAIRS),
        large_bytes=1024,
        errors=(RayConfigError,),
    ),
    "model folder": Decoder(
        modules=(
            "sojourn_server/launch/prefill_decode_checks.py",
            "sojourn_server/launch/weights_fingerprint.py",
            "sojourn_server/profiling/offload_break_even.py",
        ),
        decode=in_file(use_model_folder, "config.json"),
        examples=(json_bytes(CONFIG),),
        documents=(CONFIG,),
        pack=json_bytes,
    ),
    "model configuration": Decoder(
        modules=("sojourn_server/launch/model_config.py",),
        decode=in_file(check_model_config, "config.json"),
        examples=(json_bytes(CONFIG), json_bytes(WINDOWS)),
        refused=(json_bytes(HYBRID),),
        documents=(CONFIG, WINDOWS, HYBRID),
        pack=json_bytes,
        errors=(InvalidOption,),
    ),
    "block file": Decoder(
        modules=("sojourn_server/kv_offload/block_file.py",),
        decode=in_file(read_store_file),
        examples=(BLOCK_EXAMPLE,),
        wrap=with_header_checksum,
        errors=(BlockCorrupt,),
    ),
    "block in a store": Decoder(
        modules=("sojourn_server/kv_offload/disk_store.py", "sojourn_server/kv_offload/shared_store.py"),
        decode=open_store_with_block,
        examples=(BLOCK_EXAMPLE,),
        wrap=with_header_checksum,
        errors=(BlockCorrupt, BlockNotFound),
    ),
    "manifest": Decoder(
        modules=("sojourn_server/kv_offload/store_folder.py",),
        decode=open_store_with_manifest,
        examples=(MANIFEST_EXAMPLE,),
        documents=(json.loads(MANIFEST_EXAMPLE),),
        pack=json_bytes,
        errors=(IncompatibleStore,),
    ),
    "vLLM's block": Decoder(
        modules=("sojourn_server/kv_offload/vllm_fs_store.py",),
        decode=read_vllm_block,
        examples=(PAYLOAD + bytes(32),),
        errors=(BlockCorrupt, BlockNotFound, StoreError),
    ),
    "recording": Decoder(
        modules=(
            "sojourn_server/recording/recording_file.py",
            "sojourn_server/recording/record_format.py",
            "sojourn_server/simulator/parity_replay.py",
            "sojourn_server/simulator/recording_player.py",
        ),
        decode=in_file(read_recording),
        examples=(RECORDING,),
        wrap=compressed,
        errors=(RecordingError,),
    ),
    "server history": Decoder(
        modules=(
            "sojourn_server/vllm/history_file.py",
            "sojourn_server/programs/tool_and_turn_history.py",
            "sojourn_server/programs/workflow_history.py",
            "sojourn_server/programs/output_length_history.py",
        ),
        decode=in_file(use_histories),
        examples=(HISTORY,),
        documents=(json.loads(HISTORY),),
        pack=json_bytes,
    ),
    "client history": Decoder(
        modules=("sojourn/learning/history_store.py",),
        decode=in_file(use_client_history),
        examples=(written(write_client_history),),
    ),
    "resume file": Decoder(
        modules=("sojourn/resume_file.py",),
        decode=in_file(lambda path: resume_file.check(str(path))),
        examples=(b"run-1\n", "é\r\n".encode()),
        errors=(ArgumentError,),
    ),
    "trace": Decoder(
        modules=("sojourn_server/traces/trace_file.py", "sojourn_server/traces/trace_schema.py"),
        decode=in_file(use_trace),
        encode=encode_trace,
        examples=(TRACE_TEXT,),
        errors=(TraceError,),
    ),
    "gzipped trace": Decoder(
        modules=("sojourn_server/traces/trace_file.py",),
        decode=in_file(lambda path: list(read_trace(path))),
        examples=(TRACE_TEXT,),
        wrap=compressed,
        errors=(TraceError,),
    ),
    "OpenTelemetry spans": Decoder(
        modules=(
            "sojourn_server/traces/imports/json_records.py",
            "sojourn_server/traces/imports/otel_spans.py",
            "sojourn_server/traces/imports/otel_import.py",
        ),
        decode=in_file(lambda path: read_otel([path])),
        examples=(json_bytes(OTLP), json_bytes(SDK_SPAN), json_bytes(SPANS)),
        documents=(OTLP, SDK_SPAN, SPANS),
        pack=json_bytes,
        errors=(TraceError,),
    ),
    "ledgers": Decoder(
        modules=("sojourn_server/traces/imports/ledger_import.py",),
        decode=in_file(lambda path: read_ledgers([path])),
        examples=(json_bytes(LEDGER), compressed(json_bytes(LEDGER))),
        documents=(LEDGER, {"programs": [LEDGER]}),
        pack=json_bytes,
        errors=(TraceError,),
    ),
    "results": Decoder(
        modules=("sojourn_server/simulator/report/results_file.py",),
        decode=in_file(read_results),
        examples=(json_bytes(results_example()),),
        documents=(results_example(),),
        pack=json_bytes,
        errors=(ResultsError,),
    ),
    "run logs": Decoder(
        modules=("sojourn_server/simulator/report/results_file.py",),
        decode=in_file(load_runs),
        examples=(
            json_bytes(runs_example()),
            msgpack_bytes(runs_example()),
            compressed(msgpack_bytes(runs_example())),
        ),
        documents=(runs_example(),),
        pack=msgpack_bytes,
        errors=(ResultsError,),
    ),
    "cached run": Decoder(
        modules=("sojourn_server/simulator/run_cache.py",),
        decode=read_cached_run,
        examples=(msgpack_bytes(cached_run()),),
        documents=(cached_run(),),
        pack=msgpack_bytes,
        wrap=compressed,
    ),
    "routing state": Decoder(
        modules=(
            "sojourn_server/gateway/http/routing_state_file.py",
            "sojourn_server/routing/routing_snapshot.py",
        ),
        decode=in_file(restore_routing_state),
        examples=(json_bytes(STATE),),
        documents=(STATE,),
        pack=json_bytes,
    ),
    "coordinator checkpoint": Decoder(
        modules=("sojourn_server/gateway/ray/coordinator_checkpoint.py",),
        decode=in_file(restore_checkpoint),
        encode=msgspec.msgpack.encode,
        examples=(msgspec.msgpack.encode(CHECKPOINT),),
        documents=(msgspec.to_builtins(CHECKPOINT),),
        pack=msgpack_bytes,
    ),
    "weights": Decoder(
        modules=("sojourn_server/predictors/weights_format.py",),
        decode=in_file(read_weights_metadata),
        examples=(weights_example(),),
        errors=(WeightsError,),
    ),
}
