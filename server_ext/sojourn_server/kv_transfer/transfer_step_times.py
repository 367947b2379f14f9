"""How long computing stood still for KV on its way, and how long that took to come."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class TransferStepTimes:
    """Seconds, of one step or summed over many."""

    waited_s: float = 0.0
    """Computing stood still until a layer of what is loaded had come."""
    copied_s: float = 0.0
    """It stood still while layers that had come were copied into blocks."""
    streamed_s: float = 0.0
    """Over which layers came in, from a load's first layer to its last, summed over loads. What is read from
    storage here comes in whole blocks, all layers at once, and adds nothing."""
    gathered_s: float = 0.0
    """Over which layers were copied out of blocks to be pushed, beside the computing."""
    push_waited_s: float = 0.0
    """Steps stood still at their end until that was done."""

    def add(self, other: TransferStepTimes) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __bool__(self) -> bool:
        return bool(
            self.waited_s or self.copied_s or self.streamed_s or self.gathered_s or self.push_waited_s
        )
