"""The part ``roofline`` of ``kit.py``: measures a CUDA device and writes a profile for ``sojourn simulate``.

Shapes are Llama-3.1-8B's: random bf16 weights, one layer at a time, captured in a CUDA graph as vLLM does,
so that launching from Python is not measured. An efficiency is a share of the data sheet's FLOP peak or
bandwidth. The profile has

    linear_efficiency        FLOPs of a layer without attention at many tokens
    weight_read_efficiency   bandwidth of that layer's GEMMs at one token
    layer_overhead_s         the rest of that layer's time at one token
    attention_efficiency     FLOPs of causal attention over 2,048 tokens and more
    kv_read_efficiency       bandwidth of decode attention over contexts with contiguous KV (vLLM's is paged)
    host_to_device, device_to_host   pinned copies in blocks of 2 MB, the size of vLLM's offloading

Constants that one device without an engine cannot show (steps, requests, experts, all-reduce) are taken from
``--base``. Needs torch and this repository's ``server_ext``; nothing is installed or downloaded.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "server_ext"))
# The SDK's package needs msgspec, which a bare GPU machine lacks. The SDK's module with errors needs no
# package.
_sdk = ModuleType("sojourn")
_sdk.__path__ = [str(ROOT / "sdk" / "sojourn")]
sys.modules.setdefault("sojourn", _sdk)

from sojourn_server.simulator.latency.latency_profiles import (  # noqa: E402
    HardwareProfile,
    LatencyProfileError,
    ModelShape,
    load_hardware_profile,
    load_model_shape,
)

BASES = {"A100": "a100-80gb", "H100": "h100", "H200": "h200", "B200": "b200"}
"""Part of CUDA's device name → shipped profile of that device."""
BLOCK_BYTES = 2 * 2**20
"""Bytes per copy. vLLM stores a KV block of all layers contiguously, which is 2 MB for Llama-3.1-8B."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes to measure."""

    tokens: tuple[int, ...]
    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    """(requests, context tokens) of each decode measurement."""
    copy_blocks: int
    repeats: int


