"""Hardware profiles and model shapes, read from TOML files: shipped ones by name, the user's own by path.

The fields of ``HardwareProfile`` and ``ModelShape`` define which fields a file may have; a field with a
default is optional. A hardware profile has one table per constant::

    [memory_bandwidth_bytes_per_s]
    value = 2.039e12
    source = "NVIDIA A100 80GB data sheet: 2,039 GB/s"
    estimate = true        # only if the value was chosen, not published or measured
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from sojourn.errors import InputError

from ...policies.toml_document import TomlError, did_you_mean, load_toml

SHIPPED_PROFILES = Path(__file__).parent / "profiles"
RUNTIME_BYTES = 1.0 * 2**30
"""Estimated device bytes of CUDA context, NCCL and captured graphs. vLLM's start-up logs show 0.5–1.5 GiB."""


class LatencyProfileError(InputError):
    """A missing or invalid profile; the message names file and field, and the expected value."""


def shipped_profile_names(kind: str) -> list[str]:
    """Names of the shipped profiles of a ``kind`` (``hardware`` or ``models``), sorted."""
    return sorted(path.stem for path in (SHIPPED_PROFILES / kind).glob("*.toml"))


def is_profile_path(name: str) -> bool:
    """Whether ``name`` is the path of a user's file, not the name of a shipped profile."""
    return name.endswith(".toml") or "/" in name or Path(name).is_file()


def _read_profile(name: str, kind: str, fields: Iterable[str]) -> tuple[Path, dict[str, Any]]:
    """Path and content of a shipped profile, or of the user's own."""
    path, known = Path(name), shipped_profile_names(kind)
    if not is_profile_path(name):
        if name not in known:
            near = [other for other in known if name and other.startswith(name.lower())][:1]
            hint = did_you_mean(near[0], near) if near else did_you_mean(name.lower(), known)
            noun = "model" if kind == "models" else kind
            raise LatencyProfileError(
                f"unknown {noun} {name!r}; expected one of {', '.join(known)}, or a TOML file{hint}"
            )
        path = SHIPPED_PROFILES / kind / f"{name}.toml"
    document = read_profile_toml(path)
    _reject_unknown_fields(path, document, [*fields])
    return path, document


def read_profile_toml(path: Path) -> dict[str, Any]:
    """Read and parse a TOML file. Raises ``LatencyProfileError``."""
    try:
        return load_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LatencyProfileError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, TomlError) as error:
        raise LatencyProfileError(f"{path}: {error}") from error


# Checked by hand: benchmarks/gpu/roofline.py imports this module on GPU machines without msgspec.


def _reject_unknown_fields(path: Path, found: Mapping[str, Any], known: list[str]) -> None:
    """Raise ``LatencyProfileError`` for unknown fields, because a misspelt one would keep its default."""
    for key in found:
        if key not in known:
            hint = did_you_mean(key, known) or f"; expected {', '.join(known)}"
            raise LatencyProfileError(f"{path}: unknown field {key!r}{hint}")


def _checked(path: Path, where: str, value: Any, kind: Any, least: float = -1e30, most: float = 1e30) -> Any:
    """Return ``value`` if it is of ``kind`` and, if a number, in [least, most]. Otherwise raise
    ``LatencyProfileError`` with the file, ``path``, and the field, ``where``."""
    nouns = {"str": "a text", "float": "a number", "int": "a whole number", "bool": "true or false"}
    types: dict[Any, Any] = {"str": str, "float": (int, float), "int": int, "bool": bool}
    fits = isinstance(value, types[kind]) and isinstance(value, bool) == (kind == "bool")
    if fits and (value != "" if isinstance(value, str) else least <= value <= most):
        return float(value) if kind == "float" else value
    bounds = "" if least == -1e30 else f" ≥ {least:g}" if most == 1e30 else f" from {least:g} to {most:g}"
    raise LatencyProfileError(f"{path}: {where} is {value!r}; expected {nouns[kind]}{bounds}")


HARDWARE_VERSION = 1

