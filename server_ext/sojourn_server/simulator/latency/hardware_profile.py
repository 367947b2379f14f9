"""An accelerator as the roofline sees it. Every constant comes with its source; guesses say so.

A profile is a TOML file with one table a constant::

    [memory_bandwidth_bytes_per_s]
    value = 2.039e12
    source = "NVIDIA A100 80GB data sheet: 2,039 GB/s"
    estimate = true        # only where the value was chosen, not published or measured
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from .latency_profile_files import (
    LatencyProfileError,
    find_profile_file,
    parse_number,
    parse_text,
    read_profile_toml,
    reject_unknown_fields,
)

HARDWARE_VERSION = 1

DISK_READ_BYTES_PER_S = 6.5e9
DISK_WRITE_BYTES_PER_S = 3.5e9
DISK_SOURCE = (
    "one PCIe 4 drive, Samsung PM9A3 (U.2) as announced: 6.5 GB/s read, 3.5 GB/s written in sequence"
)
"""Of a profile that says nothing of a disk, and of engine profiles, which measure none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One device and its links. Efficiencies are fractions of the published peak that real kernels reach."""

    name: str
    title: str
    memory_bytes: float
    """What CUDA reports as total, less than what the data sheet rounds to."""
    bf16_flops_per_s: float
    """Dense tensor-core peak."""
    memory_bandwidth_bytes_per_s: float
    linear_efficiency: float
    """Of the FLOP peak: all of a layer but attention, for many tokens."""
    expert_efficiency: float
    """The same for the experts of a mixture: grouped GEMMs over few tokens each."""
    attention_efficiency: float
    """Of the FLOP peak: prefill attention, causal pairs counted once."""
    weight_read_efficiency: float
    """Of the bandwidth peak: GEMMs of few tokens, which only read weights."""
    kv_read_efficiency: float
    """Of the bandwidth peak: decode attention over a paged KV cache."""
    layer_overhead_s: float
    """A layer's small kernels at one token: what remains when the work goes to nothing."""
    step_overhead_s: float
    """Between two steps: scheduling, input preparation and sampling that the device waits for."""
    request_overhead_s: float
    """The same, for each request in the step."""
    host_to_device_bytes_per_s: float
    """Pinned memory, one device, one direction at a time."""
    device_to_host_bytes_per_s: float
    copy_overhead_s: float
    """Before the first byte of a copy."""
    all_reduce_bytes_per_s: float
    """Bus bandwidth of an all-reduce of many bytes over NVLink (NCCL's convention: 2·(n-1)/n·bytes/time)."""
    all_reduce_overhead_s: float
    """An all-reduce of few bytes."""
    max_num_seqs: float
    """vLLM's default for the API server on this device."""
    max_num_batched_tokens: float
    """The same."""
    disk_read_bytes_per_s: float = DISK_READ_BYTES_PER_S
    """Of the machine, however many devices are in it; files of a block each, one after the other."""
    disk_write_bytes_per_s: float = DISK_WRITE_BYTES_PER_S
    sources: tuple[tuple[str, str], ...] = ()
    """(constant, where it is from)"""
    estimates: tuple[str, ...] = ()
    """Constants whose value was chosen, not published or measured."""


_FRACTIONS = frozenset(field.name for field in fields(HardwareProfile) if field.name.endswith("_efficiency"))
_CONSTANTS = [
    field.name
    for field in fields(HardwareProfile)
    if field.name not in ("name", "title", "sources", "estimates")
]
_OPTIONAL = frozenset(
    field.name
    for field in fields(HardwareProfile)
    if field.name in _CONSTANTS and field.default is not MISSING
)
"""Profiles from before there were disks do without."""


def load_hardware_profile(name: str) -> HardwareProfile:
    """A shipped profile by name, or the user's own from a TOML file. Raises ``LatencyProfileError``."""
    path = find_profile_file(name, "hardware")
    return parse_hardware_profile(read_profile_toml(path), path)


def parse_hardware_profile(document: dict[str, Any], path: Path) -> HardwareProfile:
    """A profile's document; ``path`` is for messages. Raises ``LatencyProfileError``."""
    if document.get("version") != HARDWARE_VERSION:
        raise LatencyProfileError(
            f"{path}: version is {document.get('version')!r}; expected {HARDWARE_VERSION}"
        )
    reject_unknown_fields(path, document, ["version", "name", "title", "measured", *_CONSTANTS])
    values: dict[str, Any] = {
        "name": parse_text(path, "name", document.get("name")),
        "title": parse_text(path, "title", document.get("title")),
    }
    sources: list[tuple[str, str]] = []
    estimates: list[str] = []
    for constant in _CONSTANTS:
        entry = document.get(constant)
        if entry is None and constant in _OPTIONAL:
            sources.append((constant, DISK_SOURCE))
            estimates.append(constant)
            continue
        if not isinstance(entry, dict):
            raise LatencyProfileError(
                f"{path}: [{constant}] is {entry!r}; expected a table with value and source"
            )
        reject_unknown_fields(path, entry, ["value", "source", "estimate"])
        values[constant] = _constant(path, constant, entry.get("value"))
        sources.append((constant, parse_text(path, f"{constant}.source", entry.get("source"))))
        if entry.get("estimate", False):
            estimates.append(constant)
    return HardwareProfile(**values, sources=tuple(sources), estimates=tuple(estimates))


def _constant(path: Path, name: str, value: Any) -> float:
    where = f"{name}.value"
    if name in _FRACTIONS:
        return parse_number(path, where, value, least=1e-6, most=1.0)
    if name.endswith("_overhead_s"):
        return parse_number(path, where, value, most=10.0)
    return parse_number(path, where, value, least=1.0)
