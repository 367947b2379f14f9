"""How many nodes of which machine serve which model, and by which rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .prefill_decode_machine import PdMachine
from .prefill_decode_models import PdModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PdCluster:
    """How many nodes of which machine serve which model. Raises ``ValueError``."""

    prefill_nodes: int
    decode_nodes: int
    model: PdModel
    machine: PdMachine = field(default_factory=PdMachine)
    isolated: bool = True
    """Traffic classes: KV takes what the model leaves of the compute network. False: they share a lane."""
    short_queue_s: float = 3.0
    """α."""
    most_tokens_s: float = 5.0
    """β, as seconds of what a prefill device works off of this load."""
    quota_s: float = 0.3
    """Of attention in a prefill step, for all systems alike."""
    step_tokens: int | None = None
    """New tokens of a prefill device in a step instead; ``None``: the quota bounds it."""

    def __post_init__(self) -> None:
        if self.prefill_nodes < 1 or self.decode_nodes < 1:
            raise ValueError(
                f"{self.prefill_nodes} prefill and {self.decode_nodes} decode nodes; expected one at least"
            )
        if self.step_tokens is not None and self.step_tokens < 1:
            raise ValueError(f"step_tokens is {self.step_tokens}; expected at least 1")
        for name in ("short_queue_s", "most_tokens_s", "quota_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected finite and above 0")
        self.machine.prefill_kv_tokens(self.model)
        self.machine.decode_kv_tokens(self.model)

    @property
    def name(self) -> str:
        """As the paper has it: 2P4D."""
        return f"{self.prefill_nodes}P{self.decode_nodes}D"

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return (self.prefill_nodes + self.decode_nodes) * self.machine.devices
