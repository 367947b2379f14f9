"""The nodes of DualPath's testbed (§7.2), and the one number that was fitted to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .prefill_decode_models import PdModel

CALIBRATED_EFFICIENCY = 0.31
"""Share of its FLOP peak that a prefill device achieves, all told: what makes DualPath on 2P4D with 2,000
agents of the 64K workload take the 3,167 s of the paper's Table 3. Nothing else is fitted to the paper."""
CALIBRATION_JCT_S = 3167.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PdMachine:
    """A node and its devices. Raises ``ValueError`` for what is not finite and above 0.

    The paper says "Hopper"; Qwen2.5-32B in FP16 on one device with contexts of 64K leaves only those with
    141 GB. Peak and bandwidth are the H200's data sheet.
    """

    devices: int = 8
    storage_nic_bytes_per_s: float = 50e9
    """400 Gbit/s a node, each way; the storage behind it saturates that (§7.2)."""
    compute_nic_bytes_per_s: float = 50e9
    """400 Gbit/s a device, each way."""
    buffer_bytes: float = 80e9
    """A node's DRAM for KV on its way (A.4)."""
    device_flops_per_s: float = 989e12
    device_memory_bytes: float = 141e9
    device_bytes_per_s: float = 4.8e12
    efficiency: float = CALIBRATED_EFFICIENCY
    read_efficiency: float = 0.7
    """Of the device's bandwidth, decode attention."""
    memory_share: float = 0.9
    """Of the device's memory that an engine may use, as vLLM has it."""
    activation_bytes: float = 5e9
    collective_share: float = 0.3
    """Of a step, while devices exchange tokens and the compute network is the model's own. Chosen."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; expected finite and above 0")

    @property
    def flops_per_s(self) -> float:
        """What a prefill device achieves."""
        return self.device_flops_per_s * self.efficiency

    def prefill_kv_tokens(self, model: PdModel) -> int:
        """KV that a prefill device has room for. Raises ``ValueError`` where its weights leave none."""
        return self._kv_tokens(model, model.prefill_weight_bytes)

    def decode_kv_tokens(self, model: PdModel) -> int:
        """The same of a decode device."""
        return self._kv_tokens(model, model.decode_weight_bytes)

    def buffer_tokens(self, model: PdModel) -> int:
        """KV that a node's DRAM buffer has room for."""
        return int(self.buffer_bytes / model.kv_bytes_per_token)

    def _kv_tokens(self, model: PdModel, weight_bytes: float) -> int:
        free = self.device_memory_bytes * self.memory_share - weight_bytes - self.activation_bytes
        tokens = int(free / model.kv_bytes_per_token)
        if tokens < 1:
            raise ValueError(
                f"{model.name} leaves {free / 1e9:.1f} GB of {self.device_memory_bytes / 1e9:.0f} GB for KV; "
                "expected room for a token at least"
            )
        return tokens