DISK_READ_BYTES_PER_S = 6.5e9
DISK_WRITE_BYTES_PER_S = 3.5e9
DISK_SOURCE = (
    "one PCIe 4 drive, Samsung PM9A3 (U.2) as announced: 6.5 GB/s read, 3.5 GB/s written in sequence"
)
"""Source of the two disk rates above. They apply to engine profiles, and to hardware profiles without disk
rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Constants of a device and its links. An efficiency is the fraction of a published peak (bf16 FLOP/s or
    memory bandwidth) that kernels reach."""

    name: str
    title: str
    memory_bytes: float
    """Total memory as CUDA reports it, which is less than the rounded value of the data sheet."""
    bf16_flops_per_s: float
    """Published bf16 peak of the tensor cores for dense matrices."""
    memory_bandwidth_bytes_per_s: float
    linear_efficiency: float
    """Fraction of the FLOP/s peak in the linear layers (all but attention), with many tokens."""
    expert_efficiency: float
    """Fraction of the FLOP/s peak in the experts of a mixture: grouped GEMMs of few tokens each."""
    attention_efficiency: float
    """Fraction of the FLOP/s peak in prefill attention. Only query-key pairs inside the causal mask count."""
    weight_read_efficiency: float
    """Fraction of the peak memory bandwidth in GEMMs of few tokens, which mostly read weights."""
    kv_read_efficiency: float
    """Fraction of the peak memory bandwidth in decode attention over a paged KV cache."""
    layer_overhead_s: float
    """Fixed seconds of a layer, spent in small kernels even if there is almost no work."""
    step_overhead_s: float
    """Seconds the device idles between two steps, for scheduling, input preparation and sampling."""
    request_overhead_s: float
    """Seconds that each request of a step adds to ``step_overhead_s``."""
    host_to_device_bytes_per_s: float
    """Copy rate of one device from pinned memory, in one direction at a time."""
    device_to_host_bytes_per_s: float
    copy_overhead_s: float
    """Latency of a copy before its first byte."""
    all_reduce_bytes_per_s: float
    """Bus bandwidth of an all-reduce of many bytes over NVLink (NCCL's convention: 2·(n-1)/n·bytes/time)."""
    all_reduce_overhead_s: float
    """Seconds of an all-reduce of few bytes."""
    max_num_seqs: float
    """vLLM's default for the API server on this device."""
    max_num_batched_tokens: float
    """vLLM's default for the API server on this device."""
    disk_read_bytes_per_s: float = DISK_READ_BYTES_PER_S
    """Sequential read rate of the machine's disk, which all devices share."""
    disk_write_bytes_per_s: float = DISK_WRITE_BYTES_PER_S
    sources: tuple[tuple[str, str], ...] = ()
    """(Name of a constant, source of its value)."""
    estimates: tuple[str, ...] = ()
    """Names of constants whose value was chosen, not published or measured. Disk rates that the profile
    leaves out are among them."""


_CONSTANTS = [field for field in fields(HardwareProfile) if field.type == "float"]