FULL = Plan(
    tokens=(1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    prompts=(512, 1024, 2048, 4096, 8192, 16384, 32768),
    decodes=tuple((b, c) for b in (1, 8, 32, 128) for c in (1024, 8192, 32768) if b * c <= 2**21),
    copy_blocks=256,
    repeats=20,
)
SMOKE = Plan(tokens=(1, 8, 64), prompts=(16, 64), decodes=((1, 32), (2, 64)), copy_blocks=2, repeats=3)
SMOKE_MODEL = ModelShape(
    name="smoke",
    source="made up",
    layers=2,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate_size=128,
    vocabulary=128,
    max_context_tokens=256,
)


class Bench:
    """Times functions on one device: median seconds of several runs, replayed as a graph on CUDA."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16

    def tensor(self, *shape: int) -> torch.Tensor:
        """Return a tensor of random values that are small enough to avoid overflow."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(0.02).to(self.dtype)

    def seconds(self, run: Callable[[], Any], *, graph: bool = True) -> float:
        """Return the median seconds of one call of ``run``."""
        for _ in range(3):
            run()
        if not self.cuda:
            return self._wall(run)
        torch.cuda.synchronize()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            run = captured.replay
            run()
        times: list[float] = []
        for _ in range(self.repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return statistics.median(times)

    def _wall(self, run: Callable[[], Any]) -> float:
        times: list[float] = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return max(statistics.median(times), 1e-9)


class Layer:
    """One transformer layer without attention. As in vLLM, QKV are fused, and gate and up are fused."""

    def __init__(self, bench: Bench, model: ModelShape) -> None:
        self.model = model
        width = model.head_size * (model.heads + 2 * model.kv_heads)
        self.qkv = bench.tensor(width, model.hidden_size)
        self.out = bench.tensor(model.hidden_size, model.heads * model.head_size)
        self.gate_up = bench.tensor(2 * model.intermediate_size, model.hidden_size)
        self.down = bench.tensor(model.hidden_size, model.intermediate_size)
        self.norm = bench.tensor(model.hidden_size)
        self.cos, self.sin = bench.tensor(1, model.head_size), bench.tensor(1, model.head_size)

    def gemms(self, hidden: torch.Tensor, attended: torch.Tensor, inner: torch.Tensor) -> None:
        """Compute the four projections alone."""
        functional.linear(hidden, self.qkv)
        functional.linear(attended, self.out)
        functional.linear(hidden, self.gate_up)
        functional.linear(inner, self.down)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the layer without attention. The queries stand in for the output of attention."""
        model = self.model
        normed = functional.rms_norm(hidden, (model.hidden_size,), self.norm)
        projected = functional.linear(normed, self.qkv)
        rotated = projected[:, : model.head_size * (model.heads + model.kv_heads)]
        rotated = rotated.reshape(hidden.shape[0], -1, model.head_size)
        half = torch.cat((-rotated[..., model.head_size // 2 :], rotated[..., : model.head_size // 2]), -1)
        rotated = rotated * self.cos + half * self.sin
        attended = rotated[:, : model.heads].reshape(hidden.shape[0], -1)
        hidden = hidden + functional.linear(attended, self.out)
        normed = functional.rms_norm(hidden, (model.hidden_size,), self.norm)
        gate, up = functional.linear(normed, self.gate_up).chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate) * up, self.down)


def measure_layer(bench: Bench, model: ModelShape, plan: Plan) -> list[dict[str, float]]:
    """Return the seconds of one layer and of its projections alone, for each number of tokens."""
    layer = Layer(bench, model)
    rows: list[dict[str, float]] = []
    for tokens in plan.tokens:
        hidden = bench.tensor(tokens, model.hidden_size)
        attended = bench.tensor(tokens, model.heads * model.head_size)
        inner = bench.tensor(tokens, model.intermediate_size)
        layer_s = bench.seconds(lambda h=hidden: layer.forward(h))
        gemm_s = bench.seconds(lambda h=hidden, a=attended, i=inner: layer.gemms(h, a, i))
        rows.append({"tokens": tokens, "layer_s": layer_s, "gemm_s": gemm_s})
    return rows


def measure_prefill_attention(bench: Bench, model: ModelShape, plan: Plan) -> list[dict[str, float]]:
    """Return the seconds of one layer's causal attention, for each length of a whole prompt."""
    rows: list[dict[str, float]] = []
    group = model.heads // model.kv_heads
    for tokens in plan.prompts:
        query = bench.tensor(1, model.heads, tokens, model.head_size)
        key, value = (
            bench.tensor(1, model.kv_heads, tokens, model.head_size).repeat_interleave(group, 1)
            for _ in range(2)
        )
        attention_s = bench.seconds(
            lambda q=query, k=key, v=value: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        rows.append({"tokens": tokens, "pairs": tokens * (tokens + 1) // 2, "attention_s": attention_s})
    return rows


def measure_decode_attention(bench: Bench, model: ModelShape, plan: Plan) -> list[dict[str, float]]:
    """Return the seconds of one layer's attention for one new token of each of several requests.

    Queries that share a KV head are computed together, so that KV is read once, as in engines.
    """
    rows: list[dict[str, float]] = []
    group = model.heads // model.kv_heads
    for requests, context in plan.decodes:
        query = bench.tensor(requests, model.kv_heads, group, model.head_size)
        key, value = (bench.tensor(requests, model.kv_heads, context, model.head_size) for _ in range(2))
        attention_s = bench.seconds(
            lambda q=query, k=key, v=value: functional.scaled_dot_product_attention(q, k, v)
        )
        kv_bytes = 2 * requests * model.kv_heads * context * model.head_size * 2
        rows.append(
            {"requests": requests, "context": context, "kv_bytes": kv_bytes, "attention_s": attention_s}
        )
    return rows


def measure_copies(bench: Bench, plan: Plan) -> dict[str, float]:
    """Return the bytes per second of copies between pinned host memory and device: each direction alone, and
    both at once."""
    size = plan.copy_blocks * BLOCK_BYTES
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=bench.cuda) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2)]
    blocks = [slice(start, start + BLOCK_BYTES) for start in range(0, size, BLOCK_BYTES)]

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for block in blocks:
            target[block].copy_(source[block], non_blocking=True)

    found = {
        "host_to_device_bytes_per_s": size / bench.seconds(lambda: copy(device[0], host[0]), graph=False),
        "device_to_host_bytes_per_s": size / bench.seconds(lambda: copy(host[1], device[1]), graph=False),
        "copy_overhead_s": bench.seconds(
            lambda: host[0][:1].copy_(device[0][:1], non_blocking=True), graph=False
        ),
    }
    if bench.cuda:
        lanes = [torch.cuda.Stream(), torch.cuda.Stream()]

        def both() -> None:
            current = torch.cuda.current_stream()
            for lane, target, source in zip(lanes, (device[0], host[1]), (host[0], device[1]), strict=True):
                lane.wait_stream(current)
                with torch.cuda.stream(lane):
                    copy(target, source)
            for lane in lanes:
                current.wait_stream(lane)

        found["both_ways_bytes_per_s"] = 2 * size / bench.seconds(both, graph=False)
    return found


def constants(
    base: HardwareProfile,
    model: ModelShape,
    layers: list[dict[str, float]],
    prefills: list[dict[str, float]],
    decodes: list[dict[str, float]],
    copies: dict[str, float],
    memory_bytes: float | None,
) -> dict[str, float]:
    """Return the profile's constants that follow from the measurements."""
    parameters = model.attention_parameters + model.mlp_parameters
    most = max(row["tokens"] for row in layers)
    many = [row for row in layers if row["tokens"] >= min(4096, most)]
    one = next(row for row in layers if row["tokens"] == 1)
    long = [row for row in prefills if row["tokens"] >= min(2048, max(p["tokens"] for p in prefills))]
    wide = [row for row in decodes if row["kv_bytes"] >= max(d["kv_bytes"] for d in decodes) / 16]
    pair_flops = 4 * model.heads * model.head_size
    bandwidth = base.memory_bandwidth_bytes_per_s
    linear = statistics.median(2 * parameters * row["tokens"] / row["layer_s"] for row in many)
    attention = statistics.median(pair_flops * row["pairs"] / row["attention_s"] for row in long)
    kv_read = statistics.median(row["kv_bytes"] / row["attention_s"] for row in wide)
    weight_read = parameters * model.weight_bytes / one["gemm_s"]
    found = {
        "linear_efficiency": linear / base.bf16_flops_per_s,
        "attention_efficiency": attention / base.bf16_flops_per_s,
        "weight_read_efficiency": weight_read / bandwidth,
        "kv_read_efficiency": kv_read / bandwidth,
        "layer_overhead_s": max(0.0, one["layer_s"] - one["gemm_s"]),
        **{name: value for name, value in copies.items() if name != "both_ways_bytes_per_s"},
    }
    if memory_bytes is not None:
        found["memory_bytes"] = memory_bytes
    # Caches can beat a data sheet at small shapes; a profile takes no fraction above 1.
    return {
        name: min(1.0, max(1e-6, value)) if name.endswith("_efficiency") else value
        for name, value in found.items()
    }


def profile_toml(
    name: str, title: str, base: HardwareProfile, measured: dict[str, float], provenance: dict[str, str]
) -> str:
    """Return a hardware profile as TOML: ``measured`` constants, and those of ``base`` for all others. Each
    constant has its source."""
    lines = ["version = 1", f"name = {json.dumps(name)}", f"title = {json.dumps(title)}", "", "[measured]"]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in provenance.items()]
    for constant, source in base.sources:
        value = measured.get(constant, getattr(base, constant))
        if constant in measured:
            source = f"measured by benchmarks/gpu/roofline.py, see [measured]; {base.name} has " + (
                f"{getattr(base, constant):g}"
            )
        lines += ["", f"[{constant}]", f"value = {float(value)!r}"]
        lines.append(f"source = {json.dumps(source, ensure_ascii=False)}")
        if constant not in measured and constant in base.estimates:
            lines.append("estimate = true")
    return "\n".join(lines) + "\n"


def measure(output: Path, base_name: str | None, smoke: bool) -> dict[str, Any]:
    """Measure, print the constants and write the profile ``output``. Returns the curves, their constants and,
    under ``shipped``, those of the data sheet's profile: ``base_name``, a shipped profile or a
    file; ``None``: the device's. ``smoke``: tiny shapes on the CPU, whose figures mean nothing."""
    title = "smoke test on a CPU: not a measurement" if smoke else torch.cuda.get_device_name(0)
    guessed = "h100" if smoke else next((base for part, base in BASES.items() if part in title), None)
    if base_name is None and guessed is None:
        raise LatencyProfileError(f"no data sheet known for {title!r}; name one: --base NAME or FILE.toml")
    base = load_hardware_profile(base_name or guessed or "")
    plan = SMOKE if smoke else FULL
    model = SMOKE_MODEL if smoke else load_model_shape("llama-3.1-8b")
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = Bench(torch.device("cpu" if smoke else "cuda"), plan.repeats)
        layers = measure_layer(bench, model, plan)
        prefills = measure_prefill_attention(bench, model, plan)
        decodes = measure_decode_attention(bench, model, plan)
        copies = measure_copies(bench, plan)
    memory_bytes = None if smoke else float(torch.cuda.mem_get_info()[1])
    measured = constants(base, model, layers, prefills, decodes, copies, memory_bytes)
    provenance = {
        "device": title,
        "at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "shape": model.name,
        "data_sheet": base.name,
    }
    for name, value in measured.items():
        print(f"{name:30} {value:12.5g}   {base.name}: {getattr(base, name):.5g}")
    name = "smoke" if smoke else "measured"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(profile_toml(name, title, base, measured, provenance), encoding="utf-8")
    load_hardware_profile(str(output))  # raises an error for a profile that it rejects
    return {
        "measured": provenance,
        "constants": measured,
        "shipped": {name: getattr(base, name) for name in measured},
        "layer": layers,
        "prefill_attention": prefills,
        "decode_attention": decodes,
        "copies": copies,
    }