def load_hardware_profile(name: str) -> HardwareProfile:
    """Load a shipped hardware profile by name, or the user's own by path. Raises ``LatencyProfileError``."""
    known = [field.name for field in _CONSTANTS]
    path, document = _read_profile(name, "hardware", ["version", "name", "title", "measured", *known])
    if document.get("version") != HARDWARE_VERSION:
        raise LatencyProfileError(
            f"{path}: version is {document.get('version')!r}; expected {HARDWARE_VERSION}"
        )
    values: dict[str, Any] = {
        name: _checked(path, name, document.get(name), "str") for name in ("name", "title")
    }
    sources: list[tuple[str, str]] = []
    estimates: list[str] = []
    for field in _CONSTANTS:
        constant, entry = field.name, document.get(field.name)
        if entry is None and field.default is not MISSING:  # older profiles lack disk rates
            sources.append((constant, DISK_SOURCE))
            estimates.append(constant)
            continue
        if not isinstance(entry, dict):
            raise LatencyProfileError(f"{path}: [{constant}] is {entry!r}; expected value and source")
        _reject_unknown_fields(path, entry, ["value", "source", "estimate"])
        least, most = 1.0, 1e30
        if constant.endswith("_efficiency"):
            least, most = 1e-6, 1.0
        elif constant.endswith("_overhead_s"):
            least, most = 0.0, 10.0
        values[constant] = _checked(path, f"{constant}.value", entry.get("value"), "float", least, most)
        sources.append((constant, _checked(path, f"{constant}.source", entry.get("source"), "str")))
        if entry.get("estimate", False):
            estimates.append(constant)
    return HardwareProfile(**values, sources=tuple(sources), estimates=tuple(estimates))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated MLPs, dense or mixture of experts."""

    name: str
    source: str
    """Source of the numbers."""
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    """Width of the dense MLP, or of one expert if ``experts`` > 0."""
    vocabulary: int
    max_context_tokens: int
    experts: int = 0
    """Number of experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    tied_embeddings: bool = False
    """Whether output head and input embedding share one matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False
    weight_bytes: float = 2.0
    """Bytes per parameter: 2 for bf16."""
    kv_element_bytes: float = 2.0

    # Parameter counts. Biases and norms are counted only to make the total exact.

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's four projections."""
        return self.hidden_size * self.head_size * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the gate, up and down projections of one MLP or expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, including all experts, the router, norms and biases."""
        norms = 2 * self.hidden_size + (2 * self.head_size if self.qk_norm else 0)
        biases = self.head_size * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        router = self.hidden_size * self.experts
        return (
            self.attention_parameters + self.mlp_parameters * max(1, self.experts) + router + norms + biases
        )

    @property
    def head_parameters(self) -> int:
        """Parameters of the matrix from hidden states to logits."""
        return self.hidden_size * self.vocabulary

    @property
    def parameters(self) -> int:
        """Total parameters, as on the model's Hugging Face page."""
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden_size

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of one layer that one token uses."""
        if not self.experts:
            return self.attention_parameters + self.mlp_parameters
        router = self.hidden_size * self.experts
        return self.attention_parameters + self.mlp_parameters * self.experts_per_token + router

    @property
    def weights_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.weight_bytes

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """KV bytes of one token: K and V of all layers, summed over all ``tp`` devices. If there are fewer
        heads than devices, each device has a copy of one head, as in vLLM."""
        heads = max(1, self.kv_heads // tp) * tp
        return round(2 * self.layers * heads * self.head_size * self.kv_element_bytes)

    def splits(self, tp: int) -> bool:
        """Whether vLLM can split the heads over ``tp`` devices. ``tp`` must divide the number of query heads.
        It must also divide the number of KV heads, or be a multiple of it; with a multiple, several devices
        have a copy of the same KV head."""
        return tp >= 1 and self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def check_tp(self, tp: int) -> None:
        """Raise ``LatencyProfileError`` if vLLM cannot split the model over ``tp`` devices."""
        if not self.splits(tp):
            possible = [n for n in range(1, self.heads + 1) if self.splits(n)]
            raise LatencyProfileError(
                f"tp is {tp}; {self.name} has {self.heads} heads and {self.kv_heads} KV heads: "
                f"expected one of {', '.join(map(str, possible))}"
            )


def load_model_shape(name: str) -> ModelShape:
    """Load a shipped model by name, or the user's own by path. Raises ``LatencyProfileError``."""
    path, document = _read_profile(name, "models", [field.name for field in fields(ModelShape)])
    values: dict[str, Any] = {}
    bounds = {"float": (0.1, 8.0), "int": (1,)}
    for field in fields(ModelShape):
        found = document.get(field.name, None if field.default is MISSING else field.default)
        limits = (0,) if field.name.startswith("experts") else bounds.get(str(field.type), ())
        values[field.name] = _checked(path, field.name, found, field.type, *limits)
    model = ModelShape(**values)
    if model.heads % model.kv_heads:
        raise LatencyProfileError(
            f"{path}: kv_heads is {model.kv_heads}; expected a divisor of heads, {model.heads}"
        )
    if bool(model.experts) != bool(model.experts_per_token) or model.experts_per_token > model.experts:
        raise LatencyProfileError(
            f"{path}: experts is {model.experts} and experts_per_token {model.experts_per_token}; "
            "expected both 0, or experts ≥ experts_per_token ≥ 1"
        )
    return model
